"""Promises of a trainer whose rank dies or hangs: all end, one line says which, nothing is lost."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest
import torch

from bus.messages import Batch, BatchTrained, TrainerHello
from dart_cli.config.schema import Config
from dart_cli.train.learner import PolicyLearner
from dart_cli.train.model import TrainModel
from tests.train.parts import Data, another_run, final_weights, serving
from tests.waiting import PATIENCE_S, until

ROOT = Path(__file__).parents[2]
DEADLINE_S = 8.0

FAULTS = {
    "killed in an update": "1:pack:3:kill",
    "hangs in an update": "1:pack:3:stop",
    "killed in a publication": "1:gathering the weights:2:kill",
    "hangs in a publication": "1:gathering the weights:2:stop",
    "killed in a checkpoint": "1:beginning a checkpoint:1:kill",
    "hangs in a checkpoint": "1:beginning a checkpoint:1:stop",
    "rank 0 is killed in an update": "0:pack:3:kill",
}


async def run_trainer(config: Config, data: Data, fault: str = "") -> tuple[int, str]:
    """A trainer's process and its ranks, against `data`; its exit code and what it said."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "CONFIG": config.model_dump_json(),
        "FAULT": fault,
    }
    async with serving(config.run.dir, data), asyncio.timeout(2 * PATIENCE_S):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.train.faulty"),
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            cwd=ROOT,
        )
        _, said = await process.communicate()
    assert process.returncode is not None
    return process.returncode, said.decode(errors="replace")


@pytest.mark.timeout(900)  # two trainers of two processes, one after the other, beside other tests
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_rank_that_ends_or_hangs_ends_all_and_nothing_is_lost_or_trained_twice(
    config: Config, batches: list[Batch], fault: str
) -> None:
    changes = {"ranks": 2, "rank_deadline_s": DEADLINE_S, "checkpoint_every": 2, "device": "cpu"}
    config = another_run(config, "ranks", **changes)
    before = Data(batches)
    code, said = await run_trainer(config, before, FAULTS[fault])
    guilty = FAULTS[fault][0]
    logs = config.run.dir / "logs"
    line = f"rank {guilty} of 2"
    if guilty == "0":
        assert code == -9
        # The other rank is no child of ours.
        await until(lambda: line in (logs / "train-1.log").read_text())
    else:
        assert code == 1
        [told] = [each for each in said.splitlines() if each.startswith("error: ")]
        assert line in told
        assert "train-1.log" in told
        assert "it was doing" in told
        assert line in (logs / "train.log").read_text()
    # The same command again, as the supervisor does.
    after = Data(batches)
    code, said = await run_trainer(config, after)
    assert code == 0, said
    [hello] = after.of(TrainerHello)
    assert isinstance(hello, TrainerHello)
    again = [m.batch_id for m in after.of(BatchTrained) if isinstance(m, BatchTrained)]
    assert again == list(range(hello.last_batch_id + 1, 5))
    # As in a run that nothing interrupted, on one rank.
    straight = PolicyLearner(TrainModel.load(config), config.train)
    for done, batch in enumerate(batches):
        straight.update(batch, done)
    final = final_weights(config)
    for name, value in straight.model.weights().items():
        assert torch.allclose(final[name], value, atol=2e-3), name
