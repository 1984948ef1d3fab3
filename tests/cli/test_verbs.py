"""The command line: fast help, exit codes, one-line errors, starter files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dart_cli import __version__
from dart_cli.cli.main import _command, main
from dart_cli.cli.reference import cli_reference
from dart_cli.config.load import load_config
from dart_cli.config.schema import Config
from dart_cli.data.store.open import open_store
from dart_cli.runtime.run_dir import save_config
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
VERBS = (
    "env",
    "rollout",
    "data",
    "train",
    "status",
    "up",
    "view",
    "eval",
    "model",
    "doctor",
    "init",
    "keys",
)
HEAVY = (
    *("torch", "transformers", "vllm", "zmq", "pydantic", "sqlite3", "PIL", "matplotlib"),
    *("asyncio", "bus.messages"),
)


def run(*arguments: str) -> int:
    """The exit code of `dart ARGUMENTS`, in this process."""
    with pytest.raises(SystemExit) as exit_:
        main(list(arguments))
    return int(exit_.value.code or 0)


@pytest.mark.parametrize(
    ("play", "arguments"),
    [
        ("dart_cli.suite_check.check_suite.run_check", ["env", "check", "mini"]),
        ("dart_cli.suite_check.play_by_hand.run_play", ["env", "play", "mini", "popup"]),
    ],
    ids=["check", "play"],
)
def test_an_out_that_can_be_no_file_is_refused_before_anything_is_played(
    play: str,
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(play, None)
    for out, why in ((tmp_path, "a folder"), (tmp_path / "no" / "x.png", "there is no folder")):
        assert run(*arguments, "--out", str(out)) == 2
        told = capsys.readouterr().err
        assert f"--out {out}: {why}" in told.replace("\n", "")
        assert "name a file in a folder that exists" in told


OUTS = {
    "env check": "mini --out FILE",
    "env play": "mini popup --out FILE.png",
    "data collect": "C.toml --out FOLDER",
    "data draw": "RUN --out FOLDER",
    "data export": "RUN FOLDER",
    "data show": "g000001-00 --film FILE.png",
    "eval grounding": "SET --model builtin:tiny --out FOLDER",
    "explore": "mini --out FOLDER",
    "explore rows": "GRAPH FOLDER",
    "explore tasks": "GRAPH FOLDER",
    "export": "C.toml FOLDER",
    "init": "FOLDER",
    "keys": "FOLDER",
    "model add-pointer": "builtin:tiny FOLDER",
    "model verifier-rows": "SET FOLDER",
    "tune": "C.toml --data SET --out FOLDER",
    "view": "RUN --export FILE.html",
}
"""Verb that writes where the user says -> its words."""


@pytest.mark.parametrize("place", ["/proc", "/sys/kernel"])
@pytest.mark.parametrize("verb", OUTS)
def test_a_place_where_nothing_can_be_written_is_refused_first_with_the_cure(
    verb: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "C.toml").write_text(f'[run]\ndir = "{tmp_path}/run"\n')
    words = OUTS[verb].replace("C.toml", f"{tmp_path}/C.toml").split()
    places = [re.sub("^(FILE|FOLDER)", f"{place}/x", word) for word in words]
    assert run(*verb.split(), *places) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"{place} is the kernel's; choose another" in line


def test_every_option_that_names_what_is_written_is_in_that_table() -> None:
    named = {"out", "film", "export"}
    wrote = set()

    def look(command: Any, words: tuple[str, ...]) -> None:
        for name, each in getattr(command, "commands", {}).items():
            look(each, (*words, name))
        if any(parameter.name in named for parameter in command.params):
            wrote.add(" ".join(words))

    look(_command(), ())
    assert wrote - {"explore run", "eval run"} <= set(OUTS)


def loaded_by(*arguments: str) -> tuple[list[str], str]:
    """(heavy modules that `dart ARGUMENTS` imports, its output), in a process of its own."""
    script = (
        "import sys\n"
        "from dart_cli.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "finally:\n"
        f"    print('loaded:', *(name for name in {HEAVY} if name in sys.modules))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    output, _, names = ended.stdout.rpartition("loaded:")
    return names.split(), output


def test_help_loads_nothing_heavy_and_names_every_verb() -> None:
    loaded, output = loaded_by("--help")
    assert loaded == []
    for verb in (*VERBS, "serve", "tune", "export", "explore"):
        assert re.search(rf"\b{verb}\b", output) or verb == "keys"
    panels = [output.index(f"─ {panel} ─") for panel in ("Run", "Look", "Evaluate", "Make")]
    assert panels == sorted(panels)


def test_a_rare_verb_is_left_out_of_the_first_page_and_works(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("--help") == 0
    assert not re.search(r"^│ keys\b", capsys.readouterr().out, re.MULTILINE)
    assert run("keys", "--help") == 0
    assert "dart keys" in capsys.readouterr().out


def test_a_help_page_fills_its_lines_whatever_the_source_wraps_at() -> None:
    page = subprocess.run(
        [sys.executable, "-m", "dart_cli", "up", "--help"],
        env=os.environ | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    ).stdout
    assert "A run that was stopped continues where it was. Ctrl-C ends all processes" in page


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_teaches_with_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(verb, "--help") == 0
    assert f"dart {verb}" in capsys.readouterr().out.split("Example:")[1]


@pytest.mark.parametrize(
    ("verb", "typed", "meant"), [("env", "chek", "check"), ("data", "lss", "ls")]
)
def test_a_misspelt_tool_is_answered_with_the_right_one(
    verb: str, typed: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(verb, typed) == 2
    assert f"did you mean `dart {verb} {meant}`?" in " ".join(capsys.readouterr().err.split())


def test_the_process_of_dart_env_needs_no_subcommand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "check"  # called like a tool, it is reached by its folder
    path.write_text("")
    told = []
    for words in (["env"], ["env", "run"]):
        assert run(*words, "--slots", "3", str(path), "--dry-run") == 0
        told.append(capsys.readouterr().out)
    assert "slots = 3" in told[0]
    assert told[0] == told[1]


def test_a_dry_run_loads_no_torch(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("")
    loaded, output = loaded_by("up", str(path), "--dry-run", "--set", f"run.dir={tmp_path}/run")
    for slow in ("torch", "transformers", "zmq", "sqlite3", "asyncio", "bus.messages"):
        assert slow not in loaded
    assert "nothing was started" in output
    assert not (tmp_path / "run").exists()


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"dart {__version__}\n"


def test_a_wrong_verb_or_option_ends_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("ups") == 2
    assert run("up", "x.toml", "--frsh") == 2
    assert "--fresh" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["up"], "Missing argument 'CONFIG'; see `dart up --help`"),
        (["data", "ls", "--limit", "0"], "--limit"),
        (["status", "x", "--watch", "0"], "--watch"),
        (["status", "x", "--watch", "soon"], "Invalid value for '--watch'"),
        (["up", "x.toml", "--frsh"], "--fresh"),
        (["ups"], "No such command 'ups'"),
        (["--nonsense"], "see `dart --help`"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_error_of_usage_is_one_line(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    assert told in err


def test_a_verb_without_any_word_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("model") == 2
    out, err = capsys.readouterr()
    assert "add-pointer" in out + err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["init", "x", "--template", "nope"],
            "'nope' is not one of 'tiny', 'own-env', 'web', '9b', '7b'",
        ),
        (["data", "ls", "--state", "foo"], "'foo' is not one of"),
    ],
    ids=["init", "ls"],
)
def test_a_choice_that_there_is_not_is_told_without_pydantics_words(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) == 2
    err = capsys.readouterr().err
    assert told in err
    assert "Value error" not in err


@pytest.mark.parametrize("words", [["status"], ["view"], ["data", "ls"], ["export"]], ids=" ".join)
def test_a_run_that_is_not_there_has_its_own_cure(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = [str(tmp_path / "out")] if words == ["export"] else []
    assert run(*words, str(tmp_path / "none"), *out) == 2
    err = capsys.readouterr().err
    assert f"no such run: {tmp_path / 'none'}" in err
    assert "dart init" not in err


@pytest.mark.parametrize("verb", ["export", "add-pointer"])
def test_a_place_that_cannot_be_is_refused_before_torch_is_loaded(
    verb: str, tmp_path: Path
) -> None:
    path = tmp_path / "c.toml"
    path.write_text("")
    if verb == "export":
        words, told = ["export", str(path), str(tmp_path)], f"{tmp_path} exists"
    else:
        words, told = ["model", "add-pointer", "/nope", str(tmp_path / "o")], "/nope does not exist"
    script = (
        "import sys\nfrom dart_cli.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nfinally:\n    print('torch' in sys.modules)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (ended.returncode, ended.stdout.strip()) == (2, "False")
    assert told in ended.stderr


def test_a_file_that_is_not_there_is_no_finding_of_the_doctor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("doctor", str(tmp_path / "nope")) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "no such file or folder" in err


def test_status_without_a_run_takes_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dart_cli.status.watch.ANSWER_S", 0.2)
    assert run("status", "--once") == 2
    assert "no run below runs; name the one you mean" in capsys.readouterr().err
    config = Config.model_validate({"run": {"dir": Path("runs/a")}})
    with open_store(config.run.dir):
        save_config(config)
    assert run("status", "--once") == 1
    assert "no data service answers" in capsys.readouterr().err


def test_the_reference_page_is_what_help_says() -> None:
    written = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert written == cli_reference(), "run: python -m dart_cli.cli.reference"


# --- init -----------------------------------------------------------------------------------


def test_init_writes_a_file_that_is_valid_and_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("init", "mine") == 0
    assert run("up", "mine/dart.toml", "--dry-run") == 0
    assert "valid" in capsys.readouterr().out
    assert load_config(Path("mine/dart.toml")).run.dir == Path("runs/mine")
    assert run("init", "env", "--template", "own-env") == 0
    assert "docs/your-application.md" in capsys.readouterr().out
    assert run("up", "env/dart.toml", "--dry-run") == 0


def test_init_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "dart.toml").write_text("mine")
    assert run("init", str(tmp_path)) == 2
    assert "left alone" in capsys.readouterr().err
    assert (tmp_path / "dart.toml").read_text() == "mine"


# --- dry run --------------------------------------------------------------------------------


def test_a_dry_run_says_what_each_role_would_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.toml"
    path.write_text('[env]\ntasks = ["mini/popup", "mini/menu"]\n[data]\ngroup_size = 4\n')
    expected = {
        "env": ("tasks:", "2 of mini: mini/popup, mini/menu"),
        "rollout": ("model:", "builtin:tiny"),
        "data": ("8 groups of 4 (32 trajectories)", "[data]: group_size = 4"),
        "train": ("200 updates", "lr 0.0004 (from the model: 0.6 million parameters)"),
        "up": ("sock",),
        "eval": ("400 episodes sampled", "seeds from 1000000"),
    }
    for verb, texts in expected.items():
        assert run(verb, str(path), "--dry-run", "--set", f"run.dir={tmp_path}/run") == 0
        out = capsys.readouterr().out
        for text in texts:
            assert text in " ".join(out.split()), verb


@pytest.mark.parametrize(
    ("train", "text"),
    [
        ("lr_end = 0.2", "200 updates, lr 1e-06 falling to 2e-07"),
        (
            "max_minutes = 9.5\nmax_trajectories = 3000",
            "200 updates or 9.5 minutes or 3000 trajectories, lr 1e-06",
        ),
    ],
)
def test_a_dry_run_names_the_end_of_the_run_and_the_way_of_the_learning_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], train: str, text: str
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(f'[env]\ntasks = ["mini/popup"]\n[train]\nlr = 1e-6\n{train}\n')
    assert run("train", str(path), "--dry-run", "--set", f"run.dir={tmp_path}/run") == 0
    assert text in " ".join(capsys.readouterr().out.split())


def test_slots_and_workers_are_options_of_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.toml"
    path.write_text("")
    assert run("env", str(path), "--slots", "3", "--dry-run") == 0
    assert "slots = 3" in capsys.readouterr().out
    there = f"run.dir={tmp_path}/run"
    assert run("env", str(path), "--worker", "No Such/Name", "--set", there) == 2
    assert "use lower-case letters" in capsys.readouterr().err


@pytest.mark.parametrize(("verb", "option"), [("env", "--slots"), ("eval", "--episodes")])
def test_none_of_something_is_not_the_configuration_s(
    verb: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.toml"
    path.write_text("")
    assert run(verb, str(path), option, "0", "--dry-run") == 2
    assert option in capsys.readouterr().err


def test_a_model_as_it_comes_takes_no_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(f'[run]\ndir = "{tmp_path}/run"\n')
    both = ["--model", "builtin:tiny", "--weights", "nowhere"]
    assert run("eval", str(path), *both, "--episodes", "1") == 2
    assert "leave out --weights" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# --- runs that are not there -----------------------------------------------------------------


def test_status_of_no_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.toml"
    path.write_text(f'[run]\ndir = "{tmp_path}/nothing"\n')
    assert run("status", str(path), "--once") == 2
    assert run("status", str(tmp_path), "--once") == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "no such run" in first
    assert "no readable config.json" in second
    assert not (tmp_path / "nothing").exists()


def test_status_where_no_data_process_answers_is_one_line_and_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dart_cli.status.watch.ANSWER_S", 0.2)
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    save_config(Config.model_validate({"run": {"dir": run_dir}}))
    assert run("status", str(run_dir), "--once") == 1
    assert "no data service answers" in capsys.readouterr().err


@pytest.mark.parametrize("verb", [["status"], ["view"], ["doctor"], ["data", "import"]])
def test_keys_of_a_run_directory_are_not_set(
    verb: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config.model_validate({"run": {"dir": tmp_path / "runs" / "a"}})
    with open_store(config.run.dir):
        save_config(config)
    for folder in (config.run.dir, config.run.dir.parent):
        more = ["successes"] if verb[-1] == "import" else []
        code = run(*verb, str(folder), *more, "--set", "bus.port=7801")
        assert code == (1 if verb == ["doctor"] else 2)
        captured = capsys.readouterr()
        told = f"--set bus.port=7801 changes a key of a TOML file, and {folder} is a directory"
        assert told in captured.out + captured.err


LONG = 300 * "a"
"""No file may have such a name."""


@pytest.mark.parametrize(
    "words",
    [
        ["status", LONG],
        ["view", LONG],
        ["doctor", LONG],
        ["data", "ls", LONG],
        ["data", "import", "C.toml", LONG],
        ["data", "C.toml", "--dry-run", "--set", f"run.dir={LONG}"],
    ],
    ids=["status", "view", "doctor", "ls", "import", "data"],
)
def test_a_path_that_the_system_refuses_is_one_line(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "C.toml").write_text(f'[run]\ndir = "{tmp_path}/run"\n')
    assert run(*(word.replace("C.toml", f"{tmp_path}/C.toml") for word in words)) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "File name too long" in line
    assert "another" in line


@pytest.mark.parametrize("verb", ["up", "env", "rollout", "data", "train"])
def test_each_verb_refuses_a_run_of_another_suite_without_force(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    save_config(Config.model_validate({"run": {"dir": run_dir}, "env": {"suite": "desk"}}))
    path = tmp_path / "c.toml"
    path.write_text(f'[run]\ndir = "{run_dir}"\n')
    for more in ([], ["--dry-run"]):
        assert run(verb, str(path), *more) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert "Traceback" not in err
        assert f"error: env.suite = 'mini', but the run in {run_dir} was started with 'desk'" in err
        assert "--force" in err
    assert run(verb, str(path), "--dry-run", "--force") == 0
    if verb == "up":
        assert run(verb, str(path), "--dry-run", "--fresh") == 0
    assert "nothing was started" in capsys.readouterr().out
