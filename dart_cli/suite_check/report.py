"""`dart env check`: probes every task of a suite, prints a table or JSON.

run_check      plays, prints, returns the exit code: 0 where nothing needs fixing, else 1; where a
               signal stopped it 128 and its number, after printing what was played until then
Check          the episodes so far: reports of their tasks, and the first failure of each kind at once
summary        the JSON object
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
from dart_cli.suite_check.findings import MISTAKES, Bounds, TaskReport, judge
from dart_cli.suite_check.probes import Probed, play_task, probes_of
from envs.contract.base import Task
from envs.contract.registry import check_options, check_parts, load_suite, make_env, select_tasks

_SLOT = re.compile(r"^check/[0-9]+: ")
"""Which environment it was that raised."""

REMARKS = {
    "guessable": "guessable (random clicks pass in more than {guessable:.0%} of their episodes, 95 % sure)",
    "partial_passes": "passes with a reward below 1 (as they should, where a task has a threshold of its own)",
    "unproven": "unproven (no solution is known and no episode passed; show by `dart env play` that each can be "
    "passed)",
}
"""What is told of tasks without being a mistake."""

MOST_LINES = 2
"""Lines printed for one kind of mistake of one task; --json and --out hold all."""


def run_check(options: CheckOptions) -> int:
    """Check a suite, or tell what its tasks need; returns the exit code.

    Raises TaskError for an unknown suite, task or option, MissingPartError, UserError where `--out`
    cannot be written.
    """
    tasks = select_tasks(options.suite, options.tasks or ())
    if options.classify:
        _classify(options, tasks)
        return 0
    check, env = Check(options, tasks), env_of(options)
    check_options(options.suite, env.options)
    if not options.isolate:
        trial = _try_options(env, check.waits)
        if stopped := run_until_stopped(trial, check.waits, lambda: None):
            return stopped
    check_parts(options.suite, env.options, [task.id for task in tasks])
    errors = broken_files(options.suite)
    if not tasks and not errors:
        raise TaskError(f"suite {options.suite} has no task")
    with contextlib.ExitStack() as shown:
        bar = progress("probing", len(tasks) * check.episodes_each, "episodes")
        check.advance = shown.enter_context(bar)

        def print_stopped() -> None:
            shown.close()
            _report(options, check, errors)

        if stopped := run_until_stopped(check.play(), check.waits, print_stopped):
            return stopped
    return 0 if _report(options, check, errors)["ok"] else 1


def _report(options: CheckOptions, check: Check, errors: Sequence[str]) -> dict[str, Any]:
    """Print and keep what was played so far; returns it as the JSON object."""
    reports = check.reports()
    result = summary(options, reports, errors)
    result["stopped"] = not check.is_over
    if not check.is_over:
        result |= {"ok": False, "waits": check.waits.lines()}
    if not options.as_json:
        _print(options, check, reports, errors)
    _keep(options, result)
    return result


def env_of(options: CheckOptions) -> EnvConfig:
    """Return the environments, as a run would have them."""
    env = env_of_suite(options.suite, read_options(options.options))
    return env.model_copy(update={"isolation": "process" if options.isolate else "thread"})


def bounds_of(options: CheckOptions) -> Bounds:
    """Return what counts as slow, and as guessable."""
    return Bounds(options.slow_step, options.slow_reset, options.guessable)


def _keep(options: CheckOptions, found: Mapping[str, Any]) -> None:
    """Print with --json, and write --out."""
    if options.as_json:
        sys.stdout.write(f"{json.dumps(found)}\n")
    if options.out is not None:
        try:
            options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"--out {options.out}: cannot be written: {error.strerror}") from None


async def _try_options(env: EnvConfig, waits: OpenWaits) -> None:
    """Make an environment and close it: a refused value is reported once, not for each task."""
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
    """Return the suite's errors for tasks that it could not read; most suites have none."""
    return [str(error) for error in getattr(load_suite(suite), "errors", ())]


class Check:
    """A check of some tasks as it goes on. Its reports may be read at any time from the same event loop."""

    def __init__(self, options: CheckOptions, tasks: Sequence[Task]) -> None:
        self.waits = OpenWaits()
        self.advance: Callable[[int], None] = lambda _: None  # called with so many episodes
        self.tasks = tasks
        self.over: set[str] = set()  # ids of those that were played to the end
        self._options = options
        self._probes = probes_of(options.probes)
        self._waiting = deque(tasks)
        self._episodes: dict[str, list[Probed]] = {}
        self._said: set[str] = set()  # kinds of mistakes, and what broke

    @property
    def episodes_each(self) -> int:
        """Return how many episodes of each task are planned."""
        return self._options.seeds * len(self._probes)

    @property
    def is_over(self) -> bool:
        """Return True if every task was played to its end."""
        return len(self.over) == len(self.tasks)

    async def play(self) -> None:
        """Play all tasks, in so many environments as the options say."""
        slots = min(self._options.slots, len(self.tasks))
        await in_slots(env_of(self._options), "check", slots, self._play_some, self.waits)

    def reports(self) -> list[TaskReport]:
        """Return a report for each task of which an episode is over, in their order."""
        return [self._report(task) for task in self.tasks if self._episodes.get(task.id)]

    def _report(self, task: Task) -> TaskReport:
        episodes = self._episodes[task.id]
        return judge(task, episodes, bounds_of(self._options), self.episodes_each)

    async def _play_some(self, env: AsyncEnv) -> None:
        while self._waiting:
            task = self._waiting.popleft()
            self._episodes[task.id] = []
            keep = functools.partial(self._keep, task)
            played = await play_task(env, task, range(self._options.seeds), self._probes, keep)
            self.over.add(task.id)
            self.advance(self.episodes_each - len(played))
            self._say_first(self._report(task))

    def _keep(self, task: Task, episode: Probed) -> None:
        """Note an episode; the first break of a task is said at once, each reason only once."""
        episodes = self._episodes[task.id]
        episodes.append(episode)
        if episode.is_broken and sum(each.is_broken for each in episodes) == 1:
            where = f"{task.id} breaks: seed {episode.seed}, {episode.probe}"
            self._say(_SLOT.sub("", episode.reason), f"{where}: {episode.reason}")
        self.advance(1)

    def _say_first(self, report: TaskReport) -> None:
        """Say the first mistake of each kind as its task is over."""
        for name, kind in MISTAKES.items():
            if name != "errors" and (lines := getattr(report, name)):
                self._say(name, f"{report.task_id} {kind}: {lines[0]}")

    def _say(self, what: str, line: str) -> None:
        if what not in self._said:
            self._said.add(what)
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()


