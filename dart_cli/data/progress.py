"""Progress of the run, counted as it happens: success by task and version, throughput, metrics.

    TaskProgress    one task's outcomes and rewards
    OwnPlay         how the policy itself plays, and how it played at the start
    Meter           events per minute
    RunProgress     the progress of all tasks, the policy's own play, throughput, and the newest metrics

Success is computed from the trajectories that count for it (`Group.uncounted`), verdicts from all. The
status page shows these numbers often, so they are kept in memory. The progress of tasks is stored with each
outcome and read at the next start; throughput starts from zero.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field

from bus.messages import Outcome
from bus.snapshot import OwnView, Rates
from dart_cli.algo.advantage import RewardKind, training_reward
from dart_cli.algo.statistics import wilson
from dart_cli.algo.task_sampling import MovingAverage, TaskEstimate
from dart_cli.data.store.analytics import Analytics
from dart_cli.data.store.writer import Store

CURVE_POINTS = 32
"""Points of a sparkline."""

_BUCKETS = 2 * CURVE_POINTS
"""Most buckets of a task, so that a bucket is never wider than a point of a curve."""

NEWEST = 1500
"""Number of newest trajectories that train.stop_at is compared with, equally many of each task. Members of
a group play the same instance, so they are worth about half as many independent instances. Trajectories
that pass end sooner and are counted sooner, but only few of so many are still in play. With 400, runs ended
by chance."""

METRICS_OF = 100
"""Number of newest batches whose metrics are read again at a start."""

REWARDS = 512
"""Trajectories in each of the two windows whose mean rewards are compared: the run's first ones and its
newest."""
COMPLETIONS = 1000
"""Completions in each of the two windows whose shares of malformed completions are compared."""

WINDOW_S = 60
"""Seconds over which throughput is averaged."""


@dataclass(frozen=True)
class NewestSuccess:
    """Success of the run's tasks over the newest counted trajectories of each task."""

    passed: int
    counted: int
    required: int  # trajectories of all tasks together
    lowest: str  # the task with the lowest success; empty before the first trajectory
    lowest_success: float | None

    @property
    def bound(self) -> float:
        """Lower 95 % bound of the tasks' mean success; 0 until each task has all its trajectories.

        It is the bound of Wilson's interval over all trajectories. Each task has equally many, so the share
        that passed is the mean over tasks, and its error is at most the error over as many trajectories of
        one task.
        """
        if self.counted < self.required:
            return 0.0
        return wilson(self.passed, self.counted)[0]


