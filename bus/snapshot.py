"""The run at one moment: the content of `StatusReply.snapshot`, made by the data service for `dart status`.

`Snapshot.model_dump(mode="json")` goes on the wire; a reader calls `Snapshot.model_validate`. Durations are
in seconds, points in time in unix seconds, rates per minute.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from bus.messages import Heartbeat


class Part(BaseModel):
    """Base of the snapshot's parts: frozen; values without a field are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class StallView(Part):
    """Something that has made no progress for too long, as dart_cli.data.stalls reports it."""

    kind: str  # one of dart_cli.data.stalls.KINDS
    who: str  # the worker that is affected
    since_s: float  # for how long
    text: str  # one line: what waits for what, since when, and the likely fix


class ProcessView(Heartbeat):
    """One process: its last heartbeat, without the leases that it renewed, and its state."""

    alive: bool  # its last heartbeat is within the liveness limit
    heartbeat_age_s: float
    still_s: float = 0.0  # rollout: for how long its requests in work have produced no token
    liveness: str = ""
    """gone, stopped, blocked or running, of a silent process on the data service's host; else empty."""
    error: str = ""  # the error that ended such a process


class TaskView(Part):
    """Results of one training task."""

    suite: str
    task_id: str
    trajectories: int  # with outcome pass or fail
    passed: int
    invalid: int
    success: float | None  # exponential moving average in [0, 1]; None before the first verdict
    weight: float  # probability of being the next group's task
    curve: list[float | None] = []  # mean success by policy version bucket, oldest first
    reward: float | None = None  # likewise, of the rewards
    invalid_share: float | None = None  # moving average of the share of invalid episodes
    invalid_after_action: int = 0  # invalid episodes that broke after an action


class OwnView(Part):
    """What the policy itself played, without members of the experience pool and replays."""

    passed: int = 0  # trajectories in all
    failed_since: int = 0  # trajectories that failed since the newest that passed, or the start
    updates_since: int = 0  # updates meanwhile
    completions: int = 0  # in all
    window: int = 0  # completions in each of the two windows below
    malformed_first: float = 0.0  # share of the first completions that were no action
    malformed: float = 0.0  # likewise, of the newest
    reward_first: float = 0.0  # mean reward of the first trajectories, by data.reward
    reward: float = 0.0  # likewise, of the newest


class StalenessView(Part):
    """How many versions the tokens of recent batches were behind the trainer."""

    mean: float
    max: int
    histogram: dict[int, int] = {}  # versions behind -> tokens


class ReplaysView(Part):
    """Replays, and batches that were refused when it was their turn."""

    updates: int = 0  # that were replays
    refused: dict[str, int] = {}  # reason -> batches
    oldest: int = 0  # versions that the oldest token of recent replays was behind the trainer


class StopView(Part):
    """How far the run is from train.stop_at."""

    at: float  # train.stop_at
    bound: float = 0.0  # lower bound of success; 0 while a task has too few trajectories
    counted: int = 0  # trajectories that count so far
    required: int = 0  # trajectories that must count before there is a bound
    lowest: str = ""  # task with the lowest success; empty before the first trajectory
    lowest_success: float | None = None  # of that task, over the same trajectories


class Rates(Part):
    """Throughput over the last `window_s` seconds, per minute."""

    window_s: float
    trajectories: float
    steps: float
    actions: float  # steps whose completion was an action
    updates: float


class UsageView(Part):
    """The time of a role's processes: seconds by phase, added up over slots and workers.

    Phases of env: playing, waiting, resetting, queueing, idle; of rollout: busy, idle, syncing, starting;
    of train: training, publishing, waiting, starting. Every role has `dead`: from the last heartbeat of a
    process that died until its successor began.
    """

    minute: dict[str, float] = {}  # the last 60 s
    total: dict[str, float] = {}  # the whole run, over all restarts


class SyncView(Part):
    """The last weight sync of one rollout worker; seconds as in bus.weights.SyncDone."""

    worker: str
    policy_version: int
    error: str  # why the set was refused; empty if it serves
    done_at: float  # unix seconds
    waited_s: float
    transfer_s: float
    pause_s: float
    in_flight: int  # requests in work when it began
    syncs: int  # number of this worker's syncs, with the refused ones
    refused: int


