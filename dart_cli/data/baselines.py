"""What each task's trajectories lead one to expect, where groups have one member: live, and in the store.

    Baselines   the baselines of one run: `expected` before a batch, `learn` of it when it is filed

A baseline learns of a trajectory when the batch with it is filed, in the transaction that files the batch,
so that the baselines follow from the batches alone: after any restart they are those of a run without one.
Invalid trajectories teach them nothing, nor do members of the pool, whose rewards are not the policy's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Protocol

from dart_cli.algo.running_baselines import WHOLE_TASK, RunningBaseline, expected_by_step
from dart_cli.config.schema import BY_BASELINE, DataConfig
from dart_cli.data.curate import BaselineComparison, FinishedGroup
from dart_cli.data.store.rows import BaselineRow


class BaselineStore(Protocol):
    """Where baselines are kept: a run's Store."""

    def baselines(self) -> Iterable[BaselineRow]:
        """As they were saved last."""
        ...

    def save_baselines(self, rows: Iterable[BaselineRow]) -> None:
        """Keep these."""
        ...


class Baselines:
    """Baselines by task and step. Nothing without an advantage by baselines."""

    def __init__(self, data: DataConfig, store: BaselineStore) -> None:
        self._data = data
        self._store = store
        self._by_task: dict[str, dict[int, RunningBaseline]] = {}  # task id -> step, or WHOLE_TASK
        if self.in_use:
            for row in store.baselines():
                of_task = self._by_task.setdefault(row.task_id, {})
                of_task[row.step] = RunningBaseline(row.passed, row.failed)

    @property
    def in_use(self) -> bool:
        """Whether advantages are by baselines."""
        return self._data.advantage in BY_BASELINE

    @property
    def comparison(self) -> BaselineComparison | None:
        """How trajectories are compared with the baselines; None without an advantage by baselines."""
        if not self.in_use:
            return None
        return BaselineComparison(self.expected, self._data.baseline_margin)

    @property
    def reason(self) -> Literal["mixed", "baseline"]:
        """Why a trajectory is trained on."""
        return "baseline" if self.in_use else "mixed"

    def expected(self, task_id: str, steps: int) -> list[float]:
        """Return the reward that is expected at each step [steps] of an episode of the task, as of now."""
        of_task = self._by_task.get(task_id, {})
        if self._data.advantage == "step_baseline":
            return [baseline.value for baseline in expected_by_step(of_task, steps)]
        return [of_task.get(WHOLE_TASK, RunningBaseline()).value] * steps

    def learn(self, groups: Iterable[FinishedGroup]) -> None:
        """Learn from the groups of a batch that is filed: their trajectories' rewards, in order.

        This is part of the transaction that files the batch.
        """
        if not self.in_use:
            return
        changed: dict[tuple[str, int], RunningBaseline] = {}
        for group in groups:
            of_task = self._by_task.setdefault(group.task_id, {})
            for member in group.valid:
                old = {WHOLE_TASK: of_task.get(WHOLE_TASK, RunningBaseline())}
                if self._data.advantage == "step_baseline":
                    # All as they were before this trajectory, or a new step's would count it twice.
                    old |= dict(enumerate(expected_by_step(of_task, member.steps)))
                of_task |= {step: was.after(member.reward or 0.0) for step, was in old.items()}
                changed |= {(group.task_id, step): of_task[step] for step in old}
        self._store.save_baselines(
            BaselineRow(task_id, step, baseline.passed, baseline.failed)
            for (task_id, step), baseline in changed.items()
        )
