"""The whole configuration of a run: its sections, their keys, types and ranges.

    Config         the sections; each field carries its meaning, unit and range below it
    section_types  the sections by name

`dart init` writes the field texts as comments, docs/config.md holds them as tables. load.py reads a
TOML file into a Config; validate.py finds the mistakes that no single field can show.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict
from pydantic_core import PydanticCustomError

from bus.temperatures import MAX_TEMPERATURE, MIN_TEMPERATURE
from envs.own_code import did_you_mean

_AnyPath = TypeVar("_AnyPath", str, Path)


class Section(BaseModel):
    """Base of all sections: frozen, strict, unknown keys refused, field docstrings are the help."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,
    )


def _without_control(path: _AnyPath) -> _AnyPath:
    """The path, refused where it has a null byte, which no system takes, or breaks a line of a log."""
    if "\0" in str(path):
        raise PydanticCustomError("null_byte", "no path has a null byte; choose another")
    if not str(path).isprintable():
        raise PydanticCustomError(
            "control_character", "has a line break or control character; choose another path"
        )
    return path


CODECS = ("compact", "uitars")
CODEC_PARTS = ("limits", "parse", "format", "as_history")
"""What an action language has; see dart_cli/policy/codec.py."""


def _codec(name: str) -> str:
    if name not in CODECS and ":" not in name:
        raise PydanticCustomError(
            "codec",
            "must be compact, uitars, or your own as file.py:MyCodec",
            {"hint": did_you_mean(name, CODECS)},
        )
    return name


TRAIN_SEEDS = 1_000_000
"""Training episodes have task seeds below this, held-out ones from here on: they never meet."""

MANY = 1_000_000
"""Upper bound of counts and seconds that have no lower one: more is a typing mistake."""
MOST_THREADS = 1024
MOST_SLOTS = 10_000  # of one process; each is a thread or a process
MOST_TOKENS = 1_000_000  # of one completion
MOST_PIXELS = 2**31 - 1

Positive = Annotated[int, Field(ge=1, le=MANY)]
Count = Annotated[int, Field(ge=0, le=MANY)]
Threads = Annotated[int, Field(ge=1, le=MOST_THREADS)]
Megabytes = Annotated[int, Field(ge=1, le=16 * MANY)]
Seconds = Annotated[float, Field(ge=0, le=MANY)]
PositiveSeconds = Annotated[float, Field(gt=0, le=MANY)]
Folder = Annotated[Path, Strict(False), AfterValidator(_without_control)]
Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class RunConfig(Section):
    """Where the run lives and what makes it repeatable."""

    dir: Folder = Path("runs/default")
    """Run directory: database, weights, logs, sockets; made private (0700). Relative to the shell's."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seeds task order, environments and sampling."""


class BusConfig(Section):
    """How the processes reach each other."""

    transport: Literal["ipc", "tcp"] = "ipc"
    """`ipc`: sockets in the run directory, one host. `tcp`: across hosts, with CURVE keys."""

    host: str = "127.0.0.1"
    """With tcp, the address of `dart data`, which binds it at `port`; `dart rollout` binds its own
    address on the route to it, at a free port. Beyond loopback `keys` is required."""

    port: int = Field(default=7800, ge=1024, le=65000)
    """First of three tcp ports of `dart data`: requests, telemetry in, telemetry out."""

    keys: Folder | None = None
    """Folder of CURVE keys that `dart keys` made, the same on every host; required beyond loopback."""

    deadline_s: PositiveSeconds = 30.0
    """Seconds a request may take before it is an error that names both processes."""

    stall_s: PositiveSeconds = 20.0
    """Seconds without progress after which `dart status` and the log report a stall: which process
    waits for which."""


class LoraConfig(Section):
    """Adapters of low rank, trained in place of the weights: docs/lora.md."""

    rank: int = Field(default=32, ge=1, le=512)
    """Columns of an adapter: a layer of I inputs and O outputs trains `rank` x (I + O) numbers."""

    alpha: float = Field(default=64.0, gt=0, le=MANY)
    """What the adapters add is multiplied by alpha / rank."""

    targets: list[str] = [
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    ]
    """Linear layers of the language model that get adapters, by their names in each layer."""

    vision: bool = False
    """Adapters for all linear layers of the vision tower, too; else it is not trained."""


