"""`dart explore`: find the screens of an application, and what leads from one to another.

run     explores; its name may be left out
rows    grounding rows from what was found
tasks   tasks from what was found
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from dart_cli.cli.env import EnvOptions, read_options
from dart_cli.cli.options import DryRun, Overrides, ProcessOrTool


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
    prefers what may lead to new screens (GUI-Bee's Q-ICRL); `dart explore SUITE --help` shows its options.
    The folder has a graph of screens and actions, which the commands make something of.

    Example: dart explore desk --task 'desk/settings-*' --app settings --out explored/settings
    """


@explore.command("run")
def run_(
    target: Annotated[
        str,
        typer.Argument(
            metavar="SUITE|CONFIG",
            help="mini, desk, miniwob, desktop, ..., package.module:Suite, file.py:Suite; or the TOML "
            "file of a run, for its suite, tasks and options.",
        ),
    ],
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="The graph; one that is there goes on.")
    ],
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--task",
            metavar="PATTERN",
            help="Where to start: an id, a glob such as 'desk/settings-*', !GLOB for all others; may be "
            "given again.",
        ),
    ] = None,
    app: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="All these tasks start this one application, so that they share what is known of it; "
            "default what the suite says, else each task is one.",
        ),
    ] = "",
    steps: Annotated[
        int, typer.Option(min=1, help="Over all slots, those of earlier starts included.")
    ] = 400,
    slots: Annotated[int, typer.Option(min=1, max=256, help="Environments at once.")] = 1,
    chooser: Annotated[
        Literal["q", "model", "chat", "random", "count", "recency"],
        typer.Option(
            help="q: by the value of what may be ahead. model: a model folder picks from the five that q "
            "drew; chat: a server with the OpenAI chat API does. Controls: random: anything; count: what was "
            "tried least on this screen; recency: what was not tried lately."
        ),
    ] = "q",
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="--chooser model: a model folder, or builtin:tiny; --chooser chat: what the server calls it.",
        ),
    ] = "",
    codec: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="--chooser model: how it is asked and answers, as for `dart eval grounding`.",
        ),
    ] = "",
    url: Annotated[
        str,
        typer.Option(
            metavar="URL", help="--chooser chat: base URL, e.g. http://localhost:8000/v1."
        ),
    ] = "",
    key_env: Annotated[
        str,
        typer.Option(
            metavar="VARIABLE",
            help="--chooser chat: environment variable with the key, which is kept nowhere; default "
            "OPENAI_API_KEY, if it is set.",
        ),
    ] = "",
    answer_s: Annotated[
        float,
        typer.Option(
            min=0.1,
            metavar="SECONDS",
            help="--chooser chat: a request that takes longer has no answer.",
        ),
    ] = 60.0,
    seeds: Annotated[int, typer.Option(min=1, help="Instances of each task: seeds 0, 1, ...")] = 1,
    back_every: Annotated[
        int, typer.Option(min=1, help="Steps after which a slot returns to a start.")
    ] = 40,
    deny: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WORD", help="Leave alone what has this in its name, too; may be given again."
        ),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WORD", help="Take a word off the deny list, or all; may be given again."
        ),
    ] = None,
    options: EnvOptions = None,
    overrides: Overrides = None,
    isolate: Annotated[
        bool, typer.Option("--isolate", help="Each environment in a process of its own.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws.")] = 0,
    dry_run: DryRun = False,
) -> None:
    """Act on what each screen offers, and keep every screen and what led to it.

    What has never been tried is worth most; what led somewhere is worth what is left to try there. Buttons
    named delete, pay, send, log out, shut down and the like are left alone: --dry-run shows the whole list.
    Ends when the steps are used up, or when everything on every known screen was tried. A second start goes on
    where the first ended or was killed. The last line of stdout is JSON: screens, depth, no-op rate, steps.
    The word `run` may be left out.

    Example: dart explore miniwob --task miniwob/email-inbox --steps 200 --out explored/email

    Example: dart explore miniwob --task miniwob/email-inbox --out explored/email --chooser chat
    --url http://localhost:8000/v1 --model Qwen2.5-VL-7B-Instruct

    Example: dart explore desktop --task 'desktop/calc-*' --slots 2 --deny 'save as' --out explored/calc
    """
    from dart_cli.explore.run import ExploreOptions, run_explore

    raise typer.Exit(
        run_explore(
            ExploreOptions(
                target=target,
                out=out,
                tasks=tasks or [],
                application=app,
                seeds=seeds,
                steps=steps,
                back_every=back_every,
                slots=slots,
                chooser=chooser,
                seed=seed,
                model=model,
                codec=codec,
                url=url,
                key_variable=key_env,
                answer_s=answer_s,
                deny=deny or [],
                allow=allow or [],
                options=read_options(options or []),
                overrides=overrides or [],
                isolated=isolate,
                dry_run=dry_run,
            )
        )
    )


