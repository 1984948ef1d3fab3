"""Promises of a trainer whose rank dies or hangs: all end, one line says which, nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bus.messages import Batch, BatchTrained, TrainerHello
from dart_cli.config.schema import Config
from dart_cli.train.learner import PolicyLearner
from dart_cli.train.trained_policy import TrainModel
from tests.train.parts import Data, another_run, final_weights
from tests.train.trainers import run_trainer
from tests.waiting import until

DEADLINE_S = 30.0  # of a run in which a rank hangs
PATIENT_S = 300.0  # of one in which no rank hangs: no machine reaches it

FAULTS = (
    "1:gathering the weights:2:stop",
    "1:beginning a checkpoint:1:kill",
    "0:pack:2:kill",
    "1:pack:3:kill",
)
"""faulty.py's, one a start. Rank 1 hangs while rank 0 waits for it in a collective operation, and dies
there and outside one; rank 0 dies. An update is one pack of each rank, and the first checkpoint is that of
two updates: only the last of these starts gets so far."""


@pytest.mark.slow
async def test_ranks_that_end_or_hang_end_all_and_nothing_is_lost_or_trained_twice(
    config: Config, batches: list[Batch]
) -> None:
    config = another_run(config, "ranks", ranks=2, checkpoint_every=2, device="cpu")
    for fault in FAULTS:
        seconds = DEADLINE_S if fault.endswith("stop") else PATIENT_S
        await breaks(with_deadline(config, seconds), batches, fault)
    # The same command again, as the supervisor does.
    after = Data(batches)
    code, output = await run_trainer(with_deadline(config, PATIENT_S), after)
    assert code == 0, output
    [hello] = after.of(TrainerHello)
    assert isinstance(hello, TrainerHello)
    again = [m.batch_id for m in after.of(BatchTrained) if isinstance(m, BatchTrained)]
    assert again == list(range(hello.last_batch_id + 1, len(batches) + 1))
    assert len(list((config.run.dir / "ranks").iterdir())) == 1  # earlier boards are removed
    # As in a run that nothing interrupted, on one rank.
    straight = PolicyLearner(TrainModel.load(config), config.train)
    for index, batch in enumerate(batches):
        straight.update(batch, index)
    final = final_weights(config)
    for name, value in straight.model.weights().items():
        assert torch.allclose(final[name], value, atol=2e-4), name


async def breaks(config: Config, batches: list[Batch], fault: str) -> None:
    """A start that ends with a line that names the guilty rank and what it was doing."""
    logs = config.run.dir / "logs"
    guilty, doing, _, _ = fault.split(":")
    before = {rank: len(text_of(logs, rank)) for rank in (0, 1)}
    code, output = await run_trainer(config, Data(batches), fault)
    line = f"rank {guilty} of 2"
    if guilty == "0":
        assert code == -9
        # The other rank is no child of ours.
        await until(lambda: line in text_of(logs, 1)[before[1] :])
        return
    assert code == 1
    [told] = [each for each in output.splitlines() if each.startswith("error: ")]
    assert line in told
    assert "train-1.log" in told
    assert f"it was doing: {doing}" in told
    assert line in text_of(logs, 0)[before[0] :]


def text_of(logs: Path, rank: int) -> str:
    file = logs / ("train-1.log" if rank else "train.log")
    return file.read_text(encoding="utf-8") if file.exists() else ""


def with_deadline(config: Config, seconds: float) -> Config:
    train = config.train.model_copy(update={"rank_deadline_s": seconds})
    return config.model_copy(update={"train": train})
