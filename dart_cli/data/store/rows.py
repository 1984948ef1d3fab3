"""The rows that the store's queries return: a frozen dataclass for each kind.

Points in time are in unix seconds, durations in seconds, log-probabilities and entropies in nats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from bus.messages import Outcome

GroupState = Literal["open", "ready", "batched", "trained", "dropped"]
TrajectoryState = Literal["leased", "playing", "finished", "batched", "trained", "dropped"]
GroupReason = Literal[
    "all_success", "all_fail", "equal_rewards", "single_member", "no_valid_member", "stale"
]
DROP_REASONS = (
    *get_args(GroupReason),
    "task_removed",
    "surplus",
    "invalid",
    "cancelled",
    "lease_expired",
    "worker_lost",
    "incomplete",
)
"""Reasons why a trajectory or its group is not trained on. dart_cli/data/curate.py explains GroupReason.

    task_removed    (a group's) the run was started again without its task
    surplus         (a group's) it was in play when the batch was full, with data.scheduling = "oversample"
    invalid         the environment or the evaluator broke
    cancelled       the environment gave the trajectory up
    lease_expired   the trajectory's process gave no sign of life
    worker_lost     its process died or was restarted
    incomplete      steps or images of it are missing
"""
SampleReason = Literal["mixed", "baseline", "pool", "teacher", "low_entropy"]


@dataclass(frozen=True)
class RunRow:
    """The run itself."""

    id: str
    created_at: float  # unix seconds
    seed: int
    config: str  # JSON, of the newest start
    active_s: float  # time for which `dart data` has served it, over all starts
    stop_reason: str  # why a stop was requested; empty if none was, or once it is carried out
    learned: float = 0.0  # success that was proved when train.stop_at ended it; 0 if it did not


@dataclass(frozen=True)
class GroupRow:
    """One task instance whose trajectories are compared."""

    id: str
    number: int  # order of opening, from 1
    suite: str
    task_id: str
    task_seed: int
    size: int  # trajectories that it needs
    state: GroupState
    reason: str
    """Why it was dropped; of a group that only a teacher gives a gradient, why it has no other; else empty."""
    opened_at: float
    closed_at: float | None
    batch_id: int | None
    pool_member: str | None = None  # id of the success that joined it from the pool


@dataclass(frozen=True)
class TrajectoryRow:
    """One episode in the ledger."""

    id: str
    group_id: str
    attempt: int  # from 0, within the group
    state: TrajectoryState
    reason: str  # why dropped; else empty
    worker: str
    slot: int
    sampling_seed: int
    leased_at: float
    ended_at: float | None
    outcome: Outcome | None
    verdict_reason: str | None
    stop_reason: str | None
    steps: int | None  # submitted; None while it is played
    oldest_version: int | None  # of the weights that sampled its tokens
    newest_version: int | None
    final_screenshot: str | None  # key of screenshots
    reset_s: float | None
    wall_s: float | None
    batch_id: int | None
    max_steps: int  # of its lease
    reward: float | None = None  # the verdict's, in [0, 1]; None without a valid one
    counted: int = 0  # 1 if its outcome counts for its task's success; see dart_cli.data.groups
    app_log: str = ""  # what the application reported, a line each, such as console errors


PoolSource = Literal["oracle", "demonstration", "teacher", "online", "imported"]
"""Who played a success: the task's own solution, a person or a hinted policy, a better model, this run's
policy, or another run."""


@dataclass(frozen=True)
class PoolRow:
    """One member of the experience pool: a success."""

    trajectory_id: str  # its steps are in `steps` under this id
    suite: str
    task_id: str
    task_seed: int
    source: PoolSource
    steps: int
    has_logprobs: bool  # its behaviour log-probabilities are known
    origin: str  # the run id and trajectory that it comes from; empty if it comes from no run
    added_at: float  # unix seconds
    evicted_at: float | None  # None while it may be drawn
    used: int  # batches it was part of
    reward: float = 1.0  # its verdict's


@dataclass(frozen=True)
class PlannedSample:
    """A step of a trajectory in a batch: trained on, or left out."""

    group_id: str  # the group it is compared in; a member of the pool may be in several
    trajectory_id: str
    step: int
    advantage: float
    weight: float  # multiplies the sample's loss; 0 if it is left out
    reason: SampleReason = "mixed"
    entropy: float | None = None  # mean over its tokens, nats
    baseline: float | None = None  # reward that the running baseline expected; None without one
    reward: float | None = None  # of its trajectory; None without a running baseline


@dataclass(frozen=True, kw_only=True)
class SampleRow(PlannedSample):
    """A stored step of a batch: trained on or left out, and why."""

    batch_id: int
    position: int
    gap_mean: float | None  # mean proximal minus behaviour log-probability; None: not reported
    gap_largest: float | None  # largest absolute difference of these
    value: float | None  # reward that the trainer's critic expected; None: not reported
    valued: float | None  # the advantage by the critic, which was trained on

    @property
    def trained_advantage(self) -> float:
        """Advantage that was trained on: the critic's if there is one."""
        return self.advantage if self.valued is None else self.valued


@dataclass(frozen=True)
class Decision:
    """The decision whether a group, a trajectory or a batch's replay was used, and why."""

    subject: str  # id of the group or trajectory, or `batch N`
    used: bool
    reason: str
    weight: float = 1.0
    batch_id: int | None = None


@dataclass(frozen=True)
class CountersRow:
    """Numbers of one task's trajectories with the same state, reason and outcome."""

    task_id: str
    state: TrajectoryState
    reason: str  # why dropped; else empty
    outcome: Outcome | None
    trajectories: int
    steps: int  # of those that have ended
    counted: int  # trajectories that count for their task's success
    rewards: float  # sum over the counted ones
    acted: int  # trajectories with a step

    @property
    def verdict(self) -> Outcome | None:
        """The outcome; None for trajectories that the end of a run or a lease has cancelled."""
        return None if self.reason == "cancelled" else self.outcome


@dataclass(frozen=True)
class Remainder:
    """Counts of contradictory records in a run; all are 0 if nothing was lost."""

    steps: int  # ended episodes with another number of stored steps than they reported
    samples: int  # trajectories of a batch without each of their steps once in it
    batches: int
    """Fresh batches for which the trainer reported another number of steps than planned."""
    reasons: int  # trajectories that were dropped without a reason

    @property
    def total(self) -> int:
        """Sum of all four counts."""
        return self.steps + self.samples + self.batches + self.reasons


@dataclass(frozen=True)
class ReplayCounts:
    """Numbers of replays, and of batches that were refused when it was their turn."""

    updates: int  # batches in the weights
    replays: int  # replays among them that were not skipped
    refused: dict[str, int]  # reason -> batches

    @property
    def refused_words(self) -> str:
        """The refused batches in words, e.g. "3 batches not again: 2 low_ess, 1 stale"; empty without any."""
        if not self.refused:
            return ""
        number = sum(self.refused.values())
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.refused.items()))
        return f"{number} {'batch' if number == 1 else 'batches'} not again: {reasons}"


