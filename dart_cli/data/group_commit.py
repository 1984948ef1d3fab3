"""Group commit: many requests share one transaction; each is answered after it is durable."""

from __future__ import annotations

import asyncio

from bus.errors import StoreError
from dart_cli.data.store.writer import Store

COMMIT_S = 0.005
"""How long a transaction stays open for more requests to join."""


class Commits:
    """`durable` returns to all its callers when the transaction that they share is on disk.

    After a failure memory and file may differ, so nothing is ever acknowledged again: `failed`
    ends the process, and the next one begins from the file.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._next: asyncio.Future[None] | None = None
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def durable(self) -> None:
        """Return when everything written so far is durable. Raises StoreError if it cannot be."""
        if self.failed.done():
            self.failed.result()
        if self._next is None:
            loop = asyncio.get_running_loop()
            self._next = loop.create_future()
            loop.call_later(COMMIT_S, self.flush)
        await asyncio.shield(self._next)

    def flush(self) -> None:
        """Commit now and release the callers of `durable`."""
        if self.failed.done():
            return
        try:
            self._store.commit()
        except StoreError as error:
            self.fail(error)
            return
        waiting, self._next = self._next, None
        if waiting is not None:
            waiting.set_result(None)

    def fail(self, error: StoreError) -> None:
        """The database failed: discard what is not committed; every caller of `durable` gets the error."""
        if self.failed.done():
            return
        self.failed.set_exception(error)
        if self._next is not None:
            self._next.set_exception(error)
        self._store.abandon()
