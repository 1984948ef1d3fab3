"""The guides to an action parser and a model family of one's own: what they show runs."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest

from dart_cli.cli.main import main
from scripts import small_models

ROOT = Path(__file__).parents[2]


def blocks(heading: str, language: str) -> list[str]:
    """The blocks of a section of docs/policy.md."""
    page = (ROOT / "docs" / "policy.md").read_text(encoding="utf-8")
    section = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


def run_shown(code: str, folder: Path) -> None:
    """Run a shown program as a file of its own."""
    path = folder / "shown.py"
    path.write_text(code, encoding="utf-8")
    runpy.run_path(str(path))


def dart(command: str) -> int:
    """The exit code of a shown `dart` command, in this process."""
    name, *arguments = shlex.split(command.replace("\\\n", " "))
    assert name == "dart"
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    return int(exit_.value.code or 0)


def test_the_guide_to_an_action_parser_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    [shown] = blocks("Add an action parser", "python")
    run_shown(shown, tmp_path)
    text = capsys.readouterr().out
    assert text.startswith('Now this.\n{"do": ')
    [command] = blocks("Add an action parser", "bash")
    assert dart(command) == 0
    told = capsys.readouterr()
    assert "episode" in told.out
    assert "malformed" not in told.out + told.err


def test_the_guide_to_a_model_family_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make, compare, tests = blocks("Add a class of models", "bash")
    _, script, *arguments = shlex.split(make)
    assert script == "scripts/small_models.py"
    monkeypatch.setattr("sys.argv", [script, *arguments])
    small_models.main()
    [shown] = blocks("Add a class of models", "python")
    run_shown(shown, tmp_path)
    assert "<|vision_start|>...<|vision_end|>click the box" in capsys.readouterr().out
    assert dart(compare) == 0
    assert all((ROOT / path).is_file() for path in shlex.split(tests)[3:])


def test_the_places_of_the_guide_to_a_model_family_exist() -> None:
    text = (ROOT / "docs" / "policy.md").read_text(encoding="utf-8")
    for path, name in re.findall(r"`(dart_cli/[\w/]+\.py)`: `(\w+)`", text):
        assert name in (ROOT / path).read_text(encoding="utf-8"), path
