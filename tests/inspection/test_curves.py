"""Success curves: each point has enough episodes, and says how sure it is."""

from __future__ import annotations

from random import Random
from statistics import fmean

import pytest

from dart_cli.data.store.rows import CurvePoint
from dart_cli.inspection.curves import LEAST_EPISODES, by_task, over_tasks


def test_a_point_of_few_episodes_joins_its_neighbours() -> None:
    """One failure between two good buckets looked like a drop to 0."""
    points = [
        CurvePoint("a", 0, 20, 18, 1.0),
        CurvePoint("a", 10, 1, 0, 2.0),
        CurvePoint("a", 20, 19, 17, 3.0),
        CurvePoint("a", 30, 2, 0, 4.0),
        CurvePoint("b", 0, 3, 3, 1.0),
    ]
    curves = by_task(points)
    assert [point.episodes for point in curves["a"]] == [20, 22]
    assert [point.success for point in curves["a"]] == pytest.approx([0.9, 17 / 22])
    assert all(point.low < point.success < point.high for point in curves["a"])
    [short] = curves["b"]
    assert (short.episodes, short.success) == (3, 1.0)
    assert short.low < 0.5


def test_no_episode_is_lost_and_no_point_is_short() -> None:
    rng = Random(0)
    points = [CurvePoint("a", version, rng.randint(1, 9), 1, 0.0) for version in range(100)]
    curves = by_task(points)["a"]
    assert sum(point.episodes for point in curves) == sum(point.trajectories for point in points)
    assert sum(p.success * p.episodes for p in curves) == pytest.approx(100)
    assert min(point.episodes for point in curves) >= LEAST_EPISODES


def test_the_mean_counts_tasks_alike_and_waits_for_half_of_them() -> None:
    points = [
        CurvePoint("a", 0, 100, 100, 1.0),
        CurvePoint("b", 0, 10, 0, 2.0),
        CurvePoint("a", 1, 10, 10, 3.0),
        CurvePoint("c", 2, 10, 10, 3.0),
        CurvePoint("d", 2, 10, 0, 3.0),
    ]
    first, last = over_tasks(points)
    assert (first.version, first.success, first.episodes, first.ended_at) == (0, 0.5, 110, 2.0)
    assert (last.version, last.success) == (2, 0.5)


def test_the_mean_s_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    rng, rates, held = Random(1), [0.05, 0.5, 0.8, 0.97], []
    for _ in range(1000):
        points = [
            CurvePoint(str(task), 0, 24, sum(rng.random() < rate for _ in range(24)), 0.0)
            for task, rate in enumerate(rates)
        ]
        [mean] = over_tasks(points)
        held.append(mean.low <= fmean(rates) <= mean.high)
    assert 0.93 < fmean(held) < 0.99
