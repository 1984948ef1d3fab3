"""The command line: `dart` itself, and the commands rollout, train, up and status.

    rollout, train   each starts one process of a run, as `env` (env.py) and `data` (data.py) do
    up               starts all processes of a run
    status           shows what they do and wait for
    main             runs a command line; an error is one line and an exit code

Each command checks its configuration and then starts one part, which is imported late: only the standard
library and typer are imported here, so that `dart --help` answers at once. The other commands are in modules
of their names, or in tools.py.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
import typer.core

from bus.errors import DartError, UserError, cure_of, first_line, is_out_of_memory
from dart_cli.cli.data import data
from dart_cli.cli.env import env
from dart_cli.cli.evaluate import evaluate
from dart_cli.cli.explore import explore
from dart_cli.cli.model import model
from dart_cli.cli.options import (
    ConfigPath,
    Force,
    RunTarget,
    SmokeTest,
    SmokeTestMinutes,
    WorkerOption,
    config_of,
    load_checked,
    print_dry_run,
    refuse_beside,
    refuse_other,
)
from dart_cli.cli.serve import serving
from dart_cli.cli.tools import tools
from dart_cli.cli.tune import tuning
from dart_cli.runtime.options import DryRun, Overrides
from dart_cli.runtime.streams import keep_going, results_written, say_error, take_streams

if TYPE_CHECKING:
    import asyncio

    from dart_cli.config.schema import Config

COLLECT_EVERY = 20_000
"""Allocations after which Python collects garbage. With its default of 700, the collector takes a sixth of
the time in which torch and transformers load."""

_UsageError: Any = typer.BadParameter.__base__  # of click, which typer imports or has a copy of


@contextmanager
def _in_one_line() -> Iterator[None]:
    """Raise typer's usage errors as UserError, which is printed in one line instead of a box of five."""
    try:
        yield
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # its text is the help page
            raise
        page = f"{error.ctx.command_path} --help" if error.ctx else "dart --help"
        text = error.format_message().replace("Value error, ", "").rstrip(".")
        raise UserError(f"{text}; see `{page}`") from None


PANELS = {
    "Run": ("up", "data", "train", "rollout", "env", "serve"),
    "Look": ("status", "view", "doctor"),
    "Evaluate": ("eval",),
    "Make": ("init", "tune", "export", "model", "explore"),
}
"""The commands of the first help page, by purpose. `keys` is not on it."""