@dataclass
class RunCounters:
    """Numbers of counted trajectories and of passes, by the version that sampled a trajectory's oldest token.

    Versions are in equal buckets, whose width doubles when there are too many of them, so that a run of any
    length takes the same memory.
    """

    width: int = 1  # versions in a bucket: a power of two
    newest: int = -1  # version; -1 before the first trajectory
    passed: list[int] = field(default_factory=list)  # by bucket
    total: list[int] = field(default_factory=list)  # by bucket

    def add(self, version: int, passed: bool) -> None:
        """Count one trajectory."""
        version = max(version, 0)
        while version >= self.width * _BUCKETS:
            self.width *= 2
            self.passed, self.total = _pair_sums(self.passed), _pair_sums(self.total)
        bucket = version // self.width
        missing = [0] * (bucket + 1 - len(self.total))
        self.passed += missing
        self.total += missing
        self.passed[bucket] += passed
        self.total[bucket] += 1
        self.newest = max(self.newest, version)

    def curve(self, newest_version: int, points: int = CURVE_POINTS) -> list[float | None]:
        """Return the success in equal buckets of versions 0..newest, in order; None for an empty bucket."""
        if not self.total:
            return []
        versions = max(newest_version, self.newest) + 1
        width = self.width
        while versions > width * points:
            width *= 2
        buckets = width // self.width  # of ours in one of the curve
        curve: list[float | None] = []
        for start in range(0, -(-versions // width) * buckets, buckets):
            total = sum(self.total[start : start + buckets])
            passed = sum(self.passed[start : start + buckets])
            curve.append(passed / total if total else None)
        return curve


def _pair_sums(counts: list[int]) -> list[int]:
    """Return the sums of neighbours, two by two."""
    return [sum(counts[index : index + 2]) for index in range(0, len(counts), 2)]


def _newest(tasks: int = 1, outcomes: Iterable[bool] = ()) -> deque[bool]:
    """Return a queue of the newest trajectories of one task, in a run of `tasks` tasks; True is a pass."""
    return deque(outcomes, maxlen=math.ceil(NEWEST / max(1, tasks)))


@dataclass
class Verdicts:
    """Numbers of trajectories by outcome."""

    passed: int = 0
    failed: int = 0
    invalid: int = 0

    def add(self, outcome: Outcome, _steps: int) -> None:
        """Count one trajectory."""
        self.passed += outcome == "pass"
        self.failed += outcome == "fail"
        self.invalid += outcome == "invalid"


@dataclass
class TaskProgress(Verdicts):
    """One task's outcomes: all of them, and those that count for success."""

    average: MovingAverage = field(default_factory=MovingAverage)  # success of counted trajectories
    counters: RunCounters = field(default_factory=RunCounters)  # counted trajectories by version
    reward: MovingAverage = field(default_factory=MovingAverage)  # rewards of counted trajectories
    square: MovingAverage = field(default_factory=MovingAverage)  # squares of these rewards
    invalid_share: MovingAverage = field(default_factory=MovingAverage)  # of all episodes
    invalid_after_action: int = 0  # episodes that became invalid after an action
    newest: deque[bool] = field(default_factory=_newest)
    """The newest counted trajectories: True for a pass."""

    @property
    def counted(self) -> int:
        """Number of trajectories that count for success."""
        return sum(self.counters.total)

    @property
    def variance(self) -> float | None:
        """Variance of the rewards, in [0, 1 / 4]: p (1 - p) if they are 0 and 1. None before the first."""
        mean, square = self.reward.value, self.square.value
        return None if mean is None or square is None else max(square - mean * mean, 0.0)

    def estimate(self, kind: RewardKind) -> TaskEstimate:
        """Return the estimate for schedulers, by success or by rewards as values; `kind` is data.reward."""
        variance, rate = self.variance, self.average.value
        if kind == "outcome":
            variance = None if rate is None else rate * (1 - rate)
        return TaskEstimate(variance, self.invalid_share.value or 0.0)

    def add(self, outcome: Outcome, steps: int) -> None:
        """Count an episode of so many steps that has an outcome."""
        super().add(outcome, steps)
        self.invalid_share = self.invalid_share.add(float(outcome == "invalid"))
        self.invalid_after_action += outcome == "invalid" and steps > 0

    def count(self, passed: bool, version: int | None, reward: float | None = None) -> None:
        """Count one trajectory for success; `version` sampled its oldest token.

        Without `reward`, the reward is 1 for a pass and 0 for a failure.
        """
        reward = float(passed) if reward is None else reward
        self.average = self.average.add(float(passed))
        self.reward, self.square = self.reward.add(reward), self.square.add(reward * reward)
        self.counters.add(-1 if version is None else version, passed)
        self.newest.append(passed)

    @classmethod
    def from_json(cls, text: str, tasks: int = 1) -> TaskProgress:
        """Return the progress that `to_json` wrote, bit for bit, in a run of so many tasks."""
        values = json.loads(text)
        averages = {name: MovingAverage(*values[name]) for name in _AVERAGES}
        counters = RunCounters(**values["counters"])
        newest = _newest(tasks, map(bool, values["newest"]))
        return cls(**{**values, **averages, "counters": counters, "newest": newest})

    def to_json(self) -> str:
        """Return the progress as JSON, which is stored after each outcome."""
        averages = {name: astuple(getattr(self, name)) for name in _AVERAGES}
        lists = {"counters": vars(self.counters), "newest": list(map(int, self.newest))}
        return json.dumps({**vars(self), **averages, **lists}, separators=(",", ":"))


_AVERAGES = ("average", "reward", "square", "invalid_share")
"""The fields of TaskProgress that are moving averages."""


class Meter:
    """A count of events per minute over the last `window_s` seconds, in buckets of a second."""

    def __init__(self, started: float, window_s: int = WINDOW_S) -> None:
        self._started = started  # monotonic seconds
        self._window_s = window_s
        self._buckets: deque[tuple[int, int]] = deque()  # second, events

    def add(self, now: float, events: int = 1) -> None:
        """Count events at monotonic second `now`."""
        second = int(now)
        if self._buckets and self._buckets[-1][0] == second:
            self._buckets[-1] = (second, self._buckets[-1][1] + events)
        else:
            self._buckets.append((second, events))
        self._forget(now)

    def per_minute(self, now: float) -> float:
        """Return the events per minute over the window, or since the start if that is shorter."""
        self._forget(now)
        seconds = min(max(now - self._started, 1.0), self._window_s)
        return 60.0 * sum(events for _, events in self._buckets) / seconds

    def _forget(self, now: float) -> None:
        while self._buckets and self._buckets[0][0] < now - self._window_s:
            self._buckets.popleft()


class _Ends:
    """The first `size` values of a series and the newest `size`."""

    def __init__(
        self, size: int, first: Iterable[float] = (), newest: Iterable[float] = ()
    ) -> None:
        self._size = size
        self._first = list(first)
        self._newest = deque(newest, maxlen=size)

    def add(self, value: float) -> None:
        if len(self._first) < self._size:
            self._first.append(value)
        self._newest.append(value)

    @property
    def means(self) -> tuple[float, float]:
        """Means of the first and of the newest values; 0 before there is a value."""
        return (
            sum(self._first) / max(1, len(self._first)),
            sum(self._newest) / max(1, len(self._newest)),
        )


class OwnPlay:
    """Counts of what the policy itself played, without members of the experience pool and replays.

    `restored_play` reads the counts of earlier starts.
    """

    def __init__(self) -> None:
        self.rewards = _Ends(REWARDS)
        self.malformed = _Ends(COMPLETIONS)
        self.passed = self.completions = 0
        self.failed_since = 0  # trajectories since the newest success, or since the start
        self.updates_then = 0  # updates in the weights at that success; 0 before the first

    def completion(self, is_malformed: bool) -> None:
        """Count a completion of the policy; it is malformed if its text is no action."""
        self.malformed.add(float(is_malformed))
        self.completions += 1

    def trajectory(self, passed: bool, reward: float, updates: int) -> None:
        """Count a trajectory that passed or failed while there were so many updates in the weights."""
        self.rewards.add(reward)
        self.failed_since += 1
        if passed:
            self.passed += 1
            self.failed_since, self.updates_then = 0, updates

    def view(self, updates: int) -> OwnView:
        """Return the counts for the status page, when there are so many updates in the weights."""
        reward_first, reward = self.rewards.means
        malformed_first, malformed = self.malformed.means
        return OwnView(
            passed=self.passed,
            failed_since=self.failed_since,
            updates_since=max(0, updates - self.updates_then),
            completions=self.completions,
            window=COMPLETIONS,
            malformed_first=malformed_first,
            malformed=malformed,
            reward_first=reward_first,
            reward=reward,
        )


def restored_play(store: Analytics, kind: RewardKind) -> OwnPlay:
    """Return the counts of what the policy played in the stored run; `kind` is data.reward."""
    own, counts = OwnPlay(), store.own_counts()
    own.passed, own.completions = counts.passed, counts.completions
    own.failed_since, own.updates_then = counts.failed_since, counts.updates_then
    own.malformed = _Ends(
        COMPLETIONS, store.own_malformed(COMPLETIONS), store.own_malformed(COMPLETIONS, newest=True)
    )
    first, newest = (
        [training_reward(outcome, reward, kind) or 0.0 for outcome, reward in verdicts]
        for verdicts in (store.own_verdicts(REWARDS), store.own_verdicts(REWARDS, newest=True))
    )
    own.rewards = _Ends(REWARDS, first, newest)
    return own


class RunProgress:
    """The progress of one run."""

    def __init__(self, task_ids: Iterable[str], now: float) -> None:
        self._present = tuple(task_ids)  # `tasks` also has tasks that were removed from the run
        self.tasks = {task_id: self._unplayed() for task_id in self._present}
        self.all = Verdicts()
        self.trajectories = Meter(now)
        self.steps = Meter(now)
        self.actions = Meter(now)
        self.updates = Meter(now)
        self.own = OwnPlay()
        self._metrics: dict[str, deque[tuple[int, float]]] = {}  # name -> (batch id, value)

    def outcome(self, task_id: str, outcome: Outcome, steps: int = 0) -> None:
        """Count a trajectory of the task, of so many steps, that has an outcome."""
        for verdicts in (self._task(task_id), self.all):
            verdicts.add(outcome, steps)

    def count(
        self, task_id: str, passed: bool, version: int | None, reward: float | None = None
    ) -> None:
        """Count a trajectory for its task's success, as TaskProgress.count does."""
        self._task(task_id).count(passed, version, reward)

    def _task(self, task_id: str) -> TaskProgress:
        return self.tasks.setdefault(task_id, self._unplayed())

    def _unplayed(self) -> TaskProgress:
        return TaskProgress(newest=_newest(len(self._present)))

    def restore(self, store: Store, formed: int, kind: RewardKind) -> None:
        """Read the stored progress; `formed` is the newest batch's id, `kind` is data.reward."""
        self.restore_tasks(store.task_progress())
        self.own = restored_play(store, kind)
        for point in store.metrics(after=formed - METRICS_OF):
            self.train_metrics(point.step, {point.name: point.value})

    def restore_tasks(self, texts: Mapping[str, str]) -> None:
        """Read the tasks' progress from task id -> what TaskProgress.to_json returned."""
        for task_id, text in texts.items():
            task = self.tasks[task_id] = TaskProgress.from_json(text, len(self._present))
            self.all.passed += task.passed
            self.all.failed += task.failed
            self.all.invalid += task.invalid

    def estimates(self, kind: RewardKind) -> dict[str, TaskEstimate]:
        """Return each task's estimate, as TaskProgress.estimate does."""
        return {task_id: task.estimate(kind) for task_id, task in self.tasks.items()}

    def mean_reward(self) -> float | None:
        """Return the mean of the moving averages of the tasks' rewards; None before the first."""
        return _mean(self.tasks[task_id].reward.value for task_id in self._present)

    def mean_success(self) -> float | None:
        """Return the mean of the moving averages of the tasks' success; None before the first.

        Each task counts equally, however often it is played. A mean over trajectories would depend on the
        scheduler, since `frontier` prefers tasks that are not solved yet.
        """
        return _mean(self.tasks[task_id].average.value for task_id in self._present)

    def newest_success(self) -> NewestSuccess:
        """Return the success that train.stop_at is compared with."""
        newest = {task_id: self.tasks[task_id].newest for task_id in self._present}
        rates = {task_id: sum(passed) / len(passed) for task_id, passed in newest.items() if passed}
        lowest = min(rates, key=lambda task_id: rates[task_id], default="")
        return NewestSuccess(
            passed=sum(map(sum, newest.values())),
            counted=sum(map(len, newest.values())),
            required=sum(passed.maxlen or 0 for passed in newest.values()),
            lowest=lowest,
            lowest_success=rates.get(lowest),
        )

    def mean_curve(self, newest_version: int) -> list[float | None]:
        """Return the mean of the tasks' curves of success, at each point over the tasks with a value."""
        tallies = [self.tasks[task_id].counters for task_id in self._present]
        newest = max([newest_version, *(counters.newest for counters in tallies)])
        curves = [counters.curve(newest) for counters in tallies]
        return [_mean(points) for points in zip(*filter(None, curves), strict=True)]

    def train_metrics(self, batch_id: int, values: Mapping[str, float]) -> None:
        """Add the metrics of an update."""
        for name, value in values.items():
            self._metrics.setdefault(name, deque(maxlen=CURVE_POINTS)).append((batch_id, value))

    def forget_metrics(self, after: int) -> None:
        """Forget the metrics of batches above `after`, which are trained on again."""
        for name, points in self._metrics.items():
            earlier = [(batch_id, value) for batch_id, value in points if batch_id <= after]
            self._metrics[name] = deque(earlier, maxlen=CURVE_POINTS)

    def metrics(self) -> dict[str, float]:
        """Return the newest value of each metric."""
        return {name: points[-1][1] for name, points in self._metrics.items() if points}

    def metric_curves(self) -> dict[str, list[float]]:
        """Return recent values of each metric, the oldest first."""
        return {name: [value for _, value in points] for name, points in self._metrics.items()}

    def rates(self, now: float) -> Rates:
        """Return the throughput of the last minute."""
        return Rates(
            window_s=WINDOW_S,
            trajectories=self.trajectories.per_minute(now),
            steps=self.steps.per_minute(now),
            actions=self.actions.per_minute(now),
            updates=self.updates.per_minute(now),
        )


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None; None if there are none."""
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None
