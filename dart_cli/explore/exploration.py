"""The command `dart explore`: it checks its options, explores, and prints a summary.

run_explore   the command itself; returns the exit code
env_of        the settings of the environments that the options name
with_tree     the settings with the accessibility tree requested, if the suite gives one
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bus.errors import ConfigError, TaskError
from dart_cli.config.load import load_config
from dart_cli.config.schema import EnvConfig, observed_kinds
from dart_cli.explore.choosing import DenyList, deny_list
from dart_cli.explore.explorer import Exploration, Plan, StartPoint, Stopped
from dart_cli.explore.graph import DATABASE, ExploreSettings, Graph, open_graph, read_graph
from dart_cli.explore.graph_statistics import summary
from dart_cli.explore.options import ExploreOptions
from dart_cli.player.episodes import env_of_suite, in_slots
from dart_cli.runtime.background import run_until_stopped
from dart_cli.runtime.options import read_options
from dart_cli.runtime.role import end_with_parent
from dart_cli.runtime.tables import page_table, progress
from dart_cli.runtime.waits import OpenWaits
from dart_cli.runtime.work_folder import refuse_foreign, refuse_other
from envs.contract.base import Task
from envs.contract.elements import Explorable
from envs.contract.registry import (
    MADE_OF,
    check_options,
    check_parts,
    load_suite,
    make_env,
    select_tasks,
)

MOST_WORDS = 6  # words of the deny list that are printed without --dry-run

ENDS: Mapping[Stopped, str] = {
    "steps": "the steps are used up; --steps N goes on",
    "frontier": "every action on every screen of the graph was tried",
    "no_way": "the untried actions were not reached again; other --seeds may reach more",
    "interrupted": "interrupted; the same command goes on",
}


def run_explore(options: ExploreOptions) -> int:
    """Explore, print a summary, and return the exit code.

    Raises UserError for options that cannot work, before anything starts, and EnvError if no episode begins.
    """
    env = env_of(options)
    tasks = _tasks(options, env)
    deny = deny_list(options.deny or (), options.allow or ())
    settings = _settings(options, env, tasks, deny)
    has_tree = _has_tree(env)
    check_parts(env.suite, env.options, [task.id for task in tasks], observed_kinds(env))
    refuse_foreign(options.out, settings)
    refuse_other(options.out, settings)
    before = 0
    if (options.out / DATABASE).exists():
        with read_graph(options.out) as graph:
            before = graph.steps
    console = Console(markup=False, highlight=False, stderr=not options.dry_run)
    for name, text in _describe(options, env, tasks, deny, before, has_tree=has_tree).items():
        console.print(f"{name + ':':<12} {text}", soft_wrap=True)
    if options.dry_run:
        console.print("valid; nothing was started")
        return 0
    end_with_parent()
    plan = Plan(
        starts=[
            StartPoint(task, seed, application_of(task, options.app))
            for seed in _instances(options)
            for task in tasks
        ],
        steps=options.steps,
        back_every=options.back_every,
        ranking=options.chooser,
        deny=deny,
        seed=options.seed,
    )

    def report(graph: Graph, reason: Stopped) -> None:
        totals = summary(graph)
        _print(console, totals, reason, options.out)
        sys.stdout.write(f"{json.dumps({**totals, 'stopped': reason, 'out': str(options.out)})}\n")

    with open_graph(options.out, settings) as graph:
        return _explore(graph, plan, options.slots, env, report)


def _explore(
    graph: Graph, plan: Plan, slots: int, env: EnvConfig, report: Callable[[Graph, Stopped], None]
) -> int:
    """Explore and report; return the exit code of a signal that stopped it, else 0."""
    waits = OpenWaits()
    with contextlib.ExitStack() as bars:
        left = max(0, plan.steps - graph.steps)
        advance = bars.enter_context(progress("exploring", left, "steps"))
        exploration = Exploration(graph, plan, lambda note: advance(1, note))
        numbers = iter(range(slots))
        exploring = in_slots(
            env,
            "explore",
            slots=min(slots, max(1, left)),
            work=lambda slot_env: exploration.explore(next(numbers), slot_env),
            waits=waits,
        )

        def report_stopped() -> None:
            bars.close()
            report(graph, "interrupted")

        if exit_code := run_until_stopped(exploring, waits, report_stopped):
            return exit_code
    report(graph, exploration.stop_reason or "steps")
    return 0


# --- the options, checked ----------------------------------------------------------------------


def env_of(options: ExploreOptions) -> EnvConfig:
    """Return the settings of the environments: of a suite, or of a run's configuration. Raises UserError."""
    path, prefix = Path(options.target), options.target.partition(":")[0]
    if path.suffix == ".toml" and prefix not in MADE_OF:  # web:FILE.toml is a suite
        if options.options:
            raise ConfigError(
                "--option belongs to a suite; change a TOML file with --set env.options"
            )
        env = load_config(path, options.overrides).env
    else:
        if options.overrides:
            raise ConfigError(
                f"--set {options.overrides[0]} changes a key of a TOML file; a suite has --option KEY=VALUE"
            )
        env = env_of_suite(options.target, read_options(options.options))
    if options.isolate:
        env = env.model_copy(update={"isolation": "process"})
    check_options(env.suite, env.options)
    return with_tree(env)


