"""Order and budget of a training: pure."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from dart_cli.tune.stages import WARM_UP, Budget, rate
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
    ("budget", "share"), [(Budget(updates=8), 0.25), (Budget(seconds=40.0), 0.75)]
)
def test_a_budget_is_of_updates_or_of_seconds(budget: Budget, share: float) -> None:
    assert budget.share(2, 30.0) == share
    assert budget.share(9, 99.0) == 1.0
