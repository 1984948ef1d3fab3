"""The optimizer and the objective: section [train]."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dart_cli.config.schema.base import (
    MANY,
    Count,
    Device,
    Positive,
    PositiveSeconds,
    Section,
    Threads,
    one_of,
)

LEAST_RATE = 1e-6
"""Learning rate of a large model, and of one of unknown size."""

KEEP_CHECKPOINTS = 2
"""How many of the newest checkpoints are kept: one to continue from, and one in case that is damaged."""


class TrainConfig(Section):
    """The optimizer and the objective (arXiv 2509.23866 section 3)."""

    learner: Annotated[str, one_of(("torch",), "my_package.my_module:MyLearner")] = "torch"
    """What updates the weights. Your own is `my_package.my_module:MyLearner`: it is called with the
    configuration and returns a `Learner` (dart_cli/train/base.py), which runs in one process."""

    updates: int = Field(default=200, ge=0, le=1000 * MANY)
    """The run ends after this many optimizer updates."""

    max_minutes: float = Field(default=0.0, ge=0, le=MANY)
    """The run ends after this many minutes of training. 0 sets no limit."""

    max_trajectories: int = Field(default=0, ge=0, le=1000 * MANY)
    """The run ends after this many trajectories were played, whether trained on or not. 0 sets no limit."""

    stop_at: float = Field(default=0.0, ge=0, le=0.99)
    """The run ends once the mean success of its tasks is at least this. What counts is the lower bound of the
    95 % confidence interval over the newest 1500 trajectories, equally many of each task. 0 never ends it."""

    attention_minutes: float = Field(default=0.0, ge=0, le=MANY)
    """The run ends with exit code 3 once it has needed attention for this many minutes in a row: for a stall,
    which `dart status` names, or for a role without a process. It is meant for rented hosts, where waiting
    costs money. 0 never ends it."""

    lr: float | None = Field(default=None, ge=0, le=1)
    """AdamW's learning rate after the warm-up. 0 trains nothing (a control). If unset, it follows the size of
    the model: 4e-4 for 0.6 million parameters (the models that ship with dart), 1e-6 from 7 billion
    parameters on, and between them a power of the size."""

    lr_end: float = Field(default=1.0, ge=0, le=1)
    """Fraction of `lr` to which the rate falls, in a straight line, by the end of the run. The end is the
    first of `updates`, `max_minutes` and `max_trajectories` to be reached."""

    warmup: int = Field(default=0, ge=0, le=1000 * MANY)
    """Number of updates over which the learning rate rises from 0."""

    weight_decay: float = Field(default=0.0, ge=0, le=1)
    """AdamW's decoupled weight decay."""

    grad_clip: float = Field(default=1.0, gt=0)
    """Largest norm of the gradient. A longer gradient is scaled down to it."""

    reuse: int = Field(default=0, ge=0, le=16)
    """How often each batch is trained on again, one update each time, some updates apart. 0 uses each batch
    once."""

    clip_low: float = Field(default=0.2, ge=0, le=1)
    """PPO's lower clip: ratios below 1 - clip_low are clipped there; 1 clips none. Each update takes
    the gradient of its whole batch once, so ratios differ from 1 only with `correction` = "ratio"."""

    clip_high: float = Field(default=0.28, ge=0)
    """PPO's upper clip: ratios above 1 + clip_high are clipped there (clip-higher)."""

    correction: Literal["truncated", "none", "ratio"] = "truncated"
    """Importance sampling, which corrects for the staleness of tokens. `truncated` weighs a token by
    min(proximal / behaviour, 1). `ratio` clips the ratio to the behaviour policy instead, as PPO and GRPO do.
    `none` does not correct."""

    normalise: Literal["tokens", "samples", "trajectories"] = "tokens"
    """What the loss is a mean over: all `tokens` of a batch, or its `samples` (steps) or `trajectories`, each
    of which counts with the mean over its tokens."""

    critic: Literal["off", "gae"] = "off"
    """`gae`: a head on the policy's hidden state learns the expected reward before each step, in place of the
    running baselines of `data.advantage`, and advantages follow from generalised advantage estimation. `off`
    trains no such head."""

    gae_lambda: float = Field(default=0.9, ge=0, le=1)
    """Lambda of generalised advantage estimation. 1 compares the episode's reward with the expectation before
    a step, 0 compares only the expectations before and after the step; values between 0 and 1 also weigh the
    expectations after later steps, the later the less."""

    kl_beta: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence (k3 estimator) to the model that the run began with, at most 10 nats for
    each token. 0 keeps no reference model."""

    teacher_weight: float = Field(default=0.0, ge=0, le=1)
    """Share of the objective that is a teacher's: KL(policy || teacher) of the distribution of each token that
    the policy drew, in nats (on-policy distillation, docs/teacher.md). The teacher is `teacher.model`, or with
    `teacher.hints` also the model that the run began with. The rest is the reward's. 1 learns from the teacher
    alone, 0 loads none."""

    ranks: int = Field(default=1, ge=1, le=1024)
    """Number of processes that share one model (FSDP2), one for each GPU. `dart train` starts them, or
    `torchrun` does."""

    pack_tokens: int = Field(default=16_384, ge=256, le=MANY)
    """Largest number of tokens in one forward and backward pass of a rank. A longer sequence has a pass
    alone."""

    replay_routing: bool = True
    """In the training of a mixture of experts, each token passes the experts that it passed in the rollout. The
    rollout workers record them, some hundred bytes a token (`dart doctor` says how many). Without it engine and
    trainer choose otherwise where two experts score alike, and training can collapse (Megatron-LM#4168)."""

    recompute: Literal["none", "layer"] = "none"
    """`layer` stores only each layer's input for the backward pass and computes the rest again (gradient
    checkpointing): about a third more work, and a thirtieth of the memory. `none` stores everything."""

    offload: Literal["none", "optimizer"] = "none"
    """`optimizer` keeps the weights' masters and AdamW's moments in main memory and updates them there, which
    is slower and needs fewer GPUs. `none` keeps them on the GPUs."""

    rank_deadline_s: PositiveSeconds = 600.0
    """With `ranks` above 1: seconds that a rank waits for the others. After that all ranks end, and the run
    resumes from its newest checkpoint."""

    device: Device = "auto"
    """Device of the trainer: `auto`, `cpu`, `cuda` or `cuda:N`."""

    threads: Threads = 1
    """Number of CPU threads of torch."""

    checkpoint_every: Positive = 10
    """Number of updates between two checkpoints."""

    parity_every: Count = 10
    """Number of policy versions between two log-probability checks, which compare engine and trainer on the
    same weights. The first is at the start. With 0 no check stops the run."""

    wandb: str = ""
    """Project of Weights & Biases that also gets the metrics (install its package); empty for none."""

    @property
    def rate(self) -> float:
        """The learning rate: `lr`; LEAST_RATE if it is unset and was not filled in from the model."""
        return LEAST_RATE if self.lr is None else self.lr
