"""Promises of work beside other work."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from dart_cli.runtime.background import in_daemon_thread
from tests.waiting import PATIENCE_S


async def test_a_blocking_call_returns_and_raises_where_it_is_awaited() -> None:
    loop_thread = threading.get_ident()
    assert await in_daemon_thread(threading.get_ident) != loop_thread
    with pytest.raises(ZeroDivisionError):
        await in_daemon_thread(lambda: 1 // 0)


async def test_a_call_that_is_given_up_holds_up_nothing() -> None:
    goes_on = threading.Event()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await in_daemon_thread(goes_on.wait)
    goes_on.set()


def test_a_process_ends_though_such_a_call_does_not() -> None:
    program = """
import asyncio, threading
from dart_cli.runtime.background import in_daemon_thread
async def main():
    try:
        async with asyncio.timeout(0.01):
            await in_daemon_thread(threading.Event().wait)
    except TimeoutError:
        print("given up")
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert done.stdout == "given up\n"
