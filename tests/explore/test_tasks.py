"""Tasks of an exploration: they can be replayed, nothing else passes them, and what cannot be is dropped."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bus.errors import EnvError, TaskError, UserError
from dart_cli.config.schema import Config, EnvConfig
from dart_cli.config.screens import screen_of_suite
from dart_cli.explore.graph import ExploreSettings, open_graph, read_graph
from dart_cli.explore.options import TaskOptions
from dart_cli.explore.rows import is_held_out
from dart_cli.explore.tasks import candidates, make_tasks, replayed
from dart_cli.suite_check import CheckOptions
from dart_cli.suite_check.check_suite import run_check
from envs.contract.actions import Done
from envs.contract.base import Observation
from envs.contract.elements import Element
from envs.contract.registry import load_suite, make_env
from envs.suites.explored import env as explored
from envs.suites.explored.tasks import FILE, read_file, write_file
from tests.explore.parts import TASKS, sight, walk

CHOSEN = TaskOptions(seeds=2, heldout_share=0.4, limit=10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A walk, and a step in it that never was: a click on nothing leads to a screen of its own."""
    folder = tmp_path_factory.mktemp("explored") / "desk"
    walk(folder, 60)
    env: Any = make_env("desk")
    observation, _ = env.reset(seed=0, options={"task": load_suite("desk").tasks["desk/wizard"]})
    with open_graph(folder) as graph:
        [start] = [each for each in graph.starts() if each.episode == 1]
        nowhere = Element("button", "Nowhere", (0, 0, 9, 9), ("click",), "9.9")
        graph.add_edge(
            episode=1,
            slot=0,
            before=start.screen,
            shot_before=start.screenshot,
            element=nowhere,
            action="click",
            after=sight(env, TASKS[0], observation),
        )
    env.close()
    return folder


