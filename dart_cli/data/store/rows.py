"""What the store's queries return: one frozen dataclass for each kind of row.

Moments are unix seconds, durations seconds, log-probabilities and entropies nats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from bus.messages import Outcome

GroupState = Literal["open", "ready", "batched", "trained", "dropped"]
TrajectoryState = Literal["leased", "playing", "finished", "batched", "trained", "dropped"]
GroupReason = Literal[
    "all_success", "all_fail", "equal_rewards", "single_member", "no_valid_member", "stale"
]
DROP_REASONS = (
    *("all_success", "all_fail", "equal_rewards", "stale", "single_member"),
    *("no_valid_member", "task_removed"),
    *("surplus", "invalid", "cancelled", "lease_expired", "worker_lost", "incomplete"),
)
"""Why a trajectory is not trained on, its group's reasons first; docs/data.md explains each."""
SampleReason = Literal["mixed", "baseline", "pool", "low_entropy"]


@dataclass(frozen=True)
class RunRow:
    """The run itself."""

    id: str
    created_at: float  # unix seconds
    seed: int
    config: str  # JSON, of the newest start
    active_s: float  # `dart data` has served this long, over all starts
    stop_reason: str  # why a stop was requested; empty if it was not, or once it was carried out
    learned: float = 0.0  # success that was proved when train.stop_at ended it; 0 if it did not


@dataclass(frozen=True)
class GroupRow:
    """One task instance whose trajectories are compared."""

    id: str
    number: int  # order of opening, from 1
    suite: str
    task_id: str
    task_seed: int
    size: int  # trajectories wanted
    state: GroupState
    reason: str  # why dropped; else empty
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
    counted: int = 0  # 1 if its outcome is part of its task's success; see dart_cli.data.groups


PoolSource = Literal["oracle", "demonstration", "online", "imported"]
"""The task's own solution, a person's or hinted policy's, this run's policy, another run's."""


@dataclass(frozen=True)
class PoolRow:
    """One success of the experience pool."""

    trajectory_id: str  # its steps are in `steps` under this id
    suite: str
    task_id: str
    task_seed: int
    source: PoolSource
    steps: int
    known: bool  # behaviour log-probabilities are those it was sampled with
    origin: str  # where it was first: run id and trajectory; empty if nowhere
    added_at: float  # unix seconds
    evicted_at: float | None  # None while it may be drawn
    used: int  # batches it was part of
    reward: float = 1.0  # its verdict's


@dataclass(frozen=True)
class PlannedSample:
    """A step of a trajectory that is used: trained on, or left out."""

    group_id: str  # in which it is compared; a member of the pool may be in several
    trajectory_id: str
    step: int
    advantage: float
    weight: float  # multiplies the sample's loss; 0 where it is left out
    reason: SampleReason = "mixed"
    entropy: float | None = None  # mean over its tokens, nats
    baseline: float | None = (
        None  # reward that its task's baseline expected; None without baselines
    )
    reward: float | None = None  # of its trajectory; None without baselines


@dataclass(frozen=True, kw_only=True)
class SampleRow(PlannedSample):
    """A step of a batch, trained on or left out, and why."""

    batch_id: int
    position: int
    gap_mean: float | None  # of proximal minus behaviour log-probability, nats; None: not reported
    gap_largest: float | None  # of the absolute differences
    value: float | None  # reward that the trainer's critic expected; None: not reported
    valued: float | None  # the advantage by it, which was trained on

    @property
    def trained_advantage(self) -> float:
        """The critic's where there is one."""
        return self.advantage if self.valued is None else self.valued


@dataclass(frozen=True)
class Decision:
    """Whether a group or a trajectory was used, and why."""

    subject: str  # id of the group or trajectory
    used: bool
    reason: str
    weight: float = 1.0
    batch_id: int | None = None


@dataclass(frozen=True)
class CountersRow:
    """Trajectories of one task with the same state, reason and outcome."""

    task_id: str
    state: TrajectoryState
    reason: str  # why dropped; else empty
    outcome: Outcome | None
    trajectories: int
    steps: int  # of them together, where they are over
    counted: int  # of these trajectories, how many are part of their task's success
    rewards: float  # sum over those
    acted: int  # of these trajectories, how many had a step

    @property
    def verdict(self) -> Outcome | None:
        """The outcome; None for what the end of a run or a lease cancelled, which broke nothing."""
        return None if self.reason == "cancelled" else self.outcome


@dataclass(frozen=True)
class Remainder:
    """What does not add up in a run: all are 0 where nothing was lost."""

    steps: int  # episodes that are over, and have not as many steps stored as they told
    samples: int  # trajectories of a batch that have not each of their steps in it once
    batches: int  # fresh batches of which the trainer told other numbers of steps than were planned
    reasons: int  # trajectories that were dropped for no reason

    @property
    def total(self) -> int:
        """All together."""
        return self.steps + self.samples + self.batches + self.reasons


@dataclass(frozen=True)
class ReplayCounts:
    """Batches that were trained on again, and those that were not although it was their turn."""

    updates: int  # batches in the weights
    replays: int  # of these, further uses of earlier ones, without those that were skipped
    refused: dict[str, int]  # batches by reason

    @property
    def refused_words(self) -> str:
        """The reasons in one line, e.g. "3 batches not again: 2 low_ess, 1 stale"; empty without any."""
        if not self.refused:
            return ""
        number = sum(self.refused.values())
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.refused.items()))
        return f"{number} {'batch' if number == 1 else 'batches'} not again: {reasons}"


@dataclass(frozen=True)
class SizesRow:
    """How much a run holds."""

    steps: int
    tokens: int  # of completions
    step_bytes: int  # texts, tokens and their numbers, as they are stored
    screenshots: int
    screenshot_bytes: int
    disk_bytes: int  # the database with its log


@dataclass(frozen=True)
class BatchRow:
    """One update's work."""

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
    replay_of: int | None = None  # the batch whose samples come again; None of a fresh one
    reuse: int = 0  # how often they were trained on before


@dataclass(frozen=True)
class OwnCounts:
    """What the policy itself played; see dart_cli.data.progress.OwnPlay."""

    passed: int
    completions: int
    failed_since: int  # trajectories judged since the newest that passed
    updates_then: int  # trained batches when that one ended; 0 where none passed


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
    trajectories: int  # that count for success
    passed: int
    ended_at: float  # unix seconds of the last of them

    @property
    def success(self) -> float:
        """Fraction passed."""
        return self.passed / self.trajectories


@dataclass(frozen=True)
class MetricPoint:
    """One value of one train metric."""

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
    updates: int  # that changed these weights


@dataclass(frozen=True)
class SyncRow:
    """How one rollout worker took one weight set; times as in SyncDone."""

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
    """What one judge said of one trajectory; fields as in bus.messages.Judgement."""

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

    action: dict[str, Any]
    screenshot: str  # key of screenshots: the screen before it


@dataclass(frozen=True)
class UsageRow:
    """Time of one worker in one phase: the process of that name now, and those before it."""

    worker: str
    phase: str
    role: str
    started_at: float  # of the newest process
    seconds: float  # of that process, by its newest heartbeat
    before_s: float  # of those before it, and between them

    @property
    def total_s(self) -> float:
        """Over the whole run."""
        return self.before_s + self.seconds
