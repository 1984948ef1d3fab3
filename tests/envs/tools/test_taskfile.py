"""Promises of task files: OSWorld's schema is read whole, and an error names file, field and cure."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from bus.errors import TaskError
from envs.contract.actions import Done, KeyPress
from envs.tools.taskfile import Getter, claimed, load_tasks, read_ids, read_task

# The shape of OSWorld's evaluation_examples/examples/*/*.json.
WHOLE: dict[str, Any] = {
    "id": "0bf05a7d",
    "snapshot": "libreoffice_calc",
    "instruction": "Sum the column.",
    "source": "https://example.org/question",
    "config": [
        {"type": "download", "parameters": {"files": [{"url": "u", "path": "/home/user/a.xlsx"}]}},
        {"type": "open", "parameters": {"path": "/home/user/a.xlsx"}},
    ],
    "related_apps": ["libreoffice_calc"],
    "evaluator": {
        "postconfig": [{"type": "sleep", "parameters": {"seconds": 0.5}}],
        "func": ["compare_table", "exact_match"],
        "conj": "or",
        "result": [{"type": "vm_file", "path": "/home/user/a.xlsx"}, {"type": "vm_command_line"}],
        "expected": [{"type": "rule", "rules": {"expected": "3"}}, None],
        "options": [{"rules": []}, {}],
    },
    "proxy": False,
}


def changed(where: str, value: Any) -> dict[str, Any]:
    task = copy.deepcopy(WHOLE)
    *path, last = where.split(".")
    place = task
    for key in path:
        place = place[key]
    place[last] = value
    return task


def test_a_task_of_osworld_is_read_completely() -> None:
    task = read_task(WHOLE, Path("a.json"))
    assert (task.id, task.snapshot, task.instruction) == (
        "0bf05a7d",
        "libreoffice_calc",
        "Sum the column.",
    )
    assert [step.type for step in task.config] == ["download", "open"]
    evaluator = task.evaluator
    assert (evaluator.conj, evaluator.postconfig[0].parameters) == ("or", {"seconds": 0.5})
    first, second = evaluator.checks
    assert first.func == "compare_table"
    assert first.expected == Getter("rule", {"rules": {"expected": "3"}})
    assert (second.expected, second.options) == (None, {})
    assert task.extra == {
        "source": "https://example.org/question",
        "related_apps": ["libreoffice_calc"],
        "proxy": False,
    }
    assert (task.split, task.max_steps, task.solution) == ("train", 15, ())


def test_one_function_needs_no_lists() -> None:
    evaluator = {"func": "exact_match", "result": {"type": "x"}, "expected": {"type": "rule"}}
    (check,) = read_task(changed("evaluator", evaluator), Path("a.json")).evaluator.checks
    assert (check.func, check.result) == ("exact_match", Getter("x", {}))


def test_a_task_may_say_that_it_has_no_evaluator() -> None:
    evaluator = read_task(changed("evaluator", "none"), Path("a.json")).evaluator
    assert evaluator.missing
    assert not evaluator.infeasible
    verdict = claimed(evaluator, None)
    assert verdict is not None  # never a pass for want of checks
    assert verdict.outcome == "invalid"
    assert not read_task(WHOLE, Path("a.json")).evaluator.missing


def test_an_infeasible_task_is_recognised() -> None:
    task = read_task(changed("evaluator", {"func": "infeasible"}), Path("a.json"))
    assert task.evaluator.infeasible
    assert not read_task(WHOLE, Path("a.json")).evaluator.infeasible


def test_our_additions_are_read() -> None:
    ours = {
        "split": "heldout",
        "max_steps": 7,
        "solution": [{"kind": "keypress", "keys": ["ctrl", "s"]}, {"kind": "done"}],
        "near_misses": [{"why": "it is not saved", "actions": [{"kind": "done"}]}],
        "draw": {"name": {"choice": ["Ann", "Bo"]}},
    }
    task = read_task({**WHOLE, **ours}, Path("a.json"))
    assert (task.split, task.max_steps) == ("heldout", 7)
    assert task.solution == (KeyPress(keys=["ctrl", "s"]), Done())
    assert task.near_misses[0].why == "it is not saved"
    assert task.draw == ours["draw"]


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        ("id", None, "id must be a valid string"),
        ("instruction", 3, "instruction must be a valid string, got 3"),
        ("instruction", " ", "instruction: String should match"),
        ("config", 3, "config must be a valid"),
        ("config", [{"parameters": {}}], r"config\.0\.type is missing"),
        ("config", [{"type": "open", "parameters": 1}], r"config\.0\.parameters must be"),
        ("evaluator", None, "evaluator must be a dictionary"),
        ("evaluator.func", [], "evaluator: func must be functions"),
        ("evaluator.func", "exact_match", "evaluator: result must be in step with func: 1"),
        ("evaluator.result", [{"type": "x"}], "evaluator: result must be in step with func: 2"),
        (
            "evaluator.expected",
            [{}, {"rules": 1}],
            r"evaluator\.checks\.1\.expected\.type is missing",
        ),
        ("evaluator.conj", "xor", "evaluator.conj must be 'and' or 'or', got 'xor'"),
        ("evaluator.func", ["a", "infeasible"], "'infeasible' must stand alone"),
        ("split", "test", "split must be 'train' or 'heldout'"),
        ("max_steps", True, "max_steps must be a valid integer"),
        ("solution", [{"kind": "clik"}], r"solution\.0: Input tag 'clik'"),
        ("near_misses", [{"actions": []}], r"near_misses\.0\.why is missing"),
        ("solutoin", [], "solutoin is not a field; did you mean 'solution'"),
        ("evaluator.postconfi", [], "evaluator: postconfi is not a field"),
    ],
)
def test_a_mistake_names_file_field_and_cure(where: str, value: Any, message: str) -> None:
    with pytest.raises(TaskError, match=rf"^suite/a\.json: .*{message}"):
        read_task(changed(where, value), Path("suite/a.json"))


def test_a_malformed_file_costs_only_its_own_task(tmp_path: Path) -> None:
    (tmp_path / "calc").mkdir()
    (tmp_path / "calc" / "good.json").write_text(json.dumps(WHOLE))
    (tmp_path / "calc" / "twin.json").write_text(json.dumps(WHOLE))
    (tmp_path / "broken.json").write_text('{"id": "x",\n')
    (tmp_path / "latin.json").write_bytes(b'{"id": "\xe9"}')
    (tmp_path / "list.json").write_text("[]")
    loaded = load_tasks(tmp_path)
    assert list(loaded.tasks) == ["0bf05a7d"]
    broken, twin, latin, no_object = map(str, loaded.errors)
    assert broken.startswith(f"{tmp_path / 'broken.json'}: is not JSON:")
    assert "line 2" in broken
    assert f"id is '0bf05a7d' in {tmp_path / 'calc' / 'good.json'} too" in twin
    assert "is not UTF-8" in latin
    assert "it must be a dictionary" in no_object


def test_ids_in_a_list_are_held_out(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(json.dumps(changed("id", name)))
    listed = tmp_path.parent / "test_all.json"
    listed.write_text(json.dumps({"calc": ["b"], "chrome": []}))
    tasks = load_tasks(tmp_path, heldout=read_ids(listed)).tasks
    assert {name: task.split for name, task in tasks.items()} == {"a": "train", "b": "heldout"}
    with pytest.raises(TaskError, match="has no task 'c'"):
        load_tasks(tmp_path, heldout=["c"])


def test_a_folder_without_tasks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="holds no task file"):
        load_tasks(tmp_path)
    with pytest.raises(TaskError, match="no folder of tasks"):
        load_tasks(tmp_path / "missing")
    (tmp_path / "ids.json").write_text('{"calc": 3}')
    with pytest.raises(TaskError, match="must be a list of ids"):
        read_ids(tmp_path / "ids.json")


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("config", [{"type": "launch", "parameters": {"command": ["gedit"]}}]),
        ("evaluator.func", ["compare_table", "fuzzy_match"]),
        ("evaluator.conj", "and"),
        ("related_apps", ["gedit"]),
    ],
)
def test_a_tasks_digest_holds_set_up_and_evaluator_and_not_the_files_place(
    where: str, value: Any
) -> None:
    def digest(content: dict[str, Any], place: str) -> object:
        return read_task(content, Path(place)).task("a").params["file"]

    before = digest(WHOLE, "a.json")
    assert digest(copy.deepcopy(WHOLE), "b.json") == before
    assert digest(changed(where, value), "a.json") != before
