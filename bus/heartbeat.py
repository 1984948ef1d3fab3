"""Which processes live and what they wait for.

HeartbeatSender   publishes one Heartbeat a second from a callable that returns the load
WaitReporter      the part of it that waiting code needs, as a protocol
Liveness          the newest heartbeat of each worker, and which workers have fallen silent
awaited, start    what a process waits for where others are absent, and the cure, in one wording
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
"""Ten heartbeats missed: long enough for a machine that is busy compiling or swapping."""
REROUTE_AFTER_S = 5.0
"""A rollout worker silent for this long gets no more requests; they go to another one."""
FORGET_AFTER_S = 3600.0
MAX_WAITS = 8
"""Waits in one heartbeat, the longest ones."""


def start(*programs: str) -> str:
    """Return the cure where no process serves: ``start `dart data CONFIG` ``."""
    return f"start {_listed([f'`{program} CONFIG`' for program in programs])}"


def awaited(*roles: Role, at: str = "") -> str:
    """Return what is waited for where `roles` have no process: ``dart data: start `dart data CONFIG` ``.

    `at` is the address where it is expected.
    """
    programs = [f"dart {role}" for role in roles]
    return f"{_listed(programs)}{at and f' at {at}'}: {start(*programs)}"


def _listed(words: Sequence[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


class Publishes(Protocol):
    """Where a HeartbeatSender publishes: a bus.pubsub.Publisher."""

    def publish(self, message: Message) -> None:
        """Send without waiting."""
        ...


class WaitReporter(Protocol):
    """What a waiting part of a process needs of its HeartbeatSender."""

    def waiting(
        self,
        what: str,
        deadline_s: float | None = None,
        *,
        since: float | None = None,
        on: str = "",
    ) -> AbstractContextManager[None]:
        """While inside, heartbeats report the wait; see HeartbeatSender.waiting."""
        ...


@dataclass(frozen=True)
class Load:
    """The changing part of a Heartbeat, as the worker reports it each second."""

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
    """An async context manager: inside it a Heartbeat is sent each second and on `beat`."""

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
        self._entered = 0
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
        """Report in the heartbeats what this process waits for, e.g. "a batch from data".

        `deadline_s` is only shown; the caller enforces it. `since` is when the wait began
        (time.monotonic) if this continues an earlier one. `on` names what could end it, as
        dart_cli.data.stalls reads it.
        """
        self._entered += 1
        key = self._entered
        shown = what if deadline_s is None else f"{what} (at most {deadline_s:g} s)"
        self._waits[key] = _OpenWait(
            shown, time.monotonic() if since is None else since, on, deadline_s or 0.0
        )
        try:
            yield
        finally:
            del self._waits[key]

    def beat(self) -> Heartbeat:
        """Publish one heartbeat now, e.g. at a change of state; returns it."""
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
            gauges=_sound(load.gauges),
            trajectories=load.trajectories,
            waits=waits[:MAX_WAITS],
        )
        self._publisher.publish(heartbeat)
        return heartbeat

    def _reported_waits(self) -> list[Waiting]:
        """Return the present waits, longest first; waits for the same thing count as one."""
        now = time.monotonic()
        alike: dict[tuple[str, str, float], list[float]] = {}
        for wait in self._waits.values():
            alike.setdefault((wait.what, wait.on, wait.deadline_s), []).append(now - wait.since)
        reported = [
            Waiting(
                what=what, on=on, count=len(waited), longest_s=max(waited), deadline_s=deadline_s
            )
            for (what, on, deadline_s), waited in alike.items()
        ]
        return sorted(reported, key=lambda each: -each.longest_s)

    async def _run(self) -> None:
        while True:
            try:
                self.beat()
            except Exception:
                # A broken gauge must not make a living process look dead.
                log.exception("%s: heartbeat not sent", self._worker)
            await asyncio.sleep(self._every_s)


def _sound(gauges: Mapping[str, float]) -> dict[str, float]:
    """Those that a heartbeat may hold; without the others it still shows that the process lives."""
    return {name: value for name, value in gauges.items() if abs(value) <= MAX_GAUGE}


@dataclass
class _Seen:
    heartbeat: Heartbeat
    at: float  # monotonic seconds of this process: the sender's clock is not trusted


class Liveness:
    """The newest heartbeat of each worker; one silent for `dead_after_s` is dead."""

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
        self._seen: dict[str, _Seen] = {}

    def observe(self, heartbeat: Heartbeat) -> bool:
        """Note a heartbeat; True if the worker is new, heard again after its silence, or a new process."""
        now = self._clock()
        before = self._seen.get(heartbeat.worker)
        self._seen[heartbeat.worker] = _Seen(heartbeat, now)
        self._seen = {
            worker: seen
            for worker, seen in self._seen.items()
            if now - seen.at <= self._forget_after_s
        }
        return (
            before is None
            or now - before.at > self.dead_after_s
            or (before.heartbeat.pid, before.heartbeat.started_at)
            != (heartbeat.pid, heartbeat.started_at)
        )

    def alive(self, role: Role | None = None) -> list[Heartbeat]:
        """Newest heartbeats of the living workers, by worker name."""
        return [hb for hb in self._of(role) if self.silent_s(hb.worker) <= self.dead_after_s]

    def dead(self, role: Role | None = None) -> list[Heartbeat]:
        """Last heartbeats of the workers that fell silent and are not forgotten yet."""
        return [hb for hb in self._of(role) if self.silent_s(hb.worker) > self.dead_after_s]

    def get(self, worker: str) -> Heartbeat | None:
        """Return the worker's newest heartbeat, whether it lives or not."""
        seen = self._seen.get(worker)
        return seen.heartbeat if seen else None

    def silent_s(self, worker: str) -> float:
        """Seconds since the worker's last heartbeat; infinite if there was none."""
        seen = self._seen.get(worker)
        return self._clock() - seen.at if seen else float("inf")

    def discount_pause(self, seconds: float) -> None:
        """Ignore `seconds` in which this process did not listen: they count as no worker's silence."""
        for seen in self._seen.values():
            seen.at += seconds

    def forget(self, worker: str) -> None:
        """Drop a worker that announced its end."""
        self._seen.pop(worker, None)

    def _of(self, role: Role | None) -> list[Heartbeat]:
        found = (self._seen[worker].heartbeat for worker in sorted(self._seen))
        return [hb for hb in found if role is None or hb.role == role]
