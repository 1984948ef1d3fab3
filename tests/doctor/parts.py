"""The command line, configurations and findings for the doctor's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dart_cli.cli.main import main
from dart_cli.config.rules import Finding
from dart_cli.config.schema import Config
from dart_cli.doctor.fit import HostCapacity, problems
from dart_cli.doctor.plan import Plan


def doctor(*arguments: object) -> int:
    """Run `dart doctor ARGUMENTS` in this process, and return its exit code."""
    with pytest.raises(SystemExit) as exit_:
        main(["doctor", *map(str, arguments)])
    return int(exit_.value.code or 0)


def config_in(folder: Path, **sections: Any) -> Config:
    return Config.model_validate({"run": {"dir": folder / "run"}, **sections})


def worst(findings: list[Finding]) -> Finding:
    """Return the most serious finding."""
    return max(findings, key=lambda finding: ("ok", "warning", "error").index(finding.level))


def misfits(plan: Plan, config: Config, room: HostCapacity, role: Any = None) -> list[Finding]:
    """Return the errors about what does not fit."""
    findings = problems(plan, config, room, role)
    return [finding for finding in findings if finding.level == "error"]


def cautions(plan: Plan, config: Config, room: HostCapacity, role: Any = None) -> list[Finding]:
    """Return the warnings about what the run can do without."""
    findings = problems(plan, config, room, role)
    return [finding for finding in findings if finding.level == "warning"]
