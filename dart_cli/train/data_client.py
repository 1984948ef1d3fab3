"""The trainer's side of its conversation with data: nothing is lost, and a stop ends every wait.

DataClient      requests, repeated until data answers
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
"""Pause after an error of data's database, before the next request."""
BATCH_RETRY_S = 15.0
"""Time after which a request for a batch is repeated: a large batch takes seconds to arrive, and a
repetition sends it once more. A data process that comes back is asked at once."""
LAST_REPORT_S = 3.0
"""How long a trainer that ends tries to report to a data service that is absent."""


class DataClient:
    """Asks data, and tells it, until it answers or a stop is requested."""

    def __init__(
        self,
        requester: Requester,
        heartbeat: HeartbeatSender,
        stop: asyncio.Event,
        deadline_s: float,
    ) -> None:
        """`deadline_s` bounds one request; the next one follows."""
        self._requester = requester
        self._heartbeat = heartbeat
        self._stop = stop
        self._deadline_s = deadline_s

    async def tell(self, message: Request) -> None:
        """Send data a message that must not be lost; repeat until it is answered.

        Once a stop is requested, an absent data service is waited for no longer than `LAST_REPORT_S`. What it
        then has not received it learns from the next TrainerHello.
        """
        with self._heartbeat.waiting(f"data to take {type(message).__name__}", on="data"):
            try:
                reply: Reply | None = await self.ask(message)
            except StopRequested:
                reply = await self._report(message)
        if reply is None:
            return
        assert isinstance(reply, Ack)
        if not reply.accepted:
            log.warning("data: %s", reply.note)

    async def _report(self, message: Request) -> Reply | None:
        """Return data's answer to a trainer that ends; None where the data service is absent, with a warning.

        Its process ends the wait for one that is there and does not answer (`finishing`).
        """
        request_id = uuid.uuid4().bytes  # of one message, which a busy data service executes once
        while True:
            try:
                return await self._requester.request(message, LAST_REPORT_S, request_id=request_id)
            except (DeadlineError, StoreError) as error:
                if not self._requester.connected:
                    log.warning("%s; data will learn it from the next TrainerHello", error)
                    return None
                if isinstance(error, StoreError):  # the old id would only get the old answer
                    request_id = uuid.uuid4().bytes
                    await asyncio.sleep(RETRY_S)

    async def ask(self, message: Request) -> Reply:
        """Data's answer; waits while data is absent, or restarts because its disk is full.

        Raises StopRequested, and the other errors that data answers with.
        """
        retry_s = BATCH_RETRY_S if isinstance(message, BatchRequest) else REPEAT_S
        while True:
            try:
                return await unless_stopped(
                    self._stop, self._requester.request(message, self._deadline_s, retry_s)
                )
            except DeadlineError as error:
                if self._requester.connected:  # else announced_waits says that it is absent
                    log.warning("%s; keeps trying", error)
            except StoreError as error:
                log.warning("data: %s; keeps trying", error)
                await unless_stopped(self._stop, asyncio.sleep(RETRY_S))
