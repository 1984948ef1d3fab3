"""How many successes of each task are collected, and on which seeds.

Quota       the quota of one task: which seed is tried next, and whether enough successes are kept
task_seed   the training seed of the n-th instance of a task
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from bus.messages import TrajectoryEnd
from dart_cli.collect import CollectOptions
from dart_cli.config.schema import TRAIN_SEEDS
from envs.contract.base import Task

TRIES = {"oracle": 2, "policy": 16, "teacher": 8}
"""Player -> seeds that are tried for each success of the quota, at most."""


@dataclass
class Quota:
    """The quota of one task: `per_task` successes, on the first seeds that lead to success.

    A seed is tried only if the seeds before it, tried or in play, cannot be enough. So the successes that are
    kept depend only on the outcomes, and not on which episode ends first.
    """

    task: Task
    options: CollectOptions
    run_seed: int
    seeds: Sequence[int] = (0, TRAIN_SEEDS)  # the first seed, and the seed after the last
    successes: int = 0  # that are kept, with existing ones
    existing: int = 0  # successes of earlier starts
    episodes: int = 0  # started in this process
    in_play: int = 0  # episodes
    tried: int = 0  # seeds
    reasons: Counter[str] = field(default_factory=Counter)  # of invalid episodes
    _settled: set[int] = field(default_factory=set)  # seeds that are not played any more

    @property
    def missing(self) -> int:
        """Number of successes that the quota still lacks."""
        return max(0, self.options.per_task - self.successes)

    @property
    def wants_more(self) -> bool:
        """Whether another seed must be tried now."""
        left = self.seeds[1] - self.seeds[0] - len(self._settled)
        return (
            self.successes + self.in_play < self.options.per_task
            and left > 0
            and self._next_number is not None
        )

    def skip(
        self, existing: set[tuple[str, str, int]], settled: Collection[int] = frozenset()
    ) -> None:
        """Count the successes (source, task, seed) that exist already, so that they are not played again.

        The seeds in `settled` are not played again, either.
        """
        self._settled = {
            seed
            for source, task_id, seed in existing
            if (source, task_id) == (self.options.source, self.task.id)
            and self.seeds[0] <= seed < self.seeds[1]
        }
        seeds = {self._seed(number) for number in range(self._limit)}
        self.existing = min(self.options.per_task, len(seeds & self._settled))
        self.successes = self.existing
        self._settled.update(settled)

    def next_seed(self) -> int:
        """Return the next seed to play. Call it only while `wants_more`."""
        number = self._next_number
        assert number is not None
        self.tried = number + 1
        seed = self._seed(number)
        self._settled.add(seed)  # two numbers may give the same seed
        self.in_play += 1
        self.episodes += 1
        return seed

    def add_episode(self, end: TrajectoryEnd) -> None:
        """Count an episode that is over."""
        self.in_play -= 1
        self.successes += end.outcome == "pass"
        if end.outcome == "invalid":
            self.reasons[end.reason] += 1

    @property
    def _next_number(self) -> int | None:
        """The number of the next seed that may be played; None if there is none within the limit."""
        numbers = range(self.tried, self._limit)
        return next((number for number in numbers if self._seed(number) not in self._settled), None)

    @property
    def _limit(self) -> int:
        """Number of seeds that are tried at most."""
        return TRIES[self.options.player] * self.options.per_task

    def _seed(self, number: int) -> int:
        """Return the training seed of the `number`-th instance of the task."""
        return task_seed(self.run_seed, self.task.id, number, self.seeds)


def task_seed(
    run_seed: int, task_id: str, number: int, seeds: Sequence[int] = (0, TRAIN_SEEDS)
) -> int:
    """Return the training seed of the `number`-th instance of a task, in the range `seeds`."""
    digest = blake2b(f"collect/{run_seed}/{task_id}/{number}".encode(), digest_size=8).digest()
    return seeds[0] + int.from_bytes(digest) % (seeds[1] - seeds[0])