class JudgeView(Part):
    """The verdicts of one judge model on the run's trajectories, compared with their evaluators."""

    judge: str  # the model, and a digest of how it is asked
    verdicts: dict[str, int] = {}  # outcome -> trajectories without an evaluator, which it decided
    both_pass: int = 0  # other trajectories, which both passed
    both_fail: int = 0
    judge_alone: int = 0  # the judge passes what the evaluator fails
    evaluator_alone: int = 0  # the reverse
    judged: int = 0  # trajectories that it was asked about
    unanswered: int = 0  # trajectories without an answer that can be read
    calls: int = 0  # requests to the model
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0  # over all trajectories


class QueuesView(Part):
    """The queues at this moment."""

    in_flight: int = 0  # requests that the engines decode
    waiting: int = 0  # requests that wait for a place in an engine
    leases: int = 0  # trajectories in play
    free_slots: int = 0  # environment slots that wait for a lease


class GroupsView(Part):
    """The numbers of groups by state."""

    open: int  # with a member in play or still to play
    ready: int  # complete, with a gradient, waiting for a batch
    batched: int  # in a batch that is not trained on yet
    trained: int
    limit: int  # open and ready groups that the scheduler allows now
    dropped: dict[str, int] = {}  # reason -> groups
    dropped_since_batch: dict[str, int] = {}  # likewise, since the last batch was formed
    pool: int = 0  # successes of the experience pool that may be drawn
    by_baseline: bool = False  # groups of one, compared with running baselines


class Snapshot(Part):
    """The whole run, for `dart status`, `dart up` and other observers."""

    run_id: str
    run_dir: str
    now: float  # unix seconds of this snapshot
    uptime_s: float  # of this data service
    run_s: float  # for how long the run has been served, over all starts
    stopping: bool  # the run is over
    reason: str  # why it is over; empty while it goes on
    ending: str = ""  # which process the data service waits for before it ends, and for what
    policy_version: int  # newest published; -1 before the first
    updates: int  # batches in the weights
    updates_total: int  # train.updates, at which the run ends
    ended_trajectories: int = 0  # trajectories that have ended, whatever their outcome
    max_trajectories: int = (
        0  # number of `ended_trajectories` at which the run ends; 0 for no limit
    )
    max_minutes: float = 0.0  # minutes of `run_s` at which the run ends; 0 for no limit
    stop: StopView | None = None  # None without train.stop_at
    processes: list[ProcessView] = []
    trajectories: dict[str, int] = {}  # ledger state -> count
    verdicts: dict[str, int] = {}  # pass, fail, invalid -> count
    dropped: dict[str, int] = {}  # reason -> trajectories
    groups: GroupsView
    tasks: list[TaskView] = []
    own: OwnView = OwnView()
    success: float | None = None  # mean over the tasks of their moving averages
    reward: float | None = None  # likewise, of rewards
    success_curve: list[float | None] = []  # mean over tasks by version bucket, oldest first
    rates: Rates
    staleness: StalenessView
    replays: ReplaysView = ReplaysView()
    judges: list[JudgeView] = []
    metrics: dict[str, float] = {}
    """The trainer's newest metrics: loss, reward, entropy, kl, lr, ..."""
    metric_curves: dict[str, list[float]] = {}  # metric -> values of recent updates, oldest first
    usage: dict[str, UsageView] = {}  # by role
    queues: QueuesView = QueuesView()
    syncs: list[SyncView] = []  # the newest of each rollout worker
    store_bytes: int = 0  # size of the database on disk
    stall_s: float = 20.0  # longest time without progress: dart_cli.config.endpoints.STALL_S
    quiet_s: float = 0.0  # since a step, an end, an update or a weight set was last filed
    next_batch: str = ""  # what the next batch still needs, in words
    permits: dict[str, float] = {}  # rollout worker that may take weights -> for how many seconds
    stalls: list[StallView] = []
    warnings: list[str] = []
    settings: list[str] = []
    """How the settings of living processes differ from the data service's, one line for each difference."""
