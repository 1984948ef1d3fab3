"""What a process waits for, told to the person who started it.

told_waits   while a block runs: a line once a wait for another process lasts, and one when it is over
data_awaited the wait for `dart data`, at its address

The words are those of bus.heartbeat.awaited. The lines are no warnings, since `dart up`, which shows
warnings, starts all processes itself; they go to the terminal of a process started by hand, and to its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

from bus.endpoints import DATA
from bus.heartbeat import awaited
from dart_cli.config.endpoints import run_endpoints
from dart_cli.config.schema import Config

log = logging.getLogger(__name__)

LOOK_S = 0.25
SAY_AFTER_S = 1.25
"""A wait that is over before needs no line: processes that start together wait for each other."""
AGAIN_S = 600.0
"""Seconds from one line of a wait to the next."""


def data_awaited(config: Config) -> str:
    """The wait for `dart data`, where there is no connection to it."""
    return awaited("data", at=run_endpoints(config).address(DATA))


@contextlib.asynccontextmanager
async def told_waits(
    what: Callable[[], str], say: Callable[[str], None] = log.info
) -> AsyncIterator[None]:
    """While inside, `say` each wait that `what` names (empty: none) once it has lasted `SAY_AFTER_S`.

    Again each `AGAIN_S`; and once it is over.
    """
    following = asyncio.create_task(_follow(what, say), name="waits")
    try:
        yield
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def _follow(what: Callable[[], str], say: Callable[[str], None]) -> None:
    present = told = ""
    # Sums of looks, no differences of a clock: a process that was stopped has not waited.
    lasted_s, since_told_s = 0.0, 0.0
    while True:
        seen = what()
        if seen != present:
            present, lasted_s = seen, 0.0
        if not present:
            if told:
                say(f"no longer waits for {_subject(told)}")
            told = ""
        elif present != told and lasted_s >= SAY_AFTER_S:
            say(f"waits for {present}")
            told, since_told_s = present, 0.0
        elif present == told and since_told_s >= AGAIN_S:
            say(f"has waited {lasted_s:.0f} s for {present}")
            since_told_s = 0.0
        await asyncio.sleep(LOOK_S)
        lasted_s += LOOK_S
        since_told_s += LOOK_S


def _subject(wait: str) -> str:
    """`dart data` of ``dart data: start `dart data CONFIG` ``."""
    return wait.partition(": ")[0]
