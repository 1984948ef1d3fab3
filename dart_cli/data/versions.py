"""Weight versions: how far one is behind another, what each worker serves, and which may take new ones now.

    newest_weights   returns the weight set that was published last
    Lineage          the published versions: how far one is behind another, and which one a worker should take
    Versions         the weights that each rollout worker serves, from heartbeats and SyncDone
    Permits          which workers may take weights now: a limited number, those furthest behind first

A version's number is its order of publication, not its number of updates. A trainer that was killed goes on
from its checkpoint, repeats some updates and publishes the results under new numbers. Its batches come
again in the same order with the same content, so update n leads to the same weights as before, up to
rounding. Therefore the distance between two versions is the difference of their updates, divided by
`weights.publish_every`. Tokens of a version that the trainer has not reached again count as 0 versions
behind: no batch takes them before the trainer has reached it.

Versions and Permits are in memory only. After a restart no permit is out; workers ask again, and their
heartbeats come again.
"""

from __future__ import annotations

import operator
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bus.messages import Heartbeat
from bus.weights import SyncDone, WeightsPublished
from dart_cli.config.schema.weights import PERMIT_S
from dart_cli.data.store.reader import Reader
from dart_cli.data.store.rows import VersionRow

IsAhead = Callable[[int, int], bool]
"""(version, version that a worker serves) -> True if the worker should take the first one."""


def newest_weights(store: Reader) -> WeightsPublished | None:
    """Return the weight set that was published last; None before the first."""
    newest = store.newest_version()
    if newest is None:
        return None
    return WeightsPublished(
        policy_version=newest.policy_version,
        path=newest.path,
        digest=newest.digest,
        updates=newest.updates,
    )


