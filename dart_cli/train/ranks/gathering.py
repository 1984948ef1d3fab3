"""What the packs of a pass gave, of all ranks: from this an update is decided, on each rank alike.

Found      statistics, compared tokens and mismatches
gathered   this rank's -> all ranks'
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import reduce

import torch

from bus.codec import BATCH_LIMITS, joined, parted
from bus.messages import StepMismatch
from bus.packed import float64s, int32s
from bus.ranks import Scored, ScoredTokens
from dart_cli.algo.loss import TokenStats
from dart_cli.train.parity import ComparedTokens, all_of
from dart_cli.train.ranks.group import RankGroup


@dataclass(frozen=True)
class Found:
    """Of some packs."""

    stats: TokenStats
    tokens: ComparedTokens = field(default_factory=lambda: all_of([]))  # the first pass's
    looked_back: ComparedTokens = field(default_factory=lambda: all_of([]))
    mismatches: list[StepMismatch] = field(default_factory=list)


def gathered(rank_group: RankGroup, mine: Found) -> Found:
    """What all ranks found, in order of rank; sums in float64. Raises as `RankGroup.gathered` does."""
    message = Scored(
        stats=float64s(float(getattr(mine.stats, part.name)) for part in fields(TokenStats)),
        tokens=_sent(mine.tokens),
        looked_back=_sent(mine.looked_back),
        mismatches=mine.mismatches,
    )
    found = [parted(piece, BATCH_LIMITS) for piece in rank_group.gathered(joined(message))]
    ranks = [each for each in found if isinstance(each, Scored)]
    return Found(
        stats=reduce(TokenStats.__add__, (_stats(each.stats) for each in ranks)),
        tokens=all_of([_received(each.tokens) for each in ranks]),
        looked_back=all_of([_received(each.looked_back) for each in ranks]),
        mismatches=[gap for each in ranks for gap in each.mismatches],
    )


def _stats(values: Sequence[float]) -> TokenStats:
    return TokenStats(*(torch.tensor(value, dtype=torch.float64) for value in values))


def _sent(tokens: ComparedTokens) -> ScoredTokens:
    return ScoredTokens(
        engine=float64s(tokens.engine.tolist()),
        trainer=float64s(tokens.trainer.tolist()),
        versions=int32s(tokens.versions.tolist()),
        seen=int32s(tokens.seen.tolist()),
    )


def _received(tokens: ScoredTokens) -> ComparedTokens:
    return ComparedTokens.of(tokens.engine, tokens.trainer, tokens.versions, tokens.seen)