class ModelConfig(Section):
    """The policy network."""

    path: Annotated[str, AfterValidator(_without_control)] = "builtin:tiny"
    """A Hugging Face folder (Qwen2-VL, Qwen2.5-VL / UI-TARS, Qwen3-VL), or one that ships with dart:
    `builtin:tiny` for the embedded suites, `builtin:miniwob`."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Floating point type of weights and activations."""

    freeze_vision: bool = False
    """Do not train the vision tower."""

    lora: LoraConfig | None = None
    """Train adapters of low rank (LoRA) and leave the weights as they are."""


class PolicyConfig(Section):
    """How screens become prompts and text becomes actions."""

    codec: Annotated[str, AfterValidator(_codec)] = "compact"
    """The model's action language: `compact` (tiny model), `uitars` (UI-TARS text), or your own as
    `package.module:Codec` or `file.py:Codec` (docs/extend-codec.md)."""

    coordinates: Literal["thousandths", "thousand", "resized"] = "thousandths"
    """Numbers in actions: `thousandths`, 0-999 of each side; `thousand`, 0-1000 (Qwen2-VL, Qwen3-VL);
    `resized`, pixels of the smart-resized screenshot (Qwen2.5-VL, UI-TARS-1.5)."""

    resize_factor: int = Field(default=28, ge=1, le=4096)
    """`resized`: what both sides become multiples of, the model's patch size times its merge size."""

    resize_min_pixels: int = Field(default=100 * 28 * 28, ge=1, le=MOST_PIXELS)
    """`resized`: fewest pixels of a resized screenshot, as in the model's preprocessor_config.json."""

    resize_max_pixels: int = Field(default=16384 * 28 * 28, ge=1, le=MOST_PIXELS)
    """`resized`: most pixels of a resized screenshot, likewise."""

    history: Literal["slide", "evict"] = "slide"
    """Which past screenshots a prompt keeps: `slide`, always the newest `history_images`; `evict`, all
    until there would be more than `history_images_most`, then the newest `history_images` alone, so
    that between two evictions each prompt extends the one before (docs/policy.md)."""

    history_images: int = Field(default=1, ge=1, le=32)
    """Screenshots in a prompt, the current one included; with `evict`, after an eviction."""

    history_images_most: int = Field(default=0, ge=0, le=256)
    """`evict`: most screenshots in a prompt, the current one included."""

    history_turns: int = Field(default=0, ge=0, le=1000)
    """Past turns whose text stays in the prompt; with `evict`, after an eviction."""

    history_texts: int = Field(default=1, ge=1, le=32)
    """Screens whose texts (`env.observe`) are in a prompt, the current one included; with `evict`, after
    an eviction."""

    system_prompt: str = ""
    """Put first in every prompt; empty for none."""

    template: str = "{instruction}"
    """Text around the task's instruction, e.g. the actions that a model may write."""

    part_order: Literal["auto", "separate", "instruction_first", "image_first"] = "auto"
    """Where the instruction is: in a user message of its own before the first screen's (UI-TARS), or in
    one message with that screen, before its image (Qwen) or after it (the tiny models). `auto`: by
    `codec`; `image_first` for `compact` as long as every turn in the prompt has its screenshot."""