class Lineage:
    """The published versions of one run. Not thread-safe."""

    def __init__(self, versions: Iterable[VersionRow], publish_every: int) -> None:
        self._publish_every = publish_every
        self._updates: dict[int, int] = {}  # version -> updates in its weights
        self._numbers: list[int] = []  # the versions in order
        for row in versions:
            self.add(row.policy_version, row.updates)

    def add(self, version: int, updates: int) -> None:
        """Add a version that was published."""
        if version not in self._updates:
            insort(self._numbers, version)
        self._updates[version] = updates

    def updates(self, version: int) -> int:
        """Return the number of updates in a version's weights.

        For a version that is not published yet, it is estimated from the nearest published one.
        """
        if version in self._updates:
            return self._updates[version]
        if not self._numbers:
            return version * self._publish_every
        above = bisect_left(self._numbers, version)
        nearest = self._numbers[min(above, len(self._numbers) - 1)]
        return self._updates[nearest] + (version - nearest) * self._publish_every

    def behind(self, version: int, trainer_updates: int) -> int:
        """Return how many versions `version` is behind a trainer at so many updates; at least 0."""
        return max(self.distance(version, trainer_updates), 0)

    def distance(self, version: int, trainer_updates: int) -> int:
        """Return the same as `behind`, but negative if the trainer has yet to repeat updates of `version`."""
        return -((self.updates(version) - trainer_updates) // self._publish_every)

    def is_ahead(self, version: int, other: int) -> bool:
        """Return True if a worker that serves `other` should take `version`.

        It should not if `version` was published later but has fewer updates, while the trainer repeats the
        updates that a kill has undone.
        """
        return other < 0 or (version > other and self.updates(version) > self.updates(other))


class Versions:
    """The weights that each living rollout worker serves; a worker that serves none yet is left out."""

    def __init__(self) -> None:
        self._serving: dict[str, int] = {}
        self._refused: dict[str, int] = {}  # worker -> newest version it could not take

    def observe(self, heartbeat: Heartbeat, is_new: bool) -> bool:
        """Note a rollout worker's heartbeat; return True if it changed anything.

        A process's version only rises, so that a heartbeat from before a SyncDone changes nothing. With
        `is_new` this is the first heartbeat of a process, and what its predecessor served is forgotten.
        """
        worker, before = heartbeat.worker, self._serving.get(heartbeat.worker)
        if is_new or heartbeat.state == "stopping":
            self.forget(worker)
        if heartbeat.policy_version >= 0 and heartbeat.state != "stopping":
            newest = self._serving.get(worker, -1)
            self._serving[worker] = max(newest, heartbeat.policy_version)
        return self._serving.get(worker) != before

    def note_sync(self, message: SyncDone) -> None:
        """Note that a worker has taken a weight set, or refused it."""
        worker, version = message.worker, message.policy_version
        if message.error:
            self._refused[worker] = max(version, self._refused.get(worker, -1))
        elif worker in self._serving:  # else its first heartbeat, still in transit, reports it
            self._serving[worker] = max(self._serving[worker], version)

    def forget(self, worker: str) -> bool:
        """Forget a worker that is gone; return True if it served a version."""
        self._refused.pop(worker, None)
        return self._serving.pop(worker, None) is not None

    def lag(self, behind: Callable[[int], int], max_staleness: int) -> int:
        """Return how many versions the oldest worker in use is behind; `behind` computes it for a version.

        The routers use the workers within `max_staleness`, or if there are none, the one that is least
        behind.
        """
        lags = [behind(version) for version in self._serving.values()]
        return max((lag for lag in lags if lag <= max_staleness), default=min(lags, default=0))

    def awaited(self, newest: int, is_ahead: IsAhead = operator.gt) -> list[str] | None:
        """Return the workers that have yet to take version `newest`; None if no worker serves anything.

        A worker that refused it goes on with the weights that it has and is left out.
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
    counts: bool  # it is one of the `concurrent` permits


class Permits:
    """The permits of workers to take weights. No call waits: `grant` returns who may take them now.

    A permit ends by `free`, when the worker asks again, and after `deadline_s`.
    """

    def __init__(
        self,
        concurrent: int,
        deadline_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Let `concurrent` workers take weights at once, or all of them if it is 0.

        A permit expires after `deadline_s`, by default PERMIT_S.
        """
        self._concurrent = concurrent
        self.deadline_s = PERMIT_S if deadline_s is None else deadline_s
        self._clock = clock
        self._out: dict[str, _Permit] = {}
        self._asking: dict[str, int] = {}  # worker -> version it serves, first asked first

    @property
    def holders(self) -> list[str]:
        """Workers that take weights now, without those that take their first ones."""
        return [worker for worker, permit in self._out.items() if permit.counts]

    def held_s(self) -> dict[str, float]:
        """Return worker -> for how many seconds it has had its permit."""
        now = self._clock()
        return {worker: now - permit.granted_at for worker, permit in self._out.items()}

    def ask(self, worker: str, policy_version: int) -> None:
        """Note that a worker, which serves `policy_version`, waits for a permit to take newer weights."""
        self.withdraw(worker)
        self.free(worker)
        self._asking[worker] = policy_version

    def withdraw(self, worker: str) -> None:
        """Note that a worker no longer waits for a permit; a permit that it has stays."""
        self._asking.pop(worker, None)

    def free(self, worker: str) -> float | None:
        """End the permit of a worker that has finished or is gone.

        Returns for how many seconds the worker had it; None if it had none.
        """
        permit = self._out.pop(worker, None)
        return None if permit is None else self._clock() - permit.granted_at

    def expire(self) -> list[str]:
        """End the permits that are older than the deadline; return their workers."""
        limit = self._clock() - self.deadline_s
        late = [worker for worker, permit in self._out.items() if permit.granted_at < limit]
        for worker in late:
            del self._out[worker]
        return late

    def grant(self, newest: int, is_ahead: IsAhead = operator.gt) -> list[str]:
        """Give permits to take version `newest`, and return the workers that got one.

        Workers furthest behind come first, and among equals the one that asked first. A worker that serves
        nothing yet (-1) always gets a permit, which does not count towards `concurrent`.
        """
        granted = []
        for worker, version in sorted(self._asking.items(), key=lambda item: item[1]):
            counts = version >= 0
            if not is_ahead(newest, version) or (counts and not self._has_free_permit):
                continue
            del self._asking[worker]
            self._out[worker] = _Permit(self._clock(), counts)
            granted.append(worker)
        return granted

    @property
    def _has_free_permit(self) -> bool:
        return self._concurrent == 0 or len(self.holders) < self._concurrent
