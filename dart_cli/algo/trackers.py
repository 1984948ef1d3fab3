"""Expected rewards that outlive a batch: what a trajectory is compared with where it has no group.

    Tracker             a Beta count of rewards, forgetting the older ones
    decay_of            how much it forgets, by how far the policy has moved
    moved_per_version   how far that is, from the trainer's metrics
    expected_by_step    trackers of one task -> the baseline of each step of an episode
    tracked_advantages  rewards less baselines -> advantages
    batch_normalised    the same, normalised over a batch (SPO)

SPO (arXiv 2509.13232): one trajectory for each draw of a task, compared with what the task's earlier
ones lead one to expect. Nothing waits for siblings, and no group is dropped because its members are alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dart_cli.algo.advantage import EPSILON, Estimator

Baseline = Literal["task_tracker", "step_tracker"]
"""Values of data.advantage with groups of one."""

TrackerScale = Literal["none", "batch"]
"""Values of data.tracker_scale: as they are, or normalised over the batch."""

Advantage = Literal[Estimator, Baseline]
"""Values of data.advantage."""

PRIOR = 0.5
"""Passes and failures that a tracker has before the first: Beta(1/2, 1/2), of value 1/2.

SPO starts from offline estimates with the weight N0 = 1 / (1 - rho_min), and its release without
them from these counts. A guess of 1/2 with the weight of N0 would be a baseline that a task out of reach
follows over dozens of trajectories.
"""

RHO_MIN, RHO_MAX = 0.875, 0.96
"""Bounds of a decay that follows the policy; those of SPO's release."""

WHOLE_TASK = -1
"""In place of a step's index: the tracker of the task."""


@dataclass(frozen=True)
class Tracker:
    """Beta count of rewards in [0, 1], each outcome weighing more than those before it."""

    passed: float = PRIOR
    failed: float = PRIOR
    moved: float | None = None
    """Nats that the policy had moved when the newest outcome was sampled; None where that is unknown."""

    @property
    def value(self) -> float:
        """Expected reward: the mean of the Beta distribution of these counts."""
        return self.passed / (self.passed + self.failed)

    def after(self, reward: float, decay: float, moved: float | None = None) -> Tracker:
        """The tracker after one more reward; what it had counts `decay` (rho) times as much.

        `moved` as in the field, of that reward's trajectory; the farthest stays.

        Raises ValueError for a reward outside [0, 1] or a decay outside (0, 1].
        """
        if not 0 <= reward <= 1:
            raise ValueError(f"a reward must be in [0, 1], got {reward}")
        if not 0 < decay <= 1:
            raise ValueError(f"a decay must be in (0, 1], got {decay}")
        known = [each for each in (self.moved, moved) if each is not None]
        return Tracker(
            decay * self.passed + reward,
            decay * self.failed + 1 - reward,
            max(known, default=None),
        )


def decay_of(moved: float, half_life: float) -> float:
    """Rho of a tracker whose policy has moved so many nats since its newest outcome.

    clip(2 ** (-moved / half_life), 0.875, 0.96) (SPO, arXiv 2509.13232, with its release's bounds):
    an average over 8 to 25 outcomes. Raises ValueError for a half-life that is not above 0.
    """
    if not half_life > 0:
        raise ValueError(f"half_life must be > 0, got {half_life}")
    return min(max(math.exp2(-max(moved, 0.0) / half_life), RHO_MIN), RHO_MAX)


def moved_per_version(metrics: Mapping[str, float]) -> float | None:
    """Nats by which one version of the weights moved the policy, as an update measured; None if it did not.

    `stale_kl`, the KL of the policies that sampled the batch's stale tokens and the present one, over the
    mean age of these tokens in versions. `parity_kl`, what engine and trainer differ by under equal
    weights, is no movement and taken off: independent errors of log-probabilities add up in the KL. A
    batch with tokens of the experience pool measures nothing, since these were sampled by others.
    """
    if metrics.get("pool_tokens") or metrics.get("demonstrated_fraction"):
        return None
    stale, total = metrics.get("stale_tokens", 0.0), metrics.get("tokens", 0.0)
    age = metrics.get("staleness_mean", 0.0) * total / stale if stale else 0.0
    if age <= 0 or "stale_kl" not in metrics:
        return None
    return max(metrics["stale_kl"] - metrics.get("parity_kl", 0.0), 0.0) / age


def expected_by_step(trackers: Mapping[int, Tracker], steps: int) -> list[Tracker]:
    """The tracker that is each step's baseline [steps], of one task's trackers by step.

    A step without outcomes of its own has that of the step before it, the first one the task's. So
    where an episode gets further than any before it, nothing is assumed of the steps that are new.
    """
    found, before = [], trackers.get(WHOLE_TASK, Tracker())
    for step in range(steps):
        before = trackers.get(step, before)
        found.append(before)
    return found


def tracked_advantages(
    differences: Sequence[float], scale: TrackerScale, margin: float
) -> list[float]:
    """Advantages [B] of rewards less baselines [B] of a batch.

    `none`: d + margin, as if `margin` less were expected. Off-policy a baseline below the expected reward is
    safe, and one above it, as a tracker's is when success falls, lowers the probability of all that is
    sampled (AsymRE, arXiv 2506.20520). `batch`: `batch_normalised`, to which a margin makes no difference.
    Raises ValueError for a difference that is not finite.
    """
    if scale == "batch":
        return batch_normalised(differences)
    if not all(math.isfinite(each) for each in differences):
        raise ValueError(f"rewards and baselines must be finite, got {list(differences)}")
    return [each + margin for each in differences]


def batch_normalised(differences: Sequence[float]) -> list[float]:
    """Advantages [B] of rewards less baselines [B], over a whole batch (SPO, arXiv 2509.13232).

    (d - mean) / (std + 1e-6) with the population's standard deviation. Equal differences, and one
    alone, give exactly 0. Raises ValueError for one that is not finite.
    """
    if not all(math.isfinite(each) for each in differences):
        raise ValueError(f"rewards and baselines must be finite, got {list(differences)}")
    if not differences or min(differences) == max(differences):
        return [0.0] * len(differences)
    mean = math.fsum(differences) / len(differences)
    centred = [each - mean for each in differences]
    std = math.sqrt(math.fsum(each * each for each in centred) / len(centred))
    return [each / (std + EPSILON) for each in centred]
