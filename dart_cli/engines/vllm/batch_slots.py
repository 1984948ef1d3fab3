"""The slots of vLLM's batch: as many requests as it can run at once, and a queue for the others."""

from __future__ import annotations

import asyncio
from collections import deque


class BatchSlots:
    """The slots of vLLM's batch, and the queue for them, in order of arrival. For one event loop."""

    def __init__(self, count: int) -> None:
        self.in_use = 0
        self._count = count
        self._queue: deque[asyncio.Future[bool]] = deque()

    @property
    def waiting(self) -> int:
        """The number of callers that wait."""
        return len(self._queue)

    async def acquire(self) -> bool:
        """Wait for a slot. Return False if `turn_away` ended the wait."""
        if self.in_use < self._count and not self._queue:
            self.in_use += 1
            return True
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn in self._queue:
                self._queue.remove(turn)
            elif turn.done() and not turn.cancelled() and turn.result():
                self.release()  # the caller got the slot just before it was cancelled
            raise

    def release(self) -> None:
        """Free a slot, which the first waiting caller gets, if there is one."""
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(True)
                return
        self.in_use -= 1

    def turn_away(self) -> None:
        """End every wait: `acquire` returns False to all waiting callers."""
        for turn in self._queue:
            if not turn.done():
                turn.set_result(False)
        self._queue.clear()
