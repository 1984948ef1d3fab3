"""The run at one moment: what `StatusReply.snapshot` holds, written by data, shown by status.

`Snapshot.model_dump(mode="json")` goes on the wire; a reader calls `Snapshot.model_validate`.
Times are seconds, moments are unix seconds, rates are per minute.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from bus.messages import Heartbeat


class Part(BaseModel):
    """Base of the snapshot's parts: frozen; what else a row of the store holds is left out."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class StallView(Part):
    """Something that has made no progress for too long; dart_cli.data.stalls finds it."""

    kind: str  # one of dart_cli.data.stalls.KINDS
    who: str  # worker that has it
    since_s: float  # for how long
    text: str  # one line: what waits for what, since when, and the likely cure


class ProcessView(Heartbeat):
    """One process: its last heartbeat, without the leases that it renewed, and what data knows of it."""

    alive: bool  # its last heartbeat is within the liveness limit
    heartbeat_age_s: float
    still_s: float = 0.0  # rollout: how long its requests in work have produced no token
    liveness: str = ""  # of a silent process, if data can look: gone, stopped, blocked or running
    error: str = ""  # that ended it, if data can look


class TaskView(Part):
    """Results of one training task."""

    suite: str
    task_id: str
    trajectories: int  # judged pass or fail
    passed: int
    invalid: int
    success: float | None  # exponential moving average in [0, 1]; None before the first verdict
    weight: float  # probability of being the next group's task
    curve: list[float | None] = []  # mean success by policy version bucket, oldest first
    reward: float | None = None  # moving average of its verdicts' rewards, likewise
    invalid_share: float | None = None  # moving average: share of its episodes that were invalid
    invalid_after_action: int = 0  # of the invalid, those that broke after an action


class OwnView(Part):
    """What the policy itself played: members of the pool and replays are not in it."""

    passed: int = 0  # trajectories, in all
    failed_since: int = 0  # trajectories judged since the newest that passed, or since the start
    updates_since: int = 0  # updates made meanwhile
    completions: int = 0  # of the policy, in all
    window: int = 0  # completions of each of the two windows below
    malformed_first: float = 0.0  # share of the first completions that were no action
    malformed: float = 0.0  # the same of the newest
    reward_first: float = 0.0  # mean of the first trajectories, by data.reward
    reward: float = 0.0  # the same of the newest


class StalenessView(Part):
    """Versions that the weights of a token were behind the trainer, over the tokens of recent batches."""

    mean: float
    max: int
    histogram: dict[int, int] = {}  # versions behind -> tokens


class ReplaysView(Part):
    """Batches that were trained on again, and those that were not although it was their turn."""

    updates: int = 0  # that trained on a batch again
    refused: dict[str, int] = {}  # reason -> batches
    oldest: int = 0  # most versions behind of a token of the recent ones


class StopView(Part):
    """How far the run is from train.stop_at."""

    at: float  # train.stop_at
    bound: float = 0.0  # success that is proved; 0 while a task has too few trajectories
    counted: int = 0  # trajectories that count so far
    required: int = 0  # trajectories before anything is proved
    lowest: str = ""  # task with the fewest passes; empty before the first trajectory
    lowest_success: float | None = None  # its own, over the same trajectories


class Rates(Part):
    """Throughput over the last `window_s` seconds, per minute."""

    window_s: float
    trajectories: float
    steps: float
    actions: float  # steps whose completion was an action of the grammar
    updates: float


class UsageView(Part):
    """Where a role's processes spent their time, seconds by phase; slots and workers add up.

    env playing, waiting, resetting, queueing, idle, dead; rollout busy, idle, syncing, starting;
    train training, publishing, waiting, starting; `dead` of any: from the last heartbeat of a
    process that died until its successor began.
    """

    minute: dict[str, float] = {}  # the last 60 s
    total: dict[str, float] = {}  # the run, over all restarts


class SyncView(Part):
    """The last weight sync of one rollout worker; seconds as in bus.messages.SyncDone."""

    worker: str
    policy_version: int
    error: str  # why the set was refused; empty if it serves
    done_at: float  # unix seconds
    waited_s: float
    transfer_s: float
    pause_s: float
    in_flight: int  # requests in work when it began
    syncs: int  # this worker's so far, refused ones included
    refused: int