@pytest.fixture(scope="module")
def folder_and_report(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("tasks") / "out"
    with read_graph(folder) as graph:
        return out, make_tasks(graph, out, CHOSEN)


def test_every_task_passes_the_check_of_suites(
    folder_and_report: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """Its solution passes on both seeds; waiting, claims and resets do not."""
    out, told = folder_and_report
    report = tmp_path / "report.json"
    probes = "nothing,done,fail,oracle"
    assert run_check(CheckOptions(f"explored:{out}", seeds=2, probes=probes, out=report)) == 0
    found = json.loads(report.read_text())
    assert found["tasks"] == told["tasks"] >= 6
    assert all(each["oracle"] == [2, 2] for each in found["per_task"].values())


def test_a_path_that_does_not_replay_is_dropped_with_its_reason(
    folder: Path, folder_and_report: tuple[Path, dict[str, Any]]
) -> None:
    out, report = folder_and_report
    with read_graph(folder) as graph:
        tasks_found = candidates(graph, CHOSEN)[0][: CHOSEN.limit]
    wrong = [each for each in tasks_found if each.path[-1].place == "9.9"]
    assert len(wrong) == 1
    file = read_file(out)
    assert wrong[0].id not in {each.id for each in file.tasks}
    [reason] = [each.reason for each in file.left_out if each.screen == wrong[0].targets[0]]
    assert "does not replay" in reason
    assert "nothing is at 9.9" in reason
    assert report["replayed"] == f"{report['tasks']} of {CHOSEN.limit}"


def test_a_seed_whose_screen_lacks_what_the_goal_names_is_dropped(
    folder_and_report: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    file = read_file(folder_and_report[0])
    task = file.tasks[0]
    wrong = task.model_copy(update={"shows": [*task.shows, "No such thing"]})
    write_file(tmp_path, file.model_copy(update={"tasks": [wrong]}))
    results = asyncio.run(replayed(f"explored:{tmp_path}", CHOSEN, lambda *_: None))
    [(seeds, why)] = results.values()
    assert seeds == []
    assert "does not show what its goal names" in why


def test_tasks_tell_their_split_length_and_screens(
    folder: Path, folder_and_report: tuple[Path, dict[str, Any]]
) -> None:
    out, report = folder_and_report
    suite: Any = load_suite(f"explored:{out}")
    with read_graph(folder) as graph:
        screens = {each.state: each for each in graph.screens()}
    assert Counter(each.split for each in suite.tasks.values()) == report["splits"]
    assert set(report["splits"]) == {"train", "heldout"}
    for task in suite.file.tasks:
        assert suite.tasks[task.id].tier == len(task.path)
        assert suite.tasks[task.id].max_steps > len(task.path)
        assert task.start not in task.targets
        nearest = screens[task.targets[0]]
        is_in_heldout = any(is_held_out(screens[each].id, 0.4) for each in task.targets)
        assert is_in_heldout or task.split == "train"
        assert not nearest.has_ended
        start = {each.name for each in screens[task.start].elements}
        for name in task.shows:
            assert name not in start
            assert all(
                name in {each.name for each in screens[target].elements} for target in task.targets
            )


def test_the_hint_is_the_step_in_words_and_a_way_off_the_path_has_none(
    folder_and_report: tuple[Path, dict[str, Any]],
) -> None:
    out, _ = folder_and_report
    suite: Any = load_suite(f"explored:{out}")
    task = max(suite.file.tasks, key=lambda each: len(each.path))
    env: Any = make_env(f"explored:{out}")
    env.reset(seed=0, options={"task": suite.tasks[task.id]})
    is_over = False
    while not is_over:
        phrases = [step.words for step in task.path if step.screen == env.state().id]
        assert env.oracle_hint() in phrases
        _, reward, is_over, _, _ = env.step(env.oracle_action())
        while env._rest:
            assert env.oracle_hint() == ""
            _, reward, is_over, _, _ = env.step(env.oracle_action())
    assert (reward, is_over, env.evaluate().outcome) == (1.0, True, "pass")
    _, info = env.reset(seed=0, options={"task": task.id})
    assert info["instruction"] == task.instruction
    _, reward, is_over, _, _ = env.step(Done())
    assert (reward, is_over, env.evaluate().outcome) == (0.0, True, "fail")
    env.close()


def test_steps_that_are_told_by_name_act_on_what_is_called_so(
    folder_and_report: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """On each seed that is kept; where it is called otherwise, the solution is none."""
    file = read_file(folder_and_report[0])
    by_steps = [each for each in file.tasks if each.path[0].name]
    assert by_steps
    env: Any = make_env(f"explored:{folder_and_report[0]}")
    for task in by_steps:
        for seed in range(len(task.seeds)):
            env.reset(seed=seed, options={"task": task.id})
            names = {each.place: each.name for each in env.elements()}
            assert names[task.path[0].place] == task.path[0].name
            assert f'"{task.path[0].name}"' in task.instruction
    env.close()
    step = by_steps[0].path[0].model_copy(update={"name": "another"})
    other = by_steps[0].model_copy(update={"path": [step, *by_steps[0].path[1:]]})
    write_file(tmp_path, file.model_copy(update={"tasks": [other]}))
    env = make_env(f"explored:{tmp_path}")
    env.reset(seed=0, options={"task": other.id})
    with pytest.raises(EnvError, match="it is called"):
        env.oracle_action()
    env.close()


def test_a_start_that_shows_another_screen_breaks_the_episode(
    folder_and_report: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    file = read_file(folder_and_report[0])
    task = file.tasks[0]
    step = task.path[0].model_copy(update={"screen": "0" * 32})
    moved = task.model_copy(update={"path": [step, *task.path[1:]]})
    write_file(tmp_path, file.model_copy(update={"tasks": [moved]}))
    env = make_env(f"explored:{tmp_path}")
    with pytest.raises(EnvError, match=r"starts on another screen .* make the tasks again"):
        env.reset(seed=0, options={"task": moved.id})
    env.close()


@pytest.mark.parametrize("observe", [(), ("accessibility",)])
def test_a_tree_that_elements_need_is_read_and_shown_to_no_policy_that_did_not_ask(
    observe: tuple[Any, ...],
    folder_and_report: tuple[Path, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As suite `desktop` does it: without `observe` it tells no elements."""
    inner: Any = make_env("desk")
    reset = inner.reset

    def reset_with_tree(**how: Any) -> tuple[Observation, dict[str, Any]]:
        observation, info = reset(**how)
        return replace(observation, texts={"accessibility": "button Save"}), info

    inner.reset = reset_with_tree
    requests: list[object] = []
    suite: Any = load_suite(f"explored:{folder_and_report[0]}")
    monkeypatch.setattr(suite, "observes", ("accessibility", "terminal"))
    monkeypatch.setattr(explored, "check_observe", lambda *_: None)
    monkeypatch.setattr(
        explored, "make_env", lambda *_, observe, **__: requests.append(observe) or inner
    )
    env = suite.make_env(observe=observe)
    observation, _ = env.reset(seed=0, options={"task": suite.file.tasks[0].id})
    assert requests == [["accessibility"]]
    assert set(observation.texts) == set(observe)
    env.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no tasks at .*`dart explore tasks"),
        ("{", "make the tasks again"),
        ('{"suite": "desk", "tasks": [{"id": "x"}]}', "tasks.0.id"),
    ],
)
def test_a_folder_without_tasks_is_told(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / FILE).write_text(text)
    with pytest.raises(TaskError, match=message):
        load_suite(f"explored:{tmp_path}")


def test_a_graph_without_steps_gives_no_task(tmp_path: Path) -> None:
    empty = open_graph(tmp_path / "empty", ExploreSettings(suite="desk"))
    with empty as graph, pytest.raises(UserError, match="gives no task"):
        make_tasks(graph, tmp_path / "out", CHOSEN)
    assert not (tmp_path / "out").exists()


def test_the_verbs_write_rows_and_tasks(folder: Path, tmp_path: Path) -> None:
    from dart_cli.cli.main import app

    run = CliRunner().invoke(app, ["explore", "rows", str(folder), str(tmp_path / "rows")])
    assert run.exit_code == 0, run.output
    assert json.loads(run.stdout.splitlines()[-1])["splits"]["train"]["rows"] > 20
    run = CliRunner().invoke(
        app,
        ["explore", "tasks", str(folder), str(tmp_path / "tasks"), "--seeds", "1", "--limit", "2"],
    )
    assert run.exit_code == 0, run.output
    assert json.loads(run.stdout.splitlines()[-1])["tasks"] == 2
    assert len(load_suite(f"explored:{tmp_path / 'tasks'}").tasks) == 2


def test_a_plan_knows_the_size_of_the_explored_screens(
    folder_and_report: tuple[Path, dict[str, Any]],
) -> None:
    env = EnvConfig(suite=f"explored:{folder_and_report[0]}")
    assert screen_of_suite(Config(env=env)) == load_suite("desk").size
