"""How new weights reach the rollout workers: section [weights]."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dart_cli.config.schema.base import MOST_SLOTS, Count, Folder, Positive, Section

PERMIT_S = 120.0
"""Seconds after which a worker's permit to take weights goes to the next worker: the first one hangs, or its
disk does."""

WHOLE_EVERY = 8
"""With `nccl` and `gloo`, one version in this many is written to disk whole, and so is the last one. No
worker reads files while there is a trainer, so writing more of them would only slow the disk down."""


class WeightsConfig(Section):
    """How new weights reach the rollout workers, a few at a time while the others serve (docs/weights.md)."""

    channel: Literal["file", "nccl", "gloo"] = "file"
    """`file`: each worker reads the files of a version. `nccl` and `gloo`: the trainer broadcasts to all
    workers at once what they lack, between GPUs (`nccl`) or over TCP (`gloo`), also across hosts."""

    directory: Folder | None = None
    """Folder where weight sets are written. If unset, `weights/` in the run directory; until the trainer
    ends, the tensors are then in shared memory, where it has room."""

    publish_every: Positive = 1
    """Number of updates between two publications."""

    keep: int = Field(default=3, ge=2, le=MOST_SLOTS)
    """How many of the newest weight sets are kept."""

    concurrent: Count = 1
    """Number of workers that take weights at once. 0 lets all of them."""
