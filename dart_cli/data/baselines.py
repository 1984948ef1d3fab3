"""The running baselines of a run: the rewards that are expected of each task, if groups have one member.

    Baselines   `expected` is called before a batch is formed, `learn` when it is filed

A baseline learns from a trajectory in the transaction that files its batch. So the baselines follow from the
batches alone, and a restart does not change them. They learn nothing from invalid trajectories, nor from
members of the experience pool, whose rewards are not the policy's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Protocol

from dart_cli.algo.running_baselines import WHOLE_TASK, RunningBaseline, expected_by_step
from dart_cli.config.schema import BY_BASELINE, DataConfig
from dart_cli.data.curate import BaselineComparison, FinishedGroup
from dart_cli.data.store.rows import BaselineRow


class BaselineStore(Protocol):
    """A place where baselines are stored, such as a run's Store."""

    def baselines(self) -> Iterable[BaselineRow]:
        """Return the rows that were saved last."""
        ...

    def save_baselines(self, rows: Iterable[BaselineRow]) -> None:
        """Save rows; each replaces the row of the same task and step."""
        ...


class Baselines:
    """The running baselines by task and step; empty unless data.advantage uses them."""

    def __init__(self, config: DataConfig, store: BaselineStore) -> None:
        self._config = config
        self._store = store
        self._by_task: dict[str, dict[int, RunningBaseline]] = {}  # task id -> step, or WHOLE_TASK
        if self.in_use:
            for row in store.baselines():
                by_step = self._by_task.setdefault(row.task_id, {})
                by_step[row.step] = RunningBaseline(row.passed, row.failed)

    @property
    def in_use(self) -> bool:
        """True if data.advantage compares trajectories with running baselines."""
        return self._config.advantage in BY_BASELINE

    @property
    def comparison(self) -> BaselineComparison | None:
        """The comparison of trajectories with the baselines; None if data.advantage compares groups."""
        if not self.in_use:
            return None
        return BaselineComparison(self.expected, self._config.baseline_margin)

    @property
    def reason(self) -> Literal["mixed", "baseline"]:
        """The reason why a trajectory of a batch is trained on, for its decision."""
        return "baseline" if self.in_use else "mixed"

    def expected(self, task_id: str, steps: int) -> list[float]:
        """Return the reward that is expected now at each step [steps] of an episode of the task."""
        by_step = self._by_task.get(task_id, {})
        if self._config.advantage == "step_baseline":
            return [baseline.value for baseline in expected_by_step(by_step, steps)]
        return [by_step.get(WHOLE_TASK, RunningBaseline()).value] * steps

    def learn(self, groups: Iterable[FinishedGroup]) -> None:
        """Update the baselines by the rewards of a batch's trajectories, in order, and save them.

        This is part of the transaction that files the batch.
        """
        if not self.in_use:
            return
        changed: dict[tuple[str, int], RunningBaseline] = {}
        for group in groups:
            by_step = self._by_task.setdefault(group.task_id, {})
            for member in group.valid:
                before = {WHOLE_TASK: by_step.get(WHOLE_TASK, RunningBaseline())}
                if self._config.advantage == "step_baseline":
                    # All are read before any is updated: a new step begins as the step before it was before
                    # this trajectory, which would count twice otherwise.
                    before |= dict(enumerate(expected_by_step(by_step, member.steps)))
                reward = member.reward or 0.0
                by_step |= {step: baseline.after(reward) for step, baseline in before.items()}
                changed |= {(group.task_id, step): by_step[step] for step in before}
        self._store.save_baselines(
            BaselineRow(task_id=task_id, step=step, passed=baseline.passed, failed=baseline.failed)
            for (task_id, step), baseline in changed.items()
        )
