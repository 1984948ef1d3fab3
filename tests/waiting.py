"""Waiting in tests: for an event, however slow the machine, and never forever."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import psutil

PATIENCE_S = 1200.0
"""A bound that no machine reaches, however busy: a test that makes no progress ends far earlier (tests/progress.py)."""


async def until(condition: Callable[[], object]) -> None:
    """Return when the condition holds; fail where it does not in time."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - conditions on plain values have no event
            await asyncio.sleep(0.002)


def wait_until(
    condition: Callable[[], object],
    what: str = "the condition",
    *,
    every_s: float = 0.01,
) -> None:
    """The same where no event loop runs; looks every `every_s` seconds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:g} s for {what}"
        time.sleep(every_s)


def lives(pid: int) -> bool:
    """Whether there is such a process, a zombie not among them."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
