"""One smoke test from plan to report: `dart up CONFIG --smoke-test`, `dart doctor CONFIG --smoke-test`.

run_smoke_test   plays the parts, prints the report, returns the exit code
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
from dart_cli.doctor.plan_findings import PlanOnHost, plan_on_host
from dart_cli.runtime.findings import error, error_of, exit_code
from dart_cli.runtime.role import end_with_parent, limit_threads
from dart_cli.runtime.streams import keep_going, say_error
from dart_cli.smoke_test.config_changes import plan_smoke_test
from dart_cli.smoke_test.interruption import Interruption, interruptible
from dart_cli.smoke_test.parts_player import ALWAYS, EPISODE, OPTIONAL, Player
from dart_cli.smoke_test.smoke_report import Report
from dart_cli.smoke_test.stored_run import find_problems, read_stored_run
from dart_cli.smoke_test.time_budget import MINUTES, TimeBudget

INTERRUPTED = 130
"""The exit code after a signal, the same as of `dart up`."""
REPORT_SHARE = 0.05
"""Share of the time that is reserved for the report."""
WIDTH = 100
"""Characters of a line if standard output is no terminal and COLUMNS is not set."""


def run_smoke_test(path: Path, overrides: list[str], minutes: float | None = None) -> int:
    """Play the smoke test of a TOML file within `minutes`, by default MINUTES, and print its report.

    Return 0 if every part that was played went well and all of ALWAYS were proved, 130 after a signal, else
    1. Raises UserError for a configuration that cannot be read, and as `plan_smoke_test` does.
    """
    started_s = time.time() - psutil.Process().create_time()
    budget = TimeBudget(60 * (minutes or MINUTES), started_s)
    end_with_parent()
    # The report is written even if the terminal is closed.
    keep_going()
    # The processes of the run share a few cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    limit_threads(1)
    report: Report | None = None
    try:
        with interruptible(budget.left_s - REPORT_SHARE * budget.seconds):
            plan = plan_smoke_test(path, overrides)
            player = Player(plan, budget)
            report = Report(plan, player)
            player.say(
                f"smoke test of {path} in {plan.folder}: {len(plan.changes)} keys are changed"
            )
            _play(report)
    except Interruption as interruption:
        if report is None:
            say_error(f"{interruption.why}, while it was planned: nothing was played")
            return DartError.exit_code if interruption.is_over else INTERRUPTED
        report.interruption = interruption
        report.player.say(f"{interruption.why}: all its processes have ended")
    _complete(report)
    _write(report)
    if report.interruption is not None and not report.interruption.is_over:
        return INTERRUPTED
    return exit_code(report.errors)


def _play(report: Report) -> None:
    """Play the parts in order. A part that fails ends the test, because the next one reads what it leaves."""
    for name, play in report.player.parts().items():
        report.player.say(name)
        report.part = name
        try:
            play()
        except DartError as fault:
            report.add(error_of(name, fault))
            if name != "verdicts":
                return
    report.part = ""


def _complete(report: Report) -> None:
    """Add to the report what was not played, the plan for the real sizes, and problems of the stored run."""
    player, interruption = report.player, report.interruption
    if interruption is not None:
        why = interruption.why
    else:
        why = f"{report.errors[0].subject if report.errors else 'the run'} failed"
    for part in (*ALWAYS, *OPTIONAL):
        if part not in player.proved:
            player.left_out.setdefault(part, why)
    missing = [part for part in ALWAYS if part in player.left_out]
    if interruption is not None and interruption.is_over and missing:
        report.add(
            error(
                "time",
                f"{player.budget.seconds / 60:g} minutes were over before {', '.join(missing)}",
                f"see {player.config.run.dir}/logs for what it waited for, and give it more with "
                f"--smoke-test-minutes {player.budget.seconds / 30:g}",
            )
        )
    plan = _plan_real_sizes(report)
    if EPISODE in player.proved:
        _read_run(report, plan)
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    report.seconds = player.budget.spent_s
    report.cpu_seconds = sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _read_run(report: Report, plan: PlanOnHost | None) -> None:
    """Add the stored run and its problems to the report."""
    try:
        run = report.run = read_stored_run(report.plan.config)
    except DartError as fault:
        if all(finding.subject != "run" for finding in report.errors):
            report.add(error_of("run", fault))
        return
    original, probes = report.plan.original, report.player.probes
    for problem in find_problems(original, plan.plan if plan else None, run, probes):
        report.add(problem)


def _plan_real_sizes(report: Report) -> PlanOnHost | None:
    """Return the doctor's plan for the real sizes, and add its lines to the report."""
    original = report.plan.original
    try:
        plan = plan_on_host(original)
    except (ConfigError, ModelError) as fault:
        report.doctor = {"plan": f"there is none: {fault}"}
        return None
    if plan is not None:
        report.doctor = plan.lines(original, None)
    return plan


def _write(report: Report) -> None:
    """Write the report and its line of JSON to a file and print both; a terminal may be closed by then."""
    width = shutil.get_terminal_size((WIDTH, 24)).columns
    last = json.dumps(report.as_json()) + "\n"
    with (report.plan.folder / "report.txt").open("w", encoding="utf-8") as file:
        report.show(Console(file=file, markup=False, highlight=False, width=width))
        file.write(last)
    report.show(Console(markup=False, highlight=False, width=width))
    sys.stdout.write(last)
    sys.stdout.flush()