class EnvConfig(Section):
    """The environments of one `dart env` process."""

    suite: str = "mini"
    """Name of a task suite, or `package.module:Suite` / `file.py:Suite` of your own."""

    tasks: list[str] = []
    """Tasks to train on: ids, patterns such as `miniwob/click-*`, and `!pattern` for those left
    out; empty for all of the suite's training split."""

    heldout: list[str] = []
    """Tasks (ids, patterns) kept out of training, in addition to those that the suite holds out;
    they are evaluated as compositions."""

    seeds: Annotated[tuple[int, int], Strict(False)] = (0, TRAIN_SEEDS)
    """Seeds of training instances: from the first number up to, but not including, the second."""

    slots: int = Field(default=16, ge=1, le=MOST_SLOTS)
    """Environments that one process plays at once."""

    options: dict[str, Any] = {}
    """Passed to the environment, e.g. its resolution."""

    observe: list[Literal["screenshot", "accessibility", "terminal"]] = ["screenshot"]
    """What the policy is given of a screen: always the screenshot; as text beside it the accessibility
    tree, or what a terminal shows, where the suite has them (docs/environments)."""

    observe_chars: int = Field(default=8000, ge=100, le=200_000)
    """Most characters of each of these texts in a prompt; what is cut says so."""

    reset_deadline_s: PositiveSeconds = 60.0
    """Seconds a reset may take before the episode is invalid and the slot starts afresh."""

    step_deadline_s: PositiveSeconds = 30.0
    """Seconds an action may take, likewise; an action that ends its episode is judged at once, and
    may take `evaluate_deadline_s` more."""

    evaluate_deadline_s: PositiveSeconds = 60.0
    """Seconds an evaluator may take, likewise."""

    isolation: Literal["thread", "process"] = "thread"
    """Where each environment runs: in a thread, which is cheap; or in a process, which can be killed
    when it hangs, and which costs its slot alone when it crashes or uses too much memory."""

    memory_mb: int = Field(default=0, ge=0, le=16 * MANY)
    """`process`: most private memory of each process of an environment, MiB; 0 for no bound."""

    max_processes: Count = 0
    """`process`: most processes that an environment may have at once; beyond that it is ended, before
    it can fill the host. 0 for no bound."""

    pass_threshold: float = Field(default=1.0, gt=0, le=1)
    """Reward that a pass needs where the evaluator gives a reward alone, as those of OSWorld do."""

    malformed: Literal["end", "noop"] = "end"
    """What a completion that is no action does: `end` fails the episode, `noop` uses up a step."""


def observed_kinds(env: EnvConfig) -> tuple[str, ...]:
    """The texts of `env.observe`, without the screenshot."""
    return tuple(kind for kind in env.observe if kind != "screenshot")


MODEL_ENGINES = ("transformers", "vllm")
"""Values of `rollout.engine` that run the policy's model; the others answer without one."""


class RolloutConfig(Section):
    """One rollout worker: an engine and how it samples."""

    engine: Literal["transformers", "vllm", "scripted", "timed"] = "transformers"
    """What runs the model: `vllm` on GPUs, see section [vllm] and docs/engines.md; `transformers`
    anywhere. `scripted` answers at random without a model, to try the processes; `timed` does so as
    fast as section [timing] says, to measure scheduling."""

    temperature: float = Field(default=1.0, ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE)
    """Sampling temperature; the trainer divides logits by the same."""

    max_tokens: int = Field(default=16, ge=1, le=MOST_TOKENS)
    """Longest completion, tokens."""

    max_batch: int = Field(default=32, ge=1, le=MOST_SLOTS)
    """Requests decoded together."""

    kv_cache_mb: Megabytes = 4096
    """`transformers`: MiB for the keys and values of the requests decoded together, their longest
    counted for each; a request that does not fit waits. A single one is served, however large."""

    prefix_cache_mb: int = Field(default=1024, ge=0, le=16 * MANY)
    """`transformers`: MiB beside `kv_cache_mb` for the keys and values of earlier requests, with which
    a request that begins like one of them is not computed from its start; 0 for none."""

    image_cache_mb: Megabytes = 256
    """MiB for decoded screens, cut as the model reads them: 2.7 for one of 1280x720, 6.0 for 1920x1080.
    A step shows past screens again, so there should be room for those of the episodes in play."""

    device: Device = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""

    threads: Threads = 1
    """CPU threads of torch; with more threads than free cores it stalls."""

    deadline_s: PositiveSeconds = 60.0
    """Seconds an environment waits for a completion, over all workers that it can ask."""

    absent_s: PositiveSeconds = 900.0
    """Seconds an environment waits, for each completion, while no worker can be asked: it keeps its
    screen and its lease meanwhile. After that the episode is invalid."""


