"""Loads and encodes batches in a thread of its own, so that data's event loop goes on answering.

BatchLoader   a thread with a read-only connection to the run's database

A batch of 1,440 full-HD steps is a gigabyte: it takes seconds to read, and environments wait for each
of their steps to be acknowledged.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bus.messages import Batch, BatchReply
from bus.replier import EncodedReply
from dart_cli.data.batching import BatchPlan, load
from dart_cli.data.store.reader import Reader


class BatchLoader:
    """Reads what is committed. Call `close`."""

    def __init__(self, path: Path) -> None:
        """`path` is the run's database."""
        self._path = path
        self._thread = ThreadPoolExecutor(1, "batches")
        self._reader: Reader | None = None  # made, used and closed in the thread alone

    async def load(self, plan: BatchPlan) -> Batch:
        """What the planned steps hold. Raises ConfigError as `load` does, and StoreError."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._load, plan)

    async def encoded(self, batch: Batch) -> EncodedReply:
        """The answer that carries the batch: thousands of frames. Raises as `encode` does."""
        reply = BatchReply.model_construct(batch=batch, retry_after_s=0.0, reason="")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, EncodedReply.of, reply)

    def close(self) -> None:
        """Wait for what is being loaded, and close the connection."""
        self._thread.submit(self._close)
        self._thread.shutdown()

    def _load(self, plan: BatchPlan) -> Batch:
        if self._reader is None:
            self._reader = Reader(self._path)
        return load(self._reader, plan)

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.close()
