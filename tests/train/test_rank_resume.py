"""Promises of a run that resumes with another number of ranks: it equals the run of one rank."""

from __future__ import annotations

import pytest
import torch

from bus.messages import Batch
from dart_cli.config.schema import Config
from dart_cli.train.checkpoints.checkpoint import load_newest
from dart_cli.train.learner import PolicyLearner
from dart_cli.train.process import run
from dart_cli.train.trained_policy import TrainModel
from tests.train.parts import Data, another_run, serving
from tests.train.trainers import run_trainer

WAYS = ((1, 1), (3, 2), (1, 3))
"""Ranks of each start, and how many batches are in the weights at its end. By 3 hardly any tensor divides
evenly; tests/train/test_shards.py goes from several ranks to several."""


@pytest.mark.slow
async def test_a_run_of_1_rank_goes_on_with_3_and_then_1_as_if_it_had_been_one(
    config: Config, batches: list[Batch]
) -> None:
    config = another_run(config, "ranks", lr=1e-4, device="cpu")
    for ranks, last in WAYS:
        data = Data(batches[:last])
        train = config.train.model_copy(update={"ranks": ranks})
        ranked = config.model_copy(update={"train": train})
        if ranks == 1:
            async with serving(config.run.dir, data):
                await run(ranked, data.idle)
        else:
            code, output = await run_trainer(ranked, data, stop=data.idle)
            assert code == 0, output
        assert data.trained == last
    straight = PolicyLearner(TrainModel.load(config), config.train)
    began = {name: value.clone() for name, value in straight.state().items()}
    for index, batch in enumerate(batches[:last]):
        straight.update(batch, index)
    checkpoint = load_newest(config.run.dir / "checkpoints")
    assert checkpoint is not None
    expected = straight.state()
    for name, before in began.items():
        final = checkpoint.tensors.whole(name)
        assert torch.allclose(final, expected[name], rtol=0, atol=1e-5), name
        began[name] = (expected[name] - before).abs()
    assert max(moved.max() for moved in began.values()) > 1e-4
