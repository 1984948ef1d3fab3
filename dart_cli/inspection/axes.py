"""The x axes of a run's curves: policy versions, trajectories, or the time of training.

Axis     the names of the axes; TITLES has their titles
Places   the place of each policy version and each batch of one run on an axis
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
    """The places of a run's policy versions and batches on an axis.

    A batch records how many trajectories had ended, and for how long the run had been served, when it was
    formed, over all starts of the run; so pauses do not count. Version 0, the initial model, stands at 0.
    """

    def __init__(self, axis: Axis, batches: Sequence[BatchRow]) -> None:
        by_version = {0: 0.0}
        self._of_batch: dict[int, float] = {}
        for batch in batches:
            if batch.trained_version is not None:
                place = _place(axis, batch, batch.trained_version)
                by_version[batch.trained_version] = self._of_batch[batch.id] = place
        self._versions = sorted(by_version)
        self._of_version = [by_version[version] for version in self._versions]

    def of_version(self, version: float) -> float:
        """Return the place of a policy version. A mean over several versions lies between two places."""
        return float(np.interp(version, self._versions, self._of_version))

    def of_batch(self, batch_id: int) -> float | None:
        """Return the place of a batch; None if it was not trained on."""
        return self._of_batch.get(batch_id)


def _place(axis: Axis, batch: BatchRow, version: int) -> float:
    """Return the place on an axis of a batch, after which `version` was published."""
    match axis:
        case "trajectories":
            return float(batch.trajectories)
        case "minutes":
            return batch.run_s / 60
    return float(version)
