"""`dart explore` as it is typed: mistakes come before anything starts, the last line is JSON, a start goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dart_cli.cli.main import main
from dart_cli.config.schema import EnvConfig
from dart_cli.explore.exploration import with_tree
from dart_cli.explore.graph import read_graph
from tests.env.unruly_suite import SUITE as UNRULY
from tests.explore.maze_suite import SUITE
from tests.stopping import signal_in
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]


def dart(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_info:
        main(["explore", *arguments])
    return int(exit_info.value.code or 0)


def test_it_explores_goes_on_and_ends_with_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert dart(SUITE, "--steps", "5", "--out", out) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (report["steps"], report["stopped"]) == (5, "steps")
    assert dart(SUITE, "--slots", "2", "--out", out, "--dry-run") == 0
    assert "continued after 5 steps" in capsys.readouterr().out
    assert dart(SUITE, "--slots", "2", "--out", out) == 0
    output = capsys.readouterr()
    report = json.loads(output.out.splitlines()[-1])
    assert report["stopped"] == "frontier"
    assert (report["screens"], report["ends"], report["left_alone"]) == (6, 1, {"delete": 1})
    assert report["depth"] == 4
    assert "left alone: delete (1)" in output.err
    with read_graph(Path(out)) as graph:
        assert graph.settings()["steps"] == 400


def test_a_dry_run_shows_what_is_left_alone_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--deny", "drop table", "--allow", "send", "--out", str(tmp_path / "out"))
    assert dart("mini", "--task", "mini/popup", *arguments, "--dry-run") == 0
    output = capsys.readouterr().out
    [words] = [line for line in output.splitlines() if line.startswith("left alone")]
    assert "shut down" in words
    assert words.endswith(", drop table")
    assert "send" not in words.split(", ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["desk", "--out", "OUT"], "choose with --task"),
        (["desk", "--task", "desk/men", "--out", "OUT"], "did you mean 'desk/menu'"),
        (["desk", "--task", "desk/menu", "--out", "FULL"], "is no exploration"),
        (["desk", "--task", "desk/menu", "--out", "OUT", "--allow", "sned"], "did you mean 'send'"),
        (
            ["desk", "--task", "desk/menu", "--out", "OUT", "--option", "sice=9"],
            "did you mean 'size'",
        ),
        (
            ["desk", "--task", "desk/menu", "--out", "OUT", "--set", "env.slots=2"],
            "a suite has --option",
        ),
    ],
)
def test_mistakes_are_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("years")
    places = {"OUT": str(tmp_path / "out"), "FULL": str(tmp_path / "full")}
    assert dart(*(places.get(each, each) for each in arguments)) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "out").exists()


def test_another_exploration_is_not_mixed_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert dart(SUITE, "--steps", "2", "--out", out) == 0
    assert dart(SUITE, "--steps", "2", "--chooser", "random", "--out", out) == 2
    assert "(chooser was 'count' and is 'random')" in capsys.readouterr().err


def test_the_instances_are_those_from_the_first_seed_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ("--back-every", "2", "--chooser", "count", "--out", str(out))
    assert dart(SUITE, *arguments, "--steps", "8", "--first-seed", "7", "--seeds", "2") == 0
    assert "seeds 7 to 8" in capsys.readouterr().err
    with read_graph(out) as graph:
        assert {start.seed for start in graph.starts()} == {7, 8}
    assert dart(SUITE, *arguments, "--steps", "9", "--first-seed", "6") == 2
    assert "(first_seed was 7 and is 6)" in capsys.readouterr().err


def test_a_tree_that_must_be_asked_for_is_asked_for() -> None:
    assert with_tree(EnvConfig(suite="desktop")).observe == ["screenshot", "accessibility"]
    assert with_tree(EnvConfig(suite="mini")).observe == ["screenshot"]


def test_a_suite_that_is_made_of_a_file_is_no_configuration(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    suite = f"web:{ROOT / 'docs' / 'examples' / 'web' / 'guests.toml'}"
    assert dart(suite, "--task", "guests/none", "--out", str(tmp_path / "out")) == 2
    assert "guests/none" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_stopped_while_a_call_hangs_it_prints_what_was_found(
    number: signal.Signals,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    signal_in(monkeypatch, "explore/0 to step unruly/step-hang, seed 0", number)
    out = tmp_path / "out"
    assert dart(UNRULY, "--task", "unruly/step-hang", "--out", str(out)) == 128 + number
    printed, messages = capsys.readouterr()
    report = json.loads(printed.splitlines()[-1])
    assert (report["screens"], report["stopped"]) == (1, "interrupted")
    assert "the same command goes on" in messages
    with read_graph(out) as graph:
        assert (len(graph.starts()), graph.steps) == (1, 0)


def test_ctrl_c_keeps_what_was_found(tmp_path: Path) -> None:
    """The process is interrupted once its first steps are in the graph."""
    out = tmp_path / "out"
    code = (  # started by a shell in the background, it would ignore the signal
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from dart_cli.cli.main import main; main()"
    )
    command = [
        sys.executable,
        "-c",
        code,
        "explore",
        SUITE,
        "--chooser",
        "random",
        "--out",
        str(out),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MAZE_PAUSE_AT": "6"}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert any("the maze pauses" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        report = json.loads((process.communicate(timeout=PATIENCE_S)[0]).splitlines()[-1])
    assert process.returncode == 130
    assert report["stopped"] == "interrupted"
    assert 2 <= report["steps"] <= 5
