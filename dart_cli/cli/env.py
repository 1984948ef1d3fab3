"""`dart env`: the process by its configuration, and the tools that try a suite of tasks.

run     the process; its name may be left out
check   probe agents over a suite: false passes, broken evaluators, resets that do not repeat
play    one task by hand, by its solution, or by random clicks; a film of it
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dart_cli.cli.options import (
    ConfigPath,
    Force,
    ProcessOrTool,
    WorkerOption,
    load_checked,
    print_dry_run,
)
from dart_cli.runtime.options import DryRun, Overrides, command_of
from dart_cli.suite_check import CheckOptions, PlayOptions

if TYPE_CHECKING:
    import asyncio


class _EnvGroup(ProcessOrTool):
    """`dart env CONFIG` starts the process; `dart env COMMAND ...` is one of the tools."""

    verb, process = "env", "run"


env = typer.Typer(
    cls=_EnvGroup, no_args_is_help=True, subcommand_metavar="CONFIG | COMMAND [ARGS]..."
)


@env.callback()
def _env() -> None:
    """Play tasks: the process of a run, and tools that try a suite before training on it.

    `dart env CONFIG` starts the process that leases tasks, asks a rollout worker at each step and
    hands trajectories in; `dart env CONFIG --help` shows its options. With a command in front it is
    a tool, which needs no run. Write a configuration file that is named like a command as ./check.

    Example: dart env configs/quickstart.toml --slots 32

    Example: dart env check mini --task 'mini/popup*' --seeds 20
    """


@env.command("run")
def run_(
    config_path: ConfigPath,
    overrides: Overrides = None,
    worker: WorkerOption = "",
    slots: Annotated[
        int | None,
        typer.Option(
            min=1, show_default=False, help="Environments played at once; default env.slots."
        ),
    ] = None,
    force: Force = False,
    dry_run: DryRun = False,
) -> None:
    """Play tasks: lease one, ask a rollout worker at each step, hand the trajectory in.

    Start as many as the machine has room for; processes may come and go at any time. The word `run`
    may be left out.

    Example: dart env configs/quickstart.toml --slots 32
    """
    config = load_checked(config_path, overrides, "env")
    if slots is not None:
        config = config.model_copy(update={"env": config.env.model_copy(update={"slots": slots})})
    if dry_run:
        print_dry_run(config, "env", force=force)
        return
    from dart_cli.runtime.role import run_role

    async def play(name: str, stop: asyncio.Event) -> None:
        from dart_cli.env.worker import run

        await run(config, name, config.env.slots, stop)

    raise typer.Exit(
        run_role("env", config, play, worker=worker, force=force, overrides=overrides or [])
    )


@env.command()
@command_of(CheckOptions)
def check(options: CheckOptions) -> None:
    """Probe a suite: does anything pass without being done, break, or not repeat?

    Five agents play each task and seed: one waits until the steps are used up, one says done at
    once, one says fail at once, one clicks at random, and the environment's own solution. Ends
    with 1 where a task has to be fixed: it passes by waiting or by a claim, it passes at reset,
    its environment or evaluator breaks, a seed does not repeat its first screen and
    instruction, its solution fails, or a pass has a smaller reward than a failure. Tasks that
    are slow, guessable by random clicks, or unproven (without a solution, and never passed by
    random clicks) are only reported.

    The first failure is said at once. A task whose first episode breaks is played no further. Ctrl-C,
    SIGTERM and SIGHUP print what was played so far.

    Example: dart env check miniwob --task 'miniwob/click-*' --seeds 5 --out probes.json

    Example: dart env check osworld:OSWorld --classify
    """
    from dart_cli.suite_check.check_suite import run_check

    raise typer.Exit(run_check(options))


@env.command()
@command_of(PlayOptions)
def play(options: PlayOptions) -> None:
    """Play one task and see its outcome: by hand, by its solution, or by random clicks.

    By hand, lines such as `click(84,60)`, `type(hello)`, `key(ctrl+s)`, `done()` are read from the
    terminal or a pipe, the compact language in pixels of the screenshot; `help` lists its calls. The
    newest screenshot is always in one file, for a viewer that reloads it. Ends with 1 where the
    verdict is invalid, or the solution does not pass.

    Example: dart env play mini popup --seed 7 --solution --out film.png
    """
    from dart_cli.suite_check.play_by_hand import run_play

    raise typer.Exit(run_play(options))
