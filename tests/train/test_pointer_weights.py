"""A pointer head is part of the model's weights: published, received, checkpointed, exported."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dart_cli.config.schema import Config
from dart_cli.export.folder import export_folder
from dart_cli.policy.loader import load_policy, weight_tensors
from dart_cli.policy.pointer_head import head_of
from dart_cli.runtime.run_dir import save_config
from dart_cli.train.checkpoints.checkpoint import load_newest
from dart_cli.train.checkpoints.identity import TrainerProgress
from dart_cli.train.learner import PolicyLearner
from dart_cli.train.trained_policy import TrainModel
from dart_cli.weights.broadcast.transport import Transport
from dart_cli.weights.file import FileChannel, load
from tests.train.parts import save
from tests.weights.broadcasting import make_channel, receiving, same, serving, take

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(pointer_folder: Callable[[str], Path]) -> Path:
    return pointer_folder("builtin:tiny")


@pytest.fixture(scope="module")
def tensors(folder: Path) -> Tensors:
    return weight_tensors(load_policy(folder).model)


def pointing(config: Config, folder: Path, pointing: str = "pointer", **train: Any) -> Config:
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"path": str(folder)}),
            "policy": config.policy.model_copy(update={"pointing": pointing}),
            "train": config.train.model_copy(update=train),
        }
    )


def moved(tensors: Tensors, by: float = 0.125) -> Tensors:
    """Publish after an update of the head alone."""
    return {
        name: tensor + by if name.startswith("pointer_head.") else tensor.clone()
        for name, tensor in tensors.items()
    }


# --- channels -----------------------------------------------------------------------------------


def test_an_update_of_the_head_alone_is_another_version_and_arrives(
    folder: Path, tensors: Tensors, tmp_path: Path
) -> None:
    channel = FileChannel(tmp_path / "weights", keep=2)
    first, expected = channel.publish(tensors, 0), moved(tensors)
    second = channel.publish(expected, 1)
    assert first.digest != second.digest
    assert same(load(second.path, weight_tensors(load_policy(folder).model)), expected)


async def test_the_head_arrives_by_a_broadcast(tensors: Tensors, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    transport = Transport("gloo")
    channel = make_channel(run_dir, transport)
    announced = channel.resume(tensors, 0)
    async with serving(run_dir, channel), receiving(run_dir, transport) as mine:
        assert same(await take(mine, announced, tensors), tensors)
        before, expected = mine.read_bytes, moved(tensors)
        announced = channel.publish(expected, 1)
        assert same(await take(mine, announced, tensors), expected)
        head = sum(each.nbytes for name, each in tensors.items() if "pointer_head" in name)
        assert mine.read_bytes - before == head  # what has not changed is not sent


# --- the trainer --------------------------------------------------------------------------------


def stepped(learner: PolicyLearner, updates: int) -> None:
    """Update all trained parameters by gradients of a pointer."""
    head = head_of(learner.model.policy.model)
    assert head is not None
    for update in range(updates):
        generator = torch.Generator().manual_seed(update)
        visual, hidden = (torch.randn(5, head.width, generator=generator) for _ in range(2))
        learner._optimizer.zero_grad(set_to_none=True)
        head(visual, hidden).log_softmax(-1)[:, 0].sum().backward()
        learner._apply_gradients(1e-2)


def test_the_head_is_trained_where_the_policy_points_and_frozen_where_it_writes(
    config: Config, folder: Path
) -> None:
    points = TrainModel.load(pointing(config, folder, kl_beta=0.1))
    writes = TrainModel.load(pointing(config, folder, "text"))
    names = {name for name in points.weights() if name.startswith("pointer_head.")}
    assert len(names) == 14
    assert names <= points.trainable().keys()
    assert not names & writes.trainable().keys()
    assert points.weights().keys() == writes.weights().keys()
    assert points.reference is not None
    other = dict(points.reference.model.named_parameters())
    mine = dict(points.policy.model.named_parameters())
    for name in names:
        assert torch.equal(other[name], mine[name])
        assert other[name].data_ptr() != mine[name].data_ptr()


def test_a_resumed_head_goes_on_bit_for_bit(config: Config, folder: Path, tmp_path: Path) -> None:
    config = pointing(config, folder)
    straight, broken, resumed = (
        PolicyLearner(TrainModel.load(config), config.train) for _ in range(3)
    )
    stepped(straight, 2)
    stepped(broken, 2)
    save(tmp_path, TrainerProgress(updates=2), broken.state())
    checkpoint = load_newest(tmp_path)
    assert checkpoint is not None
    resumed.restore(checkpoint.tensors)
    for learner in (straight, resumed):
        stepped(learner, 3)
    mine, theirs = resumed.state(), straight.state()
    for part in ("", "/exp_avg", "/exp_avg_sq"):
        assert f"pointer_head.qkv.weight{part}" in mine
    assert same(mine, theirs)
    before = weight_tensors(load_policy(folder).model)
    assert not torch.equal(mine["pointer_head.norm.bias"], before["pointer_head.norm.bias"])


# --- export -------------------------------------------------------------------------------------


def test_an_exported_folder_points_with_the_trained_head(
    config: Config, folder: Path, tensors: Tensors, tmp_path: Path
) -> None:
    config = pointing(config, folder)
    save_config(config)
    channel = FileChannel(config.run.dir / "weights")
    channel.publish(moved(tensors), 1)
    out = tmp_path / "out"
    export_folder(config, out, version=1, shard="300KB")
    assert same(weight_tensors(load_policy(out, pointing="pointer").model), moved(tensors))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert "pointer_head.qkv.weight" in index["weight_map"]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (folder / name).read_bytes()
