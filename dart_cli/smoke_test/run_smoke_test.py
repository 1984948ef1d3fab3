"""One rehearsal from plan to report: `dart up CONFIG --rehearse`, `dart doctor CONFIG --rehearse`.

run_rehearsal   plays it, prints the report; returns the exit code
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import time
from pathlib import Path

import psutil
from rich.console import Console

from bus.errors import ConfigError, DartError, ModelError
from dart_cli.doctor.plan_findings import Planned, planned
from dart_cli.runtime.role import end_with_parent, limit_threads
from dart_cli.runtime.streams import keep_going, say_error
from dart_cli.smoke_test.config_changes import make_plan
from dart_cli.smoke_test.interruption import Stopped, stoppable
from dart_cli.smoke_test.parts_player import ALWAYS, EPISODE, OPTIONAL, Player
from dart_cli.smoke_test.smoke_report import Report
from dart_cli.smoke_test.stored_run import (
    language_unnamed,
    look,
    prompt_too_long,
    reward_constant,
)
from dart_cli.smoke_test.time_budget import MINUTES, Budget

INTERRUPTED = 130
"""The exit code after a signal, as that of `dart up`."""
REPORT_SHARE = 0.05
"""Share of the time that is kept for the report."""
WIDTH = 100
"""Characters of a line where standard output is no terminal and COLUMNS is not set."""


def run_rehearsal(path: Path, overrides: list[str], minutes: float | None = None) -> int:
    """Rehearse a TOML file within `minutes`, by default MINUTES.

    Returns 0 where every part went well that was played, and all of ALWAYS was; 130 after a signal; else 1. Raises
    UserError for a configuration that cannot be read, and as `make_plan` does.
    """
    started_s = time.time() - psutil.Process().create_time()
    budget = Budget(60 * (minutes or MINUTES), started_s)
    end_with_parent()
    keep_going()  # the report is written where the terminal is closed, too
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # its processes share a few cores
    limit_threads(1)
    report: Report | None = None
    try:
        with stoppable(budget.left_s - REPORT_SHARE * budget.seconds):
            plan = make_plan(path, overrides)
            player = Player(plan, budget)
            report = Report(plan, player)
            player.say(f"rehearsing {path} in {plan.folder}: {len(plan.changes)} keys are changed")
            _play(report)
    except Stopped as stopped:
        if report is None:
            say_error(f"{stopped.why}, while it was planned: nothing was played")
            return DartError.exit_code if stopped.is_over else INTERRUPTED
        report.stopped = stopped
        report.player.say(f"{stopped.why}: its processes are gone")
    _examine(report)
    _write(report)
    if report.stopped is not None and not report.stopped.is_over:
        return INTERRUPTED
    return DartError.exit_code if report.failed else 0


def _play(report: Report) -> None:
    """Play the parts; a failed one ends it, as what follows reads what it leaves."""
    for name, play in report.player.parts().items():
        report.player.say(name)
        report.part = name
        try:
            play()
        except DartError as error:
            report.failed[name] = str(error)
            if name != "verdicts":
                return
    report.part = ""


def _examine(report: Report) -> None:
    """Add to the report what was not played, the plan for the real sizes, and what the run has stored."""
    player, stopped = report.player, report.stopped
    why = f"{next(iter(report.failed), 'the run')} failed" if stopped is None else stopped.why
    for part in (*ALWAYS, *OPTIONAL):
        if part not in player.proved:
            player.left_out.setdefault(part, why)
    missing = [part for part in ALWAYS if part in player.left_out]
    if stopped is not None and stopped.is_over and missing:
        report.failed["time"] = (
            f"{player.budget.seconds / 60:g} minutes were over before {', '.join(missing)}; see "
            f"{player.config.run.dir}/logs for what it waited for, and give it more with --rehearse-minutes "
            f"{player.budget.seconds / 30:g}"
        )
    made = _planned(report)
    if EPISODE in player.proved:
        _look(report, made)
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    report.cpu_seconds = sum(each.ru_utime + each.ru_stime for each in spent)


def _look(report: Report, made: Planned | None) -> None:
    """Add what only a rehearsal sees, of the steps and verdicts that are stored."""
    plan = report.plan
    try:
        seen = report.seen = look(plan.config)
    except DartError as error:
        report.failed.setdefault("run", str(error))
        return
    problems = {
        "prompts": language_unnamed(plan.written, seen.prompt),
        "vllm.max_model_len": prompt_too_long(plan.written, made.plan if made else None, seen),
        "rewards": reward_constant(plan.written.env.suite, report.player.probed, seen.judged),
    }
    report.failed |= {name: text for name, text in problems.items() if text}


def _planned(report: Report) -> Planned | None:
    """Return the doctor's plan for the real sizes; its lines go into the report."""
    written = report.plan.written
    try:
        made = planned(written)
    except (ConfigError, ModelError) as error:
        report.doctor = {"plan": f"there is none: {error}"}
        return None
    if made is not None:
        report.doctor = made.lines(written, None)
    return made


def _write(report: Report) -> None:
    """Print the report and its line of JSON, and keep both in a file: a terminal may be closed."""
    width = shutil.get_terminal_size((WIDTH, 24)).columns
    last = json.dumps(report.as_json()) + "\n"
    with (report.plan.folder / "report.txt").open("w", encoding="utf-8") as file:
        report.show(Console(file=file, markup=False, highlight=False, width=width))
        file.write(last)
    report.show(Console(markup=False, highlight=False, width=width))
    sys.stdout.write(last)
    sys.stdout.flush()
