"""A check that breaks is a finding itself."""

from __future__ import annotations

from pathlib import Path

from dart_cli.config.rules import Finding
from dart_cli.runtime.findings import is_healthy, ok, run_check, summary


def test_a_check_that_breaks_is_a_finding(tmp_path: Path) -> None:
    def broken() -> list[Finding]:
        raise RuntimeError("two\nlines")

    [result] = run_check("x", broken)
    assert (result.level, result.text) == (
        "error",
        "could not be examined: RuntimeError: two lines",
    )
    assert not is_healthy([ok("y", ""), result])
    assert summary([result]) == "1 thing must be fixed first"
    assert summary([ok("y", "")]) == "everything is in order"
    assert summary([Finding("y", "warning", "", "")]) == "it can run; 1 warning"
