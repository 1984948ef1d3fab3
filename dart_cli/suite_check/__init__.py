"""`dart env check` and `dart env play`: try a suite before anything is trained on it.

    probes         agents that know nothing of their task, and the solution; they play episodes
    task_report    reports what the episodes of one task show (pure)
    check_suite    `check`: plays all tasks and prints a table or JSON, or only shows what they need
    play_by_hand   `play`: plays one task by hand, by its solution or by random clicks, and films it

The options of both commands are defined below.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from dart_cli.runtime.options import AsJson, EnvOptions, check_out

SuiteName = Annotated[
    str,
    typer.Argument(
        metavar="SUITE", help="mini, desk, miniwob, ..., package.module:Suite or file.py:Suite."
    ),
]


@dataclass(frozen=True)
class CheckOptions:
    """The options of `dart env check`: what is checked, and how."""

    suite: SuiteName
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--task",
            metavar="PATTERN",
            help="Check only these tasks: an id, a glob such as mini/popup*, or !GLOB for all others; may be given again.",
        ),
    ] = None
    seeds: Annotated[
        int, typer.Option(min=1, help="Number of instances of each task: seeds 0, 1, ...")
    ] = 3
    probes: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="all, or some of nothing,done,fail,random,oracle, separated by commas.",
        ),
    ] = "all"
    options: EnvOptions = None
    slots: Annotated[
        int,
        typer.Option(
            min=1,
            help="Number of environments at the same time. With more than one, times include waiting for the CPU.",
        ),
    ] = 1
    isolate: Annotated[
        bool, typer.Option("--isolate", help="Run each environment in its own process.")
    ] = False
    slow_step: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="A task is slow if its steps' 95th percentile exceeds this."
        ),
    ] = 1.0
    slow_reset: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="A task is slow if its resets' 95th percentile exceeds this."
        ),
    ] = 10.0
    guessable: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help="A task is guessable if random clicks pass more than this, with 95 % confidence.",
        ),
    ] = 0.2
    classify: Annotated[
        bool,
        typer.Option(
            "--classify", help="Play nothing; read the tasks and show what they need (osworld)."
        ),
    ] = False
    as_json: AsJson = False
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write the report to this file as JSON.", callback=check_out
        ),
    ] = None


@dataclass(frozen=True)
class PlayOptions:
    """The options of `dart env play`: what is played, and by which player."""

    suite: SuiteName
    task: Annotated[
        str,
        typer.Argument(metavar="TASK", help="The id of a task; the suite's name may be left out."),
    ]
    seed: Annotated[int, typer.Option(min=0, help="The instance of the task.")] = 0
    solution: Annotated[
        bool, typer.Option("--solution", help="Let the environment's own solution play.")
    ] = False
    random: Annotated[bool, typer.Option("--random", help="Play random clicks.")] = False
    options: EnvOptions = None
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a film to this file: a strip (.png) or an animation (.gif).",
            callback=check_out,
        ),
    ] = None
