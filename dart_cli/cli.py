"""The verbs of `dart`. Each checks its configuration whole, then starts one part, imported late.

    env, rollout, data, train   one process of a run, started by hand in any order
    data ls, show, stats, why   look into a run; data collect, export, import fill its pool
    up, status                  all of them at once; what they do and wait for
    eval, init, keys            held-out success; a starter configuration; keys for tcp
    bench                       how well a machine's time is used, against baselines

Only the standard library and typer are imported here, so that `dart --help` answers at once.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
import typer.core

from bus.errors import DartError

if TYPE_CHECKING:
    from rich.console import Console

    from bus.messages import Role
    from dart_cli.config import Config

app = typer.Typer(
    name="dart",
    help="Reinforcement learning for vision-language GUI agents, in decoupled processes.\n\n"
    "Everything at once:   dart up configs/quickstart.toml\n\n"
    "By hand, any order:   dart data C.toml;  dart train C.toml;  dart rollout C.toml;  "
    "dart env C.toml",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

ConfigPath = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="TOML file of the run; `dart init` writes one.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one key, e.g. --set train.lr=1e-5."),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check everything, say what would run, start nothing.")
]
Worker = Annotated[
    str, typer.Option("--worker", metavar="NAME", help="Name in the run; default ROLE-0, -1, ...")
]


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line; an error is one line on stderr and its class's exit code."""
    try:
        app(arguments)
    except DartError as error:
        _say_error(str(error))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


def _say_error(text: str) -> None:
    sys.stderr.write(f"error: {' '.join(text.split())}\n")


def _load(path: Path, overrides: list[str] | None, role: Role | None) -> Config:
    """The configuration, checked for `role`. Raises ConfigError."""
    from dart_cli.checks import check_config
    from dart_cli.config import Source, load_config

    config = load_config(path, overrides)
    check_config(config, Source(path, tuple(overrides or ())), role)
    return config


def _tell(config: Config, role: Role | None) -> None:
    """What `--dry-run` prints."""
    from dart_cli.plan import describe

    for subject, text in describe(config, role):
        typer.echo(f"{subject + ':':<10} {text}")
    typer.echo("valid; nothing was started")


def _version(asked: bool) -> None:
    if asked:
        from dart_cli import __version__

        typer.echo(f"dart {__version__}")
        raise typer.Exit


@app.callback()
def _dart(
    _version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it and end.")
    ] = False,
) -> None:
    pass


# --- one process ----------------------------------------------------------------------------


@app.command()
def env(
    config_path: ConfigPath,
    overrides: Overrides = None,
    worker: Worker = "",
    slots: Annotated[
        int,
        typer.Option(
            min=0, show_default=False, help="Environments played at once; default env.slots."
        ),
    ] = 0,
    dry_run: DryRun = False,
) -> None:
    """Play tasks: lease one, ask a rollout worker at each step, hand the trajectory in.

    Start as many as the machine has room for; they may come and go at any time.

    Example: dart env configs/quickstart.toml --slots 32
    """
    config = _load(config_path, overrides, "env")
    if slots:
        config = config.model_copy(update={"env": config.env.model_copy(update={"slots": slots})})
    if dry_run:
        _tell(config, "env")
        return
    from dart_cli.process import run_role

    async def play(name: str, stop: asyncio.Event) -> None:
        from dart_cli.env.worker import run

        await run(config, name, config.env.slots, stop)

    raise typer.Exit(run_role("env", config, play, worker=worker))


@app.command()
def rollout(
    config_path: ConfigPath,
    overrides: Overrides = None,
    worker: Worker = "",
    dry_run: DryRun = False,
) -> None:
    """Serve the policy: answer environments with actions, take new weights while serving.

    One per GPU (or group of GPUs); they may come and go at any time.

    Example: CUDA_VISIBLE_DEVICES=2 dart rollout configs/ui-tars-7b.toml
    """
    config = _load(config_path, overrides, "rollout")
    if dry_run:
        _tell(config, "rollout")
        return
    from dart_cli.process import run_role

    async def serve(name: str, stop: asyncio.Event) -> None:
        from dart_cli.rollout.worker import run

        await run(config, name, stop)

    threads = config.rollout.threads
    raise typer.Exit(run_role("rollout", config, serve, worker=worker, threads=threads))


