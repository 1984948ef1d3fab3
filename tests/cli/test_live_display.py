"""What `dart up` writes where there is no terminal."""

from __future__ import annotations

import pytest

from bus.snapshot import Snapshot, StallView
from dart_cli.cli.live_display import LiveDisplay
from tests.status.test_run_sections import snapshot


def stalled(*texts: str, stopping: bool = False) -> Snapshot:
    """A run with a stall of its tasks."""
    stalls = [StallView(kind="tasks", who="train", since_s=0.0, text=text) for text in texts]
    return snapshot(stalls=stalls, stopping=stopping, reason="")


def test_a_stall_is_written_once_and_again_when_it_is_over(
    capsys: pytest.CaptureFixture[str],
) -> None:
    display = LiveDisplay()
    for run in (stalled("40 groups"), stalled("48 groups"), stalled(), stalled("50 groups")):
        display.report_stalls(run)
    lines = [line.split(" ", 1)[1] for line in capsys.readouterr().err.splitlines()]
    assert lines == [
        "needs attention: 40 groups",
        "over: 48 groups",
        "needs attention: 50 groups",
    ]
    display.report_stalls(stalled(stopping=True))
    assert capsys.readouterr().err == ""