def with_tree(env: EnvConfig) -> EnvConfig:
    """Return the settings with the accessibility tree requested, if the suite gives one."""
    if "accessibility" not in getattr(load_suite(env.suite), "observes", ()):
        return env
    return env.model_copy(update={"observe": ["screenshot", "accessibility"]})


def _tasks(options: ExploreOptions, env: EnvConfig) -> list[Task]:
    """Return the tasks to start from. Raises TaskError if there are none, or several without a pattern."""
    patterns = list(options.tasks or env.tasks)
    tasks = select_tasks(env.suite, patterns)
    if not tasks:
        raise TaskError(f"suite {env.suite} has no task to start from")
    if not patterns and len(tasks) > 1:
        raise TaskError(
            f"suite {env.suite} has {len(tasks)} tasks to start from; choose with --task, e.g. "
            f"--task {tasks[0].id}, or --task '*' for all"
        )
    return tasks


def application_of(task: Task, app: str = "") -> str:
    """Return the application of a task: `app`, else the one that the suite names, else the task's id."""
    return app or str(task.params.get("application") or task.id)


def _instances(options: ExploreOptions) -> range:
    """Return the seeds of the instances that are explored."""
    return range(options.first_seed, options.first_seed + options.seeds)


def _settings(
    options: ExploreOptions, env: EnvConfig, tasks: Sequence[Task], deny: DenyList
) -> ExploreSettings:
    return ExploreSettings(
        suite=env.suite,
        options=env.options,
        tasks=[task.id for task in tasks],
        application=options.app,
        seeds=options.seeds,
        first_seed=options.first_seed,
        chooser=options.chooser,
        seed=options.seed,
        steps=options.steps,
        back_every=options.back_every,
        deny=list(deny.words),
    )


def _has_tree(env: EnvConfig) -> bool:
    """Return True if the environments report elements. It makes one to find out, which starts nothing."""
    instance = make_env(env.suite, observe=observed_kinds(env), **env.options)
    try:
        return isinstance(instance, Explorable)
    finally:
        instance.close()


# --- printed reports ---------------------------------------------------------------------------


def _describe(
    options: ExploreOptions,
    env: EnvConfig,
    tasks: Sequence[Task],
    deny: DenyList,
    before: int,
    *,
    has_tree: bool,
) -> dict[str, str]:
    """Return what is printed before an exploration: heading -> text."""
    names = [task.id for task in tasks]
    some = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    on = "its elements" if has_tree else "cells of a grid, since the suite reports no elements"
    words = ", ".join(deny.words) or "nothing: the deny list is empty"
    if len(deny.words) > MOST_WORDS and not options.dry_run:
        first = ", ".join(deny.words[:MOST_WORDS])
        words = (
            f"elements named {first} and {len(deny.words) - MOST_WORDS} more; --dry-run shows all"
        )
    if not has_tree and deny.words:
        words = "nothing: the cells of a grid have no names that the deny list could match"
    lowest, *higher = _instances(options)
    seeds = f"seeds {lowest} to {higher[-1]}" if higher else f"seed {lowest}"
    at_once = f"{options.slots} environments at once" if options.slots > 1 else "one environment"
    return {
        "explores": f"{load_suite(env.suite).name}, {some}; {seeds}",
        "acts on": on,
        "chooser": options.chooser,
        "left alone": words,
        "steps": f"{options.steps}, back to the start every {options.back_every}, {at_once}",
        "out": f"{options.out}, continued after {before} steps" if before else str(options.out),
    }


def _print(console: Console, totals: Mapping[str, Any], reason: Stopped, out: Path) -> None:
    """Print a table of the numbers of an exploration, and why it ended."""
    columns = ["screens", "depth", "steps", "no_op_rate", "errors", "ends"]
    heads = ["screens", "depth", "steps", "no-ops", "errors", "ends"]
    table = page_table("screens and steps", "application", *heads, right=heads)
    for name, numbers in [*totals["applications"].items(), ("all", totals)]:
        cells = [f"{numbers[c]:.0%}" if c == "no_op_rate" else str(numbers[c]) for c in columns]
        if name != "all" or len(totals["applications"]) != 1:
            table.add_row(name, *cells)
    console.print(table)
    left = ", ".join(f"{word} ({count})" for word, count in totals["left_alone"].items())
    if left:
        console.print(f"left alone: {left}", soft_wrap=True)
    console.print(f"{ENDS[reason]}; look at it: dart view {out}", soft_wrap=True)
