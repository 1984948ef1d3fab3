"""The simulated replica against a simulation of the same model that lives through every unit."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random

import pytest

from benchmarks.simulation.gpu import Costs, Replica, SimulatedRequest, capacity, mean_tokens
from benchmarks.simulation.times import Times

COSTS = Costs(prefill_s=0.5, prefill_cached_s=0.125, decode_s=0.01, decode_each_s=0.0025)


@dataclass
class Slow:
    """A request of the slow simulation."""

    name: int
    trajectory: str
    tokens: int
    arrived: float
    started: float = math.inf
    ended: float = math.inf
    versions: list[int] = field(default_factory=list)  # of each token


def live(
    requests: list[Slow], swaps: list[tuple[float, int, float]], costs: Costs, max_batch: int
) -> None:
    """Fill in when each request starts and ends: one unit of work after another, nothing clever."""
    now, version = 0.0, 0
    coming, swaps = sorted(requests, key=lambda each: each.arrived), sorted(swaps)
    decoding: list[Slow] = []
    seen: set[str] = set()
    while coming or decoding:
        if swaps and swaps[0][0] <= now:
            _, version, pause_s = swaps.pop(0)
            now += pause_s
            seen.clear()
        elif coming and coming[0].arrived <= now and len(decoding) < max_batch:
            request = coming.pop(0)
            request.started = now
            cached = request.trajectory in seen
            now += costs.prefill_cached_s if cached else costs.prefill_s
            seen.add(request.trajectory)
            decoding.append(request)
        elif decoding:
            now += costs.decode_s + costs.decode_each_s * (len(decoding) - 1)
            for request in decoding:
                request.versions.append(version)
            for request in [each for each in decoding if len(each.versions) == each.tokens]:
                request.ended_at = now
                decoding.remove(request)
        else:
            now = min([coming[0].arrived, *(at for at, _, _ in swaps)])


def versions_of(job: SimulatedRequest) -> list[int]:
    starts = [start for start, _ in job.versions[1:]] + [job.iterations]
    found: list[int] = []
    for (_, version), end in zip(job.versions, starts, strict=True):
        found += [version] * (end - len(found))
    return found


@pytest.mark.parametrize("seed", range(12))
def test_it_agrees_with_a_simulation_of_every_iteration(seed: int) -> None:
    rng = Random(seed)
    max_batch, rate = rng.choice([1, 2, 5, 16]), rng.choice([0.5, 2.0, 8.0])
    at, slow = 0.0, []
    for name in range(150):
        at += rng.expovariate(rate)
        trajectory = f"t{rng.randrange(8)}"  # few: all of them stay in the prefix cache
        slow.append(Slow(name, trajectory, rng.randint(1, 120), at))
    swaps = [(rng.uniform(i * at / 5, (i + 0.8) * at / 5), i + 1, 0.3) for i in range(5)]
    live(slow, list(swaps), COSTS, max_batch)

    replica = Replica(COSTS, max_batch, version=0)
    jobs: dict[int, SimulatedRequest] = {}
    events = sorted(
        [(each.arrived, 1, each) for each in slow] + [(at, 0, swap) for at, *swap in swaps],
        key=lambda event: event[:2],
    )
    ended: list[SimulatedRequest] = []
    for at, _, event in events:
        looks = sorted(rng.uniform(replica.now, at) for _ in range(rng.choice([0, 0, 3])))
        for look in looks:  # looking changes nothing
            ended += replica.advance(look)
        if isinstance(event, Slow):
            jobs[event.name] = replica.submit(at, event.trajectory, event.tokens)
        else:
            replica.swap(at, *event)
    while math.isfinite(replica.next_event):
        ended += replica.advance(replica.next_event)

    assert len(ended) == len(slow) == len(set(ended))
    assert [job.ended_at for job in ended] == sorted(job.ended_at or 0.0 for job in ended)
    for each in slow:
        job = jobs[each.name]
        assert job.started == pytest.approx(each.started, abs=1e-6)
        assert job.ended_at == pytest.approx(each.ended_at, abs=1e-6)
        assert versions_of(job) == each.versions
    assert len({version for each in slow for version in each.versions}) >= 3
    assert replica.prefills == len(slow)
    assert 0 < replica.prefills_cached < len(slow)
    assert replica.tokens == sum(each.tokens for each in slow)


def test_every_second_is_in_one_phase_and_the_places_are_counted() -> None:
    replica = Replica(COSTS, 2, version=-1)
    replica.swap(1.0, 0, 0.5)
    replica.advance(2.0)  # starting: 1.0 before, and 0.5 of pause
    for trajectory in ("a", "b", "c"):
        replica.submit(3.0, trajectory, 100)
    replica.advance(3.75)
    assert (replica.running, replica.waiting) == (2, 1)
    swap = replica.swap(3.8, 1, 0.25)  # in the midst of the second prefill, which ends at 4
    replica.advance(20.0)
    assert (swap.halted, swap.ended_at) == (4.0, 4.25)
    gauges = replica.gauges()
    assert gauges["seconds.starting"] == pytest.approx(1.5)
    assert gauges["seconds.syncing"] == pytest.approx(0.25)
    assert sum(gauges[f"seconds.{name}"] for name in ("starting", "idle", "busy", "syncing")) == 20
    decoding_two_s, alone_s = 100 * 0.0125, 100 * 0.01
    assert gauges["seconds.busy"] == pytest.approx(1.0 + decoding_two_s + 0.5 + alone_s)
    # One place while the first prefills, then two; then one again, prefilling and decoding.
    places = 0.5 * 1 + 0.5 * 2 + decoding_two_s * 2 + (0.5 + alone_s) * 1
    assert gauges["load_s"] == pytest.approx(places / 2)
    assert gauges["tokens"] == 300


@pytest.mark.parametrize("seed", range(8))
def test_interrupted_and_submitted_again_no_token_is_lost_or_drawn_twice(seed: int) -> None:
    rng = Random(seed)
    replica = Replica(COSTS, 3, version=0)
    left = {f"t{i}": rng.randint(1, 60) for i in range(8)}
    total, now, done = sum(left.values()), 0.0, 0
    names: dict[SimulatedRequest, str] = {}
    for trajectory, tokens in left.items():
        names[replica.submit(now, trajectory, tokens)] = trajectory
    while names:
        now += rng.uniform(0.2, 3.0)
        ended = replica.advance(now)
        suspended = replica.interrupt(now)
        assert len(ended) + len(suspended) == len(names)
        assert replica.running == replica.waiting == 0
        for job in ended:
            assert job.iterations == left.pop(names[job]) == len(versions_of(job))
            done += job.iterations
        for job in suspended:
            left[names[job]] -= job.iterations
            done += job.iterations
            assert left[names[job]] >= 1
        names = {replica.submit(now, name, tokens): name for name, tokens in left.items()}
    assert done == total == replica.tokens


def test_a_request_that_is_given_up_frees_its_place_after_the_unit() -> None:
    replica = Replica(COSTS, 1, version=0)
    first, second, third = (replica.submit(0.0, name, 1000) for name in "abc")
    replica.advance(1.0)
    replica.cancel(1.001, second)
    replica.cancel(1.001, first)
    replica.advance(2.0)
    assert third.started == pytest.approx(1.01)
    assert second.started is None
    replica.cancel(2.0, third)
    assert replica.advance(60.0) == []
    assert replica.running == 0
    assert math.isinf(replica.next_event)


def test_work_that_costs_nothing_takes_no_time_to_speak_of() -> None:
    replica = Replica(Costs(0.0, 0.0, 0.0, 0.0), 4, version=0)
    jobs = [replica.submit(1.0, f"t{i}", 50) for i in range(20)]
    assert len(replica.advance(1.001)) == len(jobs)


TIMING = Times(
    prefill_s=0.4,
    prefill_cached_s=0.1,
    decode_s=0.01,
    decode_each_s=0.001,
    completion_tokens=60,
    completion_sigma=0.6,
    speedup=5.0,
)


def lengths(rng: Random, max_tokens: int, count: int) -> list[int]:
    median, spread = math.log(TIMING.completion_tokens), TIMING.completion_sigma
    return [
        max(1, min(max_tokens, round(math.exp(rng.gauss(median, spread))))) for _ in range(count)
    ]


def test_the_mean_length_is_that_of_the_capped_distribution() -> None:
    rng = Random(0)
    for cap in (40, 100, 100_000):
        drawn = lengths(rng, cap, 40_000)
        assert mean_tokens(TIMING, cap) == pytest.approx(sum(drawn) / len(drawn), rel=0.01)
    certain = TIMING.model_copy(update={"completion_sigma": 0.0})
    assert mean_tokens(certain, 50) == 50
    assert mean_tokens(certain, 100) == 60


@pytest.mark.parametrize("max_batch", [1, 4, 32])
@pytest.mark.parametrize("cached_share", [0.0, 0.75])
def test_the_limits_are_reached_and_never_passed(max_batch: int, cached_share: float) -> None:
    """As many requests as there are places, each asked for anew when it ends: none ever waits."""
    rng, count = Random(1), 3000
    limit = capacity(TIMING, max_batch, 100, cached_share)
    replica = Replica(Costs.of(TIMING), max_batch, version=0)
    tokens = iter(lengths(rng, 100, count))

    def ask(at: float) -> None:
        number = next(tokens, None)
        if number is not None:
            known = rng.random() < cached_share and "known"
            replica.submit(at, known or f"new-{rng.random()}", number)

    replica.submit(0.0, "known", 1)
    for _ in range(2 * max_batch):
        ask(0.0)
    ended = 0
    while math.isfinite(replica.next_event):
        for job in replica.advance(replica.next_event):
            ended += 1
            ask(job.ended_at or 0.0)
    assert ended == count + 1
    assert ended / replica.now == pytest.approx(limit.requests_per_s, rel=0.03)


def test_a_request_alone_takes_as_long_as_the_limit_says() -> None:
    limit = capacity(TIMING, 8, 100_000, cached_share=0.0)
    replica, now, spent, count = Replica(Costs.of(TIMING), 8, version=0), 0.0, 0.0, 4000
    for number in lengths(Random(2), 100_000, count):
        now += 1000.0
        job = replica.submit(now, f"t{now}", number)
        replica.advance(now + 999.0)
        spent += job.engine_s
    assert spent / count == pytest.approx(limit.alone_s, rel=0.03)