@dataclass(frozen=True)
class SizesRow:
    """The size of a run's parts."""

    steps: int
    tokens: int  # of completions
    step_bytes: int  # texts, tokens and their numbers, as stored
    screenshots: int
    screenshot_bytes: int
    routing_bytes: int  # of mixtures' choices of experts
    disk_bytes: int  # the database with its write-ahead log


@dataclass(frozen=True)
class BatchRow:
    """One batch: the work of one update."""

    id: int
    state: Literal["batched", "trained"]
    formed_at: float
    formed_version: int
    temperature: float
    reward: float
    trained_at: float | None = None
    trained_version: int | None = None
    run_s: float = 0.0  # how long the run had been served when it was formed
    trajectories: int = 0  # as in Batch
    replay_of: int | None = None  # the batch whose samples it has; None for a fresh batch
    reuse: int = 0  # how often these samples were trained on before


@dataclass(frozen=True)
class OwnCounts:
    """Counts of what the policy itself played; see dart_cli.data.progress.OwnPlay."""

    passed: int
    completions: int
    failed_since: int  # trajectories that failed since the newest one that passed
    updates_then: int  # trained batches when that one ended; 0 if none passed


@dataclass(frozen=True)
class BaselineRow:
    """Expected reward of a task at one step of its episodes; see dart_cli/algo/running_baselines.py."""

    task_id: str
    step: int  # 0-based; -1 for the whole task
    passed: float  # discounted rewards
    failed: float  # discounted 1 - rewards


@dataclass(frozen=True)
class CurvePoint:
    """Success of one task at one bucket of policy versions."""

    task_id: str
    policy_version: int  # first version of the bucket
    trajectories: int  # those that count for success
    passed: int
    ended_at: float  # unix seconds of the last of them

    @property
    def success(self) -> float:
        """Share that passed."""
        return self.passed / self.trajectories


@dataclass(frozen=True)
class MetricPoint:
    """One value of one metric of the trainer."""

    name: str
    step: int  # batch id
    at: float  # unix seconds
    value: float


@dataclass(frozen=True)
class VersionRow:
    """One published weight set."""

    policy_version: int
    path: str
    digest: str
    published_at: float
    updates: int  # updates in these weights


@dataclass(frozen=True)
class SyncRow:
    """The sync of one rollout worker to one weight set; times as in bus.weights.SyncDone."""

    id: int
    worker: str
    policy_version: int
    error: str  # why the set was refused; empty if it serves
    granted_at: float
    done_at: float
    waited_s: float
    transfer_s: float
    pause_s: float
    in_flight: int


@dataclass(frozen=True)
class ProcessRow:
    """One worker's newest heartbeat; fields as in bus.messages.Heartbeat."""

    worker: str
    role: str
    host: str
    started_at: float
    heard_at: float  # unix seconds
    policy_version: int  # -1 if none
    state: str
    waiting_for: str
    waiting_s: float


@dataclass(frozen=True)
class JudgementRow:
    """The judgement of one trajectory by one judge; fields as in bus.messages.Judgement."""

    trajectory_id: str
    judge: str
    use: Literal["missing", "check", "later"]
    outcome: Outcome
    score: float | None
    reason: str
    calls: int
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    at: float


@dataclass(frozen=True)
class PlayedStep:
    """One step that had an action."""

    actions: list[dict[str, Any]]  # those of its completion that were performed, in order
    screenshot: str  # key of screenshots: the screen before the action


@dataclass(frozen=True)
class UsageRow:
    """Time in one phase of the processes that have had one worker's name."""

    worker: str
    phase: str
    role: str
    started_at: float  # of the newest process
    seconds: float  # of that process, as its newest heartbeat reports
    before_s: float  # of its predecessors, and between them

    @property
    def total_s(self) -> float:
        """Seconds over the whole run."""
        return self.before_s + self.seconds
