"""`dart data`: the data service of a run, and the tools that look into a run or fill its pool.

serve                        the process; its name may be left out
ls, show, stats, why, draw   show what a run holds, also while it is live
judge                        asks a second model about the trajectories of a run
collect, export, import      move trajectories into a run and out of it
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

    command, process = "data", "serve"


data = typer.Typer(
    cls=_DataGroup, no_args_is_help=True, subcommand_metavar="CONFIG | COMMAND [ARGS]..."
)


@data.callback()
def _data() -> None:
    """Run the data service; look into a run; import and export trajectories.

    `dart data CONFIG` starts the data service, which decides what is played next, stores trajectories and
    serves batches; `dart data CONFIG --help` shows its options. The commands below are tools, which may also
    read a live run. If your configuration file has the name of a command, write it as ./ls.

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
    """Run the data service: decide what is played next, store trajectories, serve batches.

    A run has one. You may stop it and start it again; nothing that it has acknowledged is lost. The word
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
        help="TOML file or run directory; by default the newest run below runs/.",
        show_default=False,
    ),
]
TrajectoryArgument = Annotated[
    str, typer.Argument(metavar="TRAJECTORY", help="Id of a trajectory, from `dart data ls`.")
]
Tasks = Annotated[
    list[str] | None,
    typer.Option("--task", metavar="TASK", help="Only this task; may be repeated."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


@data.command("ls")
def list_(
    target: RunTarget = None,
    task: Annotated[str | None, typer.Option(metavar="TASK", help="Only this task.")] = None,
    outcome: Annotated[
        Literal["pass", "fail", "invalid"] | None, typer.Option(help="Only this verdict.")
    ] = None,
    state: Annotated[
        Literal["leased", "playing", "finished", "batched", "trained", "dropped"] | None,
        typer.Option(help="Only trajectories in this state."),
    ] = None,
    reason: Annotated[
        str | None,
        typer.Option(metavar="REASON", help="Only trajectories that were dropped for this reason."),
    ] = None,
    pool: Annotated[
        bool, typer.Option("--pool", help="List the successes of the experience pool instead.")
    ] = False,
    limit: Annotated[
        int, typer.Option(min=1, help="Largest number of trajectories; the newest are listed.")
    ] = 50,
    as_json: AsJson = False,
) -> None:
    """List trajectories: task, state, reason if dropped, verdict, steps, policy versions, batch.

    Trajectories that were cut off by the end of the run are listed only with --reason, --state or --outcome.
    With --json, each line is one object.

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
            "--pool lists successes of the pool, among which only --task and --limit choose"
        )
    choice = TrajectoryFilter(task, outcome, state, reason)
    with open_reader(find_run(target)) as reader:
        check_tasks(reader, [task] if task else [])
        check_reason(reader, reason)
        if pool:  # also members that were removed from it
            rows = [Subject.of_pool(row) for row in reader.pool(task_id=task, evicted=True)]
        else:  # one more than the limit shows that there are others
            rows = subjects_of(reader, reader.trajectories(**choice.conditions, limit=limit + 1))
        if as_json:
            for row in rows[-limit:]:
                _print_json(subject_json(row))
        else:
            print_list(_console(), str(reader.path.parent), rows, limit, pool=pool)
        if not pool and (note := left_out_note(choice.count_hidden(reader))):
            typer.echo(note, err=as_json)


