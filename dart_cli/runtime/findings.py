"""What the doctor finds, and how it is printed.

ok, warning, error   a Finding (dart_cli/config/rules) of a level
guarded         a check's findings; a check that breaks is a finding itself
print_finding   lines for a person, coloured on a terminal
as_json         the same for a script
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from dart_cli.config.rules import Finding, Level

_STYLES: dict[Level, str] = {"ok": "green", "warning": "yellow", "error": "bold red"}
_SUBJECT_WIDTH = 14


def ok(subject: str, text: str) -> Finding:
    """As it should be."""
    return Finding(subject, "ok", text)


def warning(subject: str, text: str, cure: str) -> Finding:
    """Return a finding about what works, but badly, or not for long."""
    return Finding(subject, "warning", text, cure)


def error(subject: str, text: str, cure: str) -> Finding:
    """Return a finding about what cannot work."""
    return Finding(subject, "error", text, cure)


def guarded(subject: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Yield the findings of a check; a check that breaks is reported, and the others go on."""
    try:
        yield from check()
    except Exception as fault:  # noqa: BLE001 - the fault is reported as a finding
        text = " ".join(f"{type(fault).__name__}: {fault}".split())
        yield error(
            subject, f"could not be examined: {text}", "fix what it names, run dart doctor again"
        )


def is_healthy(findings: Iterable[Finding]) -> bool:
    """Whether a run can work."""
    return all(each.level != "error" for each in findings)


def print_finding(console: Console, finding: Finding) -> None:
    """One line; the cure below it."""
    head = Text.assemble(
        (f"{finding.level:<8} ", _STYLES[finding.level]), f"{finding.subject:<{_SUBJECT_WIDTH}} "
    )
    console.print(head + Text(finding.text), soft_wrap=True)
    if finding.cure:
        console.print(Text(" " * (10 + _SUBJECT_WIDTH) + finding.cure, "dim"), soft_wrap=True)


def summary(findings: Sequence[Finding]) -> str:
    """Return the last line."""
    counts = {level: sum(each.level == level for each in findings) for level in _STYLES}
    if counts["error"]:
        number = counts["error"]
        return f"{number} thing{'' if number == 1 else 's'} must be fixed first"
    if counts["warning"]:
        number = counts["warning"]
        return f"it can run; {number} warning{'' if number == 1 else 's'}"
    return "everything is in order"


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """All of them as plain values."""
    return {"healthy": is_healthy(findings), "findings": [asdict(each) for each in findings]}
