"""What docs/operations.md says of options, kinds and exit codes is so."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from dart_cli.cli.main import app
from dart_cli.data.stalls import KINDS

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")


def test_every_option_that_is_shown_is_one_of_status_and_all_are_shown() -> None:
    status = typer.main.get_command(app).commands["status"]  # type: ignore[attr-defined]
    known = {option for parameter in status.params for option in parameter.opts} - {"--help"}
    shown = set(re.findall(r"^dart status .*", PAGE, re.MULTILINE))
    used = {option for line in shown for option in re.findall(r"--[a-z]+", line)}
    assert used == {option for option in known if option.startswith("--")} - {"--set"}


def test_every_kind_of_stall_has_its_line() -> None:
    table = PAGE.partition("| kind |")[2].partition("\n\n")[0]
    first = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert [kind for cell in first for kind in re.findall(r"`(\w+)`", cell)] == list(KINDS)
