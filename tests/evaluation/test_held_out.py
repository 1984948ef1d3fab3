"""Held-out evaluation and the report: fair episodes, honest intervals, true pictures."""

from __future__ import annotations

import asyncio
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from PIL import Image

from bus.errors import EnvError, RunDirectoryError, TaskError, UserError
from dart_cli.cli.main import main
from dart_cli.cli.up import run_up, set_aside
from dart_cli.config.schema import Config, load_config
from dart_cli.config.task_split import composed_tasks, trained_tasks
from dart_cli.data.store.rows import CurvePoint
from dart_cli.evaluation.held_out import planned, play_all, run_eval, summary
from dart_cli.evaluation.results import (
    Evaluation,
    Film,
    FilmFrame,
    ModeScore,
    TaskScore,
    films_dir,
    read_evaluation,
    read_films,
    total,
    wilson,
)
from dart_cli.inspection.report import draw_curve, draw_films, pick_films, summarize
from dart_cli.rollout.worker import load_model
from dart_cli.runtime.role import claim
from dart_cli.weights.manifest import MANIFEST, path_of
from tests.env.unruly_suite import SUITE as UNRULY


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    """The embedded suite, answered at random."""
    path = tmp_path / "c.toml"
    path.write_text(
        f'[run]\ndir = "{tmp_path}/run"\n[rollout]\nengine = "scripted"\n'
        '[env]\ntasks = ["mini/click", "mini/popup"]\nslots = 4\n'
        '[eval]\nepisodes = 12\ncompositions = ["mini/popup+menu"]\n'
    )
    return path


# --- intervals ------------------------------------------------------------------------------


@pytest.mark.parametrize(("passed", "episodes"), [(0, 10), (1, 7), (5, 10), (340, 400), (9, 9)])
def test_the_interval_is_where_the_score_test_is_indifferent(passed: int, episodes: int) -> None:
    """The bounds p solve (share - p)^2 = z^2 p (1 - p) / episodes, by a quadratic's roots."""
    share, z2 = passed / episodes, 1.959963984540054**2
    roots = np.roots([1 + z2 / episodes, -(2 * share + z2 / episodes), share**2]).real
    low, high = wilson(passed, episodes)
    assert math.isclose(low, max(0.0, min(roots)), abs_tol=1e-7)
    assert math.isclose(high, min(1.0, max(roots)), abs_tol=1e-7)


def test_nothing_seen_says_nothing() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    empty = TaskScore(task_id="a", episodes=0, passed=0, invalid=3, steps=0)
    assert empty.success is None
    assert empty.mean_steps is None


def test_invalid_episodes_are_in_no_proportion() -> None:
    scores = [
        TaskScore(task_id="a", episodes=4, passed=3, invalid=6, steps=8),
        TaskScore(task_id="b", episodes=6, passed=1, invalid=0, steps=12),
    ]
    whole = total("all", scores)
    assert (whole.success, whole.invalid, whole.mean_steps) == (0.4, 6, 2.0)


# --- episodes -------------------------------------------------------------------------------


def test_episodes_are_spread_evenly_and_no_two_share_a_seed(config_path: Path) -> None:
    config = load_config(config_path)
    tasks = trained_tasks(config)
    episodes = planned(tasks, 12, config.eval.seed)
    assert [sum(each.task == task for each in episodes) for task in tasks] == [6, 6]
    assert len({each.seed for each in episodes}) == 12
    assert min(each.seed for each in episodes) >= 1_000_000
    assert planned([], 12, 0) == []


def test_what_is_evaluated_follows_the_configuration(config_path: Path) -> None:
    config = load_config(config_path)
    assert [task.id for task in trained_tasks(config)] == ["mini/click", "mini/popup"]
    assert [task.id for task in composed_tasks(config)] == ["mini/popup+menu"]
    everything = load_config(config_path, ["env.tasks=[]", "eval.compositions=[]"])
    assert {task.split for task in trained_tasks(everything)} == {"train"}
    assert {task.split for task in composed_tasks(everything)} == {"heldout"}
    only = ["mini/menu", "mini/popup+tabs"]
    assert [task.id for task in trained_tasks(config, only)] == ["mini/menu"]
    assert [task.id for task in composed_tasks(config, only)] == ["mini/popup+tabs"]
    with pytest.raises(TaskError, match="did you mean"):
        trained_tasks(config, ["mini/popupp"])


