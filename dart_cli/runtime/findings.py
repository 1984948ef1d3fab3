"""Findings of the commands that check something before a run: how they are made, printed and counted.

`dart doctor` checks a host and a configuration, a smoke test a short run of it. Both report each result as a
Finding (dart_cli/config/rules): a subject, a level, a text, and the fix if something must be done.

ok, warning, error   return a Finding of that level
error_of             returns the finding for an exception
run_check            yields a check's findings, and an error if the check itself breaks
is_healthy           returns True if no finding is an error
exit_code            returns 0 if no finding is an error, else 1
sentence             returns text and fix of a finding in one line
print_finding        prints a finding for a person, in colour on a terminal
summary              returns the line below all printed findings
as_json              returns findings as plain values, for a script
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from bus.errors import DartError
from dart_cli.config.rules import Finding, Level

_STYLES: dict[Level, str] = {"ok": "green", "warning": "yellow", "error": "bold red"}
_SUBJECT_WIDTH = 14


def ok(subject: str, text: str) -> Finding:
    """Return a finding about something that is as it should be."""
    return Finding(subject, "ok", text)


def warning(subject: str, text: str, fix: str) -> Finding:
    """Return a finding about something that lets a run work, but badly or not for long."""
    return Finding(subject, "warning", text, fix)


def error(subject: str, text: str, fix: str) -> Finding:
    """Return a finding about something that prevents a run."""
    return Finding(subject, "error", text, fix)


def error_of(subject: str, fault: DartError, fix: str = "") -> Finding:
    """Return the error finding for an exception; `fix` is used if its message has none, after "; "."""
    text, _, own_fix = str(fault).partition("; ")
    return error(subject, text, own_fix or fix)


def run_check(subject: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Yield the findings of `check`. If it raises, yield an error instead, so that other checks can go on."""
    try:
        yield from check()
    except Exception as fault:  # noqa: BLE001 - the fault is reported as a finding
        text = " ".join(f"{type(fault).__name__}: {fault}".split())
        yield error(
            subject, f"could not be examined: {text}", "fix what it names, run dart doctor again"
        )


def is_healthy(findings: Iterable[Finding]) -> bool:
    """Return True if no finding is an error, so that a run can work."""
    return all(finding.level != "error" for finding in findings)


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 0 if no finding is an error, else 1."""
    return 0 if is_healthy(findings) else DartError.exit_code


def sentence(finding: Finding) -> str:
    """Return text and fix of a finding in one line, without its subject."""
    return f"{finding.text}; {finding.cure}" if finding.cure else finding.text


def print_finding(console: Console, finding: Finding) -> None:
    """Print level, subject and text in one line, and the fix in a line below."""
    head = Text.assemble(
        (f"{finding.level:<8} ", _STYLES[finding.level]), f"{finding.subject:<{_SUBJECT_WIDTH}} "
    )
    console.print(head + Text(finding.text), soft_wrap=True)
    if finding.cure:
        console.print(Text(" " * (10 + _SUBJECT_WIDTH) + finding.cure, "dim"), soft_wrap=True)


def summary(findings: Sequence[Finding]) -> str:
    """Return the line below all findings: how many errors there are, or else how many warnings."""
    errors, warnings = (
        sum(finding.level == level for finding in findings) for level in ("error", "warning")
    )
    if errors:
        return f"{errors} thing{'' if errors == 1 else 's'} must be fixed first"
    if warnings:
        return f"it can run; {warnings} warning{'' if warnings == 1 else 's'}"
    return "everything is in order"


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return all findings as plain values."""
    return {
        "healthy": is_healthy(findings),
        "findings": [asdict(finding) for finding in findings],
    }
