"""`dart data collect`: plays training tasks and keeps the successes for the experience pool.

collector        the command: plays, keeps the successes in the pool or in a folder, prints a table
teacher          a better model that plays, behind a server or in this process
policies         the policies that play with the environment's own solution
teacher_record   what a teacher has cost, its budget, and which seeds it has played
quotas           how many successes of each task are wanted, and which seed is tried next

Below are the options of the command.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from dart_cli.runtime.options import AsJson, DryRun, Overrides, check_folder


@dataclass(frozen=True)
class CollectOptions:
    """The options of `dart data collect`."""

    per_task: Annotated[int, typer.Option(min=1, help="Successes wanted of each task.")] = 8
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--task",
            metavar="PATTERN",
            help="Only these tasks: mini/popup, mini/p*, !mini/page; may be repeated.",
        ),
    ] = None
    player: Annotated[
        Literal["oracle", "policy", "teacher"],
        typer.Option(
            "--from",
            help="The player: the environment's own solution, a policy, or the model of [teacher].",
        ),
    ] = "oracle"
    weights: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="policy: a weight set; default the newest of the run, or the model's own.",
        ),
    ] = None
    hints: Annotated[
        bool,
        typer.Option(
            "--hints",
            help="policy, teacher: the prompt names the next step; it is stored without the hint.",
        ),
    ] = False
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            callback=check_folder,
            help="Write a new folder instead, for `dart tune`, `import` or data.pool; it must not exist.",
        ),
    ] = None
    overrides: Overrides = None
    dry_run: DryRun = False
    as_json: AsJson = False

    @property
    def source(self) -> Literal["oracle", "demonstration", "teacher"]:
        """The source of the successes, as the pool records it."""
        return "demonstration" if self.player == "policy" else self.player
