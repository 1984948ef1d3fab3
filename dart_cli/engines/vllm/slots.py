"""Places in vLLM's batch, and the line before them: first come, first served."""

from __future__ import annotations

import asyncio
from collections import deque

from bus.errors import EngineError


class Places:
    """At most `count` are taken; at most `max_waiting` wait for one. For one event loop alone."""

    def __init__(self, count: int, max_waiting: int) -> None:
        self.taken = 0
        self._count = count
        self._max_waiting = max_waiting
        self._line: deque[asyncio.Future[bool]] = deque()

    @property
    def waiting(self) -> int:
        """How many stand in the line."""
        return len(self._line)

    async def take(self) -> bool:
        """Wait for a place; False where the line was sent away. Raises EngineError if it is full."""
        if self.taken < self._count and not self._line:
            self.taken += 1
            return True
        if len(self._line) >= self._max_waiting:
            raise EngineError(
                f"{len(self._line)} requests wait already (max_waiting); "
                "use fewer environment slots or more rollout workers"
            )
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._line.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn in self._line:
                self._line.remove(turn)
            elif turn.done() and not turn.cancelled() and turn.result():
                self.leave()  # it was given a place in the moment that nobody wanted it any more
            raise

    def leave(self) -> None:
        """Give a place back: to the first of the line, if there is one."""
        while self._line:
            turn = self._line.popleft()
            if not turn.done():
                turn.set_result(True)
                return
        self.taken -= 1

    def send_away(self) -> None:
        """Tell all who wait that they get none."""
        for turn in self._line:
            if not turn.done():
                turn.set_result(False)
        self._line.clear()
