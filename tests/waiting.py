"""Waits in tests for a condition, however slow the machine is, with a bound."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import psutil

PATIENCE_S = 1200.0
"""Even a busy machine does not reach it; a test without progress ends far earlier (tests/progress.py)."""


async def until(condition: Callable[[], object]) -> None:
    """Return when the condition holds; fail if it does not in time."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - conditions on plain values have no event
            await asyncio.sleep(0.002)


def wait_until(
    condition: Callable[[], object],
    what: str = "the condition",
    *,
    every_s: float = 0.01,
) -> None:
    """Return when the condition holds, without an event loop; look every `every_s` seconds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:g} s for {what}"
        time.sleep(every_s)


def lives(pid: int) -> bool:
    """Return True if the process exists and is no zombie."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
