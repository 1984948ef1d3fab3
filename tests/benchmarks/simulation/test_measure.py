"""What the efficiency benchmark makes of counters, intervals and rows."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from benchmarks.run_times import EpisodeTimes, StepTimes
from benchmarks.simulation.measure import (
    _finished_lost,
    _increments,
    _shares,
    increase,
    most_at_once,
)
from benchmarks.simulation.recording import Plan
from benchmarks.simulation.timeline import PHASES, phases_of_slots
from bus.messages import Heartbeat

NUMBER = {name: number for number, name in enumerate(PHASES)}


def beat(worker: str, started_at: float, sent_at: float, busy: float) -> Heartbeat:
    return Heartbeat(
        role="rollout",
        worker=worker,
        host="h",
        pid=1,
        started_at=started_at,
        sent_at=sent_at,
        endpoint="",
        policy_version=0,
        state="ready",
        waiting_for="",
        waiting_s=0.0,
        gauges={"seconds.busy": busy},
        trajectories=[],
    )


def test_a_counter_rises_by_what_it_gained_within_the_window() -> None:
    points = [(0.0, 0.0), (10.0, 10.0), (20.0, 10.0), (30.0, 40.0)]
    assert increase(points, 5.0, 15.0) == 5.0
    assert increase(points, 20.0, 25.0) == 15.0
    assert increase(points, 30.0, 99.0) == 0.0
    assert increase(points, -5.0, 0.0) == 0.0
    assert increase([], 0.0, 1.0) == 0.0


def test_windows_that_touch_add_up_to_the_whole() -> None:
    rng = random.Random(0)
    times = sorted(rng.uniform(0, 100) for _ in range(40))
    values = sorted(rng.uniform(0, 50) for _ in range(40))
    points = list(zip(times, values, strict=True))
    cuts = [0.0, *sorted(rng.uniform(0, 100) for _ in range(7)), 100.0]
    parts = [increase(points, a, b) for a, b in pairwise(cuts)]
    assert sum(parts) == pytest.approx(increase(points, 0.0, 100.0))


def test_a_worker_that_was_killed_counts_with_both_of_its_lives() -> None:
    beats = [beat("r", 0.0, t, t) for t in (1.0, 2.0, 3.0)]  # busy all its life, killed at 3
    beats += [beat("r", 6.0, t, t - 6.0) for t in (7.0, 8.0, 9.0, 10.0)]  # and again from 6 on
    assert _increments(beats, "seconds.busy", 2.0, 10.0) == pytest.approx(1.0 + 4.0)


def test_what_is_filed_after_the_last_heartbeat_makes_up_for_no_loss() -> None:
    def kept(name: str, ended_at: float, reason: str = "") -> EpisodeTimes:
        state = "dropped" if reason else "trained"
        return EpisodeTimes(name, "env-0", 0, state, reason, "pass", 1, 0.0, ended_at, 1.0, 1.0)

    def told(started_at: float, sent_at: float, episodes: int, invalid: int) -> Heartbeat:
        gauges = {"episodes": float(episodes), "invalid": float(invalid)}
        changes = {"role": "env", "gauges": gauges}
        return beat("env-0", started_at, sent_at, 0.0).model_copy(update=changes)

    beats = [told(0.0, 10.0, 3, 1), told(20.0, 30.0, 1, 0)]  # three accepted, in two lives
    whole = [kept("a", 5.0), kept("b", 9.0), kept("c", 25.0)]
    assert _finished_lost(whole, beats) == 0
    assert _finished_lost(whole[1:], beats) == 1
    assert _finished_lost([*whole[1:], kept("d", 31.0)], beats) == 1
    assert _finished_lost([*whole, kept("e", 26.0, "stale")], beats) == 0
    assert _finished_lost([*whole, kept("e", 26.0, "worker_lost")], beats) == 1


def test_time_without_a_phase_was_dead() -> None:
    shares = _shares({"busy": 5.0, "idle": 1.0}, 8.0)
    assert shares == {"busy": 0.625, "idle": 0.125, "dead": 0.25}


def test_intervals_at_once_are_counted_by_brute_force_alike() -> None:
    rng = random.Random(1)
    for _ in range(50):
        intervals = [
            (begin, begin + rng.randint(1, 5)) for begin in (rng.randint(0, 20) for _ in range(9))
        ]
        brute = max(sum(a <= t < b for a, b in intervals) for t in range(30))
        assert most_at_once(intervals) == brute


def test_one_after_the_other_is_one_at_once() -> None:
    assert most_at_once([(0.0, 1.0), (1.0, 2.0), (2.0, 3.0)]) == 1


def test_kills_are_spread_over_the_window_and_never_at_its_ends() -> None:
    assert Plan(0.0, 100.0, 3).kill_times() == [25.0, 50.0, 75.0]
    assert Plan(0.0, 100.0).kill_times() == []


def test_the_picture_shows_each_moment_in_its_phase() -> None:
    played = EpisodeTimes("t", "env-0", 1, "trained", "", "pass", 2, 10.0, 30.0, 4.0, 20.0)
    lost = EpisodeTimes("u", "env-0", 0, "dropped", "worker_lost", None, 0, 50.0, 60.0, None, None)
    steps = [StepTimes("t", 0, "rollout-0", 20.0, 2.0, 4.0)]  # model 14-16, acts 16-20
    grid = phases_of_slots([played, lost], steps, 0.0, 100.0, cells=100)
    assert grid.shape == (2, 100)
    assert set(grid[0, 50:60]) == {NUMBER["dropped"]}
    assert grid[0, :50].sum() == grid[0, 60:].sum() == 0
    row = grid[1]
    assert set(row[10:14]) == {NUMBER["resetting"]}
    assert set(row[14:16]) == {NUMBER["waiting"]}
    assert set(row[16:20]) == {NUMBER["playing"]}
    assert np.all(row[30:] == NUMBER["idle"])
