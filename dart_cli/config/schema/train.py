"""The optimizer, the objective and the trainer's processes: [train]."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Strict

from dart_cli.config.schema.base import (
    MANY,
    Count,
    Device,
    Fraction,
    Positive,
    PositiveSeconds,
    Section,
    Threads,
    one_of,
)

LEAST_RATE = 1e-6
"""Learning rate of a large model, and of one of unknown size."""


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

    lr: float | None = Field(default=None, ge=0, le=1)
    """AdamW learning rate after warm-up; 0 trains nothing (a control). Unset it follows the size of the
    model: 4e-4 for one of 0.6 million parameters, as those that ship with dart, 1e-6 from 7 billion on,
    between them a power of the size."""

    lr_end: float = Field(default=1.0, ge=0, le=1)
    """Fraction of `lr` to which the rate falls, in a straight line, by the end of what `lr_follows`
    names."""

    lr_hold: float = Field(default=0.0, ge=0, lt=1)
    """Share of the way to that end over which the rate is `lr`, before it falls."""

    lr_follows: Literal["run", "success"] = "run"
    """What the fall follows: the share of the `run` that is over, the furthest of `updates`,
    `max_minutes` and `max_trajectories`; or the tasks' mean `success` p, from 1/2 to 1: 2 p - 1."""

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

    reuse: int = Field(default=0, ge=0, le=16)
    """How often each batch is trained on again, an update each, some updates apart; 0 for never."""

    reuse_gap: int = Field(default=2, ge=2, le=1000)
    """Updates from one use of a batch to its next, at least: never in consecutive ones."""

    reuse_min_ess: float = Field(default=0.9, ge=0, lt=1)
    """Effective sample size, over tokens, below which a batch that is trained on again is skipped; 0
    for never."""

    reuse_min_agreement: float = Field(default=-1.0, ge=-1, le=1)
    """Cosine of such a batch's gradient with the mean of the last updates' (AdamW's first moment),
    below which it is skipped; -1 for never."""

    reuse_until: float = Field(default=1.0, ge=0, le=1)
    """No batch is trained on again while the mean of the tasks' success is at least this; 1: always."""

    reuse_fall: float = Field(default=0.05, ge=0, le=1)
    """Nor while that mean is more than this, and more than chance, below its best; 1: always."""

    average: float = Field(default=0.0, ge=0, lt=1)
    """Decay of an exponential moving average of the trained weights, taken after each applied update;
    0 for none. 0.9 covers about 10 updates; 4 bytes a trained parameter, over all ranks."""

    average_for: Literal["evaluation", "serving"] = "evaluation"
    """What the average is used for: `dart eval --averaged`, `dart export --averaged` and the evaluation
    at the end of `dart up`; or `serving`: it is published, and plays, in place of the weights."""

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

    @property
    def rate(self) -> float:
        """`lr`; that of a large model where no file was read, which fills it in."""
        return LEAST_RATE if self.lr is None else self.lr
