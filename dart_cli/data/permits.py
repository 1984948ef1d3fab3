"""Rolling sync, data's side: which rollout worker takes new weights when, and what each serves.

Permits    at most so many workers take weights at once, the furthest behind first
Versions   the weights that each worker serves, from heartbeats and SyncDone

Both are in memory only: after a restart no permit is out; workers ask and heartbeats come again.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from dataclasses import dataclass

from bus.messages import Heartbeat
from bus.weights import SyncDone
from dart_cli.config.schema.served import PERMIT_S

IsAhead = Callable[[int, int], bool]
"""Whether a worker that serves the second version should take the first, a later one."""


@dataclass(frozen=True)
class _Permit:
    granted_at: float  # monotonic seconds
    counts: bool  # towards `concurrent`


class Permits:
    """Which workers may take weights now. No call waits: `grant` names the workers, now or later.

    A permit is given back by `free`, by asking again, and after `deadline_s`.
    """

    def __init__(
        self,
        concurrent: int,
        deadline_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`concurrent` workers hold a counted permit at once; 0 for all. `deadline_s` by default PERMIT_S."""
        self._concurrent = concurrent
        self.deadline_s = PERMIT_S if deadline_s is None else deadline_s
        self._clock = clock
        self._out: dict[str, _Permit] = {}
        self._asking: dict[str, int] = {}  # worker -> version it serves, first asked first

    @property
    def holders(self) -> list[str]:
        """Workers that take weights now, a worker's first ones not counted."""
        return [worker for worker, permit in self._out.items() if permit.counts]

    def held_s(self) -> dict[str, float]:
        """Workers that take weights now -> seconds since they may."""
        now = self._clock()
        return {worker: now - permit.granted_at for worker, permit in self._out.items()}

    def ask(self, worker: str, policy_version: int) -> None:
        """The worker, which serves `policy_version`, would take newer weights."""
        self.withdraw(worker)
        self.free(worker)
        self._asking[worker] = policy_version

    def withdraw(self, worker: str) -> None:
        """It waits no longer; a permit that it holds stays."""
        self._asking.pop(worker, None)

    def free(self, worker: str) -> float | None:
        """It is done, or gone: its permit is free. Seconds it was out; None if there was none."""
        permit = self._out.pop(worker, None)
        return None if permit is None else self._clock() - permit.granted_at

    def expire(self) -> list[str]:
        """Take back permits that are out for longer than the deadline; whose they were."""
        limit = self._clock() - self.deadline_s
        late = [worker for worker, permit in self._out.items() if permit.granted_at < limit]
        for worker in late:
            del self._out[worker]
        return late

    def grant(self, newest: int, is_ahead: IsAhead = operator.gt) -> list[str]:
        """Workers that asked and now hold a permit to take version `newest`.

        Those furthest behind come first, of equals the one that asked first. A worker that serves
        nothing (-1) takes no place of the others and waits for none of them.
        """
        granted = []
        for worker, version in sorted(self._asking.items(), key=lambda asked: asked[1]):
            counts = version >= 0
            if not is_ahead(newest, version) or (counts and not self._has_room):
                continue
            del self._asking[worker]
            self._out[worker] = _Permit(self._clock(), counts)
            granted.append(worker)
        return granted

    @property
    def _has_room(self) -> bool:
        return self._concurrent == 0 or len(self.holders) < self._concurrent


class Versions:
    """The weights that each living rollout worker serves; one that serves none yet is left out."""

    def __init__(self) -> None:
        self._serving: dict[str, int] = {}
        self._refused: dict[str, int] = {}  # worker -> newest version it could not take

    def observe(self, heartbeat: Heartbeat, is_new: bool) -> bool:
        """Note a rollout worker's heartbeat; whether it changed anything.

        A process's versions only rise: a heartbeat from before a SyncDone takes nothing back.
        `is_new`: the process was not heard before, so what is known of its predecessor is void.
        """
        worker, before = heartbeat.worker, self._serving.get(heartbeat.worker)
        if is_new or heartbeat.state == "stopping":
            self.forget(worker)
        if heartbeat.policy_version >= 0 and heartbeat.state != "stopping":
            known = self._serving.get(worker, -1)
            self._serving[worker] = max(known, heartbeat.policy_version)
        return self._serving.get(worker) != before

    def done(self, done: SyncDone) -> None:
        """A worker has taken a set, or refused it."""
        if done.error:
            self._refused[done.worker] = max(
                done.policy_version, self._refused.get(done.worker, -1)
            )
        elif done.worker in self._serving:  # else its first heartbeat, still in transit, reports it
            self._serving[done.worker] = max(self._serving[done.worker], done.policy_version)

    def forget(self, worker: str) -> bool:
        """It is gone; whether it was known."""
        self._refused.pop(worker, None)
        return self._serving.pop(worker, None) is not None

    def lag(self, behind: Callable[[int], int], max_staleness: int) -> int:
        """Versions that the oldest worker which the router asks is behind the newest.

        `behind`: a version -> versions that it is behind. The router asks workers within
        `max_staleness`; where all are further behind, the least of them.
        """
        lags = [behind(version) for version in self._serving.values()]
        return max((each for each in lags if each <= max_staleness), default=min(lags, default=0))

    def awaited(self, newest: int, is_ahead: IsAhead = operator.gt) -> list[str] | None:
        """Workers that have yet to take `newest`; None if no worker is known to serve anything.

        One that has refused it serves on with what it has and is not waited for.
        """
        if not self._serving:
            return None
        return sorted(
            worker
            for worker, version in self._serving.items()
            if is_ahead(newest, version) and self._refused.get(worker, -1) < newest
        )
