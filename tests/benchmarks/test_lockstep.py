"""Forced staleness: exactly as old as asked, and the same numbers for the same seed."""

from __future__ import annotations

import asyncio
from itertools import islice
from pathlib import Path

import pytest
import torch

from benchmarks.learning.lockstep import Loop, updates_for, uses_of
from bus.messages import Batch
from dart_cli.config.load import load_config

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.toml"
SINGLE = (
    "data.group_size=1",
    "data.advantage=step_baseline",
    "data.task_sampling=deviation",
    "data.early_stop=false",
)
SETS = ["rollout.max_batch=16", "data.group_size=4", "train.pack_tokens=4096"]


def played(
    delay: int, updates: int, tmp_path: Path, *sets: str, groups: int = 4
) -> tuple[Loop, list[Batch]]:
    """A short run, and the batches that it trained on."""
    trained: list[Batch] = []

    async def learn() -> Loop:
        loop = Loop(load_config(CONFIG, [*SETS, *sets, f"run.dir={tmp_path}"]), delay, groups)
        update = loop.learner.update

        def noted(batch: Batch, updates_done: int, version: int | None = None):
            trained.append(batch)
            return update(batch, updates_done, version)

        loop.learner.update = noted  # type: ignore[method-assign]
        try:
            for _ in range(updates):
                await loop.update()
        finally:
            await loop.close()
        return loop

    return asyncio.run(learn()), trained


@pytest.mark.parametrize("delay", [0, 2])
def test_a_batch_is_trained_exactly_so_many_versions_late(delay: int, tmp_path: Path) -> None:
    loop, batches = played(delay, 4, tmp_path)
    for version, batch in enumerate(batches):
        behind = {version - span.version for each in batch.samples for span in each.version_spans}
        assert behind <= {min(version, delay)}
    assert any(batch.samples for batch in batches)
    assert loop.trajectories == (4 + delay) * 16


def test_each_batch_is_trained_on_again_and_fresh_ones_are_as_old_as_asked(tmp_path: Path) -> None:
    loop, batches = played(1, 5, tmp_path, "train.reuse=1")
    order = [1, 2, 1, 4, 2]
    assert [batch.reuse for batch in batches] == [0, 0, 1, 0, 1]
    assert [order.index(use) for use in order] == [batches.index(b) for b in first_uses(batches)]
    for version, batch in enumerate(batches):
        behind = {version - span.version for each in batch.samples for span in each.version_spans}
        assert batch.reuse or behind <= {min(version, 1)}
    assert [update["reuse"] for update in loop.history] == [0, 0, 1, 0, 1]
    assert loop.fresh == 3
    assert loop.trajectories == 4 * 16  # one batch waits


def first_uses(batches: list[Batch]) -> list[Batch]:
    """For each batch the first that has its samples."""
    return [next(one for one in batches if one.group_ids == batch.group_ids) for batch in batches]


def test_groups_of_one_are_held_against_what_was_expected_before_their_batch(
    tmp_path: Path,
) -> None:
    sets = (*SINGLE, "data.group_size=1", "rollout.max_batch=16")
    loop, batches = played(0, 2, tmp_path, *sets, groups=16)
    assert loop.trajectories == 32
    assert [len(batch.group_ids) for batch in batches] == [16, 16]  # none is dropped
    first = [each.advantage for each in batches[0].samples]
    assert set(first) == {-0.5, 0.5}  # all baselines are at 1/2 before the first batch
    assert len({each.advantage for each in batches[1].samples}) > 2


def test_replays_come_in_the_order_of_a_run(tmp_path: Path) -> None:
    order = [(use.first, use.reused) for use in islice(uses_of(1), 7)]
    assert order == [(1, 0), (2, 0), (1, 1), (4, 0), (2, 1), (6, 0), (4, 1)]
    assert [use.reused for use in islice(uses_of(0), 3)] == [0, 0, 0]
    assert [updates_for(fresh, 1) for fresh in (1, 2, 3)] == [1, 2, 4]
    assert updates_for(60, 0) == 60


def test_the_same_seed_gives_the_same_weights_to_the_last_bit(tmp_path: Path) -> None:
    first, again = (played(1, 3, tmp_path)[0] for _ in range(2))
    assert all(update["grad_norm"] > 0 for update in first.history)
    weights = again.learner.model.weights()
    for name, tensor in first.learner.model.weights().items():
        assert torch.equal(tensor, weights[name]), name


def test_fresh_tokens_have_the_trainers_own_log_probabilities(tmp_path: Path) -> None:
    loop, _ = played(0, 2, tmp_path)
    gaps = [update["parity_max"] for update in loop.history if "parity_max" in update]
    assert gaps
    assert max(gaps) < 1e-4
