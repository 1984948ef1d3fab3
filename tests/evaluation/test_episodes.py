"""The episodes of an evaluation: what is over stays, what was being played is played again."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from bus.errors import RunDirectoryError, UserError
from dart_cli.evaluation.episodes import DATABASE, EpisodeStore, Kept, Planned, open_episodes
from dart_cli.evaluation.held_out import progress_note
from dart_cli.evaluation.results import EpisodeRow, EvalSettings

PLAN = [
    Planned("sampled", "a", seed, attempt, False, False) for attempt in (0, 1) for seed in (7, 8)
]


def over(planned: Planned, outcome: str = "pass") -> Kept:
    """The planned episode, played."""
    return Kept(
        EpisodeRow(
            mode=planned.mode,
            composed=planned.composed,
            task_id=planned.task_id,
            seed=planned.seed,
            attempt=planned.attempt,
            outcome=outcome,  # type: ignore[arg-type]
            reason="",
            stop_reason="done",
            reward=None,
            steps=1,
            wall_s=0.0,
            screen=None,
            versions=[],
        )
    )


def settings(temperature: float = 1.0) -> EvalSettings:
    return EvalSettings(
        suite="s",
        suite_digest="1",
        model_digest="",
        weights_digest="",
        values={"rollout.temperature": temperature},
    )


def test_episodes_are_claimed_once_in_the_order_of_the_plan(tmp_path: Path) -> None:
    with EpisodeStore(tmp_path) as store:
        store.plan(PLAN)
        with EpisodeStore(tmp_path) as other:
            other.plan(PLAN)  # plays along
            claimed = [each.claim() for each in (store, other, store, other, store)]
            assert claimed == [*PLAN, None]
            assert store.claim("greedy") is None


def test_two_that_begin_at_once_share_one_plan(tmp_path: Path) -> None:
    with EpisodeStore(tmp_path) as store, EpisodeStore(tmp_path) as other:
        store.plan(PLAN)  # the other has begun, and has not asked for anything yet
        first = store.claim()
        other.plan(PLAN)
        assert (first, other.claim()) == (PLAN[0], PLAN[1])


def test_a_kill_loses_the_episodes_that_were_being_played(tmp_path: Path) -> None:
    """A real process keeps one episode, claims another, and is killed."""
    with EpisodeStore(tmp_path) as store:
        store.plan(PLAN)
    code = (
        "import os, signal\nfrom pathlib import Path\n"
        "from dart_cli.evaluation.episodes import EpisodeStore\n"
        "from tests.evaluation.test_episodes import over\n"
        f"store = EpisodeStore(Path({str(tmp_path)!r}))\n"
        "store.keep(over(store.claim()))\nstore.claim()\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], check=False)
    assert killed.returncode == -9
    with EpisodeStore(tmp_path) as store:
        counts = store.counts()
        assert (counts.over, counts.playing) == (1, 1)
        store.release_dead()
        assert [store.claim() for _ in range(4)] == [*PLAN[1:], None]
        assert [row.tries for row in store.rows("sampled")] == [1]


def test_what_a_living_process_claimed_stays_its_own(tmp_path: Path) -> None:
    with EpisodeStore(tmp_path) as store:
        store.plan(PLAN)
        with EpisodeStore(tmp_path) as other:
            first = other.claim()
            store.release_dead()
            assert store.claim() == PLAN[1]
            assert first == PLAN[0]
            assert other.others() == [store.player]
        assert store.others() == []
        assert store.claim() == PLAN[0]  # given back by its end


def test_invalid_episodes_are_played_again_by_a_second_start(tmp_path: Path) -> None:
    with EpisodeStore(tmp_path) as store:
        store.plan(PLAN[:2])
        for outcome in ("pass", "invalid"):
            planned = store.claim()
            assert planned
            store.keep(over(planned, outcome))
        assert store.claim() is None
        assert store.counts().invalid == 1
    with EpisodeStore(tmp_path) as store:
        store.plan(PLAN[:2])
        again = store.claim()
        assert again == PLAN[1]
        store.keep(over(again, "fail"))
        assert [(row.outcome, row.tries) for row in store.rows("sampled")] == [
            *(("pass", 1), ("fail", 2))
        ]


def test_a_second_start_may_ask_for_more_or_fewer(tmp_path: Path) -> None:
    with EpisodeStore(tmp_path) as store:
        store.plan(PLAN[:2])
        first = store.claim()
        assert first
        store.keep(over(first))
        store.plan(PLAN)
        assert (store.counts().total, store.counts().over) == (4, 1)
        store.plan(PLAN[3:])
        assert store.claim() == PLAN[3]
        assert store.claim() is None
        with EpisodeStore(tmp_path) as other, pytest.raises(UserError, match="other episodes"):
            other.plan(PLAN[:1])


def test_an_evaluation_of_other_settings_is_set_aside_whole(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir(mode=0o700)
    store, told = open_episodes(tmp_path, "v1", settings())
    with store:
        assert told == ""
        with pytest.raises(UserError, match=r"rollout\.temperature was 1\.0 and is 0\.5"):
            open_episodes(tmp_path, "v1", settings(0.5))  # it is being played
    (tmp_path / "eval/v1.json").write_text("{}")
    (tmp_path / "eval/v1-films").mkdir()
    store, told = open_episodes(tmp_path, "v1", settings())
    store.__exit__()
    assert told == ""
    for number, fresh in ((1, False), (2, True)):
        store, told = open_episodes(tmp_path, "v1", settings(0.5), fresh=fresh)
        store.__exit__()
        assert f"kept as v1.{number}" in told
    names = {path.name for path in (tmp_path / "eval").iterdir()}
    assert names == {"v1", "v1.1", "v1.1.json", "v1.1-films", "v1.2"}


def test_a_key_that_a_newer_dart_adds_makes_no_difference_at_its_default(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir(mode=0o700)
    store, _ = open_episodes(tmp_path, "v1", settings())
    store.__exit__()
    for steps, anew in ((0, False), (9, True)):
        newer = settings().model_copy(
            update={"values": {"rollout.temperature": 1.0, "eval.max_steps": steps}}
        )
        store, told = open_episodes(tmp_path, "v1", newer)
        store.__exit__()
        assert bool(told) is anew


def test_a_result_of_an_older_dart_is_set_aside(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir(mode=0o700)
    (tmp_path / "eval/before.json").write_text("{}")
    store, told = open_episodes(tmp_path, "before", settings())
    store.__exit__()
    assert "kept as before.1" in told
    assert (tmp_path / "eval/before.1.json").exists()


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / DATABASE) as connection:
        connection.execute("PRAGMA user_version = 99")
    tmp_path.chmod(0o700)
    with pytest.raises(RunDirectoryError, match="schema 99"):
        EpisodeStore(tmp_path)


def test_time_counts_once_where_processes_play_at_once(tmp_path: Path) -> None:
    with EpisodeStore(tmp_path) as store:
        rows = [("a", 0.0, 10.0), ("b", 5.0, 12.0), ("c", 20.0, 21.0)]
        store._connection.executemany("INSERT INTO times VALUES (?, ?, ?)", rows)
        assert store.wall_s() == 13.0


def test_tasks_and_compositions_are_counted_apart(tmp_path: Path) -> None:
    plan = [
        Planned("sampled", task, seed, 0, composed, False)
        for task, composed in (("a", False), ("a+b", True))
        for seed in (7, 8)
    ]
    with EpisodeStore(tmp_path) as store:
        store.plan(plan)
        for outcome in ("pass", "fail", "fail"):
            planned = store.claim()
            assert planned
            store.keep(over(planned, outcome))
        counts = store.counts_by_part("sampled")
        assert list(counts) == [("sampled", False), ("sampled", True)]
        assert [(each.over, each.total, each.passed) for each in counts.values()] == [
            *((2, 2, 1), (1, 2, 0))
        ]
        assert progress_note(counts, 61) == (
            "tasks 2/2 0.50 passed, compositions 1/2 0.00 passed, about 1:01 left"
        )
        assert progress_note({("sampled", False): counts["sampled", False]}, 0) == "0.50 passed"
