"""`dart explore`: find the screens of an application, and what leads from one to another.

run     explores; its name may be left out
rows    grounding rows from what was found
tasks   tasks from what was found
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dart_cli.cli.options import ProcessOrTool
from dart_cli.explore.options import ExploreOptions, RowOptions, TaskOptions
from dart_cli.runtime.options import check_folder, command_of


class _ExploreGroup(ProcessOrTool):
    """`dart explore SUITE` explores; `dart explore COMMAND ...` makes something of what was found."""

    verb, process = "explore", "run"


explore = typer.Typer(
    cls=_ExploreGroup, no_args_is_help=True, subcommand_metavar="SUITE | CONFIG | COMMAND [ARGS]..."
)


@explore.callback()
def _explore() -> None:
    """Explore an application that no model was trained on: its screens, and what leads from one to another.

    `dart explore SUITE --task PATTERN --out FOLDER` acts on what it finds, remembers what came of it and
    prefers what it has tried least; `dart explore SUITE --help` shows its options.
    The folder has a graph of screens and actions, which the commands make something of.

    Example: dart explore desk --task 'desk/settings-*' --app settings --out explored/settings
    """


@explore.command("run")
@command_of(ExploreOptions)
def run_(options: ExploreOptions) -> None:
    """Act on what each screen offers, and keep every screen and what led to it.

    What was tried least on a screen comes first; with `--chooser q` what may lead to new screens. Buttons
    named delete, pay, send, log out, shut down and the like are left alone: --dry-run shows the whole list.
    Ends when the steps are used up, or when everything on every known screen was tried. A second start goes on
    where the first ended or was killed. The last line of stdout is JSON: screens, depth, no-op rate, steps.
    The word `run` may be left out.

    Example: dart explore miniwob --task miniwob/email-inbox --steps 200 --out explored/email

    Example: dart explore desktop --task 'desktop/calc-*' --slots 2 --deny 'save as' --out explored/calc
    """
    from dart_cli.config.rules.machine import refuse_no_folder

    refuse_no_folder(options.out)
    from dart_cli.explore.exploration import run_explore

    raise typer.Exit(run_explore(options))


Explored = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="What `dart explore` wrote.", show_default=False)
]


@explore.command()
@command_of(RowOptions)
def rows(
    folder: Explored,
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT", callback=check_folder, help="A new folder.", show_default=False
        ),
    ],
    options: RowOptions,
) -> None:
    """Grounding rows from an exploration: a query, a screenshot and the box that answers it.

    OUT/train and OUT/test are sets that `dart eval grounding` and `dart tune` read. Screens are held out
    whole: which ones follows from their ids, so that further exploring moves none. Elements that did nothing
    are left out. The last line of stdout is JSON.

    Example: dart explore rows explored/settings sets/settings
    """
    from dart_cli.config.rules.machine import refuse_filled

    refuse_filled(out)
    from dart_cli.explore.graph import read_graph
    from dart_cli.explore.rows import make_rows

    with read_graph(folder) as graph:
        told = make_rows(graph, out, options)
    for split, found in told["splits"].items():
        typer.echo(f"{split}: {found['rows']} rows of {found['screens']} screens", err=True)
    for reason, count in told["left_out"].items():
        typer.echo(f"left out: {count} {reason}", err=True)
    typer.echo(json.dumps(told))


@explore.command()
@command_of(TaskOptions)
def tasks(
    folder: Explored,
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT",
            callback=check_folder,
            help="The folder of the tasks.",
            show_default=False,
        ),
    ],
    options: TaskOptions,
) -> None:
    """Tasks from an exploration: reach a screen, judged by the environment's own state.

    Each known screen that steps always led to is a goal, named by its title or by what can be used there. Its
    path is replayed from the start on several seeds; seeds on which it fails are dropped, and so is a
    task that keeps none. `explored:OUT` is then a suite for any run, for `dart env check` and `play`.
    The last line of stdout is JSON.

    Example: dart explore tasks explored/settings tasks/settings

    Example: dart env check explored:tasks/settings
    """
    from dart_cli.config.rules.machine import refuse_no_folder

    refuse_no_folder(out)  # it is written at the end, after all replays
    from dart_cli.explore.graph import read_graph
    from dart_cli.explore.tasks import make_tasks

    with read_graph(folder) as graph:
        told = make_tasks(graph, out, options)
    for reason, count in told["left_out"].items():
        typer.echo(f"{count} screens have no task: {reason}", err=True)
    typer.echo(f"{told['tasks']} tasks; play them with dart env play {told['suite']}", err=True)
    typer.echo(json.dumps(told))
