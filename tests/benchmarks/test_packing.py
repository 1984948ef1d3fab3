"""benchmarks/speed/packing.py: both arms compute the same gradient, and what it counts is what was run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.parts import TINY, trajectories, write_shards
from benchmarks.speed import packing
from dart_cli.config.architecture import shape_of
from dart_cli.config.model_folder import read_json
from dart_cli.config.schema import Config
from dart_cli.train.trained_policy import TrainModel


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "small"
    return write_shards(path, packing.SMALL, 2, "cpu", torch.float32)


@pytest.mark.parametrize("freeze", [True, False])
def test_gradients_are_equal_and_operations_are_those_of_the_formula(
    folder: Path, freeze: bool
) -> None:
    config = packing.config_of(folder, "evict", slots=2, freeze=freeze, completion=6)
    model = TrainModel.load(config)
    size = replace(TINY, trajectories=1, steps=4)
    batch = trajectories(model.policy, size)
    played = packing.PlayedSamples(batch, 1, 1)
    apart = packing.counted(model, batch, lambda: packing.alone(model, batch))
    together = packing.counted(model, batch, lambda: packing.packed(model, batch, 2048))
    assert packing.difference(together.gradients, apart.gradients) < 1e-4
    assert apart.tokens == sum(sample.end for sample in batch.samples) > together.tokens
    assert all(("visual" in name) is False for name in apart.gradients) is freeze
    by_formula = packing.formulas(played, shape_of(read_json(folder, "config.json")), config, 2048)
    assert by_formula[0] == pytest.approx(apart.flops, rel=0.15)
    assert by_formula[0] / by_formula[1] == pytest.approx(apart.flops / together.flops, rel=0.25)


def test_the_history_evicts_as_the_issue_asks(folder: Path) -> None:
    evict, slide = (
        packing.config_of(folder, name, slots=1, freeze=True, completion=6).policy
        for name in ("evict", "slide")
    )
    assert (evict.history_images_most, evict.history_images) == (7, 3)
    assert (slide.history_images_most, slide.history_images) == (0, 5)
    assert isinstance(Config(policy=evict), Config)
