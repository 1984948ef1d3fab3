"""Weight versions: how far one is behind another, what each worker serves, who takes new ones when.

Lineage    published versions -> versions behind, and which version is worth taking
Versions   the weights that each rollout worker serves, from heartbeats and SyncDone
Permits    at most so many workers take weights at once, the furthest behind first

A version's number says when it was published, not how often its weights were updated. A trainer that
was killed goes on from its checkpoint and publishes what it does again under new numbers. Its batches
come again in the same order with the same content, so update n leads to the same weights as before,
but for rounding. The distance between two versions is therefore the difference of their updates, over
`weights.publish_every`. Tokens of a version that the trainer has not reached again are not behind: no
batch takes them before the trainer has.

Versions and Permits are in memory only: after a restart no permit is out; workers ask and heartbeats
come again.
"""

from __future__ import annotations

import operator
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bus.messages import Heartbeat
from bus.weights import SyncDone
from dart_cli.config.schema.weights import PERMIT_S
from dart_cli.data.store.rows import VersionRow

IsAhead = Callable[[int, int], bool]
"""Whether a worker that serves the second version should take the first, a later one."""


class Lineage:
    """The published versions of one run. Not thread-safe."""

    def __init__(self, versions: Iterable[VersionRow], publish_every: int) -> None:
        self._every = publish_every
        self._updates: dict[int, int] = {}  # version -> updates in its weights
        self._numbers: list[int] = []  # of the versions, in order
        for row in versions:
            self.add(row.policy_version, row.updates)

    def add(self, version: int, updates: int) -> None:
        """Add a version that was published."""
        if version not in self._updates:
            insort(self._numbers, version)
        self._updates[version] = updates

    def updates(self, version: int) -> int:
        """In the weights of a version; of one that is still on its way by the nearest published one."""
        if version in self._updates:
            return self._updates[version]
        if not self._numbers:
            return version * self._every
        above = bisect_left(self._numbers, version)
        nearest = self._numbers[min(above, len(self._numbers) - 1)]
        return self._updates[nearest] + (version - nearest) * self._every

    def behind(self, version: int, trainer: int) -> int:
        """Versions that the weights `version` are behind a trainer at so many updates, 0 if not."""
        return max(self.distance(version, trainer), 0)

    def distance(self, version: int, trainer: int) -> int:
        """As `behind`, but negative where the trainer has yet to do again what led to `version`."""
        return -((self.updates(version) - trainer) // self._every)

    def is_ahead(self, version: int, other: int) -> bool:
        """Whether a worker that serves `other` should take `version`, which was published later.

        Not while the trainer does again what a kill has undone: `other` is what that leads to.
        """
        return other < 0 or (version > other and self.updates(version) > self.updates(other))


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

    def note_sync(self, message: SyncDone) -> None:
        """Note that a worker has taken a weight set, or refused it."""
        worker, version = message.worker, message.policy_version
        if message.error:
            self._refused[worker] = max(version, self._refused.get(worker, -1))
        elif worker in self._serving:  # else its first heartbeat, still in transit, reports it
            self._serving[worker] = max(self._serving[worker], version)

    def forget(self, worker: str) -> bool:
        """Forget a worker that is gone; return whether it was known."""
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
        """Note that a worker, which serves `policy_version`, would take newer weights."""
        self.withdraw(worker)
        self.free(worker)
        self._asking[worker] = policy_version

    def withdraw(self, worker: str) -> None:
        """Note that a worker waits no longer; a permit that it holds stays."""
        self._asking.pop(worker, None)

    def free(self, worker: str) -> float | None:
        """Free the permit of a worker that is done, or gone.

        Returns the seconds for which it was out; None if there was none.
        """
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
