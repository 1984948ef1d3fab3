"""Warnings of many slots at once; log files that stay small and say when; times that name their zone."""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from dart_cli.runtime import logs
from dart_cli.runtime.logs import RepeatedWarnings, cut_log, logging_to
from dart_cli.runtime.tables import clock, moment
from tests.waiting import PATIENCE_S, until

logger = logging.getLogger(__name__)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings so far."""
    return [record.getMessage() for record in caplog.records]


def test_equal_warnings_of_many_slots_are_one_line_with_their_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def warn() -> None:
        warnings = RepeatedWarnings(logger)
        for _ in range(64):
            warnings.add("data is absent")
        warnings.add("another")
        await until(lambda: len(warnings_in(caplog)) == 2)
        warnings.add("data is absent")  # too soon for a second line
        warnings.close()

    asyncio.run(warn())
    assert warnings_in(caplog) == ["data is absent (64 times)", "another", "data is absent"]


def test_warnings_that_go_on_are_told_again_after_a_while(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "QUIET_S", 0.05)

    async def warn() -> None:
        warnings = RepeatedWarnings(logger)
        warnings.add("data is absent")
        await until(lambda: len(warnings_in(caplog)) == 1)
        warnings.add("data is absent")
        await until(lambda: len(warnings_in(caplog)) == 2)
        warnings.close()

    asyncio.run(warn())
    assert warnings_in(caplog) == ["data is absent"] * 2


def test_a_log_that_has_grown_large_begins_anew_under_the_same_hands(tmp_path: Path) -> None:
    path = tmp_path / "env-0.log"
    with path.open("a") as other:  # as faulthandler has it
        for number in range(3):
            other.write(f"{number}" * 60 + "\n")
            other.flush()
            cut_log(path, most=100)
        assert path.read_text() == "2" * 60 + "\n"
        assert (tmp_path / "env-0.log.1").read_text() == "0" * 60 + "\n" + "1" * 60 + "\n"
        assert sorted(each.name for each in tmp_path.iterdir()) == ["env-0.log", "env-0.log.1"]


def test_a_process_bounds_its_own_log_and_says_when_in_utc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MOST_LOG_BYTES", 1000)
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        with logging_to(tmp_path, "env-0", terminal=False) as path:
            for _ in range(100):
                logger.info("a line of some length")
    finally:
        monkeypatch.undo()
        time.tzset()
    assert path.stat().st_size + (path.parent / "env-0.log.1").stat().st_size < 2300
    at = datetime.strptime(path.read_text().split(" ")[0], "%Y-%m-%dT%H:%M:%S.%f%z")
    assert at.utcoffset() == timedelta()
    assert abs(at.timestamp() - path.stat().st_mtime) < PATIENCE_S


def test_moments_are_in_utc_wherever_they_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        first, second = (datetime(2026, 10, 25, hour, 30, tzinfo=UTC) for hour in (0, 1))
        told = [moment(each.timestamp()) for each in (first, second)]
        assert told == ["2026-10-25 00:30:00Z", "2026-10-25 01:30:00Z"]  # 02:30 there, twice
        assert clock(first.timestamp()) == "00:30:00Z"
    finally:
        monkeypatch.undo()
        time.tzset()
