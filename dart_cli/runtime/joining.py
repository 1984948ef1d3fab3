"""Join a run: a process sends its settings, and the data service compares them with its own.

Joining   sends the settings to each data service that starts, and raises an error if they are refused
"""

from __future__ import annotations

import asyncio
import logging

from bus.errors import DartError, DeadlineError, ProtocolError, UserError
from bus.messages import JoinReply, JoinRequest, Role
from bus.requests import Requester
from dart_cli.config import endpoints
from dart_cli.config.readers import Settings
from dart_cli.config.schema import Config
from dart_cli.runtime.role import how_started

log = logging.getLogger(__name__)

WHAT = "the data service to accept its settings"
"""The name of the wait until a process has joined."""
RETRY_S = 1.0
"""Seconds of pause after an error, such as one of the data service's database."""


class Joining:
    """The part of a process that joins its run, and joins again when another data service has started."""

    def __init__(self, config: Config, role: Role, worker: str, data_service: Requester) -> None:
        """Prepare the request for the data service, to which `data_service` connects. `keep` sends it."""
        settings, start = Settings.of(config), how_started()
        self._request = JoinRequest(
            role=role,
            worker=worker,
            host=settings.host,
            folder=settings.folder,
            settings=dict(settings.changed),
            set_keys=list(start.set_keys),
            is_supervised=start.is_supervised,
            is_forced=start.is_forced,
        )
        self._data_service = data_service
        self._logged_notes: set[str] = set()
        self.joined = asyncio.Event()
        """Set once a data service has accepted the settings; it stays set while another one starts."""

    async def keep(self) -> None:
        """Join the run at the present data service, and at each later one, until cancelled.

        Raises UserError if the data service refuses the settings, ProtocolError if it is another version of
        dart.
        """
        while True:
            reply = await self._reply()
            for note in reply.notes:
                if note not in self._logged_notes:
                    log.warning("%s", note)
            self._logged_notes.update(reply.notes)
            self._request = self._request.model_copy(update={"is_first": False})
            self.joined.set()
            await self._data_service.lost.wait()

    async def _reply(self) -> JoinReply:
        """Send the request until the data service answers, and return the reply."""
        while True:
            try:
                reply = await self._data_service.request(self._request, endpoints.DEADLINE_S)
            except UserError:
                raise
            except ProtocolError as error:  # a second try would fail in the same way
                raise ProtocolError(
                    f"dart data at {self._data_service.endpoint}: {error}"
                ) from None
            except DeadlineError as error:
                # If there is no connection, announced_waits logs the wait.
                if self._data_service.connected:
                    log.warning("%s; trying again", error)
            except DartError as error:
                log.warning("data service: %s; trying again", error)
                await asyncio.sleep(RETRY_S)
            else:
                assert isinstance(reply, JoinReply)
                return reply
