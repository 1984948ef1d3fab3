"""The trainer's next batch, from the choice of its steps to the encoded reply.

    NextBatch   plans, loads, files and encodes one batch at a time

Reading and encoding a batch takes seconds: 1,440 steps with full-HD screenshots are a gigabyte. Meanwhile
environments wait for each of their steps to be acknowledged. So a thread reads and encodes, on a
separate database connection that sees what is committed, and the event loop answers other requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from bus.errors import ConfigError
from bus.messages import Batch, BatchReply
from bus.requests import EncodedReply
from dart_cli.data.batches import BatchPlan
from dart_cli.data.ledger import Ledger
from dart_cli.data.loading import load
from dart_cli.data.queues import Commits
from dart_cli.data.scheduler import NotYet
from dart_cli.data.store.reader import Reader

log = logging.getLogger(__name__)

_R = TypeVar("_R")


class NextBatch:
    """A maker of the trainer's batches, one at a time. It owns a thread, which `close` ends."""

    def __init__(
        self,
        ledger: Ledger,
        commits: Commits,
        database: Path,
        *,
        served_s: Callable[[], float],
        on_filed: Callable[[], None],
    ) -> None:
        """Form the batches of `ledger`; `database` is its file.

        `served_s` returns for how many seconds the run has been served, over all starts. `on_filed` is
        called once a batch is filed, before it is encoded.
        """
        self._ledger = ledger
        self._commits = commits
        self._database = database
        self._served_s = served_s
        self._on_filed = on_filed
        self._one_at_a_time = asyncio.Lock()
        self._newest: Batch | None = None  # the batch that was filed or served last
        self._thread = ThreadPoolExecutor(1, "batches")
        self._reader: Reader | None = None  # made, used and closed in the thread alone

    async def reply(self, trainer_version: int) -> EncodedReply | NotYet:
        """Return the reply that carries the next batch, or the reason why there is none yet.

        A trainer that asks again while its batch is loaded gets that batch. Raises ConfigError if a batch
        is larger than a message may be, StoreError if the database fails.
        """
        async with self._one_at_a_time:
            while True:
                # 1. Choose the steps.
                plan = self._ledger.plan_batch(trainer_version, self._served_s())
                if isinstance(plan, NotYet):
                    return plan
                # 2. Load them, unless the trainer asks for the newest batch again.
                batch = self._newest
                if batch is None or batch.batch_id != plan.batch_id:
                    batch = await self._load(plan)
                # 3. File the batch. If its groups were dropped while it was loaded, or another trainer has
                # begun, choose again.
                filed = self._ledger.file_batch(plan, batch)
                if filed is not None:
                    self._newest = batch
                    break
        self._on_filed()
        await self._commits.durable()
        # 4. Encode it.
        return await self._in_thread(lambda: _encode(filed))

    def close(self) -> None:
        """Wait for what the thread is doing, and close its connection."""
        self._thread.submit(self._close_reader)
        self._thread.shutdown()

    async def _load(self, plan: BatchPlan) -> Batch:
        """Return the batch of the plan, with tokens and screenshots. Raises ConfigError as `load` does."""
        await self._commits.durable()  # the thread's connection reads what is committed
        try:
            return await self._in_thread(lambda: load(self._open_reader(), plan))
        except ConfigError as error:  # the trainer ends with it
            log.warning("%s", error)
            raise

    async def _in_thread(self, work: Callable[[], _R]) -> _R:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _open_reader(self) -> Reader:
        if self._reader is None:
            self._reader = Reader(self._database)
        return self._reader

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()


def _encode(batch: Batch) -> EncodedReply:
    """Return the reply that carries a batch, as thousands of frames."""
    return EncodedReply.of(BatchReply.model_construct(batch=batch, retry_after_s=0.0, reason=""))
