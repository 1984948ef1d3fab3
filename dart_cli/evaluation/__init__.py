"""`dart eval`: success on held-out tasks, compared and told; `dart data judge`: a judge's opinion of a run.

evaluate         `dart eval CONFIG`: plays what is left of an evaluation, in this process or in several
episodes    its plan, and what is over of it, in a folder that a second start goes on with
settings    what its episodes depend on
protocols   how benchmarks are evaluated, and what deviates from it
scores      scores from episodes: by task, within k attempts; all of it as one result
results     what an evaluation found, and its files in RUN/eval
text        an evaluation for people and scripts, and as a row of a leaderboard
compare     two evaluations over the instances that both have played
films       some of its episodes as a person would watch them
marks       how an action, and where a pointer looked, are marked on a screenshot
filmstrip_png   episodes as pictures
judging     `dart data judge`: what a judge model says of a run that is over

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
    """What is played, and how it is told."""

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
            help="How actions are chosen. `random`: clicks anywhere, the baseline, without a model; "
            "`all`: these, too."
        ),
    ] = "both"
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--tasks",
            metavar="TASK",
            help="Play only this task, or those of a pattern: mini/popup*, !mini/click; may be "
            "given again.",
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
            help="Play what a benchmark publishes, and tell what deviates: osworld-verified, miniwob, "
            "webarena, androidworld.",
        ),
    ] = ""
    workers: Annotated[
        int,
        typer.Option(
            min=0,
            max=1024,
            help="Processes that play, each with a model of its own, on the GPUs of up.rollout_gpus; 0: this one.",
        ),
    ] = 0
    part: Annotated[
        str,
        typer.Option(
            metavar="I/N",
            help="Play the I-th of N parts alone, e.g. 1/4, on hosts that share the folder; the last one to end "
            "keeps the result.",
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
