"""What a run's curves are drawn over: its policy versions, its trajectories, or the time of its training.

Axis     the choices, with their titles
Places   where a policy version or a batch of one run stands on an axis
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from dart_cli.data.store.rows import BatchRow

Axis = Literal["version", "trajectories", "minutes"]
AXES: tuple[Axis, ...] = get_args(Axis)
TITLES: dict[Axis, str] = {
    "version": "policy version",
    "trajectories": "trajectories ended",
    "minutes": "training, min",
}


class Places:
    """The places of a run's policy versions and batches on an axis, by its batches.

    A batch keeps how many trajectories had ended and how long the run had been served when it was formed, over all
    starts; so pauses do not count. The model as it comes, version 0, stands at 0.
    """

    def __init__(self, axis: Axis, batches: Sequence[BatchRow]) -> None:
        trained = [each for each in batches if each.trained_version is not None]
        self._versions = [0, *(each.trained_version or 0 for each in trained)]
        values = [_value(axis, each) for each in trained]
        self._of_version = [0.0, *values]
        self._of_batch = dict(zip((each.id for each in trained), values, strict=True))

    def of_version(self, version: float) -> float:
        """Return the place of a policy version, or between two of them of a mean over several."""
        return float(np.interp(version, self._versions, self._of_version))

    def of_batch(self, batch_id: int) -> float | None:
        """Return the place of a batch; None of one that was not trained on."""
        return self._of_batch.get(batch_id)


def _value(axis: Axis, batch: BatchRow) -> float:
    match axis:
        case "trajectories":
            return float(batch.trajectories)
        case "minutes":
            return batch.run_s / 60
    return float(batch.trained_version or 0)
