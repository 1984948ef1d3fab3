"""An exported model against the weights that it was made of: log-probabilities of stored steps.

compare    how far they are apart
Compared   the result
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bus.errors import RunDirectoryError
from bus.messages import Batch
from dart_cli.config.endpoints import weights_dir
from dart_cli.config.schema import Config
from dart_cli.data.loading import chained
from dart_cli.data.store.open import open_reader
from dart_cli.player.chosen_model import newest_announced
from dart_cli.policy.loader import weight_tensors
from dart_cli.train.parity import limit_of, rescore
from dart_cli.train.trained_policy import TrainModel
from dart_cli.weights.file import load

MERGED = 0.01
"""Nats by which the mean may differ where adapters were merged, which rounds them to bfloat16: 0.002 was seen."""


@dataclass(frozen=True)
class Compared:
    """Differences of log-probabilities, nats."""

    tokens: int
    mean: float  # of their absolute values
    largest: float
    limit: float  # of the mean: what rounding alone stays below


def compare(config: Config, exported: Path) -> Compared:
    """Score the steps of the run's last batch with `exported`, and with the newest published set.

    Raises RunDirectoryError for a run without a batch or a set, ModelError, WeightsError.
    """
    update: dict[str, object] = {"path": str(exported), "lora": None, "adapters": ""}
    theirs = TrainModel.load_frozen(_alone(config, update))
    batch = _last_batch(config)
    after = rescore(theirs, batch, config.train.pack_tokens)
    ours = TrainModel.load_frozen(_alone(config, {}))
    published = newest_announced(config)
    if published is None:
        raise RunDirectoryError(f"{weights_dir(config)} holds no weights")
    mine = weight_tensors(ours.policy.model)
    with torch.no_grad():
        dtype = getattr(torch, config.model.dtype)  # of the set
        wanted = {name: tensor.to("meta", dtype) for name, tensor in mine.items()}
        for name, tensor in load(published.path, wanted).items():
            mine[name].copy_(tensor)
    before = rescore(ours, batch, config.train.pack_tokens)
    gaps = np.abs(after.trainer - before.trainer)
    limit = MERGED if config.model.lora else limit_of(ours)
    return Compared(int(gaps.size), float(gaps.mean()), float(gaps.max()), limit)


def _alone(config: Config, model: dict[str, object]) -> Config:
    """One rank's configuration, whose weights are what the engine computes with."""
    given = {**model, "dtype": "float32"}
    return config.model_copy(update={"model": config.model.model_copy(update=given)})


def _last_batch(config: Config) -> Batch:
    with open_reader(config.run.dir) as reader:
        batches = [each for each in reader.batches() if each.replay_of is None]
        if not batches:
            raise RunDirectoryError(f"{config.run.dir} has no batch")
        steps = reader.batch_steps(batches[-1].id)
        shown = {name for step in steps for name in step.image_hashes}
        images = reader.screenshots(shown)
    chains, samples = chained(steps)
    return Batch(
        batch_id=1,
        group_ids=sorted({step.group_id for step in steps}),
        temperature=config.rollout.temperature,
        chains=chains,
        samples=samples,
        images=images,
    )
