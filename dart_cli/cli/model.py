"""`dart model`: makes folders of models, and rows for a verifier.

add_pointer     makes a folder with a pointer head from one without
verifier_rows   makes training rows for a verifier from a grounding set
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dart_cli.runtime.options import check_folder

model = typer.Typer(no_args_is_help=True)


@model.callback()
def _model() -> None:
    """Make model folders with a pointer head, and training rows for a verifier.

    Example: dart model add-pointer builtin:tiny runs/models/tiny-pointer
    """


@model.command()
def add_pointer(
    folder: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER",
            help="A Hugging Face folder (Qwen2-VL, Qwen2.5-VL / UI-TARS, Qwen3-VL) or builtin:tiny.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="The folder to make.", show_default=False)
    ],
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Seed of the head's initial values.")
    ] = 0,
) -> None:
    """Make a new model folder with a head that points at a patch of the screenshot.

    The new folder has three more tokens, whose embeddings start at the mean of all others, and the tensors of
    the head (8 d^2 + 10 d numbers for a model of width d). Everything else is copied: with policy.pointing =
    "text" the folder is the same model. FOLDER is not changed. An untrained head points at random places;
    train it first (docs/pointing.md).

    Example: dart model add-pointer builtin:tiny runs/models/tiny-pointer

    Example: dart model add-pointer models/Qwen2.5-VL-3B-Instruct models/Qwen2.5-VL-3B-pointer --seed 1
    """
    from dart_cli.config.model_folder import resolve
    from dart_cli.config.rules.machine import refuse_out

    source = resolve(folder)
    refuse_out(out)
    from dart_cli.policy.pointer_folder import add_pointer as add  # it brings torch

    tokens = add(source, out, seed)
    typer.echo(
        f"{out}: {folder} with a pointer head, tokens {', '.join(map(str, tokens.triple))}; train it "
        f'with model.path = "{out}" and policy.pointing = "pointer"'
    )


@model.command("verifier-rows")
def verifier_rows(
    data: Annotated[
        Path, typer.Argument(metavar="SET_FOLDER", help="A grounding set.", show_default=False)
    ],
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT", callback=check_folder, help="The folder to make.", show_default=False
        ),
    ],
    layout: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Layout of the set; by default recognised from its files."
        ),
    ] = "",
    radius: Annotated[int, typer.Option(min=1, max=500, help="Radius of the circle, pixels.")] = 7,
    width: Annotated[
        int, typer.Option(min=1, max=100, help="Width of the circle's line, pixels.")
    ] = 3,
    reach: Annotated[
        int | None,
        typer.Option(
            min=8,
            max=10000,
            help="Pixels that the crop reaches to each side of the place; by default a sixth of a screenshot's "
            "shorter side.",
            show_default=False,
        ),
    ] = None,
    prompt: Annotated[
        str, typer.Option(help="The question, with {instruction} in it.", show_default=False)
    ] = "",
    limit: Annotated[
        int | None,
        typer.Option(min=1, show_default=False, help="Make rows of the first N items only."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random places.")] = 0,
) -> None:
    """Make training rows for a verifier: screenshots with a red circle, in a right or wrong place.

    Each item gives two right places and two wrong ones: on a near neighbour, if the screenshot has one, and
    just beside the target. The pictures are made as at inference; OUT has these settings.

    Example: dart model verifier-rows sets/made/train sets/rows
    """
    from bus.errors import UserError
    from dart_cli.config.rules.machine import refuse_filled

    if prompt and "{instruction}" not in prompt:
        raise UserError("--prompt must have {instruction} in it")
    refuse_filled(out)
    from dart_cli.policy.verifier import VerifierSpec  # it brings torch
    from dart_cli.tune.verifier_rows import make_rows, reach_of

    question = {"prompt": prompt} if prompt else {}
    reach = reach or reach_of(data, layout)
    spec = VerifierSpec(radius=radius, width=width, reach=reach, **question)
    counts = make_rows(data, out, spec, layout=layout, seed=seed, limit=limit or 0)
    typer.echo(f"{out}: {json.dumps(counts)}")
