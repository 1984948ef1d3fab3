"""Fields, their combinations, and the guard."""

from __future__ import annotations

from dataclasses import asdict
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dart_cli.algo import normalise, objective, trackers
from dart_cli.algo.loss import policy_loss
from dart_cli.algo.objective import Objective, ess_factor
from dart_cli.config.rules.check import find_mistakes
from dart_cli.config.schema import BY_TRACKER, Config, DataConfig, TrainConfig


def test_its_defaults_are_the_configurations() -> None:
    config = TrainConfig()
    assert asdict(Objective()) == {name: getattr(config, name) for name in asdict(Objective())}


def test_the_configuration_offers_every_formula_there_is() -> None:
    def offered(section: type, name: str) -> tuple[str, ...]:
        return get_args(section.model_fields[name].annotation)  # type: ignore[attr-defined]

    assert offered(TrainConfig, "objective") == get_args(objective.SurrogateName)
    assert offered(TrainConfig, "correction") == get_args(objective.CorrectionName)
    assert offered(TrainConfig, "low_ess") == get_args(objective.LowEss)
    assert offered(TrainConfig, "normalise") == get_args(normalise.Normalise)
    assert offered(DataConfig, "advantage") == get_args(trackers.Advantage)
    assert get_args(trackers.Baseline) == BY_TRACKER


@pytest.mark.parametrize(
    ("changes", "key", "cause"),
    [
        ({"dual_clip": 1.0}, "train.dual_clip", "must be > 1, or 0 for no bound, got 1"),
        ({"dual_clip": 3.0, "objective": "cispo"}, "train.dual_clip", "must be 0"),
        ({"mask_low": 1.0, "mask_high": 1.0}, "train.mask_low", "must be < train.mask_high (1)"),
        ({"normalise": "constant"}, "train.constant_tokens", "must be > 0"),
    ],
)
def test_combinations_without_a_formula_are_refused_with_the_cure(
    changes: dict[str, object], key: str, cause: str
) -> None:
    mistakes = list(find_mistakes(Config(train=TrainConfig.model_validate(changes)), "train"))
    assert [mistake.key for mistake in mistakes] == [key]
    assert cause in mistakes[0].text


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dual_clip": 10.0, "objective": "gspo"},
        {"correction": "masked", "mask_low": 0.0},
        {"normalise": "constant", "constant_tokens": 480.0},
        {"correction": "ratio", "objective": "cispo", "clip_low": 1.0, "min_ess": 0.1},
    ],
)
def test_combinations_with_a_formula_are_accepted(changes: dict[str, object]) -> None:
    assert not list(find_mistakes(Config(train=TrainConfig.model_validate(changes)), "train"))


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=30))
def test_the_effective_sample_size_is_kishs_whatever_the_cap(drifts: list[float]) -> None:
    """(sum w)^2 / (N sum w^2): in [1/N, 1], and 1 where all weights are equal."""
    behaviour = torch.tensor([-5 - drift for drift in drifts], dtype=torch.float64)
    proximal = torch.full_like(behaviour, -5)
    one = torch.ones_like(behaviour)
    output = policy_loss(
        proximal, proximal, behaviour, one, one, Objective(is_cap=0.5),
        lengths=[len(drifts)], divisor=1.0,
    )  # fmt: skip
    w = np.exp(np.asarray(drifts, dtype=np.float64))
    ess = output.stats.metrics()["ess"]
    assert ess == pytest.approx(w.mean() ** 2 / (w**2).mean())
    assert 1 / len(drifts) - 1e-9 <= ess <= 1 + 1e-9
    if len(set(drifts)) == 1:
        assert ess == pytest.approx(1)


@given(st.floats(0, 1), st.floats(0, 0.99))
def test_the_guard_acts_below_its_floor_only(ess: float, floor: float) -> None:
    skip, shrink = ess_factor(ess, floor, "skip"), ess_factor(ess, floor, "shrink")
    if ess >= floor:
        assert (skip, shrink) == (1, 1)
    else:
        assert skip == 0
        assert shrink == pytest.approx(ess / floor)
        assert shrink < 1
