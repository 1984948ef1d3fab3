"""`dart model`: folders of models.

add_pointer   a folder with a pointer head, from one without
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

model = typer.Typer(no_args_is_help=True)


@model.callback()
def _model() -> None:
    """Make folders of models.

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
        int, typer.Option(min=0, max=2**63 - 1, help="Of the head's initial values.")
    ] = 0,
) -> None:
    """Give a model a head that points at a patch of the screenshot, as a new folder.

    Added are three tokens, whose embeddings start at the mean of all others, and the head's tensors
    (8 d^2 + 10 d numbers for a model of width d). All else is as it was: with policy.pointing = "text"
    the folder is the same model. FOLDER is only read. An untrained head points nowhere: train it on
    places first (docs/pointing.md).

    Example: dart model add-pointer builtin:tiny runs/models/tiny-pointer

    Example: dart model add-pointer models/Qwen2.5-VL-3B-Instruct models/Qwen2.5-VL-3B-pointer --seed 1
    """
    from dart_cli.policy.model import resolve
    from dart_cli.policy.pointer.folder import add_pointer as add

    tokens = add(resolve(folder), out, seed)
    typer.echo(
        f"{out}: {folder} with a pointer head, tokens {', '.join(map(str, tokens.triple))}; train it "
        f'with model.path = "{out}" and policy.pointing = "pointer"'
    )
