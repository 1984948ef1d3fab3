"""`dart data`: the process by its configuration, and the tools that look into a run or fill its pool.

serve                     the process; its name may be left out
ls, show, stats, why, draw    what a run holds, also while it is live
judge                     what a second model says of its trajectories
collect, export, import   trajectories come and go
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dart_cli.cli.options import (
    ConfigPath,
    Force,
    ProcessOrTool,
    RunTarget,
    config_of,
    load_checked,
    print_dry_run,
    refuse_other,
)
from dart_cli.collect import CollectOptions
from dart_cli.runtime.options import (
    DryRun,
    Overrides,
    check_folder,
    check_out,
    command_of,
    read_options,
)

if TYPE_CHECKING:
    import asyncio

    from rich.console import Console


class _DataGroup(ProcessOrTool):
    """`dart data CONFIG` starts the process; `dart data COMMAND ...` is one of the tools."""

    verb, process = "data", "serve"


data = typer.Typer(
    cls=_DataGroup, no_args_is_help=True, subcommand_metavar="CONFIG | COMMAND [ARGS]..."
)


@data.callback()
def _data() -> None:
    """Keep the ledger of a run, look into it, exchange trajectories.

    `dart data CONFIG` starts the process that decides what is played next, stores trajectories and
    serves batches; `dart data CONFIG --help` shows its options. With a command in front it is a
    tool, which may read while the run is live. Write a configuration file that is named like a
    command as ./ls.

    Example: dart data configs/quickstart.toml --set data.group_size=16

    Example: dart data ls runs/quickstart --outcome fail --limit 5
    """


@data.command("serve")
def serve(
    config_path: ConfigPath,
    overrides: Overrides = None,
    force: Force = False,
    dry_run: DryRun = False,
) -> None:
    """Keep the ledger: decide what is played next, store trajectories, serve batches.

    One per run. It may be stopped and started again; nothing acknowledged is lost. The word
    `serve` may be left out.

    Example: dart data configs/quickstart.toml --set data.group_size=16
    """
    config = load_checked(config_path, overrides, "data")
    if dry_run:
        print_dry_run(config, "data", force=force)
        return
    refuse_other(config, force=force)
    from dart_cli.runtime.role import run_role

    async def keep(_name: str, stop: asyncio.Event) -> None:
        from dart_cli.data.service import run

        await run(config, stop)

    raise typer.Exit(run_role("data", config, keep, force=force, overrides=overrides or []))


RunOption = Annotated[
    Path | None,
    typer.Option(
        "--run",
        metavar="CONFIG_OR_RUN",
        help="TOML file or run directory; default the run below runs/ that was written to last.",
        show_default=False,
    ),
]
TrajectoryArgument = Annotated[
    str, typer.Argument(metavar="TRAJECTORY", help="Its id, as `dart data ls` shows it.")
]
Tasks = Annotated[
    list[str] | None,
    typer.Option("--task", metavar="TASK", help="Only this task; may be given again."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead, for scripts.")]


@data.command("ls")
def list_(
    target: RunTarget = None,
    task: Annotated[str | None, typer.Option(metavar="TASK", help="Only this task.")] = None,
    outcome: Annotated[
        Literal["pass", "fail", "invalid"] | None, typer.Option(help="Only this verdict.")
    ] = None,
    state: Annotated[
        Literal["leased", "playing", "finished", "batched", "trained", "dropped"] | None,
        typer.Option(help="Only those in this state."),
    ] = None,
    reason: Annotated[
        str | None, typer.Option(metavar="REASON", help="Only those dropped for this reason.")
    ] = None,
    pool: Annotated[
        bool, typer.Option("--pool", help="List the successes of the experience pool instead.")
    ] = False,
    limit: Annotated[int, typer.Option(min=1, help="At most this many, the newest.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List trajectories: task, state, why dropped, verdict, steps, versions, batch.

    Cancelled ones, which the end of the run cut off, only with --reason, --state or --outcome. With
    --json one object a line.

    Example: dart data ls runs/quickstart --state dropped --reason stale --json | jq .task
    """
    from dart_cli.data.store.open import open_reader
    from dart_cli.inspection.run_lookup import check_reason, check_tasks, find_run
    from dart_cli.inspection.terminal import left_out_note, print_list
    from dart_cli.inspection.trajectories import (
        Subject,
        TrajectoryFilter,
        subject_json,
        subjects_of,
    )

    if pool and (outcome or state or reason):
        raise typer.BadParameter(
            "--pool lists successes of the pool: only --task and --limit choose among them"
        )
    wanted = TrajectoryFilter(task, outcome, state, reason)
    with open_reader(find_run(target)) as reader:
        check_tasks(reader, [task] if task else [])
        check_reason(reader, reason)
        if pool:  # members that it no longer has, too
            found = [Subject.of_pool(row) for row in reader.pool(task_id=task, evicted=True)]
        else:  # one more tells that there are others
            found = subjects_of(reader, reader.trajectories(**wanted.conditions, limit=limit + 1))
        if as_json:
            for row in found[-limit:]:
                _say_json(subject_json(row))
        else:
            print_list(_console(), str(reader.path.parent), found, limit, pool=pool)
        if not pool and (note := left_out_note(wanted.count_hidden(reader))):
            typer.echo(note, err=as_json)


