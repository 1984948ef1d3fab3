"""The shares of several ranks are one update: sums of what each finds, and every rank decides alike."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bus.codec import BATCH_LIMITS, joined, parted
from bus.errors import ProtocolError
from bus.messages import Ack, Batch
from bus.ranks import Share
from dart_cli.config.schema import Config
from dart_cli.train.critic import PREFIX
from dart_cli.train.learner import PolicyLearner, Update
from dart_cli.train.trained_policy import TrainModel
from tests.train.parts import with_baselines
from tests.train.test_packs import config_of
from tests.train.trees import tree_batch
from tests.waiting import PATIENCE_S

Family = Callable[[str], Path]


class Threads:
    """A rank_group of threads, which add up their gradients where ranks would have reduced them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.pieces: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)

    def exchange(self, rank: int, piece: Any) -> list[Any]:
        self.pieces[rank] = piece
        self.barrier.wait(PATIENCE_S)
        result = list(self.pieces)
        self.barrier.wait(PATIENCE_S)
        return result


class Member:
    """One rank of such a rank_group."""

    def __init__(self, rank_group: Threads, rank: int) -> None:
        self.rank, self.size, self._rank_group = rank, rank_group.size, rank_group

    def total(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._rank_group.exchange(self.rank, values.double())).sum(0)

    def gather(self, part: bytes) -> list[bytes]:
        return self._rank_group.exchange(self.rank, part)

    def doing(self, what: str) -> None:
        pass


class RankLearner(PolicyLearner):
    """A learner whose gradients are summed over the ranks before they are clipped."""

    rank_group: Threads

    def _clip_gradients(self) -> float:
        gradients = {name: value.grad for name, value in self._parameters.items()}
        everyones = self.rank_group.exchange(self._rank_group.rank, gradients)
        sums = {
            name: sum(each[name] for each in everyones if each[name] is not None)
            for name in gradients
        }
        self.rank_group.exchange(self._rank_group.rank, None)  # all have read
        for name, value in self._parameters.items():
            if value.grad is not None:
                value.grad = torch.as_tensor(sums[name]).clone()
        return super()._clip_gradients()


def on_ranks(config: Config, batches: list[Batch], size: int) -> list[tuple[list[Update], Any]]:
    """Return updates and learners of each rank; the ranks get their shares as bytes from rank 0."""
    rank_group = Threads(size)
    learners = []
    for rank in range(size):
        trainee = RankLearner(TrainModel.load(config), config.train, Member(rank_group, rank))
        trainee.rank_group = rank_group
        learners.append(trainee)
    result: list[list[Update]] = [[] for _ in learners]
    failed: list[BaseException] = []

    def live(rank: int) -> None:
        try:
            for number, batch in enumerate(batches):
                shares = learners[0].shares(batch, number, number) if rank == 0 else [None] * size
                pieces = [joined(share) if share is not None else b"" for share in shares]
                mine = rank_group.exchange(rank, pieces)[0][rank]
                share = parted(mine, BATCH_LIMITS)
                assert isinstance(share, Share)
                result[rank].append(learners[rank].train_on(share))
        except BaseException as error:  # noqa: BLE001 - told in the test's thread
            failed.append(error)
            rank_group.barrier.abort()

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not failed, failed
    return list(zip(result, learners, strict=True))


CHANGES: dict[str, dict[str, object]] = {
    "default": {},
    "KL": {"kl_beta": 0.1},
    "frozen tower": {"freeze_vision": True},
    "stopped by the log-probability check": {"parity_every": 1},
}


