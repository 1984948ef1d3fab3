"""What processes tell each other: each type's sender and reader, shapes and units.

Those of weight sets are in weights.py, those between the ranks of one trainer in ranks.py. Axes: `[P]` prompt
tokens, `[A]` completion tokens, `[I]` images of a prompt in reading order, `[L]` tokens of a chain, `[S]` samples
of a batch. Times are seconds; log-probabilities and entropies are in nats.
A `bytes` field is a raw frame beside the msgpack header, never a part of it, and so are numbers that are
`Packed` (packed.py, action_parser.py).

    env   -> data     LeaseRequest, StepRecord, TrajectoryEnd
    env   -> rollout  ActRequest; `serve`, which plays what others send, stands in the place of env
    train -> data     TrainerHello, BatchRequest, BatchTrained
    any   -> data     JoinRequest, StatusRequest, StopRequest
    any   -> all      Heartbeat (published)
    data  -> all      RunState (published)
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from bus.packed import Float64s, Int32s, IntArray, Packed, PromptIds
from bus.temperatures import MAX_TEMPERATURE, MIN_TEMPERATURE

PROTOCOL_VERSION = 18
"""Raised by any change of a message's fields or meaning; other versions are refused by name."""

Integer = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""One that a database takes."""
Count = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(allow_inf_nan=False)]
"""Unix seconds, or a duration in seconds, that a database takes."""
Nats = Annotated[float, Field(allow_inf_nan=False)]
UnitFraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Reward = UnitFraction
"""Of a whole trajectory: 1.0 where all of its task is done."""
MAX_GAUGE = 1e15
Gauge = Annotated[float, Field(ge=-MAX_GAUGE, le=MAX_GAUGE, allow_inf_nan=False)]
"""One that can be added up, rounded and filed."""
Role = Literal["env", "serve", "rollout", "data", "train", "status", "eval"]
PLAYERS: tuple[Role, ...] = ("env", "serve")
"""Roles that lease tasks and hand trajectories in."""
Outcome = Literal["pass", "fail", "invalid"]
StopReason = Literal[
    "done",  # the policy said it was finished, or the environment ended the episode
    "gave_up",  # the policy said the task cannot be done
    "step_limit",  # the step cap was reached
    "malformed",  # the completion was no action of the grammar
    "broken",  # the policy's own action broke the environment: the verdict is fail
    "environment",  # the environment broke: the verdict is invalid
    "unanswered",  # the policy gave no completion, e.g. the prompt is too long: the verdict is invalid
    "cancelled",  # the run or the lease ended first
]


class Message(BaseModel):
    """Base of all wire types: immutable, strict types, unknown and missing fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Reply(Message):
    """Base of all answers to a request."""


class Request(Message):
    """Base of all requests; `reply_type` is what a good answer is."""

    reply_type: ClassVar[type[Reply]]


class Sampling(Message):
    """How a completion is drawn."""

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
    """Completion tokens [start, end) were produced by the weights of `version`."""

    version: Integer
    start: Integer
    end: Integer


class SampledTokens(Message):
    """What the policy sampled in answer to one screen: the one form of it, from engine to gradient.

    The engine returns it; messages and database rows embed it as it is. A completion that
    was suspended before its end is one, too: any worker can continue from these tokens.
    """

    token_ids: Annotated[list[int], Packed("i")]  # [A], with the end-of-turn token where drawn
    behaviour_logprobs: Annotated[list[float], Packed("d")]
    """[A], nats, of the distribution sampled from; [] if unknown."""
    entropies: Annotated[list[float], Packed("d")]
    """[A], nats, of the same distribution; [] if unknown."""
    version_spans: list[VersionSpan]  # which tokens which weights produced; [] of a pool member
    patches: Annotated[list[int], Packed("i")] = []
    """[A], the cell of the prompt's last screenshot that was drawn with this token, row by row from 0; -1
    where none was, which is every token but `pointer_end`; [] where no token has one. The log-probability
    and the entropy of a token with a patch are the patch's: the token itself is forced."""

    def __len__(self) -> int:
        return len(self.token_ids)


class PointerCandidate(Message):
    """Part of PointerMap: a region that the pointer means, the best first."""

    x: UnitFraction  # of the screen's width, its weighted centre
    y: UnitFraction  # of its height
    score: UnitFraction  # mean probability of its cells


