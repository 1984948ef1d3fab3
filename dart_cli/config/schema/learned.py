"""What is learned from, and how: [data], [train], [tune]."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from dart_cli.config.schema.base import (
    MANY,
    Count,
    Device,
    Folder,
    Positive,
    PositiveSeconds,
    Section,
    Threads,
    one_of,
    without_control,
)

BY_TRACKER = ("task_tracker", "step_tracker")
"""Values of data.advantage that compare a trajectory with earlier ones; the others need groups."""


class DataConfig(Section):
    """What is played next and what is trained on."""

    group_size: int = Field(default=8, ge=1, le=1024)
    """Trajectories of one task and seed that are compared; 1 for none, with an `advantage` by trackers."""

    groups_per_batch: Positive = 8
    """Groups in one batch: those with a gradient (mixed rewards), or with `group_size` = 1 all."""

    scheduling: Literal["rollout", "batch", "april", "oversample"] = "rollout"
    """What a freed slot waits for: nothing (`rollout`). The others are what most RL code does: trainer and
    rollouts take turns, and one batch is played at a time (`batch`), or more than it needs, of which the
    unfinished is suspended and goes on after the update (`april`) or is discarded (`oversample`)."""

    over_provision: float = Field(default=2.0, ge=1, le=8)
    """`april`, `oversample`: groups in play for each group of a batch."""

    max_open_groups: Count = 0
    """Most groups leased or waiting to be trained at once; 0 for as many as max_staleness admits."""

    max_staleness: Count = 4
    """A group whose oldest token is more versions behind than this is dropped, its reason recorded."""

    task_sampling: Literal["uniform", "frontier", "deviation"] = "frontier"
    """`frontier` prefers tasks near 50 % success (moving average), or with `reward = "value"` those
    whose rewards vary most; `deviation` less sharply, by the standard deviation; `uniform` takes all alike."""

    advantage: Literal[
        "group_std", "group_mean", "leave_one_out", "task_tracker", "step_tracker"
    ] = "group_std"
    """Rewards less their group's mean, with `group_std` over its standard deviation too;
    `leave_one_out` takes the mean of the other members (RLOO). Trackers take what earlier trajectories
    of the task (and step) lead one to expect, with `group_size` = 1."""

    tracker_margin: float = Field(default=0.0, ge=0, le=1)
    """Trackers: taken off the expected reward, so that passes weigh more than failures (AsymRE)."""

    reward: Literal["outcome", "value"] = "outcome"
    """What advantages are computed from: the `outcome`, 1 for a pass and 0 for a failure; or the
    verdict's reward, a `value` between 0 and 1."""

    early_stop: bool = False
    """Play half of each group first and stop if all pass with one reward: saves trajectories without a
    gradient. Only the first half counts for the success shown, so that it is the policy's."""

    dynamic_number: bool = False
    """Smaller groups for tasks whose success, or with `reward = "value"` mean reward, is above 0.6."""

    dynamic_length: bool = False
    """A task's step limit is its longest success so far and two more, once it has a success."""

    high_entropy: float = Field(default=1.0, gt=0, le=1)
    """Share of a group's steps that is trained on, those of highest mean token entropy; 1 for all."""

    pool_ratio: float = Field(default=0.0, ge=0, le=0.5)
    """An all-fail group gets one success from the experience pool, if it is then at most this share
    of the group, e.g. 0.125; 0 uses no pool."""

    pool: list[Folder] = []
    """Folders of exported or collected trajectories whose successes join the pool at the start; the run's
    own join it, too."""

    max_gb: float = Field(default=50.0, gt=0, le=MANY)
    """Size of the database, GB, beyond which the oldest screenshots that no part needs are removed."""

    @property
    def takes_turns(self) -> bool:
        """Whether rollouts stop while the trainer trains and all workers take its weights."""
        return self.scheduling != "rollout"


LEAST_RATE = 1e-6
"""Learning rate of a large model, and of one of unknown size."""

KEEP_CHECKPOINTS = 2
"""Newest checkpoints that are kept: one to go on from, and one where that is damaged."""


