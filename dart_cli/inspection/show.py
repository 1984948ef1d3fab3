"""What a run's database holds, for a person or as JSON: `dart data ls`, `show` and `stats`.

    find_run       a configuration file, a run directory, or nothing -> the run that is meant
    check_tasks    whether the run has such tasks
    find_subject   a trajectory by its id, of the run or of its pool; else the nearest cure
    Listing        which trajectories `ls` lists; `list_trajectories` and `list_pool` find them
    show           one trajectory: its steps, times and verdict, and its film as a picture
    count          what there is of everything

Everything here reads beside a live `dart data` and disturbs nothing. A function without a console
gives plain JSON values; one with a console prints the same as a person reads it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from bus.errors import RunDirectoryError, UserError
from bus.messages import Outcome
from dart_cli.config.schema import load_config, refuse_overrides
from dart_cli.data.exchange.transfer import run_id
from dart_cli.data.groups import group_id
from dart_cli.data.store.rows import (
    CountersRow,
    GroupRow,
    PoolRow,
    SampleRow,
    StepRow,
    TrajectoryRow,
    TrajectoryState,
)
from dart_cli.data.store.writer import DATABASE, Reader
from dart_cli.runtime.tables import page_table
from dart_cli.status.page import fraction
from envs.registry import did_you_mean

Json = dict[str, Any]

STATES: tuple[TrajectoryState, ...] = (
    *("leased", "playing", "finished"),
    *("batched", "trained", "dropped"),
)
RUNS = Path("runs")
"""Where a run is looked for that nobody named."""

_MIB = 2**20
_GROUP_ID = re.compile(r"g?(\d+)(?:-\d*)?")


# --- which run, which trajectory ------------------------------------------------------------


def find_run(target: Path | None, overrides: Sequence[str] = ()) -> Path:
    """The run directory of a configuration file, or `target` itself if it is a directory.

    Without a target it is the run below `runs` that was written to last. Raises ConfigError,
    RunDirectoryError.
    """
    if target is None:
        target = _newest_run()
    if target.is_dir():
        refuse_overrides(target, overrides)
        if not (target / DATABASE).is_file():
            raise RunDirectoryError(
                f"{target}: no run in it, {DATABASE} is missing; name a run directory that "
                "`dart data` or `dart up` made, or the TOML file of the run"
            )
        return target
    run_dir = load_config(target, list(overrides)).run.dir
    if not (run_dir / DATABASE).is_file():
        raise RunDirectoryError(
            f"no run in {run_dir} yet (run.dir of {target}); start one with `dart up {target}`"
        )
    return run_dir


def _newest_run() -> Path:
    found = [path.parent for path in RUNS.glob(f"*/{DATABASE}")]
    if not found:
        raise RunDirectoryError(
            f"no run below {RUNS}; name the one you mean: a run directory or its TOML file"
        )
    return max(found, key=_written_at)


def _written_at(run_dir: Path) -> float:
    """When a run was last written to: who only reads leaves an empty log beside its database."""
    times = [0.0]
    for name in (DATABASE, f"{DATABASE}-wal"):
        with suppress(OSError):
            found = (run_dir / name).stat()
            if found.st_size or name == DATABASE:
                times.append(found.st_mtime)
    return max(times)


@dataclass(frozen=True)
class Subject:
    """A trajectory of the run, a member of its pool, or both."""

    id: str
    trajectory: TrajectoryRow | None  # None where it came from outside
    group: GroupRow | None
    pool: PoolRow | None

    @property
    def suite(self) -> str:
        """Where its task is from."""
        row = self.group or self.pool
        assert row is not None
        return row.suite

    @property
    def task_id(self) -> str:
        """What it played."""
        row = self.group or self.pool
        assert row is not None
        return row.task_id

    @property
    def task_seed(self) -> int:
        """Of which instance."""
        row = self.group or self.pool
        assert row is not None
        return row.task_seed


def find_subject(reader: Reader, name: str) -> Subject:
    """The trajectory called `name`; the id of a pool member may be cut short where it stays clear.

    Raises UserError with the nearest cure.
    """
    if trajectory := reader.trajectory(name):
        group = reader.groups_by_id([trajectory.group_id])[trajectory.group_id]
        return Subject(name, trajectory, group, reader.pool_member(name))
    if name.startswith("x"):
        members = [row for row in reader.pool(evicted=True) if row.trajectory_id.startswith(name)]
        if len(members) == 1:
            return Subject(members[0].trajectory_id, None, None, members[0])
        many = f"{len(members)} of its members begin with it, write more of the id"
        none = "`dart data ls --pool` lists its members"
        raise UserError(f"no pool member {name!r} in {_place(reader)}; {many if members else none}")
    raise UserError(f"no trajectory {name!r} in {_place(reader)}; {_nearest(reader, name)}")


def check_tasks(reader: Reader, names: Iterable[str]) -> None:
    """Raise UserError for a task that neither the run nor its pool has."""
    known = {task_id for _, task_id in reader.instructions()}
    known |= {row.task_id for row in reader.pool(evicted=True)}
    for name in names:
        if name not in known:
            raise UserError(
                f"--task {name}: {_place(reader)} has no such task{did_you_mean(name, known)}; "
                "`dart data stats` lists those it has"
            )


def _place(reader: Reader) -> Path:
    return reader.path.parent


def _nearest(reader: Reader, name: str) -> str:
    """What to write instead of a trajectory's id that is none."""
    newest = reader.newest_group()
    if not newest:
        return "nothing was played in it yet"
    found = _GROUP_ID.fullmatch(name)
    if found is None:
        return f"ids look like {group_id(newest)}-00; `dart data ls {_place(reader)}` lists them"
    wanted = group_id(int(found[1]))
    members = [row.id for row in reader.trajectories(group_ids=[wanted])]
    if members:
        return f"group {wanted} has {members[0]} to {members[-1]}"
    return f"its groups go from {group_id(1)} to {group_id(newest)}"


