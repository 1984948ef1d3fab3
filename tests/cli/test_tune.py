"""`dart tune` as it is typed: its shortcuts, its file, and its mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dart_cli.cli.main import main
from dart_cli.config.schema import Config
from dart_cli.runtime.work_folder import SETTINGS
from dart_cli.tune.settings import TuneSettings, settings_of_config

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> int:
    """The exit code of `dart tune ARGUMENTS`, in this process."""
    with pytest.raises(SystemExit) as exit_:
        main(["tune", *arguments])
    return int(exit_.value.code or 0)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations that are trained with, in place of the training."""
    found: list[Config] = []

    def run_tune(config: Config, **_: Any) -> None:
        found.append(config)

    monkeypatch.setattr("dart_cli.tune.tuning.run_tune", run_tune)
    return found


def test_shortcuts_stand_for_their_keys_over_those_of_the_file(
    trained: list[Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for data in ("a", "b c"):
        Path(data).mkdir()
    path = tmp_path / "tune.toml"
    path.write_text('[tune]\ndata = ["x"]\nbatch = 5\n[train]\nlr = 0.1\ngrad_clip = 2.0\n')
    out = tmp_path / "models" / "out"  # whose parent is made
    places = ["--data", "a", "--data", "b c", "--out", str(out)]
    assert run(str(path), *places, "--set", "tune.lr=1e-3") == 0
    [config] = trained
    assert (config.tune.data, config.tune.out) == (["a", "b c"], out)
    assert (config.tune.batch, config.tune.lr, config.train.grad_clip) == (5, 1e-3, 2.0)
    assert config.train.lr == Config().train.lr  # which it does not read


def test_the_shipped_example_is_read_in_another_folder(
    trained: list[Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sets/made/train").mkdir(parents=True)
    assert run(str(ROOT / "configs" / "tune.toml")) == 0
    assert trained[0].tune.data == ["sets/made/train"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "tune.data is empty; name what is learned from"),
        (["--data", "a"], "tune.out is unset; name the folder to make"),
        (["--data", "a", "--data", "a", "--out", "o"], "tune.data lists 'a' twice"),
        (["--data", "a", "--out", "."], "tune.out exists"),
        (["--data", ".", "--out", "o", "--model", "no"], "model.path"),
        (["--set", "tune.epoch=1"], "did you mean tune.epochs? (--set tune.epoch=1 over defaults)"),
        (
            ["--data", "a", "--out", "o"],
            "tune.data names a, which does not exist; name an existing file",
        ),
    ],
)
def test_a_mistake_is_one_line_before_anything_starts(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line
    assert not list(tmp_path.iterdir())


def begin(folder: Path) -> None:
    """Leave a folder as a training of the defaults does that was stopped."""
    folder.mkdir()
    settings = dict.fromkeys(TuneSettings.model_fields, "") | settings_of_config(
        Config(), "completions"
    )
    settings |= {"learned": "completions", "examples": 9, "held_out": (), "max_pixels": 0}
    settings |= {"epochs": 7.0, "batch": 8, "lr": 1e-3, "lr_head": 3e-3}
    (folder / SETTINGS).write_text(TuneSettings.model_validate(settings).model_dump_json())


OTHERS = {  # option -> what is refused
    "tune.epochs=3": "epochs was 7.0 and is 3.0",
    "tune.batch=4": "batch was 8 and is 4",
    "tune.lr=2e-3": "lr was 0.001 and is 0.002",
    "tune.max_minutes=5": "max_minutes was 0.0 and is 5.0",
    "train.weight_decay=0.1": "weight_decay was 0.0 and is 0.1",
    "train.pack_tokens=512": "pack_tokens was",
    "model.lora.rank=4": "lora was '' and is",
    "model.dtype=bfloat16": "dtype was",
    "run.seed=3": "seed was 0 and is 3",
}


@pytest.mark.parametrize("option", OTHERS)
def test_other_settings_than_those_of_a_stopped_training_are_refused_before_anything_is_loaded(
    option: str,
    trained: list[Config],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    begin(tmp_path / "o.part")
    command = ["--data", "data", "--out", "o", "--model", "builtin:tiny"]
    assert run(*command) == 0  # what is unset follows from the rows, which are not read yet
    assert run(*command, "--set", option) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: o.part was begun with other settings (")
    assert OTHERS[option] in line
    assert "--fresh" in line
    assert len(trained) == 1
    assert run(*command, "--set", option, "--fresh") == 0
    assert len(trained) == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [("settings.json", "another version of dart"), ("photo.png", "is no training")],
)
def test_a_folder_that_is_no_training_of_this_version_is_refused_before_anything_is_loaded(
    name: str,
    message: str,
    trained: list[Config],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("o.part").mkdir()
    Path("o.part", name).write_text("{}")
    assert run("--data", "data", "--out", "o") == 2
    assert message in capsys.readouterr().err
    assert not trained


def test_the_first_sentence_of_the_help_names_supervised_fine_tuning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("--help") == 0
    page = " ".join(capsys.readouterr().out.split())
    assert "Run supervised fine-tuning (SFT) of a model folder, on recorded episodes" in page
