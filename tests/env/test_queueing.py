"""A wait for what environments share has a name and a bound of its own, and ends with the slot that waits.

The gate is OSWorld's, with its real locks. Time passes where a test moves the clock of the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bus.errors import EnvError
from dart_cli.config.schema import EnvConfig
from dart_cli.env import carriers
from dart_cli.env.async_env import AsyncEnv, make_async_env
from dart_cli.env.carriers import QUEUE_GRACE_S
from dart_cli.env.episode import slot_timer
from envs.contract.queueing import (
    GivenUpError,
    PendingCall,
    SharedLock,
    SharedWait,
    answering,
    leave_if_given_up,
    queueing,
)
from envs.suites.osworld.provider import (
    BootGate,
    _first_locked,
    _lock_place,
    boots_at_once,
    usable_cores,
)
from tests.env.gated_suite import SUITE, TASK
from tests.env.parts import RecordedWaits, threaded
from tests.env.unruly_suite import Unruly, UnrulySuite
from tests.waiting import until, wait_until

DEADLINE_S = 600.0
"""Of a reset, by the clock that tests move: no machine is so slow that it passes by itself."""

isolated = pytest.mark.parametrize("isolation", ["thread", "process"])


class Place:
    """The folder of a gated suite."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.gate = BootGate(1, folder / "turns")
        self.say("arrive")

    def say(self, name: str) -> None:
        (self.folder / name).touch()

    @property
    def boots(self) -> int:
        log = self.folder / "boots"
        return len(log.read_text().splitlines()) if log.exists() else 0

    def waiting(self) -> list[int]:
        """Places of the queue that are held, in their order."""
        return waiting_at(self.folder / "turns")