class _ProcessOrTool(typer.core.TyperGroup):
    """`dart data CONFIG` starts the process; `dart data COMMAND ...` is one of the tools."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """What does not begin with a command's name is meant for the process."""
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            self._refuse_misspelt(ctx, args[0])
            args = [_PROCESS, *args]
        return super().parse_args(ctx, args)

    def _refuse_misspelt(self, ctx: typer.Context, first: str) -> None:
        """A word that is no file and nearly a command's name."""
        if first.startswith("-") or Path(first).exists():
            return
        if close := difflib.get_close_matches(first, self.commands, n=1):
            ctx.fail(f"no command and no file {first!r}; did you mean `dart data {close[0]}`?")


_PROCESS = "serve"

data = typer.Typer(
    cls=_ProcessOrTool, no_args_is_help=True, subcommand_metavar="CONFIG | COMMAND [ARGS]..."
)
app.add_typer(data, name="data")


@data.callback()
def _data() -> None:
    """Keep the ledger of a run, look into it, exchange trajectories.

    `dart data CONFIG` starts the process that says what is played next, files trajectories and
    serves batches; `dart data CONFIG --help` tells its options. With a command in front it is a
    tool, which reads beside a live run. A configuration file that is called like a command is
    reached as ./ls.

    Example: dart data configs/quickstart.toml --set data.group_size=16

    Example: dart data ls runs/quickstart --outcome fail --limit 5
    """


@data.command(_PROCESS)
def serve(config_path: ConfigPath, overrides: Overrides = None, dry_run: DryRun = False) -> None:
    """Keep the ledger: say what is played next, file trajectories, serve batches.

    One per run. It may be stopped and started again; nothing acknowledged is lost. The word
    `serve` may be left out.

    Example: dart data configs/quickstart.toml --set data.group_size=16
    """
    config = _load(config_path, overrides, "data")
    if dry_run:
        _tell(config, "data")
        return
    from dart_cli.process import run_role

    async def keep(_name: str, stop: asyncio.Event) -> None:
        from dart_cli.data.service import run

        await run(config, stop)

    raise typer.Exit(run_role("data", config, keep))


