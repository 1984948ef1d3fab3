"""A teacher beside what else changes an update: a critic, and a head that points."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bus.messages import Batch
from dart_cli.config.schema import Config, ModelConfig, PolicyConfig, TeacherConfig, TrainConfig
from dart_cli.train.checkpoints.checkpoint import CheckpointSaver, load_newest
from dart_cli.train.checkpoints.identity import TrainerProgress
from dart_cli.train.critic import PREFIX
from dart_cli.train.learner import PolicyLearner
from dart_cli.train.trained_policy import TrainModel
from tests.train.another_model import another
from tests.train.parts import with_baselines
from tests.train.trees import tree_batch

Family = Callable[[str], Path]


def learner(folder: Path, teacher: Path, *, points: bool = False, **train: object) -> PolicyLearner:
    config = Config(
        model=ModelConfig(path=str(folder)),
        policy=PolicyConfig(pointing="pointer" if points else "text"),
        train=TrainConfig.model_validate(
            {"lr": 1e-3, "updates": 4, "parity_every": 0, "teacher_weight": 1.0} | train
        ),
        teacher=TeacherConfig(model=str(teacher)),
    )
    return PolicyLearner(TrainModel.load(config), config.train)


def without_reward(batch: Batch) -> Batch:
    samples = [sample.model_copy(update={"advantage": 0.0}) for sample in batch.samples]
    return batch.model_copy(update={"samples": samples})


def test_a_policy_that_points_comes_closer_to_where_its_teacher_points(
    pointer_folder: Family,
) -> None:
    """Only completions with pointers, without any reward; the head that points learns of them, too."""
    folder = pointer_folder("qwen2_5_vl")
    trainee = learner(folder, another(folder), points=True)
    batch = without_reward(tree_batch(trainee.model.policy))
    pointing = [sample for sample in batch.samples if any(patch >= 0 for patch in sample.patches)]
    assert len(pointing) > 5
    batch = batch.model_copy(update={"samples": pointing})
    head = trainee.model.policy.pointer_head
    assert head is not None
    before = head.query_out.weight.detach().clone()
    gaps = []
    for number in range(8):
        update = trainee.update(batch, number)
        assert update.applied, update.note
        gaps.append(abs(update.metrics["teacher_gap"]))
    assert gaps[-1] < 0.9 * gaps[0]
    assert not torch.equal(head.query_out.weight, before)


def test_a_teacher_that_is_the_policy_teaches_its_pointers_nothing(pointer_folder: Family) -> None:
    folder = pointer_folder("qwen2_5_vl")
    trainee = learner(folder, folder, points=True)
    batch = without_reward(tree_batch(trainee.model.policy))
    assert trainee.update(batch, 0).metrics["teacher_gap"] == pytest.approx(0.0, abs=1e-5)


def test_a_critic_estimates_the_same_beside_a_teacher_and_both_are_in_the_update(
    family: Family,
) -> None:
    folder = family("qwen2_5_vl")
    with_both = learner(folder, another(folder), critic="gae", teacher_weight=0.5)
    batch = with_baselines(tree_batch(with_both.model.policy))
    both = with_both.update(batch, 0)
    critic = learner(folder, folder, critic="gae", teacher_weight=0.0).update(batch, 0)
    teacher = learner(folder, another(folder), teacher_weight=1.0).update(batch, 0)
    assert both.applied, both.note
    assert both.values == critic.values
    assert both.metrics["critic_explained"] == critic.metrics["critic_explained"]
    assert both.metrics["teacher_gap"] == pytest.approx(teacher.metrics["teacher_gap"], abs=1e-6)
    # The first update has half of each part.
    half = (critic.metrics["loss"] + teacher.metrics["loss"]) / 2
    assert both.metrics["loss"] == pytest.approx(half, abs=1e-5)


def test_a_resumed_learner_has_its_critic_and_its_teacher(family: Family, tmp_path: Path) -> None:
    """Compare the second update with that of a learner that was never stopped, bit for bit."""
    folder = family("qwen2_5_vl")
    whole, resumed = (
        learner(folder, another(folder), critic="gae", teacher_weight=0.5) for _ in range(2)
    )
    batches = [with_baselines(tree_batch(whole.model.policy, seed)) for seed in (1, 2)]
    whole.update(batches[0], 0)
    saver = CheckpointSaver(tmp_path)
    saver.begin(TrainerProgress(updates=1), whole.state(), "m")
    saver.wait()
    checkpoint = load_newest(tmp_path)
    assert checkpoint is not None
    assert any(name.startswith(PREFIX) for name in checkpoint.tensors.names)
    resumed.restore(checkpoint.tensors)
    first, second = (each.update(batches[1], 1) for each in (whole, resumed))
    assert first.values == second.values
    for name in ("loss", "grad_norm", "teacher_gap", "critic_explained"):
        assert first.metrics[name] == second.metrics[name], name
