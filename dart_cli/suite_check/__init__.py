"""`dart env check` and `dart env play`: a suite tried before anything is trained on it.

probes     agents that do not know their task, and the solution; the episodes that they play
findings   what the episodes of one task show (pure)
report     `check`: plays all tasks, prints a table or JSON; or tells what they need, without playing
by_hand    `play`: one task by hand, by its solution, or by random clicks; a film of it

Below are the options of its commands.
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
    """What is checked, and how."""

    suite: SuiteName
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--task",
            metavar="PATTERN",
            help="Only these: an id, a glob such as mini/popup*, !GLOB for all others; may be given again.",
        ),
    ] = None
    seeds: Annotated[int, typer.Option(min=1, help="Instances of each task: seeds 0, 1, ...")] = 3
    probes: Annotated[
        str,
        typer.Option(
            metavar="NAMES", help="all, or some of nothing,done,fail,random,oracle with commas."
        ),
    ] = "all"
    options: EnvOptions = None
    slots: Annotated[
        int,
        typer.Option(
            min=1,
            help="Environments at once; with more than one, the times include waiting for the CPU.",
        ),
    ] = 1
    isolate: Annotated[
        bool, typer.Option("--isolate", help="Each environment in a process of its own.")
    ] = False
    slow_step: Annotated[
        float, typer.Option(metavar="SECONDS", help="Slow: the steps' 95th percentile above this.")
    ] = 1.0
    slow_reset: Annotated[
        float, typer.Option(metavar="SECONDS", help="Slow: the resets' 95th percentile above this.")
    ] = 10.0
    guessable: Annotated[
        float,
        typer.Option(
            metavar="SHARE", help="Guessable: random clicks pass more than this, 95 % sure."
        ),
    ] = 0.2
    classify: Annotated[
        bool,
        typer.Option(
            "--classify", help="Play nothing: what the tasks need, by reading them (osworld)."
        ),
    ] = False
    as_json: AsJson = False
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep the report here as JSON.", callback=check_out),
    ] = None


@dataclass(frozen=True)
class PlayOptions:
    """What is played, and by whom."""

    suite: SuiteName
    task: Annotated[
        str, typer.Argument(metavar="TASK", help="Its id; the suite's name may be left out.")
    ]
    seed: Annotated[int, typer.Option(min=0, help="Which instance.")] = 0
    solution: Annotated[
        bool, typer.Option("--solution", help="The environment's own solution plays.")
    ] = False
    random: Annotated[bool, typer.Option("--random", help="Random clicks play.")] = False
    options: EnvOptions = None
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Keep a film: a strip (.png) or moving (.gif).",
            callback=check_out,
        ),
    ] = None