class VllmConfig(Section):
    """The engine of `rollout.engine = "vllm"`; docs/engines.md explains its keys."""

    tensor_parallel: int = Field(default=1, ge=1, le=1024)
    """GPUs that share one model; `dart rollout` takes the first ones that it sees."""

    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of each GPU's memory for weights, activations and keys and values together."""

    kv_cache_mb: int = Field(default=0, ge=0, le=16 * MANY)
    """MiB for keys and values, in place of `gpu_memory_utilization`; 0 for what that share leaves,
    or for 512 on a CPU."""

    max_model_len: int = Field(default=0, ge=0, le=16 * MANY)
    """Most tokens of prompt and completion together; 0 for as many as the model has positions. A
    lower number leaves room for more requests."""

    enforce_eager: bool = False
    """Use no CUDA graphs: starts faster, serves slower."""

    prefix_caching: bool = True
    """Keep keys and values of prompts for requests that begin alike, under the same weights."""

    kv_cache: Literal["recompute", "keep"] = "recompute"
    """What is done with running requests when weights change: `recompute` their keys and values, so
    that every token is of one version; or `keep` the old ones, a shorter halt but two versions mixed."""

    lora: Literal["adapters", "merged"] = "adapters"
    """With `model.lora`: serve `adapters` beside the weights, so that a request ends under the version
    that it began with and nothing halts; or add each version to the weights (`merged`)."""

    options: dict[str, Any] = {}
    """Further engine arguments by vLLM's own names, e.g. { block_size = 32 }."""


class DataConfig(Section):
    """What is played next and what is trained on."""

    group_size: int = Field(default=8, ge=2, le=1024)
    """Trajectories of one task and seed that are compared."""

    groups_per_batch: Positive = 8
    """Groups with a gradient (mixed rewards) in one batch."""

    scheduling: Literal["rollout", "task", "batch", "april"] = "rollout"
    """What a freed slot waits for: nothing (`rollout`), its group (`task`), the batch (`batch`), or
    the batch's target (`april`)."""

    coupled: bool = False
    """The synchronous baseline: rollouts stop while the trainer trains and all workers update."""

    over_provision: float = Field(default=2.0, ge=1, le=8)
    """`april`: groups in play for each group of a batch; what is unfinished is recycled."""

    recycle: bool = True
    """`april`: false discards what is unfinished when a batch is full (over-sample and discard)."""

    max_open_groups: Count = 0
    """Most groups leased or waiting to be trained at once; 0 for as many as max_staleness admits."""

    max_staleness: Count = 4
    """A group whose oldest token is more versions behind than this is dropped, its reason recorded."""

    task_sampling: Literal["uniform", "frontier"] = "frontier"
    """`frontier` prefers tasks near 50 % success (moving average), or with `reward = "value"` those
    whose rewards vary most; `uniform` takes all alike."""

    advantage: Literal["group_std", "group_mean", "leave_one_out"] = "group_std"
    """Rewards less their group's mean, with `group_std` over its standard deviation too;
    `leave_one_out` takes the mean of the other members (RLOO)."""

    reward: Literal["outcome", "value"] = "outcome"
    """What advantages are computed from: the `outcome`, 1 for a pass and 0 for a failure; or the
    verdict's reward, a `value` between 0 and 1."""

    replacements: float = Field(default=1.0, ge=0, le=8)
    """Trajectories without a verdict (invalid, lease lost) that a group may replace, for each of its
    members; beyond that it goes on with those that it has."""

    early_stop: bool = False
    """Play half of each group first and stop if all pass with one reward: saves trajectories without a
    gradient. Only the first half counts for the success shown, so that it is the policy's."""

    dynamic_number: bool = False
    """Smaller groups for tasks whose success, or with `reward = "value"` mean reward, is above 0.6, down
    to `min_group_size`."""

    min_group_size: int = Field(default=2, ge=2, le=1024)
    """`dynamic_number`: fewest trajectories of a group."""

    dynamic_length: bool = False
    """A task's step limit is its longest success so far plus `length_slack`, once it has a success."""

    length_slack: Count = 2
    """`dynamic_length`: steps above the longest success."""

    high_entropy: float = Field(default=1.0, gt=0, le=1)
    """Share of a group's steps that is trained on, those of highest mean token entropy; 1 for all."""

    pool_ratio: float = Field(default=0.0, ge=0, le=0.5)
    """An all-fail group gets one success from the experience pool, if it is then at most this share
    of the group, e.g. 0.125; 0 uses no pool."""

    pool: list[Folder] = []
    """Folders of exported or collected trajectories whose successes join the pool at the start."""

    pool_online: bool = True
    """Successes of this run join the pool, too."""

    pool_per_task: Positive = 32
    """Trajectories of a task that the pool keeps: the newest of each source."""

    lease_s: float = Field(default=60.0, ge=1, le=MANY)
    """Seconds without a step or heartbeat after which a lease is taken back."""

    max_gb: float = Field(default=50.0, gt=0, le=MANY)
    """Size of the database, GB, beyond which the oldest screenshots that no part needs are removed."""


