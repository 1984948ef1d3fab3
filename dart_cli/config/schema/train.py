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
    `data.advantage`'s running baselines, and advantages are by generalised advantage estimation."""

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
