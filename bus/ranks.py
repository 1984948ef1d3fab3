"""The messages between the ranks of one trainer, over torch.distributed: shares of an update.

    rank 0 -> every rank     Share
    rank   -> all ranks      StepStates, Scored

Axes: `[M]` nodes of a forward pass, `[E]` ends of chains, `[S]` samples, `[N]` tokens, `[d]` the model's
width; the others are as in bus/messages.py.
"""

from __future__ import annotations

from bus.messages import Batch, Count, Integer, Message, StepMismatch
from bus.packed import Float64s, Int32s


class PackNodes(Message):
    """Part of PackedBatch: one forward pass over trees of tokens (dart_cli/train/packs/plan.py)."""

    nodes: Int32s  # [M * 4]: parent (-1 for a root), chain, begin and end of the node's tokens
    ends: Int32s  # [E * 2]: index of a chain that is scored here, and the node in which it ends


class PackedBatch(Message):
    """Part of Share: the samples that one rank scores, in packs."""

    batch: Batch  # the samples with their chains and images
    packs: list[PackNodes]  # every rank has equally many


class Share(Message):
    """rank 0 -> every rank: its part of an update."""

    work: PackedBatch
    hinted: PackedBatch
    """Steps of `work` with hints in their prompts, which a teacher scores before; empty without hints."""
    looked_back: PackedBatch
    """Samples that are scored first, by the earlier weights that sampled them; usually empty."""
    looked_back_version: Integer | None  # of those weights; None if there are no such samples
    token_weights: Float64s  # [S], weight of each token of a sample of `work`, before the division
    divisor: float  # of the whole batch's loss
    rate: float  # learning rate
    policy_version: Integer | None  # published version of these weights; None if they have none
    samples: Count  # of the whole batch
    tokens: Count  # of all completions of the batch
    looks: bool
    """True if each rank also scores a pack with grey screens (dart_cli/train/blindness.py)."""


class StepStates(Message):
    """rank -> all ranks, with a critic: the steps [S] of the rank's packs, with the state before each."""

    groups: list[str]
    trajectories: list[str]
    steps: Int32s
    numbers: Float64s
    """[S * 4]: reward, reward that the running baseline expected, advantage by that, 1 for the policy's
    episodes."""
    states: Float64s  # [S * d]


class ScoredTokens(Message):
    """Part of Scored: tokens [N] that an engine sampled."""

    engine: Float64s  # [N], the engine's log-probabilities, nats
    trainer: Float64s  # [N], the trainer's log-probabilities, nats
    versions: Int32s  # [N], version that sampled the token; -1 if there is no single one
    screens: Int32s  # [N], number of screens in the prompt: 0, 1, or 2 for more
    places: Int32s  # [N], index of its completion in `steps`
    indices: Int32s  # [N], index of the token in its completion
    steps: list[str]  # names of the completions


class Scored(Message):
    """rank -> all ranks: the results of a pass over the rank's packs; after the first pass `stats` alone."""

    stats: Float64s  # sums over its tokens, in the order of dart_cli.algo.loss.TokenStats
    tokens: ScoredTokens
    looked_back: ScoredTokens
    mismatches: list[StepMismatch]
    routing: Float64s  # [2]: choices of experts that routers would have made otherwise; all that were replayed
    sight: Float64s
    """Largest change of a log-probability by grey screens, nats; empty without `looks`."""
