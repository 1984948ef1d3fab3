"""Supervised training of a model folder: section [tune]."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from dart_cli.config.schema.base import MANY, Count, Folder, Section, without_control


class TuneConfig(Section):
    """Supervised training of a model folder by `dart tune` (docs/tune.md)."""

    data: list[Annotated[str, AfterValidator(without_control)]] = []
    """Paths of the training data, all of one kind: run directories and Parquet files of `dart data export`,
    whose successes are learned; folders of episodes that were played elsewhere (`episodes.jsonl`); grounding
    sets in any layout that `dart eval grounding` reads; or one folder of `dart model verifier-rows`."""

    out: Folder | None = None
    """The model folder to make. Beside it, `OUT.part` holds the state from which a second start continues."""

    write: Literal["model", "adapters"] = "model"
    """With `model.lora`: what is written. `model` is the whole model with the adapters merged into its
    weights, which loads everywhere; `adapters` are the adapters alone, as a folder of peft."""

    trajectories: Literal["own", "pool", "both"] = "own"
    """Which trajectories of a run are learned: its `own` successes, the members of its experience `pool`, or
    `both`."""

    per_task: Count = 0
    """Largest number of trajectories of one task, of which the newest are taken. 0 takes all."""

    action_parser: str = ""
    """How a grounding item is asked and answered, as in `dart eval grounding --action-parser`. If empty,
    `policy.action_parser` where the file sets it, else the format that the model folder shows."""

    held_out: float = Field(default=0.125, ge=0, le=0.5)
    """Share of the episodes or screenshots that is not learned. The model is measured on it before and after
    the training. With fewer than 24 of them none is held out; of large sets at most 256 rows are. 0 holds out
    none."""

    epochs: float | None = Field(default=None, gt=0, le=MANY)
    """Number of passes over the data, in both stages together. If unset, as many as make 400 updates, from 2
    to 40."""

    max_minutes: float = Field(default=0.0, ge=0, le=MANY)
    """Time limit of the training, minutes, over all of its starts. It ends at the limit or at the end of its
    epochs, whichever comes first, and the learning rate has fallen by then. The measurements on held-out rows
    before and after it do not count. 0 sets no limit."""

    batch: int | None = Field(default=None, ge=1, le=65_536)
    """Number of examples of an update: items, or steps of trajectories. If unset, 8 to 32, depending on
    their number."""

    micro_batch: int = Field(default=0, ge=0, le=65_536)
    """Number of grounding items in one forward pass. 0 takes all of an update."""

    lr: float | None = Field(default=None, ge=0, le=1)
    """Peak learning rate. The rate rises over 3 % of a stage and falls along half a cosine. If unset, it
    follows the size of the model: 1e-3 for the tiny model, 5e-6 for 7 billion parameters, and ten times that
    for adapters."""

    head_share: float = Field(default=0.5, ge=0, le=1)
    """With `policy.pointing` = "pointer": share of the budget, at the beginning, that trains only the pointer
    head and its tokens. 1 trains nothing else."""

    target: Literal["box", "v2p"] = "box"
    """With `policy.pointing` = "pointer": the target of the pointer. `box`: all cells that the box overlaps,
    equally. `v2p`: a bell curve over the box; the probability outside of it is then added to the loss."""