# --- ls -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Listing:
    """Which trajectories are listed: those that fit all that is given, of very many the newest."""

    task: str | None = None
    outcome: Outcome | None = None
    state: TrajectoryState | None = None
    reason: str | None = None
    limit: int = 50


def list_trajectories(reader: Reader, wanted: Listing) -> list[Json]:
    """The trajectories, oldest first; one more than `limit` tells that there are others."""
    rows = reader.trajectories(
        task_id=wanted.task,
        outcome=wanted.outcome,
        state=wanted.state,
        reason=wanted.reason,
        limit=wanted.limit + 1,
    )
    groups = reader.groups_by_id(row.group_id for row in rows)
    return [_as_json(row, groups[row.group_id]) for row in rows]


def _as_json(row: TrajectoryRow, group: GroupRow) -> Json:
    return {
        "id": row.id,
        "task": group.task_id,
        "seed": group.task_seed,
        "state": row.state,
        "reason": row.reason,
        "outcome": row.outcome,
        "verdict": row.verdict_reason,
        "stop_reason": row.stop_reason,
        "steps": row.steps,
        "oldest_version": row.oldest_version,
        "newest_version": row.newest_version,
        "batch": row.batch_id,
        "worker": row.worker,
        "leased_at": row.leased_at,
        "ended_at": row.ended_at,
        "wall_s": row.wall_s,
    }


def print_trajectories(console: Console, reader: Reader, rows: list[Json], limit: int) -> None:
    """The list as a table; what was cut off is told below it."""
    right = ("steps", "version", "seconds")
    columns = ("trajectory", "task", "state", "outcome", "steps", "version", "seconds")
    table = page_table(str(_place(reader)), *columns, right=right)
    shown = rows[-limit:]
    for row in shown:
        where = f" {row['reason']}" if row["reason"] else ""
        table.add_row(
            row["id"],
            row["task"],
            f"{row['state']}{where}" + (f" in {row['batch']}" if row["batch"] else ""),
            row["outcome"] or "-",
            _or_dash(row["steps"]),
            versions(row["oldest_version"], row["newest_version"]),
            _seconds(row["wall_s"]),
        )
    console.print(table)
    if len(rows) > len(shown):
        console.print(f"the newest {limit} that fit; --limit shows more")
    if not rows:
        console.print("no trajectory fits")


def list_pool(reader: Reader, task: str | None, limit: int) -> list[Json]:
    """Members of the experience pool, those it no longer has among them; the newest last."""
    return [asdict(row) for row in reader.pool(task_id=task, evicted=True)][-limit - 1 :]


def print_pool(console: Console, reader: Reader, rows: list[Json], limit: int) -> None:
    """The pool's members as a table."""
    columns = ("trajectory", "task", "source", "steps", "log-probs", "used", "origin", "since")
    table = page_table(f"pool of {_place(reader)}", *columns, right=("steps", "used"))
    for row in rows[-limit:]:
        table.add_row(
            row["trajectory_id"][:13],
            row["task_id"],
            row["source"],
            str(row["steps"]),
            "known" if row["known"] else "unknown",
            str(row["used"]),
            row["origin"] or "-",
            "evicted" if row["evicted_at"] else moment(row["added_at"]),
        )
    console.print(table)
    if len(rows) > limit:
        console.print(f"the newest {limit} that fit; --limit shows more")
    if not rows:
        console.print("the pool is empty; `dart data collect` and `dart data import` fill it")


