"""One rehearsal from plan to report: `dart up CONFIG --rehearse`, `dart doctor CONFIG --rehearse`.

run_rehearsal   plays it, prints the report; returns the exit code
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path

from rich.console import Console

from bus.errors import ConfigError, DartError, ModelError
from dart_cli.doctor.planned import Planned, planned
from dart_cli.rehearsal.findings import (
    language_unnamed,
    look,
    prompt_too_long,
    reward_constant,
)
from dart_cli.rehearsal.plan import make_plan
from dart_cli.rehearsal.play import Player
from dart_cli.rehearsal.report import Report
from dart_cli.runtime.role import end_with_parent, limit_threads


def run_rehearsal(path: Path, overrides: list[str]) -> int:
    """Rehearse a TOML file; 0 where every part went well, else 1.

    Raises UserError for a configuration that cannot be read, and as `make_plan` does.
    """
    began = time.monotonic()
    end_with_parent()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # its processes share a few cores
    limit_threads(1)
    plan = make_plan(path, overrides)
    player = Player(plan)
    player.say(f"rehearsing {path} in {plan.folder}: {len(plan.changes)} keys are changed")
    report = Report(plan, failed={})
    assert report.failed is not None
    for name, play in player.parts().items():
        player.say(name)
        try:
            play()
        except DartError as error:
            report.failed[name] = str(error)
            if name != "verdicts":
                break  # what follows reads what this part leaves
    made = _planned(report)
    try:
        report.seen = look(plan.config)
    except DartError as error:
        report.failed.setdefault("run", str(error))
    else:
        found = {
            "prompts": language_unnamed(plan.written, report.seen.prompt),
            "vllm.max_model_len": prompt_too_long(
                plan.written, made.plan if made else None, report.seen
            ),
            "rewards": reward_constant(plan.written.env.suite, player.probed, report.seen.judged),
        }
        report.failed |= {name: text for name, text in found.items() if text}
    report.difference, report.compared = player.difference, player.compared
    report.seconds = time.monotonic() - began
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    report.cpu_seconds = sum(each.ru_utime + each.ru_stime for each in spent)
    report.show(Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 160))
    sys.stdout.write(json.dumps(report.as_json()) + "\n")
    return 1 if report.failed else 0


def _planned(report: Report) -> Planned | None:
    """Return the doctor's plan for the real sizes; its lines go into the report."""
    written = report.plan.written
    try:
        made = planned(written)
    except (ConfigError, ModelError) as error:
        report.doctor = (f"there is no plan: {error}",)
        return None
    if made is not None:
        report.doctor = tuple(f"{name}: {text}" for name, text in made.lines(written, None).items())
    return made
