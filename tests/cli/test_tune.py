"""`dart tune` as it is typed: its shortcuts, its file, and its mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dart_cli.cli.main import main
from dart_cli.config.schema import Config

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

    monkeypatch.setattr("dart_cli.tune.run.run_tune", run_tune)
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
            "tune.data names a, which is not there; name what is there",
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
