"""Progress of the run, counted as it happens: success by task and version, throughput, metrics.

Success is of the trajectories that count for it (`Group.uncounted`); verdicts are of all.
What the status page shows often, without a query of the database. The tasks' part is
written down with each outcome and read at the next start; throughput starts from zero.
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
"""Of a task at most; so its width is never above that of a curve's points."""

NEWEST = 1500
"""Newest trajectories that train.stop_at looks at, as many of each task. Members of a group play the same
instance, so these tell about as much as half of them would of as many instances. They are counted as they
end, and those that pass end sooner: few of so many are still in play. Over 400 runs ended by chance."""

METRICS_OF = 100
"""Batches, the newest ones, whose metrics are read again at a start."""

REWARDS = 512
"""Trajectories in each of the two windows whose mean rewards are compared: the run's first, its newest."""
COMPLETIONS = 1000
"""Completions in each of the two windows whose shares of malformed ones are compared, likewise."""

WINDOW_S = 60
"""Seconds over which throughput is averaged."""


@dataclass(frozen=True)
class NewestSuccess:
    """Success of the run's tasks over the newest trajectories of each that count for it."""

    passed: int
    counted: int
    wanted: int  # trajectories of all tasks together
    lowest: str  # the task with the fewest passes; empty before the first trajectory
    lowest_success: float | None  # its own

    @property
    def bound(self) -> float:
        """Lower bound, 95 %, of the tasks' mean success; 0 until each task has all its trajectories.

        Of Wilson's interval over all of them: as many are of each task, so their share is the tasks' mean,
        and its error is at most that of as many trajectories of one task.
        """
        if self.counted < self.wanted:
            return 0.0
        return wilson(self.passed, self.counted)[0]


