"""`dart env check SUITE --classify`: what a suite's tasks need, without playing any.

run_classify   prints it; for suites that have `classify(tasks)`
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bus.errors import UserError
from dart_cli.runtime.tables import page_table
from envs.registry import load_suite, select_tasks


def run_classify(
    suite: str, tasks: Sequence[str], *, as_json: bool = False, out: Path | None = None
) -> int:
    """Print the counts, or all as JSON; `out` gets all. Raises UserError where the suite cannot tell."""
    classify = getattr(load_suite(suite), "classify", None)
    if classify is None:
        raise UserError(
            f"suite {suite} cannot tell what its tasks need; --classify is for osworld and osworld:FOLDER"
        )
    found: dict[str, Any] = classify([task.id for task in select_tasks(suite, tasks)])
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if as_json:
        Console().out(json.dumps(found), highlight=False)
        return 0
    console = Console()
    table = page_table(f"{found['tasks']} tasks of {suite}", "what", "tasks", right=("tasks",))
    for kind, number in found["kinds"].items():
        table.add_row(kind, str(number))
    table.add_section()
    for name in ("set_up", "judged", "accounts"):
        for value, number in found[name].items():
            table.add_row(f"{name.replace('_', '-')}: {value}", str(number))
    table.add_row("fetches files before the episode", str(found["fetches"]))
    table.add_row("opens web sites", str(found["visits"]))
    table.add_row("asks for a proxy", str(found["proxy"]))
    console.print(table)
    return 0
