"""`dart env check`: probe every task of a suite, and print a table or JSON.

run_check      plays, prints, and returns the exit code: 0 if nothing needs fixing, 1 if something does; 128 +
               number if a signal stopped it, after printing what was played until then
Check          holds the episodes so far, reports on tasks, and prints the first failure of each kind at once
summary        makes the JSON object
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from bus.errors import DartError, TaskError, UserError
from dart_cli.config.schema import EnvConfig
from dart_cli.env.async_env import AsyncEnv
from dart_cli.env.calls import has_logged_tracebacks
from dart_cli.player.episodes import env_of_suite, in_slots
from dart_cli.runtime.background import in_daemon_thread, run_until_stopped
from dart_cli.runtime.options import read_options
from dart_cli.runtime.tables import page_table, progress
from dart_cli.runtime.waits import OpenWaits
from dart_cli.suite_check import CheckOptions
from dart_cli.suite_check.probes import ProbeEpisode, play_task, probes_of
from dart_cli.suite_check.task_report import MISTAKES, Bounds, TaskReport, report_on_task
from envs.contract.base import Task
from envs.contract.registry import check_options, check_parts, load_suite, make_env, select_tasks

_SLOT = re.compile(r"^check/[0-9]+: ")
"""The name of the environment that raised, in front of a reason."""

REMARKS = {
    "guessable": "guessable (random clicks pass in more than {guessable:.0%} of their episodes, 95 % sure)",
    "partial_passes": "passes with a reward below 1 (as they should, if the task has its own threshold)",
    "unproven": "unproven (no solution is known and no episode passed; prove with `dart env play` that each can "
    "be passed)",
    "fixed": "one fixed instance (all {seeds} seeds begin alike, so that `dart eval` plays what was trained on; keep "
    "some tasks apart by env.heldout)",
}
"""Field of TaskReport -> in words, a remark about tasks that is no mistake."""

MOST_LINES = 2
"""Most printed lines for one kind of mistake of one task; --json and --out have all."""


def run_check(options: CheckOptions) -> int:
    """Check a suite, or with `--classify` print what its tasks need, and return the exit code.

    Raises TaskError for an unknown suite, task or option, MissingPartError, UserError if `--out` cannot be
    written.
    """
    tasks = select_tasks(options.suite, options.tasks or ())
    if options.classify:
        _classify(options, tasks)
        return 0
    check, env = Check(options, tasks), env_of(options)
    check_options(options.suite, env.options)
    if not options.isolate:
        trial = _try_options(env, check.waits)
        if code := run_until_stopped(trial, check.waits, lambda: None):
            return code
    check_parts(options.suite, env.options, [task.id for task in tasks])
    errors = broken_files(options.suite)
    if not tasks and not errors:
        raise TaskError(f"suite {options.suite} has no task")
    with contextlib.ExitStack() as stack:
        bar = progress("probing", len(tasks) * check.episodes_each, "episodes")
        check.advance = stack.enter_context(bar)

        def print_stopped() -> None:
            stack.close()
            _report(options, check, errors)

        if code := run_until_stopped(check.play(), check.waits, print_stopped):
            return code
    return 0 if _report(options, check, errors)["ok"] else 1


def _report(options: CheckOptions, check: Check, errors: Sequence[str]) -> dict[str, Any]:
    """Print and write what was played so far, and return it as the JSON object."""
    reports = check.reports()
    result = summary(options, reports, errors)
    result["stopped"] = not check.is_over
    if not check.is_over:
        result |= {"ok": False, "waits": check.waits.lines()}
    if not options.as_json:
        _print(options, check, reports, errors)
    _write_json(options, result)
    return result


def env_of(options: CheckOptions) -> EnvConfig:
    """Return the section [env] that a run would have for these options."""
    env = env_of_suite(options.suite, read_options(options.options))
    return env.model_copy(update={"isolation": "process" if options.isolate else "thread"})


def bounds_of(options: CheckOptions) -> Bounds:
    """Return the limits beyond which a task is slow or guessable."""
    return Bounds(options.slow_step, options.slow_reset, options.guessable)


def _write_json(options: CheckOptions, result: Mapping[str, Any]) -> None:
    """Print the result if `--json` is given, and write it to the file of `--out`. Raises UserError."""
    if options.as_json:
        sys.stdout.write(f"{json.dumps(result)}\n")
    if options.out is not None:
        try:
            options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"--out {options.out}: cannot be written: {error.strerror}") from None


async def _try_options(env: EnvConfig, waits: OpenWaits) -> None:
    """Create an environment and close it, so that a refused option is reported only once."""
    deadline_s = env.reset_deadline_s
    try:
        with waits.waiting(f"suite {env.suite} to make an environment", deadline_s):
            async with asyncio.timeout(deadline_s):
                await in_daemon_thread(lambda: make_env(env.suite, **env.options).close())
    except TimeoutError:
        raise UserError(
            f"suite {env.suite} made no environment in {deadline_s:g} s; start what it needs in reset"
        ) from None
    except DartError:
        raise
    except (Exception, SystemExit) as error:
        text = f"{type(error).__name__}: {error}"
        raise UserError(f"suite {env.suite} makes no environment: {text}") from error


def broken_files(suite: str) -> list[str]:
    """Return the suite's errors about task files that it could not read."""
    return [str(error) for error in getattr(load_suite(suite), "errors", ())]


