"""The options of `dart explore`, `dart explore rows` and `dart explore tasks`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from dart_cli.runtime.options import DryRun, EnvOptions, Overrides, check_folder

TestShare = Annotated[
    float,
    typer.Option(
        min=0, max=0.9, help="Share of the screens that are held out with all their rows or tasks."
    ),
]


@dataclass(frozen=True)
class ExploreOptions:
    """The options of `dart explore`."""

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
            metavar="FOLDER",
            callback=check_folder,
            help="The folder of the graph; an existing one is continued.",
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
            help="The one application that all these tasks start, so that they share its screens; "
            "default: what the suite names, else each task is its own application.",
        ),
    ] = ""
    steps: Annotated[
        int, typer.Option(min=1, help="Steps over all slots, including those of earlier runs.")
    ] = 400
    slots: Annotated[int, typer.Option(min=1, max=256, help="Environments at once.")] = 1
    chooser: Annotated[
        Literal["count", "q", "recency", "random"],
        typer.Option(
            help="count: the action tried least on this screen; q: GUI-Bee's Q-ICRL, by the value of what may "
            "follow. Controls: recency: an action not tried recently; random: any action."
        ),
    ] = "count"
    seeds: Annotated[
        int, typer.Option(min=1, help="Instances of each task: --first-seed and those after it.")
    ] = 1
    first_seed: Annotated[int, typer.Option(min=0, help="Seed of the first instance.")] = 0
    back_every: Annotated[
        int, typer.Option(min=1, help="Steps after which a slot returns to a start.")
    ] = 40
    deny: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WORD",
            help="Also leave elements alone that have this word in their name; may be given again.",
        ),
    ] = None
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WORD", help="Remove a word from the deny list, or `all`; may be given again."
        ),
    ] = None
    options: EnvOptions = None
    overrides: Overrides = None
    isolate: Annotated[
        bool, typer.Option("--isolate", help="Run each environment in its own process.")
    ] = False
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random choices.")] = 0
    dry_run: DryRun = False


@dataclass(frozen=True)
class RowOptions:
    """The options of `dart explore rows`."""

    kinds: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Kinds of queries: descriptive (name the element), outcome (name what follows), or both with a comma.",
        ),
    ] = "descriptive,outcome"
    test_share: TestShare = 0.2
    per_element: Annotated[
        int, typer.Option(min=0, help="Most rows of a kind that name one element; 0 for no limit.")
    ] = 4
    per_screen: Annotated[
        int, typer.Option(min=0, help="Most rows of a kind on one screen; 0 for no limit.")
    ] = 16
    tried_only: Annotated[
        bool, typer.Option("--tried-only", help="Leave out elements that were not tried.")
    ] = False
    limit: Annotated[int, typer.Option(min=0, help="Most rows for training; 0 for all.")] = 0
    seed: Annotated[
        int, typer.Option(min=0, help="Seed by which rows are chosen if there are more.")
    ] = 0


@dataclass(frozen=True)
class TaskOptions:
    """The options of `dart explore tasks`."""

    longest: Annotated[int, typer.Option(min=1, help="Most steps of a path.")] = 12
    seeds: Annotated[
        int, typer.Option(min=1, help="Instances of a start on which each path is tried.")
    ] = 4
    heldout_share: TestShare = 0.2
    limit: Annotated[
        int, typer.Option(min=0, help="Most tasks, the shortest first; 0 for all.")
    ] = 0
    slots: Annotated[int, typer.Option(min=1, max=256, help="Environments at once.")] = 1
