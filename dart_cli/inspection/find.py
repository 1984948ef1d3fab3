"""Which run is meant, and which of its trajectories.

find_run       a configuration file, a run directory, or nothing -> the run that is meant
find_subject   a trajectory by its id, of the run or of its pool; or an error with the nearest cure
written_at     when a database was last written to
nearest        what to write instead of an id that nothing has
has_ended      whether the `dart data` that served the run is gone
process_ends   what became of the run's processes that are not heard any more
check_tasks    whether the run has such tasks
check_reason   whether trajectories are dropped for such a reason
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from bus.error_texts import did_you_mean
from bus.errors import RunDirectoryError, UserError
from dart_cli.config.load import load_config, refuse_overrides
from dart_cli.data.groups import group_id
from dart_cli.data.store.open import DATABASE
from dart_cli.data.store.reader import Reader
from dart_cli.data.store.rows import DROP_REASONS, ProcessRow
from dart_cli.inspection.trajectories import Subject
from dart_cli.runtime.liveness import end_of, workers_of
from dart_cli.runtime.run_dir import refuse_missing

RUNS = Path("runs")
"""Where a run is looked for when none was named."""

_GROUP_ID = re.compile(r"g?(\d+)(?:-\d*)?")


def find_run(target: Path | None, overrides: Sequence[str] = ()) -> Path:
    """Return the run directory of a configuration file, or `target` itself if it is a directory.

    Without a target it is the run below `runs` that was written to last. Raises ConfigError,
    RunDirectoryError.
    """
    if target is None:
        target = _newest_run()
    if target.is_dir():
        refuse_overrides(target, overrides)
        if not (target / DATABASE).is_file():
            if any(target.glob("*.parquet")):
                raise RunDirectoryError(
                    f"{target}: exported trajectories, no run; file them in a run's pool with `dart data import "
                    f"CONFIG {target}`, then look at that run, e.g. with `dart data ls CONFIG --pool`"
                )
            raise RunDirectoryError(
                f"{target}: no run in it, {DATABASE} is missing; name a run directory that "
                "`dart data` or `dart up` made, or the TOML file of the run"
            )
        return target
    refuse_missing(target)
    run_dir = load_config(target, list(overrides)).run.dir
    if not (run_dir / DATABASE).is_file():
        raise RunDirectoryError(
            f"no run in {run_dir} yet (run.dir of {target}); start one with `dart up {target}`"
        )
    return run_dir


def has_ended(reader: Reader) -> bool:
    """Whether the `dart data` that served the run is gone; False where none is known."""
    served = [each for each in workers_of(reader.path.parent) if each.name == "data"]
    return any(each.liveness == "gone" for each in served)


def process_ends(reader: Reader, silent: Iterable[ProcessRow]) -> dict[str, str]:
    """Return what became of each process whose heartbeats have stopped, by its name: see `end_of`."""
    processes = {each.name: each for each in workers_of(reader.path.parent)}
    here = socket.gethostname()
    words = {}
    for row in silent:
        process = processes.get(row.worker)
        if process is None:
            words[row.worker] = end_of(row.state, "", "")
        else:
            state = "stopping" if process.is_ended else row.state
            liveness = process.liveness if row.host == here else ""
            words[row.worker] = end_of(state, liveness, process.error)
    return words


def _newest_run() -> Path:
    found = [path.parent for path in RUNS.glob(f"*/{DATABASE}")]
    if not found:
        raise RunDirectoryError(
            f"no run below {RUNS}; name the one you mean: a run directory or its TOML file"
        )
    return max(found, key=lambda run_dir: written_at(run_dir / DATABASE))


def written_at(database: Path) -> float:
    """When a database was last written to, unix seconds; a reader leaves an empty log beside it."""
    moments = [0.0]
    for path in (database, database.with_name(f"{database.name}-wal")):
        with suppress(OSError):  # the log is removed when the last connection closes
            found = path.stat()
            if found.st_size or path == database:
                moments.append(found.st_mtime)
    return max(moments)


def find_subject(reader: Reader, name: str) -> Subject:
    """Return the trajectory called `name`; the id of a pool member may be shortened while it is unique.

    Raises UserError with the nearest cure.
    """
    if trajectory := reader.trajectory(name):
        group = reader.groups_by_id([trajectory.group_id])[trajectory.group_id]
        return Subject.of_run(trajectory, group, reader.pool_member(name))
    if name.startswith("x"):
        members = [row for row in reader.pool(evicted=True) if row.trajectory_id.startswith(name)]
        if len(members) == 1:
            return Subject.of_pool(members[0])
        many = f"{len(members)} of its members begin with it, write more of the id"
        none = "`dart data ls --pool` lists its members"
        raise UserError(
            f"no pool member {name!r} in {reader.path.parent}; {many if members else none}"
        )
    raise UserError(f"no trajectory {name!r} in {reader.path.parent}; {nearest(reader, name)}")


def check_tasks(reader: Reader, names: Iterable[str]) -> None:
    """Raise UserError for a task that neither the run nor its pool has."""
    known = {task_id for _, task_id in reader.instructions()}
    known |= {row.task_id for row in reader.pool(evicted=True)}
    for name in names:
        if name not in known:
            raise UserError(
                f"--task {name}: {reader.path.parent} has no such task{did_you_mean(name, known)}; "
                "`dart data stats` lists those it has"
            )


def check_reason(reader: Reader, reason: str | None) -> None:
    """Raise UserError for a reason that nothing is dropped for, and that the run does not hold."""
    if reason is None or reason in DROP_REASONS or reader.trajectories(reason=reason, limit=1):
        return
    raise UserError(
        f"--reason {reason}: nothing is dropped for it{did_you_mean(reason, DROP_REASONS)}; "
        f"there are {', '.join(DROP_REASONS)}"
    )


def nearest(reader: Reader, name: str) -> str:
    """Return what to write instead of an id that no trajectory, or no group, has."""
    newest = reader.newest_group()
    if not newest:
        return "nothing was played in it yet"
    found = _GROUP_ID.fullmatch(name)
    if found is None:
        return (
            f"ids look like {group_id(newest)}-00; `dart data ls {reader.path.parent}` lists them"
        )
    wanted = group_id(int(found[1]))
    members = [row.id for row in reader.trajectories(group_ids=[wanted])]
    if members:
        return f"group {wanted} has {members[0]} to {members[-1]}"
    return f"its groups go from {group_id(1)} to {group_id(newest)}"
