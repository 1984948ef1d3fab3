"""Heartbeats: which processes live and what they wait for.

HeartbeatSender   publishes a Heartbeat each second, with the load that a function returns
WaitReporter      the protocol by which other code reports its waits in the heartbeats
Liveness          the newest heartbeat of each worker, and which workers have fallen silent
start             returns the command that starts a program, for an error text
awaited           returns the text about roles without a process: who is absent, and how to start it
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol, Self

from bus.messages import MAX_GAUGE, Heartbeat, Message, Role, Waiting

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
DEAD_AFTER_S = 10.0
"""A process is dead after ten missed heartbeats; a machine that compiles or swaps may miss a few."""
REROUTE_AFTER_S = 5.0
"""A rollout worker that is silent for so long gets no more requests; they go to another one."""
FORGET_AFTER_S = 3600.0
"""A worker that is silent for so long is forgotten."""
MAX_WAITS = 8
"""Most waits in one heartbeat: the longest ones."""


def start(*programs: str) -> str:
    """Return the fix for absent programs, e.g. ``start `dart data CONFIG` ``."""
    return f"start {_listed([f'`{program} CONFIG`' for program in programs])}"


def awaited(*roles: Role, at: str = "") -> str:
    """Return the text about roles without a process, e.g. ``dart data: start `dart data CONFIG` ``.

    `at` is the address at which the process is expected.
    """
    programs = [f"dart {role}" for role in roles]
    return f"{_listed(programs)}{at and f' at {at}'}: {start(*programs)}"


def _listed(words: Sequence[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


class Publishes(Protocol):
    """A place where a HeartbeatSender publishes, such as a bus.pubsub.Publisher."""

    def publish(self, message: Message) -> None:
        """Send a message without waiting."""
        ...


class WaitReporter(Protocol):
    """The part of a HeartbeatSender by which other code reports its waits."""

    def waiting(
        self,
        what: str,
        deadline_s: float | None = None,
        *,
        since: float | None = None,
        on: str = "",
    ) -> AbstractContextManager[None]:
        """Report the wait in heartbeats while inside, as HeartbeatSender.waiting does."""
        ...


@dataclass(frozen=True)
class Load:
    """The part of a Heartbeat that changes; the worker reports it each second."""

    state: str
    policy_version: int = -1
    gauges: dict[str, float] = field(default_factory=dict)
    trajectories: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _OpenWait:
    what: str
    since: float  # monotonic seconds
    on: str
    deadline_s: float  # 0 if none


class HeartbeatSender:
    """An async context manager that publishes a Heartbeat every `every_s`, and when `beat` is called."""

    def __init__(
        self,
        publisher: Publishes,
        role: Role,
        worker: str,
        load: Callable[[], Load],
        *,
        endpoint: str = "",
        every_s: float = HEARTBEAT_S,
    ) -> None:
        self._publisher = publisher
        self._role: Role = role
        self._worker = worker
        self._load = load
        self._endpoint = endpoint
        self._every_s = every_s
        self.started_at = time.time()  # unix seconds
        self._host = socket.gethostname()
        self._waits: dict[int, _OpenWait] = {}
        self._wait_count = 0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @contextmanager
    def waiting(
        self,
        what: str,
        deadline_s: float | None = None,
        *,
        since: float | None = None,
        on: str = "",
    ) -> Iterator[None]:
        """Report in the heartbeats, while inside, what this process waits for, e.g. "a batch from dart data".

        `deadline_s` is only reported; the caller enforces it. `since` is when the wait began
        (time.monotonic) if it continues an earlier one. `on` is what can end it, as in Waiting;
        dart_cli.data.stalls uses it.
        """
        self._wait_count += 1
        key = self._wait_count
        self._waits[key] = _OpenWait(
            what=what if deadline_s is None else f"{what} (at most {deadline_s:g} s)",
            since=time.monotonic() if since is None else since,
            on=on,
            deadline_s=deadline_s or 0.0,
        )
        try:
            yield
        finally:
            del self._waits[key]

    def beat(self) -> Heartbeat:
        """Publish one heartbeat now, e.g. at a change of state, and return it."""
        load = self._load()
        waits = self._reported_waits()
        heartbeat = Heartbeat(
            role=self._role,
            worker=self._worker,
            host=self._host,
            pid=os.getpid(),
            started_at=self.started_at,
            sent_at=time.time(),
            endpoint=self._endpoint,
            policy_version=load.policy_version,
            state=load.state,
            waiting_for=waits[0].what if waits else "",
            waiting_s=waits[0].longest_s if waits else 0.0,
            gauges=_sendable(load.gauges),
            trajectories=load.trajectories,
            waits=waits[:MAX_WAITS],
        )
        self._publisher.publish(heartbeat)
        return heartbeat

    def _reported_waits(self) -> list[Waiting]:
        """Return the present waits, the longest first; waits for the same thing are one."""
        now = time.monotonic()
        by_cause: dict[tuple[str, str, float], list[float]] = {}
        for wait in self._waits.values():
            by_cause.setdefault((wait.what, wait.on, wait.deadline_s), []).append(now - wait.since)
        reported = [
            Waiting(
                what=what, on=on, count=len(seconds), longest_s=max(seconds), deadline_s=deadline_s
            )
            for (what, on, deadline_s), seconds in by_cause.items()
        ]
        return sorted(reported, key=lambda wait: -wait.longest_s)

    async def _run(self) -> None:
        while True:
            try:
                self.beat()
            except Exception:
                # A broken gauge must not make a living process look dead.
                log.exception("%s: heartbeat not sent", self._worker)
            await asyncio.sleep(self._every_s)


def _sendable(gauges: Mapping[str, float]) -> dict[str, float]:
    """Return the gauges without those that a heartbeat cannot have: beyond MAX_GAUGE, or nan."""
    return {name: value for name, value in gauges.items() if abs(value) <= MAX_GAUGE}


@dataclass
class _Newest:
    heartbeat: Heartbeat
    at: float  # monotonic seconds of this process, since the sender's clock may be wrong


class Liveness:
    """The newest heartbeat of each worker; a worker that is silent for `dead_after_s` is dead."""

    def __init__(
        self,
        dead_after_s: float = DEAD_AFTER_S,
        *,
        forget_after_s: float = FORGET_AFTER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.dead_after_s = dead_after_s
        self._forget_after_s = forget_after_s
        self._clock = clock
        self._newest: dict[str, _Newest] = {}

    def observe(self, heartbeat: Heartbeat) -> bool:
        """Note a heartbeat; return True if its worker was unknown or dead, or is a new process."""
        now = self._clock()
        before = self._newest.get(heartbeat.worker)
        self._newest[heartbeat.worker] = _Newest(heartbeat, now)
        self._newest = {
            worker: newest
            for worker, newest in self._newest.items()
            if now - newest.at <= self._forget_after_s
        }
        return (
            before is None
            or now - before.at > self.dead_after_s
            or (before.heartbeat.pid, before.heartbeat.started_at)
            != (heartbeat.pid, heartbeat.started_at)
        )

    def alive(self, role: Role | None = None) -> list[Heartbeat]:
        """Return the newest heartbeats of the living workers, in order of name."""
        return [hb for hb in self._of(role) if self.silent_s(hb.worker) <= self.dead_after_s]

    def dead(self, role: Role | None = None) -> list[Heartbeat]:
        """Return the last heartbeats of the workers that are dead and not forgotten yet, in order of name."""
        return [hb for hb in self._of(role) if self.silent_s(hb.worker) > self.dead_after_s]

    def get(self, worker: str) -> Heartbeat | None:
        """Return the newest heartbeat of a living or dead worker; None if there is none."""
        newest = self._newest.get(worker)
        return newest.heartbeat if newest else None

    def silent_s(self, worker: str) -> float:
        """Return the seconds since the worker's last heartbeat; infinite if there was none."""
        newest = self._newest.get(worker)
        return self._clock() - newest.at if newest else float("inf")

    def discount_pause(self, seconds: float) -> None:
        """Do not count `seconds` in which this process was stopped as silence of the workers."""
        for newest in self._newest.values():
            newest.at += seconds

    def forget(self, worker: str) -> None:
        """Forget a worker that announced its end."""
        self._newest.pop(worker, None)

    def _of(self, role: Role | None) -> list[Heartbeat]:
        heartbeats = (self._newest[worker].heartbeat for worker in sorted(self._newest))
        return [hb for hb in heartbeats if role is None or hb.role == role]
