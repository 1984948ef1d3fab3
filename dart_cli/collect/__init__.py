"""`dart data collect`: successes of the training tasks, for the experience pool.

collector        the verb: plays, keeps the successes in the pool or a folder, prints a table
quotas     how many successes of which tasks, and which seed is tried next

Below are the options of the verb.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from dart_cli.runtime.options import AsJson, Overrides, check_folder


@dataclass(frozen=True)
class CollectOptions:
    """What is collected."""

    per_task: Annotated[int, typer.Option(min=1, help="Successes wanted of each task.")] = 8
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--task",
            metavar="PATTERN",
            help="Only these: mini/popup, mini/p*, !mini/page; may be given again.",
        ),
    ] = None
    player: Annotated[
        Literal["oracle", "policy"],
        typer.Option("--from", help="The player: the environment's own solution, or a policy."),
    ] = "oracle"
    weights: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="policy: a weight set; default the run's newest, or the model's own.",
        ),
    ] = None
    hints: Annotated[
        bool,
        typer.Option("--hints", help="policy: its prompt names the next step; stored without."),
    ] = False
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            callback=check_folder,
            help="Write a new folder instead, for `dart tune`, `import` or data.pool; it must not exist yet.",
        ),
    ] = None
    overrides: Overrides = None
    as_json: AsJson = False

    @property
    def source(self) -> Literal["oracle", "demonstration"]:
        """The source of its members in the pool."""
        return "oracle" if self.player == "oracle" else "demonstration"
