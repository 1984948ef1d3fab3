"""Which batch each update of a lockstep run trains on: a fresh one, or an earlier one once more.

uses_of       what each update trains on
updates_for   how many updates so many fresh batches take
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from dart_cli.data.replay import Replays


@dataclass(frozen=True)
class Use:
    """What one update trains on."""

    first: (
        int  # the update, from 1, that trained on these samples first: this one, if `reused` is 0
    )
    reused: int  # how often they were trained on before


def uses_of(reuse: int, gap: int) -> Iterator[Use]:
    """What each update trains on, forever, in the order of a run that refuses no replay."""
    replays = Replays(reuse, gap)
    for update in count(1):
        due = replays.due()
        use = Use(update, 0) if due is None else Use(due.first, due.reused + 1)
        replays.filed(update, use.first if use.reused else None, use.reused)
        yield use


def updates_for(fresh: int, reuse: int, gap: int) -> int:
    """How many updates it takes to train on so many fresh batches."""
    number = 0
    for update, use in enumerate(uses_of(reuse, gap), start=1):
        number += not use.reused
        if number == fresh:
            return update
    raise AssertionError("uses_of does not end")
