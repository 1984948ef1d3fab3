"""Grounding benchmarks: tests whether a model points at what an instruction names (`dart eval grounding`).

items      instructions about screenshots, with their regions and answers; where a screenshot is stored
layouts    the layouts of published sets: files, keys, forms of a box; a new set is a new entry
reader     reads the items of a folder, and reports malformed rows
formats    how text models are asked, and how their texts are read
scorers    models that point: an item in, candidates out; a verifier that chooses among the candidates
scores     hit@1, hit@3 and overlap@1, with intervals, in total and by trait; refusals separately
misses     the page of misses
benchmark  the command; its settings and answers are on disk, so that a second start continues

This module has the options of `dart eval grounding`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from dart_cli.runtime.options import AsJson, DryRun, Overrides, check_folder


@dataclass(frozen=True)
class GroundingOptions:
    """The options of `dart eval grounding`."""

    folder: Annotated[
        Path,
        typer.Argument(
            metavar="SET_FOLDER", help="Folder of a grounding set, as it was published."
        ),
    ]
    model: Annotated[str, typer.Option(metavar="FOLDER", help="Model folder, or builtin:tiny.")]
    action_parser: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="How the model is asked and answers: compact, uitars, toolcall, pyautogui, ... "
            "(docs/families.md), point, or file.py:MyParser; by default compact, for models that know it.",
        ),
    ] = ""
    overrides: Overrides = None
    layout: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Layout of the set; by default recognised from its files.",
        ),
    ] = ""
    weights: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="A published weight set of a run, in place of the model's weights."
        ),
    ] = None
    candidates: Annotated[
        int,
        typer.Option(
            min=1,
            max=64,
            help="Answers to each item: the first is greedy, the others are sampled, or come from the same "
            "forward pass of a model that points. hit@3 needs 3 or more.",
        ),
    ] = 1
    verifier: Annotated[
        str,
        typer.Option(
            metavar="FOLDER",
            help="Folder of a verifier, from `dart tune`, that chooses among the candidates.",
        ),
    ] = ""
    max_pixels: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default=False,
            help="Largest size of a screenshot as the model sees it, pixels; by default the model's.",
        ),
    ] = None
    limit: Annotated[
        int | None,
        typer.Option(
            min=1, show_default=False, help="Ask only this many items, spread evenly over the set."
        ),
    ] = None
    skip_malformed: Annotated[
        bool,
        typer.Option("--skip-malformed", help="Leave malformed rows out, and report their number."),
    ] = False
    misses: Annotated[int, typer.Option(min=0, help="Largest number of misses on the page.")] = 60
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            callback=check_folder,
            show_default=False,
            help="Folder of answers, report and page; by default runs/grounding/SET-MODEL.",
        ),
    ] = None
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Move an older evaluation aside and begin anew.")
    ] = False
    as_json: AsJson = False
    dry_run: DryRun = False
