"""`dart model sft` and `dart model verifier-rows`: supervised training of a folder, and rows for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from dart_cli.cli.options import DryRun, Overrides

supervised = typer.Typer()

_Data = Annotated[
    Path,
    typer.Argument(
        metavar="DATA",
        help="A grounding set in a layout that `dart eval grounding` reads; for a verifier, the folder "
        "that `dart model verifier-rows` made.",
        show_default=False,
    ),
]
_Layout = Annotated[
    str, typer.Option(metavar="NAME", help="Layout of the set; default the one its files show.")
]


@supervised.command()
def sft(
    data: _Data,
    folder: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A model folder, or builtin:tiny.", show_default=False
        ),
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="The folder to make.", show_default=False)
    ],
    task: Annotated[
        Literal["pointer", "text", "verifier"],
        typer.Option(
            help="Point with the pointer head, write numbers, or judge marked places with True or False."
        ),
    ] = "pointer",
    codec: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="How it is asked and answers, as `dart eval grounding --codec`; a pointer needs compact, "
            "uitars or your own.",
        ),
    ] = "",
    overrides: Overrides = None,
    layout: _Layout = "",
    epochs: Annotated[
        float, typer.Option(min=0, help="Of the data, over both stages together.")
    ] = 2.0,
    seconds: Annotated[
        float,
        typer.Option(
            min=0,
            help="CPU seconds in place of epochs; on a GPU those of the clock.",
            show_default=False,
        ),
    ] = 0.0,
    head_share: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="pointer: share of the budget that trains the head and its tokens alone, first. 1: nothing "
            "else (LiteTrain).",
        ),
    ] = 0.5,
    batch: Annotated[int, typer.Option(min=1, max=65536, help="Examples of an update.")] = 32,
    micro_batch: Annotated[
        int, typer.Option(min=0, help="Examples of one forward pass; 0 for all of an update.")
    ] = 0,
    lr: Annotated[
        float, typer.Option(min=0, help="Peak learning rate where everything is trained.")
    ] = 5e-6,
    lr_head: Annotated[
        float, typer.Option(min=0, help="Peak learning rate of the first stage.")
    ] = 1e-4,
    lm_weight: Annotated[float, typer.Option(min=0, help="Weight of the language loss.")] = 1.0,
    pointer_weight: Annotated[
        float, typer.Option(min=0, help="pointer: weight of the loss of places.")
    ] = 1.0,
    target: Annotated[
        Literal["box", "gaussian"],
        typer.Option(
            help="pointer: all cells that the box overlaps, alike, or a bell over the box (V2P)."
        ),
    ] = "box",
    gaussian_width: Annotated[
        float,
        typer.Option(
            min=0.01, help="gaussian: standard deviations that a side of the box is long."
        ),
    ] = 4.1325,
    suppress: Annotated[
        float,
        typer.Option(
            min=0, help="pointer: weight of the probability outside the target; V2P has 1."
        ),
    ] = 0.0,
    points: Annotated[
        Literal["centre", "inside"],
        typer.Option(
            help="text: numbers of the box's centre, or of a point in it that is drawn in each epoch."
        ),
    ] = "centre",
    max_pixels: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default=False,
            help="Of a screenshot as the model sees it; default its folder's.",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, show_default=False, help="Train on the first so many items."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of order, drawn points and dropout.")] = 0,
    save_every: Annotated[
        float,
        typer.Option(min=0, help="Seconds between two states that a second start goes on from."),
    ] = 300.0,
    skip_malformed: Annotated[
        bool, typer.Option("--skip-malformed", help="Leave malformed rows out.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Begin anew where a training was stopped.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as one line of JSON.")
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """Train a folder on grounding data: to point, to write coordinates, or to verify places.

    A pointer is trained in two stages: the head and its tokens alone, then everything. The learning
    rate rises over 3 % of a stage and falls along a cosine. A training that was stopped goes on with
    the same command; OUT is there when it is over, with its curve in OUT/sft.json. The defaults are
    those published for GUI-Actor; a small model wants much higher rates. `--set` takes model.dtype,
    model.freeze_vision, rollout.device, train.recompute, train.betas, train.weight_decay, train.grad_clip,
    train.threads and the keys of [policy]. One process, one device.

    Example: dart model sft sets/made/train runs/models/tiny-pointer runs/models/pointing --lr 1e-3 --lr-head 3e-3

    Example: dart model sft sets/made/train builtin:tiny runs/models/text --task text --lr 1e-3

    Example: dart model sft sets/rows builtin:tiny runs/models/verifier --task verifier --lr 1e-3
    """
    from dart_cli.sft.run import SftOptions, run_sft

    run_sft(
        SftOptions(
            data=data,
            model=folder,
            out=out,
            task=task,
            layout=layout,
            codec=codec,
            overrides=list(overrides or []),
            place=points,
            head_share=head_share,
            epochs=epochs,
            seconds=seconds,
            batch=batch,
            micro_batch=micro_batch,
            lr=lr,
            lr_head=lr_head,
            lm_weight=lm_weight,
            pointer_weight=pointer_weight,
            target=target,
            gaussian_width=gaussian_width,
            suppress=suppress,
            max_pixels=max_pixels or 0,
            limit=limit or 0,
            seed=seed,
            save_every=save_every,
            skip_malformed=skip_malformed,
            fresh=fresh,
            as_json=as_json,
            dry_run=dry_run,
        )
    )


@supervised.command("verifier-rows")
def verifier_rows(
    data: Annotated[
        Path, typer.Argument(metavar="SET_FOLDER", help="A grounding set.", show_default=False)
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="The folder to make.", show_default=False)
    ],
    layout: _Layout = "",
    radius: Annotated[int, typer.Option(min=1, max=500, help="Of the circle, pixels.")] = 7,
    width: Annotated[int, typer.Option(min=1, max=100, help="Of its line, pixels.")] = 3,
    reach: Annotated[
        int, typer.Option(min=8, max=10000, help="Pixels of the crop to each side of the place.")
    ] = 500,
    prompt: Annotated[
        str, typer.Option(help="What is asked, with {instruction} in it.", show_default=False)
    ] = "",
    limit: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="Of the first so many items.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the places that are drawn.")] = 0,
) -> None:
    """Make training rows for a verifier: screenshots with a red circle, in the right place or not.

    Of each item two right places and two wrong ones: on a near neighbour, where the screenshot has one,
    and just beside the target. Pictures are made as at inference, and OUT says how.

    Example: dart model verifier-rows sets/made/train sets/rows
    """
    from bus.errors import UserError
    from dart_cli.policy.verifier import VerifierSpec
    from dart_cli.sft.rows import make_rows

    if prompt and "{instruction}" not in prompt:
        raise UserError("--prompt must have {instruction} in it")
    asked = {"prompt": prompt} if prompt else {}
    spec = VerifierSpec(radius=radius, width=width, reach=reach, **asked)
    counts = make_rows(data, out, spec, layout=layout, seed=seed, limit=limit or 0)
    typer.echo(f"{out}: {json.dumps(counts)}")
