"""What is played next, and which trajectories are trained on: section [data]."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dart_cli.config.schema.base import (
    MANY,
    Count,
    Folder,
    Positive,
    Section,
)

BY_BASELINE = ("task_baseline", "step_baseline")
"""Values of data.advantage that compare a trajectory with earlier ones; the others need groups."""


class DataConfig(Section):
    """What is played next and what is trained on."""

    group_size: int = Field(default=8, ge=1, le=1024)
    """Trajectories of one task and seed that are compared; 1 for none, with an `advantage` by running baselines."""

    groups_per_batch: Positive = 8
    """Groups in one batch: those with a gradient (mixed rewards), or with `group_size` = 1 all."""

    scheduling: Literal["rollout", "batch", "april", "oversample"] = "rollout"
    """What a freed slot waits for: nothing (`rollout`). The others are what most RL code does: trainer and
    rollouts take turns, and one batch is played at a time (`batch`), or more than it needs, of which the
    unfinished is suspended and goes on after the update (`april`) or is discarded (`oversample`)."""

    over_provision: float = Field(default=2.0, ge=1, le=8)
    """`april`, `oversample`: groups in play for each group of a batch."""

    max_open_groups: Count = 0
    """Most groups leased or waiting to be trained at once; 0 for as many as max_staleness admits."""

    max_staleness: Count = 4
    """A group whose oldest token is more versions behind than this is dropped, its reason recorded."""

    task_sampling: Literal["uniform", "frontier", "deviation"] = "frontier"
    """`frontier` prefers tasks near 50 % success (moving average), or with `reward = "value"` those
    whose rewards vary most; `deviation` less sharply, by the standard deviation; `uniform` takes all alike."""

    advantage: Literal[
        "group_std", "group_mean", "leave_one_out", "task_baseline", "step_baseline"
    ] = "group_std"
    """Rewards less their group's mean, with `group_std` over its standard deviation too;
    `leave_one_out` takes the mean of the other members (RLOO). Running baselines take what earlier trajectories
    of the task (and step) lead one to expect, with `group_size` = 1."""

    baseline_margin: float = Field(default=0.0, ge=0, le=1)
    """With running baselines: taken off the expected reward, so that passes weigh more than failures (AsymRE)."""

    reward: Literal["outcome", "value"] = "outcome"
    """What advantages are computed from: the `outcome`, 1 for a pass and 0 for a failure; or the
    verdict's reward, a `value` between 0 and 1."""

    early_stop: bool = False
    """Play half of each group first and stop if all pass with one reward: saves trajectories without a
    gradient. Only the first half counts for the success shown, so that it is the policy's."""

    dynamic_number: bool = False
    """Smaller groups for tasks whose success, or with `reward = "value"` mean reward, is above 0.6."""

    dynamic_length: bool = False
    """A task's step limit is its longest success so far and two more, once it has a success."""

    high_entropy: float = Field(default=1.0, gt=0, le=1)
    """Share of a group's steps that is trained on, those of highest mean token entropy; 1 for all."""

    pool_ratio: float = Field(default=0.0, ge=0, le=0.5)
    """An all-fail group gets one success from the experience pool, if it is then at most this share
    of the group, e.g. 0.125; 0 uses no pool."""

    pool: list[Folder] = []
    """Folders of exported or collected trajectories whose successes join the pool at the start; the run's
    own join it, too."""

    max_gb: float = Field(default=50.0, gt=0, le=MANY)
    """Size of the database, GB, beyond which the oldest screenshots that no part needs are removed."""

    @property
    def takes_turns(self) -> bool:
        """Whether rollouts stop while the trainer trains and all workers take its weights."""
        return self.scheduling != "rollout"
