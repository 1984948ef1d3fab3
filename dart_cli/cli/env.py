"""`dart env`: the process by its configuration, and the tools that try a suite of tasks.

run     the process; its name may be left out
check   probe agents over a suite: false passes, broken evaluators, resets that do not repeat
play    one task by hand, by its solution, or by random clicks; a film of it
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dart_cli.cli.options import (
    ConfigPath,
    Force,
    ProcessOrTool,
    WorkerOption,
    check_out,
    load_checked,
    print_dry_run,
)
from dart_cli.runtime.options import DryRun, EnvOptions, Overrides, read_options

if TYPE_CHECKING:
    import asyncio

    from dart_cli.evaluation.suite_check.agents import Probe


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

    raise typer.Exit(run_role("env", config, play, worker=worker, force=force))


SuiteName = Annotated[
    str,
    typer.Argument(
        metavar="SUITE", help="mini, desk, miniwob, ..., package.module:Suite or file.py:Suite."
    ),
]


@env.command()
def check(
    suite: SuiteName,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--task",
            metavar="PATTERN",
            help="Only these: an id, a glob such as mini/popup*, !GLOB for all others; may be given again.",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Instances of each task: seeds 0, 1, ...")] = 3,
    probes: Annotated[
        str,
        typer.Option(
            metavar="NAMES", help="all, or some of nothing,done,fail,random,oracle with commas."
        ),
    ] = "all",
    options: EnvOptions = None,
    slots: Annotated[
        int,
        typer.Option(
            min=1,
            help="Environments at once; with more than one, the times include waiting for the CPU.",
        ),
    ] = 1,
    isolate: Annotated[
        bool, typer.Option("--isolate", help="Each environment in a process of its own.")
    ] = False,
    slow_step: Annotated[
        float, typer.Option(metavar="SECONDS", help="Slow: the steps' 95th percentile above this.")
    ] = 1.0,
    slow_reset: Annotated[
        float, typer.Option(metavar="SECONDS", help="Slow: the resets' 95th percentile above this.")
    ] = 10.0,
    guessable: Annotated[
        float,
        typer.Option(
            metavar="SHARE", help="Guessable: random clicks pass more than this, 95 % sure."
        ),
    ] = 0.2,
    classify: Annotated[
        bool,
        typer.Option(
            "--classify", help="Play nothing: what the tasks need, by reading them (osworld)."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as one line of JSON.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep the report here as JSON.", callback=check_out),
    ] = None,
) -> None:
    """Probe a suite: does anything pass without being done, break, or not repeat?

    Five agents play each task and seed: one waits until the steps are used up, one says done at
    once, one says fail at once, one clicks at random, and the environment's own solution. Ends
    with 1 where a task has to be fixed: it passes by waiting or by a claim, it passes at reset,
    its environment or evaluator breaks, a seed does not repeat its first screen and
    instruction, its solution fails, or a pass has a smaller reward than a failure. Tasks that
    are slow, guessable by random clicks, or unproven (without a solution, and never passed by
    random clicks) are only reported.

    Example: dart env check miniwob --task 'miniwob/click-*' --seeds 5 --out probes.json

    Example: dart env check osworld:OSWorld --classify
    """
    from dart_cli.evaluation.suite_check.findings import Bounds
    from dart_cli.evaluation.suite_check.report import CheckOptions, run_check

    if classify:
        from dart_cli.evaluation.suite_check.needs import run_classify

        raise typer.Exit(run_classify(suite, tasks or [], as_json=as_json, out=out))
    chosen = CheckOptions(
        suite,
        tasks or [],
        seeds,
        read_options(options),
        _probes(probes),
        slots,
        Bounds(step_s=slow_step, reset_s=slow_reset, guessable=guessable),
        isolated=isolate,
    )
    raise typer.Exit(run_check(chosen, as_json=as_json, out=out))


def _probes(names: str) -> tuple[Probe, ...]:
    from bus.errors import UserError
    from dart_cli.evaluation.suite_check.agents import PROBES

    if names == "all":
        return PROBES
    chosen = [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in PROBES:
            raise UserError(f"--probes {name!r}: there are {', '.join(PROBES)}")
    return tuple(probe for probe in PROBES if probe in chosen)


@env.command()
def play(
    suite: SuiteName,
    task: Annotated[
        str, typer.Argument(metavar="TASK", help="Its id; the suite's name may be left out.")
    ],
    seed: Annotated[int, typer.Option(min=0, help="Which instance.")] = 0,
    solution: Annotated[
        bool, typer.Option("--solution", help="The environment's own solution plays.")
    ] = False,
    random: Annotated[bool, typer.Option("--random", help="Random clicks play.")] = False,
    options: EnvOptions = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Keep a film: a strip (.png) or moving (.gif).",
            callback=check_out,
        ),
    ] = None,
) -> None:
    """Play one task and see its outcome: by hand, by its solution, or by random clicks.

    By hand, lines such as `click 84 60`, `type hello`, `key ctrl+s`, `done` are read from the
    terminal or a pipe, in pixels of the screenshot; `help` lists them. The newest screenshot is
    always in one file, for a viewer that reloads it. Ends with 1 where the verdict is invalid, or
    the solution does not pass.

    Example: dart env play mini popup --seed 7 --solution --out film.png
    """
    from bus.errors import UserError
    from dart_cli.evaluation.manual.session import Player, PlayOptions, run_play

    if solution and random:
        raise UserError("--solution and --random are two players: choose one")
    player: Player = "solution" if solution else "random" if random else "person"
    chosen = PlayOptions(suite, task, seed, player, read_options(options), out)
    raise typer.Exit(run_play(chosen))
