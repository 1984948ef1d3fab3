"""The messages between processes, with their senders, readers, shapes and units.

Messages about weight sets are in weights.py, messages between the ranks of one trainer in ranks.py. Axes:
`[P]` prompt tokens, `[A]` completion tokens, `[I]` images of a prompt in reading order, `[L]` tokens of a
chain, `[S]` samples of a batch. Times are in seconds, log-probabilities and entropies in nats. A `bytes`
field is a raw frame beside the msgpack header, and so are the numbers of a `Packed` field (packed.py,
codec.py).

    env   -> data     LeaseRequest, StepRecord, TrajectoryEnd
    env   -> rollout  ActRequest
    train -> data     TrainerHello, BatchRequest, BatchTrained
    any   -> data     JoinRequest, StatusRequest, StopRequest
    any   -> all      Heartbeat (published)
    data  -> all      RunState (published)

Where agents of other programs play, `serve` takes the place of `env`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from bus.packed import Float64s, Int32s, IntArray, Packed, PromptIds
from bus.temperatures import MAX_TEMPERATURE, MIN_TEMPERATURE

PROTOCOL_VERSION = 20
"""Version of the messages; messages of other versions are refused. Raise it with every change of a field or
its meaning."""

Integer = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""An integer that a database can store."""
Count = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(allow_inf_nan=False)]
"""Unix seconds, or a duration in seconds, that a database can store."""
Nats = Annotated[float, Field(allow_inf_nan=False)]
UnitFraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Reward = UnitFraction
"""Reward of a whole trajectory; 1.0 if all of its task is done."""
MAX_GAUGE = 1e15
Gauge = Annotated[float, Field(ge=-MAX_GAUGE, le=MAX_GAUGE, allow_inf_nan=False)]
"""A number that can be added up, rounded and stored."""
APP_LOG_LINES, APP_LOG_WIDTH = 40, 300
"""Most lines of an episode's application log, and most characters of one; a further line says if there are
more."""
AppLogLine = Annotated[str, Field(max_length=APP_LOG_WIDTH)]
Role = Literal["env", "serve", "rollout", "data", "train", "status", "eval"]
PLAYERS: tuple[Role, ...] = ("env", "serve")
"""Roles that lease tasks and submit trajectories."""
Outcome = Literal["pass", "fail", "invalid"]
StopReason = Literal[
    "done",  # the policy ended the episode as finished, or the environment ended it
    "gave_up",  # the policy ended the episode as impossible
    "step_limit",  # the step cap was reached
    "malformed",  # the completion was no action
    "broken",  # the policy's own action broke the environment: the verdict is fail
    "environment",  # the environment broke: the verdict is invalid
    "unanswered",  # the policy gave no completion, e.g. the prompt is too long: the verdict is invalid
    "cancelled",  # the run or the lease ended first
]


