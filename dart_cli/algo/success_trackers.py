"""Expected rewards that outlive a batch: what a trajectory is compared with where it has no group.

    Tracker             a Beta count of rewards, forgetting the older ones
    expected_by_step    trackers of one task -> the baseline of each step of an episode
    tracked_advantages  rewards less baselines -> advantages

SPO (arXiv 2509.13232): one trajectory for each draw of a task, compared with what the task's earlier
ones lead one to expect. Nothing waits for siblings, and no group is dropped because its members are alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dart_cli.algo.advantage import Estimator

Baseline = Literal["task_tracker", "step_tracker"]
"""Values of data.advantage with groups of one."""

Advantage = Literal[Estimator, Baseline]
"""Values of data.advantage."""

PRIOR = 0.5
"""Passes and failures that a tracker has before the first: Beta(1/2, 1/2), of value 1/2.

SPO starts from offline estimates with the weight N0 = 1 / (1 - rho_min), and its release without
them from these counts. A guess of 1/2 with the weight of N0 would be a baseline that a task out of reach
follows over dozens of trajectories.
"""

DECAY = 0.95
"""Rho, the weight of an outcome relative to the next one: an average over about 20, the upper part of
the 8 to 25 within which SPO's release adapts it."""

WHOLE_TASK = -1
"""In place of a step's index: the tracker of the task."""


@dataclass(frozen=True)
class Tracker:
    """Beta count of rewards in [0, 1], each outcome weighing more than those before it."""

    passed: float = PRIOR
    failed: float = PRIOR

    @property
    def value(self) -> float:
        """Expected reward: the mean of the Beta distribution of these counts."""
        return self.passed / (self.passed + self.failed)

    def after(self, reward: float, decay: float = DECAY) -> Tracker:
        """Return the tracker after one more reward; what it had counts `decay` (rho) times as much.

        Raises ValueError for a reward outside [0, 1].
        """
        if not 0 <= reward <= 1:
            raise ValueError(f"a reward must be in [0, 1], got {reward}")
        return Tracker(decay * self.passed + reward, decay * self.failed + 1 - reward)


def expected_by_step(trackers: Mapping[int, Tracker], steps: int) -> list[Tracker]:
    """Return the tracker that is each step's baseline [steps], of one task's trackers by step.

    A step without outcomes of its own has that of the step before it, the first one the task's. So
    where an episode gets further than any before it, nothing is assumed of the steps that are new.
    """
    found, before = [], trackers.get(WHOLE_TASK, Tracker())
    for step in range(steps):
        before = trackers.get(step, before)
        found.append(before)
    return found


def tracked_advantages(differences: Sequence[float], margin: float) -> list[float]:
    """Advantages [B] of rewards less baselines [B] of a batch: d + margin, as if `margin` less were expected.

    Off-policy a baseline below the expected reward is safe, and one above it, as a tracker's is when
    success falls, lowers the probability of all that is sampled (AsymRE, arXiv 2506.20520). Raises
    ValueError for a difference that is not finite.
    """
    if not all(math.isfinite(each) for each in differences):
        raise ValueError(f"rewards and baselines must be finite, got {list(differences)}")
    return [each + margin for each in differences]
