"""The command line, and a run in which every outcome occurs, for the tests of inspection."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dart_cli.cli.main import main
from dart_cli.config.schema import Config
from dart_cli.data.ledger import LEASE_S
from dart_cli.data.store.reader import Reader
from dart_cli.data.store.rows import PoolRow
from dart_cli.data.store.writer import Store
from dart_cli.evaluation.results import Evaluation, ModeScore, TaskScore
from dart_cli.inspection.run_lookup import find_subject
from dart_cli.inspection.trajectories import read_trajectory
from dart_cli.inspection.trajectory_history import Event, explain_trajectory
from tests.copies import copy_with
from tests.data.parts import (
    Clock,
    a_batch,
    ask_lease,
    batch_trained,
    make_ledger,
    next_batch,
    play_group,
    pool_member,
    step_record,
    trajectory_end,
)

REPORTED = "reset: TypeError: <b>x</b> is undefined"
"""A line that the application of some episodes reported."""


def run(*arguments: object) -> int:
    """Run `dart data ARGUMENTS` in this process, and return its exit code."""
    with pytest.raises(SystemExit) as exit_:
        main(["data", *map(str, arguments)])
    return int(exit_.value.code or 0)


def events_text(reader: Reader, name: str) -> str:
    """Return all sentences about one trajectory."""
    return "\n".join(event.text for event in events_of(reader, name))


def events_of(reader: Reader, name: str) -> list[Event]:
    """Return the history of one trajectory."""
    return explain_trajectory(reader, read_trajectory(reader, find_subject(reader, name)))


def evaluation(name: str, passed: int) -> Evaluation:
    """Return an evaluation of one trained task and one other, ten episodes each."""
    score = TaskScore(task_id="a", episodes=10, passed=passed, invalid=0, steps=30)
    heldout = TaskScore(task_id="b", episodes=10, passed=passed - 1, invalid=1, steps=30)
    mode = ModeScore(tasks=[score], heldout=[heldout])
    return Evaluation(
        name=name,
        model="m",
        weights="",
        policy_version=0,
        seed=0,
        wall_s=1.0,
        modes={"sampled": mode, "greedy": mode},
    )


class PlayedRun:
    """A run in which every outcome occurs; its store stays open for writing."""

    def __init__(self, config: Config, store: Store) -> None:
        self.config, self.store, self.clock = config, store, Clock()
        row, steps, images = pool_member("x" + "ab" * 16, task_id="mini/click", source="oracle")
        store.add_pool_member(row, steps, images)
        store.add_pool_member(*_with_other_id(row, steps, images, "mini/popup"))
        ledger = self.ledger = make_ledger(config, store, self.clock)
        self.mixed = play_group(ledger, ["pass", "fail", "fail", "pass"], steps=3)
        self.helped = play_group(ledger, ["fail"] * 4)
        self.solved = play_group(ledger, ["pass"] * 4)
        assert a_batch(next_batch(ledger, 0)).batch_id == 1
        self.invalid = self._play_one(0, "invalid")
        self.expired = ask_lease(ledger, 1).trajectory_id
        ledger.step(step_record(self.expired, 0))
        self.clock.now += LEASE_S + 1
        ledger.take_back_expired()
        self.stale = self._play_one(2, "fail", version=1)
        self.clock.now += 5
        ledger.batch_trained(batch_trained(1, version=9))
        self.playing = ask_lease(ledger, 3).trajectory_id
        store.commit()

    def _play_one(self, slot: int, outcome: Any, version: int = 0) -> str:
        lease = ask_lease(self.ledger, slot)
        self.ledger.step(step_record(lease.trajectory_id, 0, version=version))
        end = trajectory_end(lease.trajectory_id, 1, outcome)
        self.ledger.end(copy_with(end, app_log=[REPORTED, "step 0: GET /a: 404"]))
        return lease.trajectory_id


def _with_other_id(row: PoolRow, steps: Any, images: Any, task_id: str) -> Any:
    """Return the same success under another id, of another task."""
    name = "x" + "ac" * 16
    steps = [replace(step, trajectory_id=name) for step in steps]
    return replace(row, trajectory_id=name, task_id=task_id), steps, images
