"""What is trained on, and why: finished groups -> a batch, those that wait, those that are dropped.

Pure: no clock, no store. Everything that goes in comes out exactly once, as used, as waiting, or as
dropped with a reason.

    all_success, all_fail   equal rewards: every advantage is zero
    single_member           one valid trajectory has nothing to be compared with
    no_valid_member         every attempt was invalid or lost
    stale                   its oldest token is more than max_staleness versions behind the trainer
    invalid                 (a trajectory's) broken environment or evaluator: never trained on
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from bus.messages import Outcome
from dart_cli.algo.advantage import Estimator, group_advantages

GroupReason = Literal["all_success", "all_fail", "single_member", "no_valid_member", "stale"]

REWARDS: dict[Outcome, float] = {"pass": 1.0, "fail": 0.0}
"""An invalid trajectory has no reward."""


@dataclass(frozen=True)
class Member:
    """One trajectory of a finished group."""

    trajectory_id: str
    outcome: Outcome
    steps: int
    oldest_version: int | None  # None where no token was sampled


@dataclass(frozen=True)
class FinishedGroup:
    """A group none of whose members is in play."""

    id: str
    members: tuple[Member, ...]

    @property
    def valid(self) -> list[Member]:
        """Members with a verdict of pass or fail."""
        return [member for member in self.members if member.outcome in REWARDS]

    @property
    def oldest_version(self) -> int | None:
        """Of the weights that sampled any token of a valid member."""
        versions = [m.oldest_version for m in self.valid if m.oldest_version is not None]
        return min(versions, default=None)


@dataclass(frozen=True)
class PlannedSample:
    """A step chosen for a batch."""

    trajectory_id: str
    step: int
    advantage: float
    weight: float  # multiplies the sample's loss


@dataclass(frozen=True)
class Decision:
    """What became of a group or a trajectory, and why."""

    subject: str  # id of the group or trajectory
    used: bool
    reason: str
    weight: float = 1.0
    batch_id: int | None = None


@dataclass(frozen=True)
class Curation:
    """Where each of the groups went."""

    chosen: tuple[FinishedGroup, ...]  # empty until there are enough for a batch
    waiting: tuple[FinishedGroup, ...]
    dropped: tuple[tuple[FinishedGroup, GroupReason], ...]
    samples: tuple[PlannedSample, ...]  # of the chosen, in order of group, trajectory, step

    @property
    def reward(self) -> float:
        """Mean reward of the chosen trajectories; 0 if there are none."""
        rewards = [REWARDS[member.outcome] for group in self.chosen for member in group.valid]
        return sum(rewards) / len(rewards) if rewards else 0.0


def curate(
    groups: Sequence[FinishedGroup],
    *,
    groups_per_batch: int,
    trainer_version: int,
    max_staleness: int,
    advantage: Estimator = "group_std",
) -> Curation:
    """Choose the first `groups_per_batch` informative, fresh groups for a batch.

    `trainer_version` is what the weights are before the update that would use the batch.
    """
    dropped: list[tuple[FinishedGroup, GroupReason]] = []
    fit: list[FinishedGroup] = []
    for group in groups:
        reason = no_gradient([member.outcome for member in group.members])
        if reason is None and is_stale(group.oldest_version, trainer_version, max_staleness):
            reason = "stale"
        if reason is None:
            fit.append(group)
        else:
            dropped.append((group, reason))
    if len(fit) < groups_per_batch:
        return Curation((), tuple(fit), tuple(dropped), ())
    chosen = fit[:groups_per_batch]
    samples = [sample for group in chosen for sample in plan_samples(group, advantage)]
    return Curation(tuple(chosen), tuple(fit[groups_per_batch:]), tuple(dropped), tuple(samples))


def no_gradient(outcomes: Sequence[Outcome]) -> GroupReason | None:
    """Why a group of these outcomes teaches nothing; None if it does."""
    valid = [outcome for outcome in outcomes if outcome in REWARDS]
    if not valid:
        return "no_valid_member"
    if len(valid) == 1:
        return "single_member"
    if len(set(valid)) == 1:
        return "all_success" if valid[0] == "pass" else "all_fail"
    return None


def is_stale(oldest_version: int | None, trainer_version: int, max_staleness: int) -> bool:
    """Whether weights that old are too far behind the trainer to be trained on."""
    return oldest_version is not None and trainer_version - oldest_version > max_staleness


def plan_samples(group: FinishedGroup, advantage: Estimator) -> list[PlannedSample]:
    """Every step of every valid member, with its trajectory's advantage (step-wise GRPO)."""
    members = group.valid
    advantages = group_advantages([REWARDS[member.outcome] for member in members], advantage)
    return [
        PlannedSample(member.trajectory_id, step, value, 1.0)
        for member, value in zip(members, advantages, strict=True)
        for step in range(member.steps)
    ]


def drop_decisions(group: FinishedGroup, reason: str) -> list[Decision]:
    """One row for a dropped group and one for each of its members."""
    return [
        Decision(group.id, False, reason, 0.0),
        *(
            Decision(m.trajectory_id, False, reason if m.outcome in REWARDS else "invalid", 0.0)
            for m in group.members
        ),
    ]


def use_decisions(group: FinishedGroup, batch_id: int) -> list[Decision]:
    """One row for a group that is trained on and one for each of its members."""
    return [
        Decision(group.id, True, "mixed", 1.0, batch_id),
        *(
            Decision(member.trajectory_id, True, "mixed", 1.0, batch_id)
            if member.outcome in REWARDS
            else Decision(member.trajectory_id, False, "invalid", 0.0)
            for member in group.members
        ),
    ]
