"""Supervised training of a model folder: section [tune]."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from dart_cli.config.schema.base import (
    MANY,
    Count,
    Folder,
    Section,
    without_control,
)


class TuneConfig(Section):
    """Supervised training of a model folder, `dart tune`: docs/tune.md."""

    data: list[Annotated[str, AfterValidator(without_control)]] = []
    """What is learned from, all of one kind: run directories and Parquet files of `dart data export`, whose
    successes are learned; folders with episodes that others played (`episodes.jsonl`); grounding sets in any layout
    that `dart eval grounding` reads; or one folder of `dart model verifier-rows`."""

    out: Folder | None = None
    """The model folder to make. Beside it `OUT.part` holds what a second start goes on from."""

    write: Literal["model", "adapters"] = "model"
    """With `model.lora`: the whole `model` with the adapters in its weights, which loads everywhere, or
    the `adapters` alone, as peft's folder."""

    trajectories: Literal["own", "pool", "both"] = "own"
    """Of a run: its `own` successes, the members of its experience `pool`, or `both`."""

    per_task: Count = 0
    """Most trajectories of one task, the newest; 0 for all."""

    action_parser: str = ""
    """How a grounding item is asked and answered, as `dart eval grounding --action-parser`; empty for
    `policy.action_parser` where the file sets it, else for what the model folder shows."""

    held_out: float = Field(default=0.125, ge=0, le=0.5)
    """Share of the episodes or screenshots that is not learned: what was learned is measured on it, before and
    after. Of fewer than 24 none are held out, of large sets at most 256 rows; 0 for none."""

    epochs: float | None = Field(default=None, gt=0, le=MANY)
    """Passes over the data, over both stages together; unset: as many as make 400 updates, 2 to 40."""

    max_minutes: float = Field(default=0.0, ge=0, le=MANY)
    """The training ends after this many minutes where its epochs take longer, all starts together; the learning rate
    falls by the end of either. 0 for no limit. The held-out rows are measured before and after it."""

    batch: int | None = Field(default=None, ge=1, le=65_536)
    """Examples of an update: items, or steps of trajectories; unset: 8 to 32, by how many there are."""

    micro_batch: int = Field(default=0, ge=0, le=65_536)
    """Grounding items of one forward pass; 0 for all of an update."""

    lr: float | None = Field(default=None, ge=0, le=1)
    """Peak learning rate: it rises over 3 % of a stage and falls along half a cosine. Unset: by the model's size,
    1e-3 for the tiny model, 5e-6 for 7 billion parameters, ten times that for adapters."""

    head_share: float = Field(default=0.5, ge=0, le=1)
    """Pointer: share of the budget that trains the head and its tokens alone, first; 1 for nothing else."""

    target: Literal["box", "v2p"] = "box"
    """Pointer: `box`, all cells that the box overlaps, alike; `v2p`, a bell over the box, and the probability
    outside of it is a loss, too."""
