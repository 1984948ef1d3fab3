"""How new weights reach the rollout workers: [weights] and [sync]."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dart_cli.config.schema.base import (
    MOST_SLOTS,
    Count,
    Folder,
    Positive,
    PositiveSeconds,
    Section,
)


class WeightsConfig(Section):
    """How new weights reach the rollout workers: docs/weights.md."""

    channel: Literal["file", "nccl", "gloo"] = "file"
    """`file`: each worker reads the files of a version. `nccl`, `gloo`: the trainer broadcasts what the
    workers lack to all of them at once, between GPUs or over TCP; on several hosts too."""

    delta: bool = False
    """`file`: publish what changed since the version before. Workers read only that, and the trainer
    writes only that, except for each `whole_every`th version, which is written whole, too."""

    whole_every: Positive = 8
    """`delta`, `nccl` and `gloo`: one version in this many is written whole, and so is the last."""

    directory: Folder | None = None
    """Where weight sets are written; unset for `weights/` of the run, with the tensors in shared
    memory, where it has room, until the trainer ends."""

    publish_every: Positive = 1
    """Updates between publications."""

    keep: int = Field(default=3, ge=2, le=MOST_SLOTS)
    """Newest weight sets kept."""


class SyncConfig(Section):
    """How rollout workers take new weights: a few at a time, while the others go on serving."""

    concurrent: Count = 1
    """Workers that take weights at once; 0 for all."""

    deadline_s: PositiveSeconds = 120.0
    """Seconds after which a worker's permit to take weights is given to the next worker."""
