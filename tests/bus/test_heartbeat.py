"""Promises of heartbeats: they are always sent, and death is decided by our own clock."""

from __future__ import annotations

import asyncio
import logging

import pytest

from bus.heartbeat import HeartbeatSender, Liveness, Load
from bus.messages import Heartbeat, Message, Role
from tests.waiting import PATIENCE_S


class Listener:
    """Keeps what is published."""

    def __init__(self) -> None:
        self.heard: list[Heartbeat] = []
        self.news = asyncio.Event()

    def publish(self, message: Message) -> None:
        assert isinstance(message, Heartbeat)
        self.heard.append(message)
        self.news.set()


def heartbeat(worker: str, *, role: Role = "env", pid: int = 1, sent_at: float = 0.0) -> Heartbeat:
    return Heartbeat(
        role=role,
        worker=worker,
        host="host",
        pid=pid,
        started_at=0.0,
        sent_at=sent_at,
        endpoint="",
        policy_version=-1,
        state="ready",
        waiting_for="",
        waiting_s=0.0,
        gauges={},
        trajectories=[],
    )


async def test_heartbeats_are_sent_by_themselves_with_the_present_load() -> None:
    listener = Listener()
    versions = iter(range(1000))
    async with HeartbeatSender(
        listener,
        "rollout",
        "rollout-0",
        lambda: Load("ready", policy_version=next(versions), gauges={"in_flight": 2.0}),
        endpoint="ipc:///x",
        every_s=0.01,
    ):
        async with asyncio.timeout(PATIENCE_S):
            while len(listener.heard) < 3:
                listener.news.clear()
                await listener.news.wait()
    assert [hb.policy_version for hb in listener.heard[:3]] == [0, 1, 2]
    assert listener.heard[0].endpoint == "ipc:///x"
    assert listener.heard[0].gauges == {"in_flight": 2.0}


async def test_the_longest_wait_is_reported_with_its_deadline() -> None:
    sender = HeartbeatSender(Listener(), "train", "train", lambda: Load("waiting"))
    with sender.waiting("a batch from data", 30):
        with sender.waiting("a disk"):
            assert sender.beat().waiting_for == "a batch from data (at most 30 s)"
        with sender.waiting("a lease, again", since=0.0):
            assert sender.beat().waiting_for == "a lease, again"
        assert sender.beat().waiting_s > 0
    assert sender.beat().waiting_for == ""


async def test_a_broken_gauge_does_not_stop_heartbeats(caplog: pytest.LogCaptureFixture) -> None:
    listener = Listener()
    calls = iter(range(1000))

    def load() -> Load:
        if next(calls) == 0:
            raise ZeroDivisionError("gauge")
        return Load("ready")

    with caplog.at_level(logging.ERROR):
        async with HeartbeatSender(listener, "env", "env-0", load, every_s=0.01):
            async with asyncio.timeout(PATIENCE_S):
                await listener.news.wait()
    assert "heartbeat not sent" in caplog.text


async def test_a_gauge_out_of_bounds_is_left_out() -> None:
    gauges = {"slots": 2.0, "tokens": float("nan"), "load_s": float("inf"), "waiting": -1e16}
    sender = HeartbeatSender(Listener(), "env", "env-0", lambda: Load("ready", gauges=gauges))
    assert sender.beat().gauges == {"slots": 2.0}


def test_a_worker_is_dead_when_silent_by_our_clock_not_by_its_own() -> None:
    now = 0.0
    liveness = Liveness(dead_after_s=5, clock=lambda: now)
    liveness.observe(heartbeat("env-0", sent_at=1e12))
    liveness.observe(heartbeat("env-1", sent_at=-1e12))
    now = 5.0
    liveness.observe(heartbeat("env-1", sent_at=-1e12))
    now = 6.0
    assert [hb.worker for hb in liveness.alive()] == ["env-1"]
    assert [hb.worker for hb in liveness.dead()] == ["env-0"]
    assert liveness.silent_s("env-1") == 1.0
    assert liveness.silent_s("nobody") == float("inf")


def test_silence_while_this_process_did_not_listen_is_not_counted() -> None:
    now = [100.0]
    liveness = Liveness(10.0, clock=lambda: now[0])
    liveness.observe(heartbeat("env-0"))
    now[0] += 60.0
    liveness.discount_pause(58.0)
    assert [each.worker for each in liveness.alive()] == ["env-0"]
    now[0] += 9.0
    assert [each.worker for each in liveness.dead()] == ["env-0"]


def test_new_returned_and_restarted_workers_are_reported() -> None:
    now = 0.0
    liveness = Liveness(dead_after_s=5, clock=lambda: now)
    assert liveness.observe(heartbeat("env-0"))
    assert not liveness.observe(heartbeat("env-0"))
    assert liveness.observe(heartbeat("env-0", pid=2))
    now = 10.0
    assert liveness.observe(heartbeat("env-0", pid=2))


def test_workers_are_found_by_role_and_forgotten_after_a_time() -> None:
    now = 0.0
    liveness = Liveness(dead_after_s=5, forget_after_s=100, clock=lambda: now)
    liveness.observe(heartbeat("b", role="rollout"))
    liveness.observe(heartbeat("a", role="rollout"))
    liveness.observe(heartbeat("env-0"))
    assert [hb.worker for hb in liveness.alive("rollout")] == ["a", "b"]
    liveness.forget("a")
    assert liveness.get("a") is None
    now = 101.0
    liveness.observe(heartbeat("env-0"))
    assert liveness.get("b") is None