class JudgeView(Part):
    """What one judge model said of the run's trajectories, beside their evaluators."""

    judge: str  # the model, and a digest of how it is asked
    verdicts: dict[str, int] = {}  # outcome -> trajectories without an evaluator, which it decided
    both_pass: int = 0  # of the others, where judge and evaluator have an opinion
    both_fail: int = 0
    judge_alone: int = 0  # the judge passes what the evaluator fails
    evaluator_alone: int = 0  # the reverse
    judged: int = 0  # trajectories that it was asked about
    unanswered: int = 0  # of these, without an answer that can be read
    calls: int = 0  # requests to the model
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0  # over all trajectories


class QueuesView(Part):
    """What waits for whom, at this moment."""

    in_flight: int = 0  # requests the engines decode
    waiting: int = 0  # requests that wait for a place in an engine
    leases: int = 0  # trajectories in play
    free_slots: int = 0  # environment slots that wait for a lease


class GroupsView(Part):
    """Where the groups stand."""

    open: int  # some member still plays
    ready: int  # informative and complete, waiting for a batch
    batched: int  # served to the trainer, not yet acknowledged
    trained: int
    limit: int  # open + ready groups that admission allows now
    dropped: dict[str, int] = {}  # reason -> groups
    dropped_since_batch: dict[str, int] = {}  # the same, since the last batch was formed
    pool: int = 0  # successes of the experience pool that may be drawn
    by_baseline: bool = (
        False  # groups of one, compared with baselines: none is dropped for its rewards
    )


class Snapshot(Part):
    """The whole run, for `dart status`, `dart up` and anything that watches."""

    run_id: str
    run_dir: str
    now: float  # unix seconds, when this was taken
    uptime_s: float  # of this data process
    run_s: float  # that data processes have served the run, over all starts
    stopping: bool
    reason: str  # why it stops; empty while it runs
    ending: str = ""  # what data waits for before it ends: which process, for what
    policy_version: int  # newest published; -1 before the first
    updates: int  # batches in the weights
    updates_total: int  # config.train.updates: the run ends there
    played: int = 0  # trajectories that are over, whatever came of them
    max_trajectories: int = 0  # of these: the run ends there; 0 for no limit
    max_minutes: float = 0.0  # of `run_s`, likewise
    stop: StopView | None = None  # None without train.stop_at
    processes: list[ProcessView] = []
    trajectories: dict[str, int] = {}  # ledger state -> count
    verdicts: dict[str, int] = {}  # pass, fail, invalid -> count
    dropped: dict[str, int] = {}  # reason -> trajectories
    groups: GroupsView
    tasks: list[TaskView] = []
    own: OwnView = OwnView()
    success: float | None = None  # mean over the tasks of their moving averages
    reward: float | None = None  # the same of rewards
    success_curve: list[float | None] = []  # mean over tasks by version bucket, oldest first
    rates: Rates
    staleness: StalenessView
    replays: ReplaysView = ReplaysView()
    judges: list[JudgeView] = []  # judge models that were asked
    metrics: dict[str, float] = {}  # newest train metrics: loss, reward, entropy, kl, lr, ...
    metric_curves: dict[str, list[float]] = {}  # the same by update, recent, oldest first
    usage: dict[str, UsageView] = {}  # by role
    queues: QueuesView = QueuesView()
    syncs: list[SyncView] = []  # newest of each rollout worker
    store_bytes: int = 0  # database on disk
    stall_s: float = 20.0  # endpoints.STALL_S of the config
    quiet_s: float = 0.0  # since a step, an end, an update or a weight set was last filed
    next_batch: str = ""  # what the next batch still needs
    permits: dict[str, float] = {}  # rollout worker that may take weights -> seconds it may
    stalls: list[StallView] = []  # what waits for what, since when, and the likely cure
    warnings: list[str] = []  # other warnings for the user
    settings: list[str] = []  # what living processes were started with other than data, a line each