class Message(BaseModel):
    """Base of all wire types: immutable, strictly typed; unknown and missing fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Reply(Message):
    """Base of all answers to a request."""


class Request(Message):
    """Base of all requests; `reply_type` is the type of a successful answer."""

    reply_type: ClassVar[type[Reply]]


class Sampling(Message):
    """The settings by which a completion is sampled."""

    temperature: float = Field(ge=0, le=MAX_TEMPERATURE, allow_inf_nan=False)  # 0 is greedy
    max_tokens: int = Field(ge=1)  # tokens
    seed: int = Field(ge=0)

    @field_validator("temperature")
    @classmethod
    def _is_greedy_or_divides(cls, value: float) -> float:
        if 0 < value < MIN_TEMPERATURE:
            raise ValueError(f"must be 0 or at least {MIN_TEMPERATURE}")
        return value


class VersionSpan(Message):
    """The version whose weights produced the completion tokens [start, end)."""

    version: Integer
    start: Integer
    end: Integer


class SampledTokens(Message):
    """The tokens that the policy sampled for one screen, in the same form from the engine to the database.

    The engine returns it, and messages and database rows contain it unchanged. It may be a completion that
    was suspended before its end; any worker can continue from these tokens.
    """

    token_ids: Annotated[list[int], Packed("i")]  # [A], with the end-of-turn token if it was drawn
    behaviour_logprobs: Annotated[list[float], Packed("d")]
    """[A], nats, of the distribution sampled from; [] if unknown."""
    entropies: Annotated[list[float], Packed("d")]
    """[A], nats, of the same distribution; [] if unknown."""
    version_spans: list[VersionSpan]  # the version of each token; [] for a pool member
    patches: Annotated[list[int], Packed("i")] = []
    """[A], the cell of the prompt's last screenshot that was drawn with this token, counted row by row from
    0. It is -1 for a token without one, which is every token but `pointer_end`; [] if no token has one. A
    token with a patch is forced, so its log-probability and entropy are of the patch."""
    routing: bytes = b""
    """[P + A - 1, layers, chosen], the experts of a mixture that each layer chose for the tokens of prompt and
    completion but the last, which the engine has not computed; empty without a record. An index has one byte, or
    two (little-endian) of more than 256 experts."""

    def __len__(self) -> int:
        return len(self.token_ids)


class Hint(Message):
    """The privileged text in a step's prompt, which a teacher reads and the policy does not.

    The teacher's prompt is the policy's prompt with `token_ids` in place of its tokens [start, end).
    """

    start: Count
    end: Count
    token_ids: Int32s


class PointerCandidate(Message):
    """Part of PointerMap: a region of the screen that the pointer may mean."""

    x: UnitFraction  # its weighted centre, as a share of the screen's width
    y: UnitFraction  # likewise, of the screen's height
    score: UnitFraction  # mean probability of its cells


class PointerMap(Message):
    """Where a pointer of a completion looked; shown on pages and in films, and not used in training."""

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")  # in films' files
    position: Count  # index in the completion of the token with the patch
    rows: Annotated[int, Field(ge=1, le=2**16)]  # of the screen's cells
    columns: Annotated[int, Field(ge=1, le=2**16)]
    heat: bytes  # [rows * columns], each cell's probability as a share of the largest, in 255ths
    candidates: list[PointerCandidate] = []  # the best first


class Turn(Message):
    """A past step of the episode, as the prompt may show it."""

    text: str  # the completion, as the model wrote it
    screenshot: bytes | None = None  # encoded, before the action; None if the history dropped it
    token_ids: list[int] = []
    """[A], the completion as it was sampled, if the prompt has these tokens; [] if it has `text`."""
    observed_text: str = ""  # the text beside its screenshot; empty if the history dropped it


class ChatPart(Message):
    """Part of ChatMessage: a text, or the next of the request's images."""

    text: str = ""
    is_image: bool = False


class ChatMessage(Message):
    """Part of ActRequest: one message of a prompt that another program has written."""

    role: Literal["system", "user", "assistant"]
    parts: list[ChatPart]
    token_ids: list[int] = []
    """[A], for an assistant's message: the completion as it was sampled, if the prompt has these tokens; []
    if it has the parts."""


class Lease(Message):
    """data -> env: play this task once. The trajectory's id is the lease's id."""

    trajectory_id: str
    group_id: str
    suite: str
    task_id: str
    task_seed: Integer  # seeds the environment's reset
    max_steps: Integer  # steps
    sampling: Sampling  # its seed is the episode's; step i adds i


class Chain(Message):
    """The tokens of consecutive steps of one trajectory whose prompts extend one another, each token once.

    Each step's prompt begins with the previous step's prompt and completion, and its images begin with the
    previous step's images.
    """

    token_ids: Int32s  # [L], the last step's prompt and completion, image placeholders expanded
    image_hashes: list[str]  # [I], the last step's; keys of Batch.images
    routing: bytes = b""
    """[L, layers, chosen], the experts that its tokens had in the rollout, as in SampledTokens. Each token has those
    of the first step that contains it. The indices of a token without a record are all 0; empty if no token has
    one."""


class Sample(Message):
    """One step of one trajectory, ready to train on.

    Its completion [A] is tokens [start, end) of its chain, its prompt [P] all before.
    """

    group_id: str  # the group it is compared in; a trajectory of the pool may be in several
    trajectory_id: str
    step: Integer
    chain: Count  # index into Batch.chains
    start: Count
    end: Count
    images: Count  # its prompt shows so many of the chain's images, from the first
    behaviour_logprobs: Float64s
    """[A], nats, of the distribution sampled from; empty if unknown."""
    version_spans: list[VersionSpan]
    """The version of each token of the completion; [] for a pool member."""
    advantage: float
    weight: float  # multiplies the sample's loss; 1.0 for a fresh sample
    patches: Annotated[list[int], Packed("i")] = []  # [A], as in SampledTokens
    worker: str = ""  # the rollout worker that sampled it, for errors
    reward: Reward | None = None  # of its trajectory; None if groups are compared
    expected: Reward | None = None  # by the running baseline; None if groups are compared
    hint: Hint | None = None  # None: no teacher scores it by a hint

    def __len__(self) -> int:
        return self.end - self.start


