"""How new weights reach the rollout workers: section [weights]."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dart_cli.config.schema.base import (
    MOST_SLOTS,
    Count,
    Folder,
    Positive,
    Section,
)

PERMIT_S = 120.0
"""After so long a worker's permit to take weights is given to the next one: it hangs, or its disk does."""
WHOLE_EVERY = 8
"""Of `nccl` and `gloo` one version in so many is written whole, and so is the last: no worker reads files while
there is a trainer, so writing more would only take from the disk."""


class WeightsConfig(Section):
    """How new weights reach the rollout workers, a few at a time while the others serve: docs/weights.md."""

    channel: Literal["file", "nccl", "gloo"] = "file"
    """`file`: each worker reads the files of a version. `nccl`, `gloo`: the trainer broadcasts what the
    workers lack to all of them at once, between GPUs or over TCP; on several hosts too."""

    directory: Folder | None = None
    """Where weight sets are written; unset for `weights/` of the run, with the tensors in shared
    memory, where it has room, until the trainer ends."""

    publish_every: Positive = 1
    """Updates between publications."""

    keep: int = Field(default=3, ge=2, le=MOST_SLOTS)
    """Newest weight sets kept."""

    concurrent: Count = 1
    """Workers that take weights at once; 0 for all."""