def summary(
    options: CheckOptions, reports: Sequence[TaskReport], errors: Sequence[str]
) -> dict[str, Any]:
    """Return what was found: counts over the suite, ids of tasks with a remark, each task."""
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
            for kind in ("wrong", "slow", "guessable", "partial_passes", "unproven")
        },
        "no_oracle": [report.task_id for report in reports if report.oracle is None],
        "bounds": asdict(bounds_of(options)),
        "per_task": {report.task_id: report.as_json() for report in reports},
    }


# --- printing --------------------------------------------------------------------------------


def _print(
    options: CheckOptions, check: Check, reports: Sequence[TaskReport], errors: Sequence[str]
) -> None:
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
            report.task_id.removeprefix(prefix),  # the title names the suite
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
        console.print("tracebacks: above, on standard error, one for each place that raises")
    for report in reports:
        for name, kind in MISTAKES.items():
            found = (
                getattr(report, name) if name != "errors" else []
            )  # told by error, over all tasks
            for line in found[:MOST_LINES]:
                console.print(f"{report.task_id} {kind}: {line}", soft_wrap=True)
            if len(found) > MOST_LINES:
                console.print(f"{report.task_id} {kind}: {len(found) - MOST_LINES} times more")
        for line in report.slow:
            console.print(f"{report.task_id} is slow: {line}", soft_wrap=True)
    for kind, told in REMARKS.items():
        if found := [report.task_id for report in reports if getattr(report, kind)]:
            line = told.format(guessable=options.guessable)
            console.print(f"{line}: {', '.join(found)}", soft_wrap=True)
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
    """Yield why there are fewer episodes than were planned."""
    short = [report for report in reports if report.left_out]
    if not check.is_over:
        yield f"stopped: {len(check.over)} of {_number(len(check.tasks), 'task')} played to the end"
    elif short:
        left_out = _number(sum(report.left_out for report in short), "episode")
        yield f"not played: {left_out} of {_number(len(short), 'task')}, whose first one broke"


def _broken(reports: Sequence[TaskReport]) -> list[str]:
    """One line for each error that broke episodes, with their number and the first."""
    found: dict[str, list[tuple[str, str]]] = {}
    for report in reports:
        for line in report.errors:
            episode, _, reason = line.partition(": ")
            found.setdefault(_SLOT.sub("", reason), []).append((report.task_id, episode))
    return [
        f"breaks: {reason} ({_number(len(episodes), 'episode')} of "
        f"{_number(len({task_id for task_id, _ in episodes}), 'task')}, first {', '.join(episodes[0])})"
        for reason, episodes in found.items()
    ]


def _number(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _count(number: int) -> str:
    return str(number) if number else "-"


def _share(found: tuple[int, int] | None) -> str:
    return "-" if found is None or not found[1] else f"{found[0]}/{found[1]}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.{1 if seconds < 1 else 0}f}"


def _classify(options: CheckOptions, tasks: Sequence[Task]) -> None:
    """Tell what the tasks need, without playing any. Raises UserError where the suite cannot tell."""
    classify = getattr(load_suite(options.suite), "classify", None)
    if classify is None:
        raise UserError(
            f"suite {options.suite} cannot tell what its tasks need; --classify is for osworld and osworld:FOLDER"
        )
    found: dict[str, Any] = classify([task.id for task in tasks])
    _keep(options, found)
    if options.as_json:
        return
    console = Console()
    table = page_table(
        f"{found['tasks']} tasks of {options.suite}", "what", "tasks", right=("tasks",)
    )
    for kind, number in found["kinds"].items():
        table.add_row(kind, str(number))
    table.add_section()
    for name in ("set_up", "evaluated_by", "accounts"):
        for value, number in found[name].items():
            table.add_row(f"{name.replace('_', ' ')}: {value}", str(number))
    table.add_row("fetches files before the episode", str(found["fetches"]))
    table.add_row("opens web sites", str(found["visits"]))
    table.add_row("asks for a proxy", str(found["proxy"]))
    console.print(table)
