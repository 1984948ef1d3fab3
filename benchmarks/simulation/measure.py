"""Computes throughput, utilisation and losses from a recording and its run's database.

    measure   Recording and database -> Measured
    Measured  one run's figures

Shares are of the seconds of the window: of every environment slot, of every rollout worker, of the
trainer. Each process measures its own time by phase (dart_cli.runtime.waits) and reports it in
its heartbeats; time that no process reports, because it was down, counts as `dead`. All per-minute
figures are per simulated minute: wall-clock seconds times the speedup.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

from benchmarks.run_times import EpisodeTimes, episode_times, step_times
from benchmarks.simulation.bound import Bound
from benchmarks.simulation.recording import ProcessCost, Recording
from bus.messages import Heartbeat
from dart_cli.data.store.reader import Reader
from dart_cli.runtime.waits import PREFIX

AT_WORK = ("playing", "waiting", "resetting")
"""Phases in which an environment slot is at work on an episode."""
ACTING = ("playing", "resetting")
"""Of these, the ones in which the GUI itself works."""
LOST = ("worker_lost", "lease_expired", "incomplete")
"""Drop reasons of trajectories that were lost to a fault; curation's reasons are not among them."""


@dataclass(frozen=True)
class Measured:
    """One run's figures; see the module for units."""

    actions_per_minute: float
    trained_actions_per_minute: float  # those whose step is in the weights
    actions_per_env_minute: float
    env: dict[str, float]  # share by phase, adds up to 1
    rollout: dict[str, float]
    trainer: dict[str, float]
    env_utilisation: float  # slots at work on an episode: playing, resetting, waiting for the model
    env_acting: float  # slots whose GUI itself works: playing, resetting
    rollout_utilisation: float  # workers with at least one request running
    rollout_load: float  # places of a batch that were taken
    trainer_utilisation: float
    staleness_mean: float  # versions, over trained tokens
    staleness_max: int
    dropped: dict[str, int]  # trajectories by reason
    wasted_steps: float  # share of the steps played that were dropped
    finished_lost: int  # trajectories that ended with a verdict and are not in the database
    aborted: int  # episodes that were cut off
    updates: int
    syncs: int
    sync_refused: int
    pause_s: float  # mean of a worker's pause for weights, simulated seconds
    most_syncing: int  # workers that took weights at the same moment
    kills: int
    faults: int  # episodes whose environment broke
    data_cores: float  # CPU seconds of `dart data` per second
    cores: float  # of all processes
    bound_actions_per_minute: float
    bound_by: str
    achieved_over_bound: float

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for JSON, rounded to four digits."""
        return {key: _rounded(value) for key, value in asdict(self).items()}


def measure(
    recording: Recording, reader: Reader, bound: Bound, *, slots: int, speedup: float
) -> Measured:
    """Return the figures of one run; `slots` environments in all."""
    began, end = recording.began, recording.end
    minutes = recording.seconds * speedup / 60.0
    actions = sum(began <= step.at < end for step in step_times(reader))
    trained = sum(p.value for p in reader.metrics("samples") if began <= p.at < end)
    by_role = _by_role(recording.beats)
    workers = len({beat.worker for beat in by_role["rollout"]})
    env = _shares(_spent(by_role["env"], began, end), slots * recording.seconds)
    rollout = _shares(_spent(by_role["rollout"], began, end), workers * recording.seconds)
    trainer = _shares(_spent(by_role["train"], began, end), recording.seconds)
    load_s = _increments(by_role["rollout"], "load_s", began, end)
    episodes = episode_times(reader)
    ended_then = [
        episode
        for episode in episodes
        if episode.ended_at is not None and began <= episode.ended_at < end
    ]
    dropped: dict[str, int] = defaultdict(int)
    dropped_steps = 0
    for episode in ended_then:
        if episode.state == "dropped":
            dropped[episode.reason] += 1
            dropped_steps += episode.steps or 0
    syncs = [sync for sync in reader.syncs() if began <= sync.done_at < end]
    successes = [sync for sync in syncs if not sync.error]
    histogram = reader.staleness()
    tokens = sum(histogram.values())
    cores = cores_by_role(recording.costs, began, end)
    per_minute = actions / minutes
    return Measured(
        actions_per_minute=per_minute,
        trained_actions_per_minute=trained / minutes,
        actions_per_env_minute=per_minute / slots,
        env=env,
        rollout=rollout,
        trainer=trainer,
        env_utilisation=sum(env.get(phase, 0.0) for phase in AT_WORK),
        env_acting=sum(env.get(phase, 0.0) for phase in ACTING),
        rollout_utilisation=rollout.get("busy", 0.0),
        rollout_load=load_s / (workers * recording.seconds) if workers else 0.0,
        trainer_utilisation=trainer.get("training", 0.0),
        staleness_mean=sum(k * v for k, v in histogram.items()) / tokens if tokens else 0.0,
        staleness_max=max(histogram, default=0),
        dropped=dict(dropped),
        wasted_steps=dropped_steps / max(1, sum(episode.steps or 0 for episode in ended_then)),
        finished_lost=_finished_lost(episodes, by_role["env"]),
        aborted=sum(dropped[reason] for reason in (*LOST, "cancelled")),
        updates=sum(
            batch.trained_at is not None and began <= batch.trained_at < end
            for batch in reader.batches()
        ),
        syncs=len(successes),
        sync_refused=len(syncs) - len(successes),
        pause_s=speedup * mean([s.pause_s for s in successes] or [0.0]),
        most_syncing=most_at_once([(sync.granted_at, sync.done_at) for sync in successes]),
        kills=len(recording.kills),
        faults=dropped["invalid"],
        data_cores=cores.get("data", 0.0),
        cores=sum(cores.values()),
        bound_actions_per_minute=bound.actions_per_minute,
        bound_by=bound.by,
        achieved_over_bound=per_minute / bound.actions_per_minute,
    )


def most_at_once(intervals: Iterable[tuple[float, float]]) -> int:
    """Return the largest number of intervals that share a moment."""
    # At the same moment an end comes before a begin.
    events = sorted(event for begin, end in intervals for event in ((begin, 1), (end, -1)))
    most = now = 0
    for _, change in events:
        now += change
        most = max(most, now)
    return most


def increase(points: Sequence[tuple[float, float]], began: float, end: float) -> float:
    """Return how much a cumulative counter rose in [began, end], interpolated between samples.

    `points` are (moment, value), ascending; before the first the counter is 0, after the last it is
    constant.
    """
    return _at(points, end) - _at(points, began)


def _at(points: Sequence[tuple[float, float]], moment: float) -> float:
    before: tuple[float, float] | None = None
    for point in points:
        if point[0] >= moment:
            if before is None:
                return 0.0 if point[0] > moment else point[1]
            span = point[0] - before[0]
            share = (moment - before[0]) / span if span > 0 else 1.0
            return before[1] + share * (point[1] - before[1])
        before = point
    return before[1] if before else 0.0


def _by_role(beats: Iterable[Heartbeat]) -> dict[str, list[Heartbeat]]:
    beats_by_role: dict[str, list[Heartbeat]] = defaultdict(list)
    for beat in beats:
        beats_by_role[beat.role].append(beat)
    return beats_by_role


def _increments(beats: Sequence[Heartbeat], gauge: str, began: float, end: float) -> float:
    """Return the rise of one gauge in the window, summed over all processes of all workers."""
    lives: dict[tuple[str, float], list[tuple[float, float]]] = defaultdict(list)
    for beat in beats:
        if gauge in beat.gauges:
            lives[beat.worker, beat.started_at].append((beat.sent_at, beat.gauges[gauge]))
    # A process that began within the window counts from 0 at its start.
    return sum(
        increase([(started, 0.0), *points], began, end) for (_, started), points in lives.items()
    )


def _spent(beats: Sequence[Heartbeat], began: float, end: float) -> dict[str, float]:
    """Return the seconds of each phase in the window, over all workers."""
    names = {name for beat in beats for name in beat.gauges if name.startswith(PREFIX)}
    return {
        name.removeprefix(PREFIX): _increments(beats, name, began, end) for name in sorted(names)
    }


def _shares(spent: Mapping[str, float], whole_s: float) -> dict[str, float]:
    """Return shares of `whole_s`; what is missing is `dead`."""
    shares = {phase: seconds / whole_s for phase, seconds in spent.items()}
    shares["dead"] = shares.get("dead", 0.0) + max(0.0, 1.0 - sum(shares.values()))
    return shares


def _finished_lost(episodes: Sequence[EpisodeTimes], env_beats: Sequence[Heartbeat]) -> int:
    """Return the number of ends that environments submitted and that curation neither kept nor dropped.

    A trajectory with a verdict that was dropped because of a fault was lost; so was one that an
    environment process counts as accepted and the database does not have. An end that came
    after its lease was taken back was never accepted: `dropped` and `aborted` count it.
    """
    judged = [episode for episode in episodes if episode.outcome in ("pass", "fail")]
    reported: dict[tuple[str, float], float] = {}  # by process
    told_at: dict[str, float] = {}
    for beat in env_beats:
        accepted = beat.gauges.get("episodes", 0.0) - beat.gauges.get("invalid", 0.0)
        process = beat.worker, beat.started_at
        reported[process] = max(accepted, reported.get(process, 0.0))
        told_at[beat.worker] = max(beat.sent_at, told_at.get(beat.worker, 0.0))
    missing = 0
    for worker, last in told_at.items():
        # Ends after the last heartbeat are not in its counts and must not make up for a loss.
        finished = sum(row.worker == worker and (row.ended_at or 0.0) <= last for row in judged)
        counted = sum(number for (name, _), number in reported.items() if name == worker)
        missing += max(0, int(counted) - finished)
    return missing + sum(row.reason in LOST for row in judged)


def cores_by_role(costs: Sequence[ProcessCost], began: float, end: float) -> dict[str, float]:
    """Return CPU seconds per second in the window, by the first word of the worker's name."""
    lives: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for cost in costs:
        lives[cost.worker, cost.pid].append((cost.at, cost.cpu_s))
    cores: dict[str, float] = defaultdict(float)
    for (worker, _), points in lives.items():
        role = worker.partition("-")[0]
        cores[role] += increase(points, began, end) / (end - began)
    return cores


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return value
