"""The processes that train one model together, as the learner sees them.

    RankGroup    what a rank needs of the others: short messages
    SingleRank   a rank alone

Everything that an update decides (to skip, to stop, the factor of its learning rate) is decided from
numbers that went through `gathered`: these are the same on every rank, bit for bit, so all
ranks decide alike and none waits for one that took another way.
"""

from __future__ import annotations

from typing import Protocol


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
        """What each rank gave, in order of rank; on all ranks.

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
        """This rank's part alone."""
        return [part]

    def doing(self, what: str) -> None:
        """No other rank waits."""
