"""The processes that train one model together, as the learner sees them.

    RankGroup       the interface by which a rank exchanges short messages with the others
    SingleRank      a RankGroup of one process
    PassResults     the results of a pass over packs: statistics, compared tokens and mismatches
    gather_results  joins the results of all ranks, on every rank

Whatever an update decides (to skip, to stop) is decided from numbers that went through `gather_results`.
These are the same on every rank, bit for bit. So all ranks decide alike, and none waits for a rank that
decided otherwise.
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
from dart_cli.train.logprob_check import ComparedTokens, concatenate


class RankGroup(Protocol):
    """The ranks of one run. Every rank makes the same calls in the same order."""

    @property
    def rank(self) -> int:
        """The number of this process, 0 to `size` - 1. Only rank 0 sends messages on the bus."""
        ...

    @property
    def size(self) -> int:
        """The number of processes."""
        ...

    def gather(self, part: bytes) -> list[bytes]:
        """Return the parts of all ranks, in order of rank; every rank gets them.

        Raises DartError if a rank is lost or does not answer in time.
        """
        ...

    def doing(self, what: str) -> None:
        """Record what this rank begins, for ranks that wait for it and for the error if it is lost."""
        ...


class SingleRank:
    """The group of one process."""

    rank = 0
    size = 1

    def gather(self, part: bytes) -> list[bytes]:
        """Return the part of this rank."""
        return [part]

    def doing(self, what: str) -> None:
        """Do nothing: no other rank waits."""


@dataclass(frozen=True)
class PassResults:
    """The results of a pass over packs."""

    stats: TokenStats
    tokens: ComparedTokens  # scored with the present weights
    earlier_tokens: ComparedTokens  # scored with a copy of earlier weights (logprob_check.py)
    mismatches: list[StepMismatch]
    routing: tuple[int, int] = (0, 0)
    """Choices of experts that the routers would have made otherwise, and all that were replayed."""
    grey_changes: tuple[float, ...] = ()
    """For each rank that tried it, how much grey screens change log-probabilities, nats (blindness.py)."""


def gather_results(rank_group: RankGroup, mine: PassResults) -> PassResults:
    """Return the results of all ranks, joined in order of rank; sums are in float64.

    Raises as `RankGroup.gather` does.
    """
    message = Scored(
        stats=float64s(float(getattr(mine.stats, part.name)) for part in fields(TokenStats)),
        tokens=_as_message(mine.tokens),
        looked_back=_as_message(mine.earlier_tokens),
        mismatches=mine.mismatches,
        routing=float64s(map(float, mine.routing)),
        sight=float64s(mine.grey_changes),
    )
    messages = [parted(part, BATCH_LIMITS) for part in rank_group.gather(joined(message))]
    ranks = [message for message in messages if isinstance(message, Scored)]
    return PassResults(
        stats=reduce(TokenStats.__add__, (_stats(rank.stats) for rank in ranks)),
        tokens=concatenate([_of_message(rank.tokens) for rank in ranks]),
        earlier_tokens=concatenate([_of_message(rank.looked_back) for rank in ranks]),
        mismatches=[mismatch for rank in ranks for mismatch in rank.mismatches],
        routing=(
            sum(int(rank.routing[0]) for rank in ranks),
            sum(int(rank.routing[1]) for rank in ranks),
        ),
        grey_changes=tuple(nats for rank in ranks for nats in rank.sight),
    )


def _stats(values: Sequence[float]) -> TokenStats:
    return TokenStats(*(torch.tensor(value, dtype=torch.float64) for value in values))


def _as_message(tokens: ComparedTokens) -> ScoredTokens:
    return ScoredTokens(
        engine=float64s(tokens.engine.tolist()),
        trainer=float64s(tokens.trainer.tolist()),
        versions=int32s(tokens.versions.tolist()),
        screens=int32s(tokens.screens.tolist()),
        places=int32s(tokens.places.tolist()),
        indices=int32s(tokens.indices.tolist()),
        steps=list(tokens.steps),
    )


def _of_message(tokens: ScoredTokens) -> ComparedTokens:
    return ComparedTokens.of(
        engine=tokens.engine,
        trainer=tokens.trainer,
        versions=tokens.versions,
        screens=tokens.screens,
        places=tokens.places,
        indices=tokens.indices,
        steps=tokens.steps,
    )
