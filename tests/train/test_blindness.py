"""A model that does not see is found by what grey screens change."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bus.messages import Batch
from dart_cli.config.schema import Config
from dart_cli.train.blindness import EVERY, with_grey_screens
from dart_cli.train.learner import PolicyLearner
from dart_cli.train.trained_policy import TrainModel
from tests.train.trees import packs_of


def test_a_model_that_sees_is_looked_at_now_and_then(config: Config, batches: list[Batch]) -> None:
    learner = PolicyLearner(TrainModel.load(config), config.train)
    by_update = [learner.update(batches[0], update).metrics for update in (0, 1, EVERY)]
    assert [each.get("sees") for each in by_update] == [1.0, None, 1.0]


@pytest.mark.parametrize("freeze_vision", [True, False])
def test_pixels_that_are_scaled_away_are_found(
    config: Config, batches: list[Batch], *, freeze_vision: bool
) -> None:
    model = config.model.model_copy(update={"freeze_vision": freeze_vision})
    learner = PolicyLearner(
        TrainModel.load(config.model_copy(update={"model": model})), config.train
    )
    images = learner.model.policy.images
    images.table = replace(images.table, values=torch.zeros_like(images.table.values))
    assert learner.update(batches[0], 0).metrics["sees"] == 0.0


def test_a_blinded_pack_is_the_same_but_for_its_pixels(
    config: Config, batches: list[Batch]
) -> None:
    model = TrainModel.load(config)
    [pack, *_] = packs_of(model, batches[0], 2048)
    grey = with_grey_screens(pack, model.policy.images)
    assert grey.token_ids is pack.token_ids
    assert grey.inputs.image_order == pack.inputs.image_order
    for was, now in zip(pack.inputs.images, grey.inputs.images, strict=True):
        assert (now.grid, now.pixels.shape) == (was.grid, was.pixels.shape)
        assert now.key != was.key
        assert now.pixels.unique().numel() == 1
        assert was.pixels.unique().numel() > 1
