"""Which of several rollout workers a request goes to: pure, so that it can be simulated.

The worker with the fewest requests of this process in flight wins, then the one with the fewest
trajectories assigned, then chance. Requests of other processes are left out on purpose: they are known
from heartbeats up to a second old, and by these all processes of a run would choose the same worker
until the next heartbeat (Mitzenmacher,
"How useful is old information?", 2000). tests/env/test_load_balancing.py simulates both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

AFFINITY = 2
"""Requests that a trajectory's former worker may have in flight beyond the least loaded one.

A hit in the prefix cache saves most of a prefill; two more requests in a batch cost little."""


@dataclass(frozen=True)
class Candidate:
    """A rollout worker that could be asked."""

    name: str
    in_flight: int  # requests of this process
    assigned: int  # trajectories of this process whose newest completion it gave
    policy_version: int


def fresh(candidates: Sequence[Candidate], max_staleness: int) -> list[Candidate]:
    """Those at most `max_staleness` versions behind the newest: completions of others would be too old."""
    newest = max((each.policy_version for each in candidates), default=0)
    return [each for each in candidates if newest - each.policy_version <= max_staleness]


def choose(candidates: Sequence[Candidate], former: str, rng: Random) -> str:
    """The name of the worker to ask, of at least one; `former` served this trajectory before.

    The number of assigned trajectories estimates the coming load, so that a worker that has just
    joined gets the next new trajectories.
    """
    least = min(candidates, key=lambda each: (each.in_flight, each.assigned, rng.random()))
    for each in candidates:
        if each.name == former and each.in_flight <= least.in_flight + AFFINITY:
            return former
    return least.name
