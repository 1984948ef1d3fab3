"""What a training uses where nothing is set."""

from __future__ import annotations

import pytest

from dart_cli.config.learning_rate import SMALL
from dart_cli.config.schema import TuneConfig
from dart_cli.tune.defaults import LORA_MOST, Hyperparameters, choose_hyperparameters


def choose(rows: int = 126, parameters: float = SMALL, **keys: object) -> Hyperparameters:
    points, lora = bool(keys.pop("points", False)), bool(keys.pop("lora", False))
    tune = TuneConfig.model_validate(keys)
    return choose_hyperparameters(
        tune, rows=rows, parameters=int(parameters), lora=lora, points=points
    )


@pytest.mark.parametrize(
    ("parameters", "lr", "lr_head"),
    [(0.63e6, 1e-3, 3e-3), (1e3, 1e-3, 3e-3), (2e9, 1e-5, 1.6e-4), (7e9, 5e-6, 1e-4)],
)
def test_a_larger_model_gets_lower_rates_from_the_measured_to_the_published_ones(
    parameters: float, lr: float, lr_head: float
) -> None:
    use = choose(parameters=parameters, points=True)
    assert use.lr == pytest.approx(lr, rel=0.05)
    assert use.lr_head == pytest.approx(lr_head, rel=0.05)


def test_adapters_get_higher_rates_with_a_bound() -> None:
    assert choose(parameters=7e9, lora=True).lr == pytest.approx(5e-5)
    assert choose(lora=True).lr == LORA_MOST


@pytest.mark.parametrize("rows", [42, 126, 300, 700, 2500, 3200])
@pytest.mark.parametrize("points", [False, True])
def test_a_small_set_gets_four_hundred_updates_of_each_stage(rows: int, points: bool) -> None:
    use = choose(rows=rows, points=points)
    share = 0.5 if points else 1.0
    updates = rows * use.epochs * share / use.batch
    assert updates >= 400 or use.epochs == 40


def test_passes_are_bounded_for_tiny_sets_and_two_for_large_ones() -> None:
    assert choose(rows=5).epochs == 40
    assert (choose(rows=60_000).epochs, choose(rows=60_000).batch) == (2, 32)


def test_what_is_set_stays_and_the_rest_says_where_it_came_from() -> None:
    use = choose(lr=3e-4, batch=16)
    assert (use.lr, use.batch) == (3e-4, 16)
    assert list(use.reasons) == ["epochs"]
    line = choose().line
    assert "tune.lr = 0.001 (0.63 million parameters)" in line
    assert "tune.batch = 8 (126 rows)" in line
    assert choose(lr=3e-4, batch=16, epochs=2).line == ""
    assert choose(max_minutes=30, lr=1e-3, batch=8).reasons.keys() == {"epochs"}