def _check_film(param: typer.CallbackParam, film: Path | None) -> Path | None:
    """Return the path of a film.

    Raises UserError for another kind of file, and for a path that cannot be written.
    """
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
            help="Draw its screens with its clicks: as a strip (.png), or moving in slow motion (.gif).",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show one trajectory: each step with text, action, certainty and times, and the verdict.

    Example: dart data show g000001-00 --film first.gif
    """
    from dart_cli.data.store.open import open_reader
    from dart_cli.inspection.run_lookup import find_run, find_subject
    from dart_cli.inspection.terminal import print_trajectory
    from dart_cli.inspection.trajectories import details_json, read_trajectory
    from dart_cli.inspection.trajectory_history import explain_trajectory

    with open_reader(find_run(run)) as reader:
        details = read_trajectory(reader, find_subject(reader, trajectory))
        if film is not None:
            from dart_cli.inspection.film_pictures import draw_trajectory

            draw_trajectory(film, reader, details)
        if as_json:
            _print_json(details_json(details))
            return
        place, events = str(reader.path.parent), explain_trajectory(reader, details)
        print_trajectory(_console(), place, details, events)
        if film is not None:
            typer.echo(f"film: {film}")


@data.command()
def stats(target: RunTarget = None, as_json: AsJson = False) -> None:
    """Count what a run holds: trajectories by state and reason, success by task, pool, tokens, bytes.

    Example: dart data stats runs/quickstart --json | jq .tasks
    """
    from dart_cli.data.store.open import open_reader
    from dart_cli.inspection.run_counts import count, counts_json
    from dart_cli.inspection.run_lookup import find_run
    from dart_cli.inspection.terminal import print_counts

    with open_reader(find_run(target)) as reader:
        if as_json:
            _print_json(counts_json(reader))
        else:
            place = str(reader.path.parent)
            print_counts(_console(), place, count(reader), reader.sizes(), reader.judge_views())


@data.command()
def why(trajectory: TrajectoryArgument, run: RunOption = None, as_json: AsJson = False) -> None:
    """Explain one trajectory: its lease, steps, verdict and group, and how it was used.

    For each step it says whether it was trained on and with which weight, or why not; for a dropped
    trajectory, by which rule and by which numbers.

    Example: dart data why g000001-00 --run runs/quickstart
    """
    from dart_cli.data.store.open import open_reader
    from dart_cli.inspection.run_lookup import find_run, find_subject
    from dart_cli.inspection.terminal import print_events
    from dart_cli.inspection.trajectories import read_trajectory, subject_json
    from dart_cli.inspection.trajectory_history import explain_trajectory

    with open_reader(find_run(run)) as reader:
        details = read_trajectory(reader, find_subject(reader, trajectory))
        events = explain_trajectory(reader, details)
        if as_json:
            _print_json(
                subject_json(details.subject) | {"story": [vars(event) for event in events]}
            )
        else:
            print_events(_console(), str(reader.path.parent), details, events)


@data.command()
def draw(
    target: RunTarget = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            callback=check_folder,
            help="Folder of the pictures; by default RUN/pictures.",
        ),
    ] = None,
) -> None:
    """Draw what curation decided: outcomes of groups, their sizes, step limits, entropies.

    This writes four PNG files. The run may be live.

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
            help="Base URL, up to the version, of a model behind the OpenAI chat API.",
        ),
    ] = "",
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Name of the model at the server; without --url, a model folder."
        ),
    ] = "",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Another key of env.judge, e.g. images=8 or key_env=JUDGE_KEY; may be repeated.",
        ),
    ] = None,
    tasks: Tasks = None,
    limit: Annotated[
        int, typer.Option(min=0, help="Judge only this many, the newest; 0 judges all.")
    ] = 0,
) -> None:
    """Let a second model judge the trajectories of a run that is over, and count how often it agrees.

    Options that you leave out are taken from env.judge of the run. The evaluators' verdicts stay.
    Trajectories that this judge has already judged are skipped, so that a second start continues the first.
    The last line of stdout is JSON.

    Example: dart data judge runs/osworld --url http://localhost:8000/v1 --model Qwen2.5-VL-72B-Instruct
    """
    from bus.snapshot import JudgeView
    from dart_cli.evaluation.judging import JudgeOptions, judge_run
    from dart_cli.inspection.run_lookup import find_run
    from dart_cli.status.judges import judge_lines

    options = read_options(settings or []) | {
        key: value for key, value in (("url", url), ("model", model)) if value
    }
    result = judge_run(JudgeOptions(find_run(target), options, tasks or [], limit))
    if result["agreement"] is not None:
        for line in judge_lines(JudgeView.model_validate(result["agreement"])):
            typer.echo(line, err=True)
    for name, reason in result["left_out"].items():
        typer.echo(f"left out: {name}: {reason}", err=True)
    typer.echo(json.dumps(result))
    raise typer.Exit(result["stopped"])


