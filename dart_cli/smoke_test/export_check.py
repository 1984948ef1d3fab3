"""Compare an exported model with the weights that it was made of, by log-probabilities of stored steps.

compare_export       scores the steps of the last batch with both
LogprobDifferences   how far the scores are apart
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
from dart_cli.train.logprob_check import limit_of, rescore
from dart_cli.train.trained_policy import TrainModel
from dart_cli.weights.file import load

MERGED_LIMIT = 0.01
"""Limit of the mean difference in nats where adapters were merged, which rounds them to bfloat16. Measured:
0.002."""


@dataclass(frozen=True)
class LogprobDifferences:
    """Differences between log-probabilities of the same tokens, in nats."""

    tokens: int
    mean: float  # of the absolute differences
    largest: float
    limit: float  # rounding alone keeps the mean below this


def compare_export(config: Config, exported: Path) -> LogprobDifferences:
    """Score the steps of the run's last batch with the folder `exported` and with the newest published set.

    Raises RunDirectoryError for a run without a batch or a published set, ModelError, WeightsError.
    """
    # 1. Score with the export.
    export = TrainModel.load_frozen(
        _in_float32(config, {"path": str(exported), "lora": None, "adapters": ""})
    )
    batch = _last_batch(config)
    export_scores = rescore(export, batch, config.train.pack_tokens)

    # 2. Load the newest published set into the model as configured, and score with it.
    model = TrainModel.load_frozen(_in_float32(config, {}))
    published = newest_announced(config)
    if published is None:
        raise RunDirectoryError(f"{weights_dir(config)} holds no weights")
    tensors = weight_tensors(model.policy.model)
    with torch.no_grad():
        dtype = getattr(torch, config.model.dtype)  # of the published set
        expected = {name: tensor.to("meta", dtype) for name, tensor in tensors.items()}
        for name, tensor in load(published.path, expected).items():
            tensors[name].copy_(tensor)
    published_scores = rescore(model, batch, config.train.pack_tokens)

    gaps = np.abs(export_scores.trainer - published_scores.trainer)
    return LogprobDifferences(
        tokens=int(gaps.size),
        mean=float(gaps.mean()),
        largest=float(gaps.max()),
        limit=MERGED_LIMIT if config.model.lora else limit_of(model),
    )


def _in_float32(config: Config, model_keys: dict[str, object]) -> Config:
    """Return the configuration in float32, with `model_keys` in its section [model]."""
    model = config.model.model_copy(update={**model_keys, "dtype": "float32"})
    return config.model_copy(update={"model": model})


def _last_batch(config: Config) -> Batch:
    """Return the last batch of the run that is not a replay. Raises RunDirectoryError if there is none."""
    with open_reader(config.run.dir) as reader:
        batches = [batch for batch in reader.batches() if batch.replay_of is None]
        if not batches:
            raise RunDirectoryError(f"{config.run.dir} has no batch")
        steps = reader.batch_steps(batches[-1].id)
        images = reader.screenshots({name for step in steps for name in step.image_hashes})
    chains, samples = chained(steps)
    return Batch(
        batch_id=1,
        group_ids=sorted({step.group_id for step in steps}),
        temperature=config.rollout.temperature,
        chains=chains,
        samples=samples,
        images=images,
    )
