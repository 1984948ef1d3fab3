"""The limit of a test: time without progress, so that a slow or busy machine fails no test.

pytest-timeout ends a test after `timeout` seconds (pyproject.toml) of the wall clock. The timer here
replaces that one, by pytest-timeout's own hook. It runs out in two cases, neither of which depends on other
work of the machine:

    stands still   in `timeout` seconds the processes of the test used less than LEAST_SHARE of one core; seconds in which
                   one of them was ready to run and waited for a core are not counted (Linux)
    runs away      since the test began they have used MOST_CPU_S seconds of processor time

The processes of a test are pytest's own and all below it.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from pytest_timeout import Settings, timeout_sigalrm

LEAST_SHARE = 0.05
"""Share of one core. Processes that only poll and send heartbeats use less; a process that computes beside
forty others uses more."""
MOST_CPU_S = 1800.0
LOOKS = 24
"""Number of looks at the processes within a test's limit."""


class CpuUse(NamedTuple):
    """The use of processor time in a span of time."""

    cpu_s: float  # of processor time, of all processes together
    queued_s: float  # in which the thread that waited longest was ready to run and had no core


class CpuMeter:
    """A meter of the processor time of this process and all below it, and of their waits for a core."""

    def __init__(self) -> None:
        self._own = psutil.Process()
        self._cpu, self._queued = self._times()

    def used(self) -> CpuUse:
        """Return the use since the last call. The whole use of a new process counts."""
        cpu, queued = self._times()
        usage = CpuUse(
            sum(max(0.0, cpu_s - self._cpu.get(pid, 0.0)) for pid, cpu_s in cpu.items()),
            max(
                (seconds - self._queued.get(thread, 0.0) for thread, seconds in queued.items()),
                default=0.0,
            ),
        )
        self._cpu, self._queued = cpu, queued
        return usage

    def _times(self) -> tuple[Mapping[int, float], Mapping[str, float]]:
        """Return processor seconds by process, with its ended children, and queued seconds by thread."""
        cpu: dict[int, float] = {}
        queued: dict[str, float] = {}
        # If this process cannot read its own times, that counts as no progress.
        with contextlib.suppress(psutil.Error):
            for process in (self._own, *self._own.children(recursive=True)):
                with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                    cpu[process.pid] = sum(process.cpu_times()[:4])
                    queued |= _queued_s(process.pid)
        return cpu, queued


def _queued_s(pid: int) -> dict[str, float]:
    """Return for each thread the seconds in which it was ready to run and waited.

    The result is empty if the kernel does not record them.
    """
    seconds: dict[str, float] = {}
    for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, IndexError, ValueError):  # it has ended meanwhile
            seconds[str(file)] = int(file.read_text().split()[1]) / 1e9
    return seconds


class ProgressTimer:
    """A timer that sends SIGALRM to the main thread when a test stands still or runs away."""

    def __init__(self, limit_s: float) -> None:
        self.reason = ""  # why it ran out
        self._limit_s = limit_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="progress timer", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """End the watch."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        of_test_s = since_mark_s = idle_s = 0.0
        looked_at = time.monotonic()
        if self._over.wait(self._limit_s / LOOKS):  # most tests end before this, at no cost
            return
        meter = CpuMeter()
        while not self._over.wait(self._limit_s / LOOKS):
            usage, now = meter.used(), time.monotonic()
            of_test_s += usage.cpu_s
            since_mark_s += usage.cpu_s
            idle_s += max(0.0, now - looked_at - usage.queued_s)
            looked_at = now
            if since_mark_s >= LEAST_SHARE * self._limit_s:
                idle_s = since_mark_s = 0.0
            if idle_s >= self._limit_s:
                self.reason = f"stands still: in {idle_s:.0f} s its processes used {since_mark_s:.1f} s of processor time"
            elif of_test_s >= MOST_CPU_S:
                self.reason = f"runs away: its processes used {of_test_s:.0f} s of processor time"
            if self.reason:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
                return


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Settings) -> bool:
    """Set the timer in place of pytest-timeout's, which counts seconds of the wall clock."""

    def alarm(*_: object) -> None:
        try:
            # It prints all stacks, and fails unless a debugger is at work.
            timeout_sigalrm(item, settings)
        except pytest.fail.Exception:
            pytest.fail(f"the test {timer.reason}")

    before = signal.signal(signal.SIGALRM, alarm)
    timer = ProgressTimer(settings.timeout)

    def cancel() -> None:
        timer.cancel()
        signal.signal(signal.SIGALRM, before)

    item.cancel_timeout = cancel  # type: ignore[attr-defined]  # pytest-timeout calls it
    return True
