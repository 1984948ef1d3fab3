"""The report of a run: success before and after, true pictures."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from PIL import Image

from dart_cli.config.schema import Config
from dart_cli.data.store.rows import CurvePoint, Remainder, ReplayCounts, RunRow
from dart_cli.evaluation.films import Film, FilmFrame, films_dir
from dart_cli.inspection.film_pictures import draw_films, pick_films
from dart_cli.inspection.final_report import summarize, why_short, write_report
from dart_cli.inspection.pictures import draw_curve
from dart_cli.inspection.run_counts import RunCounts, StateCount, counts_of
from tests.inspection.parts import PlayedRun, evaluation


def test_the_summary_holds_before_after_by_task_and_held_out_tasks_apart() -> None:
    result = summarize(evaluation("before", 3), evaluation("after", 9))
    assert (result["success_before"], result["success_after"]) == (0.3, 0.9)
    assert (result["greedy_before"], result["greedy_after"]) == (0.3, 0.9)
    assert result["per_task"]["a"] == {
        "before": 0.3,
        "after": 0.9,
        "greedy_before": 0.3,
        "greedy_after": 0.9,
    }
    assert (result["heldout"]["before"], result["heldout"]["after"]) == (0.2, 0.8)
    assert set(result["heldout"]["per_task"]) == {"b"}
    nothing = summarize(None, None)
    assert nothing["success_after"] is None
    assert nothing["per_task"] == {}


def test_held_out_scores_are_drawn_at_the_versions_that_were_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[float, float]] = []
    errorbar = Axes.errorbar

    def note(axes: Axes, x: list[float], y: list[float], *more: Any, **how: Any) -> object:
        drawn.append((x[0], y[0]))
        return errorbar(axes, x, y, *more, **how)

    monkeypatch.setattr(Axes, "errorbar", note)
    before = evaluation("before", 3).model_copy(update={"policy_version": -1})
    after = evaluation("after", 9).model_copy(update={"policy_version": 10})
    curve = [CurvePoint("a", version, 8, 4, 60.0 * version) for version in range(2, 10)]
    path = draw_curve(tmp_path / "curve.png", curve, (before, after), 0.0)
    assert drawn == [(0, 0.3), (10, 0.9)]
    with Image.open(path) as picture:
        assert picture.width > 500
    drawn.clear()
    draw_curve(path, curve, (None, None), 0.0)
    assert drawn == []


def test_the_curve_names_each_line_with_its_episodes_and_chance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named: list[str] = []

    def note(axes: Axes, *more: Any, **how: Any) -> None:
        named.extend(axes.get_legend_handles_labels()[1])

    monkeypatch.setattr(Axes, "legend", note)
    before, after = evaluation("before", 3), evaluation("after", 9)
    before.modes["random"] = before.modes["sampled"]
    curve = [CurvePoint("a", version, 8, 4, 60.0 * version) for version in range(2, 10)]
    draw_curve(tmp_path / "curve.png", curve, (before, after), 0.0)
    assert named == [
        "a, n 64",
        "mean over tasks, 95 % interval, n 64",
        "random clicks 0.30, n 10",
        "held out before: 0.30, n 10",
        "held out after: 0.90, n 10",
    ]
    assert summarize(before, after)["random_clicks"] == 0.3


def film(task_id: str, seed: int, outcome: str, steps: int) -> Film:
    """An episode whose screens are white."""
    frame = FilmFrame(
        screenshot="white.png", text="click(500,500)", action={"kind": "click", "x": 50, "y": 50}
    )
    return Film.model_validate(
        {
            "task_id": task_id,
            "seed": seed,
            "instruction": "click the red button",
            "outcome": outcome,
            "reason": "",
            "frames": [frame] * steps,
            "last": "white.png",
        }
    )


def test_the_films_shown_are_the_same_episode_failed_before_and_passed_after() -> None:
    before = [film("a", 1, "pass", 2), film("a", 2, "fail", 4), film("b", 3, "fail", 2)]
    after = [film("a", 1, "pass", 2), film("a", 2, "pass", 3), film("b", 9, "pass", 2)]
    ((was, now),) = pick_films(before, after)
    assert (was.seed, was.outcome) == (2, "fail")
    assert (now.seed, now.outcome) == (2, "pass")
    assert pick_films([], after) == []


def test_a_film_shows_the_click_where_it_was(tmp_path: Path) -> None:
    for name in ("before", "after"):
        films_dir(tmp_path, name).mkdir(parents=True)
        white = io.BytesIO()
        Image.new("RGB", (100, 100), "white").save(white, "PNG")
        (films_dir(tmp_path, name) / "white.png").write_bytes(white.getvalue())
    pair = (film("a", 1, "fail", 9), film("a", 1, "pass", 2))
    path = draw_films(tmp_path / "films.png", tmp_path, [pair])
    sheet = np.asarray(Image.open(path).convert("RGB")).astype(int)
    pink = (abs(sheet - np.array([255, 20, 147])).sum(axis=2) < 30).nonzero()
    # The first screen of the first strip is at (12, 48), scaled 2.2 times.
    first = [(x, y) for y, x in zip(*pink, strict=True) if x < 12 + 220 and y < 48 + 220]
    xs, ys = [x for x, _ in first], [y for _, y in first]
    assert abs((min(xs) + max(xs)) / 2 - (12 + 50 * 2.2)) < 3
    assert abs((min(ys) + max(ys)) / 2 - (48 + 50 * 2.2)) < 3


@pytest.mark.parametrize(
    ("train", "minutes", "learned", "trajectories", "note"),
    [
        ({"max_minutes": 9.5}, 9.5, 0, 0, "31 of 250 updates (12%) in train.max_minutes = 9.5; "),
        ({"max_minutes": 9.5}, 3.0, 0, 0, "31 of 250 updates (12%)"),
        ({"max_trajectories": 512}, 1, 0, 512, "(12%) in train.max_trajectories = 512; raise it"),
        ({"max_trajectories": 512}, 1, 0, 511, "31 of 250 updates (12%)"),
        ({"stop_at": 0.9}, 1, 0.92, 0, ""),
        ({"stop_at": 0.9}, 1, 0.0, 0, "31 of 250 updates (12%)"),
        ({"updates": 31}, 1, 0, 0, ""),
    ],
)
def test_a_run_that_was_cut_is_told_by_what_and_how_far_it_came(
    train: dict[str, float], minutes: float, learned: float, trajectories: int, note: str
) -> None:
    config = Config.model_validate({"train": {"updates": 250} | train})
    told = why_short(config, ended(minutes, learned), counts(31, trajectories, {}))
    assert note in told
    assert "in train" in note or "in train" not in told
    assert bool(note) == bool(told)


def test_a_run_without_an_update_is_told_why_and_the_cure() -> None:
    groups = {("dropped", "all_fail"): 114, ("open", ""): 2}
    note = why_short(Config(), ended(6.0), counts(0, 0, groups))
    assert note.startswith("0 of ")
    assert "114 of 116 groups were dropped as all_fail" in note
    assert "data.pool_ratio" in note


def ended(minutes: float, learned: float = 0.0) -> RunRow:
    """A run that was served for so long."""
    return RunRow("r", 0.0, 0, "{}", 60 * minutes, "", learned)


def counts(updates: int, trajectories: int, groups: dict[tuple[str, str], int]) -> RunCounts:
    """What a run made."""
    states = [StateCount("finished", "", trajectories)]
    return RunCounts(
        all=replace(counts_of([]), states=states, trajectories=trajectories),
        tasks={},
        groups=[StateCount(*key, number) for key, number in groups.items()],
        pool={},
        expected={},
        batches=updates,
        replays=ReplayCounts(updates, 0, {}),
        left_out={},
        remainder=Remainder(0, 0, 0, 0),
    )


@pytest.mark.parametrize("terminal", [False, True])
def test_the_report_is_json_for_scripts_and_names_its_file_on_a_terminal(
    *,
    terminal: bool,
    run_content: PlayedRun,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    result = write_report(run_content.config, minutes_total=1.0)
    last = capsys.readouterr().out.splitlines()[-1]
    if terminal:
        assert last.endswith("report/report.json")
    else:
        assert json.loads(last) == json.loads(json.dumps(result))
