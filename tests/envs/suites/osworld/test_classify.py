"""What task files need is read off them: who sets up, who judges, accounts, proxies, files, sites."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dart_cli.cli.main import main
from envs.contract.registry import load_suite
from envs.suites.osworld.classify import needs_of
from envs.tools.taskfile import TaskFile, read_task

RULE = {"type": "rule", "rules": {"expected": "1"}}
NATIVE = {
    "func": "exact_match",
    "result": {"type": "vm_command_line", "command": "true"},
    "expected": RULE,
}
CLOUD = {"type": "cloud_file", "path": "https://files.example/a.xlsx", "dest": "a.xlsx"}
FOREIGN = {
    "func": "compare_table",
    "result": {"type": "vm_file", "path": "/a", "dest": "b"},
    "expected": CLOUD,
}


def step(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"type": kind, "parameters": parameters}


def task(evaluator: object, *config: dict[str, Any], **more: Any) -> TaskFile:
    whole = {"id": "a", "instruction": "do it", "evaluator": evaluator, "config": list(config)}
    return read_task({**whole, **more}, Path("a.json"))


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        (task(NATIVE, step("sleep", seconds=1)), "the adapter alone"),
        (task(NATIVE, step("chrome_open_tabs", urls_to_open=[])), "needs desktop-env's set-up"),
        (task(FOREIGN), "needs desktop-env"),
        (task({"func": "infeasible"}), "infeasible"),
        (task("none"), "judged by a model"),
        (task(FOREIGN, step("login", settings_file="a.json")), "needs an account"),
        (task({**FOREIGN, "result": {"type": "googledrive_file"}}), "needs an account"),
    ],
)
def test_a_task_is_what_stands_between_it_and_an_episode(file: TaskFile, kind: str) -> None:
    assert needs_of(file).kind == kind


def test_hosts_of_files_and_sites_are_told_and_a_proxy() -> None:
    needs = needs_of(
        task(
            FOREIGN,
            step("download", files=[{"url": "https://other.example/x", "path": "/x"}]),
            step("chrome_open_tabs", urls_to_open=["https://news.example/a", "localhost:1337"]),
            proxy=True,
        )
    )
    assert needs.fetches == ("files.example", "other.example")
    assert needs.visits == ("news.example",)
    assert needs.proxy
    assert (needs.set_up, needs.functions) == (("chrome_open_tabs",), ("compare_table",))


def test_a_folder_is_a_suite_and_its_counts_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = tmp_path / "evaluation_examples" / "examples" / "os"
    examples.mkdir(parents=True)
    for name, evaluator in (("a", NATIVE), ("b", FOREIGN), ("c", {"func": "infeasible"})):
        whole = {"id": name, "instruction": "do it", "evaluator": evaluator, "config": []}
        (examples / f"{name}.json").write_text(json.dumps(whole))
    suite = f"osworld:{tmp_path}"
    assert [*load_suite(suite).tasks] == [f"{suite}/{name}" for name in "abc"]
    with pytest.raises(SystemExit) as exit_:
        main(["env", "check", suite, "--classify", "--json"])
    assert not exit_.value.code
    report = json.loads(capsys.readouterr().out)
    assert report["evaluated_by"] == {"dart": 1, "desktop-env": 1, "infeasible": 1}
    assert report["by_task"][f"{suite}/b"]["functions"] == ["compare_table"]
    assert load_suite("osworld").name == "osworld"  # without a folder the one that ships
    with pytest.raises(SystemExit) as exit_:
        main(["env", "check", "mini", "--classify"])
    assert exit_.value.code == 2
