"""How much is collected of what, and on which seeds.

Quota            one task's: which seed is tried next, and when enough is kept
task_seed        the training seed of a task's n-th instance
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from bus.messages import TrajectoryEnd
from dart_cli.collect import CollectOptions
from dart_cli.config.schema import TRAIN_SEEDS
from envs.contract.base import Task

TRIES = {"oracle": 2, "policy": 16}
"""Episodes played for each success wanted, at most."""


@dataclass
class Quota:
    """One task's share: `per_task` successes on the first seeds that give one.

    A seed is tried when all before it, tried or in play, cannot be enough. So what is kept depends
    on the outcomes alone, not on which episode ends first.
    """

    task: Task
    options: CollectOptions
    run_seed: int
    seeds: Sequence[int] = (0, TRAIN_SEEDS)  # first, and the one after the last
    kept: int = 0  # successes, existing ones included
    existing: int = 0  # successes that exist from before
    played: int = 0
    in_play: int = 0
    tried: int = 0  # seeds
    reasons: Counter[str] = field(default_factory=Counter)  # of episodes that were invalid
    _settled: set[int] = field(default_factory=set)  # seeds not to be played any more

    @property
    def missing(self) -> int:
        """Successes that are still wanted."""
        return max(0, self.options.per_task - self.kept)

    @property
    def wants_more(self) -> bool:
        """Whether another seed is to be tried now."""
        left = self.seeds[1] - self.seeds[0] - len(self._settled)
        return (
            self.kept + self.in_play < self.options.per_task
            and self.tried < self._limit
            and left > 0
        )

    def skip(self, existing: set[tuple[str, str, int]]) -> None:
        """Successes of (source, task, seed) that exist already: they count, and are not played."""
        self._settled = {
            seed
            for source, task_id, seed in existing
            if (source, task_id) == (self.options.source, self.task.id)
            and self.seeds[0] <= seed < self.seeds[1]
        }
        seeds = {self._seed(number) for number in range(self._limit)}
        self.existing = min(self.options.per_task, len(seeds & self._settled))
        self.kept = self.existing

    def next_seed(self) -> int:
        """Return the next seed to play; call only while it `wants_more`."""
        while True:
            seed = self._seed(self.tried)
            self.tried += 1
            if seed not in self._settled:
                self._settled.add(seed)  # two numbers may give the same seed
                self.in_play += 1
                self.played += 1
                return seed

    def ended(self, end: TrajectoryEnd) -> None:
        """One of its episodes is over."""
        self.in_play -= 1
        self.kept += end.outcome == "pass"
        if end.outcome == "invalid":
            self.reasons[end.reason] += 1

    @property
    def _limit(self) -> int:
        """Seeds that are tried at most."""
        return TRIES[self.options.player] * self.options.per_task

    def _seed(self, number: int) -> int:
        return task_seed(self.run_seed, self.task.id, number, self.seeds)


def task_seed(
    run_seed: int, task_id: str, number: int, seeds: Sequence[int] = (0, TRAIN_SEEDS)
) -> int:
    """Return a training seed, in the range `seeds`, of the task's `number`-th instance."""
    digest = blake2b(f"collect/{run_seed}/{task_id}/{number}".encode(), digest_size=8).digest()
    return seeds[0] + int.from_bytes(digest) % (seeds[1] - seeds[0])
