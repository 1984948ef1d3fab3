"""Which trajectories of a run, or of its pool, there are: `dart data ls`.

Listing                                  which trajectories are listed
list_trajectories, print_trajectories    those of the run
left_out_note                            how many cancelled ones are left out
list_pool, print_pool                    those of its experience pool
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from rich.console import Console

from bus.messages import Outcome
from dart_cli.data.store.reader import Reader
from dart_cli.data.store.rows import GroupRow, TrajectoryRow, TrajectoryState
from dart_cli.inspection.find import run_dir_of
from dart_cli.inspection.text import Json, seconds
from dart_cli.runtime.tables import moment, or_dash, page_table, verdict_words, versions

STATES: tuple[TrajectoryState, ...] = (
    *("leased", "playing", "finished"),
    *("batched", "trained", "dropped"),
)

CANCELLED = "cancelled"
"""The reason of a trajectory that the end of the run, or of its lease, cut off."""


@dataclass(frozen=True)
class Listing:
    """Which trajectories are listed: the newest `limit` of those that match every given field.

    Those that were cancelled only where `state`, `outcome` or `reason` asks for them.
    """

    task: str | None = None
    outcome: Outcome | None = None
    state: TrajectoryState | None = None
    reason: str | None = None
    limit: int = 50

    @property
    def leaves_out_cancelled(self) -> bool:
        """Whether those that the end of the run or of a lease cut off are left out: no state is asked for."""
        return not (self.state or self.reason or self.outcome)


def list_trajectories(reader: Reader, wanted: Listing) -> list[Json]:
    """The trajectories, oldest first; one more than `limit` if there are others."""
    rows = reader.trajectories(
        task_id=wanted.task,
        outcome=wanted.outcome,
        state=wanted.state,
        reason=wanted.reason,
        but_reason=CANCELLED if wanted.leaves_out_cancelled else None,
        limit=wanted.limit + 1,
    )
    groups = reader.groups_by_id(row.group_id for row in rows)
    return [trajectory_json(row, groups[row.group_id]) for row in rows]


def left_out_note(reader: Reader, wanted: Listing) -> str:
    """How many cancelled trajectories are not listed, and the option that lists them; empty without any."""
    if not wanted.leaves_out_cancelled:
        return ""
    count = reader.count_trajectories(task_id=wanted.task, reason=CANCELLED)
    told = "cancelled one that the end of the run cut off is"
    if count != 1:
        told = "cancelled ones that the end of the run cut off are"
    return f"{count} {told} left out; --reason {CANCELLED} lists them" if count else ""


def trajectory_json(row: TrajectoryRow, group: GroupRow) -> Json:
    """One row of the list as plain values."""
    return {
        "id": row.id,
        "task": group.task_id,
        "seed": group.task_seed,
        "state": row.state,
        "reason": row.reason,
        "outcome": row.outcome,
        "reward": row.reward,
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
    """The list as a table, with a line below it if some are left out."""
    right = ("steps", "version", "seconds")
    columns = ("trajectory", "task", "state", "outcome", "steps", "version", "seconds")
    table = page_table(str(run_dir_of(reader)), *columns, right=right)
    shown = rows[-limit:]
    for row in shown:
        where = f" {row['reason']}" if row["reason"] else ""
        table.add_row(
            row["id"],
            row["task"],
            f"{row['state']}{where}" + (f" in {row['batch']}" if row["batch"] else ""),
            verdict_words(row["outcome"], row["reward"]) if row["outcome"] else "-",
            or_dash(row["steps"]),
            versions(row["oldest_version"], row["newest_version"]),
            seconds(row["wall_s"]),
        )
    console.print(table)
    if len(rows) > len(shown):
        console.print(f"the newest {limit} that fit; --limit shows more")
    if not rows:
        console.print("no trajectory fits")


def list_pool(reader: Reader, task: str | None, limit: int) -> list[Json]:
    """Members of the experience pool, evicted ones too; the newest last."""
    rows = [asdict(row) for row in reader.pool(task_id=task, evicted=True)[-limit - 1 :]]
    return [{"id": row.pop("trajectory_id"), "task": row.pop("task_id"), **row} for row in rows]


def print_pool(console: Console, reader: Reader, rows: list[Json], limit: int) -> None:
    """The pool's members as a table."""
    columns = ("trajectory", "task", "source", "steps", "log-probs", "used", "origin", "since")
    table = page_table(f"pool of {run_dir_of(reader)}", *columns, right=("steps", "used"))
    for row in rows[-limit:]:
        table.add_row(
            row["id"][:13],
            row["task"],
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