class TrainConfig(Section):
    """The optimizer and the objective (arXiv 2509.23866 section 3)."""

    learner: Literal["torch", "timed"] = "torch"
    """What updates. `timed` takes as long as section [timing] says and learns nothing."""

    updates: int = Field(default=200, ge=0, le=1000 * MANY)
    """The run ends after this many optimizer updates."""

    max_minutes: float = Field(default=0.0, ge=0, le=MANY)
    """The run ends after this many minutes of training; 0 for no limit."""

    lr: float = Field(default=1e-6, ge=0, le=1)
    """AdamW learning rate after warm-up; 0 trains nothing (a control)."""

    lr_end: float = Field(default=1.0, ge=0, le=1)
    """Fraction of `lr` reached linearly at the end of the run: with the last of `updates`, or when
    `max_minutes` are over, whichever comes first."""

    warmup: int = Field(default=0, ge=0, le=1000 * MANY)
    """Updates over which the learning rate rises from 0."""

    betas: Annotated[tuple[Fraction, Fraction], Strict(False)] = (0.9, 0.99)
    """AdamW's moment decay rates."""

    weight_decay: float = Field(default=0.0, ge=0, le=1)
    """AdamW's decoupled weight decay."""

    grad_clip: float = Field(default=1.0, gt=0)
    """Largest gradient norm."""

    epochs: int = Field(default=1, ge=1, le=64)
    """Passes over a batch, an optimizer step each; ratios to the policy before the first."""

    objective: Literal["grpo", "gspo", "cispo"] = "grpo"
    """What a ratio is clipped in: each token's (`grpo`), each completion's geometric mean
    (`gspo`), or the weight of each token's log-probability (`cispo`)."""

    clip_low: float = Field(default=0.2, ge=0, le=1)
    """Ratios below 1 - clip_low are clipped; at 1 none is. With one epoch all ratios are 1."""

    clip_high: float = Field(default=0.28, ge=0)
    """Ratios above 1 + clip_high are clipped (clip-higher)."""

    dual_clip: float = Field(default=0.0, ge=0)
    """Where the advantage is negative, a ratio counts as at most this, > 1; 0 for no bound."""

    correction: Literal["truncated", "sequence", "masked", "none", "ratio"] = "truncated"
    """Of staleness, by weights proximal / behaviour: `truncated` by token or by `sequence`, or
    `masked` outside a range; `none` has no weights; `ratio` takes the objective's own ratio to the
    behaviour policy."""

    is_cap: float = Field(default=1.0, gt=0)
    """C of truncated importance sampling: min(proximal / behaviour, C), `truncated`, `sequence`."""

    mask_low: float = Field(default=0.5, ge=0, le=1)
    """`masked`: a token whose proximal / behaviour is lower has weight 0 (IcePop)."""

    mask_high: float = Field(default=5.0, ge=1)
    """`masked`: a token whose proximal / behaviour is higher has weight 0."""

    demonstrations: Literal["cloned", "shaped"] = "cloned"
    """Weight of tokens that an unknown policy wrote: `cloned` 1, so behaviour cloning times the
    advantage; `shaped` gamma p / (p + gamma)^2, where p is the policy's probability of the token
    (LUFFY's shaping)."""

    demonstration_gamma: float = Field(default=0.1, gt=0, le=1)
    """`shaped`: the probability at which a demonstration's token weighs most, 1 / 4."""

    min_ess: float = Field(default=0.0, ge=0, lt=1)
    """Effective sample size, over tokens, below which `low_ess` acts on a batch; 0 for never."""

    low_ess: Literal["skip", "shrink"] = "skip"
    """`skip` such a batch, or `shrink` its learning rate by ESS / min_ess."""

    normalise: Literal["tokens", "samples", "trajectories", "constant"] = "tokens"
    """The loss is a mean over all `tokens` of a batch; over its `samples` (steps) or `trajectories`,
    of their tokens' mean; or (`constant`) over trajectories, of their tokens' sum /
    `constant_tokens` (Dr. GRPO)."""

    constant_tokens: float = Field(default=0.0, ge=0)
    """`constant`: tokens of a trajectory whose weight is 1, e.g. of the longest that can be."""

    kl_beta: float = Field(default=0.0, ge=0)
    """Weight of the k3 KL to the model the run began with, of each token at most 10 nats; 0 keeps no
    reference model."""

    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus: the exact entropy of each token's distribution, nats."""

    ranks: int = Field(default=1, ge=1, le=1024)
    """Processes that share one model (FSDP2), one per GPU; `dart train` starts them, or `torchrun`
    does."""

    pack_tokens: int = Field(default=16_384, ge=256, le=MANY)
    """Most tokens in one forward and backward of a rank; a longer sequence goes alone."""

    recompute: Literal["none", "layer"] = "none"
    """`layer` keeps only each layer's input for the backward pass and computes the rest again: about a
    third more work, a thirtieth of the memory."""

    chunk_tokens: int = Field(default=1024, ge=1, le=MANY)
    """Completion tokens whose distributions over the vocabulary are in memory at once."""

    image_workers: Threads = 2
    """Threads of each rank that prepare screens ahead of the model."""

    offload: Literal["none", "optimizer"] = "none"
    """`optimizer` keeps weights' masters and moments in main memory and steps there: slower, for fewer
    GPUs."""

    rank_deadline_s: PositiveSeconds = 600.0
    """`ranks` above 1: seconds that a rank waits for the others; then all end, and the run resumes."""

    device: Device = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""

    threads: Threads = 1
    """CPU threads of torch."""

    checkpoint_every: Positive = 10
    """Updates between checkpoints."""

    keep_checkpoints: Positive = 2
    """Newest checkpoints kept."""

    parity_every: Count = 10
    """Policy versions after which engine and trainer are compared again on the same weights, the
    first at the start; 0 never stops a run."""

    parity_limit: float = Field(default=0.0, ge=0)
    """Mean difference of their log-probabilities, nats, above which the run stops; 0 for 0.001 in
    float32 and 0.1 in bfloat16."""

    wandb: str = ""
    """Project of Weights & Biases that gets the metrics, too (install its package); empty for none."""


