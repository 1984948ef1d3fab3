"""One run, observed from outside: its processes are started, killed at times, and ended.

    record      start a run's processes, let it warm up, record it for a time, end it
    Recording   every heartbeat, the CPU and memory of each process, the kills

The processes are the commands that a person would type; the heartbeats come from the run's own
telemetry. A worker that is killed is started again as `dart up` would start it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import psutil

from bus.endpoints import TELEMETRY_OUT
from bus.errors import DartError, DeadlineError
from bus.messages import Heartbeat
from bus.pubsub import Subscriber
from dart_cli.config.endpoints import run_curve, run_endpoints
from dart_cli.config.schema import Config
from dart_cli.runtime.logs import log_dir
from dart_cli.runtime.supervisor import Supervisor

START_S = 60.0
"""Longest time until every process of a run has sent a heartbeat and works."""
SAMPLE_S = 1.0
_RESTARTS = 1000


@dataclass(frozen=True)
class ProcessCost:
    """The CPU and memory of one process at one moment."""

    at: float  # unix seconds
    worker: str
    pid: int
    cpu_s: float  # user and system, since its start
    rss: int  # bytes


@dataclass
class Recording:
    """A window [began, end] of a run, unix seconds, and what was recorded in and around it."""

    began: float = 0.0
    end: float = 0.0
    beats: list[Heartbeat] = field(default_factory=list)
    costs: list[ProcessCost] = field(default_factory=list)
    kills: list[tuple[float, str]] = field(default_factory=list)  # (unix seconds, worker)

    @property
    def seconds(self) -> float:
        """The length of the window."""
        return self.end - self.began


@dataclass(frozen=True)
class Plan:
    """The length of the recording, and how often a rollout worker is killed meanwhile."""

    warm_s: float
    seconds: float
    kills: int = 0

    def kill_times(self) -> list[float]:
        """Return the seconds after the window's begin, evenly spread, none at its ends."""
        return [self.seconds * (k + 1) / (self.kills + 1) for k in range(self.kills)]


async def record(config: Config, commands: Mapping[str, Sequence[str]], plan: Plan) -> Recording:
    """Run `commands` (name -> arguments of `dart`) and record them according to `plan`.

    Raises DeadlineError if a process sends no heartbeat in time, ChildError if one cannot be kept
    alive, DartError if the run is over before the window is.
    """
    recording = Recording()
    stop = asyncio.Event()
    supervisor = Supervisor(
        commands,
        leaders=["data", "train"],
        restarts=_RESTARTS,
        log_file=log_dir(config.run.dir) / "bench.log",
        notice=lambda _text: None,
    )
    async with Subscriber(
        run_endpoints(config).address(TELEMETRY_OUT), [Heartbeat], curve=run_curve(config)
    ) as heartbeats:
        running = asyncio.create_task(supervisor.run(stop))
        watching = [
            asyncio.create_task(_listen(heartbeats, recording)),
            asyncio.create_task(_sample(recording)),
        ]
        conducting = asyncio.create_task(_conduct(recording, list(commands), plan))
        try:
            await asyncio.wait([running, conducting], return_when=asyncio.FIRST_COMPLETED)
            if conducting.done():
                conducting.result()
        finally:
            conducting.cancel()
            stop.set()
            for task in watching:
                task.cancel()
            await asyncio.gather(conducting, *watching, return_exceptions=True)
            await running
    if not recording.end:
        raise DartError(
            f"{config.run.dir}: the run was over before {plan.seconds:g} s of it were watched; "
            "raise train.updates or train.max_minutes"
        )
    return recording


async def _conduct(recording: Recording, workers: Sequence[str], plan: Plan) -> None:
    """Wait until all work, warm up, mark the window, kill the workers of the plan."""
    deadline = time.monotonic() + START_S
    while missing := [name for name in workers if not _plays(recording, name)]:
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"{', '.join(missing)} did not begin within {START_S:.0f} s; see logs/bench.log"
            )
        await asyncio.sleep(0.1)
    await asyncio.sleep(plan.warm_s)
    recording.began = time.time()
    rollouts = [name for name in workers if name.startswith("rollout")]
    for number, at in enumerate(plan.kill_times()):
        await asyncio.sleep(max(0.0, recording.began + at - time.time()))
        _kill(recording, rollouts[number % len(rollouts)])
    await asyncio.sleep(max(0.0, recording.began + plan.seconds - time.time()))
    recording.end = time.time()
    await asyncio.sleep(1.2)  # one more heartbeat of each process, for values at the window's end


def _plays(recording: Recording, worker: str) -> bool:
    newest = _newest(recording, worker)
    return newest is not None and newest.state in ("ready", "training", "waiting", "syncing")


def _newest(recording: Recording, worker: str) -> Heartbeat | None:
    return next((beat for beat in reversed(recording.beats) if beat.worker == worker), None)


def _kill(recording: Recording, worker: str) -> None:
    beat = _newest(recording, worker)
    if beat is not None:
        with contextlib.suppress(ProcessLookupError):  # it has not come back from the last time
            os.kill(beat.pid, signal.SIGKILL)
            recording.kills.append((time.time(), worker))


async def _listen(heartbeats: Subscriber, recording: Recording) -> None:
    async for message in heartbeats:
        if isinstance(message, Heartbeat):
            recording.beats.append(message)


async def _sample(recording: Recording) -> None:
    """Record the CPU and memory of every process each second."""
    while True:
        pids = {beat.worker: beat.pid for beat in recording.beats[-100:]}
        recording.costs += [
            cost for worker, pid in pids.items() if (cost := cost_of(worker, pid)) is not None
        ]
        await asyncio.sleep(SAMPLE_S)


def cost_of(worker: str, pid: int) -> ProcessCost | None:
    """Return the CPU and memory of a process of this host; None if it does not exist."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times, rss = process.cpu_times(), process.memory_info().rss
    except (psutil.Error, ValueError):
        return None
    return ProcessCost(time.time(), worker, pid, times.user + times.system, rss)