@dataclass
class RunCounters:
    """Passed and judged trajectories by the policy version that sampled their oldest token.

    Only of those that count for success.
    In equal buckets of versions, whose width doubles when there are too many: a run of any length
    takes the same memory.
    """

    width: int = 1  # versions in a bucket: a power of two
    newest: int = -1  # version; -1 before the first trajectory
    passed: list[int] = field(default_factory=list)  # by bucket
    judged: list[int] = field(default_factory=list)

    def add(self, version: int, passed: bool) -> None:
        """Count one trajectory."""
        version = max(version, 0)
        while version >= self.width * _BUCKETS:
            self.width *= 2
            self.passed, self.judged = _in_pairs(self.passed), _in_pairs(self.judged)
        bucket = version // self.width
        missing = [0] * (bucket + 1 - len(self.judged))
        self.passed += missing
        self.judged += missing
        self.passed[bucket] += passed
        self.judged[bucket] += 1
        self.newest = max(self.newest, version)

    def curve(self, newest_version: int, points: int = CURVE_POINTS) -> list[float | None]:
        """Success in equal buckets of versions 0..newest, oldest first; None where none ended."""
        if not self.judged:
            return []
        versions = max(newest_version, self.newest) + 1
        width = self.width
        while versions > width * points:
            width *= 2
        each = width // self.width
        found: list[float | None] = []
        for start in range(0, -(-versions // width) * each, each):
            judged = sum(self.judged[start : start + each])
            found.append(sum(self.passed[start : start + each]) / judged if judged else None)
        return found


def _in_pairs(counts: list[int]) -> list[int]:
    """Return the sums of each two that are neighbours."""
    return [sum(counts[index : index + 2]) for index in range(0, len(counts), 2)]


def _newest(tasks: int = 1, outcomes: Iterable[bool] = ()) -> deque[bool]:
    """Room for the newest trajectories of one of so many tasks."""
    return deque(outcomes, maxlen=math.ceil(NEWEST / max(1, tasks)))


@dataclass
class Verdicts:
    """All trajectories by outcome."""

    passed: int = 0
    failed: int = 0
    invalid: int = 0

    def add(self, outcome: Outcome, _steps: int) -> None:
        """Count one."""
        self.passed += outcome == "pass"
        self.failed += outcome == "fail"
        self.invalid += outcome == "invalid"


@dataclass
class TaskProgress(Verdicts):
    """One task's outcomes."""

    average: MovingAverage = field(default_factory=MovingAverage)
    counters: RunCounters = field(default_factory=RunCounters)
    reward: MovingAverage = field(default_factory=MovingAverage)  # of what `average` is of
    square: MovingAverage = field(default_factory=MovingAverage)  # of the squared rewards
    invalid_share: MovingAverage = field(default_factory=MovingAverage)  # of all episodes
    invalid_after_action: int = 0  # invalid ones that broke after an action
    newest: deque[bool] = field(default_factory=_newest)  # as `average`: whether it passed

    @property
    def counted(self) -> int:
        """Trajectories that its success is of."""
        return sum(self.counters.judged)

    @property
    def variance(self) -> float | None:
        """Of the rewards, in [0, 1 / 4]: p (1 - p) where they are 0 and 1. None before the first."""
        mean, square = self.reward.value, self.square.value
        return None if mean is None or square is None else max(square - mean * mean, 0.0)

    def estimate(self, kind: RewardKind) -> TaskEstimate:
        """Return what schedulers go by; `kind` is data.reward: of its success, or of its reward's `value`."""
        variance, rate = self.variance, self.average.value
        if kind == "outcome":
            variance = None if rate is None else rate * (1 - rate)
        return TaskEstimate(variance, self.invalid_share.value or 0.0)

    def add(self, outcome: Outcome, steps: int) -> None:
        """Count an episode of so many steps that was judged; one that was cancelled was not."""
        super().add(outcome, steps)
        self.invalid_share = self.invalid_share.add(float(outcome == "invalid"))
        self.invalid_after_action += outcome == "invalid" and steps > 0

    def count(self, passed: bool, version: int | None, reward: float | None = None) -> None:
        """One trajectory counts for success; `version` sampled its oldest token.

        Without a reward it is that of its outcome.
        """
        reward = float(passed) if reward is None else reward
        self.average = self.average.add(float(passed))
        self.reward, self.square = self.reward.add(reward), self.square.add(reward * reward)
        self.counters.add(-1 if version is None else version, passed)
        self.newest.append(passed)

    @classmethod
    def read(cls, text: str, tasks: int = 1) -> TaskProgress:
        """As it was when it was written down, bit for bit; `tasks` are the run's."""
        values = json.loads(text)
        averages = {name: MovingAverage(*values[name]) for name in _AVERAGES}
        counters = RunCounters(**values["counters"])
        newest = _newest(tasks, map(bool, values["newest"]))
        return cls(**{**values, **averages, "counters": counters, "newest": newest})

    def to_json(self) -> str:
        """JSON, to be written down after each outcome."""
        averages = {name: astuple(getattr(self, name)) for name in _AVERAGES}
        lists = {"counters": vars(self.counters), "newest": [int(each) for each in self.newest]}
        return json.dumps({**vars(self), **averages, **lists}, separators=(",", ":"))


_AVERAGES = ("average", "reward", "square", "invalid_share")
"""The fields of TaskProgress that are moving averages."""


class Meter:
    """Events per minute over the last `window_s` seconds, in buckets of a second."""

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
        """Return the rate over the window, or over the time since the start if that is shorter."""
        self._forget(now)
        seconds = min(max(now - self._started, 1.0), self._window_s)
        return 60.0 * sum(events for _, events in self._buckets) / seconds

    def _forget(self, now: float) -> None:
        while self._buckets and self._buckets[0][0] < now - self._window_s:
            self._buckets.popleft()


class _Ends:
    """The first values of a series and the newest, as many of each."""

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
        """Of the first and of the newest; 0 before there is a value."""
        return (
            sum(self._first) / max(1, len(self._first)),
            sum(self._newest) / max(1, len(self._newest)),
        )


class OwnPlay:
    """What the policy itself played, whatever filled its groups: neither the pool's members nor replays.

    `restored_play` goes on with the counts of an earlier start.
    """

    def __init__(self) -> None:
        self.rewards = _Ends(REWARDS)
        self.malformed = _Ends(COMPLETIONS)
        self.passed = self.completions = 0
        self.failed_since = 0  # trajectories since the newest success, or since the start
        self.updates_then = 0  # updates in the weights at that success; 0 before the first

    def completion(self, malformed: bool) -> None:
        """Count an answer of the policy to a screen; `malformed` where its text was no action."""
        self.malformed.add(float(malformed))
        self.completions += 1

    def trajectory(self, passed: bool, reward: float, updates: int) -> None:
        """Count a trajectory that was judged while there were so many updates in the weights."""
        self.rewards.add(reward)
        self.failed_since += 1
        if passed:
            self.passed += 1
            self.failed_since, self.updates_then = 0, updates

    def view(self, updates: int) -> OwnView:
        """As of so many updates."""
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
    """Return what the policy played in the stored run; `kind` is data.reward."""
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
    """All of the above for one run."""

    def __init__(self, task_ids: Iterable[str], now: float) -> None:
        self._present = tuple(task_ids)  # `tasks` also keeps those that the run once had
        self.tasks = {task_id: self._unplayed() for task_id in self._present}
        self.all = Verdicts()
        self.trajectories = Meter(now)
        self.steps = Meter(now)
        self.actions = Meter(now)
        self.updates = Meter(now)
        self.own = OwnPlay()
        self._metrics: dict[str, deque[tuple[int, float]]] = {}  # name -> (batch id, value)

    def outcome(self, task_id: str, outcome: Outcome, steps: int = 0) -> None:
        """Count a trajectory of the task, of so many steps, that was judged; a cancelled one was not."""
        for verdicts in (self._task(task_id), self.all):
            verdicts.add(outcome, steps)

    def count(
        self, task_id: str, passed: bool, version: int | None, reward: float | None = None
    ) -> None:
        """See TaskProgress."""
        self._task(task_id).count(passed, version, reward)

    def _task(self, task_id: str) -> TaskProgress:
        return self.tasks.setdefault(task_id, self._unplayed())

    def _unplayed(self) -> TaskProgress:
        return TaskProgress(newest=_newest(len(self._present)))

    def restore(self, store: Store, formed: int, kind: RewardKind) -> None:
        """Go on from what was written down; `formed` is the newest batch's id, `kind` data.reward."""
        self.restore_tasks(store.task_progress())
        self.own = restored_play(store, kind)
        for point in store.metrics(after=formed - METRICS_OF):
            self.train_metrics(point.step, {point.name: point.value})

    def restore_tasks(self, written: Mapping[str, str]) -> None:
        """How tasks fare, by id, as TaskProgress.to_json made it."""
        for task_id, text in written.items():
            task = self.tasks[task_id] = TaskProgress.read(text, len(self._present))
            self.all.passed += task.passed
            self.all.failed += task.failed
            self.all.invalid += task.invalid

    def estimates(self, kind: RewardKind) -> dict[str, TaskEstimate]:
        """Each task's; see TaskProgress."""
        return {task_id: task.estimate(kind) for task_id, task in self.tasks.items()}

    def mean_reward(self) -> float | None:
        """As `mean_success`, of the rewards."""
        return _mean(self.tasks[task_id].reward.value for task_id in self._present)

    def mean_success(self) -> float | None:
        """Mean of the moving averages of the run's tasks: each counts alike, however often played.

        A mean over trajectories would depend on the scheduler: `frontier` plays the tasks
        that are not solved yet.
        """
        return _mean(self.tasks[task_id].average.value for task_id in self._present)

    def newest_success(self) -> NewestSuccess:
        """Return what train.stop_at looks at."""
        newest = {task_id: self.tasks[task_id].newest for task_id in self._present}
        rates = {each: sum(passed) / len(passed) for each, passed in newest.items() if passed}
        lowest = min(rates, key=lambda each: rates[each], default="")
        return NewestSuccess(
            passed=sum(map(sum, newest.values())),
            counted=sum(map(len, newest.values())),
            wanted=sum(passed.maxlen or 0 for passed in newest.values()),
            lowest=lowest,
            lowest_success=rates.get(lowest),
        )

    def mean_curve(self, newest_version: int) -> list[float | None]:
        """Mean of the curves of the run's tasks, where a task has a point."""
        tallies = [self.tasks[task_id].counters for task_id in self._present]
        newest = max([newest_version, *(counters.newest for counters in tallies)])
        curves = [counters.curve(newest) for counters in tallies]
        return [_mean(points) for points in zip(*filter(None, curves), strict=True)]

    def train_metrics(self, batch_id: int, values: Mapping[str, float]) -> None:
        """Keep the metrics of the newest train step."""
        for name, value in values.items():
            self._metrics.setdefault(name, deque(maxlen=CURVE_POINTS)).append((batch_id, value))

    def forget_metrics(self, after: int) -> None:
        """Batches above `after` are to be trained again."""
        for name, points in self._metrics.items():
            kept = [(batch_id, value) for batch_id, value in points if batch_id <= after]
            self._metrics[name] = deque(kept, maxlen=CURVE_POINTS)

    def metrics(self) -> dict[str, float]:
        """Newest value of each metric."""
        return {name: points[-1][1] for name, points in self._metrics.items() if points}

    def metric_curves(self) -> dict[str, list[float]]:
        """Recent values of each metric, oldest first."""
        return {name: [value for _, value in points] for name, points in self._metrics.items()}

    def rates(self, now: float) -> Rates:
        """Throughput of the last minute."""
        return Rates(
            window_s=WINDOW_S,
            trajectories=self.trajectories.per_minute(now),
            steps=self.steps.per_minute(now),
            actions=self.actions.per_minute(now),
            updates=self.updates.per_minute(now),
        )


def _mean(values: Iterable[float | None]) -> float | None:
    """Mean of those that are known; None if none is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