class WeightsConfig(Section):
    """How new weights reach the rollout workers: docs/weights.md."""

    channel: Literal["file", "collective"] = "file"
    """`file`: each worker reads the files of a version. `collective`: the trainer sends it from memory
    to each worker in turn, by torch.distributed (gloo); all processes are on one host."""

    delta: bool = False
    """`file`: publish what changed since the version before. Workers read only that, and the trainer
    writes only that, except for each `whole_every`th version, which is written whole, too."""

    whole_every: Positive = 8
    """`delta` and `collective`: one version in this many is written whole, and so is the last."""

    directory: Folder | None = None
    """Where weight sets are written; unset for `weights/` of the run, with the tensors in shared
    memory, where it has room, until the trainer ends."""

    publish_every: Positive = 1
    """Updates between publications."""

    keep: int = Field(default=3, ge=2, le=MOST_SLOTS)
    """Newest weight sets kept."""


class SyncConfig(Section):
    """How rollout workers take new weights: a few at a time, while the others go on serving."""

    concurrent: Count = 1
    """Workers that take weights at once; 0 for all."""

    deadline_s: PositiveSeconds = 120.0
    """Seconds after which a worker's permit to take weights is given to the next worker."""


class TimingConfig(Section):
    """Simulated times of `rollout.engine = "timed"` and `train.learner = "timed"`, before speedup."""

    speedup: float = Field(default=1.0, gt=0, le=1000)
    """All times below are divided by this."""

    prefill_s: Seconds = 0.5
    """Seconds an engine prefills a prompt whose trajectory it has not served before."""

    prefill_cached_s: Seconds = 0.12
    """The same where the turns before are in its prefix cache: the new screenshot alone."""

    decode_s: Seconds = 0.01
    """Seconds of a decode iteration with one request."""

    decode_each_s: Seconds = 0.0002
    """Seconds that each further request in the batch adds to an iteration."""

    completion_tokens: Positive = 70
    """Median tokens of a completion (log-normal)."""

    completion_sigma: float = Field(default=0.4, ge=0, le=2)
    """Spread of their logarithm."""

    transfer_s: Seconds = 2.0
    """Seconds a worker reads a weight set while it serves."""

    pause_s: Seconds = 0.5
    """Seconds it does not serve while the set is put in place."""

    train_s: Seconds = 10.0
    """Seconds of an update, however small."""

    train_sample_s: Seconds = 0.07
    """Seconds that each sample adds to it."""


