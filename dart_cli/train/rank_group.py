"""The processes that train one model together, as the learner sees them.

    RankGroup    what a rank needs of the others: short messages
    SingleRank   a rank alone
    Found        what the packs of an update gave: statistics, compared tokens and mismatches
    gathered     this rank's -> all ranks'

Everything that an update decides (to skip, to stop) is decided from numbers that went through `gathered`:
these are the same on every rank, bit for bit, so all ranks decide alike and none waits for one that took
another way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import reduce
from typing import Protocol

import torch

from bus.codec import BATCH_LIMITS, joined, parted
from bus.messages import StepMismatch
from bus.packed import float64s, int32s
from bus.ranks import Scored, ScoredTokens
from dart_cli.algo.loss import TokenStats
from dart_cli.train.logprob_check import ComparedTokens, all_of


class RankGroup(Protocol):
    """The ranks of one run. Every rank makes the same calls in the same order."""

    @property
    def rank(self) -> int:
        """This process, 0 to `size` - 1. Rank 0 alone speaks on the bus."""
        ...

    @property
    def size(self) -> int:
        """How many processes there are."""
        ...

    def gathered(self, part: bytes) -> list[bytes]:
        """Return what each rank gave, in order of rank; on all ranks.

        Raises DartError where a rank is lost or does not answer in time.
        """
        ...

    def doing(self, what: str) -> None:
        """Note what this rank begins: for others that wait for it, and to be told if it is lost."""
        ...


class SingleRank:
    """The group of one process."""

    rank = 0
    size = 1

    def gathered(self, part: bytes) -> list[bytes]:
        """Return this rank's part alone."""
        return [part]

    def doing(self, what: str) -> None:
        """No other rank waits."""


@dataclass(frozen=True)
class Found:
    """Of some packs."""

    stats: TokenStats
    tokens: ComparedTokens
    looked_back: ComparedTokens  # scored by weights that were kept for them (logprob_check.py)
    mismatches: list[StepMismatch]
    sight: tuple[
        float, ...
    ] = ()  # of each rank that looked, what grey screens change, nats (blindness.py)


def gathered(rank_group: RankGroup, mine: Found) -> Found:
    """Return what all ranks found, in order of rank; sums in float64. Raises as `RankGroup.gathered` does."""
    message = Scored(
        stats=float64s(float(getattr(mine.stats, part.name)) for part in fields(TokenStats)),
        tokens=_sent(mine.tokens),
        looked_back=_sent(mine.looked_back),
        mismatches=mine.mismatches,
        sight=float64s(mine.sight),
    )
    found = [parted(piece, BATCH_LIMITS) for piece in rank_group.gathered(joined(message))]
    ranks = [each for each in found if isinstance(each, Scored)]
    return Found(
        stats=reduce(TokenStats.__add__, (_stats(each.stats) for each in ranks)),
        tokens=all_of([_received(each.tokens) for each in ranks]),
        looked_back=all_of([_received(each.looked_back) for each in ranks]),
        mismatches=[gap for each in ranks for gap in each.mismatches],
        sight=tuple(nats for each in ranks for nats in each.sight),
    )


def _stats(values: Sequence[float]) -> TokenStats:
    return TokenStats(*(torch.tensor(value, dtype=torch.float64) for value in values))


def _sent(tokens: ComparedTokens) -> ScoredTokens:
    return ScoredTokens(
        engine=float64s(tokens.engine.tolist()),
        trainer=float64s(tokens.trainer.tolist()),
        versions=int32s(tokens.versions.tolist()),
        seen=int32s(tokens.seen.tolist()),
        places=int32s(tokens.places.tolist()),
        indices=int32s(tokens.indices.tolist()),
        steps=list(tokens.steps),
    )


def _received(tokens: ScoredTokens) -> ComparedTokens:
    return ComparedTokens.of(**{name: getattr(tokens, name) for name in ScoredTokens.model_fields})