@pytest.mark.parametrize(("size", "recipe"), [*((5, name) for name in CHANGES), (2, "KL")])
def test_ranks_together_make_the_update_of_one(family: Family, size: int, recipe: str) -> None:
    """Have fewer packs than ranks, too: of five, some compute a pack that scores nothing."""
    config = config_of(family("qwen3_vl"), pack_tokens=600, **CHANGES[recipe])
    config = config.model_copy(
        update={"train": config.train.model_copy(update={"lr": 1e-4, "grad_clip": 0.1})}
    )
    alone = PolicyLearner(TrainModel.load(config), config.train)
    policy = alone.model.policy
    batches = [tree_batch(policy, seed=seed, groups=1) for seed in range(2)]
    expected = [alone.update(batch, number, number) for number, batch in enumerate(batches)]
    for updates, trainee in on_ranks(config, batches, size):
        for update, one in zip(updates, expected, strict=True):
            assert (update.applied, bool(update.alarm)) == (one.applied, bool(one.alarm))
            assert bool(update.note) == bool(one.note)
            for name, value in one.metrics.items():
                if not name.endswith("_s"):
                    assert update.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
            assert {(gap.trajectory_id, gap.step) for gap in update.mismatches} == {
                (gap.trajectory_id, gap.step) for gap in one.mismatches
            }
        for name, value in alone.model.weights().items():
            assert torch.allclose(trainee.model.weights()[name], value, atol=2e-5), name


def test_a_critic_judges_and_learns_from_the_steps_of_all_ranks(family: Family) -> None:
    config = config_of(family("qwen3_vl"), pack_tokens=600, critic="gae")
    config = config.model_copy(
        update={"train": config.train.model_copy(update={"lr": 1e-4, "grad_clip": 0.1})}
    )
    alone = PolicyLearner(TrainModel.load(config), config.train)
    batches = [
        with_baselines(tree_batch(alone.model.policy, seed=seed, groups=1)) for seed in range(3)
    ]
    expected = [alone.update(batch, number, number) for number, batch in enumerate(batches)]
    assert len({each.value for each in expected[-1].values}) > 1
    for updates, trainee in on_ranks(config, batches, 2):
        for update, one in zip(updates, expected, strict=True):
            assert len(update.values) == len(one.values)
            for mine, theirs in zip(update.values, one.values, strict=True):
                assert (mine.trajectory_id, mine.step) == (theirs.trajectory_id, theirs.step)
                assert mine.value == pytest.approx(theirs.value, abs=1e-4)
                assert mine.advantage == pytest.approx(theirs.advantage, abs=1e-4)
        for name, value in alone.state().items():
            if name.startswith(PREFIX):
                assert torch.allclose(trainee.state()[name], value, atol=1e-3), name


def test_a_batch_without_a_weight_is_skipped_by_all(family: Family) -> None:
    config = config_of(family("qwen3_vl"))
    policy = TrainModel.load(config).policy
    batch = tree_batch(policy, groups=1)
    samples = [sample.model_copy(update={"weight": 0.0}) for sample in batch.samples]
    for [update], _ in on_ranks(config, [batch.model_copy(update={"samples": samples})], 2):
        assert not update.applied
        assert update.note == "no sample with a weight (update skipped)"


def test_a_share_comes_back_from_its_bytes(family: Family) -> None:
    config = config_of(family("qwen3_vl"))
    trainee = PolicyLearner(TrainModel.load(config), config.train)
    [share] = trainee.shares(tree_batch(trainee.model.policy), 0)
    piece = joined(share)
    assert parted(piece, BATCH_LIMITS) == share
    for cut in (0, 5, len(piece) // 2, len(piece) - 1):
        with pytest.raises(ProtocolError):
            parted(piece[:cut], BATCH_LIMITS)
    assert parted(joined(Ack()), BATCH_LIMITS) == Ack()


def test_gradients_of_bfloat16_are_summed_in_float32_in_the_masters(family: Family) -> None:
    """Train in bfloat16: gathered weights are freed, and the parameters stay float32 masters."""
    config = config_of(family("qwen3_vl"), pack_tokens=256)
    half = config.model_copy(
        update={"model": config.model.model_copy(update={"dtype": "bfloat16"})}
    )
    trainee = PolicyLearner(TrainModel.load(half), half.train)
    assert len(trainee.shares(tree_batch(trainee.model.policy), 0)[0].work.packs) > 1
    assert trainee.update(tree_batch(trainee.model.policy), 0).applied
    trained = trainee.model.trainable().values()
    assert {each.dtype for each in trained} == {torch.float32}
    assert {each.grad.dtype for each in trained} == {torch.float32}
    plan = trainee.model.plan
    assert plan is not None
    assert plan.compute == torch.bfloat16
