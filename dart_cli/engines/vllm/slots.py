"""Slots of vLLM's batch, and the queue for them: first come, first served."""

from __future__ import annotations

import asyncio
from collections import deque

from dart_cli.engines.base import queue_full


class BatchSlots:
    """At most `count` are in use; at most `max_waiting` callers wait. For one event loop."""

    def __init__(self, count: int, max_waiting: int) -> None:
        self.in_use = 0
        self._count = count
        self._max_waiting = max_waiting
        self._queue: deque[asyncio.Future[bool]] = deque()

    @property
    def waiting(self) -> int:
        """How many callers wait."""
        return len(self._queue)

    async def acquire(self) -> bool:
        """Wait for a slot; False if the caller was turned away. Raises EngineError if the queue is full."""
        if self.in_use < self._count and not self._queue:
            self.in_use += 1
            return True
        if len(self._queue) >= self._max_waiting:
            raise queue_full(len(self._queue))
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn in self._queue:
                self._queue.remove(turn)
            elif turn.done() and not turn.cancelled() and turn.result():
                self.release()  # the slot was given in the moment the caller was cancelled
            raise

    def release(self) -> None:
        """Return a slot: the first waiting caller gets it, if there is one."""
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(True)
                return
        self.in_use -= 1

    def turn_away(self) -> None:
        """End every wait: `acquire` returns False to each waiting caller."""
        for turn in self._queue:
            if not turn.done():
                turn.set_result(False)
        self._queue.clear()