class PointerMap(Message):
    """Where a pointer of a completion looked; for pages and films. No part of what is trained on."""

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")  # in films' files
    position: Count  # in the completion, of the token with the patch
    rows: Annotated[int, Field(ge=1, le=2**16)]  # of the screen's cells
    columns: Annotated[int, Field(ge=1, le=2**16)]
    heat: bytes  # [rows * columns], each cell's probability as a share of the largest, in 255ths
    candidates: list[PointerCandidate] = []


class Turn(Message):
    """One past step of the episode as the model may see it, oldest first in a prompt."""

    text: str  # the completion, as the model wrote it
    screenshot: bytes | None = None  # encoded, before the action; None where history dropped it
    token_ids: list[int] = []
    """[A], the completion as it was sampled, which the prompt then shows; [] where `text` is shown."""
    observed_text: str = ""  # the text beside its screenshot; empty where history dropped it


class ChatPart(Message):
    """Part of ChatMessage: a text, or the next of the request's images."""

    text: str = ""
    is_image: bool = False


class ChatMessage(Message):
    """Part of ActRequest: one message of a program that writes its prompts itself."""

    role: Literal["system", "user", "assistant"]
    parts: list[ChatPart]
    token_ids: list[int] = []
    """[A], of an assistant's: the completion as it was sampled, which the prompt then shows; [] where the
    parts are shown."""


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
    """Consecutive steps of one trajectory, whose prompts extend one another: each token travels once.

    Each step's prompt is exactly the one before with its completion, and what came after; its images
    are those of the one before, and more.
    """

    token_ids: Int32s  # [L], the last step's prompt and completion, image placeholders expanded
    image_hashes: list[str]  # [I], the last step's; keys of Batch.images


class Sample(Message):
    """One step of one trajectory, ready to train on.

    Its completion [A] is tokens [start, end) of its chain, its prompt [P] all before.
    """

    group_id: str  # in which it is compared; a trajectory of the pool may be in several
    trajectory_id: str
    step: Integer
    chain: Count  # index into Batch.chains
    start: Count
    end: Count
    images: Count  # that its prompt shows: the chain's first so many
    behaviour_logprobs: Float64s
    """[A], nats, of the distribution sampled from; empty if unknown."""
    version_spans: list[VersionSpan]
    """Which tokens of the completion which weights produced; [] of a pool member."""
    advantage: float
    weight: float  # multiplies the sample's loss; 1.0 for a fresh sample
    patches: Annotated[list[int], Packed("i")] = []  # [A], as in SampledTokens
    worker: str = ""  # that sampled it, for an error to name
    reward: Reward | None = None  # of its trajectory; None where groups are compared
    expected: Reward | None = None  # that its task's baseline expected; likewise

    def __len__(self) -> int:
        return self.end - self.start


class VersionAge(Message):
    """Part of Batch: how far weights that sampled some of its tokens are behind the trainer."""

    version: Integer
    behind: Count  # versions, by their updates (dart_cli/data/versions.py)


class Batch(Message):
    """data -> train: one update's work."""

    batch_id: Integer
    group_ids: list[str]
    temperature: float = Field(gt=0, le=MAX_TEMPERATURE, allow_inf_nan=False)  # divides the logits
    chains: list[Chain]
    samples: list[Sample]  # [S]
    images: dict[str, bytes]  # content hash -> encoded image
    run_s: Seconds = 0.0  # how long the run had been served when the batch was formed; never falls
    ages: list[VersionAge] = []  # of each version that sampled a token of it
    reuse: Count = 0  # how often its samples were trained on before; 0 of a fresh batch
    trajectories: Count = 0  # of the run that had ended when it was formed; never falls
    reward: Reward | None = None  # mean of its groups, as data files it
    success: Reward | None = None  # of the run's tasks when it was served

    def prompt(self, sample: Sample) -> IntArray:
        """Return the tokens [P] that the policy read."""
        return self.chains[sample.chain].token_ids[: sample.start]

    def completion(self, sample: Sample) -> IntArray:
        """Return the tokens [A] that it sampled."""
        return self.chains[sample.chain].token_ids[sample.start : sample.end]

    def image_hashes(self, sample: Sample) -> list[str]:
        """Return what its prompt shows [I], in reading order."""
        return self.chains[sample.chain].image_hashes[: sample.images]


# --- env -> data ----------------------------------------------------------------------------


class Ack(Reply):
    """The request is durable. `accepted` is False if it came too late; `note` gives the reason."""

    accepted: bool = True
    note: str = ""


