"""Promises of checkpoints: resumed is uninterrupted, damaged is noticed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bus.errors import CheckpointError
from bus.messages import Batch
from dart_cli.config.schema import Config
from dart_cli.train.checkpoint import MODEL, OPTIMIZER, STATE, TrainerProgress, load_newest, save
from dart_cli.train.learner import PolicyLearner
from dart_cli.train.model import TrainModel

TENSORS = {"w": torch.arange(6.0).reshape(2, 3)}
STATES = {"w/exp_avg": torch.ones(2, 3), "w/step": torch.tensor(3.0)}


def write(directory: Path, updates: int, keep: int = 5) -> Path:
    weights = {"w": TENSORS["w"] + updates}
    progress = TrainerProgress(updates=updates, policy_version=updates, last_batch_id=updates)
    return save(directory, progress, weights, STATES, keep)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    config: Config, batches: list[Batch], tmp_path: Path, dtype: str
) -> None:
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
    straight = PolicyLearner(TrainModel.load(config), config.train)
    for done, batch in enumerate(batches):
        straight.update(batch, done)

    broken = PolicyLearner(TrainModel.load(config), config.train)
    for done, batch in enumerate(batches[:2]):
        broken.update(batch, done)
    save(
        tmp_path, TrainerProgress(updates=2), broken.model.weights(), broken.optimizer_tensors(), 2
    )
    resumed = PolicyLearner(TrainModel.load(config), config.train)
    checkpoint = load_newest(tmp_path)
    assert checkpoint is not None
    resumed.restore(checkpoint.weights, checkpoint.optimizer)
    for done, batch in enumerate(batches[2:], start=checkpoint.progress.updates):
        resumed.update(batch, done)

    expected, got = straight.model.weights(), resumed.model.weights()
    assert all(torch.equal(got[name], value) for name, value in expected.items())
    state, back = straight.optimizer_tensors(), resumed.optimizer_tensors()
    assert state.keys() == back.keys()
    assert all(torch.equal(back[name], value) for name, value in state.items())


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    progress = TrainerProgress(
        updates=7, skipped=1, policy_version=9, last_batch_id=8, batches_trained=[6, 7, 8]
    )
    generator = torch.get_rng_state()
    save(tmp_path, progress, TENSORS, STATES, 2)
    checkpoint = load_newest(tmp_path)
    assert checkpoint is not None
    assert checkpoint.progress == progress
    assert torch.equal(checkpoint.weights["w"], TENSORS["w"])
    assert checkpoint.optimizer.keys() == STATES.keys()
    assert torch.equal(checkpoint.generator, generator)


def test_a_checkpoint_before_the_first_update_is_sound(tmp_path: Path) -> None:
    save(tmp_path, TrainerProgress(), TENSORS, {}, 2)
    checkpoint = load_newest(tmp_path)
    assert checkpoint is not None
    assert checkpoint.optimizer == {}


def test_there_may_be_no_checkpoint(tmp_path: Path) -> None:
    assert load_newest(tmp_path / "absent") is None


def test_the_newest_k_are_kept(tmp_path: Path) -> None:
    for updates in (9, 10, 999_999, 1_000_000):
        write(tmp_path, updates, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c1000000", "c999999"]
    checkpoint = load_newest(tmp_path)
    assert checkpoint is not None
    assert checkpoint.progress.updates == 1_000_000


def cut(path: Path) -> None:
    (path / MODEL).write_bytes((path / MODEL).read_bytes()[:-5])


def lose(path: Path) -> None:
    (path / OPTIMIZER).unlink()


def garble(path: Path) -> None:
    (path / STATE).write_text("{}")


def pretend(path: Path) -> None:
    told = json.loads((path / STATE).read_text())
    told["progress"]["updates"] = "many"
    (path / STATE).write_text(json.dumps(told))


@pytest.mark.parametrize("damage", [cut, lose, garble, pretend])
def test_a_damaged_checkpoint_is_put_aside_for_the_one_before(
    tmp_path: Path, damage, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, 1)
    damage(write(tmp_path, 2))
    checkpoint = load_newest(tmp_path)
    assert checkpoint is not None
    assert checkpoint.progress.updates == 1
    assert "c000002" in caplog.text
    again = write(tmp_path, 2)  # trained anew from 1: the damaged one is not in the way
    checkpoint = load_newest(tmp_path)
    assert checkpoint is not None
    assert checkpoint.path == again


def test_if_none_is_sound_the_error_names_the_cure(tmp_path: Path) -> None:
    cut(write(tmp_path, 1))
    with pytest.raises(CheckpointError, match="none of 1 checkpoints can be read; remove"):
        load_newest(tmp_path)


def test_a_half_written_checkpoint_does_not_exist(tmp_path: Path) -> None:
    write(tmp_path, 1)
    draft = tmp_path / ".c000002.draft"
    draft.mkdir()
    (draft / STATE).write_text("{}")
    checkpoint = load_newest(tmp_path)
    assert checkpoint is not None
    assert checkpoint.progress.updates == 1


def test_a_checkpoint_of_another_model_is_refused(config: Config) -> None:
    learner = PolicyLearner(TrainModel.load(config), config.train)
    with pytest.raises(ValueError, match="other names or shapes"):
        learner.restore(TENSORS, {})
