"""Adapters through engine and trainer: one distribution, only their bytes, the base as it was."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from bus.messages import Batch
from dart_cli.config.architecture import shape_of
from dart_cli.config.model_folder import read_json, resolve
from dart_cli.config.schema import Config, LoraConfig
from dart_cli.engines import caches
from dart_cli.engines.transformers_engine import TransformersEngine
from dart_cli.policy.forward import ImageFeatures, image_features
from dart_cli.policy.images import PreparedImage
from dart_cli.policy.loader import load_policy, weight_tensors
from dart_cli.policy.model_files import write_adapters
from dart_cli.train.checkpoints.checkpoint import load as load_checkpoint
from dart_cli.train.checkpoints.checkpoint import load_newest
from dart_cli.train.checkpoints.identity import TrainerProgress
from dart_cli.train.learner import PolicyLearner
from dart_cli.train.logprob_check import rescore
from dart_cli.train.trained_policy import TrainModel
from dart_cli.weights.file import FileChannel, load
from scripts.small_models import FAMILIES
from tests.train.parts import save
from tests.train.test_families import config_of, trial_of
from tests.weights.sets import publish

Family = Callable[[str], Path]

every_family = pytest.mark.parametrize("model_type", FAMILIES)

CLOSE = 5e-5  # nats: the recurrent layers of qwen3_5 reach 4e-5, the other classes 5e-6
LORA = LoraConfig(rank=4, alpha=8.0)


def adapted(config: Config, lora: LoraConfig = LORA, **changes: object) -> Config:
    """The configuration with adapters, and other changes of [model]."""
    model = config.model.model_copy(update={"lora": lora, **changes})
    return config.model_copy(update={"model": model})


def contents(folder: Path) -> dict[str, str]:
    return {path.name: blake2b(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@every_family
def test_engine_and_trainer_agree_before_and_after_a_step_of_the_adapters(
    model_type: str, family: Family, tmp_path: Path
) -> None:
    folder = family(model_type)
    before = contents(folder)
    config = adapted(config_of(folder))
    engine = TransformersEngine(load_policy(folder, lora=LORA, seed=5), load_weights=load)
    learner = PolicyLearner(TrainModel.load(config), config.train)
    batch = trial_of(engine, temperature=0.7)
    update = learner.update(batch, 0, policy_version=0)
    assert update.applied
    assert update.metrics["parity_tokens"] == update.metrics["tokens"]
    assert update.metrics["parity_max"] <= CLOSE
    learner.update(batch, 1)  # the first moves B alone: A's gradient is zero while B is

    published = publish(learner.model.weights(), tmp_path, 1)
    asyncio.run(engine.update_weights(published.path, 1))
    after = trial_of(engine, temperature=1.0, seed=1)
    asyncio.run(engine.close())
    assert rescore(learner.model, batch, 512).mismatch().max > 10 * CLOSE
    result = rescore(learner.model, after, 512)
    assert set(result.versions.tolist()) == {1}
    assert result.mismatch().max <= CLOSE
    assert set(result.by_screens()) == {"text", "one", "several"}
    assert contents(folder) == before


def test_in_float32_they_agree_to_a_millionth(
    config: Config, tiny_folder: Path, play: Callable[..., Batch], tmp_path: Path
) -> None:
    learner = PolicyLearner(TrainModel.load(adapted(config)), config.train)
    engine = TransformersEngine(load_policy(tiny_folder, lora=LORA), load_weights=load)
    for index in range(3):
        update = learner.update(play(engine, 6, 2, batch_id=index + 1), index, policy_version=index)
        assert update.applied
        assert update.metrics["parity_mean"] <= 1e-6
        asyncio.run(
            engine.update_weights(
                publish(learner.model.weights(), tmp_path, index + 1).path, index + 1
            )
        )
    asyncio.run(engine.close())


FAULTS = {
    "none": (LORA, "newest"),
    "not scaled": (LORA.model_copy(update={"alpha": float(LORA.rank)}), "newest"),
    "an older version under a new number": (LORA, "older"),
    "adapters switched off": (LORA, "off"),
}


@pytest.mark.parametrize("served", FAULTS)
def test_the_gate_stops_an_engine_that_serves_other_adapters_than_it_says(
    config: Config, tiny_folder: Path, play: Callable[..., Batch], tmp_path: Path, served: str
) -> None:
    lora, which = FAULTS[served]
    train = config.train.model_copy(update={"lr": 0.03})
    learner = PolicyLearner(TrainModel.load(adapted(config)), train)
    engine = TransformersEngine(load_policy(tiny_folder, lora=lora), load_weights=load)
    untrained = play(engine, 6, 2)
    trainee = [publish(learner.model.weights(), tmp_path / "trainer", 0)]
    for index in range(2):
        update = learner.update(untrained, index, policy_version=index if index == 0 else None)
        assert update.applied, update.alarm or update.note
        trainee.append(publish(learner.model.weights(), tmp_path / "trainer", index + 1))
    newest = load(trainee[-1].path, learner.model.weights())
    serves = {
        "newest": newest,
        "older": load(trainee[-2].path, newest),
        "off": {name: torch.zeros_like(value) for name, value in newest.items()},
    }[which]
    taken = publish(serves, tmp_path / "engine", 2)
    asyncio.run(engine.update_weights(taken.path, 2))
    batch = play(engine, 8, 3, batch_id=2)
    asyncio.run(engine.close())
    before = learner.state()
    update = learner.update(batch, 2, policy_version=2)
    assert update.metrics["parity_tokens"] == update.metrics["tokens"]
    if served == "none":
        assert update.applied
        assert update.metrics["parity_max"] <= CLOSE
        return
    assert not update.applied
    assert "disagree on" in update.alarm
    assert "of v2" in update.alarm
    after = learner.state()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], value) for name, value in newest.items())


def test_a_step_changes_the_adapters_and_nothing_else(config: Config, batches: list[Batch]) -> None:
    trainee = PolicyLearner(TrainModel.load(adapted(config)), config.train)
    model = trainee.model.policy.model
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for index, batch in enumerate(batches[:2]):
        trainee.update(batch, index)
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == set(trainee.model.weights()) == set(trainee.model.trainable())


def test_the_reference_is_the_same_model_without_its_adapters(
    config: Config, batches: list[Batch]
) -> None:
    """Use no second model: numbers and gradients equal those with the base as a separate reference."""
    train = config.train.model_copy(update={"kl_beta": 0.3})
    config = config.model_copy(update={"train": train})
    trainee = PolicyLearner(TrainModel.load(adapted(config)), train)
    assert trainee.model.reference is trainee.model.policy
    apart = TrainModel.load(adapted(config))
    base = load_policy(config.model.path)
    base.model.requires_grad_(False)
    other = PolicyLearner(TrainModel.of(apart.policy, base), train)
    for index, batch in enumerate(batches[:3]):
        ours, theirs = trainee.update(batch, index), other.update(batch, index)
        assert ours.applied
        assert ours.metrics["reference_kl"] == pytest.approx(
            theirs.metrics["reference_kl"], abs=1e-6
        )
        assert (ours.metrics["reference_kl"] > 1e-6) == (index > 0)
    for name, value in trainee.model.weights().items():
        assert torch.allclose(value, other.model.weights()[name], atol=1e-6), name


def test_a_version_has_the_bytes_of_its_adapters(config: Config, tmp_path: Path) -> None:
    model = TrainModel.load(adapted(config))
    channel = FileChannel(tmp_path)
    first = channel.resume(model.weights(), 0)
    second = channel.publish({n: t + 1 for n, t in model.weights().items()}, 1)
    shape = shape_of(read_json(resolve(config.model.path), "config.json"))
    assert first.size_bytes == second.size_bytes == 4 * shape.adapters(LORA.rank)
    on_disk = (second.path / "model.safetensors").stat().st_size
    assert second.size_bytes <= on_disk < second.size_bytes + 10_000
    half = TrainModel.load(adapted(config, dtype="bfloat16"))
    assert publish(half.weights(), tmp_path / "half", 0).size_bytes == first.size_bytes // 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_of_adapters_is_the_uninterrupted_one_bit_for_bit(
    config: Config, batches: list[Batch], tmp_path: Path, dtype: str
) -> None:
    config = adapted(config, dtype=dtype)
    straight = PolicyLearner(TrainModel.load(config), config.train)
    for index, batch in enumerate(batches):
        straight.update(batch, index)
    broken = PolicyLearner(TrainModel.load(config), config.train)
    for index, batch in enumerate(batches[:2]):
        broken.update(batch, index)
    state = broken.state()
    assert {name.partition("/")[0] for name in state} == set(broken.model.weights())
    save(tmp_path, TrainerProgress(updates=2), state)
    resumed = PolicyLearner(TrainModel.load(config), config.train)
    checkpoint = load_newest(tmp_path)
    assert checkpoint is not None
    resumed.restore(checkpoint.tensors)
    for index, batch in enumerate(batches[2:], start=2):
        resumed.update(batch, index)
    got = resumed.model.weights()
    assert all(torch.equal(got[n], value) for n, value in straight.model.weights().items())
    back = resumed.state()
    assert all(torch.equal(back[n], v) for n, v in straight.state().items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # whole, and as shards
def test_a_run_begins_with_the_adapters_of_a_folder(
    config: Config, tmp_path: Path, dtype: Literal["float32", "bfloat16"]
) -> None:
    trainee = load_policy(config.model.path, lora=LORA, seed=5)
    tensors = weight_tensors(trainee.model)
    generator = torch.Generator().manual_seed(2)
    for tensor in tensors.values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator).bfloat16())
    write_adapters(tensors, LORA, config.model.path, tmp_path)
    learner = TrainModel.load(adapted(config, dtype=dtype, adapters=str(tmp_path)))
    weights_now = learner.weights()
    assert weights_now.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(whole(weights_now[name]), tensor)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def test_weights_of_another_rank_or_of_the_whole_model_are_refused(
    config: Config, tmp_path: Path
) -> None:
    trainee = PolicyLearner(TrainModel.load(adapted(config)), config.train)
    for updates, other in enumerate((LORA.model_copy(update={"rank": 5}), None)):
        theirs = load_policy(config.model.path, lora=other)
        path = save(tmp_path, TrainerProgress(updates=updates), weight_tensors(theirs.model))
        with pytest.raises(ValueError, match=r"names or shapes|, the model's \["):
            trainee.restore(load_checkpoint(path).tensors)


def test_screens_are_not_computed_again_as_the_tower_has_no_adapters(
    tiny_folder: Path,
    play: Callable[..., Batch],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed: list[str] = []

    def counted(model: PreTrainedModel, images: Sequence[PreparedImage]) -> ImageFeatures:
        computed.extend(image.key for image in images)
        return image_features(model, images)

    monkeypatch.setattr(caches, "image_features", counted)
    engine = TransformersEngine(load_policy(tiny_folder, lora=LORA), load_weights=load)
    first = play(engine, 2, 1)
    same = publish(weight_tensors(engine.policy.model), tmp_path, 1)
    asyncio.run(engine.update_weights(same.path, 1))
    count = len(computed)
    assert count > 0
    again = play(engine, 2, 1)
    asyncio.run(engine.close())
    assert again.images.keys() == first.images.keys()
    assert len(computed) == count
