"""What the status page counts."""

from __future__ import annotations

import pytest

from dart_cli.data.progress import Meter, Progress, Tally


def test_a_curve_has_a_point_for_each_version_until_there_are_too_many() -> None:
    tally = Tally()
    for version, passed in [(0, False), (0, True), (2, True)]:
        tally.add(version, passed)
    assert tally.curve(3) == [0.5, None, 1.0, None]
    assert tally.curve(3, points=2) == [0.5, 1.0]
    assert len(tally.curve(999)) <= 32


def test_a_curve_of_nothing_is_empty() -> None:
    assert Tally().curve(-1) == []
    assert Tally().curve(10) == []


def test_an_invalid_trajectory_says_nothing_about_success() -> None:
    progress = Progress(["a"], 0.0)
    for _ in range(5):
        progress.outcome("a", "invalid", 0)
    assert progress.success() == {"a": None}
    progress.outcome("a", "pass", 0)
    assert progress.success() == {"a": 1.0}
    assert (progress.all.passed, progress.all.invalid) == (1, 5)


def test_throughput_forgets_what_is_older_than_its_window() -> None:
    meter = Meter(started=0.0, window_s=60)
    for second in range(30):
        meter.add(float(second), 2)
    assert meter.per_minute(30.0) == pytest.approx(120.0)
    assert meter.per_minute(60.0) == pytest.approx(60.0)
    assert meter.per_minute(200.0) == 0.0


def test_metrics_of_batches_to_be_trained_again_are_forgotten() -> None:
    progress = Progress([], 0.0)
    for batch in (1, 2, 3):
        progress.train_metrics(batch, {"loss": float(batch)})
    progress.forget_metrics(1)
    assert progress.metrics() == {"loss": 1.0}
    assert progress.metric_curves() == {"loss": [1.0]}
