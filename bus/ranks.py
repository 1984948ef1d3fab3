"""What the ranks of one trainer tell each other, over torch.distributed: shares of an update.

    rank 0 -> every rank     Share
    rank   -> all ranks      StepStates, Scored

Axes: `[M]` nodes of a forward pass, `[E]` ends of chains, `[S]` samples, `[N]` tokens, `[d]` the model's width; else as in
bus/messages.py.
"""

from __future__ import annotations

from bus.messages import Batch, Count, Integer, Message, StepMismatch
from bus.packed import Float64s, Int32s


class PackNodes(Message):
    """Part of PackedBatch: one forward pass over trees of tokens (dart_cli/train/packs/plan.py)."""

    nodes: Int32s  # [M * 4], of each its parent (-1 for a root), the chain, begin and end of its tokens
    ends: Int32s  # [E * 2], of each chain that is scored here its index, the node in which it ends


class PackedBatch(Message):
    """Part of Share: what one rank scores."""

    batch: Batch  # the samples that it scores, their chains and images
    packs: list[PackNodes]  # as many as every other rank has


class Share(Message):
    """rank 0 -> every rank: its part of an update."""

    work: PackedBatch
    looked_back: PackedBatch  # scored first, by other weights, that sampled it; usually empty
    looked_back_version: Integer | None  # of those weights; None where it is empty
    token_weights: Float64s  # [S], of a token of each sample of `work`, before the division
    divisor: float  # of the whole batch's loss
    rate: float  # the learning rate
    policy_version: Integer | None  # that the weights served are; None if of none
    samples: Count  # of the whole batch
    tokens: Count  # of all their completions
    looks: bool  # whether each rank scores a pack again with grey screens (train/sight.py)


class StepStates(Message):
    """rank -> all ranks, with a critic: the steps [S] of its packs, and the policy's state before each."""

    groups: list[str]
    trajectories: list[str]
    steps: Int32s
    numbers: Float64s
    """[S * 4]: reward, what its baseline expected, the advantage by that, 1 for the policy's own episodes."""
    states: Float64s  # [S * d]


class ScoredTokens(Message):
    """Part of Scored: tokens [N] that an engine sampled."""

    engine: Float64s  # [N], its log-probabilities, nats
    trainer: Float64s  # [N], the trainer's
    versions: Int32s  # [N], whose weights sampled it; -1 where no single one did
    seen: Int32s  # [N], how many screens the prompt showed: 0, 1, or 2 for more
    places: Int32s  # [N], index of its completion in `steps`
    indices: Int32s  # [N], of the token in its completion
    steps: list[str]  # completions, in words


class Scored(Message):
    """rank -> all ranks: what its packs gave in a pass. But for `stats` it is empty after the first."""

    stats: Float64s  # sums over its tokens, as dart_cli.algo.loss.TokenStats names them
    tokens: ScoredTokens
    looked_back: ScoredTokens
    mismatches: list[StepMismatch]
    sight: Float64s  # the largest change of a log-probability by grey screens, nats; empty without a look
