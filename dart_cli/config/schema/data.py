"""Which tasks are played next, and which trajectories are trained on: section [data]."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dart_cli.config.schema.base import MANY, Count, Folder, Positive, Section

BY_BASELINE = ("task_baseline", "step_baseline")
"""Values of data.advantage that compare a trajectory with earlier ones of its task; the others need
groups."""

OVER_PROVISION = 2
"""Groups in play for each group of a batch where `data.scheduling` is "april" or "oversample". With twice as
many, a batch is full before its slowest episodes end, and at most one batch is played in excess."""


class DataConfig(Section):
    """Which tasks are played next, and which trajectories are trained on."""

    group_size: int = Field(default=8, ge=1, le=1024)
    """Trajectories of one task and seed that are compared with each other. 1 compares none; `advantage` must
    then use running baselines."""

    groups_per_batch: Positive = 8
    """Groups in one batch. Only groups with a gradient (mixed rewards) count; with `group_size` = 1 all
    do."""

    scheduling: Literal["rollout", "batch", "april", "oversample"] = "rollout"
    """What a free slot waits for. `rollout`: nothing; it plays while the trainer trains. With the other
    three, trainer and rollout workers take turns, as in most RL code. `batch` plays one batch at a time.
    `april` and `oversample` play twice as many groups as a batch needs: `april` suspends unfinished episodes
    and continues them after the update, `oversample` discards them."""

    max_open_groups: Count = 0
    """Largest number of groups that play or wait to be trained on; 0 allows as many as `max_staleness`
    does."""

    max_staleness: Count = 4
    """A group is dropped, and the reason recorded, if its oldest token is more than this many policy versions
    behind."""

    task_sampling: Literal["uniform", "frontier", "deviation"] = "frontier"
    """How tasks are drawn. `frontier` prefers tasks near 50 % success (a moving average), or with `reward =
    "value"` tasks whose rewards vary most. `deviation` prefers the same tasks less sharply, by the standard
    deviation. `uniform` draws all tasks equally often."""

    advantage: Literal[
        "group_std", "group_mean", "leave_one_out", "task_baseline", "step_baseline"
    ] = "group_std"
    """What is subtracted from a reward. `group_mean` subtracts the group's mean; `group_std` also divides by
    the group's standard deviation (GRPO); `leave_one_out` subtracts the mean of the other members (RLOO). The
    running baselines need `group_size` = 1 and subtract a baseline from earlier trajectories of the task
    (`task_baseline`), or of the task and step (`step_baseline`)."""

    baseline_margin: float = Field(default=0.0, ge=0, le=1)
    """With running baselines: subtracted from the expected reward, so that passes weigh more than failures
    (AsymRE)."""

    reward: Literal["outcome", "value"] = "outcome"
    """What advantages are computed from. `outcome`: 1 for a pass, 0 for a failure. `value`: the reward in the
    verdict, between 0 and 1."""

    early_stop: bool = False
    """Whether half of each group is played first, and the rest is left out if all of that passes with one
    reward. This saves trajectories without a gradient. Only the first half counts for the success that is
    shown, because it is always played; the rest is played less often where the policy is good."""

    dynamic_number: bool = False
    """Whether groups are smaller for tasks whose success (with `reward = "value"`: mean reward) is above
    0.6."""

    dynamic_length: bool = False
    """Whether a task that has passed gets a shorter step limit: its longest success so far, and two more
    steps."""

    high_entropy: float = Field(default=1.0, gt=0, le=1)
    """Share of a group's steps that is trained on: those with the highest mean token entropy. 1 trains on
    all."""

    pool_ratio: float = Field(default=0.0, ge=0, le=0.5)
    """A group in which all fail gets one success from the experience pool, if that is then at most this share
    of the group, e.g. 0.125. 0 uses no pool."""

    pool: list[Folder] = []
    """Folders of exported or collected trajectories. Their successes join the pool at the start; successes of
    the run join it later."""

    max_gb: float = Field(default=50.0, gt=0, le=MANY)
    """Size limit of the database, GB. Beyond it, the oldest screenshots that are no longer needed are
    removed."""

    @property
    def takes_turns(self) -> bool:
        """Whether trainer and rollout workers take turns: while the trainer trains, no episode goes on."""
        return self.scheduling != "rollout"
