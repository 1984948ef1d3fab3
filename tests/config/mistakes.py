"""Configurations with one mistake each: one line with file, key and cure, exit code 2."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from dart_cli.cli.main import main
from dart_cli.config.rules.check import find_mistakes
from dart_cli.config.schema import Config


class Case(NamedTuple):
    """A configuration file with one mistake."""

    name: str
    toml: str
    key: str  # must be in the message
    cure: str  # part of the message


def write(case: Case, tmp_path: Path, places: dict[str, str]) -> Path:
    """The case as a file; `{NAME}` in it becomes the path of that place."""
    path = tmp_path / "mistake.toml"
    text = case.toml
    for name, place in places.items():
        text = text.replace(f"{{{name}}}", place)
    path.write_text(text)
    return path


def assert_one_line(case: Case, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`dart up PATH --dry-run` refuses it with one line that names file, key and cure."""
    with pytest.raises(SystemExit) as exit_:
        main(["up", str(path), "--dry-run"])
    out, err = capsys.readouterr()
    assert exit_.value.code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.endswith(f"({path})\n")
    assert case.key in err
    assert case.cure in err


LACKING = (
    "model.path is no folder",
    "teacher.model is no folder",
    "train.device",
    "rollout.device",
    'rollout.engine = "vllm": ',
)
"""How mistakes begin that are the machine's: no GPU, no model, no vLLM."""


def mistakes_anywhere(config: Config) -> list[str]:
    """The mistakes that a configuration has on every machine, whatever programs are installed there."""
    mistakes = [str(mistake) for mistake in find_mistakes(config)]
    return [
        each
        for each in mistakes
        if not each.startswith(LACKING) and "cannot be played here" not in each
    ]
