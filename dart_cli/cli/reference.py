"""Writes pages of the documentation from the code: `python -m dart_cli.cli.reference`.

cli_reference  returns docs/cli.md: every command with its arguments and options
write_pages    writes docs/cli.md, docs/config.md (config/template.py), docs/your-words.md (config/unknown_keys.py)
               and the table of actions in docs/environments/index.md (envs/contract/actions.py)
"""

from __future__ import annotations

from pathlib import Path

import typer

from dart_cli.cli.main import app
from dart_cli.config.template import config_reference
from dart_cli.config.unknown_keys import words_page
from envs.contract.actions import with_table


def cli_reference() -> str:
    """Return the page of all commands, from the same texts as `--help`."""
    root = typer.main.get_command(app)
    lines = [
        "# Command line",
        "",
        "This page is made from the code (`python -m dart_cli.cli.reference`); a test compares them.",
        "Every command has `--help`. Exit codes: 0 success, 1 a fault of the run, 2 a mistake whose",
        "message names the fix, 3 a run that needed attention for `train.attention_minutes`, 130 interrupted",
        "(143 by SIGTERM, 129 by SIGHUP), 141 the reader of its output has ended. `dart status` ends",
        "with 1 if the run is not healthy, `dart doctor` if it cannot work, `dart env check`",
        "if a task has to be fixed.",
        "`dart --help` lists the commands by purpose, without `keys`.",
    ]
    with typer.Context(root, info_name="dart") as context:
        for name in root.list_commands(context):  # type: ignore[attr-defined]
            command = root.commands[name]  # type: ignore[attr-defined]
            lines += _command(typer.Context(command, info_name=name, parent=context), "##")
    return "\n".join(lines) + "\n"


def _command(context: typer.Context, mark: str) -> list[str]:
    """Return the lines of a command and its subcommands, each below a heading."""
    lines = ["", f"{mark} `{context.command_path}`", "", *_unwrapped(context.command.help or "")]
    for title, rows in _options(context):
        lines += ["", f"| {title} | meaning |", "| --- | --- |"]
        lines += [f"| `{left}` | {right} |" for left, right in rows]
    for name, command in getattr(context.command, "commands", {}).items():
        lines += _command(typer.Context(command, info_name=name, parent=context), f"{mark}#")
    return lines


def _unwrapped(text: str) -> list[str]:
    """Return a help text as Markdown, with its examples as code blocks."""
    lines: list[str] = []
    for line in text.strip().splitlines():
        if line.startswith("Example: "):
            lines += ["```bash", line.removeprefix("Example: "), "```"]
        else:
            lines.append(line.strip())
    return lines


def _options(context: typer.Context) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the tables of a command: "argument" or "option", with rows of (name, help text)."""
    arguments: list[tuple[str, str]] = []
    options: list[tuple[str, str]] = []
    for parameter in context.command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None:
            rows = arguments if parameter.param_type_name == "argument" else options
            rows.append((record[0].replace("|", "\\|"), record[1].replace("|", "\\|")))
    return [(title, rows) for title, rows in (("argument", arguments), ("option", options)) if rows]


def write_pages(docs: Path) -> None:
    """Write docs/cli.md, docs/config.md, docs/your-words.md and the actions in docs/environments/index.md."""
    (docs / "cli.md").write_text(cli_reference(), encoding="utf-8")
    (docs / "config.md").write_text(config_reference(), encoding="utf-8")
    (docs / "your-words.md").write_text(words_page(), encoding="utf-8")
    contract = docs / "environments" / "index.md"
    contract.write_text(with_table(contract.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write_pages(Path("docs"))
