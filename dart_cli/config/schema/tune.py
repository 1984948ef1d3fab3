"""Supervised training: [tune]."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from dart_cli.config.schema.base import (
    MANY,
    MOST_PIXELS,
    Count,
    Folder,
    PositiveSeconds,
    Seconds,
    Section,
    without_control,
)


class TuneConfig(Section):
    """Supervised training of a model folder, `dart tune`: docs/tune.md."""

    data: list[Annotated[str, AfterValidator(without_control)]] = []
    """What is learned from, all of one kind: run directories and Parquet files of `dart data export`, whose
    successes are learned; episodes of OpenCUA or CUA-Lite; grounding sets in any layout that
    `dart eval grounding` reads, and GUI-Actor's rows; or one folder of `dart model verifier-rows`."""

    out: Folder | None = None
    """The model folder to make. Beside it `OUT.part` holds what a second start goes on from."""

    write: Literal["model", "adapters"] = "model"
    """With `model.lora`: the whole `model` with the adapters in its weights, which loads everywhere, or
    the `adapters` alone, as peft's folder."""

    layout: str = ""
    """Layout of `data`, `opencua`, `cua-lite`, `gui-actor` or that of a grounding set; empty for the one that
    its files show."""

    trajectories: Literal["own", "pool", "both"] = "own"
    """Of a run: its `own` successes, the members of its experience `pool`, or `both`."""

    per_task: Count = 0
    """Most trajectories of one task, the newest; 0 for all."""

    skip_malformed: bool = False
    """Leave malformed rows out, and tell how many; else they are refused."""

    limit: Count = 0
    """Train on the first so many items or trajectories; 0 for all."""

    codec: str = ""
    """How a grounding item is asked and answered, as `dart eval grounding --codec`; empty for
    `policy.codec` where the file sets it, else for what the model folder shows."""

    points: Literal["centre", "inside"] = "centre"
    """Numbers of the `centre` of an item's box, or of a point `inside` it that is drawn in each epoch.
    A pointer's target is the whole box."""

    max_pixels: int = Field(default=0, ge=0, le=MOST_PIXELS)
    """Most pixels of a screenshot as the model sees it; 0 for those of its folder."""

    held_out: float = Field(default=0.125, ge=0, le=0.5)
    """Share of the episodes or screenshots that is not learned: what was learned is measured on it, before and
    after. Of fewer than 24 none are held out, of large sets at most 256 rows; 0 for none."""

    epochs: float | None = Field(default=None, ge=0, le=MANY)
    """Passes over the data, over both stages together; unset: as many as make 400 updates, 2 to 40."""

    seconds: Seconds = 0.0
    """CPU seconds of training in place of `epochs`, on a GPU those of the clock; 0 for `epochs`."""

    batch: int | None = Field(default=None, ge=1, le=65_536)
    """Examples of an update: items, or steps of trajectories; unset: 8 to 32, by how many there are."""

    micro_batch: int = Field(default=0, ge=0, le=65_536)
    """Grounding items of one forward pass; 0 for all of an update."""

    lr: float | None = Field(default=None, ge=0, le=1)
    """Peak learning rate: it rises over 3 % of a stage and falls along half a cosine. Unset: by the model's size,
    1e-3 for the tiny model, 5e-6 for 7 billion parameters, ten times that for adapters."""

    lr_head: float | None = Field(default=None, ge=0, le=1)
    """Pointer: peak learning rate of the first stage; unset: likewise, 3e-3 to 1e-4."""

    head_share: float = Field(default=0.5, ge=0, le=1)
    """Pointer: share of the budget that trains the head and its tokens alone, first; 1 for nothing else."""

    lm_weight: float = Field(default=1.0, ge=0, le=MANY)
    """Weight of the language loss."""

    pointer_weight: float = Field(default=1.0, ge=0, le=MANY)
    """Pointer: weight of the loss of places."""

    target: Literal["box", "gaussian"] = "box"
    """Pointer: `box`, all cells that the box overlaps, alike; `gaussian`, a bell over the box (V2P)."""

    gaussian_width: float = Field(default=4.1325, ge=0.01, le=MANY)
    """`gaussian`: standard deviations that a side of the box is long; the default is that of V2P's released code."""

    suppress: float = Field(default=0.0, ge=0, le=MANY)
    """Pointer: weight of the probability outside the target; V2P has 1."""

    save_every_s: PositiveSeconds = 300.0
    """Seconds between two states that a second start goes on from."""
