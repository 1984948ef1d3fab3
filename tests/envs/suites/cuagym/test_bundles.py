"""Promises about the folder of `cuagym:FOLDER`: which bundles are played, and why others are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bus.errors import MissingPartError, TaskError
from envs.contract.actions import Click
from envs.contract.registry import check_parts, find_task, load_suite
from envs.suites.cuagym.bundles import Hub, fill, read_bundles, reward_of
from tests.envs.suites.cuagym.standin import ACTIONS, bundle, write_folder


def test_a_bundle_has_its_instruction_its_programs_and_its_mocks(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {"both": bundle(actions_json=json.dumps(ACTIONS))})
    both = read_bundles(folder, Hub(folder)).good["both"]
    assert both.instruction == "Do both notes."
    assert both.mocks == ("notes_mock",)
    assert both.solution == (Click(x=20, y=20), Click(x=20, y=60))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"task_json": "{"}, "task.json is no JSON"),
        ({"task_json": "[]"}, "no object"),
        ({"task_json": '{"instruction": " "}'}, "no instruction"),
        ({"reward_py": "\n"}, "reward.py is missing or empty"),
        ({"reward_py": "print('REWARD: 1'"}, "reward.py cannot be compiled"),
        ({"reward_py": "score = 1"}, "no line `REWARD"),
        ({"reward_py": "# __CUA_GYM_PIGEON_URL__\nprint('REWARD: 1')"}, "needs a mock pigeon"),
        ({"initial_setup_py": "def"}, "initial_setup.py cannot be compiled"),
        ({"actions_json": '[{"kind": "fly"}]'}, "actions.json"),
        ({"actions_json": "{}"}, "no list"),
    ],
)
def test_a_broken_bundle_is_left_out_with_what_is_wrong(
    tmp_path: Path, changes: dict[str, str], why: str
) -> None:
    folder = write_folder(tmp_path, {"both": bundle(), "broken": bundle(**changes)})
    suite = load_suite(f"cuagym:{folder}")
    assert list(suite.tasks) == ["cuagym/both"]
    [error] = suite.errors  # type: ignore[attr-defined]
    assert error.startswith("cuagym/broken: ")
    assert why in error
    with pytest.raises(TaskError, match="it is broken"):
        find_task(suite.name, "cuagym/broken")


def test_a_bundle_of_a_desktop_is_no_mistake(tmp_path: Path) -> None:
    desktop = bundle(initial_setup_py="open('a')", reward_py="print('REWARD: 1')")
    folder = write_folder(tmp_path, {"both": bundle(), "calc": desktop})
    suite = load_suite(f"cuagym:{folder}")
    assert suite.errors == []  # type: ignore[attr-defined]
    with pytest.raises(TaskError, match="names no mock"):
        find_task(suite.name, "cuagym/calc")


def test_addresses_and_sessions_are_filled_in_wherever_they_stand(tmp_path: Path) -> None:
    hub = Hub(write_folder(tmp_path, {}))
    source = (
        "A = '__CUA_GYM_NOTES_URL__'; B = '__CUA_GYM_NOTES_HOST__'; C = 'https://cua-gym-notes.xlang.ai/go'\n"
        "D = 'cua-gym-notes.xlang.ai'; E = '__CUA_GYM_SID__'; F = '/tmp/task_web_sid'"
    )
    names: dict[str, str] = {}
    exec(fill(source, hub, {"notes_mock": "127.0.0.1:5"}, "s1", Path("/x/sid")), names)
    assert names["A"] == "http://127.0.0.1:5"
    assert names["B"] == names["D"] == "127.0.0.1:5"
    assert names["C"] == "http://127.0.0.1:5/go"
    assert names["E"] == "s1"
    assert names["F"] == "/x/sid"


@pytest.mark.parametrize(
    ("out", "reward"),
    [
        ("REWARD: 0.5", 0.5),
        ("part 1\nREWARD: 0.2\nREWARD: 1.0\n", 1.0),
        ("REWARD: 7", 1.0),
        ("REWARD: -3", 0.0),
        ("REWARD: nan", None),
        ("REWARD: none", None),
        ("", None),
        ("0.5", None),
    ],
)
def test_the_last_reward_counts(out: str, reward: float | None) -> None:
    assert reward_of(out) == reward


def test_a_wrong_folder_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="there is no folder"):
        load_suite(f"cuagym:{tmp_path}/none")
    with pytest.raises(TaskError, match="no mocks of CUA-Gym"):
        load_suite(f"cuagym:{tmp_path}")
    folder = write_folder(tmp_path / "hub", {})
    with pytest.raises(TaskError, match="no task bundles"):
        load_suite(f"cuagym:{folder}")


def test_a_mock_that_is_not_built_is_named_with_the_step(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {"both": bundle()})
    (folder / "websites" / "notes_mock" / "dist" / "index.html").unlink()
    hub = Hub(folder)
    assert "npm run build" in hub.problem("notes_mock")
    (folder / "websites" / "notes_mock" / "node_modules" / "vite" / "bin" / "vite.js").unlink()
    assert "npm install" in hub.problem("notes_mock")
    with pytest.raises(MissingPartError):
        check_parts(f"cuagym:{folder}", {"node": "no-such-node"})
