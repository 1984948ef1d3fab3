"""What is trained on, and why: finished groups -> a batch, those that wait, those that are dropped.

Pure: no clock, no store. Everything that goes in comes out exactly once, as used, as waiting, or as
dropped with a reason.

    all_success, all_fail   equal rewards: every advantage is zero; a success from the experience
                            pool may have joined the latter, which makes it fit
    equal_rewards           equal rewards although some passed and some failed: only where rewards
                            are values, and the environment gives both the same
    single_member           one valid trajectory has nothing to be compared with
    no_valid_member         every attempt was invalid or lost; with groups of one the only one of these
    stale                   a token of it is more than max_staleness versions behind the trainer
    invalid                 (a trajectory's) broken environment or evaluator: never trained on

Of a group that is trained on, each step of each of its trajectories is one planned sample, with a
reason:

    mixed         trained on: the rewards of its group differ
    baseline      trained on: compared with the reward that its task's baseline expected
    pool          trained on: of the success that joined from the experience pool
    low_entropy   left out, weight 0: not among the share of the group's steps that is kept

All steps of a trajectory have its advantage. With groups of one (data.group_size = 1) baselines take the
place of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from bus.messages import Outcome
from dart_cli.algo.advantage import Estimator, group_advantages, high_entropy_steps
from dart_cli.algo.running_baselines import Advantage, BaselineAdvantage, baseline_advantages
from dart_cli.data.store.rows import Decision, GroupReason, PlannedSample, SampleReason
from envs.contract.base import reward_of

Expected = Callable[[str, int], Sequence[float]]
"""A task's id, steps -> the reward that its baselines expect at each step [steps]."""


@dataclass(frozen=True)
class BaselineComparison:
    """What single trajectories are compared with, and how."""

    expected: Expected
    margin: float = 0.0  # data.baseline_margin


@dataclass(frozen=True)
class Member:
    """One trajectory of a finished group."""

    trajectory_id: str
    outcome: Outcome
    steps: int
    behind: int = 0  # versions that its oldest token is behind the trainer
    entropies: tuple[float, ...] = ()  # [steps], mean over a step's tokens, nats; () if unknown
    reward: float | None = None  # by data.reward; filled in by the outcome where it is left out

    def __post_init__(self) -> None:
        object.__setattr__(self, "reward", reward_of(self.outcome, self.reward))


@dataclass(frozen=True)
class FinishedGroup:
    """A group none of whose members is in play."""

    id: str
    members: tuple[Member, ...]
    pool: Member | None = None  # a past success that joined it; never counts as one of `members`
    task_id: str = ""

    @property
    def valid(self) -> list[Member]:
        """Members with a verdict of pass or fail."""
        return [member for member in self.members if member.outcome != "invalid"]

    @property
    def compared(self) -> list[Member]:
        """Members whose rewards make the advantages: the valid ones, then that of the pool."""
        return self.valid if self.pool is None else [*self.valid, self.pool]

    @property
    def behind(self) -> int:
        """Versions that the oldest token of a valid member is behind; one of the pool may be older."""
        return max((member.behind for member in self.valid), default=0)


@dataclass(frozen=True)
class Curation:
    """Where each of the groups went."""

    batch: tuple[FinishedGroup, ...]  # empty until there are enough for a batch
    waiting: tuple[FinishedGroup, ...]
    dropped: tuple[tuple[FinishedGroup, GroupReason], ...]
    samples: tuple[PlannedSample, ...]
    """Of the batch, in order of group, trajectory, step."""

    @property
    def reward(self) -> float:
        """Mean reward of the batch groups' own trajectories; 0 if there are none."""
        rewards = [reward for group in self.batch for reward in _rewards(group.valid)]
        return sum(rewards) / len(rewards) if rewards else 0.0

    @property
    def weights(self) -> dict[str, float]:
        """Trajectory id -> mean of its steps' weights: the share of them that is trained on."""
        of_steps: dict[str, list[float]] = {}
        for sample in self.samples:
            of_steps.setdefault(sample.trajectory_id, []).append(sample.weight)
        return {name: sum(weights) / len(weights) for name, weights in of_steps.items()}


def curate(
    groups: Sequence[FinishedGroup],
    *,
    groups_per_batch: int,
    max_staleness: int,
    advantage: Advantage = "group_std",
    high_entropy_share: float = 1.0,
    comparison: BaselineComparison | None = None,
) -> Curation:
    """Choose the first `groups_per_batch` informative, fresh groups for a batch.

    `high_entropy_share` is the share of each group's steps that is trained on. `tracking` must be given
    for an `advantage` by baselines, and only then.
    """
    by_baseline = comparison is not None
    dropped: list[tuple[FinishedGroup, GroupReason]] = []
    fit: list[FinishedGroup] = []
    for group in groups:
        judged = [(member.outcome, member.reward) for member in group.compared]
        reason = no_gradient(judged, by_baseline=by_baseline)
        if reason is None and group.behind > max_staleness:
            reason = "stale"
        if reason is None:
            fit.append(group)
        else:
            dropped.append((group, reason))
    if len(fit) < groups_per_batch:
        return Curation((), tuple(fit), tuple(dropped), ())
    batch = fit[:groups_per_batch]
    if advantage == "task_baseline" or advantage == "step_baseline":
        assert comparison is not None, "baselines need what they expect"
        samples = samples_by_baseline(batch, advantage, comparison, high_entropy_share)
    else:
        samples = [
            sample
            for group in batch
            for sample in plan_samples(group, advantage, high_entropy_share)
        ]
    return Curation(tuple(batch), tuple(fit[groups_per_batch:]), tuple(dropped), tuple(samples))


