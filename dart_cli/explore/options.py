"""The options of `dart explore`, `dart explore rows` and `dart explore tasks`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from dart_cli.runtime.options import DryRun, EnvOptions, Overrides, check_folder

TestShare = Annotated[
    float, typer.Option(min=0, max=0.9, help="Share of the screens that are held out whole.")
]


@dataclass(frozen=True)
class ExploreOptions:
    """What is explored, and how."""

    target: Annotated[
        str,
        typer.Argument(
            metavar="SUITE|CONFIG",
            help="mini, desk, miniwob, desktop, ..., package.module:Suite, file.py:Suite; or the TOML "
            "file of a run, for its suite, tasks and options.",
        ),
    ]
    out: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER", callback=check_folder, help="The graph; one that is there goes on."
        ),
    ]
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--task",
            metavar="PATTERN",
            help="Where to start: an id, a glob such as 'desk/settings-*', !GLOB for all others; may be "
            "given again.",
        ),
    ] = None
    app: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="All these tasks start this one application, so that they share what is known of it; "
            "default what the suite says, else each task is one.",
        ),
    ] = ""
    steps: Annotated[
        int, typer.Option(min=1, help="Over all slots, those of earlier starts included.")
    ] = 400
    slots: Annotated[int, typer.Option(min=1, max=256, help="Environments at once.")] = 1
    chooser: Annotated[
        Literal["count", "q", "recency", "random"],
        typer.Option(
            help="count: what was tried least on this screen; q: GUI-Bee's Q-ICRL, by the value of what may be "
            "ahead. Controls: recency: what was not tried lately; random: anything."
        ),
    ] = "count"
    seeds: Annotated[
        int, typer.Option(min=1, help="Instances of each task: --first-seed and those after it.")
    ] = 1
    first_seed: Annotated[int, typer.Option(min=0, help="Of the instances.")] = 0
    back_every: Annotated[
        int, typer.Option(min=1, help="Steps after which a slot returns to a start.")
    ] = 40
    deny: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WORD", help="Leave alone what has this in its name, too; may be given again."
        ),
    ] = None
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WORD", help="Take a word off the deny list, or all; may be given again."
        ),
    ] = None
    options: EnvOptions = None
    overrides: Overrides = None
    isolate: Annotated[
        bool, typer.Option("--isolate", help="Each environment in a process of its own.")
    ] = False
    seed: Annotated[int, typer.Option(min=0, help="Of the draws.")] = 0
    dry_run: DryRun = False


@dataclass(frozen=True)
class RowOptions:
    """Which grounding rows are written."""

    kinds: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Queries: descriptive (name the element), outcome (name what follows), or both with a comma.",
        ),
    ] = "descriptive,outcome"
    test_share: TestShare = 0.2
    per_element: Annotated[
        int, typer.Option(min=0, help="Rows of a kind that name one element; 0 for no cap.")
    ] = 4
    per_screen: Annotated[
        int, typer.Option(min=0, help="Rows of a kind of one screen; 0 for no cap.")
    ] = 16
    tried_only: Annotated[
        bool, typer.Option("--tried-only", help="Leave out elements that were not tried.")
    ] = False
    limit: Annotated[int, typer.Option(min=0, help="Rows for training; 0 for all.")] = 0
    seed: Annotated[int, typer.Option(min=0, help="Which rows, where there are more.")] = 0


@dataclass(frozen=True)
class TaskOptions:
    """Which tasks are written, and how they are tried."""

    longest: Annotated[int, typer.Option(min=1, help="Steps of a path, at most.")] = 12
    seeds: Annotated[
        int, typer.Option(min=1, help="Instances of a start on which each path is tried.")
    ] = 4
    heldout_share: TestShare = 0.2
    limit: Annotated[int, typer.Option(min=0, help="Tasks, the shortest first; 0 for all.")] = 0
    slots: Annotated[int, typer.Option(min=1, max=256, help="Environments at once.")] = 1