def _check_film(param: typer.CallbackParam, film: Path | None) -> Path | None:
    """Return a path that can hold a film. Raises UserError for another kind of file, which would be no film."""
    from bus.errors import UserError

    if film is not None and film.suffix.lower() not in (".png", ".gif"):
        raise UserError(f"--film {film}: name a file that ends in .png (a strip) or .gif (moving)")
    return check_out(param, film)


@data.command()
def show(
    trajectory: TrajectoryArgument,
    run: RunOption = None,
    film: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=_check_film,
            help="Draw its screens with its clicks: a strip (.png) or moving, in slow motion (.gif).",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show one trajectory: its steps with text, action, certainty and times, and its verdict.

    Example: dart data show g000001-00 --film first.gif
    """
    from dart_cli.data.store.open import open_reader
    from dart_cli.inspection.run_lookup import find_run, find_subject
    from dart_cli.inspection.terminal import print_trajectory
    from dart_cli.inspection.trajectories import details_json, read_trajectory
    from dart_cli.inspection.trajectory_history import explain_trajectory

    with open_reader(find_run(run)) as reader:
        shown = read_trajectory(reader, find_subject(reader, trajectory))
        if film is not None:
            from dart_cli.inspection.film_pictures import draw_trajectory

            draw_trajectory(film, reader, shown)
        if as_json:
            _say_json(details_json(shown))
            return
        place, events = str(reader.path.parent), explain_trajectory(reader, shown)
        print_trajectory(_console(), place, shown, events)
        if film is not None:
            typer.echo(f"film: {film}")


@data.command()
def stats(target: RunTarget = None, as_json: AsJson = False) -> None:
    """Count what a run holds: by state and reason, success by task, the pool, tokens, bytes.

    Example: dart data stats runs/quickstart --json | jq .tasks
    """
    from dart_cli.data.store.open import open_reader
    from dart_cli.inspection.run_counts import count, counts_json
    from dart_cli.inspection.run_lookup import find_run
    from dart_cli.inspection.terminal import print_counts

    with open_reader(find_run(target)) as reader:
        if as_json:
            _say_json(counts_json(reader))
        else:
            place = str(reader.path.parent)
            print_counts(_console(), place, count(reader), reader.sizes(), reader.judge_views())


@data.command()
def why(trajectory: TrajectoryArgument, run: RunOption = None, as_json: AsJson = False) -> None:
    """Explain one trajectory: its lease, steps, verdict and group, and what it was used for.

    For each step: whether it was trained on and with which weight, or why not. For a dropped
    trajectory: the rule and the numbers that decided.

    Example: dart data why g000001-00 --run runs/quickstart
    """
    from dart_cli.data.store.open import open_reader
    from dart_cli.inspection.run_lookup import find_run, find_subject
    from dart_cli.inspection.terminal import print_events
    from dart_cli.inspection.trajectories import read_trajectory, subject_json
    from dart_cli.inspection.trajectory_history import explain_trajectory

    with open_reader(find_run(run)) as reader:
        shown = read_trajectory(reader, find_subject(reader, trajectory))
        events = explain_trajectory(reader, shown)
        if as_json:
            _say_json(subject_json(shown.subject) | {"story": [vars(event) for event in events]})
        else:
            print_events(_console(), str(reader.path.parent), shown, events)


@data.command()
def draw(
    target: RunTarget = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            callback=check_folder,
            help="Where the pictures go; default RUN/pictures.",
        ),
    ] = None,
) -> None:
    """Draw what curation decided: outcomes of groups, their sizes, step limits, entropies.

    Four PNG files; also of a live run.

    Example: dart data draw runs/quickstart --out pictures
    """
    from dart_cli.data.store.open import open_reader
    from dart_cli.inspection.pictures import draw_all
    from dart_cli.inspection.run_lookup import find_run

    with open_reader(find_run(target)) as reader:
        for path in draw_all(reader, out or reader.path.parent / "pictures"):
            typer.echo(path)


@data.command()
def judge(
    target: RunTarget = None,
    url: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="A model behind the OpenAI chat API: its base URL up to the version.",
        ),
    ] = "",
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="What the server calls it; without --url a model folder."
        ),
    ] = "",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Another key of env.judge, e.g. images=8, key_env=JUDGE_KEY; may be given again.",
        ),
    ] = None,
    tasks: Tasks = None,
    limit: Annotated[int, typer.Option(min=0, help="The newest so many; 0 for all.")] = 0,
) -> None:
    """Ask a second model about the trajectories of a run that is over, and count how far it agrees.

    What is not given is taken from env.judge of the run. The evaluators' verdicts stay. Trajectories of
    which this judge has an opinion are left alone, so that a second start goes on where the first ended.
    The last line of stdout is JSON.

    Example: dart data judge runs/osworld --url http://localhost:8000/v1 --model Qwen2.5-VL-72B-Instruct
    """
    from bus.snapshot import JudgeView
    from dart_cli.evaluation.judging import JudgeOptions, judge_run
    from dart_cli.inspection.run_lookup import find_run
    from dart_cli.status.judges import judge_lines

    given = read_options(settings or []) | {
        key: value for key, value in (("url", url), ("model", model)) if value
    }
    told = judge_run(JudgeOptions(find_run(target), given, tasks or [], limit))
    if told["agreement"] is not None:
        for line in judge_lines(JudgeView.model_validate(told["agreement"])):
            typer.echo(line, err=True)
    for name, reason in told["left_out"].items():
        typer.echo(f"left out: {name}: {reason}", err=True)
    typer.echo(json.dumps(told))
    raise typer.Exit(told["stopped"])


@data.command()
@command_of(CollectOptions)
def collect(config_path: ConfigPath, options: CollectOptions) -> None:
    """Fill the experience pool: play training tasks here and keep the successes.

    Needs no other process. What the pool has already is neither played nor kept twice; a folder of --out
    is written once, with all of its successes.

    Example: dart data collect configs/quickstart.toml --per-task 8

    Example: dart data collect configs/quickstart.toml --from policy --hints --out hinted
    """
    from bus.errors import ConfigError

    if options.player == "oracle" and (options.weights is not None or options.hints):
        raise ConfigError("--weights and --hints are for a policy: add --from policy")
    config = load_checked(
        config_path, options.overrides, "env" if options.player == "oracle" else "eval"
    )
    from dart_cli.collect.collector import run_collect

    run_collect(config, options)


@data.command()
def export(
    target: Annotated[
        Path, typer.Argument(metavar="CONFIG_OR_RUN", help="TOML file or run directory.")
    ],
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", callback=check_folder, help="Made; it must not exist yet."
        ),
    ],
    outcome: Annotated[
        Literal["pass", "fail", "invalid"] | None, typer.Option(help="Only this verdict.")
    ] = None,
    tasks: Tasks = None,
    pool: Annotated[
        bool, typer.Option("--pool", help="Export the members of the experience pool instead.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write trajectories as Parquet with their images, as Hugging Face `datasets` opens them.

    One row a step. The folder appears whole at the end. `dart data import` reads it.

    Example: dart data export runs/quickstart successes --outcome pass
    """
    from dart_cli.data.exchange.transfer import Selection, export_run, select_ids
    from dart_cli.data.store.open import open_reader
    from dart_cli.inspection.run_lookup import check_tasks, find_run
    from dart_cli.runtime.tables import progress

    if pool and outcome:
        raise typer.BadParameter("--pool exports successes alone: --outcome chooses none of them")
    run_dir = find_run(target)
    was_started = not target.is_dir() or (target / "config.json").exists()
    config = config_of(target) if was_started else None  # else it holds a pool alone
    with open_reader(run_dir) as reader:
        check_tasks(reader, tasks or [])
        ids = select_ids(reader, Selection(outcome, tuple(tasks or ()), pool))
        with progress("exporting", len(ids), "trajectories") as advance:
            done = export_run(reader, ids, folder, config=config, progress=advance)
    if as_json:
        _say_json(vars(done) | {"folder": str(folder)})
        return
    left = f"; {done.skipped} left out, parts of them are gone" if done.skipped else ""
    typer.echo(f"{done.trajectories} trajectories, {done.steps} steps in {folder}{left}")


@data.command("import")
def import_(
    target: Annotated[
        Path, typer.Argument(metavar="CONFIG_OR_RUN", help="TOML file or run directory.")
    ],
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="Parquet files, of `dart data export` or your own."),
    ],
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Put the successes of a folder into the experience pool of a run that is not live.

    Every field is checked first: from a folder with a mistake nothing is imported. Importing twice
    does no harm.

    Example: dart data import configs/quickstart.toml successes
    """
    from dart_cli.data.exchange.parquet_read import count_rows
    from dart_cli.data.exchange.transfer import import_folder
    from dart_cli.runtime.tables import progress

    config = config_of(target, overrides)
    with progress("checking and importing", 2 * count_rows(folder), "rows") as advance:
        done = import_folder(config, folder, advance)
    if as_json:
        _say_json(vars(done) | {"run_dir": str(config.run.dir)})
        return
    typer.echo(f"{config.run.dir}: {done}")
    if not config.data.pool_ratio:
        typer.echo("data.pool_ratio = 0: the run does not draw from its pool; set it, e.g. 0.125")


def _console() -> Console:
    """For tables: as wide as the terminal, or 120 columns in a file or pipe."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else 120
    return Console(markup=False, highlight=False, width=width)


def _say_json(value: object) -> None:
    typer.echo(json.dumps(value, allow_nan=False))
