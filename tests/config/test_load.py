"""A file that is no configuration, and overrides: one line with file, key and cure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bus.errors import ConfigError
from dart_cli.cli.main import main
from dart_cli.config.load import load_config
from dart_cli.config.schema import Config
from tests.config.mistakes import Case, assert_one_line, write
from tests.waiting import PATIENCE_S

CASES = [
    # no TOML at all
    Case("unquoted text", "[env]\nsuite = mini\n", "line 2", "text is written in quotes"),
    Case("unclosed section", "[env\n", "line 1", "not TOML"),
    Case("key twice", "[run]\nseed = 1\nseed = 2\n", "run.seed", "lines 2 and 3"),
    Case("colon for equals", "[run]\nseed: 1\n", "line 2", "not TOML"),
    # keys in no or the wrong place
    Case("unknown section", "[trian]\nlr = 1.0\n", "[trian]", "did you mean train"),
    Case("foreign section", "[optimizer]\nlr = 1.0\n", "[optimizer]", "lr is train.lr"),
    Case("section of nothing", "[banana]\na = 1.0\n", "[banana]", "there are run, bus"),
    Case("key without section", "lr = 1e-5\n", "lr", "did you mean train.lr"),
    Case("key of another section", "[data]\nlr = 1e-5\n", "data.lr", "did you mean train.lr"),
    Case("foreign key", "[data]\nbanana = 1\n", "data.banana", "[data] has group_size"),
    Case("section as value", "train = 3\n", "train", "must be a section"),
    Case("section as list", "[[train]]\nlr = 1.0\n", "train", "must be a section"),
    Case(
        "a channel that is none",
        '[weights]\nchannel = "glo"\n',
        "weights.channel",
        "did you mean gloo",
    ),
    # devices
    Case("no such device", '[train]\ndevice = "gpu"\n', "train.device", "must be auto, cpu, cuda"),
    Case("device misnumbered", '[rollout]\ndevice = "cuda:x"\n', "rollout.device", "cuda:N"),
    # text that is nearly TOML
    Case("nested brackets", f"[env]\noptions = {3000 * '['}{3000 * ']'}\n", "nested", "brackets"),
    Case("nested tables", f"[env.options{3000 * '.a'}]\nb = 1\n", "nested", "too deeply"),
]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_file_that_is_no_configuration_is_one_line_with_file_key_and_cure(
    case: Case, tmp_path: Path, places: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert_one_line(case, write(case, tmp_path, places), capsys)


WRONG_FIELD = Case("no path", "[run]\ndir = 3\n", "run.dir", "must be a path in quotes")


@pytest.mark.parametrize("case", [CASES[0], CASES[4], WRONG_FIELD], ids=lambda case: case.name)
def test_a_real_process_ends_with_two_and_no_traceback(
    case: Case, tmp_path: Path, places: dict[str, str]
) -> None:
    path = write(case, tmp_path, places)
    ended = subprocess.run(
        [sys.executable, "-m", "dart_cli", "train", str(path)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.count("\n") == 1
    assert case.key in ended.stderr


def test_every_verb_that_takes_a_config_refuses_it_the_same_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("[data]\ngroup_size = 0\n")
    for verb in ("env", "rollout", "data", "train", "up", "eval", "status"):
        with pytest.raises(SystemExit) as exit_:
            main([verb, str(path)])
        assert exit_.value.code == 2
        expected = f"error: data.group_size must be >= 1, got 0 ({path})\n"
        assert capsys.readouterr().err == expected


OVERRIDES = [
    ("train.lr", "want SECTION.KEY=VALUE"),
    ("=3", "want SECTION.KEY=VALUE"),
    ("lr=1e-5", "did you mean train.lr"),
    ("train..lr=1", "want SECTION.KEY=VALUE"),
    ("train.lr.x=1", "train.lr must be a number"),
    ("run.seed.x=1", "run.seed is a value, not a section"),
    ("train.lr=-1", "train.lr must be >= 0, got -1"),
    ("train.lrr=1", "did you mean train.lr"),
    ("trian.lr=1", "did you mean train"),
    ("data.task_sampling=frontir", "did you mean frontier"),
    ("model.path=no/such/folder", "model.path is no folder"),
    ("env.tasks=mini/popup", 'env.tasks must be a list in brackets, e.g. ["a", "b"]'),
    ("up.train_gpus=0", "or [0, 1], got 0"),
]


@pytest.mark.parametrize(("override", "cure"), OVERRIDES, ids=[each[0] for each in OVERRIDES])
def test_a_wrong_override_is_cited_with_its_file(
    override: str, cure: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "good.toml"
    path.write_text("[run]\nseed = 1\n")
    with pytest.raises(SystemExit) as exit_:
        main(["up", str(path), "--dry-run", "--set", override])
    err = capsys.readouterr().err
    assert exit_.value.code == 2
    assert err.count("\n") == 1
    assert f"--set {override}" in err
    assert str(path) in err
    assert cure in err


def test_overrides_take_toml_values_and_bare_text(tmp_path: Path) -> None:
    path = tmp_path / "good.toml"
    path.write_text("[train]\nlr = 1e-3\n")
    overrides = [
        *("train.lr=1e-5", "env.tasks=['mini/popup']", "model.path=models/ui tars"),
        *("env.options.size='168x168'", "eval.around=true", 'run.dir="runs/a"', "train.lr=2e-5"),
    ]
    config = load_config(path, overrides)
    assert config.train.lr == 2e-5
    assert config.env.tasks == ["mini/popup"]
    assert config.env.options == {"size": "168x168"}
    assert config.model.path == "models/ui tars"
    assert config.eval.around is True
    assert config.run.dir == Path("runs/a")


@pytest.mark.parametrize("name", ["nothing.toml", ""])
def test_a_file_that_cannot_be_read_is_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["up", str(tmp_path / name), "--dry-run"])
    assert exit_.value.code == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert str(tmp_path) in err


def test_bytes_that_are_no_text_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "latin.toml"
    path.write_bytes(b'[run]\ndir = "caf\xe9"\n')
    with pytest.raises(ConfigError, match="save it as UTF-8"):
        load_config(path)


def test_a_file_that_another_editor_saved_is_read(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    for encoding in ("utf-8-sig", "utf-16"):
        path.write_bytes("[run]\r\nseed = 7\r\n".encode(encoding))
        assert load_config(path).run.seed == 7


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "empty.toml"
    path.write_text("")
    train = Config().train.model_copy(update={"lr": 4e-4})  # of the tiny model
    assert load_config(path) == Config().model_copy(update={"train": train})


@pytest.mark.parametrize("name", ["ui-tars-7b", "qwen3.5-9b", "osworld"])
def test_a_configuration_that_names_dart_has_its_curation_and_its_mean(name: str) -> None:
    config = load_config(Path("configs") / f"{name}.toml")
    data, train = config.data, config.train
    assert (data.group_size, data.advantage, data.high_entropy) == (8, "group_std", 0.8)
    assert (data.dynamic_number, data.dynamic_length, data.pool_ratio) == (True, True, 0.125)
    assert (train.normalise, train.correction) == ("samples", "truncated")
    assert (train.lr, train.kl_beta, train.grad_clip) == (1e-6, 0.1, 2.0)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[train]\nlr = 1\nupdates = 2\nlr = 2\n", "train.lr stands twice, on lines 2 and 4"),
        ("[run]\nseed = 1\n\n[train]\n[run]  # again\n", "[run] stands twice, on lines 1 and 5"),
    ],
    ids=["key", "section"],
)
def test_what_stands_twice_is_named_with_its_lines(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert told in str(error.value)
    assert str(path) in str(error.value)
