"""The verbs of `dart`. Each checks its configuration whole, then starts one part, imported late.

    env, rollout, data, train   one process of a run, started by hand in any order
    env check, play             try a suite of tasks
    data ls, show, stats, why   look into a run; data collect, export, import fill its pool
    up, status, view            all of them at once; what they do and wait for; web pages
    eval, init, keys            held-out success; a starter configuration; keys for tcp
    doctor                      whether this host has what a run needs
    bench                       how well a machine's time is used, against baselines

Only the standard library and typer are imported here, so that `dart --help` answers at once.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
import typer.core

from bus.errors import DartError
from dart_cli.cli.data import data
from dart_cli.cli.env import env
from dart_cli.cli.options import (
    ConfigPath,
    DryRun,
    Overrides,
    WorkerOption,
    check_out,
    config_of,
    load_checked,
    tell,
)


class _Verbs(typer.core.TyperGroup):
    """typer lists groups last; `env` and `data` stand beside the other processes."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The verbs in the order in which one reads of them."""
        names = [name for name in super().list_commands(ctx) if name not in ("env", "data")]
        names.insert(names.index("train"), "data")
        return ["env", *names]


app = typer.Typer(
    name="dart",
    cls=_Verbs,
    help="Reinforcement learning for vision-language GUI agents, in decoupled processes.\n\n"
    "Everything at once:   dart up configs/quickstart.toml\n\n"
    "By hand, any order:   dart data C.toml;  dart train C.toml;  dart rollout C.toml;  "
    "dart env C.toml",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line; an error is one line on stderr and its class's exit code.

    A path that the system refuses is the user's mistake, wherever it shows.
    """
    try:
        app(arguments)
    except DartError as error:
        _say_error(str(error))
        sys.exit(error.exit_code)
    except OSError as error:
        if error.filename is None:
            raise
        _say_error(f"{error.filename}: {error.strerror}; name another path")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


def _say_error(text: str) -> None:
    sys.stderr.write(f"error: {' '.join(text.split())}\n")


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


app.add_typer(data, name="data")
app.add_typer(env, name="env")


# --- one process ----------------------------------------------------------------------------


@app.command()
def rollout(
    config_path: ConfigPath,
    overrides: Overrides = None,
    worker: WorkerOption = "",
    dry_run: DryRun = False,
) -> None:
    """Serve the policy: answer environments with actions, take new weights while serving.

    One per GPU (or group of GPUs); they may come and go at any time.

    Example: CUDA_VISIBLE_DEVICES=2 dart rollout configs/ui-tars-7b.toml
    """
    config = load_checked(config_path, overrides, "rollout")
    if dry_run:
        tell(config, "rollout")
        return
    from dart_cli.runtime.role import run_role

    async def serve(name: str, stop: asyncio.Event) -> None:
        from dart_cli.rollout.worker import run

        await run(config, name, stop)

    threads = config.rollout.threads
    raise typer.Exit(run_role("rollout", config, serve, worker=worker, threads=threads))


@app.command()
def train(config_path: ConfigPath, overrides: Overrides = None, dry_run: DryRun = False) -> None:
    """Train: take a batch, update, publish the new weights; resume from the last checkpoint.

    One per run.

    Example: dart train configs/quickstart.toml --set train.lr=1e-4
    """
    config = load_checked(config_path, overrides, "train")
    if dry_run:
        tell(config, "train")
        return
    from dart_cli.runtime.role import run_role

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
    config = load_checked(config_path, overrides, None)
    if dry_run:
        tell(config, None)
        return
    from dart_cli.cli.up import run_up

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
    stacks: Annotated[
        bool,
        typer.Option("--stacks", help="Print what every process on this host is doing, and end."),
    ] = False,
    prometheus: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            min=0,
            max=65535,
            show_default=False,
            help="Serve metrics for Prometheus on loopback instead; 0 for any port.",
        ),
    ] = None,
) -> None:
    """Show the run live: processes, pipeline, success by task, throughput, staleness, stalls.

    Ends with 0 where the run is healthy or over, 1 where a process is dead or a stall is known, or
    no data process answers. The live page waits for a run that has not begun. Without
    a terminal it prints once; with --json and --watch, lines.

    Example: dart status runs/quickstart --once --json | jq .success
    """
    from dart_cli.status.watch import run_status

    config = config_of(target, overrides)
    if stacks:
        from dart_cli.status.stacks import run_stacks

        raise typer.Exit(run_stacks(config.run.dir, typer.echo))
    if prometheus is not None:
        from dart_cli.status.prometheus import run_prometheus

        serving = run_prometheus(config, prometheus, every_s=watch, say=typer.echo)
        raise typer.Exit(asyncio.run(serving))
    raise typer.Exit(asyncio.run(run_status(config, once=once, as_json=as_json, every_s=watch)))


@app.command()
def view(
    target: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG_OR_RUN",
            help="TOML file, run directory, or a folder of runs; default the run below runs/ that "
            "was written to last.",
            show_default=False,
        ),
    ] = None,
    overrides: Overrides = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, show_default=False, help="0 for any; default the first from 8470 on."
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(help="Address to serve on; beyond loopback with a token, which is printed."),
    ] = "127.0.0.1",
    token: Annotated[
        bool,
        typer.Option("--token", help="Ask for a token on loopback, too: others share the machine."),
    ] = False,
    export: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.html", help="Write one self-contained page instead of serving any."
        ),
    ] = None,
    trajectory: Annotated[
        str, typer.Option(metavar="ID", help="--export: the page of this one, not of the run.")
    ] = "",
) -> None:
    """Serve pages to look into a run: curves, tasks, groups, trajectories as filmstrips.

    Also of a live run, which is not disturbed. On loopback unless --host says
    otherwise; to a machine far away rather make a tunnel:
    ssh -L 8470:localhost:8470 HOST.

    Example: dart view runs/quickstart

    Example: dart view runs/quickstart --export film.html --trajectory g000001-00
    """
    from bus.errors import ConfigError, MissingPartError

    if trajectory and export is None:
        raise ConfigError("--trajectory chooses what --export writes: add --export FILE.html")
    from dart_cli.inspection.find import find_run

    try:
        from dart_cli.view.export import write_file
        from dart_cli.view.server import run_view, runs_in
    except ModuleNotFoundError as error:
        if error.name not in ("jinja2", "markupsafe", "starlette", "uvicorn"):
            raise
        raise MissingPartError(
            f"`dart view` needs the package {error.name}: pip install 'dart-cli[view]'"
        ) from None
    if export is None:
        several = target is not None and target.is_dir() and bool(runs_in(target))
        place = (
            target if target and several and not overrides else find_run(target, overrides or [])
        )
        run_view(place, host=host, port=port, guarded=token)
        return
    run_dir = find_run(target, overrides or [])
    size = write_file(run_dir, export, trajectory)
    typer.echo(f"{export}: {size / 2**20:.1f} MiB, open it in a browser")


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
        int | None,
        typer.Option(min=1, show_default=False, help="Episodes per mode; default eval.episodes."),
    ] = None,
    mode: Annotated[
        Literal["sampled", "greedy", "both"], typer.Option(help="How actions are chosen.")
    ] = "both",
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--tasks",
            metavar="TASK",
            help="Play only this task, or those of a pattern: mini/popup*, !mini/click; may be "
            "given again.",
        ),
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
    from bus.errors import ConfigError

    if model and weights is not None:
        raise ConfigError("--model plays a model without the run's weights: leave out --weights")
    changes = list(overrides or [])
    if model:
        changes.append(f"model.path={model}")
    if episodes is not None:
        changes.append(f"eval.episodes={episodes}")
    config = load_checked(config_path, changes, "eval")
    from dart_cli.evaluation.held_out import plan_eval, run_eval

    modes: tuple[Literal["sampled", "greedy"], ...] = (
        ("sampled", "greedy") if mode == "both" else (mode,)
    )
    chosen, as_it_comes = tasks or [], bool(model)
    if dry_run:
        plan = plan_eval(
            config,
            weights=weights,
            as_it_comes=as_it_comes,
            modes=modes,
            tasks=chosen,
            name=keep_as,
        )
        tell(config, "eval", plan)
        return
    run_eval(
        config,
        weights=weights,
        as_it_comes=as_it_comes,
        modes=modes,
        tasks=chosen,
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
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep the JSON here.", callback=check_out)
    ] = None,
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
    load_checked(config_path, overrides, None)
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
def doctor(
    target: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG_RUN_OR_MODEL",
            help="TOML file, run directory or model folder; without one the host alone is examined.",
            show_default=False,
        ),
    ] = None,
    overrides: Overrides = None,
    play: Annotated[
        bool, typer.Option("--play", help="Play one episode end to end, in this process.")
    ] = False,
    parity: Annotated[
        bool,
        typer.Option(
            "--parity", help="Compare the log-probabilities of engine and trainer, in this process."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the findings as one line of JSON.")
    ] = False,
) -> None:
    """Examine this host for a run: packages, GPUs, programs, limits, disk, configuration, tasks.

    Each line is ok, a warning or an error with its cure. Ends with 0 where a run can work, else 1.

    Example: dart doctor configs/quickstart.toml --play

    Example: dart doctor models/ui-tars --parity --set model.dtype=bfloat16
    """
    from bus.errors import ConfigError
    from dart_cli.config.models import is_model_folder
    from dart_cli.doctor.examine import run_doctor

    if (play or parity) and target is None:
        asked = "--play" if play else "--parity"
        raise ConfigError(f"{asked} needs to know what: add the TOML file of a run")
    if play and target is not None and is_model_folder(target):
        raise ConfigError(f"--play needs the tasks of a TOML file, {target} is a model folder")
    raise typer.Exit(
        run_doctor(target, overrides or [], played=play, compared=parity, in_json=as_json)
    )


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder; made if need be.")],
) -> None:
    """Write a starter configuration: every key at its default, with its meaning as a comment.

    Nothing is overwritten.

    Example: dart init my-run && dart up my-run/dart.toml
    """
    from dart_cli.config.template import write_starter

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
    from dart_cli.config.endpoints import KEY_FILE

    write_key_pair(make_private_dir(folder) / KEY_FILE)
    typer.echo(f'wrote {folder / KEY_FILE}; set bus.keys = "{folder}" on every host')
