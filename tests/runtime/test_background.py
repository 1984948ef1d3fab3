"""Promises of work beside other work."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading

import pytest
import typer

from dart_cli.runtime.background import in_daemon_thread, run_until_stopped
from dart_cli.runtime.waits import OpenWaits
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


# --- a verb that a signal stops ------------------------------------------------------------


async def signalled(number: int, waits: OpenWaits) -> None:
    """Wait for ever, once the signal is sent."""
    with waits.waiting("the end of time", 9.0):
        os.kill(os.getpid(), number)
        await asyncio.Event().wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_prints_what_there_is_and_cancels_the_work(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    before, waits = signal.getsignal(number), OpenWaits()
    code = run_until_stopped(signalled(number, waits), waits, lambda: typer.echo("so far"))
    assert code == 128 + number
    printed, text = capsys.readouterr()
    assert printed == "so far\n"
    assert (
        text == f"stopped by {number.name}; it had waited 0 s for the end of time (at most 9 s)\n"
    )
    assert signal.getsignal(number) == before


def test_work_that_ends_by_itself_is_no_stop_and_its_error_rises() -> None:
    async def fails() -> None:
        raise ZeroDivisionError

    assert run_until_stopped(asyncio.sleep(0), OpenWaits(), lambda: None) == 0
    with pytest.raises(ZeroDivisionError):
        run_until_stopped(fails(), OpenWaits(), lambda: None)


def test_what_cannot_be_printed_at_the_stop_is_raised_once_the_work_is_cancelled() -> None:
    cancelled: list[bool] = []
    waits = OpenWaits()

    async def work() -> None:
        try:
            await signalled(signal.SIGTERM, waits)
        finally:
            cancelled.append(True)

    with pytest.raises(ZeroDivisionError):
        run_until_stopped(work(), waits, lambda: typer.echo(1 // 0))
    assert cancelled


def test_an_ignored_signal_stays_ignored_as_under_nohup(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def goes_on() -> None:
        os.kill(os.getpid(), signal.SIGHUP)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run_until_stopped(goes_on(), OpenWaits(), lambda: None) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_work_that_takes_the_signal_as_its_own_goes_on() -> None:
    went_on: list[bool] = []
    waits = OpenWaits()

    async def prompt() -> None:
        try:
            await signalled(signal.SIGINT, waits)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
        went_on.append(True)

    assert run_until_stopped(prompt(), waits, lambda: None) == 0
    assert went_on


STUBBORN = """
import asyncio, os, signal, threading
from dart_cli.runtime import background
from dart_cli.runtime.waits import OpenWaits
background.STOP_S = {stop_s}
stopping = threading.Event()
async def stubborn():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()
    finally:
        {second}
        await asyncio.to_thread(threading.Event().wait)
print(background.run_until_stopped(stubborn(), OpenWaits(), lambda: print("so far")))
"""


@pytest.mark.parametrize(
    ("stop_s", "second"), [(0.01, "pass"), (1e6, "os.kill(os.getpid(), signal.SIGINT)")]
)
def test_work_that_does_not_end_is_left_at_the_second_signal_or_at_the_deadline(
    stop_s: float, second: str
) -> None:
    program = STUBBORN.format(stop_s=stop_s, second=second)
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert (ended.returncode, ended.stdout) == (143, "so far\n"), ended.stderr