class _Commands(typer.core.TyperGroup):
    """The commands of `dart`, listed by purpose; typer would list groups such as `env` and `data` last."""

    def make_context(self, *arguments: Any, **extra: Any) -> Any:
        """Read the options of `dart` itself."""
        with _in_one_line():
            return super().make_context(*arguments, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Read the arguments of the command, and run it."""
        with _in_one_line():
            return super().invoke(ctx)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the commands in the order of the help page."""
        in_panels = [name for names in PANELS.values() for name in names]
        others = [name for name in super().list_commands(ctx) if name not in in_panels]
        return [*in_panels, *others]


app = typer.Typer(
    name="dart",
    cls=_Commands,
    help="Trains vision-language models to use graphical interfaces, by reinforcement learning in "
    "asynchronous processes.\n\n"
    "All processes at once:   dart up configs/quickstart.toml\n\n"
    "Or one by one, in any order:   dart data C.toml;  dart train C.toml;  dart rollout C.toml;  "
    "dart env C.toml",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line.

    An error is printed as one line on stderr, and the process ends with the exit code of its class. A path
    that the system refuses counts as a mistake of the user, wherever it occurs. Running out of memory
    while a model computes is one line, too.
    """
    take_streams()
    gc.set_threshold(COLLECT_EVERY)
    code: Any = 0
    try:
        _command()(arguments, prog_name="dart")
    except SystemExit as end:
        code = end.code or 0
    except DartError as error:
        say_error(str(error))
        code = error.exit_code
    except OSError as error:
        if error.filename is None:
            raise
        fix = cure_of(error, "name another path")
        say_error(f"{error.filename}: {error.strerror}; {fix}")
        code = 2
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        say_error(
            f"out of memory: {first_line(error)}; end other programs that use it (nvidia-smi lists those "
            "on a GPU), or lower rollout.max_batch or train.pack_tokens"
        )
        code = 1
    sys.exit(results_written(code))


@cache
def _command() -> Any:
    """Return the command that typer makes of `app`; it is made once in a process."""
    root: Any = typer.main.get_command(app)
    for panel, names in PANELS.items():
        for name in names:
            root.commands[name].rich_help_panel = panel
    _unwrap(root)
    return root


def _unwrap(command: Any) -> None:
    """Remove the line breaks of the source from a help text; the terminal breaks lines itself."""
    paragraphs = (command.help or "").split("\n\n")
    command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    for subcommand in getattr(command, "commands", {}).values():
        _unwrap(subcommand)


def _version(is_set: bool) -> None:
    if is_set:
        from dart_cli import __version__

        typer.echo(f"dart {__version__}")
        raise typer.Exit


@app.callback()
def _dart(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


app.add_typer(data, name="data")
app.add_typer(env, name="env")
app.add_typer(evaluate, name="eval")
app.add_typer(explore, name="explore")
app.add_typer(model, name="model")
app.add_typer(serving)
app.add_typer(tuning)
app.add_typer(tools)


# --- one process ----------------------------------------------------------------------------


@app.command()
def rollout(
    config_path: ConfigPath,
    overrides: Overrides = None,
    worker: WorkerOption = "",
    force: Force = False,
    dry_run: DryRun = False,
) -> None:
    """Run a rollout worker: answer environments with actions, and take new weights meanwhile.

    Start one for each GPU (or group of GPUs). Workers may be started and stopped at any time.

    Example: CUDA_VISIBLE_DEVICES=2 dart rollout configs/ui-tars-7b.toml
    """
    config = load_checked(config_path, overrides, "rollout")
    if dry_run:
        print_dry_run(config, "rollout", force=force)
        return
    from dart_cli.runtime.role import run_role

    async def serve(name: str, stop: asyncio.Event) -> None:
        from dart_cli.rollout.worker import run

        await run(config, name, stop)

    raise typer.Exit(
        run_role(
            "rollout",
            config,
            serve,
            worker=worker,
            threads=config.rollout.threads,
            force=force,
            overrides=overrides or [],
        )
    )


@app.command()
def train(
    config_path: ConfigPath,
    overrides: Overrides = None,
    force: Force = False,
    dry_run: DryRun = False,
) -> None:
    """Run the trainer: update on batches, publish new weights, resume from the last checkpoint.

    A run has one.

    Example: dart train configs/quickstart.toml --set train.lr=1e-4
    """
    config = load_checked(config_path, overrides, "train")
    if dry_run:
        print_dry_run(config, "train", force=force)
        return
    from dart_cli.runtime.role import grow_segments, run_role
    from dart_cli.train.ranks.watch import rank_of

    if config.train.device != "cpu":
        grow_segments()  # here, so that it applies to all ranks, also those of torchrun
    if rank_of():
        from dart_cli.train.ranks.follower import serve

        raise typer.Exit(serve(config))
    refuse_other(config, force=force)

    async def learn(_name: str, stop: asyncio.Event) -> None:
        from dart_cli.train.process import run

        await run(config, stop)

    threads = config.train.threads
    raise typer.Exit(
        run_role("train", config, learn, threads=threads, force=force, overrides=overrides or [])
    )


# --- the whole run --------------------------------------------------------------------------


@app.command()
def up(
    config_path: ConfigPath,
    overrides: Overrides = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Move an older run directory aside and begin anew.")
    ] = False,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS|local",
            help="Run the processes on the Ray cluster at HOST:PORT; this host must be one of its nodes.",
            show_default=False,
        ),
    ] = None,
    force: Force = False,
    dry_run: DryRun = False,
    smoke_test: SmokeTest = False,
    smoke_test_minutes: SmokeTestMinutes = None,
) -> None:
    """Run everything: start all processes of a run, show a live page, end them together.

    The processes are the data service, the trainer, rollout workers and environments. A run that was stopped
    continues where it was. Ctrl-C ends all processes cleanly. With --ray, each process runs where the cluster
    has room for it; `--ray local` starts Ray on this host, to try it.

    Example: dart up configs/quickstart.toml --set train.lr=0 --fresh

    Example: dart up configs/ui-tars-7b.toml --smoke-test
    """
    if smoke_test or smoke_test_minutes is not None:
        others = {"--fresh": fresh, "--ray": ray is not None, "--force": force}
        refuse_beside("--smoke-test", others | {"--dry-run": dry_run})
        from dart_cli.smoke_test.run_smoke_test import run_smoke_test

        raise typer.Exit(run_smoke_test(config_path, overrides or [], smoke_test_minutes))
    if ray is not None:
        from dart_cli.cluster.connection import refuse_ray

        refuse_ray(ray)
    # The nodes of a cluster have other devices than this host; each process checks its own.
    config = load_checked(config_path, overrides, None if ray is None else "data")
    if ray is not None and config.up.serve:
        from bus.errors import ConfigError

        raise ConfigError(
            "up.serve cannot be true with --ray: agents would not know the host of the endpoint; leave --ray "
            "out (docs/serve.md)"
        )
    if dry_run:
        if ray is not None:
            print_dry_run(config, "data", {"ray": _demands(config)}, force=force, fresh=fresh)
        else:
            print_dry_run(config, None, force=force, fresh=fresh)
        return
    from dart_cli.cli.up import run_up

    raise typer.Exit(
        run_up(config, config_path, overrides or [], fresh=fresh, force=force, ray=ray or "")
    )


def _demands(config: Config) -> str:
    """Return the resources that the run needs of a Ray cluster, in words."""
    from dart_cli.cluster.demands import summary

    return summary(config)


@app.command()
def status(
    target: RunTarget = None,
    overrides: Overrides = None,
    once: Annotated[bool, typer.Option("--once", help="Print the page once and exit.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the snapshot as one line of JSON.")
    ] = False,
    watch: Annotated[
        float,
        typer.Option(
            "--watch", metavar="SECONDS", min=0.2, help="Seconds between two updates of the page."
        ),
    ] = 2.0,
    stacks: Annotated[
        bool,
        typer.Option(
            "--stacks", help="Print the stacks of the run's processes on this host, and exit."
        ),
    ] = False,
    prometheus: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            min=0,
            max=65535,
            show_default=False,
            help="Serve metrics for Prometheus on loopback instead; 0 takes any port.",
        ),
    ] = None,
) -> None:
    """Show a run live: its progress, what needs attention, success by task, processes, numbers.

    The live page leaves out parts for which the window has no room, and says so; --once prints all of it. If
    the data service does not answer, the page shows its last report. The live page waits for a run that has
    not begun. Without a terminal the page is printed once; with --json and --watch, as one line each time.

    The command ends with 0 if the run is healthy or over, and with 1 if a process is dead, if there is a
    stall, or if the run is not over and the data service does not answer.

    Example: dart status runs/quickstart --once --json | jq .success
    """
    import asyncio

    from dart_cli.status.watch import run_status

    if target is None:
        from dart_cli.inspection.run_lookup import find_run

        target = find_run(None, overrides or [])
    config = config_of(target, overrides)
    if stacks:
        from dart_cli.status.host_processes import run_stacks

        raise typer.Exit(run_stacks(config.run.dir, typer.echo))
    if prometheus is not None:
        from dart_cli.status.prometheus import run_prometheus

        keep_going()
        serving = run_prometheus(config, prometheus, every_s=watch, say=typer.echo)
        raise typer.Exit(asyncio.run(serving))
    raise typer.Exit(asyncio.run(run_status(config, once=once, as_json=as_json, every_s=watch)))