@data.command()
@command_of(CollectOptions)
def collect(config_path: ConfigPath, options: CollectOptions) -> None:
    """Fill the experience pool: play training tasks in this process and keep the successes.

    No other process is needed. What the pool has already is neither played nor stored twice. The folder of
    --out is written once, at the end, with all of its successes. A teacher (docs/teacher.md) goes on where an
    earlier start was ended, also with --out.

    Example: dart data collect configs/quickstart.toml --per-task 8

    Example: dart data collect configs/quickstart.toml --from policy --hints --out hinted

    Example: dart data collect configs/quickstart.toml --from teacher --set teacher.model=models/teacher
    """
    from bus.errors import ConfigError

    if options.player == "oracle" and (options.weights is not None or options.hints):
        raise ConfigError("--weights and --hints are for a policy; add --from policy")
    if options.player == "teacher" and options.weights is not None:
        raise ConfigError("--weights are a policy's; name the teacher's folder in teacher.model")
    config = load_checked(
        config_path, options.overrides, "eval" if options.player == "policy" else "env"
    )
    if options.player == "teacher":
        from dart_cli.config.load import Source
        from dart_cli.config.rules.check import check_config
        from dart_cli.language.shortest_click import refuse_cut_off

        source = Source(config_path, tuple(options.overrides or ()))
        check_config(config, source, "teacher")
        refuse_cut_off(config, source)
    if options.dry_run:
        print_dry_run(config, "eval")
        return
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
            metavar="FOLDER", callback=check_folder, help="Folder to make; it must not exist."
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
    """Write trajectories as Parquet files with their images, for Hugging Face `datasets`.

    Each row is one step. The folder appears at the end, complete. `dart data import` reads it.

    Example: dart data export runs/quickstart successes --outcome pass
    """
    from dart_cli.data.exchange.transfer import Selection, export_run, select_ids
    from dart_cli.data.store.open import open_reader
    from dart_cli.inspection.run_lookup import check_tasks, find_run
    from dart_cli.runtime.tables import progress

    if pool and outcome:
        raise typer.BadParameter("--pool exports successes only; leave --outcome out")
    run_dir = find_run(target)
    was_started = not target.is_dir() or (target / "config.json").exists()
    config = config_of(target) if was_started else None  # otherwise it has only a pool
    with open_reader(run_dir) as reader:
        check_tasks(reader, tasks or [])
        ids = select_ids(reader, Selection(outcome, tuple(tasks or ()), pool))
        with progress("exporting", len(ids), "trajectories") as advance:
            exported = export_run(reader, ids, folder, config=config, progress=advance)
    if as_json:
        _print_json(vars(exported) | {"folder": str(folder)})
        return
    skipped = exported.skipped
    note = f"; {skipped} left out, since parts of them were removed" if skipped else ""
    typer.echo(f"{exported.trajectories} trajectories, {exported.steps} steps in {folder}{note}")


@data.command("import")
def import_(
    target: Annotated[
        Path, typer.Argument(metavar="CONFIG_OR_RUN", help="TOML file or run directory.")
    ],
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", help="Folder of Parquet files, from `dart data export` or your own."
        ),
    ],
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Put the successes of a folder into the experience pool of a run that is not live.

    Every field is checked first: nothing is imported from a folder with a mistake. Importing a folder twice
    does no harm.

    Example: dart data import configs/quickstart.toml successes
    """
    from dart_cli.data.exchange.parquet_read import count_rows
    from dart_cli.data.exchange.transfer import import_folder
    from dart_cli.runtime.tables import progress

    config = config_of(target, overrides)
    with progress("checking and importing", 2 * count_rows(folder), "rows") as advance:
        imported = import_folder(config, folder, advance)
    if as_json:
        _print_json(vars(imported) | {"run_dir": str(config.run.dir)})
        return
    typer.echo(f"{config.run.dir}: {imported}")
    if not config.data.pool_ratio:
        typer.echo("data.pool_ratio = 0: the run does not draw from its pool; set it, e.g. 0.125")


def _console() -> Console:
    """Return a console for tables: as wide as the terminal, or of 120 columns in a file or pipe."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else 120
    return Console(markup=False, highlight=False, width=width)


def _print_json(value: object) -> None:
    typer.echo(json.dumps(value, allow_nan=False))
