"""Waiting in tests: for what is to come, however slow the machine, and never for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import psutil

PATIENCE_S = 60.0
"""A bound, no expectation."""


async def until(condition: Callable[[], object]) -> None:
    """Return when the condition holds; fail where it does not in time."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - conditions on plain values have no event
            await asyncio.sleep(0.002)


def lives(pid: int) -> bool:
    """Whether there is such a process, a zombie not among them."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