RunTarget = Annotated[
    Path | None,
    typer.Argument(
        metavar="[CONFIG_OR_RUN]",
        help="TOML file or run directory; default the run below runs/ that was written to last.",
        show_default=False,
    ),
]
RunOption = Annotated[
    Path | None,
    typer.Option(
        "--run",
        metavar="CONFIG_OR_RUN",
        help="TOML file or run directory; default the run below runs/ that was written to last.",
        show_default=False,
    ),
]
Trajectory = Annotated[
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
    limit: Annotated[int, typer.Option(min=1, help="At most so many, the newest.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List trajectories: task, state, why dropped, verdict, steps, versions, batch.

    With --json one object a line.

    Example: dart data ls runs/quickstart --state dropped --reason stale --json | jq .task
    """
    from dart_cli import browse
    from dart_cli.data.store import open_reader

    if pool and (outcome or state or reason):
        raise typer.BadParameter(
            "--pool lists successes of the pool: only --task and --limit choose among them"
        )
    wanted = browse.Listing(task, outcome, state, reason, limit)
    with open_reader(browse.find_run(target)) as reader:
        found = (
            browse.list_pool(reader, task, limit)
            if pool
            else browse.list_trajectories(reader, wanted)
        )
        if as_json:
            for row in found[-limit:]:
                _say_json(row)
        elif pool:
            browse.print_pool(_console(), reader, found, limit)
        else:
            browse.print_trajectories(_console(), reader, found, limit)


@data.command()
def show(
    trajectory: Trajectory,
    run: RunOption = None,
    film: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Draw its screens with its clicks into this file."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show one trajectory: its steps with text, action, certainty and times, and its verdict.

    Example: dart data show g000001-00 --film first.png
    """
    from dart_cli import browse
    from dart_cli.data.store import open_reader

    with open_reader(browse.find_run(run)) as reader:
        subject = browse.find_subject(reader, trajectory)
        shown = browse.show(reader, subject)
        if film is not None:
            from dart_cli.report import draw_trajectory

            draw_trajectory(film, reader, subject)
        if as_json:
            _say_json(shown)
            return
        browse.print_show(_console(), reader, subject, shown)
        if film is not None:
            typer.echo(f"film: {film}")


@data.command()
def stats(target: RunTarget = None, as_json: AsJson = False) -> None:
    """Count what a run holds: by state and reason, success by task, the pool, tokens, bytes.

    Example: dart data stats runs/quickstart --json | jq .tasks
    """
    from dart_cli import browse
    from dart_cli.data.store import open_reader

    with open_reader(browse.find_run(target)) as reader:
        counted = browse.count(reader)
    if as_json:
        _say_json(counted)
    else:
        browse.print_count(_console(), counted)


@data.command()
def why(trajectory: Trajectory, run: RunOption = None, as_json: AsJson = False) -> None:
    """Tell the story of one trajectory: lease, steps, verdict, its group, what it was used for.

    For each step whether it was trained on, with which weight, or why not; for a dropped one the
    rule and the numbers that decided.

    Example: dart data why g000001-00 --run runs/quickstart
    """
    from dart_cli import browse, story
    from dart_cli.data.store import open_reader

    with open_reader(browse.find_run(run)) as reader:
        subject = browse.find_subject(reader, trajectory)
        events = story.tell_story(reader, subject)
        if as_json:
            _say_json({"id": subject.id, "task": subject.task_id, "story": story.as_json(events)})
            return
        typer.echo(f"{subject.id}  {subject.task_id}, seed {subject.task_seed}")
        story.print_story(_console(), events)


@data.command()
def collect(
    config_path: ConfigPath,
    overrides: Overrides = None,
    per_task: Annotated[int, typer.Option(min=1, help="Successes wanted of each task.")] = 8,
    tasks: Tasks = None,
    player: Annotated[
        Literal["oracle", "policy"],
        typer.Option("--from", help="Who plays: the environment's own solution, or a policy."),
    ] = "oracle",
    weights: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="policy: a weight set; default the run's newest, or the model's own.",
        ),
    ] = None,
    hints: Annotated[
        bool, typer.Option("--hints", help="policy: tell it the next step; stored without.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write a folder for `import` or data.pool instead."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Fill the experience pool: play training tasks here and keep the successes.

    Needs no other process. What was collected before is neither played nor kept twice.

    Example: dart data collect configs/quickstart.toml --per-task 8

    Example: dart data collect configs/quickstart.toml --from policy --hints --out hinted
    """
    from bus.errors import ConfigError

    if player == "oracle" and (weights is not None or hints):
        raise ConfigError("--weights and --hints are for a policy: add --from policy")
    config = _load(config_path, overrides, "data" if player == "oracle" else "eval")
    from dart_cli.collect import Wanted, run_collect

    wanted = Wanted(per_task, tuple(tasks or ()), player, weights, hints)
    run_collect(config, wanted, out=out, as_json=as_json)


@data.command()
def export(
    target: Annotated[
        Path, typer.Argument(metavar="CONFIG_OR_RUN", help="TOML file or run directory.")
    ],
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Made; it must not be there yet.")
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
    from dart_cli import browse
    from dart_cli.bar import progress
    from dart_cli.data.exchange import Choice, chosen, export_run
    from dart_cli.data.store import open_reader

    run_dir = browse.find_run(target)
    with open_reader(run_dir) as reader:
        ids = chosen(reader, Choice(outcome, tuple(tasks or ()), pool))
        with progress("exporting", len(ids), "trajectories") as told:
            done = export_run(reader, ids, folder, config=_config_of(target), told=told)
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

    Every field is checked first: of a folder with a mistake nothing is taken. Twice does no harm.

    Example: dart data import configs/quickstart.toml successes
    """
    from dart_cli.bar import progress
    from dart_cli.data.exchange import import_folder
    from dart_cli.data.parquet import count_rows

    config = _config_of(target, overrides)
    with progress("checking and importing", 2 * count_rows(folder), "rows") as told:
        done = import_folder(config, folder, told)
    if as_json:
        _say_json(vars(done) | {"run_dir": str(config.run.dir)})
    else:
        typer.echo(f"{config.run.dir}: {done}")


def _config_of(target: Path, overrides: list[str] | None = None) -> Config:
    """The configuration in a file, or the one that a run directory was started with."""
    from dart_cli.config import load_config
    from dart_cli.process import read_run

    return read_run(target) if target.is_dir() else load_config(target, overrides)


def _console() -> Console:
    """For tables: as wide as the terminal, or as a file that somebody greps."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else 120
    return Console(markup=False, highlight=False, width=width)


def _say_json(value: object) -> None:
    typer.echo(json.dumps(value, allow_nan=False))


@app.command()
def train(config_path: ConfigPath, overrides: Overrides = None, dry_run: DryRun = False) -> None:
    """Train: take a batch, update, publish the new weights; resume from the last checkpoint.

    One per run.

    Example: dart train configs/quickstart.toml --set train.lr=1e-4
    """
    config = _load(config_path, overrides, "train")
    if dry_run:
        _tell(config, "train")
        return
    from dart_cli.process import run_role

    async def learn(_name: str, stop: asyncio.Event) -> None:
        from dart_cli.train.loop import run

        await run(config, stop)

    raise typer.Exit(run_role("train", config, learn, threads=config.train.threads))


# --- the whole run --------------------------------------------------------------------------


@app.command()
def up(
    config_path: ConfigPath,
    overrides: Overrides = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Move an older run directory aside and begin anew.")
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """Start data, train, rollout and env processes, show one live page, end them together.

    A run that was stopped goes on where it was. Ctrl-C ends everything cleanly.

    Example: dart up configs/quickstart.toml --set train.lr=0 --fresh
    """
    config = _load(config_path, overrides, None)
    if dry_run:
        _tell(config, None)
        return
    from dart_cli.up import run_up

    raise typer.Exit(run_up(config, config_path, overrides or [], fresh=fresh))


@app.command()
def status(
    target: Annotated[
        Path, typer.Argument(metavar="RUN_OR_CONFIG", help="Run directory, or its TOML file.")
    ],
    overrides: Overrides = None,
    once: Annotated[bool, typer.Option("--once", help="Print the page once and end.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the snapshot as one line of JSON.")
    ] = False,
    watch: Annotated[
        float, typer.Option("--watch", metavar="SECONDS", min=0.2, help="Seconds between looks.")
    ] = 2.0,
) -> None:
    """Show the run live: processes, pipeline, success by task, throughput, staleness, stalls.

    Ends with 0 where the run is healthy, 1 where a process is dead or a stall is known, or no
    data process answers. Without a terminal it prints once; with --json and --watch, lines.

    Example: dart status runs/quickstart --once --json | jq .success
    """
    from dart_cli.status.watch import run_status

    config = _config_of(target, overrides)
    raise typer.Exit(asyncio.run(run_status(config, once=once, as_json=as_json, every_s=watch)))


@app.command("eval")
def evaluate(
    config_path: ConfigPath,
    overrides: Overrides = None,
    weights: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A published weight set, e.g. one of RUN/weights."),
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="PATH", help="A model as it comes, without the run's weights.")
    ] = "",
    episodes: Annotated[
        int,
        typer.Option(min=0, show_default=False, help="Episodes per mode; default eval.episodes."),
    ] = 0,
    mode: Annotated[
        Literal["sampled", "greedy", "both"], typer.Option(help="How actions are chosen.")
    ] = "both",
    tasks: Annotated[
        list[str] | None,
        typer.Option("--tasks", metavar="TASK", help="Play only this task; may be given again."),
    ] = None,
    keep_as: Annotated[
        str,
        typer.Option(metavar="NAME", help="Name of the result in RUN/eval; default its version."),
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as one line of JSON.")
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """Play held-out tasks, sampled and greedily; success by task with 95 % intervals.

    Plays the newest weights of the run, or the model as it comes where there are none. Needs no
    other process. The result is kept in RUN/eval.

    Example: dart eval configs/quickstart.toml --episodes 200 --mode greedy
    """
    changes = list(overrides or [])
    if model:
        changes.append(f"model.path={model}")
    if episodes:
        changes.append(f"eval.episodes={episodes}")
    config = _load(config_path, changes, "eval")
    if dry_run:
        _tell(config, "eval")
        return
    from dart_cli.evaluate import run_eval

    run_eval(
        config,
        weights=weights,
        as_it_comes=bool(model),
        modes=("sampled", "greedy") if mode == "both" else (mode,),
        tasks=tasks or [],
        name=keep_as,
        as_json=as_json,
    )


bench = typer.Typer(no_args_is_help=True, help="Measure schedules against each other.")
app.add_typer(bench, name="bench")


@bench.callback()
def _bench() -> None:
    """Measure schedules against each other."""


@bench.command()
def efficiency(
    config_path: ConfigPath,
    overrides: Overrides = None,
    arms: Annotated[
        str, typer.Option(metavar="NAMES", help="all, or some of them, separated by commas.")
    ] = "all",
    seconds: Annotated[
        float, typer.Option(min=5, help="Seconds each run is watched, after it has warmed up.")
    ] = 60.0,
    envs: Annotated[int, typer.Option(min=1, help="Environment slots, over all processes.")] = 64,
    workers: Annotated[int, typer.Option(min=1, help="Rollout workers.")] = 4,
    profile: Annotated[
        str, typer.Option(help="How slow the environments are: osworld, browser, instant.")
    ] = "osworld",
    faults: Annotated[
        Literal["none", "injected", "both"],
        typer.Option(help="Broken and slow environments, killed rollout workers."),
    ] = "none",
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each arm; medians are told.")] = 1,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Keep the JSON here.")] = None,
    pictures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Draw a timeline of each arm here.")
    ] = None,
) -> None:
    """Compare coupled, partial and decoupled scheduling: utilisation, actions/min, lost work.

    Processes, bus and database are real; GUIs, GPUs and the optimizer take simulated time. The
    last line of stdout is JSON. Arms: coupled-batch, coupled-task, oversample, april, all-at-once,
    rolling.

    Example: dart bench efficiency configs/efficiency.toml --arms coupled-batch,rolling
    """
    _load(config_path, overrides, None)
    from dart_cli.bench.arms import pick
    from dart_cli.bench.efficiency import Options, run_efficiency

    run_efficiency(
        Options(
            config_path=config_path,
            overrides=tuple(overrides or ()),
            arms=tuple(pick(arms)),
            seconds=seconds,
            envs=envs,
            workers=workers,
            profile=profile,
            faults=faults,
            repeats=repeats,
            out=out,
            pictures=pictures,
        )
    )


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder; made if need be.")],
) -> None:
    """Write a starter configuration: every key at its default, with its meaning as a comment.

    Nothing is overwritten.

    Example: dart init my-run && dart up my-run/dart.toml
    """
    from dart_cli.starter import write_starter

    path = write_starter(folder)
    typer.echo(f"wrote {path}; edit it, then: dart up {path}")


@app.command()
def keys(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder; made if need be.")],
) -> None:
    """Make the CURVE keys of a run over tcp; copy the folder to every host and set bus.keys.

    Whoever has the file can take part in the run. Nothing is overwritten.

    Example: dart keys keys && scp -pr keys gpu-box:
    """
    from bus.endpoints import make_private_dir, write_key_pair
    from dart_cli.config import KEY_FILE

    write_key_pair(make_private_dir(folder) / KEY_FILE)
    typer.echo(f'wrote {folder / KEY_FILE}; set bus.keys = "{folder}" on every host')
