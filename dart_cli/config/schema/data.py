"""What is played next and what is trained on: [data]."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dart_cli.config.schema.base import MANY, Count, Folder, Positive, Section

BY_TRACKER = ("task_tracker", "step_tracker")
"""Values of data.advantage that compare a trajectory with earlier ones; the others need groups."""


class DataConfig(Section):
    """What is played next and what is trained on."""

    group_size: int = Field(default=8, ge=1, le=1024)
    """Trajectories of one task and seed that are compared; 1 for none, with an `advantage` by trackers."""

    groups_per_batch: Positive = 8
    """Groups in one batch: those with a gradient (mixed rewards), or with `group_size` = 1 all."""

    scheduling: Literal["rollout", "task", "batch", "april"] = "rollout"
    """What a freed slot waits for: nothing (`rollout`), its group (`task`), the batch (`batch`), or
    the batch's target (`april`)."""

    coupled: bool = False
    """The synchronous baseline: rollouts stop while the trainer trains and all workers update."""

    over_provision: float = Field(default=2.0, ge=1, le=8)
    """`april`: groups in play for each group of a batch; what is unfinished is recycled."""

    recycle: bool = True
    """`april`: false discards what is unfinished when a batch is full (over-sample and discard)."""

    max_open_groups: Count = 0
    """Most groups leased or waiting to be trained at once; 0 for as many as max_staleness admits."""

    max_staleness: Count = 4
    """A group whose oldest token is more versions behind than this is dropped, its reason recorded."""

    task_sampling: Literal["uniform", "frontier", "deviation", "progress"] = "frontier"
    """`frontier` prefers tasks near 50 % success (moving average), or with `reward = "value"` those
    whose rewards vary most; `deviation` less sharply, by the standard deviation; `progress` those whose
    success changes now; `uniform` takes all alike."""

    advantage: Literal[
        "group_std", "group_mean", "leave_one_out", "task_tracker", "step_tracker"
    ] = "group_std"
    """Rewards less their group's mean, with `group_std` over its standard deviation too;
    `leave_one_out` takes the mean of the other members (RLOO). Trackers take what earlier trajectories
    of the task (and step) lead one to expect, with `group_size` = 1."""

    tracker_decay: float = Field(default=0.95, gt=0, lt=1)
    """Trackers: weight of an outcome relative to the next one."""

    tracker_half_life: float = Field(default=0.0, ge=0, le=MANY)
    """Trackers: nats (KL) after which the policy has moved so far that an outcome weighs half, between
    0.875 and 0.96 from one to the next; 0, or where nothing is measured, for `tracker_decay`."""

    tracker_scale: Literal["none", "batch"] = "none"
    """Trackers: advantages as they are, or less the batch's mean and over its standard deviation (SPO)."""

    tracker_margin: float = Field(default=0.0, ge=0, le=1)
    """Trackers: taken off the expected reward, so that passes weigh more than failures (AsymRE)."""

    reward: Literal["outcome", "value"] = "outcome"
    """What advantages are computed from: the `outcome`, 1 for a pass and 0 for a failure; or the
    verdict's reward, a `value` between 0 and 1."""

    discount: float = Field(default=1.0, gt=0, le=1)
    """A step's return is the reward times this for each step after it; 1 gives all steps of a
    trajectory the same advantage."""

    screen_credit: Literal["off", "anchor", "leave_one_out", "temporal_difference"] = "off"
    """Adds to the advantage what a step did on its screen, compared with the group's other steps there:
    with all of them (`anchor`, GiGPO), with the other trajectories' (`leave_one_out`), or what the next
    screen is worth less what this one is (`temporal_difference`)."""

    screen_weight: float = Field(default=1.0, gt=0, le=100)
    """`screen_credit`: what the screen advantage is multiplied by before it is added."""

    screen_discount: float = Field(default=0.95, gt=0, le=1)
    """`screen_credit`: `discount` of the returns that are compared on a screen."""

    fork_weight: float = Field(default=0.0, ge=0, le=100)
    """Where a failing trajectory left the way of a passing one of its group, the passing action is
    trained on from the failing one's prompt, as a demonstration of this advantage; 0 for no such sample."""

    replacements: float = Field(default=1.0, ge=0, le=8)
    """Trajectories without a verdict (invalid, lease lost) that a group may replace, for each of its
    members; beyond that it goes on with those that it has."""

    early_stop: bool = False
    """Play half of each group first and stop if all pass with one reward: saves trajectories without a
    gradient. Only the first half counts for the success shown, so that it is the policy's."""

    dynamic_number: bool = False
    """Smaller groups for tasks whose success, or with `reward = "value"` mean reward, is above 0.6, down
    to `min_group_size`."""

    min_group_size: int = Field(default=2, ge=2, le=1024)
    """`dynamic_number`: fewest trajectories of a group."""

    dynamic_length: bool = False
    """A task's step limit is its longest success so far plus `length_slack`, once it has a success."""

    length_slack: Count = 2
    """`dynamic_length`: steps above the longest success."""

    high_entropy: float = Field(default=1.0, gt=0, le=1)
    """Share of a group's steps that is trained on, those of highest mean token entropy; 1 for all."""

    pool_ratio: float = Field(default=0.0, ge=0, le=0.5)
    """An all-fail group gets one success from the experience pool, if it is then at most this share
    of the group, e.g. 0.125; 0 uses no pool."""

    pool: list[Folder] = []
    """Folders of exported or collected trajectories whose successes join the pool at the start."""

    pool_online: bool = True
    """Successes of this run join the pool, too."""

    pool_per_task: Positive = 32
    """Trajectories of a task that the pool keeps: the newest of each source."""

    lease_s: float = Field(default=60.0, ge=1, le=MANY)
    """Seconds without a step or heartbeat after which a lease is taken back."""

    max_gb: float = Field(default=50.0, gt=0, le=MANY)
    """Size of the database, GB, beyond which the oldest screenshots that no part needs are removed."""
