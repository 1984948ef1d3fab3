"""The trainer's turn in a coupled run: completions are neither started nor continued until it is over.

    SuspendGate      open, or closed while data announces that the run is suspended
    ResumingPolicy   a Policy that waits at the gate and continues completions that were cut off

The environment and its lease are kept; heartbeats still report the trajectory to data.
"""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

from bus.heartbeat import WaitReporter
from bus.messages import ActRequest, Completion, RunState
from dart_cli.env.episode import Policy
from dart_cli.runtime.phase_timer import PhaseTimer

NOTICE_S = 0.05
"""Pause before a cut-off completion is continued: a worker may learn of the suspension before us."""


class SuspendGate:
    """Closed while the run is suspended; open at first."""

    def __init__(self) -> None:
        self._open, self._closed = asyncio.Event(), asyncio.Event()
        self._open.set()

    @property
    def is_open(self) -> bool:
        """Whether completions may start."""
        return self._open.is_set()

    def observe(self, state: RunState) -> None:
        """Open or close, as data announces."""
        now, before = (self._closed, self._open) if state.suspended else (self._open, self._closed)
        before.clear()
        now.set()

    async def opened(self) -> None:
        """Wait, as long as it takes, until it is open."""
        await self._open.wait()

    async def closed(self, at_most_s: float) -> None:
        """Wait until it is closed, or for `at_most_s`."""
        try:
            async with asyncio.timeout(at_most_s):
                await self._closed.wait()
        except TimeoutError:
            return


class ResumingPolicy:
    """Completions as a whole, however often they are suspended.

    A suspended completion is not passed on: the same request is sent again with its tokens, to any
    worker, until one completes it. The last answer holds all tokens; its times are the sums.
    """

    def __init__(
        self,
        policy: Policy,
        gate: SuspendGate,
        timer: PhaseTimer,
        waits: WaitReporter | None = None,
    ) -> None:
        """`timer` is told when a completion is `suspended` and when it is `waiting` again."""
        self.resumed = 0  # completions that went on after a suspension
        self._policy = policy
        self._gate = gate
        self._timer = timer
        self._waits = waits

    async def act(self, request: ActRequest) -> Completion:
        """What the policy says to one screen. Raises what the policy raises."""
        queue_s = engine_s = 0.0
        while True:
            await self._pass()
            completion = await self._policy.act(request)
            queue_s, engine_s = queue_s + completion.queue_s, engine_s + completion.engine_s
            if completion.stop != "suspended":
                return completion.model_copy(update={"queue_s": queue_s, "engine_s": engine_s})
            self.resumed += 1
            request = request.model_copy(
                update={
                    "partial": completion.sampled if len(completion.sampled) else None,
                    "pointed": completion.pointed,
                }
            )
            await self._gate.closed(NOTICE_S)

    async def _pass(self) -> None:
        if self._gate.is_open:
            return
        self._timer.enter("suspended")
        turn = "the end of the trainer's turn"
        reporting = self._waits.waiting(turn, on="train") if self._waits else nullcontext()
        try:
            with reporting:
                await self._gate.opened()
        finally:
            self._timer.enter("waiting")
