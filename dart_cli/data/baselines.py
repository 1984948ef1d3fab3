"""What each task's trajectories lead one to expect, where groups have one member: live, and in the store.

    Baselines   the trackers of one run: `expected` before a batch, `learn` of it when it is filed

A tracker learns of a trajectory when the batch with it is filed, in the transaction that files the batch,
so that the trackers follow from the batches alone: after any restart they are those of a run without one.
What a tracker forgets follows how far the policy moved between the trajectories (data.tracker_half_life).
Invalid trajectories teach them nothing, nor do members of the pool, whose rewards are not the policy's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal, Protocol

from dart_cli.algo.trackers import WHOLE_TASK, Tracker, decay_of, expected_by_step
from dart_cli.config.schema import BY_TRACKER, Config
from dart_cli.data.curate import FinishedGroup, Tracking
from dart_cli.data.odometer import Measurements, Odometer, restored
from dart_cli.data.store.rows import TrackerRow

Newest = Callable[[str], int]
"""A trajectory's id -> updates in the newest weights that sampled it."""


class TrackerStore(Measurements, Protocol):
    """Where trackers are kept: a run's Store."""

    def trackers(self) -> Iterable[TrackerRow]:
        """As they were saved last."""
        ...

    def save_trackers(self, rows: Iterable[TrackerRow]) -> None:
        """Keep these."""
        ...


class Baselines:
    """Trackers by task and step. Nothing without an advantage by trackers."""

    def __init__(self, config: Config, store: TrackerStore) -> None:
        self._data = config.data
        self._store = store
        self._by_task: dict[str, dict[int, Tracker]] = {}  # task id -> step, or WHOLE_TASK
        if self.in_use:
            for row in store.trackers():
                of_task = self._by_task.setdefault(row.task_id, {})
                of_task[row.step] = Tracker(row.passed, row.failed, row.moved)
        self._every = config.weights.publish_every
        self._odometer = Odometer(self._every)
        self.resumed()

    @property
    def in_use(self) -> bool:
        """Whether advantages are by trackers."""
        return self._data.advantage in BY_TRACKER

    @property
    def tracking(self) -> Tracking | None:
        """How trajectories are compared with the trackers; None without an advantage by trackers."""
        if not self.in_use:
            return None
        return Tracking(self.expected, self._data.tracker_scale, self._data.tracker_margin)

    @property
    def reason(self) -> Literal["mixed", "tracked"]:
        """Why a trajectory is trained on."""
        return "tracked" if self.in_use else "mixed"

    def expected(self, task_id: str, steps: int) -> list[float]:
        """The reward that is expected at each step [steps] of an episode of the task, as of now."""
        return [tracker.value for tracker in self._at(task_id, steps)]

    def trained(self, metrics: Mapping[str, float]) -> None:
        """The next batch is in the weights, with these metrics."""
        self._odometer.add(metrics)

    def resumed(self) -> None:
        """The batches that are in the weights are others now: those of a checkpoint."""
        if self.in_use:
            self._odometer = restored(self._store, self._every)

    def learn(self, groups: Iterable[FinishedGroup], newest: Newest) -> None:
        """A batch of these is filed: their trajectories' rewards, in order. Part of its transaction."""
        if not self.in_use:
            return
        changed: dict[tuple[str, int], Tracker] = {}
        for group in groups:
            for member in group.valid:
                moved = self._odometer.at(newest(member.trajectory_id))
                changed |= self._learn(group.task_id, member.reward or 0.0, member.steps, moved)
        self._store.save_trackers(
            TrackerRow(task_id, step, tracker.passed, tracker.failed, tracker.moved)
            for (task_id, step), tracker in changed.items()
        )

    def _at(self, task_id: str, steps: int) -> list[Tracker]:
        of_task = self._by_task.get(task_id, {})
        if self._data.advantage == "step_tracker":
            return expected_by_step(of_task, steps)
        return [of_task.get(WHOLE_TASK, Tracker())] * steps

    def _decay(self, tracker: Tracker, moved: float | None) -> float:
        """What the tracker keeps when the next outcome was sampled after `moved` nats."""
        if moved is None or tracker.moved is None or not self._data.tracker_half_life:
            return self._data.tracker_decay
        return decay_of(moved - tracker.moved, self._data.tracker_half_life)

    def _learn(
        self, task_id: str, reward: float, steps: int, moved: float | None
    ) -> dict[tuple[str, int], Tracker]:
        of_task = self._by_task.setdefault(task_id, {})
        old = {WHOLE_TASK: of_task.get(WHOLE_TASK, Tracker())}
        if self._data.advantage == "step_tracker":
            # All as they were before this trajectory, or a new step's would count it twice.
            old |= dict(enumerate(expected_by_step(of_task, steps)))
        new = {step: was.after(reward, self._decay(was, moved), moved) for step, was in old.items()}
        of_task |= new
        return {(task_id, step): tracker for step, tracker in new.items()}
