"""The trainer's requests to the data service: no message is lost, and a stop ends every wait.

DataClient   sends requests and repeats them until the data service answers
"""

from __future__ import annotations

import asyncio
import logging
import uuid

from bus.errors import DeadlineError, StoreError
from bus.heartbeat import HeartbeatSender
from bus.messages import Ack, BatchRequest, Reply, Request
from bus.requests import RETRY_S as REPEAT_S
from bus.requests import Requester
from dart_cli.runtime.background import StopRequested, unless_stopped

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Pause before the next request after an error of the data service's database."""
BATCH_RETRY_S = 15.0
"""Time after which a request for a batch is repeated. A large batch takes seconds to arrive, and a repetition
sends it once more. A data service that comes back gets the request at once."""
LAST_REPORT_S = 3.0
"""Seconds for which a trainer that ends tries to report to an absent data service."""


class DataClient:
    """A client of the data service, which repeats a request until it is answered or a stop is requested."""

    def __init__(
        self,
        requester: Requester,
        heartbeat: HeartbeatSender,
        stop: asyncio.Event,
        deadline_s: float,
    ) -> None:
        """`deadline_s` bounds one request; after it the request is repeated."""
        self._requester = requester
        self._heartbeat = heartbeat
        self._stop = stop
        self._deadline_s = deadline_s

    async def tell(self, message: Request) -> None:
        """Send a message that must not be lost; repeat it until it is answered.

        Once a stop is requested, this waits no longer than `LAST_REPORT_S` for an absent data service, which
        then learns the content from the next TrainerHello.
        """
        with self._heartbeat.waiting(
            f"the data service to take {type(message).__name__}", on="data"
        ):
            try:
                reply: Reply | None = await self.ask(message)
            except StopRequested:
                reply = await self._report(message)
        if reply is None:
            return
        assert isinstance(reply, Ack)
        if not reply.accepted:
            log.warning("the data service: %s", reply.note)

    async def _report(self, message: Request) -> Reply | None:
        """Send the message of a trainer that ends, and return the answer.

        If the data service is absent, log a warning and return None. If it is present and does not answer,
        the deadline of the process ends the wait (`finishing`).
        """
        # By its id a busy data service executes a repeated message only once.
        request_id = uuid.uuid4().bytes
        while True:
            try:
                return await self._requester.request(message, LAST_REPORT_S, request_id=request_id)
            except (DeadlineError, StoreError) as error:
                if not self._requester.connected:
                    log.warning(
                        "%s; the data service will learn it from the next TrainerHello", error
                    )
                    return None
                if isinstance(error, StoreError):  # the old id would get the old answer again
                    request_id = uuid.uuid4().bytes
                    await asyncio.sleep(RETRY_S)

    async def ask(self, message: Request) -> Reply:
        """Return the answer; wait while the data service is absent, or restarts because its disk is full.

        Raises StopRequested, and all other errors that the data service answers with.
        """
        retry_s = BATCH_RETRY_S if isinstance(message, BatchRequest) else REPEAT_S
        while True:
            try:
                return await unless_stopped(
                    self._stop, self._requester.request(message, self._deadline_s, retry_s)
                )
            except DeadlineError as error:
                if self._requester.connected:  # else announced_waits logs that it is absent
                    log.warning("%s; keeps trying", error)
            except StoreError as error:
                log.warning("the data service: %s; keeps trying", error)
                await unless_stopped(self._stop, asyncio.sleep(RETRY_S))
