"""Who may take new weights, and what each worker serves."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dart_cli.data.versions import Permits, Versions
from tests.data.parts import Clock, heartbeat, sync_done


def asked(concurrent: int = 1, clock: Clock | None = None, **versions: int) -> Permits:
    """Permits that these workers have asked for, in this order."""
    permits = Permits(concurrent, 60.0, clock or Clock())
    for worker, version in versions.items():
        permits.ask(worker, version)
    return permits


def test_the_furthest_behind_comes_first_and_of_equals_the_first_asked() -> None:
    permits = asked(a=4, b=2, c=2)
    order = []
    while granted := permits.grant(5):
        order += granted
        permits.free(granted[0])
    assert order == ["b", "c", "a"]


@pytest.mark.parametrize(("concurrent", "at_once"), [(1, 1), (2, 2), (0, 4)])
def test_no_more_workers_than_allowed_take_weights_at_once(concurrent: int, at_once: int) -> None:
    permits = asked(concurrent, a=0, b=0, c=0, d=0)
    assert len(permits.grant(1)) == at_once
    assert permits.grant(1) == []


def test_a_worker_that_serves_nothing_needs_no_permit_and_takes_none_from_others() -> None:
    permits = asked(a=0, b=-1, c=-1)
    assert set(permits.grant(1)) == {"a", "b", "c"}
    assert permits.holders == ["a"]


def test_a_worker_at_the_newest_weights_gets_none() -> None:
    permits = asked(a=3)
    assert permits.grant(3) == []
    assert permits.grant(4) == ["a"]


def test_a_permit_is_free_again_when_its_worker_is_done_asks_again_or_is_gone() -> None:
    permits = asked(a=0, b=0)
    assert permits.grant(1) == ["a"]
    permits.ask("a", 1)  # it has taken them: nothing newer is there
    assert permits.grant(1) == ["b"]
    assert permits.free("b") is not None
    assert permits.free("b") is None
    assert permits.holders == []


def test_a_permit_counts_how_long_it_was_out() -> None:
    clock = Clock()
    permits = asked(clock=clock, a=0)
    permits.grant(1)
    clock.now += 7
    assert permits.free("a") == 7


def test_a_permit_that_is_out_too_long_goes_to_the_next() -> None:
    clock = Clock()
    permits = asked(clock=clock, a=0, b=0)
    permits.grant(1)
    clock.now += 59
    assert permits.expire() == []
    clock.now += 2
    assert permits.expire() == ["a"]
    assert permits.grant(1) == ["b"]


def test_a_worker_that_waits_no_longer_is_passed_over() -> None:
    permits = asked(a=0, b=0)
    permits.withdraw("a")
    assert permits.grant(1) == ["b"]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 8))
def test_every_worker_gets_the_newest_weights_while_others_are_published(
    seed: int, concurrent: int, workers: int
) -> None:
    draws = random.Random(seed)
    permits, serves = Permits(concurrent, 60.0, Clock()), {f"w{i}": 0 for i in range(workers)}
    taking: dict[str, int] = {}
    waiting: set[str] = set()
    newest = 0
    for _ in range(200):
        event = draws.random()
        worker = draws.choice(list(serves))
        if event < 0.1:
            newest += 1
        elif event < 0.5 and worker not in taking and serves[worker] < newest:
            permits.ask(worker, serves[worker])
            waiting.add(worker)
        elif worker in taking:
            serves[worker] = taking.pop(worker)
            permits.free(worker)
        granted = permits.grant(newest)
        waiting -= set(granted)
        assert len(permits.holders) <= concurrent
        assert all(serves[got] <= serves[waits] for got in granted for waits in waiting)
        assert len(permits.holders) == concurrent or not waiting  # no permit lies about
        taking |= dict.fromkeys(granted, newest)
    for _ in range(2 * workers):
        for worker, version in serves.items():
            if worker not in taking and version < newest:
                permits.ask(worker, version)
        taking |= dict.fromkeys(permits.grant(newest), newest)
        for worker, version in taking.items():
            serves[worker] = version
            permits.free(worker)
        taking.clear()
    assert set(serves.values()) == {newest}


# --- versions -------------------------------------------------------------------------------


def heard(versions: Versions, worker: str, version: int, *, state: str = "ready") -> bool:
    """A heartbeat of a worker that was heard before."""
    return versions.observe(heartbeat(worker, version, state=state), is_new=False)


def since(newest: int) -> Callable[[int], int]:
    return lambda version: newest - version


def test_the_lag_is_that_of_the_oldest_worker_the_router_still_asks() -> None:
    versions = Versions()
    assert versions.lag(since(9), 4) == 0
    for worker, version in (("a", 9), ("b", 7), ("c", 2), ("d", -1)):
        heard(versions, worker, version)
    assert versions.lag(since(9), 4) == 2
    assert versions.lag(since(9), 7) == 7
    assert versions.lag(since(9), 0) == 0


def test_where_all_workers_are_too_far_behind_the_lag_is_that_of_the_least() -> None:
    versions = Versions()
    heard(versions, "a", 7)
    heard(versions, "b", 3)
    assert versions.lag(since(9), 1) == 2
    assert versions.lag(since(8), 1) == 1
    heard(versions, "a", 9)
    assert versions.lag(since(9), 1) == 0


def test_those_are_awaited_that_serve_older_weights() -> None:
    versions = Versions()
    assert versions.awaited(1) is None
    heard(versions, "loading", -1)
    assert versions.awaited(1) is None
    heard(versions, "b", 0)
    heard(versions, "a", 0)
    heard(versions, "c", 1)
    assert versions.awaited(1) == ["a", "b"]
    versions.note_sync(sync_done("a", 1))
    versions.forget("b")
    assert versions.awaited(1) == []


def test_a_heartbeat_from_before_the_sync_takes_nothing_back() -> None:
    versions = Versions()
    heard(versions, "a", 0)
    versions.note_sync(sync_done("a", 1))
    assert not heard(versions, "a", 0)
    assert versions.awaited(1) == []


def test_a_new_process_of_the_same_name_is_taken_at_its_word() -> None:
    versions = Versions()
    heard(versions, "a", 5)
    assert versions.observe(heartbeat("a", 3), is_new=True)
    assert versions.awaited(5) == ["a"]
    assert versions.observe(heartbeat("a", -1), is_new=True)
    assert versions.awaited(5) is None


def test_a_worker_that_refused_a_set_is_not_awaited_until_the_next() -> None:
    versions = Versions()
    heard(versions, "a", 0)
    versions.note_sync(sync_done("a", 1, "half of it is missing"))
    assert versions.awaited(1) == []
    assert versions.awaited(2) == ["a"]


def test_a_worker_that_announced_its_stop_is_not_awaited() -> None:
    versions = Versions()
    heard(versions, "a", 0)
    heard(versions, "b", 0)
    assert heard(versions, "a", 0, state="stopping")
    assert versions.awaited(1) == ["b"]
