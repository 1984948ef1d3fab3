"""Forced staleness: exactly as old as asked, and the same numbers for the same seed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from benchmarks.lockstep import Loop
from benchmarks.offpolicy import CONFIG, arms_of, delay_of, summarize
from bus.errors import ConfigError
from bus.messages import Batch
from dart_cli.bench.study import Cell
from dart_cli.config.load import load_config

SETS = ["rollout.max_batch=16", "data.group_size=4", "train.pack_tokens=4096"]


def played(delay: int, updates: int, tmp_path: Path) -> tuple[Loop, list[Batch]]:
    """A short run, and the batches that it trained on."""
    trained: list[Batch] = []

    async def learn() -> Loop:
        loop = Loop(load_config(CONFIG, [*SETS, f"run.dir={tmp_path}"]), delay, groups=4)
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


def test_delay_nothing_is_played_once_whatever_the_correction() -> None:
    arms = arms_of([0, 4, 4], ["none", "masked"])
    assert arms == ["0-truncated", "4-none", "4-masked"]
    assert [delay_of(arm) for arm in arms] == [0, 4, 4]


def test_mistakes_are_reported_before_anything_is_played() -> None:
    with pytest.raises(ConfigError, match="no 'clipped'; there are none, truncated, masked"):
        arms_of([1], ["clipped"])
    with pytest.raises(ConfigError, match="--delays: must be >= 0, got -1"):
        arms_of([-1], ["none"])


def test_the_last_line_has_final_success_by_delay_and_correction() -> None:
    def run(last: float) -> dict[str, object]:
        points = [{"updates": 0, "trajectories": 0, "success": 0.2}]
        points.append({"updates": 9, "trajectories": 9, "success": last})
        metrics = dict.fromkeys(
            (
                "ess",
                "is_weight_mean",
                "is_truncated_fraction",
                "is_masked_fraction",
                "mismatch_kl",
                "entropy",
                "grad_norm",
            ),
            0.5,
        )
        return {"points": points, "metrics": metrics}

    found = summarize({Cell("4-masked", 0): run(0.6), Cell("4-masked", 1): run(0.8)})
    arm = found["arms"]["4-masked"]
    assert (arm["delay"], arm["correction"], arm["final_success"]) == (4, "masked", 0.7)
    assert arm["by_seed"] == [0.6, 0.8]
    assert found["seeds"] == 2
    assert arm["mean_success"] == pytest.approx(0.45)
    assert arm["ess"] == 0.5
