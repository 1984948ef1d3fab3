"""How a process joins its run: the data service compares what it was started with.

Joining   sends the settings to each data process that comes; ends the process where they are refused
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

WHAT = "data to take its settings"
"""What a process waits for until it has joined."""
RETRY_S = 1.0
"""Pause after an answer that is no reply, such as an error of the data service's database."""


class Joining:
    """One process's part in its run."""

    def __init__(self, config: Config, role: Role, worker: str, data: Requester) -> None:
        """Take a connection to the data service as `data`; nothing is sent before `keep`."""
        settings, start = Settings.of(config), how_started()
        self._request = JoinRequest(
            role=role,
            worker=worker,
            host=settings.host,
            folder=settings.folder,
            settings=dict(settings.changed),
            given=list(start.given),
            is_supervised=start.is_supervised,
            is_forced=start.is_forced,
        )
        self._data = data
        self._told: set[str] = set()
        self.joined = asyncio.Event()
        """The data service has accepted the settings; it stays set while another one comes."""

    async def keep(self) -> None:
        """Join, and join each later data process, until cancelled.

        Raises UserError where the data service refuses the settings, ProtocolError where it is of another version of dart.
        """
        while True:
            reply = await self._reply()
            for note in reply.notes:
                if note not in self._told:
                    log.warning("%s", note)
            self._told.update(reply.notes)
            self._request = self._request.model_copy(update={"is_first": False})
            self.joined.set()
            await self._data.lost.wait()

    async def _reply(self) -> JoinReply:
        """Ask until the data service answers."""
        while True:
            try:
                reply = await self._data.request(self._request, endpoints.DEADLINE_S)
            except UserError:
                raise
            except ProtocolError as error:  # it would say so again and again
                raise ProtocolError(f"dart data at {self._data.endpoint}: {error}") from None
            except DeadlineError as error:
                if self._data.connected:  # else announced_waits says that it is absent
                    log.warning("%s; asks again", error)
            except DartError as error:
                log.warning("data: %s; asks again", error)
                await asyncio.sleep(RETRY_S)
            else:
                assert isinstance(reply, JoinReply)
                return reply
