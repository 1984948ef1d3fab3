"""The objective's fields, compared with the configuration; the effective sample size."""

from __future__ import annotations

from dataclasses import asdict
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dart_cli.algo import objective, running_baselines
from dart_cli.algo.loss import policy_loss
from dart_cli.algo.objective import Objective
from dart_cli.config.schema import BY_BASELINE, DataConfig, TrainConfig


def test_its_defaults_are_the_configurations() -> None:
    config = TrainConfig()
    ours = asdict(Objective())
    assert ours.pop("importance_cap") == 1  # no key
    assert ours == {name: getattr(config, name) for name in ours}


def test_the_configuration_offers_every_formula_there_is() -> None:
    def offered(section: type, name: str) -> tuple[str, ...]:
        return get_args(section.model_fields[name].annotation)  # type: ignore[attr-defined]

    assert offered(TrainConfig, "correction") == get_args(objective.ImportanceSampling)
    assert offered(TrainConfig, "normalise") == get_args(objective.Normalise)
    assert offered(DataConfig, "advantage") == get_args(running_baselines.Advantage)
    assert get_args(running_baselines.BaselineAdvantage) == BY_BASELINE


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=30))
def test_the_effective_sample_size_is_kishs_whatever_the_cap(drifts: list[float]) -> None:
    """Check (sum w)^2 / (N sum w^2): it is in [1/N, 1], and 1 if all weights are equal."""
    behaviour = torch.tensor([-5 - drift for drift in drifts], dtype=torch.float64)
    proximal = torch.full_like(behaviour, -5)
    one = torch.ones_like(behaviour)
    output = policy_loss(
        proximal, proximal, behaviour, one, one, Objective(importance_cap=0.5), divisor=1.0
    )
    w = np.exp(np.asarray(drifts, dtype=np.float64))
    ess = output.stats.metrics()["ess"]
    assert ess == pytest.approx(w.mean() ** 2 / (w**2).mean())
    assert 1 / len(drifts) - 1e-9 <= ess <= 1 + 1e-9
    if len(set(drifts)) == 1:
        assert ess == pytest.approx(1)