# --- show -----------------------------------------------------------------------------------


def show(reader: Reader, subject: Subject) -> Json:
    """All of one trajectory but its tokens and images."""
    used = {row.step: row for row in reader.sample_rows(subject.id)}
    steps = reader.steps(subject.id)
    trajectory, group = subject.trajectory, subject.group
    return {
        **({} if trajectory is None or group is None else _as_json(trajectory, group)),
        "id": subject.id,
        "task": subject.task_id,
        "seed": subject.task_seed,
        "instruction": reader.instruction(subject.suite, subject.task_id, [subject.id]),
        "pool": None if subject.pool is None else asdict(subject.pool),
        "trajectory_steps": [_step_json(step, used.get(step.step)) for step in steps],
    }


def _step_json(step: StepRow, sample: SampleRow | None) -> Json:
    return {
        "step": step.step,
        "text": step.text,
        "action": step.action,
        "error": step.error,
        "prompt_tokens": len(step.prompt_token_ids),
        "tokens": len(step.token_ids),
        "logprob": _mean(step.behaviour_logprobs),
        "entropy": _mean(step.entropies),
        "versions": sorted({span.version for span in step.version_spans}),
        "model_s": step.model_s,
        "env_s": step.env_s,
        "worker": step.worker,
        "at": step.at,
        "screenshot": step.screenshot,
        "weight": None if sample is None else sample.weight,
        "advantage": None if sample is None else sample.advantage,
        "reason": None if sample is None else sample.reason,
        "gap_mean": None if sample is None else sample.gap_mean,
        "gap_largest": None if sample is None else sample.gap_largest,
    }


def print_show(console: Console, reader: Reader, subject: Subject, shown: Json) -> None:
    """One trajectory as a page."""
    console.print(f"{shown['id']}  {shown['task']}, seed {shown['seed']}  ({_place(reader)})")
    if shown["instruction"]:
        console.print(f'  "{shown["instruction"]}"', soft_wrap=True)
    for line in _headlines(shown):
        console.print(f"  {line}")
    columns = ("step", "text", "action", "log-prob", "entropy", "model s", "env s", "trained")
    right = ("step", "log-prob", "entropy", "model s", "env s")
    table = page_table("steps", *columns, right=right)
    for step in shown["trajectory_steps"]:
        table.add_row(
            str(step["step"]),
            step["text"],
            action_words(step["action"]) if step["action"] else f"none: {step['error']}",
            _or_dash(step["logprob"], ".3f"),
            _or_dash(step["entropy"], ".3f"),
            f"{step['model_s']:.3f}",
            f"{step['env_s']:.3f}",
            _trained(step),
        )
    console.print(table)
    if subject.trajectory is not None:
        console.print(f"its story: dart data why {subject.id} --run {_place(reader)}")


def _headlines(shown: Json) -> list[str]:
    lines = []
    if "state" in shown:
        dropped = f" ({shown['reason']})" if shown["reason"] else ""
        batch = f", batch {shown['batch']}" if shown["batch"] is not None else ""
        lines.append(
            f"{shown['state']}{dropped}{batch}; {versions_words(shown['oldest_version'], shown['newest_version'])}; "
            f"leased {moment(shown['leased_at'])} by {shown['worker']}"
        )
        if shown["outcome"]:
            lines.append(
                f"{shown['outcome']} after {shown['steps']} steps and {_seconds(shown['wall_s'])} s: "
                f"{shown['verdict']} (stopped: {shown['stop_reason']})"
            )
    if pool := shown["pool"]:
        known = "known" if pool["known"] else "unknown"
        lines.append(
            f"in the pool since {moment(pool['added_at'])}, source {pool['source']}, "
            f"{pool['steps']} steps, log-probabilities {known}, used in {pool['used']} batches"
        )
    return lines


def action_words(action: Json) -> str:
    """An action as one short line: `click 77,46`, `type text hello`."""
    rest = {key: value for key, value in action.items() if key not in ("kind", "x", "y")}
    if rest.get("button") == "left":
        del rest["button"]
    place = f" {action['x']},{action['y']}" if "x" in action and "y" in action else ""
    return f"{action.get('kind', '?')}{place}" + "".join(
        f" {key} {value}" for key, value in rest.items()
    )