class LeaseReply(Reply):
    """data -> env: a task to play, or when to ask again and what the wait is for."""

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
    task: str = ""  # only this training task; empty: what the scheduler chooses
    task_seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """With `task`: only this instance of it; one of `env.seeds`."""


class StepRecord(Request):
    """env -> data: one step, as it happened: the screenshot and the completion it drew."""

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
    action: dict[str, Any] | None  # envs.contract.actions.Action as a dict; None where malformed
    error: str  # why the text is no action; empty where it is one
    model_s: Seconds  # waited for the completion
    env_s: Seconds  # the environment's step
    instruction: str = ""  # the text given to the policy, with step 0; empty with the others
    observed_text: str = ""  # what the policy read beside the screenshot (env.observe)
    reward: Annotated[float, Field(allow_inf_nan=False)] | None = None  # the environment's, if any
    pointed: list[PointerMap] = []  # the completion's
    images: list[bytes] = []
    """Encoded images of the prompt beside `screenshot` that no step of the trajectory before it had."""


class Judgement(Message):
    """Part of TrajectoryEnd: what a judge model said of the episode, and what it cost."""

    judge: str  # the model, and a digest of how it is asked
    use: Literal["missing", "check", "later"]
    """In place of an evaluator that the task lacks; beside the evaluator; after the run (`dart data judge`)."""
    outcome: Outcome  # invalid: no answer that can be read
    score: Reward | None = None  # 1.0 for pass and 0.0 for fail, where no score was asked for
    reason: str = ""
    calls: Count = 0  # requests to the model
    prompt_tokens: Count = 0  # as the model counts them
    completion_tokens: Count = 0
    seconds: Seconds = 0.0


class TrajectoryEnd(Request):
    """env -> data: the episode is over."""

    reply_type: ClassVar[type[Reply]] = Ack
    trajectory_id: str
    steps: Integer  # how many StepRecords belong to it
    outcome: Outcome
    reason: str
    stop_reason: StopReason
    screenshot: bytes | None  # encoded image after the last action
    reset_s: Seconds
    wall_s: Seconds
    reward: Reward | None = None  # the verdict's; None: 1.0 for pass, 0.0 for fail
    judgement: Judgement | None = None  # of a judge model that was asked


# --- env -> rollout -------------------------------------------------------------------------


class Completion(Reply):
    """rollout -> env: what the policy said to one screen."""

    prompt_token_ids: PromptIds  # [P]
    sampled: SampledTokens
    text: str
    stop: Literal["end", "length", "suspended"]  # end-of-turn token, max_tokens, or interrupted
    queue_s: Seconds  # waited before the engine took it up
    engine_s: Seconds
    worker: str = ""  # the answering worker, which fills it in; empty in-process
    pointed: list[PointerMap] = []  # of its pointers, in order; of a partial's, too


class ActRequest(Request):
    """env -> rollout: the screen, the instruction and what came before; what next?"""

    reply_type: ClassVar[type[Reply]] = Completion
    trajectory_id: str
    step: Integer
    instruction: str
    turns: list[Turn]  # oldest first; history has already chosen what is visible
    previous: str = ""  # the steps before them, a line each, where policy.template shows them
    screenshot: bytes  # encoded image
    image_hashes: list[str] = []
    """[I], content hashes of the turns' screenshots and of this one; [] if unknown. The worker checks the
    hash of a screenshot that it has not seen, and data the newest one's in the StepRecord."""
    width: Integer  # pixels of the screenshot
    height: Integer
    observed_text: str = ""  # the screen's text beside the screenshot (env.observe)
    sampling: Sampling
    partial: SampledTokens | None = None  # a suspended completion of this request to go on with
    pointed: list[PointerMap] = []  # the partial's, which the completion has again
    messages: list[ChatMessage] = []
    """The whole prompt, in place of `instruction`, `turns` and `observed_text`, which it then does not show."""
    images: list[bytes] = []  # [I - 1], encoded, those of `messages` before `screenshot`


# --- train -> data --------------------------------------------------------------------------


class HelloReply(Reply):
    """data -> train: which version numbers are taken."""

    policy_version: Integer  # the highest that was ever published; -1 before the first
    digest: str  # of its manifest; empty before the first


class TrainerHello(Request):
    """train -> data: (re)started from a checkpoint; serve again what it has not seen."""

    reply_type: ClassVar[type[Reply]] = HelloReply
    policy_version: Integer  # newest published when the checkpoint was written
    last_batch_id: Count  # newest batch the checkpoint contains; 0 before the first
    updates: Count  # that changed its weights