class Check:
    """A check of some tasks.

    Its reports can be read at any time from the same event loop, also while it plays.
    """

    def __init__(self, options: CheckOptions, tasks: Sequence[Task]) -> None:
        self.waits = OpenWaits()
        # Called with a number of episodes that ended.
        self.advance: Callable[[int], None] = lambda _: None
        self.tasks = tasks
        self.over: set[str] = set()  # ids of tasks that were played to the end
        self._options = options
        self._probes = probes_of(options.probes)
        self._waiting = deque(tasks)
        self._episodes: dict[str, list[ProbeEpisode]] = {}
        # Kinds of mistakes, and reasons of breaks, that were printed.
        self._printed: set[str] = set()

    @property
    def episodes_each(self) -> int:
        """The number of episodes that are planned for each task."""
        return self._options.seeds * len(self._probes)

    @property
    def is_over(self) -> bool:
        """Whether every task was played to its end."""
        return len(self.over) == len(self.tasks)

    async def play(self) -> None:
        """Play all tasks, in as many environments as the options say."""
        slots = min(self._options.slots, len(self.tasks))
        await in_slots(env_of(self._options), "check", slots, self._play_some, self.waits)

    def reports(self) -> list[TaskReport]:
        """Return a report for each task with at least one episode, in the order of the tasks."""
        return [self._report(task) for task in self.tasks if self._episodes.get(task.id)]

    def _report(self, task: Task) -> TaskReport:
        """Return the report of a task from its episodes so far."""
        episodes = self._episodes[task.id]
        return report_on_task(task, episodes, bounds_of(self._options), self.episodes_each)

    async def _play_some(self, env: AsyncEnv) -> None:
        """Play waiting tasks in one environment until there are none left."""
        while self._waiting:
            task = self._waiting.popleft()
            self._episodes[task.id] = []
            keep = functools.partial(self._add, task)
            episodes = await play_task(env, task, range(self._options.seeds), self._probes, keep)
            self.over.add(task.id)
            self.advance(self.episodes_each - len(episodes))
            self._print_first(self._report(task))

    def _add(self, task: Task, episode: ProbeEpisode) -> None:
        """Add an episode. Print the first break of a task at once, but each reason only once."""
        episodes = self._episodes[task.id]
        episodes.append(episode)
        if episode.is_broken and sum(other.is_broken for other in episodes) == 1:
            where = f"{task.id} breaks: seed {episode.seed}, {episode.probe}"
            self._print_once(_SLOT.sub("", episode.reason), f"{where}: {episode.reason}")
        self.advance(1)

    def _print_first(self, report: TaskReport) -> None:
        """Print the first mistake of each kind when its task is over."""
        for name, kind in MISTAKES.items():
            if name != "errors" and (lines := getattr(report, name)):
                self._print_once(name, f"{report.task_id} {kind}: {lines[0]}")

    def _print_once(self, key: str, line: str) -> None:
        """Print a line to standard error, unless one with the same key was printed."""
        if key not in self._printed:
            self._printed.add(key)
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()


def summary(
    options: CheckOptions, reports: Sequence[TaskReport], errors: Sequence[str]
) -> dict[str, Any]:
    """Return the JSON object: counts over the suite, ids of tasks with a remark, the report of each task."""
    return {
        "suite": options.suite,
        "ok": not errors and not any(report.wrong for report in reports),
        "tasks": len(reports),
        "seeds": options.seeds,
        "episodes": sum(report.episodes for report in reports),
        **{kind: sum(len(getattr(report, kind)) for report in reports) for kind in MISTAKES},
        "broken_files": list(errors),
        **{
            kind: [report.task_id for report in reports if getattr(report, kind)]
            for kind in ("wrong", "slow", "guessable", "partial_passes", "unproven", "fixed")
        },
        "no_oracle": [report.task_id for report in reports if report.oracle is None],
        "bounds": asdict(bounds_of(options)),
        "per_task": {report.task_id: report.as_json() for report in reports},
    }


# --- printing --------------------------------------------------------------------------------


