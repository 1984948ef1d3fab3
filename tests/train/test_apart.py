"""Trainer and engine on a pretended device: a GPU's rules, the CPU's numbers (tests/apart.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dart_cli.config.architecture import MIXTURES
from dart_cli.config.schema import Config, LoraConfig
from dart_cli.engines.transformers_engine import TransformersEngine
from dart_cli.policy.loader import load_policy
from dart_cli.train.learner import PolicyLearner
from dart_cli.train.packs.rank_shares import packed_batches
from dart_cli.train.trained_policy import TrainModel
from dart_cli.weights.file import load
from scripts.small_models import FAMILIES
from tests.apart import KIND, pretend
from tests.train import apart_ranks, rank_cases
from tests.train.test_families import config_of, trial_of
from tests.train.world import run_world
from tests.weights.sets import publish

Family = Callable[[str], Path]

LORA = LoraConfig(rank=4, alpha=8.0)
WAYS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "whole": ({}, {}),
    "recomputed, tower frozen": ({"freeze_vision": True}, {"recompute": "layer"}),
    "adapters": ({"lora": LORA}, {}),
    "shards in bfloat16": ({"dtype": "bfloat16"}, {}),
    "optimizer in main memory": ({"dtype": "bfloat16"}, {"offload": "optimizer"}),
    "adapters, bfloat16": ({"lora": LORA, "dtype": "bfloat16"}, {"recompute": "layer"}),
}
"""Changes of [model] and of [train]."""

FEWER = {"max_tokens": 3, "trajectories": 2, "texts": 1}
"""Steps of a trial: each operation passes through Python, so their number decides what a test costs."""

DENSE = [name for name in FAMILIES if name not in MIXTURES]
"""The pretended device has no grouped product of experts under inference mode."""

CASES = [(name, "whole") for name in DENSE] + [("qwen3_vl", way) for way in WAYS]


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)


def configured(folder: Path, way: str, **changes: object) -> Config:
    model, train = WAYS[way]
    config = config_of(folder, device="auto", kl_beta=0.01, **train, **changes)
    return config.model_copy(update={"model": config.model.model_copy(update=model)})


@pytest.mark.parametrize(("model_type", "way"), dict.fromkeys(CASES))
def test_the_trainer_learns_and_the_engine_takes_its_weights(
    model_type: str, way: str, family: Family, tmp_path: Path
) -> None:
    config = configured(family(model_type), way)
    is_rounded = config.model.dtype == "bfloat16"
    policy = load_policy(config.model.path, config.model.dtype, f"{KIND}:0", lora=config.model.lora)
    engine = TransformersEngine(policy, load_weights=load)
    learner = PolicyLearner(TrainModel.load(config), config.train)
    assert {value.device.type for value in policy.model.parameters()} == {KIND}
    close = 0.5 if is_rounded else 1e-4
    batch = trial_of(engine, temperature=0.7, **FEWER)
    update = learner.update(batch, 0, policy_version=0)
    assert update.applied
    assert update.metrics["parity_tokens"] == update.metrics["tokens"]
    assert update.metrics["parity_max"] <= close
    assert update.metrics["sees"] == 1
    [part] = packed_batches(batch, policy, pack_tokens=config.train.pack_tokens)
    assert len(part.packs) > 1
    if config.model.lora:  # their first step moves one of the two matrices alone
        learner.update(batch, 2)
    published = publish(learner.model.weights(), tmp_path, 1)
    asyncio.run(engine.update_weights(published.path, 1))
    batch = trial_of(engine, temperature=0.7, seed=1, **FEWER)
    asyncio.run(engine.close())
    here = None if is_rounded else on_the_cpu(config, learner)
    result = learner.update(batch, 3, policy_version=1).metrics
    assert result["parity_max"] <= close
    if here is not None:
        expected = here.update(batch, 3).metrics
        for name in ("loss", "grad_norm", "entropy", "mismatch_kl", "tokens"):
            assert result[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-6), name


@pytest.mark.parametrize(
    ("ranks", "ways"),
    [
        (2, ["whole", "adapters, bfloat16", "optimizer in main memory"]),
        (8, ["whole"]),
    ],
)
def test_several_ranks_of_it_compute_the_update_of_one_cpu(
    ranks: int, ways: list[str], family: Family, tmp_path: Path
) -> None:
    engine = TransformersEngine(load_policy(family("qwen3_vl"), device="cpu"))
    batch = trial_of(engine, temperature=0.7)
    asyncio.run(engine.close())
    folder = family("qwen3_vl")
    cases = {way: (configured(folder, way, parity_every=0), [batch]) for way in ways}
    [lead, *_] = run_world(ranks, apart_ranks.updated, tmp_path, cases, backend=apart_ranks.BACKEND)
    for way, (config, _) in cases.items():
        train = config.train.model_copy(update={"device": "cpu"})
        one = rank_cases.alone(config.model_copy(update={"train": train}), [batch])
        assert lead[way]["told"] == one["told"] == [(True, "", "")], way
        assert lead[way]["published"].keys() == one["published"].keys()
        is_rounded = config.model.dtype == "bfloat16"
        rel, least = (0.05, 5e-3) if is_rounded else (1e-3, 1e-5)  # terms of the loss cancel out
        [actual], [on_cpu] = lead[way]["metrics"], one["metrics"]
        for name in ("loss", "grad_norm", "entropy", "tokens"):
            assert actual[name] == pytest.approx(on_cpu[name], rel=rel, abs=least), (way, name)


def on_the_cpu(config: Config, learner: PolicyLearner) -> PolicyLearner:
    """A trainer on the CPU with the weights of `learner`."""
    train = config.train.model_copy(update={"device": "cpu"})
    other = PolicyLearner(TrainModel.load(config.model_copy(update={"train": train})), train)
    with torch.no_grad():
        for name, value in other.model.trainable().items():
            value.copy_(learner.model.trainable()[name].cpu())
    return other


def test_what_a_gpu_refuses_is_refused() -> None:
    there, here = torch.ones(3, device=f"{KIND}:0"), torch.ones(3)
    assert (there * 2).cpu().tolist() == [2, 2, 2]
    assert (there * torch.tensor(3.0)).tolist() == [3, 3, 3]  # a number may come from main memory
    for mixed in (
        lambda: there + here,
        lambda: torch.cat([there, here]),
        lambda: here.index_add_(0, torch.tensor([0]), there[:1]),
        lambda: torch.nn.functional.linear(there, torch.ones(2, 3)),
    ):
        with pytest.raises(RuntimeError, match="some tensors are on apart:0, others"):
            mixed()
    with pytest.raises((RuntimeError, TypeError)):
        there.numpy()