Explored = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="What `dart explore` wrote.", show_default=False)
]
TestShare = Annotated[
    float, typer.Option(min=0, max=0.9, help="Share of the screens that are held out whole.")
]


@explore.command()
def rows(
    folder: Explored,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder.", show_default=False)],
    kinds: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Queries: descriptive (name the element), outcome (name what follows), or both with a comma.",
        ),
    ] = "descriptive,outcome",
    test_share: TestShare = 0.2,
    per_element: Annotated[
        int, typer.Option(min=0, help="Rows of a kind that name one element; 0 for no cap.")
    ] = 4,
    per_screen: Annotated[
        int, typer.Option(min=0, help="Rows of a kind of one screen; 0 for no cap.")
    ] = 16,
    tried_only: Annotated[
        bool, typer.Option("--tried-only", help="Leave out elements that were not tried.")
    ] = False,
    limit: Annotated[int, typer.Option(min=0, help="Rows for training; 0 for all.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Which rows, where there are more.")] = 0,
    url: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="A model behind the OpenAI chat API writes the outcome queries: its base URL.",
        ),
    ] = "",
    model: Annotated[
        str, typer.Option(metavar="NAME", help="--url: what the server calls the model.")
    ] = "",
    key_env: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="--url: environment variable with the key, which is kept nowhere; default "
            "OPENAI_API_KEY, where it is set.",
        ),
    ] = "",
    answer_s: Annotated[
        float, typer.Option(min=1, help="--url: a request that takes longer has no answer.")
    ] = 60.0,
    parquet: Annotated[
        bool, typer.Option("--parquet/--no-parquet", help="The same rows as Parquet files, too.")
    ] = True,
) -> None:
    """Grounding rows from an exploration: a query, a screenshot and the box that answers it.

    OUT/train and OUT/test are sets that `dart eval grounding` and `dart tune` read. Screens are held out
    whole: which ones follows from their ids, so that further exploring moves none. Elements that did nothing
    are left out. The last line of stdout is JSON.

    Example: dart explore rows explored/settings sets/settings
    """
    import json

    from bus.errors import UserError
    from dart_cli.explore.asker import ChatAsker
    from dart_cli.explore.graph import read_graph
    from dart_cli.explore.rows import RowOptions, kinds_of, make_rows
    from dart_cli.runtime.chat import chat_server

    options = RowOptions(
        kinds=kinds_of(kinds),
        test_share=test_share,
        per_element=per_element,
        per_screen=per_screen,
        tried_only=tried_only,
        limit=limit,
        seed=seed,
    )
    if not url and (model or key_env):
        raise UserError(
            "--model and --key-env belong to --url URL; without it queries are templates"
        )
    with read_graph(folder) as graph:
        asker = None
        if url:
            server = chat_server(url, model, key_variable=key_env, answer_s=answer_s)
            asker = ChatAsker(server, graph)
        told = make_rows(graph, out, options, parquet=parquet, ask=asker)
        told |= {"asked": asker.counts} if asker else {}
    for split, found in told["splits"].items():
        typer.echo(f"{split}: {found['rows']} rows of {found['screens']} screens", err=True)
    for reason, count in told["left_out"].items():
        typer.echo(f"left out: {count} {reason}", err=True)
    typer.echo(json.dumps(told))


@explore.command()
def tasks(
    folder: Explored,
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="The folder of the tasks.", show_default=False)
    ],
    longest: Annotated[int, typer.Option(min=1, help="Steps of a path, at most.")] = 12,
    seeds: Annotated[
        int, typer.Option(min=1, help="Instances of a start on which each path is tried.")
    ] = 4,
    heldout_share: TestShare = 0.2,
    limit: Annotated[int, typer.Option(min=0, help="Tasks, the shortest first; 0 for all.")] = 0,
    slots: Annotated[int, typer.Option(min=1, max=256, help="Environments at once.")] = 1,
) -> None:
    """Tasks from an exploration: reach a screen, judged by the environment's own state.

    Each known screen that steps always led to is a goal, named by its title or by what can be used there. Its
    path is replayed from the start on several seeds; seeds on which it fails are dropped, and so is a
    task that keeps none. `explored:OUT` is then a suite for any run, for `dart env check` and `play`.
    The last line of stdout is JSON.

    Example: dart explore tasks explored/settings tasks/settings

    Example: dart env check explored:tasks/settings
    """
    import json

    from dart_cli.explore.graph import read_graph
    from dart_cli.explore.tasks import TaskOptions, make_tasks

    options = TaskOptions(
        longest=longest, seeds=seeds, heldout_share=heldout_share, limit=limit, slots=slots
    )
    with read_graph(folder) as graph:
        told = make_tasks(graph, out, options)
    for reason, count in told["left_out"].items():
        typer.echo(f"{count} screens have no task: {reason}", err=True)
    typer.echo(f"{told['tasks']} tasks; play them with dart env play {told['suite']}", err=True)
    typer.echo(json.dumps(told))
