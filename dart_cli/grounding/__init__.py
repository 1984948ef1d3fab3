"""Grounding benchmarks: does a model point at what an instruction names? `dart eval grounding`.

items     instructions about screenshots, regions, answers; where a screenshot is
layouts   the published sets: files, keys, forms of a box; a new set is an entry there
reader    a folder -> its items, and what is wrong with its rows
formats   how text models are asked, and how their texts are read
scorers   what points: an item in, candidates out; a second model that judges the candidates
scores    hit@1, hit@3, overlap@1, with intervals, by trait; refusals apart
misses    the page of misses
benchmark       the verb; settings and answers on disk, so that a second start goes on

Below are the options of `dart eval grounding`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from dart_cli.runtime.options import AsJson, DryRun, Overrides, check_folder


@dataclass(frozen=True)
class GroundingOptions:
    """What is asked, and of which model."""

    folder: Annotated[
        Path, typer.Argument(metavar="SET_FOLDER", help="A grounding set as it is published.")
    ]
    model: Annotated[str, typer.Option(metavar="FOLDER", help="A model folder, or builtin:tiny.")]
    action_parser: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="How it is asked and answers: compact, uitars, toolcall, pyautogui, ... (docs/families.md), point, file.py:MyParser; default "
            "compact for models with its words.",
        ),
    ] = ""
    overrides: Overrides = None
    layout: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Layout of the set; default the one that its files show.",
        ),
    ] = ""
    weights: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="A published weight set of a run in place of the model's own."
        ),
    ] = None
    candidates: Annotated[
        int,
        typer.Option(
            min=1,
            max=64,
            help="Answers to an item: the greedy one, the others sampled, or from the same pass of a model "
            "that points; 3 or more for hit@3.",
        ),
    ] = 1
    verifier: Annotated[
        str,
        typer.Option(
            metavar="FOLDER",
            help="A verifier that judges the candidates, of `dart tune`.",
        ),
    ] = ""
    max_pixels: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default=False,
            help="Of a screenshot as the model sees it; default its folder's.",
        ),
    ] = None
    limit: Annotated[
        int | None,
        typer.Option(
            min=1, show_default=False, help="Ask so many items, spread evenly over the set."
        ),
    ] = None
    skip_malformed: Annotated[
        bool, typer.Option("--skip-malformed", help="Leave malformed rows out, and tell how many.")
    ] = False
    misses: Annotated[int, typer.Option(min=0, help="Misses on the page, at most.")] = 60
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            callback=check_folder,
            show_default=False,
            help="Answers, report and page; default runs/grounding/SET-MODEL.",
        ),
    ] = None
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Move an older evaluation aside and begin anew.")
    ] = False
    as_json: AsJson = False
    dry_run: DryRun = False