def _print(
    options: CheckOptions, check: Check, reports: Sequence[TaskReport], errors: Sequence[str]
) -> None:
    """Print the table of tasks, then their mistakes and remarks, then the total."""
    console = Console(markup=False, highlight=False)
    numbers = ("false", "broken", "flaky", "oracle", "random", "reset", "step")
    title = f"probes of {options.suite}; times in ms, 95th percentile"
    table = page_table(title, "task", *numbers, right=numbers)
    table.columns[0].overflow = "fold"
    for column in table.columns[1:]:
        column.min_width = 6
    prefix = f"{load_suite(options.suite).name}/"
    for report in reports:
        table.add_row(
            # The title names the suite.
            report.task_id.removeprefix(prefix),
            _count(len(report.false_passes) + len(report.true_at_reset)),
            _count(len(report.errors)),
            _count(len(report.flaky)),
            _share(report.oracle),
            _share(report.random),
            _ms(report.reset_p95_s),
            _ms(report.step_p95_s),
            style="red" if report.wrong else "",
        )
    if reports:
        console.print(table)
    for line in errors:
        console.print(f"cannot be read: {line}", soft_wrap=True)
    for line in _broken(reports):
        console.print(line, soft_wrap=True)
    if has_logged_tracebacks():
        console.print("tracebacks are above, on standard error, one for each place that raises")
    for report in reports:
        for name, kind in MISTAKES.items():
            # Errors are printed above, over all tasks.
            lines = getattr(report, name) if name != "errors" else []
            for line in lines[:MOST_LINES]:
                console.print(f"{report.task_id} {kind}: {line}", soft_wrap=True)
            if len(lines) > MOST_LINES:
                console.print(f"{report.task_id} {kind}: {len(lines) - MOST_LINES} times more")
        for line in report.slow:
            console.print(f"{report.task_id} is slow: {line}", soft_wrap=True)
    for kind, remark in REMARKS.items():
        if task_ids := [report.task_id for report in reports if getattr(report, kind)]:
            line = remark.format(guessable=options.guessable, seeds=options.seeds)
            is_all = len(task_ids) == len(reports) > 1
            names = f"all {len(reports)} tasks" if is_all else ", ".join(task_ids)
            console.print(f"{line}: {names}", soft_wrap=True)
    for line in _not_played(check, reports):
        console.print(line, soft_wrap=True)
    wrong = sum(report.wrong for report in reports)
    so_far = "" if check.is_over else " so far"
    console.print(
        f"{_number(len(reports), 'task')}, "
        f"{_number(sum(report.episodes for report in reports), 'episode')}: "
        + (f"{wrong} to fix" if wrong or errors else f"nothing to fix{so_far}")
        + (f", {len(errors)} files cannot be read" if errors else "")
    )


def _not_played(check: Check, reports: Sequence[TaskReport]) -> Iterator[str]:
    """Yield a line that says why fewer episodes were played than planned; yield nothing if all were."""
    short = [report for report in reports if report.left_out]
    if not check.is_over:
        yield f"stopped: {len(check.over)} of {_number(len(check.tasks), 'task')} played to the end"
    elif short:
        left_out = _number(sum(report.left_out for report in short), "episode")
        yield f"not played: {left_out} of {_number(len(short), 'task')}, whose first one broke"


def _broken(reports: Sequence[TaskReport]) -> list[str]:
    """Return a line for each error that broke episodes, with their number and the first of them."""
    breaks: dict[str, list[tuple[str, str]]] = {}
    for report in reports:
        for line in report.errors:
            episode, _, reason = line.partition(": ")
            breaks.setdefault(_SLOT.sub("", reason), []).append((report.task_id, episode))
    return [
        f"breaks: {reason} ({_number(len(episodes), 'episode')} of "
        f"{_number(len({task_id for task_id, _ in episodes}), 'task')}, first {', '.join(episodes[0])})"
        for reason, episodes in breaks.items()
    ]


def _number(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _count(number: int) -> str:
    """Return a number; a dash for 0."""
    return str(number) if number else "-"


def _share(counts: tuple[int, int] | None) -> str:
    """Return (passed, played) as text: `3/5`; a dash if nothing was played."""
    return "-" if counts is None or not counts[1] else f"{counts[0]}/{counts[1]}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.{1 if seconds < 1 else 0}f}"


def _classify(options: CheckOptions, tasks: Sequence[Task]) -> None:
    """Print what the tasks need, without playing any.

    Raises UserError if the suite has no such information.
    """
    classify = getattr(load_suite(options.suite), "classify", None)
    if classify is None:
        raise UserError(
            f"suite {options.suite} cannot tell what its tasks need; --classify is for osworld and osworld:FOLDER"
        )
    needs: dict[str, Any] = classify([task.id for task in tasks])
    _write_json(options, needs)
    if options.as_json:
        return
    console = Console()
    table = page_table(
        f"{needs['tasks']} tasks of {options.suite}", "what", "tasks", right=("tasks",)
    )
    for kind, number in needs["kinds"].items():
        table.add_row(kind, str(number))
    table.add_section()
    for name in ("set_up", "evaluated_by", "accounts"):
        for value, number in needs[name].items():
            table.add_row(f"{name.replace('_', '-')}: {value}", str(number))
    table.add_row("fetches files before the episode", str(needs["fetches"]))
    table.add_row("opens web sites", str(needs["visits"]))
    table.add_row("asks for a proxy", str(needs["proxy"]))
    console.print(table)
