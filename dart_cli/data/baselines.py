"""What each task's trajectories lead one to expect, where groups have one member: live, and in the store.

    Baselines   the trackers of one run: `expected` before a batch, `learn` of it when it is filed

A tracker learns of a trajectory when the batch with it is filed, in the transaction that files the batch,
so that the trackers follow from the batches alone: after any restart they are those of a run without one.
Invalid trajectories teach them nothing, nor do members of the pool, whose rewards are not the policy's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Protocol

from dart_cli.algo.success_trackers import WHOLE_TASK, Tracker, expected_by_step
from dart_cli.config.schema import BY_TRACKER, DataConfig
from dart_cli.data.curate import FinishedGroup, Tracking
from dart_cli.data.store.rows import TrackerRow


class TrackerStore(Protocol):
    """Where trackers are kept: a run's Store."""

    def trackers(self) -> Iterable[TrackerRow]:
        """As they were saved last."""
        ...

    def save_trackers(self, rows: Iterable[TrackerRow]) -> None:
        """Keep these."""
        ...


class Baselines:
    """Trackers by task and step. Nothing without an advantage by trackers."""

    def __init__(self, data: DataConfig, store: TrackerStore) -> None:
        self._data = data
        self._store = store
        self._by_task: dict[str, dict[int, Tracker]] = {}  # task id -> step, or WHOLE_TASK
        if self.in_use:
            for row in store.trackers():
                of_task = self._by_task.setdefault(row.task_id, {})
                of_task[row.step] = Tracker(row.passed, row.failed)

    @property
    def in_use(self) -> bool:
        """Whether advantages are by trackers."""
        return self._data.advantage in BY_TRACKER

    @property
    def comparison(self) -> Tracking | None:
        """How trajectories are compared with the trackers; None without an advantage by trackers."""
        if not self.in_use:
            return None
        return Tracking(self.expected, self._data.tracker_margin)

    @property
    def reason(self) -> Literal["mixed", "tracked"]:
        """Why a trajectory is trained on."""
        return "tracked" if self.in_use else "mixed"

    def expected(self, task_id: str, steps: int) -> list[float]:
        """Return the reward that is expected at each step [steps] of an episode of the task, as of now."""
        of_task = self._by_task.get(task_id, {})
        if self._data.advantage == "step_tracker":
            return [tracker.value for tracker in expected_by_step(of_task, steps)]
        return [of_task.get(WHOLE_TASK, Tracker()).value] * steps

    def learn(self, groups: Iterable[FinishedGroup]) -> None:
        """Learn from the groups of a batch that is filed: their trajectories' rewards, in order.

        This is part of the transaction that files the batch.
        """
        if not self.in_use:
            return
        changed: dict[tuple[str, int], Tracker] = {}
        for group in groups:
            of_task = self._by_task.setdefault(group.task_id, {})
            for member in group.valid:
                old = {WHOLE_TASK: of_task.get(WHOLE_TASK, Tracker())}
                if self._data.advantage == "step_tracker":
                    # All as they were before this trajectory, or a new step's would count it twice.
                    old |= dict(enumerate(expected_by_step(of_task, member.steps)))
                of_task |= {step: was.after(member.reward or 0.0) for step, was in old.items()}
                changed |= {(group.task_id, step): of_task[step] for step in old}
        self._store.save_trackers(
            TrackerRow(task_id, step, tracker.passed, tracker.failed)
            for (task_id, step), tracker in changed.items()
        )
