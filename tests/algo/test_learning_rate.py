"""The learning rate follows from its batch alone: held against tables that are written out by hand."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dart_cli.algo.learning_rate import LearningRateSchedule, RunPoint, learning_rate, share_of_run
from dart_cli.config.schema import TrainConfig


def test_its_settings_are_those_of_the_configuration() -> None:
    defaults = TrainConfig()
    assert {part.name for part in fields(LearningRateSchedule)} <= TrainConfig.model_fields.keys()
    for part in fields(LearningRateSchedule):
        if part.name not in ("lr", "updates"):  # a schedule has no end of its own
            assert getattr(defaults, part.name) == part.default, part.name


@pytest.mark.parametrize(
    ("changes", "rates"),
    [
        ({}, [1.0] * 11),
        ({"lr_end": 0.0}, [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0]),
        ({"lr_end": 0.5}, [1, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5]),
        ({"lr_end": 0.0, "warmup": 5}, [1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1, 0.8, 0.6, 0.4, 0.2, 0]),
    ],
)  # fmt: skip
def test_eleven_updates_have_the_rates_of_the_table(
    changes: dict[str, float], rates: list[float]
) -> None:
    schedule = replace(LearningRateSchedule(lr=1.0, updates=11), **changes)
    assert [
        learning_rate(schedule, RunPoint(updates_done)) for updates_done in range(11)
    ] == pytest.approx(rates)


@pytest.mark.parametrize("bound", ["updates", "minutes", "trajectories"])
def test_whichever_bound_ends_the_run_first_ends_the_fall(bound: str) -> None:
    schedule = LearningRateSchedule(
        lr=2.0, lr_end=0.1, updates=101, max_minutes=10, max_trajectories=400
    )
    ends = {"updates": 100, "minutes": 600, "trajectories": 400}
    for share, factor in ((0.0, 1.0), (0.5, 0.55), (0.75, 0.325), (1.0, 0.1), (1.3, 0.1)):
        behind = {name: end * share / 2 for name, end in ends.items()}
        at = behind | {bound: ends[bound] * share}
        point = RunPoint(round(at["updates"]), at["minutes"], round(at["trajectories"]))
        assert learning_rate(schedule, point) == pytest.approx(2.0 * factor, abs=0.02)


@given(
    updates=st.integers(2, 50),
    warmup=st.integers(0, 60),
    moments=st.lists(st.tuples(st.floats(0, 700), st.integers(0, 70)), min_size=1, max_size=60).map(
        lambda pairs: list(zip(*map(sorted, zip(*pairs, strict=True)), strict=True))
    ),
)
def test_the_rate_is_the_lowest_that_one_bound_alone_would_give(
    updates: int, warmup: int, moments: list[tuple[float, int]]
) -> None:
    whole = LearningRateSchedule(
        lr=0.5,
        updates=updates,
        warmup=warmup,
        lr_end=0.2,
        max_minutes=10,
        max_trajectories=50,
    )
    alone = [
        replace(whole, max_minutes=0, max_trajectories=0),
        replace(whole, updates=0, max_trajectories=0),
        replace(whole, updates=0, max_minutes=0),
    ]
    points = [RunPoint(updates_done, *moment) for updates_done, moment in enumerate(moments)]
    rates = [learning_rate(whole, point) for point in points]
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    for point, rate in zip(points, rates, strict=True):
        assert rate == pytest.approx(min(learning_rate(each, point) for each in alone))


@given(
    updates=st.integers(0, 50), warmup=st.integers(0, 60), lr_end=st.floats(0, 1),
    updates_done=st.integers(0, 60)
)  # fmt: skip
def test_the_rate_rises_and_then_falls_to_its_end(
    updates: int, warmup: int, lr_end: float, updates_done: int
) -> None:
    schedule = LearningRateSchedule(lr=0.5, updates=updates, warmup=warmup, lr_end=lr_end)
    rates = [learning_rate(schedule, RunPoint(index)) for index in range(updates_done + 2)]
    peak = min(warmup, updates_done + 1)
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert all(0 <= rate <= 0.5 for rate in rates)
    if warmup <= updates_done + 1:
        assert rates[warmup] == 0.5
    if updates - 1 > warmup and updates - 1 <= updates_done:
        assert rates[updates - 1] == pytest.approx(0.5 * lr_end)


def test_the_share_of_a_run_is_that_of_the_furthest_bound() -> None:
    schedule = LearningRateSchedule(lr=1.0, updates=101, max_minutes=2, max_trajectories=1000)
    assert share_of_run(schedule, RunPoint(10, 30, 100)) == 0.25
    assert share_of_run(schedule, RunPoint(10, 30, 500)) == 0.5
    assert share_of_run(schedule, RunPoint(80, 30, 500)) == 0.8
    assert share_of_run(schedule, RunPoint(80, 500, 5000)) == 1.0
