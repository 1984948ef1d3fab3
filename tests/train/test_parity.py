"""The trainer's forward pass gives tokens the log-probabilities with which the engine sampled them.

Engine and trainer hold models of their own, which share nothing but the folder they load and the
weight sets that are published.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from bus.messages import Batch
from dart_cli.config.schema import Config, LoraConfig
from dart_cli.engines.transformers_engine import TransformersEngine
from dart_cli.policy.loader import load_policy, weight_tensors
from dart_cli.train.checkpoints.checkpoint import load_newest
from dart_cli.train.checkpoints.identity import TrainerProgress
from dart_cli.train.learner import PolicyLearner
from dart_cli.train.logprob_check import limit_of
from dart_cli.train.trained_policy import TrainModel
from dart_cli.weights.file import load
from tests.devices import DEVICES
from tests.train.parts import save
from tests.train.rank_cases import fill_b
from tests.train.trees import packs_of, tree_batch
from tests.weights.sets import publish

STEPS = 3  # of each trajectory: the last shows three screens
CLOSE = 1e-5  # nats


def largest_gap(model: TrainModel, batch: Batch) -> float:
    """Return the largest difference of behaviour and trainer's log-probabilities over all tokens."""
    gaps, tokens = [], 0
    with torch.no_grad():
        for pack in packs_of(model, batch, 2048):
            scores = model.score(pack, batch.temperature)
            gaps.append((scores.logprobs - pack.behaviour_logprobs).abs().max().item())
            tokens += len(scores.logprobs)
    assert tokens == sum(map(len, batch.samples))
    return max(gaps)


FROZEN: dict[str, dict[str, Any]] = {
    "whole": {},
    "frozen tower": {"model": {"freeze_vision": True}},
    "adapters": {"model": {"lora": LoraConfig(rank=4, alpha=8.0)}},
    "KL": {"train": {"kl_beta": 0.1}},
    "critic": {"train": {"critic": "gae"}},
    "recompute": {"train": {"recompute": "layer"}},
    "offload": {"train": {"offload": "optimizer"}},
    "pointer": {"policy": {"pointing": "pointer"}},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "model_type"),
    [
        *((kind, "qwen2_5_vl") for kind in FROZEN),
        *(("whole", "qwen2_vl"), ("whole", "qwen3_vl")),
        *((kind, "qwen3_5") for kind in ("whole", "adapters", "recompute", "pointer")),
    ],
)
def test_a_model_that_only_scores_has_the_trainers_scores_bit_for_bit(
    config: Config, pointer_folder: Callable[[str], Path], kind: str, model_type: str, dtype: str
) -> None:
    """Compare the scores: the frozen model has the weights to which the trainer rounds its float32 masters."""
    sections = {"model": {"dtype": dtype, "path": str(pointer_folder(model_type))}}
    for name, update in FROZEN[kind].items():
        sections[name] = sections.get(name, {}) | update
    update = {
        name: getattr(config, name).model_copy(update=keys) for name, keys in sections.items()
    }
    changed = config.model_copy(update=update)
    trained, frozen = TrainModel.load(changed), TrainModel.load_frozen(changed)
    if kind == "adapters":  # whose B begins at zero, so that it would add nothing
        fill_b(trained)
        put(frozen, trained.weights())
    batch = tree_batch(frozen.policy, groups=1)
    with torch.no_grad():
        for one, other in zip(*(packs_of(m, batch, 512) for m in (trained, frozen)), strict=True):
            expected, result = trained.score(one, 0.7), frozen.score(other, 0.7)
            assert torch.equal(result.logprobs, expected.logprobs)
            assert torch.equal(result.entropies, expected.entropies)
    assert not frozen.trainable()
    assert frozen.reference is None
    assert {each.dtype for each in frozen.policy.model.parameters()} == {getattr(torch, dtype)}
    assert limit_of(frozen) == limit_of(trained)


def put(model: TrainModel, weights: Mapping[str, torch.Tensor]) -> None:
    """Give the model these weights, rounded to its type."""
    for name, each in weight_tensors(model.policy.model).items():
        each.copy_(weights[name])


@pytest.mark.parametrize(("temperature", "trajectories"), [(1.0, 34), (0.7, 12)])
def test_engine_and_trainer_agree_before_and_after_updates(
    config: Config,
    engine: TransformersEngine,
    play,
    temperature: float,
    trajectories: int,
    tmp_path: Path,
) -> None:
    model = TrainModel.load(config)
    learner = PolicyLearner(model, config.train)
    batch = play(engine, trajectories, STEPS, temperature)
    assert any(sample.images == 3 for sample in batch.samples)
    assert largest_gap(model, batch) <= CLOSE
    for version in (1, 2):
        assert learner.update(batch, updates_done=version - 1).applied
        assert largest_gap(model, batch) > 100 * CLOSE  # the update did change the policy
        published = publish(model.weights(), tmp_path, version)
        asyncio.run(engine.update_weights(published.path, version))
        batch = play(engine, trajectories, STEPS, temperature, batch_id=version + 1)
        assert {span.version for s in batch.samples for span in s.version_spans} == {version}
        assert largest_gap(model, batch) <= CLOSE


@pytest.mark.parametrize(("dtype", "close"), [("float32", 1e-4), ("bfloat16", 0.5)])
@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_a_device_plays_trains_resumes_and_takes_the_weights(
    config: Config, play, tmp_path: Path, device: str, dtype: str, close: float
) -> None:
    config = config.model_copy(
        update={
            "model": config.model.model_copy(update={"dtype": dtype}),
            "train": config.train.model_copy(update={"device": device, "kl_beta": 0.01}),
        }
    )
    learner = PolicyLearner(TrainModel.load(config), config.train)
    engine = TransformersEngine(load_policy(config.model.path, dtype, device), load_weights=load)
    batch = play(engine, 3, 2)
    update = learner.update(batch, 0, policy_version=0)
    assert update.applied
    assert update.metrics["parity_max"] <= close
    save(tmp_path, TrainerProgress(updates=1), learner.state())
    checkpoint = load_newest(tmp_path)
    assert checkpoint is not None
    resumed = PolicyLearner(TrainModel.load(config), config.train)
    resumed.restore(checkpoint.tensors)
    published = publish(resumed.model.weights(), tmp_path / "weights", 1)
    asyncio.run(engine.update_weights(published.path, 1))
    update = resumed.update(play(engine, 3, 2, batch_id=2), 1, policy_version=1)
    asyncio.run(engine.close())
    assert update.applied
    assert update.metrics["parity_max"] <= close


def test_the_metrics_of_the_update_measure_the_agreement(
    config: Config, engine: TransformersEngine, play
) -> None:
    learner = PolicyLearner(TrainModel.load(config), config.train)
    batch = play(engine, 6, 2)
    fresh = learner.update(batch, 0, policy_version=0).metrics
    assert fresh["mismatch_max"] <= CLOSE
    assert fresh["parity_max"] == pytest.approx(fresh["mismatch_max"], abs=1e-9)
    assert fresh["ess"] == pytest.approx(1.0, abs=1e-6)
    stale = learner.update(batch, 1, policy_version=1).metrics
    assert "parity_max" not in stale  # none of its tokens was sampled by these weights
    assert stale["mismatch_kl"] > 100 * abs(fresh["mismatch_kl"])
    assert stale["ess"] < 1.0 - 1e-4
