"""Order and budget of a training: pure."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from dart_cli.tune.held_out import Measurement
from dart_cli.tune.pace import Budget, HeldOutWatch, Pace, seconds_left
from dart_cli.tune.stages import WARM_UP, rate
from dart_cli.tune.training_set import Order

PICTURES = ["a", "a", "b", "c", "c", "c", "d"]


def test_an_epoch_has_each_example_once_and_those_of_a_screenshot_together() -> None:
    order = Order(PICTURES, 1, "seed")
    for epoch in range(3):
        seen = [order.of(update)[0] for update in range(7 * epoch, 7 * (epoch + 1))]
        assert sorted(seen) == list(range(7))
        changes = [PICTURES[index] for index in seen]
        assert len([1 for a, b in pairwise(changes) if a != b]) == 3


def test_a_batch_reaches_into_the_next_epoch_and_none_is_left_out() -> None:
    order = Order(PICTURES, 3, "seed")
    assert order.updates(2) == 5
    seen = [each for update in range(5) for each in order.of(update)]
    assert sorted(seen[:7]) == sorted(seen[7:14]) == list(range(7))
    assert len(seen) == 15


def test_updates_follow_from_their_number_and_the_seed() -> None:
    one, same, other = Order(PICTURES, 3, "s"), Order(PICTURES, 3, "s"), Order(PICTURES, 3, "t")
    assert [one.of(4), one.of(0)] == [same.of(4), same.of(0)]
    assert [one.of(i) for i in range(5)] != [other.of(i) for i in range(5)]


def test_the_rate_rises_then_falls_along_half_a_cosine() -> None:
    shares = np.linspace(0, 1, 101)
    found = [rate(2.0, float(share)) for share in shares]
    rising = shares < WARM_UP
    np.testing.assert_allclose(np.array(found)[rising], 2.0 * shares[rising] / WARM_UP)
    falling = (shares[~rising] - WARM_UP) / (1 - WARM_UP)
    np.testing.assert_allclose(
        np.array(found)[~rising], 2.0 * np.cos(np.pi * falling / 2) ** 2, atol=1e-12
    )


@pytest.mark.parametrize(
    ("budget", "share"),
    [(Budget(8), 0.25), (Budget(8, 40.0), 0.75), (Budget(8, 400.0), 0.25)],
)
def test_a_stage_is_as_far_as_what_ends_it_first(budget: Budget, share: float) -> None:
    assert budget.share(2, 30.0) == share
    assert budget.share(9, 99.0) == 1.0


def test_the_time_left_is_that_of_all_stages_by_what_ends_each_first() -> None:
    free, bounded = Budget(100), Budget(50, 60.0)
    assert seconds_left([free], 40, 80.0, 2.0) == 120.0
    assert seconds_left([free, bounded], 40, 80.0, 2.0) == 180.0  # 100 s of updates in 60 s
    assert seconds_left([bounded], 10, 50.0, 2.0) == 10.0
    assert seconds_left([bounded], 45, 59.0, 0.1) == pytest.approx(0.5)
    assert seconds_left([bounded], 40, 70.0, 2.0) == 0.0


class Clock:
    """A clock that stands still but when it is told to go on."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        """The time now."""
        return self.now


def test_the_held_out_rows_are_measured_in_a_twentieth_of_the_time() -> None:
    clock, starts = Clock(), []

    def measure() -> Measurement:
        starts.append(clock.now)
        clock.now += 3.0
        return Measurement(loss=0.5, right=len(starts))

    watch = HeldOutWatch(measure, 18, clock)
    assert watch.note == ""
    watch.measure()
    assert watch.note == "held out: loss 0.500, 1 of 18 right"
    for _ in range(240):
        clock.now += 1.0
        watch.measure_if_due()
    assert starts == [100.0, 163.0, 226.0, 289.0, 352.0]  # 3 s after 60 s without
    none = HeldOutWatch(measure, 0, clock)
    clock.now += 1000.0
    none.measure_if_due()
    assert len(starts) == 5


def test_a_progress_line_has_the_loss_the_held_out_rows_and_the_time_left() -> None:
    clock = Clock()
    watch = HeldOutWatch(lambda: Measurement(loss=0.93, right=12), 18, clock)
    pace = Pace(watch, clock)
    assert pace.note(0.0) == ""
    for loss in (9.0, *[1.0] * 8, 2.0, 3.0):
        clock.now += 2.0
        pace.add(loss)
    assert pace.update_s == 2.0
    assert pace.note(250.0) == "loss 1.300, about 4:10 left"
    watch.measure()
    assert pace.note(250.0) == "loss 1.300, held out: loss 0.930, 12 of 18 right, about 4:10 left"
