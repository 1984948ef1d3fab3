"""Promises of a critic: it begins with the baselines, learns, estimates before it learns, and is resumed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bus.errors import ProtocolError
from bus.messages import Batch, VersionSpan
from dart_cli.config.schema import Config
from dart_cli.train.checkpoints.checkpoint import CheckpointSaver, load_newest
from dart_cli.train.checkpoints.identity import TrainerProgress
from dart_cli.train.critic import NEWEST_STEPS, PREFIX, Critic, Steps, explained_variance
from dart_cli.train.learner import PolicyLearner
from dart_cli.train.rank_group import SingleRank
from dart_cli.train.trained_policy import TrainModel
from tests.train.parts import EXPECTED, MARGIN, TensorsInMemory, with_baselines


def with_critic(config: Config, share: float = 0.9) -> Config:
    train = config.train.model_copy(update={"critic": "gae", "gae_lambda": share, "lr": 1e-3})
    return config.model_copy(update={"train": train})


def learner(config: Config) -> PolicyLearner:
    return PolicyLearner(TrainModel.load(config), config.train)


def random_steps(rows: int, seed: int = 0, expected: float = 0.3) -> Steps:
    """Return random steps of episodes with two steps; the state determines the reward."""
    states = torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))
    rewards = (states[::2, 0] > 0).float().repeat_interleave(2)
    told = torch.full((rows,), expected)
    return Steps(
        tuple(("g", f"t{index // 2:05d}", index % 2) for index in range(rows)),
        rewards,
        told,
        (rewards - told).double(),
        torch.ones(rows, dtype=torch.bool),
        states,
    )


def parts(steps: Steps, size: int) -> list[Steps]:
    return [
        Steps(
            steps.keys[at : at + size],
            *(
                column[at : at + size]
                for column in (
                    *(steps.rewards, steps.baselines, steps.advantages, steps.is_own, steps.states),
                )
            ),
        )
        for at in range(0, len(steps.keys), size)
    ]


def test_it_begins_as_baselines_do_and_learns_what_states_tell() -> None:
    critic, steps = Critic(8, 1.0), random_steps(1200)
    at_first = critic.estimate(steps)
    assert torch.allclose(at_first.values, steps.baselines)
    assert at_first.advantages == pytest.approx(
        dict(zip(steps.keys, steps.advantages.tolist(), strict=True)), abs=1e-6
    )
    for some in parts(steps, 60):
        critic.learn(some)
    metrics = critic.estimate(random_steps(400, seed=1)).metrics()
    assert metrics["baseline_explained"] == pytest.approx(0, abs=1e-6)
    assert 0.1 < metrics["critic_explained"] < 1


def test_steps_of_the_pool_are_judged_and_not_learned_from() -> None:
    steps = random_steps(40)
    others = Steps(
        *(steps.keys, steps.rewards, steps.baselines, steps.advantages),
        torch.zeros(40, dtype=torch.bool),
        steps.states,
    )
    critic = Critic(8, 1.0)
    critic.learn(others)
    assert torch.allclose(critic.estimate(steps).values, steps.baselines)
    assert len(critic.estimate(others).advantages) == 40


def test_it_keeps_so_many_steps_and_its_state_has_one_shape() -> None:
    critic = Critic(8, 1.0)
    critic.learn(random_steps(10))
    small = {name: value.shape for name, value in critic.state().items()}
    critic.learn(random_steps(NEWEST_STEPS))
    critic.learn(random_steps(20))
    assert {name: value.shape for name, value in critic.state().items()} == small
    assert critic.state()[f"{PREFIX}counts"].tolist() == [NEWEST_STEPS, 3]


def test_what_is_explained_is_one_less_the_share_of_variance_that_is_left() -> None:
    def told(rewards: Sequence[float], expected: Sequence[float]) -> float | None:
        return explained_variance(torch.tensor(rewards), torch.tensor(expected))

    assert told([0, 1, 0, 1], [0.0, 1, 0, 1]) == 1.0
    assert told([0, 1, 0, 1], [0.5] * 4) == 0.0
    assert told([1, 1], [0.2, 0.9]) is None
    assert told([], []) is None


@pytest.mark.parametrize("share", [0.0, 0.9, 1.0])
def test_the_first_update_is_by_what_baselines_expect(
    config: Config, batches: list[Batch], share: float
) -> None:
    """Compare: all values are equal then, so with lambda 0 only the last step of an episode learns."""
    batch = with_baselines(batches[0])
    plain, ours = learner(config), learner(with_critic(config, share))
    update = ours.update(batch, 0)
    assert update.applied
    assert [each.value for each in update.values] == pytest.approx([EXPECTED] * len(update.values))
    last = {
        name: max(sample.step for sample in batch.samples if sample.trajectory_id == name)
        for name in {sample.trajectory_id for sample in batch.samples}
    }
    told = {(each.trajectory_id, each.step): each.advantage for each in update.values}
    for sample in batch.samples:
        left = last[sample.trajectory_id] - sample.step
        assert sample.reward is not None
        expected = MARGIN + share**left * (sample.reward - EXPECTED)
        assert told[sample.trajectory_id, sample.step] == pytest.approx(expected, abs=1e-6)
    if share == 1:
        assert plain.update(batch, 0).metrics["loss"] == pytest.approx(update.metrics["loss"])


def test_values_are_told_before_the_head_learns_of_a_batch(
    config: Config, batches: list[Batch]
) -> None:
    """Estimate twice: only the second time the head has learned from the rewards."""
    trainee, batch = learner(with_critic(config)), with_baselines(batches[0])
    first = trainee.update(batch, 0)
    again = trainee.update(batch, 1)
    assert [each.value for each in first.values] == pytest.approx([EXPECTED] * len(first.values))
    assert len({round(each.value, 6) for each in again.values}) > 1
    assert again.metrics["critic_explained"] > first.metrics["critic_explained"]


def test_a_batch_that_is_trained_on_again_has_the_advantages_that_it_comes_with(
    config: Config, batches: list[Batch]
) -> None:
    trainee, batch = learner(with_critic(config)), with_baselines(batches[0])
    first = trainee.update(batch, 0)
    state = {name: value.clone() for name, value in trainee.state().items() if PREFIX in name}
    again = trainee.update(batch.model_copy(update={"reuse": 1}), 1)
    assert first.values
    assert not again.values
    assert "critic_explained" not in again.metrics
    for name, value in state.items():
        assert torch.equal(trainee.state()[name], value), name


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    config: Config, batches: list[Batch], tmp_path: Path
) -> None:
    batches = [with_baselines(batch) for batch in batches]
    straight, broken, resumed = (learner(with_critic(config)) for _ in range(3))
    told: list[Any] = [straight.update(batch, done) for done, batch in enumerate(batches)]
    for done, batch in enumerate(batches[:2]):
        broken.update(batch, done)
    saver = CheckpointSaver(tmp_path)
    saver.begin(TrainerProgress(updates=2), broken.state(), "")
    saver.wait()
    checkpoint = load_newest(tmp_path)
    assert checkpoint is not None
    resumed.restore(checkpoint.tensors)
    for done, batch in enumerate(batches[2:], start=2):
        assert resumed.update(batch, done).values == told[done].values
    assert straight.state().keys() == resumed.state().keys()
    for name, value in straight.state().items():
        assert torch.equal(resumed.state()[name], value), name


@pytest.mark.parametrize("model", [{"dtype": "bfloat16"}, {"freeze_vision": True}], ids=str)
def test_it_reads_what_is_sharded_and_what_is_frozen(
    config: Config, batches: list[Batch], model: dict[str, object]
) -> None:
    config = with_critic(config)
    trainee = learner(config.model_copy(update={"model": config.model.model_copy(update=model)}))
    updates = [trainee.update(with_baselines(batch), done) for done, batch in enumerate(batches)]
    assert all(update.applied for update in updates)
    assert len({round(each.value, 6) for each in updates[-1].values}) > 1


def test_a_critic_may_be_turned_on_and_off_between_two_starts(
    config: Config, batches: list[Batch]
) -> None:
    ours, plain = learner(with_critic(config)), learner(config)
    ours.update(with_baselines(batches[0]), 0)
    plain.restore(TensorsInMemory(ours.state()))
    assert not any(PREFIX in name for name in plain.state())
    plain.update(with_baselines(batches[1]), 1)
    new = learner(with_critic(config))
    new.restore(TensorsInMemory(plain.state()))
    assert new.update(with_baselines(batches[2]), 2).applied


def test_a_batch_without_rewards_is_refused_before_anything_changes(
    config: Config, batches: list[Batch]
) -> None:
    trainee = learner(with_critic(config))
    with pytest.raises(ProtocolError, match="a critic needs its reward"):
        trainee.update(batches[0], 0)


def test_steps_of_several_ranks_are_those_of_one(batches: list[Batch]) -> None:
    """Gather steps: their order does not depend on which rank has a step."""
    batch = with_baselines(batches[0])
    states = torch.randn(len(batch.samples), 8)

    class Two(SingleRank):
        def gather(self, part: bytes) -> list[bytes]:
            return [part, other]

    other = b""
    rank = SingleRank()
    whole = Steps.of(batch.samples, states, rank)
    sent: list[bytes] = []

    class Sends(SingleRank):
        def gather(self, part: bytes) -> list[bytes]:
            sent.append(part)
            return [part]

    Steps.of(batch.samples[4:], states[4:], Sends())
    [other] = sent
    both = Steps.of(batch.samples[:4], states[:4], Two())
    assert both.keys == whole.keys
    for name in ("rewards", "baselines", "advantages", "is_own", "states"):
        assert torch.equal(getattr(both, name), getattr(whole, name)), name
    assert whole.is_own.all()
    pool = [each.model_copy(update={"version_spans": []}) for each in batch.samples]
    assert not Steps.of(pool, states, rank).is_own.any()
    assert isinstance(batch.samples[0].version_spans[0], VersionSpan)