def no_gradient(
    judged: Sequence[tuple[Outcome, float | None]], *, by_baseline: bool = False
) -> GroupReason | None:
    """Why a group of these outcomes and rewards teaches nothing; None if it does.

    The rewards decide. Passes of different rewards teach something, and so do failures. `by_baseline`: each
    is compared with a baseline and not with the others, so that any verdict teaches something.
    """
    valid = [(outcome, reward) for outcome, reward in judged if outcome != "invalid"]
    if not valid:
        return "no_valid_member"
    if by_baseline:
        return None
    if len(valid) == 1:
        return "single_member"
    if len({reward for _, reward in valid}) > 1:
        return None
    outcomes = {outcome for outcome, _ in valid}
    if len(outcomes) > 1:
        return "equal_rewards"
    return "all_success" if "pass" in outcomes else "all_fail"


def may_join(valid: int, pool_ratio: float) -> bool:
    """Whether one member of the pool is at most that share of a group of so many valid members."""
    return 1 / (valid + 1) <= pool_ratio


def plan_samples(
    group: FinishedGroup, advantage: Estimator, high_entropy_share: float = 1.0
) -> list[PlannedSample]:
    """Every step of every compared member, with its advantage (step-wise GRPO).

    Of the valid members' steps those of lowest mean entropy have weight 0. A step of the pool
    always counts: another policy's entropy, if it is known at all, ranks with none of these.
    """
    ranked = [value for member in group.valid for value in member.entropies]
    verdicts = iter(high_entropy_steps(ranked, high_entropy_share))
    samples = []
    values = group_advantages(_rewards(group.compared), advantage)
    for member, value in zip(group.compared, values, strict=True):
        for step in range(member.steps):
            entropy = member.entropies[step] if member.entropies else None
            reason: SampleReason = "mixed"
            if member is group.pool:
                reason = "pool"
            elif entropy is not None and not next(verdicts):
                reason = "low_entropy"
            weight = 0.0 if reason == "low_entropy" else 1.0
            samples.append(
                PlannedSample(
                    *(group.id, member.trajectory_id, step, value, weight, reason, entropy)
                )
            )
    return samples


def samples_by_baseline(
    groups: Sequence[FinishedGroup],
    advantage: BaselineAdvantage,
    tracking: BaselineComparison,
    high_entropy_share: float = 1.0,
) -> list[PlannedSample]:
    """Every step of every group of a batch, by its reward less what the baselines expected.

    A batch is the batch's trajectories with `task_baseline`, each with one baseline, and its steps with
    `step_baseline`. A success of the pool is one of them.
    """
    planned = [
        replace(sample, reason="baseline" if sample.reason == "mixed" else sample.reason)
        for group in groups
        for sample in plan_samples(group, "group_mean", high_entropy_share)
    ]
    baselines: list[float] = []  # [samples]
    rewards: list[float] = []  # [samples]
    differences: list[float] = []  # [samples], or [trajectories with a step]
    lengths: list[int] = []  # samples of each difference
    for group in groups:
        for member in group.compared:
            found = tracking.expected(group.task_id, member.steps)
            reward = member.reward or 0.0
            baselines += found
            rewards += [reward] * member.steps
            of_steps = [reward - each for each in found]
            counted = of_steps if advantage == "step_baseline" else of_steps[:1]
            differences += counted
            lengths += [member.steps // len(counted)] * len(counted) if counted else []
    values = baseline_advantages(differences, tracking.margin)
    advantages = [value for value, count in zip(values, lengths, strict=True) for _ in range(count)]
    return [
        replace(sample, advantage=value, baseline=baseline, reward=reward)
        for sample, value, baseline, reward in zip(
            planned, advantages, baselines, rewards, strict=True
        )
    ]


def _rewards(members: Sequence[Member]) -> list[float]:
    return [member.reward for member in members if member.reward is not None]


def drop_decisions(group: FinishedGroup, reason: str) -> list[Decision]:
    """One row for a dropped group and one for each of its members."""
    return [
        Decision(group.id, False, reason, 0.0),
        *(
            Decision(m.trajectory_id, False, "invalid" if m.outcome == "invalid" else reason, 0.0)
            for m in group.members
        ),
    ]


def use_decisions(
    group: FinishedGroup,
    batch_id: int,
    weights: Mapping[str, float],
    own: Literal["mixed", "baseline"] = "mixed",
) -> list[Decision]:
    """One row for a group that is trained on and one for each trajectory that is compared in it.

    `own` is the reason of its own members. `weights` as Curation's. A trajectory whose weight is 0
    still counts as used: its reward is part of the others' advantages.
    """

    def used(member: Member, reason: SampleReason) -> Decision:
        weight = weights.get(member.trajectory_id, 1.0)  # 1 without a step
        return Decision(member.trajectory_id, True, reason, weight, batch_id)

    return [
        Decision(group.id, True, own if group.pool is None else "pool", 1.0, batch_id),
        *(
            Decision(member.trajectory_id, False, "invalid", 0.0)
            if member.outcome == "invalid"
            else used(member, own)
            for member in group.members
        ),
        *([] if group.pool is None else [used(group.pool, "pool")]),
    ]
