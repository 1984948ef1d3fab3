"""Telemetry that stays away is told; a stop of the listener itself is no silence of data."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from bus.messages import Message, RunState
from dart_cli.config import endpoints
from dart_cli.config.schema import Config
from dart_cli.runtime import waits as telemetry
from dart_cli.runtime.waits import receive_telemetry
from tests.waiting import until

STATE = RunState(run_id="r", policy_version=0, weights_path="", stopping=False, reason="")


class Silent:
    """A subscriber that has nothing until it is told."""

    def __init__(self) -> None:
        self.says = asyncio.Event()
        self.asked = 0

    async def next(self) -> Message:
        self.asked += 1
        await self.says.wait()
        return STATE


async def test_a_process_that_was_stopped_does_not_say_that_data_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(telemetry, "LISTEN_S", 0.01)
    config = Config.model_validate({"run": {"dir": tmp_path}})
    subscriber: Any = Silent()
    loop, paused = asyncio.get_running_loop(), 0.0
    clock = loop.time
    monkeypatch.setattr(loop, "time", lambda: clock() + paused)
    listening = asyncio.create_task(anext(receive_telemetry(subscriber, config, lambda: True)))
    await until(lambda: subscriber.asked >= 2)
    paused = 40.0  # SIGSTOP and, later, SIGCONT
    request = subscriber.asked
    await until(lambda: subscriber.asked > request + 1)
    subscriber.says.set()
    assert await listening == STATE
    assert "no message from the connected data service" not in caplog.text


async def test_the_silence_of_a_data_process_that_is_not_there_is_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(telemetry, "LISTEN_S", 0.01)
    monkeypatch.setattr(endpoints, "DEADLINE_S", 0.05)
    config = Config.model_validate({"run": {"dir": tmp_path}})
    subscriber: Any = Silent()
    requests = []

    def is_there() -> bool:
        requests.append(subscriber.asked)
        return False

    listening = asyncio.create_task(anext(receive_telemetry(subscriber, config, is_there)))
    await until(lambda: requests)
    subscriber.says.set()
    assert await listening == STATE
    assert "no message from the connected data service" not in caplog.text


async def test_a_long_silence_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(telemetry, "LISTEN_S", 0.01)
    monkeypatch.setattr(endpoints, "DEADLINE_S", 0.05)
    config = Config.model_validate({"run": {"dir": tmp_path}})
    subscriber: Any = Silent()
    listening = asyncio.create_task(anext(receive_telemetry(subscriber, config, lambda: True)))
    await until(lambda: "no message from the connected data service" in caplog.text)
    subscriber.says.set()
    assert await listening == STATE