class EvalConfig(Section):
    """Held-out evaluation, by `dart eval` and around `dart up`."""

    episodes: Count = 400
    """Episodes per evaluation and mode (sampled, greedy), spread over the tasks; 0 for none."""

    random_episodes: int = Field(default=100, ge=0, le=1_000_000)
    """Episodes of random clicks, the baseline that `dart up` plays with `around`; 0 for none."""

    tasks: list[str] = []
    """Tasks to evaluate, as in env.tasks; empty for the training tasks (on held-out seeds)."""

    compositions: list[str] = []
    """Tasks never trained on, as in env.tasks, reported separately; empty for all that are held out."""

    seed: int = Field(default=TRAIN_SEEDS, ge=0, lt=2**63)
    """First seed of the evaluation's episodes."""

    around: bool = False
    """`dart up` evaluates before and after the run and writes a report."""


class GpusConfig(Section):
    """Which GPUs each process sees, by nvidia-smi's numbers, unless CUDA_VISIBLE_DEVICES is set."""

    train: list[Annotated[int, Field(ge=0, le=1023)]] = []
    """One for each of `train.ranks`; empty for all. Not with `torchrun`, which gives ranks their own."""

    rollout: list[Annotated[int, Field(ge=0, le=1023)]] = []
    """Shared out to the rollout workers by the number in their names, `vllm.tensor_parallel` for each, to
    `up.rollouts` of them; empty for all."""


class UpConfig(Section):
    """What `dart up` starts."""

    envs: int = Field(default=1, ge=0, le=256)
    """`dart env` processes."""

    rollouts: int = Field(default=1, ge=0, le=256)
    """`dart rollout` processes."""

    restart: Count = 3
    """Times a process that died is started again before the run is ended."""


class Config(Section):
    """A run, whole."""

    run: RunConfig = RunConfig()
    bus: BusConfig = BusConfig()
    model: ModelConfig = ModelConfig()
    policy: PolicyConfig = PolicyConfig()
    env: EnvConfig = EnvConfig()
    rollout: RolloutConfig = RolloutConfig()
    vllm: VllmConfig = VllmConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    weights: WeightsConfig = WeightsConfig()
    sync: SyncConfig = SyncConfig()
    timing: TimingConfig = TimingConfig()
    eval: EvalConfig = EvalConfig()
    gpus: GpusConfig = GpusConfig()
    up: UpConfig = UpConfig()


def section_types() -> dict[str, type[Section]]:
    """The sections of a configuration by name, in their order of presentation.

    An optional section within another, `model.lora`, comes after it.
    """
    found: dict[str, type[Section]] = {}
    for name, field in Config.model_fields.items():
        found[name] = type(field.default)
        for key, inner in found[name].model_fields.items():
            if (kind := inner_section(inner.annotation)) is not None:
                found[f"{name}.{key}"] = kind
    return found


def inner_section(annotation: Any) -> type[Section] | None:
    """The section of a field that may hold one, or be unset; None for every other field."""
    for kind in get_args(annotation):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None
