"""Promises of the choice of a worker, alone and in a simulation of many env processes."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import pytest

from dart_cli.env.router import AFFINITY, Candidate, choose, fresh

Choose = Callable[[Sequence[Candidate], Sequence[int], str, Random], str]
"""(candidates, requests of all processes at the last heartbeats, former, rng) -> name."""


def by_choice(
    candidates: Sequence[Candidate], reported: Sequence[int], former: str, rng: Random
) -> str:
    return choose(candidates, former, rng)


def by_heartbeats(
    candidates: Sequence[Candidate], reported: Sequence[int], former: str, rng: Random
) -> str:
    """Ties go to the worker that reported the least load, as in every other process."""
    order = sorted(
        zip(candidates, reported, strict=True), key=lambda each: (each[0].in_flight, each[1])
    )
    return order[0][0].name


def workers(*loads: tuple[int, int]) -> list[Candidate]:
    return [
        Candidate(str(index), in_flight, assigned, policy_version=0)
        for index, (in_flight, assigned) in enumerate(loads)
    ]


def test_the_least_in_flight_wins_then_the_fewest_at_home() -> None:
    rng = Random(0)
    assert choose(workers((2, 0), (1, 9), (3, 0)), "", rng) == "1"
    assert choose(workers((1, 3), (1, 2), (1, 4)), "", rng) == "1"
    assert {choose(workers((1, 3), (1, 3)), "", rng) for _ in range(64)} == {"0", "1"}


def test_the_former_worker_is_met_again_while_its_load_allows() -> None:
    rng = Random(0)
    assert choose(workers((AFFINITY, 5), (0, 0)), "0", rng) == "0"
    assert choose(workers((AFFINITY + 1, 5), (0, 0)), "0", rng) == "1"
    assert choose(workers((5, 5), (5, 0)), "gone", rng) == "1"


def test_a_worker_too_far_behind_the_newest_is_left_out() -> None:
    versions = [Candidate(str(version), 0, 0, version) for version in (-1, 3, 5, 6)]
    assert [each.name for each in fresh(versions, 3)] == ["3", "5", "6"]
    assert [each.name for each in fresh(versions, 0)] == ["6"]
    assert fresh([], 0) == []


# --- simulation -----------------------------------------------------------------------------


@dataclass
class Process:
    """One env process: what it has in flight and at home, by worker."""

    in_flight: list[int]
    assigned: list[int]
    former: list[int | None] = field(default_factory=list)  # by slot
    left: list[int] = field(default_factory=list)  # steps of the slot's episode

    def candidates(self, count: int) -> list[Candidate]:
        pairs = zip(self.in_flight[:count], self.assigned[:count], strict=True)
        return workers(*pairs)


@dataclass
class Load:
    """Requests in flight over time, each worker's share of requests, and how many came home."""

    excess: float  # of the most loaded worker over the mean, as a fraction of the mean
    shares: list[float]  # of the requests of the second half, 1 is fair
    affine: float


def simulate(pick: Choose, *, processes: int, slots: int, count: int, joins_s: float = 0.0) -> Load:
    """Slots that think about 4 s and ask about 1.1 s, heartbeats each second; times are simulated.

    The last worker joins at `joins_s`; the shares are counted in the 60 s from then on.
    """
    rng = Random(1)
    total, reported = [0] * count, [0] * count
    every = [Process([0] * count, [0] * count) for _ in range(processes)]
    events: list[tuple[float, int, str, int, int, int]] = []

    def later(at: float, what: str, process: int = 0, slot: int = 0, worker: int = 0) -> None:
        heapq.heappush(events, (at, rng.getrandbits(40), what, process, slot, worker))

    for index, process in enumerate(every):
        process.former, process.left = [None] * slots, [0] * slots
        for slot in range(slots):
            later(rng.uniform(0, 20), "ask", index, slot)
    later(0.0, "beat")
    begins_s, ends_s = max(joins_s, 30.0), max(joins_s, 30.0) + 60.0
    excess = mean = now = 0.0
    requests, total_requests, returning, affine = [0] * count, 0, 0, 0
    while True:
        at, _, what, index, slot, worker = heapq.heappop(events)
        if at > ends_s:
            break
        present = count if at >= joins_s else count - 1
        if at > begins_s:
            mean += (at - now) * sum(total) / present
            excess += (at - now) * (max(total) - sum(total) / present)
        now, process = at, every[index]
        if what == "beat":
            reported = list(total)
            later(at + 1.0, "beat")
        elif what == "ask":
            former = process.former[slot]
            if process.left[slot] == 0:
                process.left[slot] = min(30, max(1, round(rng.lognormvariate(2.3, 0.7))))
                if former is not None:
                    process.assigned[former] -= 1
                former = None
            process.left[slot] -= 1
            name = "" if former is None else str(former)
            worker = int(pick(process.candidates(present), reported[:present], name, rng))
            if former is not None:
                returning, affine = returning + 1, affine + (former == worker)
                process.assigned[former] -= 1
            process.assigned[worker] += 1
            process.former[slot] = worker
            process.in_flight[worker] += 1
            total[worker] += 1
            if at > begins_s:
                requests[worker], total_requests = requests[worker] + 1, total_requests + 1
            later(at + rng.lognormvariate(0.1, 0.4), "done", index, slot, worker)
        else:
            process.in_flight[worker] -= 1
            total[worker] -= 1
            reset_s = 20.0 if process.left[slot] == 0 else 0.0
            later(at + reset_s + rng.lognormvariate(1.39, 0.5), "ask", index, slot)
    return Load(
        excess / mean, [count * each / total_requests for each in requests], affine / returning
    )


@pytest.mark.parametrize(
    ("processes", "slots", "count"), [(2, 32, 4), (8, 8, 4), (8, 32, 8), (16, 4, 8)]
)
def test_load_stays_balanced_over_many_processes(processes: int, slots: int, count: int) -> None:
    load = simulate(by_choice, processes=processes, slots=slots, count=count)
    by_chance = simulate(
        lambda candidates, reported, former, rng: rng.choice(candidates).name,
        processes=processes,
        slots=slots,
        count=count,
    )
    assert all(0.5 < share < 1.5 for share in load.shares)
    assert load.excess < 1.1 * by_chance.excess, "though most come home"
    assert load.affine > 0.85


def test_ties_by_heartbeats_would_make_a_herd_of_many_processes() -> None:
    def without_affinity(
        candidates: Sequence[Candidate], reported: Sequence[int], former: str, rng: Random
    ) -> str:
        return choose(candidates, "", rng)

    size = {"processes": 16, "slots": 4, "count": 8}
    herd, ours = simulate(by_heartbeats, **size), simulate(without_affinity, **size)
    assert herd.excess > 1.5 * ours.excess


def test_a_worker_that_joins_soon_has_most_of_its_share() -> None:
    load = simulate(by_choice, processes=4, slots=16, count=4, joins_s=120.0)
    assert load.shares[-1] > 0.6
