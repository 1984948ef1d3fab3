"""Advantages of trajectories from their rewards, and which of a group's steps are trained on.

training_reward      the reward of a trajectory that advantages are computed from
group_advantages     rewards of a group -> advantages
step_advantages      values before each step of an episode, and its reward -> advantages
high_entropy_steps   the steps of a group in which the policy was least certain
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from bus.messages import Outcome
from envs.contract.base import reward_of

RewardKind = Literal["outcome", "value"]
"""Values of data.reward."""

Estimator = Literal["group_std", "group_mean", "leave_one_out"]
"""Values of data.advantage that compare the trajectories of a group."""

EPSILON = 1e-6
"""Added to the standard deviation, as in DART (arXiv 2509.23866)."""


def training_reward(outcome: Outcome, reward: float | None, kind: RewardKind) -> float | None:
    """Return R_i, the reward that advantages are computed from; None for an invalid trajectory.

    `reward` is the verdict's, in [0, 1]. With the kind `outcome` the result is 1 for a pass and 0 for a
    failure, whatever the reward. With `value` it is the reward, rounded to nine digits, so that rounding
    errors of an evaluator make no difference.
    """
    if kind == "outcome" or reward is None:
        return reward_of(outcome)
    return reward_of(outcome, round(reward, 9))


def group_advantages(rewards: Sequence[float], estimator: Estimator = "group_std") -> list[float]:
    """Return the advantages [G] of the rewards [G] of one group, each relative to the others.

    All estimators average over the group's *trajectories*, so a long one weighs no more than a short one:

    - `group_std`: (R_i - mean) / (std + 1e-6), GRPO (arXiv 2402.03300, section 4.1.2). `std` is
      the population's (divided by G): any group size gives mean 0 and variance 1.
    - `group_mean`: R_i - mean (Dr. GRPO, arXiv 2503.20783).
    - `leave_one_out`: R_i - mean of the others = (R_i - mean) G / (G - 1): the baseline does not
      depend on R_i, so the policy gradient is unbiased (RLOO, arXiv 2402.14740).

    Equal rewards, and a group of one, give exactly 0. Raises ValueError for a reward that is not
    finite.
    """
    if not all(math.isfinite(reward) for reward in rewards):
        raise ValueError(f"rewards must be finite, got {list(rewards)}")
    if not rewards or min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    size = len(rewards)
    mean = math.fsum(rewards) / size
    centred = [reward - mean for reward in rewards]
    if estimator == "group_mean":
        return centred
    if estimator == "leave_one_out":
        return [value * size / (size - 1) for value in centred]
    std = math.sqrt(math.fsum(value * value for value in centred) / size)
    return [value / (std + EPSILON) for value in centred]


def step_advantages(values: Sequence[float], reward: float, gae_lambda: float) -> list[float]:
    """Return the GAE [T] of one episode (arXiv 1506.02438, equation 16, with gamma 1).

    `values` [T] are the rewards that were expected before its steps; the only reward comes at its end:

        A_t = sum over k of lambda^k (V_{t+k+1} - V_{t+k}),  V_T = reward

    With lambda 1 that is reward - V_t, whatever was expected in between.
    """
    following, advantage = reward, 0.0
    advantages: list[float] = []  # from the last step to the first
    for value in reversed(values):
        advantage = following - value + gae_lambda * advantage
        advantages.append(advantage)
        following = value
    return advantages[::-1]


def mean_entropy(entropies: Sequence[float]) -> float:
    """Return the mean entropy H of one step, nats, over its completion's tokens [A], at least one.

    The entropies are of the distributions sampled from, at the sampling temperature (arXiv 2509.23866).
    """
    return sum(entropies) / len(entropies)


def high_entropy_steps(entropies: Sequence[float], share: float) -> list[bool]:
    """Return a mask [T] of a group's steps: True for the `share` of them with the highest mean entropy.

    `entropies` [T] are the mean entropies of the steps.

    The threshold is the k-th largest of the T entropies, k = ceil(share T), so at least one step
    is kept; steps that equal the threshold are all kept. `share` = 0.8 is the paper's 20th
    percentile (arXiv 2509.23866). Whether a step is kept depends only on its value, not on its
    position. Raises ValueError for a share outside (0, 1].
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must be in (0, 1], got {share}")
    if not entropies:
        return []
    # Rounded first: 0.7 x 10 is 7.000000000000001 in floats.
    count = math.ceil(round(share * len(entropies), 9))
    threshold = sorted(entropies, reverse=True)[max(count, 1) - 1]
    return [value >= threshold for value in entropies]
