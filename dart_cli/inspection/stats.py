"""How much a run holds of everything: `dart data stats`.

count         the numbers
print_count   the same as tables
success_of    success of all or some of its trajectories
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from math import fsum

from rich.console import Console
from rich.table import Table

from bus.snapshot import JudgeView
from dart_cli.algo.trackers import Tracker
from dart_cli.data.exchange.transfer import run_id
from dart_cli.data.stall_rules import INVALID_SHARE, TELLING_INVALID
from dart_cli.data.store.reader import Reader
from dart_cli.data.store.rows import CountersRow, ReplayCounts
from dart_cli.inspection.find import run_dir_of
from dart_cli.inspection.text import Json
from dart_cli.runtime.tables import fraction, or_dash, page_table
from dart_cli.status.judges import judge_json, judge_lines

_MIB = 2**20


def count(reader: Reader) -> Json:
    """How much there is of everything, and the results by task."""
    counters = reader.counters()
    sizes = reader.sizes()
    pool: dict[str, dict[str, int]] = {}
    for member in reader.pool():
        sources = pool.setdefault(member.task_id, {})
        sources[member.source] = sources.get(member.source, 0) + 1
    return {
        "run": run_id(reader),
        "run_dir": str(run_dir_of(reader)),
        "trajectories": _summed(((t.state, t.reason), t.trajectories) for t in counters),
        "groups": _summed(reader.count("groups").items()),
        "tasks": {
            task: _fared([t for t in counters if t.task_id == task]) for task in _tasks(counters)
        },
        "expected": _expected(reader),
        "pool": pool,
        "batches": reader.total("batches"),
        "judges": [judge_json(judge) for judge in reader.judge_views()],
        "replays": asdict(reader.replay_counts()),
        "steps": sizes.steps,
        "tokens": sizes.tokens,
        "step_bytes": sizes.step_bytes,
        "screenshots": sizes.screenshots,
        "screenshot_bytes": sizes.screenshot_bytes,
        "disk_bytes": sizes.disk_bytes,
    }


def _expected(reader: Reader) -> dict[str, list[float]]:
    """Task -> the reward that its trackers expect of it, then at each step; nothing without trackers."""
    found: dict[str, list[float]] = {}
    for row in reader.trackers():  # by step, the whole task's first
        found.setdefault(row.task_id, []).append(Tracker(row.passed, row.failed).value)
    return found


def _tasks(counters: Sequence[CountersRow]) -> list[str]:
    return sorted({row.task_id for row in counters})


def _summed(counts: Iterable[tuple[tuple[str, str], int]]) -> list[Json]:
    """[{state, reason, number}], in the order of a trajectory's life."""
    sums: dict[tuple[str, str], int] = {}
    for key, number in counts:
        sums[key] = sums.get(key, 0) + number
    order = ("open", "leased", "playing", "finished", "ready", "batched", "trained", "dropped")
    return [
        {"state": state, "reason": reason, "number": number}
        for (state, reason), number in sorted(
            sums.items(), key=lambda item: (order.index(item[0][0]), -item[1])
        )
    ]


def _fared(counters: Sequence[CountersRow]) -> Json:
    by_outcome = dict.fromkeys(("pass", "fail", "invalid"), 0)
    steps = acting = 0
    for row in counters:
        if row.verdict is not None:
            by_outcome[row.verdict] += row.trajectories
            steps += row.steps
        if row.verdict == "invalid":
            acting += row.acted
    over = sum(by_outcome.values())
    return {
        "trajectories": sum(row.trajectories for row in counters),
        **by_outcome,
        "invalid_after_action": acting,
        "success": success_of(counters),
        "mean_reward": reward_of_counted(counters),
        "mean_steps": steps / over if over else None,
    }


def success_of(counters: Iterable[CountersRow]) -> float | None:
    """Share passed of the trajectories that count for success; None before the first."""
    passed = judged = 0
    for row in counters:
        judged += row.counted
        passed += row.counted if row.outcome == "pass" else 0
    return passed / judged if judged else None


def reward_of_counted(counters: Iterable[CountersRow]) -> float | None:
    """Mean reward of the trajectories that count for success; None before the first."""
    rows = [row for row in counters if row.counted]
    counted = sum(row.counted for row in rows)
    return fsum(row.rewards for row in rows) / counted if counted else None


def invalid_hint(counted: Json) -> list[str]:
    """A line for each task many of whose episodes are invalid, with the cure."""
    lines = []
    for task, fared in counted["tasks"].items():
        over = sum(fared[outcome] for outcome in ("pass", "fail", "invalid"))
        number = fared["invalid"]
        if number >= TELLING_INVALID and number > INVALID_SHARE * over:
            lines.append(
                f"{number} of {over} episodes of {task} are invalid, {fared['invalid_after_action']} of "
                f"them after an action, and none is trained on: `dart data ls {counted['run_dir']} "
                f"--outcome invalid --task {task}` lists them; fix the environment, or raise "
                "ActionCausedError where the policy's action breaks it (docs/environments/index.md)"
            )
    return lines


def print_count(console: Console, counted: Json) -> None:
    """The counts as tables."""
    for name in ("trajectories", "groups"):
        table = page_table(name, "state", "reason", "number", right=("number",))
        for row in counted[name]:
            table.add_row(row["state"], row["reason"] or "-", str(row["number"]))
        console.print(table)
    console.print(_task_table(counted))
    for line in invalid_hint(counted):
        console.print(line, style="yellow", soft_wrap=True)
    for judge in counted["judges"]:
        for line in judge_lines(JudgeView.model_validate(judge)):
            console.print(line, soft_wrap=True, markup=False)
    replays = ReplayCounts(**counted["replays"])
    if replays.replays or replays.refused:
        console.print(
            f"\n{replays.replays} of {replays.updates} updates trained on a batch again"
            + (f"; {words}" if (words := replays.refused_words) else ""),
            soft_wrap=True,
        )
    console.print(
        f"\n{counted['steps']} steps, {counted['tokens']} tokens of completions "
        f"({counted['step_bytes'] / _MIB:.1f} MiB); {counted['screenshots']} screenshots "
        f"({counted['screenshot_bytes'] / _MIB:.1f} MiB); {counted['batches']} batches; "
        f"{counted['disk_bytes'] / _MIB:.1f} MiB on disk"
    )


def _task_table(counted: Json) -> Table:
    tasks = counted["tasks"].values()
    reward = ("reward",) if any(t["mean_reward"] != t["success"] for t in tasks) else ()
    expected = ("expected",) if counted["expected"] else ()
    numbers = ("success", *reward, *expected, "pass", "fail", "invalid", "mean steps")
    table = page_table(f"tasks of {counted['run_dir']}", "task", *numbers, "pool", right=numbers)
    for task in sorted({*counted["tasks"], *counted["pool"]}):
        fared = counted["tasks"].get(task) or _fared([])
        pool = counted["pool"].get(task, {})
        table.add_row(
            task,
            fraction(fared["success"]),
            *((fraction(fared["mean_reward"]),) if reward else ()),
            *((fraction(counted["expected"].get(task, [None])[0]),) if expected else ()),
            *(str(fared[outcome]) for outcome in ("pass", "fail", "invalid")),
            or_dash(fared["mean_steps"], ".1f"),
            ", ".join(f"{number} {source}" for source, number in sorted(pool.items())) or "-",
        )
    return table