class VersionAge(Message):
    """Part of Batch: how far a version that sampled some of its tokens is behind the trainer."""

    version: Integer
    behind: Count  # versions, by their updates (dart_cli/data/versions.py)


class Batch(Message):
    """data -> train: the samples of one update."""

    batch_id: Integer
    group_ids: list[str]
    temperature: float = Field(gt=0, le=MAX_TEMPERATURE, allow_inf_nan=False)  # divides the logits
    chains: list[Chain]
    samples: list[Sample]  # [S]
    images: dict[str, bytes]  # content hash -> encoded image
    run_s: Seconds = 0.0  # how long the run had been served when the batch was formed; never falls
    ages: list[VersionAge] = []  # of each version that sampled some of its tokens
    reuse: Count = 0  # how often its samples were trained on before; 0 for a fresh batch
    trajectories: Count = 0  # of the run, ended when the batch was formed; never falls
    reward: Reward | None = None  # mean over its trajectories
    success: Reward | None = None  # mean over the run's tasks when it was served

    def prompt(self, sample: Sample) -> IntArray:
        """Return the sample's prompt [P]."""
        return self.chains[sample.chain].token_ids[: sample.start]

    def completion(self, sample: Sample) -> IntArray:
        """Return the sample's completion [A]."""
        return self.chains[sample.chain].token_ids[sample.start : sample.end]

    def image_hashes(self, sample: Sample) -> list[str]:
        """Return the hashes of the images in the sample's prompt [I], in reading order."""
        return self.chains[sample.chain].image_hashes[: sample.images]


# --- env -> data ----------------------------------------------------------------------------


class Ack(Reply):
    """data -> any: the request is durable; or it came too late, with the reason in `note`."""

    accepted: bool = True
    note: str = ""


class LeaseReply(Reply):
    """data -> env: a task to play; or after how long to ask again, and what the slot waits for."""

    lease: Lease | None = None
    retry_after_s: Seconds = 0.0
    reason: str = ""


class LeaseRequest(Request):
    """env -> data: slot `slot` of `worker` is free."""

    reply_type: ClassVar[type[Reply]] = LeaseReply
    worker: str
    slot: Count
    suites: list[str]  # the suites this worker can play
    started_at: Seconds = 0.0  # of the worker's process, as in its heartbeats; 0 if unknown
    task: str = ""  # a training task to play; empty if the scheduler decides
    task_seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """The instance of `task` to play, in the range `env.seeds`; None if the scheduler decides."""


class StepRecord(Request):
    """env -> data: one step, as it happened: a screenshot and the policy's completion."""

    reply_type: ClassVar[type[Reply]] = Ack
    trajectory_id: str
    step: Integer  # 0-based
    screenshot: bytes  # encoded image before the action
    media_type: str  # e.g. image/png
    image_hashes: list[str]  # [I], the prompt's images; the last is this screenshot's
    prompt_token_ids: PromptIds  # [P]
    sampled: SampledTokens
    worker: str  # the rollout worker that finished the completion
    text: str  # the completion, decoded
    action: dict[str, Any] | None  # the first, an envs.contract.actions.Action; None if malformed
    error: str  # why the text is no action; empty if it is one
    model_s: Seconds  # time until the completion came
    env_s: Seconds  # time of the environment's step
    instruction: str = ""  # as the policy read it; in step 0 alone
    observed_text: str = ""  # text that the policy read beside the screenshot (env.observe)
    reward: Annotated[float, Field(allow_inf_nan=False)] | None = None  # the environment's, if any
    pointed: list[PointerMap] = []  # of the completion
    more_actions: list[dict[str, Any]] = []
    """The actions of the completion that were performed after `action`, in order, without a screenshot in
    between (policy.max_actions)."""
    images: list[bytes] = []
    """Encoded images of the prompt, besides `screenshot`, that no earlier step of the trajectory had."""
    hint: Hint | None = (
        None  # of its prompt, if the environment named the next step of its solution
    )


