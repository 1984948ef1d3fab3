"""Decide what is trained on, and why: finished groups -> a batch, groups that wait, groups that are dropped.

The decision is pure: it uses no clock and no store. Each group comes out exactly once, in the batch, as
waiting, or as dropped for one of these reasons:

    all_success, all_fail   all rewards are equal, so every advantage is zero, and no teacher scores the tokens. A success from the experience
                            pool may have joined a group that failed throughout; then it is trained on
    equal_rewards           all rewards are equal although some passed and some failed; this happens only with
                            rewards as values
    single_member           one valid trajectory has nothing to be compared with
    no_valid_member         every attempt was invalid or lost; groups of one are dropped for this or `stale`
    stale                   one of its tokens is more than max_staleness versions behind the trainer
    invalid                 (a trajectory's) the environment or the evaluator broke; it is never trained on

Each step of each trajectory of a group in the batch is one planned sample, with one of these reasons:

    mixed         trained on: the rewards of its group differ
    baseline      trained on: compared with the reward that its task's running baseline expected
    pool          trained on: a step of the success that joined from the experience pool
    teacher       trained on: rewards are equal, or there is one, and a teacher scores the tokens
    low_entropy   left out with weight 0: only a share of the group's steps, of highest entropy, is trained on

All steps of a trajectory have the trajectory's advantage. With groups of one (data.group_size = 1) running
baselines take the place of the group.
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

_OF_GROUPS = ("mixed", "teacher")
"""Reasons for which samples of a compared group are trained on."""

ExpectedRewards = Callable[[str, int], Sequence[float]]
"""Task id, number of steps -> the reward that the task's baselines expect at each step [steps]."""


@dataclass(frozen=True)
class BaselineComparison:
    """The running baselines with which single trajectories are compared."""

    expected: ExpectedRewards
    margin: float = 0.0  # data.baseline_margin


@dataclass(frozen=True)
class Member:
    """One trajectory of a finished group."""

    trajectory_id: str
    outcome: Outcome
    steps: int
    behind: int = 0  # versions that its oldest token is behind the trainer
    entropies: tuple[float, ...] = ()  # [steps], mean over a step's tokens, nats; () if unknown
    reward: float | None = None  # by data.reward; if it is left out, the outcome's

    def __post_init__(self) -> None:
        object.__setattr__(self, "reward", reward_of(self.outcome, self.reward))


@dataclass(frozen=True)
class FinishedGroup:
    """A group whose members have all ended."""

    id: str
    members: tuple[Member, ...]
    pool: Member | None = None  # a past success that joined it; it is not in `members`
    task_id: str = ""

    @property
    def valid(self) -> list[Member]:
        """Members with a verdict of pass or fail."""
        return [member for member in self.members if member.outcome != "invalid"]

    @property
    def compared(self) -> list[Member]:
        """Members whose rewards are compared: the valid ones, then the member of the pool."""
        return self.valid if self.pool is None else [*self.valid, self.pool]

    @property
    def has_equal_rewards(self) -> bool:
        """True if all compared members have the same reward, or there is one member."""
        return len(set(_rewards(self.compared))) <= 1

    @property
    def behind(self) -> int:
        """Versions that the oldest token of a valid member is behind; the pool's member may be older."""
        return max((member.behind for member in self.valid), default=0)


@dataclass(frozen=True)
class Curation:
    """The decision about each group: it is in the batch, waits, or is dropped."""

    batch: tuple[FinishedGroup, ...]  # the groups of the next batch; empty until there are enough
    waiting: tuple[FinishedGroup, ...]
    dropped: tuple[tuple[FinishedGroup, GroupReason], ...]
    samples: tuple[PlannedSample, ...]
    """The steps of the batch, in order of group, trajectory and step."""

    @property
    def reward(self) -> float:
        """Mean reward of the batch's trajectories without members of the pool; 0 if there are none."""
        rewards = [reward for group in self.batch for reward in _rewards(group.valid)]
        return sum(rewards) / len(rewards) if rewards else 0.0

    @property
    def weights(self) -> dict[str, float]:
        """Trajectory id -> the share of its steps that is trained on: the mean of their weights."""
        by_trajectory: dict[str, list[float]] = {}
        for sample in self.samples:
            by_trajectory.setdefault(sample.trajectory_id, []).append(sample.weight)
        return {id_: sum(weights) / len(weights) for id_, weights in by_trajectory.items()}


def curate(
    groups: Sequence[FinishedGroup],
    *,
    groups_per_batch: int,
    max_staleness: int,
    advantage: Advantage = "group_std",
    high_entropy_share: float = 1.0,
    comparison: BaselineComparison | None = None,
    has_teacher: bool = False,
) -> Curation:
    """Return the decision about each group; the first `groups_per_batch` that fit form the batch.

    A group fits if it has a gradient and no token of it is more than `max_staleness` versions behind.
    `high_entropy_share` is the share of each group's steps that is trained on. `comparison` must be passed if
    `advantage` is by running baselines, and only then. With `has_teacher` a teacher scores all tokens.
    """
    # 1. Drop the groups that cannot be trained on.
    dropped: list[tuple[FinishedGroup, GroupReason]] = []
    fit: list[FinishedGroup] = []
    for group in groups:
        verdicts = [(member.outcome, member.reward) for member in group.compared]
        reason = no_gradient(verdicts, alone=has_teacher or comparison is not None)
        if reason is None and group.behind > max_staleness:
            reason = "stale"
        if reason is None:
            fit.append(group)
        else:
            dropped.append((group, reason))
    # 2. Take the oldest of the others, if they are enough for a batch.
    if len(fit) < groups_per_batch:
        return Curation((), tuple(fit), tuple(dropped), ())
    batch = fit[:groups_per_batch]
    # 3. Compute the advantage of each of their steps.
    if advantage == "task_baseline" or advantage == "step_baseline":
        assert comparison is not None, "an advantage by running baselines needs a comparison"
        samples = samples_by_baseline(batch, advantage, comparison, high_entropy_share)
    else:
        samples = [
            sample
            for group in batch
            for sample in plan_samples(group, advantage, high_entropy_share)
        ]
    return Curation(tuple(batch), tuple(fit[groups_per_batch:]), tuple(dropped), tuple(samples))


