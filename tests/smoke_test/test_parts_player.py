"""The player notes what a run has proved, and whether there is time for more."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dart_cli.config.schema import Config
from dart_cli.smoke_test.parts_player import (
    ENDING_S,
    EPISODE,
    PUBLICATION,
    RESUME,
    SECOND,
    UPDATE,
    Player,
    RunProgress,
)
from dart_cli.smoke_test.time_budget import TimeBudget


class Clock:
    """A clock whose seconds a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def player(clock: Clock, tmp_path: Path) -> Player:
    """Return the player of a run with two rollout workers and 300 s."""
    plan: Any = SimpleNamespace(
        config=Config.model_validate({"up": {"rollouts": 2}}), folder=tmp_path
    )
    return Player(plan, TimeBudget(300.0, clock=clock))


def run_to_the_resume(player: Player, clock: Clock) -> None:
    """Note a run: processes start at 10 s, weights exist at 30, an update at 70, the resume at 95."""
    for at, standing, killed in (
        (30.0, RunProgress(0, 0, 1, (0, 0), 1), False),
        (40.0, RunProgress(1, 0, 1, (0, 0), 1), False),
        (70.0, RunProgress(9, 1, 1, (0, 0), 1), False),
        (75.0, RunProgress(9, 1, 2, (1, 0), 1), True),
        (80.0, RunProgress(9, 1, 2, (2, 0), 1), True),
        (95.0, RunProgress(9, 1, 2, (2, 0), 2), True),
    ):
        clock.now = at
        player.note(standing, killed=killed)


def test_a_run_proves_its_parts_when_they_are_seen_first(player: Player, clock: Clock) -> None:
    run_to_the_resume(player, clock)
    clock.now = 200.0
    player.note(RunProgress(20, 1, 2, (2, 0), 2), killed=True)
    times = {name: player.proved[name] for name in (EPISODE, UPDATE, PUBLICATION, RESUME)}
    assert times == {EPISODE: 40.0, UPDATE: 70.0, PUBLICATION: 80.0, RESUME: 95.0}
    assert SECOND not in player.proved
    player.note(RunProgress(20, 2, 3, (2, 1), 2), killed=True)
    assert SECOND not in player.proved, "one worker has not taken it"
    player.note(RunProgress(20, 2, 3, (2, 2), 2), killed=True)
    assert SECOND in player.proved


def test_a_trainer_that_was_loaded_twice_without_the_kill_has_not_resumed(player: Player) -> None:
    player.note(RunProgress(1, 1, 1, (2, 0), 2), killed=False)
    assert RESUME not in player.proved


def test_a_second_update_is_played_if_it_fits_beside_what_follows(
    player: Player, clock: Clock
) -> None:
    """It takes 40 s again; a process starts in 20 s, of which export, its comparison and the evaluation take three."""
    run_to_the_resume(player, clock)
    needed = 40 + 3 * 20 + ENDING_S
    clock.now = 95.0
    player.budget.seconds = 95 + needed + 1
    assert player.goes_on(began=10.0)
    player.budget.seconds = 95 + needed - 1
    assert not player.goes_on(began=10.0)


def test_a_second_update_that_takes_longer_than_the_first_is_left(
    player: Player, clock: Clock
) -> None:
    run_to_the_resume(player, clock)
    player.budget.seconds = 95 + 40 + 3 * 20 + ENDING_S + 20
    for at, goes_on in ((95.0, True), (134.0, True), (154.0, True), (156.0, False)):
        clock.now = at
        assert player.goes_on(began=10.0) == goes_on
