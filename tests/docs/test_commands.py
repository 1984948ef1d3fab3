"""Each `dart` command that a page or the head of a configuration shows has a verb and options that exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from dart_cli.cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(page for page in (ROOT / "docs").rglob("*.md") if page.name != "log.md"),
        *(ROOT / "configs").glob("*.toml"),
    ]
)
COMMAND = re.compile(
    r"(?:^(?:#? +)?|`|&& )(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(dart [^`\n#|>&]+)", re.MULTILINE
)


def shown(page: Path) -> Iterator[list[str]]:
    """The words of its commands; lines that go on after a backslash are one, diagrams are none."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for found in COMMAND.findall(text):
        try:
            words = shlex.split(found)
        except ValueError:  # an apostrophe of a sentence
            continue
        if not any(re.fullmatch(r"[-+]{3,}", word) for word in words):
            yield [word.rstrip(",;:)") for word in words[1:]]


def options_of(command: Any) -> set[str]:
    """Of `dart env` and `dart data` also those of the process, whose name is left out."""
    own = {name for each in command.params for name in each.opts}
    process = getattr(command, "commands", {}).get(getattr(command, "process", ""))
    return own | options_of(process) if process else own


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_that_a_page_shows_exist(page: Path) -> None:
    root: Any = typer.main.get_command(app)
    for words in shown(page):
        command, options = root, {"--help", "--version"}
        for word in words:
            if word.startswith("--"):
                assert word.partition("=")[0] in options, f"dart {' '.join(words)}"
            elif word in getattr(command, "commands", {}):
                command = command.commands[word]
                options |= options_of(command)
            elif command is root:
                assert not re.fullmatch(r"[a-z]+", word), f"dart {' '.join(words)}"