def waiting_at(folder: Path) -> list[int]:
    places, path = [], folder / "queue.lock"
    if not path.exists():
        return []
    queue = os.open(path, os.O_RDWR)
    spans = [(0, time.monotonic_ns() + 1)]
    while spans:
        start, end = spans.pop()
        if start < end and (found := _first_locked(queue, start, end)) is not None:
            places.append(found)
            spans += [(start, found), (found + 1, end)]
    os.close(queue)
    return sorted(places)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def gated(
    place: Place, isolation: str, waits: RecordedWaits | None = None, timer: object = None
) -> AsyncEnv:
    config = EnvConfig(
        suite=SUITE,
        options={"folder": str(place.folder)},
        isolation=isolation,  # type: ignore[arg-type]
        reset_deadline_s=DEADLINE_S,
    )
    return make_async_env(config, "env-0/0", waits, timer)  # type: ignore[arg-type]


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the clock of the event loop, by which deadlines are kept."""
    passed = [0.0]

    def more(seconds: float) -> None:
        loop = asyncio.get_running_loop()
        if not passed[0]:
            real = loop.time
            monkeypatch.setattr(loop, "time", lambda: real() + passed[0])
        passed[0] += seconds

    return more


@isolated
async def test_the_deadline_of_a_reset_stands_still_while_others_boot(
    place: Place, isolation: str, pass_time: Callable[[float], None]
) -> None:
    waits, timer = RecordedWaits(), slot_timer()
    timer.enter("resetting")
    env = gated(place, isolation, waits, timer)
    place.say("go")
    with place.gate.turn(0.0):
        reset = asyncio.create_task(env.reset(TASK, 0))
        await until(lambda: timer.phase == "queueing")
        pass_time(2 * DEADLINE_S)
        await asyncio.sleep(0.05)  # a deadline that had passed would be noticed
        assert not reset.done()
        assert place.boots == 0
    await reset
    assert (place.boots, timer.phase) == (1, "resetting")
    assert env.queued_s > 0
    call = ("env-0/0 to reset gated/one", DEADLINE_S, "environment")
    queued = ("a turn to boot a guest, 1 boot at once (at most 1800 s in which none moves on)",)
    assert [(wait.what, wait.deadline_s, wait.on) for wait in waits.all] == [
        *(call, (*queued, None, "queue"), call)
    ]
    await env.close()


async def test_after_the_queue_the_rest_of_the_deadline_counts(
    place: Place, pass_time: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    timer, told = slot_timer(), list[SharedWait | None]()
    env = gated(place, "thread", None, timer)
    note_queue = carriers._Clock.note_queue

    def record(clock: carriers._Clock, shared_wait: SharedWait | None) -> None:
        note_queue(clock, shared_wait)
        told.append(shared_wait)

    monkeypatch.setattr(carriers._Clock, "note_queue", record)
    with place.gate.turn(0.0):
        reset = asyncio.create_task(env.reset(TASK, 0))
        await until(lambda: timer.phase == "queueing")
        pass_time(2 * DEADLINE_S)
        begun = itertools.count()

        def another_begins() -> bool:
            at = next(begun)
            os.utime(place.folder / "turns" / "boot-0.lock", (at, at))
            return len(told) >= 2

        await until(another_begins)
    await until(lambda: place.boots == 1 and timer.phase != "queueing")
    pass_time(DEADLINE_S - 100.0)
    await asyncio.sleep(0.05)
    assert not reset.done()
    pass_time(100.0)
    with pytest.raises(EnvError, match=r"env-0/0: no answer to reset in 600 s"):
        await reset
    await until(lambda: env.hung == 0)  # the boot ends, too, as its slot has left
    with place.gate.turn(0.0):
        await env.close()


async def test_a_queue_that_never_ends_has_a_bound_in_its_slot_as_well(
    place: Place, pass_time: Callable[[float], None]
) -> None:
    timer = slot_timer()
    env = gated(place, "thread", None, timer)
    with place.gate.turn(0.0):
        reset = asyncio.create_task(env.reset(TASK, 0))
        await until(lambda: timer.phase == "queueing")
        pass_time(1800.0 + QUEUE_GRACE_S)
        with pytest.raises(EnvError, match="it waits for a turn to boot a guest, 1 boot at once"):
            await reset
        await until(lambda: not place.waiting())
    await until(lambda: env.hung == 0)
    assert (place.boots, timer.phase) == (0, "idle")
    await env.close()


@isolated
async def test_a_cancelled_reset_leaves_the_queue_and_boots_nothing(
    place: Place, isolation: str, caplog: pytest.LogCaptureFixture
) -> None:
    timer = slot_timer()
    env = gated(place, isolation, None, timer)
    place.say("go")
    with place.gate.turn(0.0):
        reset = asyncio.create_task(env.reset(TASK, 0))
        await until(lambda: timer.phase == "queueing")
        assert len(place.waiting()) == 1
        reset.cancel()
        await asyncio.wait([reset])
        assert timer.phase == "idle"
        await until(lambda: not place.waiting())  # although the turn is still another's
        await env.close()
        assert env.hung == 0
    with place.gate.turn(0.0):
        assert place.boots == 0
    assert "did not close" not in caplog.text


async def test_a_thread_that_was_abandoned_before_the_gate_does_not_go_through_it(
    place: Place, pass_time: Callable[[float], None]
) -> None:
    (place.folder / "arrive").unlink()
    place.say("go")
    env = gated(place, "thread")
    reset = asyncio.create_task(env.reset(TASK, 0))
    await until((place.folder / "began").exists)
    pass_time(DEADLINE_S)
    with pytest.raises(EnvError, match="no answer to reset in 600 s"):
        await reset
    assert env.hung == 1
    place.say("arrive")
    await until(lambda: env.hung == 0)
    assert place.boots == 0
    await env.reset(TASK, 0)
    assert place.boots == 1
    await env.close()


async def test_a_call_that_was_cancelled_before_it_began_is_not_made() -> None:
    began, go_on, resets = threading.Event(), threading.Event(), list[int]()

    class Slow(Unruly):
        def reset(self, *, seed: int | None = None, **given: Any) -> Any:
            resets.append(seed or 0)
            began.set()
            go_on.wait()
            return super().reset(seed=seed, **given)

    env = threaded(Slow, deadline_s=DEADLINE_S)
    task = UnrulySuite.tasks["unruly/well"]
    calls = [asyncio.create_task(env.reset(task, seed)) for seed in (1, 2)]
    await until(began.is_set)
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    go_on.set()
    await env.reset(task, 3)
    assert resets == [1, 3]
    await env.close()


WAITER = """
import sys
from pathlib import Path
from envs.suites.osworld.provider import BootGate
with BootGate(1, Path(sys.argv[1])).turn(1800.0):
    with (Path(sys.argv[1]) / "order").open("a") as log:
        log.write(sys.argv[2])