async def test_the_same_seeds_give_the_same_episodes(config_path: Path) -> None:
    config = load_config(config_path)
    episodes = planned(trained_tasks(config), 8, config.eval.seed)
    runs = []
    for _ in range(2):
        model = load_model(config)
        played = await play_all(config, model.responder, episodes, "sampled")
        await model.engine.close()
        runs.append({each.episode.seed: (each.end.outcome, each.end.steps) for each in played})
    assert len(runs[0]) == 8
    assert runs[0] == runs[1]


def test_an_evaluation_is_printed_kept_and_read_again(
    config_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(config_path)
    made = run_eval(config, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert told == summary(made)
    assert told["sampled_tasks"]["episodes"] == told["greedy_compositions"]["episodes"] == 12
    assert set(told["sampled_tasks"]["per_task"]) == {"mini/click", "mini/popup"}
    assert read_evaluation(config.run.dir, "base") == made
    films = read_films(config.run.dir, "base")
    assert {film.task_id for film in films} == {"mini/click", "mini/popup", "mini/popup+menu"}
    folder = films_dir(config.run.dir, "base")
    for film in films:
        assert film.instruction
        for name in (film.last, *(frame.screenshot for frame in film.frames)):
            with Image.open(folder / name) as screenshot:
                assert screenshot.size == (168, 168)


def test_the_verb_prints_each_task_with_its_interval(
    config_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["eval", str(config_path), "--mode", "greedy", "--episodes", "4"]
    with pytest.raises(SystemExit) as exit_:
        main([*arguments, "--tasks", "mini/click", "--keep-as", "mine"])
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    assert "mini/click" in out
    assert "95 % interval" in out
    assert "all tasks" in out
    assert "mini/popup" not in out
    assert "eval/mine.json" in out.replace("\n", "")


def test_a_dry_run_tells_what_the_options_choose_and_refuses_what_they_cannot(
    config_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(*arguments: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as exit_:
            main(["eval", str(config_path), "--dry-run", *arguments])
        return (exit_.value.code, *capsys.readouterr())

    code, out, _ = told("--mode", "greedy", "--tasks", "mini/click", "--episodes", "4")
    assert not code
    assert "1 of mini: mini/click" in out
    assert "4 episodes greedy" in out
    assert "sampled" not in out
    assert "the model's own" in out
    for arguments, why in (
        (("--weights", "no/weights"), "no such directory"),
        (("--tasks", "nosuch"), "no task 'nosuch'"),
        (("--keep-as", "a b"), "--keep-as 'a b'"),
    ):
        code, _, error = told(*arguments)
        assert code == 2
        assert why in error


def test_weights_that_are_not_there_are_named(config_path: Path) -> None:
    config = load_config(config_path)
    with pytest.raises(UserError, match="no such directory"):
        run_eval(config, weights=Path("no/weights"))


@pytest.mark.parametrize("name", ["a/b", "../../x", ".x", "-x", "a b", "ä", "a\n", "n" * 300])
def test_a_name_that_is_no_file_s_is_refused_before_anything_is_played(
    config_path: Path, name: str
) -> None:
    config = load_config(config_path)
    with pytest.raises(UserError, match="--keep-as"):
        run_eval(config, name=name)
    assert not config.run.dir.exists()


def test_where_every_episode_is_invalid_nothing_is_kept_and_the_reason_told(
    config_path: Path,
) -> None:
    broken = "env.tasks=['unruly/evaluate-raise', 'unruly/reset-raise']"
    some = [f"env.suite={UNRULY}", "eval.compositions=[]", "eval.episodes=13"]
    config = load_config(config_path, [*some, broken])
    told = r"all 13 episodes were invalid.*; 7 of them: evaluate: ZeroDivisionError: a bug of"
    with pytest.raises(EnvError, match=told):
        run_eval(config)
    assert list((config.run.dir / "eval").iterdir()) == []


def test_one_valid_episode_is_worth_keeping(config_path: Path) -> None:
    some = ["env.tasks=['unruly/reset-raise', 'unruly/well']", "eval.compositions=[]"]
    made = run_eval(load_config(config_path, [f"env.suite={UNRULY}", *some]), modes=("greedy",))
    assert made.judged == 6
    assert made.modes["greedy"].overall.invalid == 6


def test_a_broken_evaluation_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "before.json").write_text("{}")
    with pytest.raises(RunDirectoryError, match="remove it and run it again"):
        read_evaluation(tmp_path, "before")
    assert read_evaluation(tmp_path, "after") is None


# --- report ---------------------------------------------------------------------------------


def evaluation(name: str, passed: int) -> Evaluation:
    """One task, one composition, ten episodes each."""
    score = TaskScore(task_id="a", episodes=10, passed=passed, invalid=0, steps=30)
    composed = TaskScore(task_id="b", episodes=10, passed=passed - 1, invalid=1, steps=30)
    mode = ModeScore(tasks=[score], compositions=[composed])
    return Evaluation(
        name=name,
        model="m",
        weights="",
        policy_version=0,
        seed=0,
        wall_s=1.0,
        modes={"sampled": mode, "greedy": mode},
    )


def test_the_summary_holds_before_after_by_task_and_compositions_apart() -> None:
    told = summarize(evaluation("before", 3), evaluation("after", 9))
    assert (told["success_before"], told["success_after"]) == (0.3, 0.9)
    assert (told["greedy_before"], told["greedy_after"]) == (0.3, 0.9)
    assert told["per_task"]["a"] == {
        "before": 0.3,
        "after": 0.9,
        "greedy_before": 0.3,
        "greedy_after": 0.9,
    }
    assert (told["compositions"]["before"], told["compositions"]["after"]) == (0.2, 0.8)
    assert set(told["compositions"]["per_task"]) == {"b"}
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


def film(task_id: str, seed: int, outcome: str, steps: int) -> Film:
    """An episode whose screens are white."""
    frame = FilmFrame(screenshot="white.png", text="click(500,500)", point=(50, 50))
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
    # The first screen of the first strip stands at (12, 48), scaled 2.2 times.
    first = [(x, y) for y, x in zip(*pink, strict=True) if x < 12 + 220 and y < 48 + 220]
    xs, ys = [x for x, _ in first], [y for _, y in first]
    assert abs((min(xs) + max(xs)) / 2 - (12 + 50 * 2.2)) < 3
    assert abs((min(ys) + max(ys)) / 2 - (48 + 50 * 2.2)) < 3


# --- dart up --------------------------------------------------------------------------------


@pytest.fixture
def supervisors(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of each supervisor that `dart up` starts; the first is its last, as after Ctrl-C."""
    started: list[list[str]] = []

    class Recorded:
        def __init__(self, commands: Mapping[str, Sequence[str]], **_: Any) -> None:
            started.append(list(commands))

        async def run(self, stop: asyncio.Event) -> None:
            stop.set()

    monkeypatch.setattr("dart_cli.cli.up.Crew", Recorded)
    return started


@pytest.mark.parametrize(("episodes", "first"), [(0, "eval"), (10, "env-0")])
def test_a_before_without_a_valid_episode_is_played_again(
    config_path: Path, supervisors: list[list[str]], episodes: int, first: str
) -> None:
    config = load_config(config_path, ["eval.around=true"])
    (config.run.dir / "eval").mkdir(parents=True, mode=0o700)
    config.run.dir.chmod(0o700)
    score = TaskScore(task_id="a", episodes=episodes, passed=0, invalid=3, steps=0)
    mode = ModeScore(tasks=[score], compositions=[])
    kept = evaluation("before", 1).model_copy(update={"modes": {"sampled": mode, "greedy": mode}})
    (config.run.dir / "eval" / "before.json").write_text(kept.model_dump_json())
    assert run_up(config, config_path, [], fresh=False) == 130
    assert [commands[0] for commands in supervisors] == [first]


@pytest.mark.parametrize("role", ["data", "train"])
def test_a_run_that_was_started_by_hand_is_left_alone(
    config_path: Path, supervisors: list[list[str]], role: str
) -> None:
    config = load_config(config_path, ["eval.around=true"])
    config.run.dir.mkdir(mode=0o700)
    running = pytest.raises(RunDirectoryError, match=f"{role} is running already")
    with claim(config, role), running:
        run_up(config, config_path, [], fresh=False)
    assert supervisors == []
    run_up(config, config_path, [], fresh=False)
    assert supervisors, "what has ended is in nobody's way"


# --- --fresh --------------------------------------------------------------------------------


def test_fresh_moves_the_old_run_aside_and_never_a_live_one(tmp_path: Path) -> None:
    config = Config.model_validate({"run": {"dir": tmp_path / "run"}})
    set_aside(config)  # nothing there: nothing to do
    for number in (1, 2):
        (tmp_path / "run").mkdir(mode=0o700)
        (tmp_path / "run" / "kept").write_text(str(number))
        (tmp_path / "run" / "weights" / ".v000000.draft").mkdir(parents=True)
        running = pytest.raises(RunDirectoryError, match="env-0 is running already")
        with claim(config, "env"), running:
            set_aside(config)
        set_aside(config)
        assert (tmp_path / f"run.{number}" / "kept").read_text() == str(number)
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("key", ["run.dir", "weights.directory"])
def test_fresh_moves_no_folder_that_is_not_a_run_s(config_path: Path, key: str) -> None:
    other = config_path.parent / "docs"
    config = load_config(config_path, [f"{key}={other}"])
    config.run.dir.mkdir(mode=0o700)
    other.mkdir(exist_ok=True)
    (other / "config.json").write_text("{}")
    with pytest.raises(
        RunDirectoryError, match=rf"docs (is no run|holds no weight).*another {key}"
    ):
        set_aside(config)
    assert [path.name for path in other.iterdir()] == ["config.json"]
    assert config.run.dir.exists(), "both or neither"


@pytest.mark.parametrize("made", ["", "run.db", "eval", "workers"])
def test_fresh_moves_what_any_verb_left_and_weights_elsewhere(config_path: Path, made: str) -> None:
    elsewhere = config_path.parent / "weights"
    path_of(elsewhere, 3).mkdir(parents=True)
    (path_of(elsewhere, 3) / MANIFEST).touch()
    config = load_config(config_path, [f"weights.directory={elsewhere}"])
    (config.run.dir / made).mkdir(parents=True)
    set_aside(config)
    assert not config.run.dir.exists()
    assert (config_path.parent / "run.1" / made).exists()
    assert path_of(config_path.parent / "weights.1", 3).exists()


def test_nothing_to_evaluate_is_said(config_path: Path) -> None:
    config = load_config(config_path, ["eval.episodes=0"])
    with pytest.raises(TaskError, match="nothing to evaluate"):
        asyncio.run(asyncio.to_thread(run_eval, config))


@pytest.mark.slow
def test_the_shipped_model_clicks_what_it_is_told_to_and_nothing_more(config_path: Path) -> None:
    """It is grounded on single screens; what takes more steps is left for the run to learn."""
    config = load_config(config_path, ["rollout.engine=transformers", "eval.episodes=48"])
    made = run_eval(config, modes=("greedy",), as_it_comes=True)
    success = {score.task_id: score.success for score in made.modes["greedy"].tasks}
    assert success["mini/click"] is not None
    assert success["mini/popup"] is not None
    assert success["mini/click"] >= 0.7
    assert success["mini/popup"] <= 0.7
