"""Latency, throughput and server CPU of one cell of benchmarks/data_bus/transport.py; needs no part of `dart`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

WARM_UP_S = 0.3
Ask = Callable[[], Awaitable[object]]
Cell = dict[str, float]


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of all threads of a process, to the nanosecond (Linux schedstat)."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


class LatencyMeter:
    """A meter of the latencies of one cell and of the server's CPU time meanwhile."""

    def __init__(self, seconds: float, server: int, shot_bytes: int) -> None:
        self._server, self._shot_bytes = server, shot_bytes
        self._latencies: list[float] = []
        self._starts = time.perf_counter() + WARM_UP_S
        self._ends = self._starts + seconds
        self._cpu_at: float | None = None

    @property
    def running(self) -> bool:
        """Whether to send one more request; the clocks start at the first one after the warm-up."""
        now = time.perf_counter()
        if self._cpu_at is None and now >= self._starts:
            self._cpu_at = cpu_s(self._server)
            self._starts = time.perf_counter()
        return now < self._ends

    def note(self, asked_at: float) -> None:
        """Record that a request that was asked at `asked_at` is answered now; the warm-up does not count."""
        if asked_at >= self._starts:
            self._latencies.append(time.perf_counter() - asked_at)

    def result(self) -> Cell:
        """Return the latencies in microseconds, and requests and megabytes of screenshots a second."""
        elapsed = time.perf_counter() - self._starts
        assert self._cpu_at is not None
        cpu = cpu_s(self._server) - self._cpu_at
        self._latencies.sort()
        count = len(self._latencies)
        return {
            "p50_us": 1e6 * self._latencies[count // 2],
            "p99_us": 1e6 * self._latencies[count * 99 // 100],
            "per_s": count / elapsed,
            "mb_s": count * self._shot_bytes / elapsed / 1e6,
            "server_cpu_us": 1e6 * cpu / count,
        }


async def measure(ask: Ask, in_flight: int, meter: LatencyMeter) -> Cell:
    """Run `in_flight` clients, each of which sends its next request once it is answered."""

    async def asker() -> None:
        while meter.running:
            asked_at = time.perf_counter()
            await ask()
            meter.note(asked_at)

    await asyncio.gather(*(asker() for _ in range(in_flight)))
    return meter.result()
