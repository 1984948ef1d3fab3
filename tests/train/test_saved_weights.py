"""Promises of the weights in a checkpoint: averages become a weight set of exactly these numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from bus.errors import CheckpointError, RunDirectoryError, UserError
from dart_cli.config.models import resolve
from dart_cli.config.schema import Config, LoraConfig
from dart_cli.policy.lora import initial_adapter
from dart_cli.policy.model import load_policy, weight_tensors
from dart_cli.train.checkpoints.checkpoint import path_of
from dart_cli.train.checkpoints.identity import TrainedPart, TrainerProgress, model_identity
from dart_cli.train.checkpoints.saved_weights import averaged_set, newest_weights
from dart_cli.weights.file import load
from dart_cli.weights.manifest import read_manifest
from tests.train.parts import save

State = dict[str, torch.Tensor]


@pytest.fixture
def run_config(config: Config, tmp_path: Path) -> Config:
    run = config.run.model_copy(update={"dir": tmp_path / "run"})
    run.dir.mkdir(exist_ok=True)
    return config.model_copy(update={"run": run})


def model_tensors(config: Config) -> State:
    return weight_tensors(load_policy(config.model.path, lora=config.model.lora).model)


def checkpoint(
    config: Config, updates: int, weights: Mapping[str, torch.Tensor], by: float | None
) -> None:
    """A checkpoint of these weights, whose averages are `by` more."""
    averages = {} if by is None else {f"{n}/average": v + by for n, v in weights.items()}
    moments = {f"{name}/exp_avg": torch.ones_like(value) for name, value in weights.items()}
    save(
        config.run.dir / "checkpoints",
        TrainerProgress(updates=updates, policy_version=updates - 1),
        {**weights, **moments, **averages},
        model=model_identity(resolve(config.model.path)),
        trained=TrainedPart.of(config),
    )


def test_averages_become_a_weight_set_beside_what_was_not_trained(run_config: Config) -> None:
    whole = model_tensors(run_config)
    trained = {name: value for name, value in whole.items() if ".visual." not in name}
    assert 0 < len(trained) < len(whole)
    checkpoint(run_config, 5, trained, by=0.125)
    path, progress = averaged_set(run_config)
    assert (path, progress.updates) == (run_config.run.dir / "averaged" / "v000005", 5)
    held = load(path, whole)
    for name, value in whole.items():
        assert torch.equal(held[name], trained[name] + 0.125 if name in trained else value), name
    assert averaged_set(run_config)[0] == path  # the same weights are the same set


def test_a_number_never_means_two_sets_of_averages(run_config: Config) -> None:
    """A run that lost its checkpoint trained again, to other weights after as many updates."""
    whole = model_tensors(run_config)
    checkpoint(run_config, 5, whole, by=0.125)
    first, _ = averaged_set(run_config)
    target = path_of(run_config.run.dir / "checkpoints", 5)
    target.rename(target.with_name("lost"))
    checkpoint(run_config, 5, whole, by=0.25)
    second, progress = averaged_set(run_config)
    assert (second.name, progress.updates) == ("v000006", 5)
    digests = [read_manifest(path).tensors for path in (first, second)]
    assert digests[0] != digests[1]


def test_averaged_adapters_keep_their_settings(run_config: Config) -> None:
    lora = LoraConfig(rank=2, alpha=4.0)
    adapted = run_config.model_copy(
        update={"model": run_config.model.model_copy(update={"lora": lora})}
    )
    adapters = {
        name: initial_adapter(name, value.shape, 0)
        for name, value in model_tensors(adapted).items()
    }
    checkpoint(adapted, 3, adapters, by=0.5)
    path, _ = averaged_set(run_config)  # its configuration does not name them: the checkpoint does
    assert read_manifest(path).lora == lora
    held = load(path, adapters)
    assert all(torch.equal(held[name], value + 0.5) for name, value in adapters.items())


def test_what_cannot_be_averaged_is_refused_with_the_cure(run_config: Config) -> None:
    with pytest.raises(RunDirectoryError, match="no intact checkpoint"):
        averaged_set(run_config)
    whole = model_tensors(run_config)
    checkpoint(run_config, 1, whole, by=None)
    with pytest.raises(UserError, match=r"no averaged weights; set train\.average"):
        averaged_set(run_config)
    assert newest_weights(run_config).tensors.names == whole.keys()
    checkpoint(run_config, 2, {"w": torch.zeros(2)}, by=0.0)
    with pytest.raises(CheckpointError, match="which the model lacks"):
        averaged_set(run_config)


def test_averages_of_a_damaged_checkpoint_are_not_played(run_config: Config) -> None:
    """Its digest differs: the one before is the newest that is intact."""
    whole = model_tensors(run_config)
    checkpoint(run_config, 4, whole, by=0.125)
    checkpoint(run_config, 5, whole, by=0.25)
    folder = path_of(run_config.run.dir / "checkpoints", 5)
    file = max(folder.glob("*.safetensors"), key=lambda each: each.stat().st_size)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert averaged_set(run_config)[1].updates == 4