class Judgement(Message):
    """Part of TrajectoryEnd: a judge model's verdict on the episode, and its cost."""

    judge: str  # the model, and a digest of how it is asked
    use: Literal["missing", "check", "later"]
    """missing: the task has no evaluator, and this is the verdict; check: it was made beside the evaluator;
    later: it was made after the run (`dart data judge`)."""
    outcome: Outcome  # invalid: no answer that can be read
    score: Reward | None = None  # 1.0 for pass and 0.0 for fail, if no score was requested
    reason: str = ""
    calls: Count = 0  # requests to the model
    prompt_tokens: Count = 0  # as the model counts them
    completion_tokens: Count = 0
    seconds: Seconds = 0.0


class TrajectoryEnd(Request):
    """env -> data: the episode has ended."""

    reply_type: ClassVar[type[Reply]] = Ack
    trajectory_id: str
    steps: Integer  # number of its StepRecords
    outcome: Outcome
    reason: str
    stop_reason: StopReason
    screenshot: bytes | None  # encoded image after the last action
    reset_s: Seconds
    wall_s: Seconds
    reward: Reward | None = None  # the verdict's; None: 1.0 for pass, 0.0 for fail
    judgement: Judgement | None = None  # of a judge model that was asked
    app_log: Annotated[list[AppLogLine], Field(max_length=APP_LOG_LINES + 1)] = []
    """What the application reported, e.g. `step 3: TypeError: x is undefined`; see dart_cli/env/app_log.py."""


# --- env -> rollout -------------------------------------------------------------------------


class Completion(Reply):
    """rollout -> env: the policy's completion for one screen."""

    prompt_token_ids: PromptIds  # [P]
    sampled: SampledTokens
    text: str
    stop: Literal["end", "length", "suspended"]  # by end-of-turn token, max_tokens, or interrupted
    queue_s: Seconds  # wait before the engine began
    engine_s: Seconds
    worker: str = ""  # the worker that answers; empty in one process
    pointed: list[PointerMap] = []  # of its pointers, in order; the partial's come first
    hint: Hint | None = None  # of the prompt; None if the request has no `hinted_instruction`


class ActRequest(Request):
    """env -> rollout: the screen, the instruction and the history, for which a completion is requested."""

    reply_type: ClassVar[type[Reply]] = Completion
    trajectory_id: str
    step: Integer
    instruction: str
    turns: list[Turn]  # the visible ones, the oldest first
    previous: str = ""  # earlier steps, a line each, if policy.template shows them
    screenshot: bytes  # encoded image
    image_hashes: list[str] = []
    """[I], content hashes of the turns' screenshots and of this one; [] if unknown. The rollout worker
    checks the hash of each screenshot that is new to it; the data service checks the hash of the newest one,
    in the StepRecord."""
    width: Integer  # pixels of the screenshot
    height: Integer
    observed_text: str = ""  # text beside the screenshot (env.observe)
    sampling: Sampling
    partial: SampledTokens | None = None  # a suspended completion of this request to continue
    pointed: list[PointerMap] = []  # of the partial; the completion has them, too
    messages: list[ChatMessage] = []
    """The whole prompt, if another program has written it; then it shows no `instruction`, `turns` and
    `observed_text`."""
    images: list[bytes] = []  # [I - 1], encoded images of `messages` before `screenshot`
    hinted_instruction: str = ""
    """The instruction with the next step, for the completion's `hint`; the policy does not read it."""


# --- train -> data --------------------------------------------------------------------------


class HelloReply(Reply):
    """data -> train: the newest version number, which the trainer must not use again."""

    policy_version: Integer  # the highest published one; -1 before the first
    digest: str  # of its manifest; empty before the first


class TrainerHello(Request):
    """train -> data: the trainer starts from a checkpoint; later batches must be served again."""

    reply_type: ClassVar[type[Reply]] = HelloReply
    policy_version: Integer  # newest published when the checkpoint was written
    last_batch_id: Count  # newest batch in the checkpoint; 0 before the first
    updates: Count  # updates in its weights


class BatchReply(Reply):
    """data -> train: a batch; or after how long to ask again, and what the trainer waits for."""

    batch: Batch | None = None
    retry_after_s: Seconds = 0.0
    reason: str = ""


