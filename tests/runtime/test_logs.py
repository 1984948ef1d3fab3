"""Warnings of many slots at once."""

from __future__ import annotations

import asyncio
import logging

import pytest

from dart_cli.runtime import logs
from dart_cli.runtime.logs import RepeatedWarnings
from tests.waiting import until

logger = logging.getLogger(__name__)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings so far."""
    return [record.getMessage() for record in caplog.records]


def test_equal_warnings_of_many_slots_are_one_line_with_their_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def warn() -> None:
        warnings = RepeatedWarnings(logger)
        for _ in range(64):
            warnings.add("data is absent")
        warnings.add("another")
        await until(lambda: len(told(caplog)) == 2)
        warnings.add("data is absent")  # too soon for a second line
        warnings.close()

    asyncio.run(warn())
    assert told(caplog) == ["data is absent (64 times)", "another", "data is absent"]


def test_warnings_that_go_on_are_told_again_after_a_while(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "QUIET_S", 0.05)

    async def warn() -> None:
        warnings = RepeatedWarnings(logger)
        warnings.add("data is absent")
        await until(lambda: len(told(caplog)) == 1)
        warnings.add("data is absent")
        await until(lambda: len(told(caplog)) == 2)
        warnings.close()

    asyncio.run(warn())
    assert told(caplog) == ["data is absent"] * 2
