"""`dart env`: the environment process of a run, and the tools that try a suite of tasks.

run     the process; its name may be left out
check   lets probe agents play a suite, to find false passes, broken evaluators and resets that do not repeat
play    plays one task by hand, by its solution or by random clicks, and draws a film of it
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

    command, process = "env", "run"


env = typer.Typer(
    cls=_EnvGroup, no_args_is_help=True, subcommand_metavar="CONFIG | COMMAND [ARGS]..."
)


@env.callback()
def _env() -> None:
    """Run an environment process; try a suite of tasks before training on it.

    `dart env CONFIG` starts an environment process, which leases tasks, asks a rollout worker at each step
    and submits trajectories; `dart env CONFIG --help` shows its options. The commands below are tools, which
    need no run. If your configuration file has the name of a command, write it as ./check.

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
            min=1, show_default=False, help="Environments that play at once; by default env.slots."
        ),
    ] = None,
    force: Force = False,
    dry_run: DryRun = False,
) -> None:
    """Run an environment process: lease tasks, play them with a rollout worker, submit trajectories.

    Start as many as the machine has room for; they may be started and stopped at any time. The word `run` may
    be left out.

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
    """Check a suite: find tasks that pass without being solved, that break, or that do not repeat.

    Five agents play each task and seed: one waits until the steps are used up, one declares the task done at
    once, one declares it impossible at once, one clicks at random, and one plays the environment's solution.
    The command ends with 1 if a task has to be fixed: it passes by waiting, by a claim or at reset; its
    environment or evaluator breaks; a seed does not repeat its first screen and instruction; its solution
    fails; or a pass has a smaller reward than a failure. Tasks that are slow, that random clicks can solve,
    or that are unproven (there is no solution, and random clicks never passed) are only reported.

    The first failure is printed at once. A task whose first episode breaks is not played further. Ctrl-C,
    SIGTERM and SIGHUP end the check and print its results so far.

    Example: dart env check miniwob --task 'miniwob/click-*' --seeds 5 --out probes.json

    Example: dart env check osworld:OSWorld --classify
    """
    from dart_cli.suite_check.check_suite import run_check

    raise typer.Exit(run_check(options))


@env.command()
@command_of(PlayOptions)
def play(options: PlayOptions) -> None:
    """Play one task by hand, by its solution or by random clicks, and see its outcome.

    To play by hand, write lines such as `click(84,60)`, `type(hello)`, `key(ctrl+s)` or `done()`, in the
    terminal or through a pipe; coordinates are pixels of the screenshot, and `help` lists all calls. The
    newest screenshot is always in the same file, for a viewer that reloads it. The command ends with 1 if the
    verdict is invalid or the solution does not pass.

    Example: dart env play mini popup --seed 7 --solution --out film.png
    """
    from dart_cli.suite_check.play_by_hand import run_play

    raise typer.Exit(run_play(options))
