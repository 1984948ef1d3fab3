"""Promises of averaged weights: exact, resumed bit for bit, and what is served is what is compared."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bus.messages import Batch
from dart_cli.config.schema import Config, LoraConfig
from dart_cli.engines.transformers_engine import TransformersEngine
from dart_cli.policy.model import load_policy
from dart_cli.train.checkpoints.checkpoint import load_newest, recipe_of
from dart_cli.train.checkpoints.identity import TrainerProgress, newest_average
from dart_cli.train.learner import PolicyLearner
from dart_cli.train.model import TrainModel
from dart_cli.train.sharded import local_shard
from dart_cli.weights.file import load
from tests.devices import DEVICES
from tests.steps import changed
from tests.train.parts import Held, save
from tests.weights.sets import publish

CLOSE = 1e-5  # nats
DECAY = 0.7

EXACT = ("cpu", "float32")


def changed_config(config: Config, model: dict[str, Any] | None = None, **train: Any) -> Config:
    return config.model_copy(
        update={
            "train": config.train.model_copy(update=train),
            "model": config.model.model_copy(update=model or {}),
        }
    )


def learner(config: Config, **train: Any) -> PolicyLearner:
    config = changed_config(config, **{"average": DECAY, "lr": 1e-3, **train})
    return PolicyLearner(TrainModel.load(config), config.train)


def trained(made: PolicyLearner) -> dict[str, np.ndarray]:
    return {
        name: local_shard(value.detach()).double().numpy().copy()
        for name, value in made.model.trainable().items()
    }


def averages(made: PolicyLearner) -> dict[str, torch.Tensor]:
    suffix = "/average"
    return {
        name.removesuffix(suffix): local_shard(value).clone()
        for name, value in made.state().items()
        if name.endswith(suffix)
    }


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def unweighted(batch: Batch) -> Batch:
    """The batch without a weight: its update is skipped."""
    none = [sample.model_copy(update={"weight": 0.0}) for sample in batch.samples]
    return batch.model_copy(update={"samples": none})


def shifted(batch: Batch) -> Batch:
    """The batch as of an engine whose log-probabilities are off by 0.01 nats."""
    return changed(
        batch,
        lambda step: {"behaviour_logprobs": [value - 0.01 for value in step.behaviour_logprobs]},
    )


# --- the average itself ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [
        pytest.param({}, id="weights"),
        pytest.param({"lora": LoraConfig(rank=4, alpha=8.0)}, id="adapters"),
        pytest.param({"freeze_vision": True, "dtype": "bfloat16"}, id="bfloat16"),
    ],
)
def test_the_average_is_that_of_a_float64_computation(
    config: Config, batches: list[Batch], model: dict[str, Any]
) -> None:
    """Of what is trained alone, from the weights themselves on; an update that is skipped changes nothing."""
    made = learner(changed_config(config, model), epochs=2)
    wanted = trained(made)
    assert averages(made).keys() == wanted.keys()
    began = {name: value.copy() for name, value in wanted.items()}
    for done, batch in enumerate([*batches[:3], unweighted(batches[3])]):
        before = averages(made)
        is_applied = made.update(batch, done).applied
        assert is_applied == (done < 3)
        assert same(averages(made), before) != is_applied
        if is_applied:
            present = trained(made)
            wanted = {n: DECAY * v + (1 - DECAY) * present[n] for n, v in wanted.items()}
    moved = max(np.abs(wanted[name] - began[name]).max() for name in wanted)
    assert moved > 1e-4
    for name, value in averages(made).items():
        assert value.dtype == torch.float32
        assert np.allclose(value.numpy(), wanted[name], rtol=0, atol=1e-3 * moved), name


@pytest.mark.parametrize("changes", [{}, {"offload": "optimizer"}, {"recompute": "layer"}])
def test_a_run_that_is_resumed_has_the_average_of_one_that_was_not(
    config: Config, batches: list[Batch], tmp_path: Path, changes: dict[str, Any]
) -> None:
    straight = learner(config, **changes)
    for done, batch in enumerate(batches[:2]):
        straight.update(batch, done)
    save(tmp_path / "checkpoints", TrainerProgress(updates=2), straight.state())
    assert newest_average(tmp_path) == 2
    checkpoint = load_newest(tmp_path / "checkpoints")
    assert checkpoint is not None
    resumed = learner(config, **changes)
    resumed.restore(checkpoint.tensors)
    assert same(averages(resumed), averages(straight))
    for made in (straight, resumed):
        made.update(batches[2], 2)
    assert same(averages(resumed), averages(straight))
    assert len(averages(straight)) > 0


def test_an_average_that_a_checkpoint_lacks_begins_as_the_weights_and_an_unwanted_one_is_left_out(
    config: Config, batches: list[Batch], tmp_path: Path
) -> None:
    without = learner(config, average=0.0)
    without.update(batches[0], 0)
    assert averages(without) == {}
    save(tmp_path / "checkpoints", TrainerProgress(updates=1), without.state())
    assert newest_average(tmp_path) is None
    begun = learner(config)
    begun.restore(Held(without.state()))
    assert same(averages(begun), {n: v.detach() for n, v in begun.model.trainable().items()})
    begun.update(batches[1], 1)
    dropped = learner(config, average=0.0)
    dropped.restore(Held(begun.state()))
    assert averages(dropped) == {}
    wanted = {name: v for name, v in begun.state().items() if not name.endswith("/average")}
    assert same(dict(dropped.state()), wanted)


# --- what is published ----------------------------------------------------------------------------


def test_for_evaluation_the_published_weights_are_the_policys_own(
    config: Config, batches: list[Batch]
) -> None:
    made, plain = learner(config), learner(config, average=0.0)
    for each in (made, plain):
        each.update(batches[0], 0, policy_version=0)
    assert same(made.model.weights(), plain.model.weights())
    recipes = {recipe_of(changed_config(config, average=average)) for average in (0.0, 0.5, DECAY)}
    assert len(recipes) == 1
    assert recipe_of(changed_config(config, average=0.5, average_for="serving")) not in recipes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_for_serving_the_published_weights_are_the_averages_in_the_models_type(
    config: Config, batches: list[Batch], dtype: str
) -> None:
    made = learner(changed_config(config, {"dtype": dtype}), average_for="serving")
    for done, batch in enumerate(batches[:2]):
        made.update(batch, done)
    wanted = {name: each.to(getattr(torch, dtype)) for name, each in averages(made).items()}
    whole = {name: made.model.weights()[name].clone() for name in wanted}
    streamed = {name: each.to(getattr(torch, dtype)) for name, each in made.model.stream().tensors}
    assert same(whole, wanted)
    assert same({name: streamed[name] for name in wanted}, wanted)
    assert streamed.keys() == made.model.weights().keys()


# --- engine and trainer ---------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "close"), [("float32", 1e-4), ("bfloat16", 0.5)])
@pytest.mark.parametrize("device", DEVICES)
def test_an_engine_that_serves_averages_agrees_with_the_trainers_before_and_after_updates(
    config: Config,
    play: Callable[..., Batch],
    tmp_path: Path,
    device: str,
    dtype: str,
    close: float,
) -> None:
    config = changed_config(config, {"dtype": dtype}, device=device)
    made = learner(config, average_for="serving", parity_every=1)
    engine = TransformersEngine(load_policy(config.model.path, dtype, device), load_weights=load)
    for version in range(3):
        batch = play(engine, 6, 2, batch_id=version + 1)
        assert {span.version for s in batch.samples for span in s.version_spans} == {version}
        update = made.update(batch, version, policy_version=version)
        assert update.applied
        assert update.metrics["parity_tokens"] == update.metrics["tokens"]
        assert update.metrics["parity_max"] <= (CLOSE if (device, dtype) == EXACT else close)
        if version and config.model.dtype == "float32":
            # The policy under training is another than the one that played, which the weights correct.
            assert update.metrics["mismatch_max"] > 100 * CLOSE
            assert update.metrics["ess"] < 1.0 - 1e-5
        published = publish(made.model.weights(), tmp_path, version + 1)
        asyncio.run(engine.update_weights(published.path, version + 1))
    asyncio.run(engine.close())


def test_samples_of_an_older_average_are_compared_with_that_average(
    config: Config, play: Callable[..., Batch], batches: list[Batch], tmp_path: Path
) -> None:
    """The average of version 1 plays; its samples come when the trainer is at version 3."""
    engine = TransformersEngine(
        load_policy(config.model.path, config.model.dtype), load_weights=load
    )

    def at_version_3() -> tuple[PolicyLearner, Batch]:
        made = learner(config, average_for="serving", parity_every=1)
        made.update(batches[0], 0, policy_version=0)
        published = publish(made.model.weights(), tmp_path, 1)
        asyncio.run(engine.update_weights(published.path, 1))
        for version in (1, 2):
            made.update(batches[version], version, policy_version=version)
        return made, play(engine, 6, 2, batch_id=4)

    right, late = at_version_3()
    update = right.update(late, 3, policy_version=3)
    assert update.applied
    assert update.metrics["parity_tokens"] == update.metrics["tokens"]
    assert update.metrics["parity_max"] <= CLOSE < update.metrics["stale_max"] / 100
    wrong, late = at_version_3()
    before, served = trained(wrong), averages(wrong)
    update = wrong.update(shifted(late), 3, policy_version=3)
    asyncio.run(engine.close())
    assert "v1" in update.alarm
    assert not update.applied
    assert same(averages(wrong), served)
    assert all(np.array_equal(value, before[name]) for name, value in trained(wrong).items())


def test_averages_that_are_served_and_disagree_stop_the_run(
    config: Config, batches: list[Batch]
) -> None:
    made = learner(config, average_for="serving")
    served = averages(made)
    update = made.update(shifted(batches[0]), 0, policy_version=0)
    assert "v0" in update.alarm
    assert not update.applied
    assert same(averages(made), served)