class TrainConfig(Section):
    """The optimizer and the objective (arXiv 2509.23866 section 3)."""

    learner: Annotated[str, one_of(("torch",), "my_package.my_module:MyLearner")] = "torch"
    """What updates. Your own as `my_package.my_module:MyLearner`: called with the configuration, it returns a
    `Learner` (dart_cli/train/base.py), in one process."""

    updates: int = Field(default=200, ge=0, le=1000 * MANY)
    """The run ends after this many optimizer updates."""

    max_minutes: float = Field(default=0.0, ge=0, le=MANY)
    """The run ends after this many minutes of training; 0 for no limit."""

    max_trajectories: int = Field(default=0, ge=0, le=1000 * MANY)
    """The run ends after this many trajectories were played, trained on or not; 0 for no limit."""

    stop_at: float = Field(default=0.0, ge=0, le=0.99)
    """The run ends once its tasks' mean success is at least this, by the lower bound of its 95 %
    confidence interval over the newest 1500 trajectories, as many of each task; 0 for never."""

    attention_minutes: float = Field(default=0.0, ge=0, le=MANY)
    """The run ends, with exit code 3, once it has needed attention for so many minutes in a row: a stall, which
    `dart status` names, or a role without a process. For rented hosts, where waiting costs; 0 for never."""

    lr: float | None = Field(default=None, ge=0, le=1)
    """AdamW learning rate after warm-up; 0 trains nothing (a control). Unset it follows the size of the
    model: 4e-4 for one of 0.6 million parameters, as those that ship with dart, 1e-6 from 7 billion on,
    between them a power of the size."""

    lr_end: float = Field(default=1.0, ge=0, le=1)
    """Fraction of `lr` to which the rate falls, in a straight line, by the end of the run: the first of
    `updates`, `max_minutes` and `max_trajectories`."""

    warmup: int = Field(default=0, ge=0, le=1000 * MANY)
    """Updates over which the learning rate rises from 0."""

    weight_decay: float = Field(default=0.0, ge=0, le=1)
    """AdamW's decoupled weight decay."""

    grad_clip: float = Field(default=1.0, gt=0)
    """Largest gradient norm."""

    reuse: int = Field(default=0, ge=0, le=16)
    """How often each batch is trained on again, an update each, some updates apart; 0 for never."""

    clip_low: float = Field(default=0.2, ge=0, le=1)
    """PPO's clip: ratios below 1 - clip_low are held there; at 1 none is. An update is one step on its
    batch, so ratios differ from 1 with `correction = "ratio"` alone."""

    clip_high: float = Field(default=0.28, ge=0)
    """Ratios above 1 + clip_high are clipped (clip-higher)."""

    correction: Literal["truncated", "none", "ratio"] = "truncated"
    """Of staleness: `truncated` weighs a token by min(proximal / behaviour, 1); `none` does not;
    `ratio` clips the ratio to the behaviour policy instead, as PPO and GRPO do."""

    normalise: Literal["tokens", "samples", "trajectories"] = "tokens"
    """The loss is a mean over all `tokens` of a batch; or over its `samples` (steps) or `trajectories`,
    of their tokens' mean."""

    critic: Literal["off", "gae"] = "off"
    """`gae`: a head on the policy's hidden state learns what to expect before each step, in the place of
    `data.advantage`'s trackers, and advantages are by generalised advantage estimation."""

    gae_lambda: float = Field(default=0.9, ge=0, le=1)
    """1 compares the episode's reward with what was expected before a step, 0 what is expected after the
    step; between them a mix of all that follows."""

    kl_beta: float = Field(default=0.0, ge=0)
    """Weight of the k3 KL to the model the run began with, of each token at most 10 nats; 0 keeps no
    reference model."""

    ranks: int = Field(default=1, ge=1, le=1024)
    """Processes that share one model (FSDP2), one per GPU; `dart train` starts them, or `torchrun`
    does."""

    pack_tokens: int = Field(default=16_384, ge=256, le=MANY)
    """Most tokens in one forward and backward of a rank; a longer sequence goes alone."""

    recompute: Literal["none", "layer"] = "none"
    """`layer` keeps only each layer's input for the backward pass and computes the rest again: about a
    third more work, a thirtieth of the memory."""

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

    parity_every: Count = 10
    """Policy versions after which engine and trainer are compared again on the same weights, the
    first at the start; 0 never stops a run."""

    wandb: str = ""
    """Project of Weights & Biases that gets the metrics, too (install its package); empty for none."""

    @property
    def rate(self) -> float:
        """`lr`; that of a large model where no file was read, which fills it in."""
        return LEAST_RATE if self.lr is None else self.lr


class TuneConfig(Section):
    """Supervised training of a model folder, `dart tune`: docs/tune.md."""

    data: list[Annotated[str, AfterValidator(without_control)]] = []
    """What is learned from, all of one kind: run directories and Parquet files of `dart data export`, whose
    successes are learned; folders with episodes that others played (`episodes.jsonl`); grounding sets in any layout
    that `dart eval grounding` reads; or one folder of `dart model verifier-rows`."""

    out: Folder | None = None
    """The model folder to make. Beside it `OUT.part` holds what a second start goes on from."""

    write: Literal["model", "adapters"] = "model"
    """With `model.lora`: the whole `model` with the adapters in its weights, which loads everywhere, or
    the `adapters` alone, as peft's folder."""

    trajectories: Literal["own", "pool", "both"] = "own"
    """Of a run: its `own` successes, the members of its experience `pool`, or `both`."""

    per_task: Count = 0
    """Most trajectories of one task, the newest; 0 for all."""

    codec: str = ""
    """How a grounding item is asked and answered, as `dart eval grounding --codec`; empty for
    `policy.codec` where the file sets it, else for what the model folder shows."""

    held_out: float = Field(default=0.125, ge=0, le=0.5)
    """Share of the episodes or screenshots that is not learned: what was learned is measured on it, before and
    after. Of fewer than 24 none are held out, of large sets at most 256 rows; 0 for none."""

    epochs: float | None = Field(default=None, gt=0, le=MANY)
    """Passes over the data, over both stages together; unset: as many as make 400 updates, 2 to 40."""

    max_minutes: float = Field(default=0.0, ge=0, le=MANY)
    """The training ends after this many minutes where its epochs take longer, all starts together; the learning rate
    falls by the end of either. 0 for no limit. The held-out rows are measured before and after it."""

    batch: int | None = Field(default=None, ge=1, le=65_536)
    """Examples of an update: items, or steps of trajectories; unset: 8 to 32, by how many there are."""

    micro_batch: int = Field(default=0, ge=0, le=65_536)
    """Grounding items of one forward pass; 0 for all of an update."""

    lr: float | None = Field(default=None, ge=0, le=1)
    """Peak learning rate: it rises over 3 % of a stage and falls along half a cosine. Unset: by the model's size,
    1e-3 for the tiny model, 5e-6 for 7 billion parameters, ten times that for adapters."""

    head_share: float = Field(default=0.5, ge=0, le=1)
    """Pointer: share of the budget that trains the head and its tokens alone, first; 1 for nothing else."""

    target: Literal["box", "v2p"] = "box"
    """Pointer: `box`, all cells that the box overlaps, alike; `v2p`, a bell over the box, and the probability
    outside of it is a loss, too."""