"""


def test_threads_and_processes_get_their_turns_in_the_order_in_which_they_came(
    tmp_path: Path,
) -> None:
    gate, order = BootGate(1, tmp_path), tmp_path / "order"

    def wait(name: str) -> None:
        with gate.turn(1800.0), order.open("a") as log:
            log.write(name)

    waiters: list[threading.Thread | subprocess.Popen[bytes]] = []
    with gate.turn(0.0):
        for number, name in enumerate("abcdef"):
            if name in "be":
                command = [sys.executable, "-c", WAITER, str(tmp_path), name]
                waiters.append(subprocess.Popen(command))
            else:
                waiters.append(threading.Thread(target=wait, args=(name,)))
                waiters[-1].start()
            wait_until(lambda known=number: len(waiting_at(tmp_path)) == known + 1)  # type: ignore[misc]
    for waiter in waiters:
        waiter.join() if isinstance(waiter, threading.Thread) else waiter.wait()
    assert order.read_text() == "abcdef"


def test_as_many_as_boot_at_once_may_take_a_turn_before_those_who_came_later(
    tmp_path: Path,
) -> None:
    gate = BootGate(2, tmp_path)
    with contextlib.ExitStack() as stack:
        queues = []
        for _ in range(300):
            queue = os.open(tmp_path / "queue.lock", os.O_RDWR | os.O_CREAT)
            stack.callback(os.close, queue)
            queues.append((queue, _lock_place(queue)))
        have_to_wait = [gate._is_far(queue, at) for queue, at in queues]
    assert have_to_wait == [False, False, *[True] * 298]


class Pauses(threading.Event):
    """An event that is never waited for: each wait is counted, and calls `then`."""

    def __init__(self, then: Callable[[int], None] = lambda _: None) -> None:
        super().__init__()
        self.count = 0
        self.then = then

    def wait(self, timeout: float | None = None) -> bool:
        self.count += 1
        self.then(self.count)
        return self.is_set()


def test_a_turn_is_waited_for_as_long_as_others_begin_to_boot(tmp_path: Path) -> None:
    gate, others = BootGate(1, tmp_path), contextlib.ExitStack()

    def another(count: int) -> None:
        """One boot ends and the next begins, at every third look of the first sixty."""
        if count % 3 == 0 and count <= 60:
            others.close()
            held = gate._take()
            assert held is not None
            others.callback(os.close, held)

    told: list[SharedWait | None] = []
    pauses = Pauses(another)
    with others, answering(PendingCall(told.append, pauses)):
        another(0)
        said = (
            rf"none of the 1 that boot on this host has ended .* in 1 s \(processes {os.getpid()}\)"
        )
        with pytest.raises(EnvError, match=said), gate.turn(1.0):
            pass
    assert 60 < pauses.count <= 60 + 11
    assert (len(told), told[-1]) == (22, None)  # begun, moved on twenty times, over
    assert waiting_at(tmp_path) == []


def test_a_place_is_left_where_the_slot_has_left() -> None:
    call = PendingCall(given_up=threading.Event())
    with answering(call):
        leave_if_given_up()
        with queueing("a turn", 60.0) as queue:
            assert queue.pause(0.0)
            call.given_up.set()
            with pytest.raises(GivenUpError):
                queue.pause(60.0)
        with pytest.raises(GivenUpError), queueing("a turn", 60.0):
            pass
    leave_if_given_up()  # of no call


@contextlib.contextmanager
def held_elsewhere(lock: SharedLock) -> Iterator[threading.Event]:
    """Another thread holds the lock until the event is set."""
    let_go, has = threading.Event(), threading.Event()

    def hold() -> None:
        with lock.hold(60.0, "never"):
            has.set()
            let_go.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    has.wait()
    try:
        yield let_go
    finally:
        let_go.set()
        holder.join()


def test_a_shared_lock_is_waited_for_in_a_queue_that_is_left_with_the_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("envs.contract.queueing.UNSAID_S", 0.0)
    monkeypatch.setattr("envs.contract.queueing.POLL_S", 0.001)
    lock, told = SharedLock("a frame"), list[SharedWait | None]()
    call = PendingCall(told.append)
    with held_elsewhere(lock) as let_go:
        with (
            answering(call),
            pytest.raises(EnvError, match="no frame"),
            lock.hold(0.005, "no frame"),
        ):
            pass
        assert told == [SharedWait("a frame", 0.005), None]
        given_up = PendingCall(lambda _: given_up.given_up.set())
        with answering(given_up), pytest.raises(GivenUpError), lock.hold(60.0, "no frame"):
            pass
        let_go.set()
    with answering(call), lock.hold(60.0, "no frame"):
        assert len(told) == 2  # a free lock is no queue
    with answering(given_up), pytest.raises(GivenUpError), lock.hold(60.0, "no frame"):
        pass


def test_a_shared_lock_is_had_in_the_order_in_which_calls_came() -> None:
    """One that takes it again at once comes after those that wait: else these might wait for ever."""
    lock, had = SharedLock("a frame"), list[int]()

    def take(number: int) -> None:
        with lock.hold(60.0, "never"):
            had.append(number)

    def take_again() -> None:
        with lock.hold(60.0, "never"):
            let_go.wait()
        take(0)

    let_go = threading.Event()
    threads = [threading.Thread(target=take_again)]
    threads += [threading.Thread(target=take, args=(number,)) for number in range(1, 5)]
    for number, thread in enumerate(threads, 1):
        thread.start()
        wait_until(lambda number=number: len(lock._turns) == number)
    let_go.set()
    for thread in threads:
        thread.join()
    assert had == [1, 2, 3, 4, 0]


def test_a_shared_lock_is_waited_for_as_long_as_others_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lock, told = SharedLock("a frame"), list[SharedWait | None]()
    looks = 0

    class Contended(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            nonlocal looks
            looks += 1
            lock._turns_taken += looks <= 60  # so often others get it first
            return False

    monkeypatch.setattr("envs.contract.queueing.Event", Contended)
    call = PendingCall(told.append)
    with answering(call), pytest.raises(EnvError, match="no frame"), lock.hold(1.0, "no frame"):
        pass
    assert 60 < looks <= 60 + 11
    assert told[-1] is None
    assert len(told) > 60


@pytest.mark.parametrize(
    ("cores", "cpus", "boots"),
    [(100, 4, 12), (208, 4, 26), (64, 4, 8), (64, 8, 4), (16, 4, 2), (2, 4, 1), (1, 1, 1)],
)
def test_boots_have_half_of_the_cores(cores: int, cpus: int, boots: int) -> None:
    assert boots_at_once(cores, cpus) == boots


def test_a_containers_limit_bounds_the_cores(tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    all_of_them = len(os.sched_getaffinity(0))
    for text, cores in (
        ("100000 100000", 1),
        ("50000 100000", 1),
        ("max 100000", all_of_them),
        ("99900000 100000", all_of_them),
    ):
        quota.write_text(f"{text}\n", encoding="ascii")
        assert usable_cores(quota) == cores, text
    assert usable_cores(tmp_path / "absent") == all_of_them