class BatchRequest(Request):
    """train -> data: the trainer, at this version, needs the next batch."""

    reply_type: ClassVar[type[Reply]] = BatchReply
    policy_version: Integer


class StepMismatch(Message):
    """Part of BatchTrained: proximal minus behaviour log-probability over one step's tokens, nats."""

    trajectory_id: str
    step: Integer
    mean: Nats
    largest: Nats  # of the absolute differences


class StepValue(Message):
    """Part of BatchTrained: the reward that a critic expected before a step, and the advantage by it."""

    group_id: str
    trajectory_id: str
    step: Integer
    value: Reward
    advantage: Nats


REPLAY_METRIC = "replay_"
"""Prefix of the names of an update's metrics if its batch is a replay."""


class BatchTrained(Request):
    """train -> data: the batch is in the weights, or was skipped; with the metrics of the update."""

    reply_type: ClassVar[type[Reply]] = Ack
    batch_id: Integer
    policy_version: Integer  # after the update
    metrics: dict[str, float]  # perhaps not finite if it was skipped; only finite ones are stored
    mismatches: list[StepMismatch] = []  # of its steps with behaviour log-probabilities
    values: list[StepValue] = []  # of its steps, with a critic


# --- any -> data ----------------------------------------------------------------------------


class JoinReply(Reply):
    """data -> a process of the run: its settings are accepted; `notes` has a line for each difference."""

    notes: list[str] = []


class JoinRequest(Request):
    """env, serve, rollout, train -> data: the process takes part in the run, with these settings.

    It is sent at the start of the process, and to each new data service. Settings that do not fit the run are
    refused with a ConfigError.
    """

    reply_type: ClassVar[type[Reply]] = JoinReply
    role: Role
    worker: str
    host: str
    folder: str  # its working directory, to which paths are relative
    settings: dict[str, Any]  # section.key -> JSON value, for keys that are not at their defaults
    set_keys: list[str] = []  # keys that --set changed; the others are in its file
    is_first: bool = True  # False if an earlier data service accepted them; then none is refused
    is_supervised: bool = False  # `dart up` started it; keys that it does not read are not refused
    is_forced: bool = False  # it has --force; nothing is refused


class StatusReply(Reply):
    """data -> status: the run at one moment, a bus.snapshot.Snapshot as JSON values."""

    snapshot: dict[str, Any]


class StatusRequest(Request):
    """status -> data: a snapshot of the run is requested."""

    reply_type: ClassVar[type[Reply]] = StatusReply


class StopRequest(Request):
    """any -> data: the run must end, with all of its processes. It can be started again."""

    reply_type: ClassVar[type[Reply]] = Ack
    reason: str


class ErrorReply(Reply):
    """any server -> requester: the request is refused."""

    error: str
    error_type: str  # class name in bus.errors


# --- published ------------------------------------------------------------------------------


class Waiting(Message):
    """Part of Heartbeat: the waits of one process for the same thing."""

    what: str  # in words, e.g. "a completion from rollout-0"
    on: str  # what can end it: a worker, a role, `environment`, `permit`, `batch`, ...; or empty
    count: Integer
    longest_s: Seconds
    deadline_s: Seconds  # of each of them; 0 if there is none


class Heartbeat(Message):
    """any -> all, every second: the process lives; its load and what it waits for."""

    role: Role
    worker: str  # unique in the run, e.g. env-0
    host: str
    pid: Integer
    started_at: Seconds  # unix seconds
    sent_at: Seconds  # unix seconds
    endpoint: str  # its address for requests; empty if it serves none
    policy_version: Integer  # weights it holds; -1 if none
    state: str  # one word: starting, ready, waiting, syncing, training, stopping
    waiting_for: str  # what it waits for in words; empty if nothing
    waiting_s: Seconds  # for how long
    gauges: dict[str, Gauge]  # numbers of its role; docs/operations.md explains them
    trajectories: list[str]  # env: trajectories in play, whose leases this heartbeat renews
    waits: list[Waiting] = []  # a few, the longest first


class RunState(Message):
    """data -> all, every second and at each change: the run's newest weights, and if it must end."""

    run_id: str
    policy_version: Integer  # newest published; -1 before the first
    weights_path: str
    stopping: bool
    reason: str  # why it ends
    suspended: bool = False  # it is the trainer's turn; no completion is begun or continued
    absent: list[Role] = []  # which of env (or serve), rollout and train have no living process
