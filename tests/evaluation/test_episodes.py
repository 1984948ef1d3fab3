"""The episodes of an evaluation: what is over stays, what was being played is played again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bus.errors import UserError
from dart_cli.evaluation.episodes import WHOLE, EpisodeFolder, EpisodeRecord, Part, Plan, Planned
from dart_cli.evaluation.evaluate import progress_note
from dart_cli.evaluation.results import EpisodeRow, EvalSettings

PLAN = [
    Planned("sampled", "a", seed, attempt, False, False) for attempt in (0, 1) for seed in (7, 8)
]


def over(
    planned: Planned, outcome: str = "pass", ended_at: float = 0.0, wall_s: float = 0.0
) -> EpisodeRecord:
    """The planned episode, played."""
    return EpisodeRecord(
        ended_at=ended_at,
        row=EpisodeRow(
            mode=planned.mode,
            heldout=planned.heldout,
            task_id=planned.task_id,
            seed=planned.seed,
            attempt=planned.attempt,
            outcome=outcome,  # type: ignore[arg-type]
            reason="",
            stop_reason="done",
            reward=None,
            steps=1,
            wall_s=wall_s,
            screen=None,
            versions=[],
        ),
    )


def settings(temperature: float = 1.0) -> EvalSettings:
    return EvalSettings(
        suite="s",
        suite_digest="1",
        model_digest="",
        weights_digest="",
        values={"rollout.temperature": temperature},
    )


def opened(
    folder: Path, plan: list[Planned] = PLAN, part: Part | None = WHOLE, **how: object
) -> EpisodeFolder:
    arguments = {"settings": settings()} | how
    whole = Plan([], [], ("sampled",), plan)
    return EpisodeFolder(folder, "v1", plan=whole, part=part, **arguments)  # type: ignore[arg-type]


def test_what_is_over_is_left_out_by_a_second_start(tmp_path: Path) -> None:
    with opened(tmp_path) as episodes:
        assert episodes.left == PLAN
        episodes.add(over(PLAN[1]))
    with opened(tmp_path) as episodes:
        assert episodes.left == [PLAN[0], *PLAN[2:]]
        assert (episodes.counts().over, episodes.counts("greedy").total) == (1, 0)
    with opened(tmp_path, PLAN[:2]) as episodes:  # asks for fewer
        assert (episodes.counts().total, episodes.counts().over) == (2, 1)


def test_a_kill_loses_the_episodes_that_were_being_played(tmp_path: Path) -> None:
    """A real process keeps one episode, and is killed within the line of another."""
    code = (
        "import os, signal\nfrom pathlib import Path\n"
        "from tests.evaluation.test_episodes import PLAN, opened, over\n"
        f"kept = opened(Path({str(tmp_path)!r}))\n"
        "kept.add(over(PLAN[0]))\n"
        "with next(kept.folder.glob('*.jsonl')).open('a') as file: file.write('{\"row\": ')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], check=False)
    assert killed.returncode == -9
    with opened(tmp_path) as episodes:
        assert episodes.left == PLAN[1:]
        assert [row.tries for row in episodes.rows("sampled")] == [1]


def test_parts_share_a_plan_and_see_what_the_others_have_kept(tmp_path: Path) -> None:
    with opened(tmp_path, part=Part(1, 2)) as one, opened(tmp_path, part=Part(2, 2)) as other:
        assert (one.left, other.left) == (PLAN[::2], PLAN[1::2])
        other.add(over(PLAN[1]))
        one.refresh()
        assert one.counts().over == 1
        with pytest.raises(UserError, match="is in use"):
            opened(tmp_path, part=Part(2, 2))
        with pytest.raises(UserError, match="is in use"):
            opened(tmp_path)
        with pytest.raises(UserError, match="is in use"):  # it would be moved away from them
            opened(tmp_path, part=Part(1, 3), settings=settings(0.5))
        with opened(tmp_path, part=None) as looker:
            assert looker.left == []
            other.add(over(PLAN[3]))
            looker.refresh()
            assert [each.row.attempt for each in looker.over] == [0, 1]
    with opened(tmp_path) as episodes:  # one process plays the rest
        assert episodes.left == PLAN[::2]


def test_invalid_episodes_are_played_again_by_a_second_start(tmp_path: Path) -> None:
    with opened(tmp_path, PLAN[:2]) as episodes:
        for planned, outcome in zip(PLAN, ("pass", "invalid"), strict=False):
            episodes.add(over(planned, outcome))
        assert (episodes.counts().over, episodes.counts().invalid) == (2, 1)
    with opened(tmp_path, PLAN[:2]) as episodes:
        assert episodes.left == [PLAN[1]]
        assert episodes.counts().over == 1
        episodes.add(over(PLAN[1], "fail"))
        assert [(row.outcome, row.tries) for row in episodes.rows("sampled")] == [
            *(("pass", 1), ("fail", 2))
        ]


def test_an_evaluation_of_other_settings_is_set_aside_whole(tmp_path: Path) -> None:
    with opened(tmp_path) as episodes:
        assert episodes.set_aside == ""
        with pytest.raises(UserError, match="is in use"):
            opened(tmp_path, settings=settings(0.5))
    (tmp_path / "eval/v1.json").write_text("{}")
    (tmp_path / "eval/v1-films").mkdir()
    with opened(tmp_path) as episodes:
        assert episodes.set_aside == ""
    with opened(tmp_path, settings=settings(0.5)) as episodes:
        assert "begins anew (rollout.temperature was 1.0 and is 0.5)" in episodes.set_aside
        assert "kept as v1.1" in episodes.set_aside
    with opened(tmp_path, settings=settings(0.5), fresh=True) as episodes:
        assert "kept as v1.2" in episodes.set_aside
    names = {path.name for path in (tmp_path / "eval").iterdir()}
    assert names == {"v1", "v1.1", "v1.1.json", "v1.1-films", "v1.2"}


def test_a_key_that_a_newer_dart_adds_makes_no_difference_at_its_default() -> None:
    for history, anew in ((0, False), (9, True)):
        values = {"rollout.temperature": 1.0, "policy.history_turns": history}
        newer = settings().model_copy(update={"values": values})
        assert bool(newer.difference(settings())) is anew


def test_time_counts_once_where_episodes_are_played_at_once(tmp_path: Path) -> None:
    with opened(tmp_path) as episodes:
        for planned, began, ended in zip(PLAN, (0.0, 5.0, 20.0), (10.0, 12.0, 21.0), strict=False):
            episodes.add(over(planned, ended_at=ended, wall_s=ended - began))
        assert episodes.wall_s() == 13.0


def test_trained_tasks_and_others_are_counted_apart(tmp_path: Path) -> None:
    plan = [
        Planned("sampled", task, seed, 0, heldout, False)
        for task, heldout in (("a", False), ("a+b", True))
        for seed in (7, 8)
    ]
    with opened(tmp_path, plan) as episodes:
        for planned, outcome in zip(plan, ("pass", "fail", "fail"), strict=False):
            episodes.add(over(planned, outcome))
        counts = episodes.counts_by_part("sampled")
        assert list(counts) == [("sampled", False), ("sampled", True)]
        assert [(each.over, each.total, each.passed) for each in counts.values()] == [
            *((2, 2, 1), (1, 2, 0))
        ]
        assert progress_note(counts, 61) == (
            "tasks 2/2 0.50 passed, held-out tasks 1/2 0.00 passed, about 1:01 left"
        )
        assert progress_note({("sampled", False): counts["sampled", False]}, 0) == "0.50 passed"


def test_the_plan_says_whether_a_task_is_trained_on_and_not_an_earlier_start(
    tmp_path: Path,
) -> None:
    """The key env.tasks may change between two starts: outcomes do not depend on it."""
    before, now = (Planned("sampled", "a", 7, 0, heldout, False) for heldout in (False, True))
    with opened(tmp_path, [before]) as episodes:
        episodes.add(over(before))
    with opened(tmp_path, [now]) as episodes:
        assert episodes.left == []
        assert [row.heldout for row in episodes.rows("sampled")] == [True]
