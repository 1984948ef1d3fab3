"""Engine and trainer compute the same distribution, and learn, with every class of model folder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bus.messages import Batch
from dart_cli.config.schema import Config, ModelConfig, TrainConfig
from dart_cli.doctor.logprob_check import Trial, play_trial
from dart_cli.engines.responder import PolicyResponder
from dart_cli.engines.transformers_engine import TransformersEngine
from dart_cli.policy.loader import load_policy
from dart_cli.train.learner import PolicyLearner
from dart_cli.train.logprob_check import rescore
from dart_cli.train.trained_policy import TrainModel
from dart_cli.weights.file import load
from scripts.small_models import FAMILIES
from tests.steps import steps_of, with_changes, with_steps
from tests.train.trees import packs_of
from tests.weights.sets import publish

Family = Callable[[str], Path]

every_family = pytest.mark.parametrize("model_type", FAMILIES)

CLOSE = 1e-4  # nats


def config_of(folder: Path, **changes: object) -> Config:
    train = TrainConfig(lr=1e-3, updates=4, pack_tokens=512, **changes)  # type: ignore[arg-type]
    return Config(model=ModelConfig(path=str(folder)), train=train)


def trial_of(engine: TransformersEngine, temperature: float, seed: int = 0, **fewer: int) -> Batch:
    sizes = {"max_tokens": 6, "trajectories": 3, "texts": 2, **fewer}
    trial = Trial(temperature=temperature, seed=seed, **sizes)  # type: ignore[arg-type]
    responder = PolicyResponder(engine.policy, engine)
    return asyncio.run(play_trial(engine.policy, engine, responder, trial))


@every_family
def test_engine_and_trainer_agree_before_and_after_a_step_that_moves_both_parts(
    model_type: str, family: Family, tmp_path: Path
) -> None:
    folder = family(model_type)
    config = config_of(folder)
    engine = TransformersEngine(load_policy(folder), load_weights=load)
    learner = PolicyLearner(TrainModel.load(config), config.train)
    batch = trial_of(engine, temperature=0.7)
    assert {sample.images for sample in batch.samples} == {0, 1, 2, 3}
    update = learner.update(batch, 0, policy_version=0)
    assert update.applied
    assert update.metrics["parity_tokens"] == update.metrics["tokens"]
    assert update.metrics["parity_max"] <= CLOSE

    moved = {"visual": 0.0, "language_model": 0.0}
    for name, parameter in learner.model.trainable().items():
        assert parameter.grad is not None, name
        assert bool(torch.isfinite(parameter.grad).all()), name
        for part in moved:
            if part in name:
                moved[part] += float(parameter.grad.abs().sum())
    assert min(moved.values()) > 0

    assert rescore(learner.model, batch, 512).mismatch().max > 10 * CLOSE  # the step did move it
    published = publish(learner.model.weights(), tmp_path, 1)
    asyncio.run(engine.update_weights(published.path, 1))
    after = trial_of(engine, temperature=1.0, seed=1)
    asyncio.run(engine.close())
    result = rescore(learner.model, after, 512)
    assert set(result.versions.tolist()) == {1}
    assert result.mismatch().max <= CLOSE
    assert set(result.by_screens()) == {"text", "one", "several"}


@every_family
def test_samples_that_share_a_pack_score_as_alone(model_type: str, family: Family) -> None:
    """Score completions that branch from one prompt, each with its own positions and its own path."""
    folder = family(model_type)
    model = TrainModel.load(config_of(folder))
    engine = TransformersEngine(model.policy)
    batch = trial_of(engine, temperature=1.0)
    asyncio.run(engine.close())
    by_prompt = sorted(steps_of(batch), key=lambda step: len(step.image_hashes))[-3:]
    crowd = [
        with_changes(
            step,
            trajectory_id=f"{step.trajectory_id}-{number}",
            token_ids=step.token_ids[number:],
            behaviour_logprobs=step.behaviour_logprobs[number:],
        )
        for step in by_prompt
        for number in range(3)
    ]
    crowded = with_steps(batch, crowd)

    def scored(size: int) -> dict[tuple[str, int], list[float]]:
        by_step: dict[tuple[str, int], list[float]] = {}
        for pack in packs_of(model, crowded, size):
            values = model.score(pack, 1.0).logprobs.tolist()
            for sample in pack.samples:
                by_step[sample.trajectory_id, sample.step] = values[: len(sample)]
                values = values[len(sample) :]
        return by_step

    with torch.no_grad():
        together, alone = scored(100_000), scored(1)
    assert len(packs_of(model, crowded)) == 1
    assert together.keys() == alone.keys()
    assert len(together) == 9
    for key, values in alone.items():
        assert together[key] == pytest.approx(values, abs=CLOSE), key


@every_family
def test_a_frozen_vision_tower_stays_and_the_language_learns(
    model_type: str, family: Family
) -> None:
    config = config_of(family(model_type))
    frozen = config.model_copy(
        update={"model": config.model.model_copy(update={"freeze_vision": True})}
    )
    learner = PolicyLearner(TrainModel.load(frozen), frozen.train)
    engine = TransformersEngine(load_policy(family(model_type)))
    batch = trial_of(engine, temperature=1.0)
    asyncio.run(engine.close())
    before = {name: value.clone() for name, value in learner.model.weights().items()}
    assert learner.update(batch, 0, policy_version=0).applied
    changed = {
        name
        for name, value in learner.model.weights().items()
        if not torch.equal(value, before[name])
    }
    assert changed
    assert not [name for name in changed if "visual" in name]