def no_gradient(
    verdicts: Sequence[tuple[Outcome, float | None]], *, alone: bool = False
) -> GroupReason | None:
    """Return why a group of these outcomes and rewards has no gradient; None if it has one.

    The rewards decide: passes with different rewards have a gradient, and so do such failures. With `alone`
    each member has a gradient without the others, from a running baseline or a teacher, so any valid verdict
    has one.
    """
    valid = [(outcome, reward) for outcome, reward in verdicts if outcome != "invalid"]
    if not valid:
        return "no_valid_member"
    if alone:
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
    """Return True if one member of the pool is at most `pool_ratio` of a group with `valid` other members."""
    return 1 / (valid + 1) <= pool_ratio


def plan_samples(
    group: FinishedGroup, advantage: Estimator, high_entropy_share: float = 1.0
) -> list[PlannedSample]:
    """Return every step of every compared member, with its advantage (step-wise GRPO).

    Steps of valid members outside the `high_entropy_share` of highest mean entropy have weight 0. A step of
    the pool's member always has weight 1, since another policy's entropy cannot be compared with these.
    """
    entropies = [value for member in group.valid for value in member.entropies]
    is_high = iter(high_entropy_steps(entropies, high_entropy_share))
    samples = []
    values = group_advantages(_rewards(group.compared), advantage)
    for member, value in zip(group.compared, values, strict=True):
        for step in range(member.steps):
            entropy = member.entropies[step] if member.entropies else None
            reason: SampleReason = "teacher" if group.has_equal_rewards else "mixed"
            if member is group.pool:
                reason = "pool"
            elif entropy is not None and not next(is_high):
                reason = "low_entropy"
            weight = 0.0 if reason == "low_entropy" else 1.0
            samples.append(
                PlannedSample(
                    group_id=group.id,
                    trajectory_id=member.trajectory_id,
                    step=step,
                    advantage=value,
                    weight=weight,
                    reason=reason,
                    entropy=entropy,
                )
            )
    return samples


def samples_by_baseline(
    groups: Sequence[FinishedGroup],
    advantage: BaselineAdvantage,
    comparison: BaselineComparison,
    high_entropy_share: float = 1.0,
) -> list[PlannedSample]:
    """Return every step of a batch's groups, with its reward less the expected reward as its advantage.

    With `task_baseline` a trajectory has one expected reward, with `step_baseline` one for each step.
    Members of the pool are compared in the same way.
    """
    planned = [
        replace(sample, reason="baseline" if sample.reason in _OF_GROUPS else sample.reason)
        for group in groups
        for sample in plan_samples(group, "group_mean", high_entropy_share)
    ]
    baselines: list[float] = []  # [samples]
    rewards: list[float] = []  # [samples]
    differences: list[float] = []  # [samples], or [trajectories with a step]
    lengths: list[int] = []  # samples of each difference
    for group in groups:
        for member in group.compared:
            expected = comparison.expected(group.task_id, member.steps)
            reward = member.reward or 0.0
            baselines += expected
            rewards += [reward] * member.steps
            by_step = [reward - value for value in expected]
            of_member = by_step if advantage == "step_baseline" else by_step[:1]
            differences += of_member
            lengths += [member.steps // len(of_member)] * len(of_member) if of_member else []
    values = baseline_advantages(differences, comparison.margin)
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
    """Return the decision on a dropped group, then one on each of its members."""
    decisions = [Decision(group.id, False, reason, 0.0)]
    for member in group.members:
        why = "invalid" if member.outcome == "invalid" else reason
        decisions.append(Decision(member.trajectory_id, False, why, 0.0))
    return decisions


def use_decisions(
    group: FinishedGroup,
    batch_id: int,
    weights: Mapping[str, float],
    reason: Literal["mixed", "baseline"] = "mixed",
) -> list[Decision]:
    """Return the decision on a group in a batch, then one on each of its trajectories.

    `reason` is the reason of the group's own members if their rewards differ; `weights` are as in Curation. A
    trajectory of weight 0 still counts as used, since its reward is part of the others' advantages.
    """

    def use(member: Member, why: SampleReason) -> Decision:
        weight = weights.get(member.trajectory_id, 1.0)  # 1 for a trajectory without a step
        return Decision(member.trajectory_id, True, why, weight, batch_id)

    own: SampleReason = reason
    if reason == "mixed" and group.has_equal_rewards:
        own = "teacher"
    decisions = [Decision(group.id, True, own if group.pool is None else "pool", 1.0, batch_id)]
    for member in group.members:
        if member.outcome == "invalid":
            decisions.append(Decision(member.trajectory_id, False, "invalid", 0.0))
        else:
            decisions.append(use(member, own))
    if group.pool is not None:
        decisions.append(use(group.pool, "pool"))
    return decisions
