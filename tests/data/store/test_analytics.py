"""Curves, timelines, metrics and usage of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from bus.messages import BatchTrained
from dart_cli.data.store.open import open_reader, open_store
from dart_cli.data.store.rows import UsageRow
from tests.data.parts import (
    trajectory_end,
)
from tests.data.store.parts import add_lease, fill


def test_curves_count_judged_trajectories_by_their_oldest_version(run_dir: Path) -> None:
    with open_store(run_dir) as store:
        fill(store, steps=0)
        for number, (outcome, version) in enumerate(
            [("pass", 0), ("fail", 1), ("pass", 2), ("invalid", 2), ("pass", 3)], start=1
        ):
            name = f"g1-{number:02d}"
            add_lease(store, name, number)
            store.finish(trajectory_end(name, 0, outcome), float(number), version, version)  # type: ignore[arg-type]
            if outcome != "invalid":
                store.count_trajectory(name)
        curve = store.success_curve(bucket=2)
        assert [(p.policy_version, p.trajectories, p.passed) for p in curve] == [
            (0, 2, 1),
            (2, 2, 2),
        ]
        assert [p.success for p in curve] == [0.5, 1.0]
        assert {p.task_id for p in store.success_curve()} == {"mini/click"}


def test_usage_holds_the_newest_row_of_a_worker_and_phase(run_dir: Path) -> None:
    older = UsageRow("env-0", "playing", "env", 1.0, 5.0, 0.0)
    newer = UsageRow("env-0", "playing", "env", 9.0, 2.0, 5.0)
    with open_store(run_dir) as store:
        store.save_usage([older])
        store.save_usage([newer])
    with open_reader(run_dir) as reader:
        assert reader.usage() == [newer]
        assert newer.total_s == 7.0


@pytest.mark.parametrize(("batches", "most"), [(0, 3), (1, 3), (3, 3), (4, 3), (10, 3), (7, 100)])
def test_metric_curves_are_means_of_buckets_over_the_whole_run(
    batches: int, most: int, run_dir: Path
) -> None:
    values = {batch: 0.5 * batch * batch for batch in range(1, batches + 1)}
    with open_store(run_dir) as store:
        for batch, value in values.items():
            told = BatchTrained(batch_id=batch, policy_version=batch, metrics={})
            store.batch_trained(told, {"a": value, "b": -value}, at=float(batch))
        store.commit()
        points = store.metric_curves(most)
    size = max(1, -(-batches // most)) if batches else 1
    buckets = [list(values)[start : start + size] for start in range(0, batches, size)]
    for name, sign in (("a", 1), ("b", -1)):
        found = [point for point in points if point.name == name]
        assert len(found) <= most
        assert [point.step for point in found] == [bucket[-1] for bucket in buckets]
        assert [point.value for point in found] == pytest.approx(
            [sign * sum(values[each] for each in bucket) / len(bucket) for bucket in buckets]
        )