def _trained(step: Json) -> str:
    if step["weight"] is None:
        return "-"
    if step["weight"] == 0:
        return f"left out: {step['reason']}"
    return f"advantage {step['advantage']:+.2f}" + (
        "" if step["weight"] == 1 else f", weight {step['weight']:.3g}"
    )


# --- stats ----------------------------------------------------------------------------------


def count(reader: Reader) -> Json:
    """How much there is of everything, and how the tasks fare."""
    tallies = reader.tallies()
    sizes = reader.sizes()
    pool: dict[str, dict[str, int]] = {}
    for member in reader.pool():
        sources = pool.setdefault(member.task_id, {})
        sources[member.source] = sources.get(member.source, 0) + 1
    return {
        "run": run_id(reader),
        "run_dir": str(_place(reader)),
        "trajectories": _summed(((t.state, t.reason), t.trajectories) for t in tallies),
        "groups": _summed(reader.count("groups").items()),
        "tasks": {
            task: _fared([t for t in tallies if t.task_id == task]) for task in _tasks(tallies)
        },
        "pool": pool,
        "batches": reader.total("batches"),
        "steps": sizes.steps,
        "tokens": sizes.tokens,
        "step_bytes": sizes.step_bytes,
        "screenshots": sizes.screenshots,
        "screenshot_bytes": sizes.screenshot_bytes,
        "disk_bytes": sizes.disk_bytes,
    }


def _tasks(tallies: Sequence[CountersRow]) -> list[str]:
    return sorted({tally.task_id for tally in tallies})


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


def _fared(tallies: Sequence[CountersRow]) -> Json:
    by_outcome = dict.fromkeys(("pass", "fail", "invalid"), 0)
    steps = 0
    for tally in tallies:
        if tally.outcome is not None:
            by_outcome[tally.outcome] += tally.trajectories
            steps += tally.steps
    judged = by_outcome["pass"] + by_outcome["fail"]
    over = judged + by_outcome["invalid"]
    return {
        "trajectories": sum(tally.trajectories for tally in tallies),
        **by_outcome,
        "success": by_outcome["pass"] / judged if judged else None,
        "mean_steps": steps / over if over else None,
    }


def print_count(console: Console, counted: Json) -> None:
    """The counts as tables."""
    for name in ("trajectories", "groups"):
        table = page_table(name, "state", "reason", "number", right=("number",))
        for row in counted[name]:
            table.add_row(row["state"], row["reason"] or "-", str(row["number"]))
        console.print(table)
    console.print(_task_table(counted))
    console.print(
        f"\n{counted['steps']} steps, {counted['tokens']} tokens of completions "
        f"({counted['step_bytes'] / _MIB:.1f} MiB); {counted['screenshots']} screenshots "
        f"({counted['screenshot_bytes'] / _MIB:.1f} MiB); {counted['batches']} batches; "
        f"{counted['disk_bytes'] / _MIB:.1f} MiB on disk"
    )


def _task_table(counted: Json) -> Table:
    numbers = ("success", "pass", "fail", "invalid", "mean steps")
    table = page_table(f"tasks of {counted['run_dir']}", "task", *numbers, "pool", right=numbers)
    for task in sorted({*counted["tasks"], *counted["pool"]}):
        fared = counted["tasks"].get(task) or _fared([])
        pool = counted["pool"].get(task, {})
        table.add_row(
            task,
            fraction(fared["success"]),
            *(str(fared[outcome]) for outcome in ("pass", "fail", "invalid")),
            _or_dash(fared["mean_steps"], ".1f"),
            ", ".join(f"{number} {source}" for source, number in sorted(pool.items())) or "-",
        )
    return table


# --- words ----------------------------------------------------------------------------------


def versions(oldest: int | None, newest: int | None) -> str:
    """`3`, `3-5`, or a dash."""
    if oldest is None or newest is None:
        return "-"
    return str(oldest) if oldest == newest else f"{oldest}-{newest}"


def versions_words(oldest: int | None, newest: int | None) -> str:
    """Which weights sampled a trajectory, in words."""
    if oldest is None or newest is None:
        return "no token sampled yet"
    return f"sampled by weights v{oldest}" + ("" if oldest == newest else f" to v{newest}")


def moment(at: float) -> str:
    """A moment in local time, to the second."""
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _or_dash(value: float | None, form: str = "") -> str:
    return "-" if value is None else format(value, form)
