"""`dart explore`: finds the screens of an application, and the actions that lead from one to another.

run     explores; its name may be left out
rows    makes grounding rows from an exploration
tasks   makes tasks from an exploration
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
    """`dart explore SUITE` explores; `dart explore COMMAND ...` makes rows or tasks from an exploration."""

    command, process = "explore", "run"


explore = typer.Typer(
    cls=_ExploreGroup, no_args_is_help=True, subcommand_metavar="SUITE | CONFIG | COMMAND [ARGS]..."
)


@explore.callback()
def _explore() -> None:
    """Explore an application that is new to the model: its screens, and how one gets from one to another.

    `dart explore SUITE --task PATTERN --out FOLDER` acts on the screens, records the results, and prefers
    actions that it has tried least; `dart explore SUITE --help` shows its options. It writes a graph of
    screens and actions to the folder. The commands below make grounding rows and tasks from it.

    Example: dart explore desk --task 'desk/settings-*' --app settings --out explored/settings
    """


@explore.command("run")
@command_of(ExploreOptions)
def run_(options: ExploreOptions) -> None:
    """Act on the elements of each screen, and record every screen and how it was reached.

    The element that was tried least on a screen comes first; with `--chooser q`, the one that may lead to new
    screens. Buttons named delete, pay, send, log out, shut down and the like are never used; --dry-run shows
    the whole list. The command ends when the steps are used up, or when everything on every screen was tried.
    A second start continues where the first ended or was killed. The last line of stdout is JSON: screens,
    depth, no-op rate, steps. The word `run` may be left out.

    Example: dart explore miniwob --task miniwob/email-inbox --steps 200 --out explored/email

    Example: dart explore desktop --task 'desktop/calc-*' --slots 2 --deny 'save as' --out explored/calc
    """
    from dart_cli.config.rules.machine import refuse_no_folder

    refuse_no_folder(options.out)
    from dart_cli.explore.exploration import run_explore

    raise typer.Exit(run_explore(options))


Explored = Annotated[
    Path,
    typer.Argument(metavar="FOLDER", help="Folder that `dart explore` wrote.", show_default=False),
]


@explore.command()
@command_of(RowOptions)
def rows(
    folder: Explored,
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT", callback=check_folder, help="Folder to make.", show_default=False
        ),
    ],
    options: RowOptions,
) -> None:
    """Make grounding rows from an exploration: a query, a screenshot, and the box that answers it.

    OUT/train and OUT/test are sets that `dart eval grounding` and `dart tune` read. Whole screens are held
    out, chosen by their ids, so that further exploration does not move any to the other set. Elements that
    did nothing are left out. The last line of stdout is JSON.

    Example: dart explore rows explored/settings sets/settings
    """
    from dart_cli.config.rules.machine import refuse_filled

    refuse_filled(out)
    from dart_cli.explore.graph import read_graph
    from dart_cli.explore.rows import make_rows

    with read_graph(folder) as graph:
        counts = make_rows(graph, out, options)
    for split, part in counts["splits"].items():
        typer.echo(f"{split}: {part['rows']} rows of {part['screens']} screens", err=True)
    for reason, count in counts["left_out"].items():
        typer.echo(f"left out: {count} {reason}", err=True)
    typer.echo(json.dumps(counts))


@explore.command()
@command_of(TaskOptions)
def tasks(
    folder: Explored,
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT",
            callback=check_folder,
            help="Folder of the tasks; made if need be.",
            show_default=False,
        ),
    ],
    options: TaskOptions,
) -> None:
    """Make tasks from an exploration: to reach a screen, checked by the state of the environment.

    A screen that its steps always lead to becomes a goal, named by its title or by its elements. Its path is
    replayed from the start on several seeds. Seeds on which it fails are dropped, and so is a task without
    seeds. `explored:OUT` is then a suite for any run, and for `dart env check` and `play`. The last line of
    stdout is JSON.

    Example: dart explore tasks explored/settings tasks/settings

    Example: dart env check explored:tasks/settings
    """
    from dart_cli.config.rules.machine import refuse_no_folder

    refuse_no_folder(out)  # now, since it is written after all replays
    from dart_cli.explore.graph import read_graph
    from dart_cli.explore.tasks import make_tasks

    with read_graph(folder) as graph:
        counts = make_tasks(graph, out, options)
    for reason, count in counts["left_out"].items():
        typer.echo(f"{count} screens have no task: {reason}", err=True)
    typer.echo(f"{counts['tasks']} tasks; play them with dart env play {counts['suite']}", err=True)
    typer.echo(json.dumps(counts))
