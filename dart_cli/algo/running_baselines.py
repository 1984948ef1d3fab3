"""Expected rewards that outlive a batch: what a trajectory is compared with if it has no group.

    RunningBaseline      a Beta count of rewards that forgets the older ones
    expected_by_step     a task's baselines by step -> the baseline of each step of an episode
    baseline_advantages  rewards less expected rewards -> advantages

As in SPO (arXiv 2509.13232) one trajectory is played for each draw of a task, and is compared with what the
task's earlier trajectories lead one to expect. No trajectory waits for the rest of a group, and no group is
dropped because its members have equal rewards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dart_cli.algo.advantage import Estimator

BaselineAdvantage = Literal["task_baseline", "step_baseline"]
"""Values of data.advantage with groups of one."""

Advantage = Literal[Estimator, BaselineAdvantage]
"""Values of data.advantage."""

PRIOR = 0.5
"""Passes and failures that a baseline has before the first reward: Beta(1/2, 1/2), of value 1/2.

SPO starts from offline estimates with the weight N0 = 1 / (1 - rho_min); its release uses these counts if
there are no estimates. A guess of 1/2 with the weight N0 would keep the baseline of a task that is out of
reach too high for dozens of trajectories.
"""

DECAY = 0.95
"""Rho, the weight of an outcome relative to the next one. A baseline averages over about 20 outcomes; SPO's
release adapts this number between 8 and 25."""

WHOLE_TASK = -1
"""The key of the task's own baseline, in place of a step's index."""


@dataclass(frozen=True)
class RunningBaseline:
    """A Beta count of rewards in [0, 1], in which each outcome weighs more than those before it."""

    passed: float = PRIOR
    failed: float = PRIOR

    @property
    def value(self) -> float:
        """Expected reward: the mean of the Beta distribution of these counts."""
        return self.passed / (self.passed + self.failed)

    def after(self, reward: float, decay: float = DECAY) -> RunningBaseline:
        """Return the baseline after one more reward; the earlier counts are multiplied by `decay` (rho).

        Raises ValueError for a reward outside [0, 1].
        """
        if not 0 <= reward <= 1:
            raise ValueError(f"a reward must be in [0, 1], got {reward}")
        return RunningBaseline(decay * self.passed + reward, decay * self.failed + 1 - reward)


def expected_by_step(baselines: Mapping[int, RunningBaseline], steps: int) -> list[RunningBaseline]:
    """Return the baseline of each step [steps] of an episode; `baselines` are the task's, by step.

    A step that no episode has reached has the baseline of the step before it; if no episode has reached the
    first step, it has the task's baseline. So nothing is assumed of the new steps of an episode that gets
    further than any before it.
    """
    by_step, newest = [], baselines.get(WHOLE_TASK, RunningBaseline())
    for step in range(steps):
        newest = baselines.get(step, newest)
        by_step.append(newest)
    return by_step


def baseline_advantages(differences: Sequence[float], margin: float) -> list[float]:
    """Return the advantages [B] = d + margin, where d [B] are rewards less expected rewards.

    So each trajectory is compared with an expected reward that is `margin` lower. Off-policy, a baseline
    below the expected reward is safe. A baseline above it, as a running baseline is while success falls,
    lowers the probability of all that is sampled (AsymRE, arXiv 2506.20520). Raises ValueError for a
    difference that is not finite.
    """
    if not all(map(math.isfinite, differences)):
        raise ValueError(f"rewards and baselines must be finite, got {list(differences)}")
    return [difference + margin for difference in differences]
