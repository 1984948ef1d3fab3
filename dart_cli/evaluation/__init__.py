"""`dart eval`: success on held-out tasks; `dart data judge`: a judge model's verdicts on a run.

evaluate        the `dart eval CONFIG` command: plays what is left of an evaluation
episodes        the plan of an evaluation, and its episodes in a folder, with which a second start goes on
settings        everything on which the outcome of the episodes depends
protocols       published protocols of benchmarks, and deviations from them
scores          scores from episodes: by task, and within k attempts
results         the result of an evaluation, and its file in RUN/eval
score_tables    an evaluation as tables and as JSON
leaderboard     an evaluation as a row of a leaderboard
compare         the comparison of two evaluations
films           the stored films of some episodes: screenshots, texts and actions
marks           an action in words, and the marks of actions and pointers over a screenshot
filmstrip_png   films as pictures and animations
judging         the `dart data judge` command

Below are the options of `dart eval CONFIG`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from dart_cli.runtime.options import AsJson, DryRun, Overrides


@dataclass(frozen=True)
class EvalOptions:
    """The options of `dart eval CONFIG`."""

    overrides: Overrides = None
    weights: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A published weight set, e.g. one of RUN/weights."),
    ] = None
    model: Annotated[
        str, typer.Option(metavar="PATH", help="A model as it is, without the run's weights.")
    ] = ""
    episodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default=False,
            help="Episodes per mode; default eval.episodes, of random clicks 100 at most.",
        ),
    ] = None
    mode: Annotated[
        Literal["sampled", "greedy", "both", "random", "all"],
        typer.Option(
            help="How actions are chosen. `random`: clicks anywhere, as a baseline without a model; "
            "`all`: sampled, greedy and random."
        ),
    ] = "both"
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--tasks",
            metavar="TASK",
            help="Play only this task, or the tasks of a pattern: mini/popup*, !mini/click; may be "
            "repeated.",
        ),
    ] = None
    attempts: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default=False,
            help="Episodes of each task and seed, for pass@k; default eval.attempts.",
        ),
    ] = None
    protocol: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Play by a published protocol, and list deviations: osworld-verified, miniwob, "
            "webarena, androidworld.",
        ),
    ] = ""
    workers: Annotated[
        int,
        typer.Option(
            min=0,
            max=1024,
            help="Processes that play, each with its own model, on up.rollout_gpus; 0: this process.",
        ),
    ] = 0
    part: Annotated[
        str,
        typer.Option(
            metavar="I/N",
            help="Play only part I of N, e.g. 1/4, on hosts that share the folder; the part that ends last "
            "writes the result.",
        ),
    ] = ""
    keep_as: Annotated[
        str,
        typer.Option(metavar="NAME", help="Name of the result in RUN/eval; default its version."),
    ] = ""
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Set an older evaluation of this name aside and begin anew."),
    ] = False
    as_json: AsJson = False
    dry_run: DryRun = False
