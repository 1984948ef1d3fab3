"""What docs/data-tools.md says of commands and columns is so."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from dart_cli.cli.data import data
from dart_cli.cli.main import app
from dart_cli.data.exchange.parquet_schema import COLUMNS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "data-tools.md").read_text(encoding="utf-8")
VIEW, TOOLS = PAGE.split("\n## On the terminal\n")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")


def test_the_viewer_has_the_options_and_pictures_that_the_page_shows() -> None:
    view = typer.main.get_command(app).commands["view"]  # type: ignore[attr-defined]
    assert {*OPTION.findall(VIEW)} <= {option for param in view.params for option in param.opts}
    pictures = re.findall(r"\]\((images/[^)]+)\)", VIEW)
    assert pictures
    assert all((DOCS / each).is_file() for each in pictures)


def test_the_page_names_every_command_and_only_options_that_exist() -> None:
    commands = typer.main.get_command(data).commands  # type: ignore[attr-defined]
    named = re.findall(r"\| `dart data (\w+)", TOOLS)
    assert {*named, "serve"} == set(commands)
    options = {
        option for each in commands.values() for param in each.params for option in param.opts
    }
    assert {*OPTION.findall(TOOLS)} <= options


def test_the_page_explains_every_column() -> None:
    table = PAGE[PAGE.index("| column | holds |") :]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert [name for row in rows for name in re.findall(r"`(\w+)`", row)] != []
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(COLUMNS)