class BatchReply(Reply):
    """data -> train: a batch, or when to ask again and what the wait is for."""

    batch: Batch | None = None
    retry_after_s: Seconds = 0.0
    reason: str = ""


class BatchRequest(Request):
    """train -> data: give me the next batch."""

    reply_type: ClassVar[type[Reply]] = BatchReply
    policy_version: Integer


class StepMismatch(Message):
    """Part of BatchTrained: proximal minus behaviour log-probability over one step's tokens, nats."""

    trajectory_id: str
    step: Integer
    mean: Nats
    largest: Nats  # of the absolute differences


class StepValue(Message):
    """Part of BatchTrained: what a critic expected before a step, and the advantage by it."""

    group_id: str
    trajectory_id: str
    step: Integer
    value: Reward
    advantage: Nats


REPLAY_METRIC = "replay_"
"""What the names of an update's metrics begin with where its batch was trained on again."""


class BatchTrained(Request):
    """train -> data: the batch is in the weights; its metrics."""

    reply_type: ClassVar[type[Reply]] = Ack
    batch_id: Integer
    policy_version: Integer  # after the update
    metrics: dict[str, float]  # of a skipped update perhaps not finite: data files those that are
    mismatches: list[StepMismatch] = []  # of its steps whose behaviour policy is known
    values: list[StepValue] = []  # of its steps, with a critic


# --- any -> data ----------------------------------------------------------------------------


class JoinReply(Reply):
    """data -> a process of the run: its settings are accepted; a line for each that differs."""

    notes: list[str] = []


class JoinRequest(Request):
    """env, serve, rollout, train -> data: a process takes part in the run, with these settings.

    Sent when it starts and to each new data process. Settings that the run cannot go on with are refused
    with a ConfigError.
    """

    reply_type: ClassVar[type[Reply]] = JoinReply
    role: Role
    worker: str
    host: str
    folder: str  # its working directory, in which relative paths begin
    settings: dict[str, Any]  # section.key -> value as in JSON, of keys not at their defaults
    given: list[str] = []  # names of what --set changed; all else is in its file
    is_first: bool = True  # else an earlier data process has accepted them: none is refused
    is_supervised: bool = False  # `dart up` started it: a key that it does not read is not refused
    is_forced: bool = False  # with --force: nothing is refused


class StatusReply(Reply):
    """data -> status: the run at one moment, a bus.snapshot.Snapshot dumped."""

    snapshot: dict[str, Any]


class StatusRequest(Request):
    """status -> data: how is the run?"""

    reply_type: ClassVar[type[Reply]] = StatusReply


class StopRequest(Request):
    """any -> data: lease nothing more and make all processes end; started again, the run continues."""

    reply_type: ClassVar[type[Reply]] = Ack
    reason: str


class ErrorReply(Reply):
    """any server -> requester: the request was understood and refused."""

    error: str
    error_type: str  # class name in bus.errors


# --- published ------------------------------------------------------------------------------


class Waiting(Message):
    """Part of Heartbeat: waits of one process for the same thing."""

    what: str  # in words, e.g. "a completion from rollout-0"
    on: str  # what could end it: a worker, a role, `environment`, `permit`, `batch`, ...; or empty
    count: Integer  # how many of them
    longest_s: Seconds
    deadline_s: Seconds  # that ends each of them; 0 if none does


class Heartbeat(Message):
    """any -> all, every second: I live, this is my load, this is what I wait for."""

    role: Role
    worker: str  # unique in the run, e.g. env-0
    host: str
    pid: Integer
    started_at: Seconds  # unix seconds
    sent_at: Seconds  # unix seconds
    endpoint: str  # where it serves requests; empty if it does not
    policy_version: Integer  # weights it holds; -1 if none
    state: str  # one word: starting, ready, waiting, syncing, training, stopping
    waiting_for: str  # what it waits for in words; empty if nothing
    waiting_s: Seconds  # for how long
    gauges: dict[str, Gauge]  # role-specific numbers, named in docs
    trajectories: list[str]  # env: leases in play, which this heartbeat renews
    waits: list[Waiting] = []  # the longest first, a few of them


class RunState(Message):
    """data -> all, every second and at each change: the run's newest weights and whether to end."""

    run_id: str
    policy_version: Integer  # newest published; -1 before the first
    weights_path: str
    stopping: bool
    reason: str  # why it stops
    suspended: bool = False  # the trainer's turn; no completion is begun or continued
    absent: list[Role] = []  # of env (or serve), rollout and train: those without a living process
