"""Finds the run that a command means, and the trajectory with a given id.

find_run       a configuration file, a run directory, or nothing -> the run directory
find_subject   the trajectory with an id, of the run or of its pool
nearest        a hint on ids that exist, for an error about one that does not
check_tasks    raises an error for a task that the run does not have
check_reason   raises an error for a reason for which nothing is dropped
written_at     when a database was last written to
has_ended      returns True if the data service that served the run is gone
process_ends   how the silent processes of the run ended
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
"""The folder in which a run is looked for if the user names none."""

_GROUP_ID = re.compile(r"g?(\d+)(?:-\d*)?")


def find_run(target: Path | None, overrides: Sequence[str] = ()) -> Path:
    """Return the run directory of a configuration file, or `target` itself if it is a directory.

    If `target` is None, it is the run below `runs` that was written to last. Raises ConfigError, or
    RunDirectoryError if there is no run.
    """
    if target is None:
        target = _newest_run()
    if target.is_dir():
        refuse_overrides(target, overrides)
        if not (target / DATABASE).is_file():
            if any(target.glob("*.parquet")):
                raise RunDirectoryError(
                    f"{target}: a folder of exported trajectories, not a run; put them into a run's pool "
                    f"with `dart data import CONFIG {target}`, then look at that run, e.g. with "
                    "`dart data ls CONFIG --pool`"
                )
            raise RunDirectoryError(
                f"{target}: there is no run in it, because {DATABASE} is missing; name a run directory that "
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
    """Return True if the data service that served the run is gone; False if this host has no record of it."""
    workers = workers_of(reader.path.parent)
    return any(worker.name == "data" and worker.liveness == "gone" for worker in workers)


def process_ends(reader: Reader, silent: Iterable[ProcessRow]) -> dict[str, str]:
    """Return worker -> how it ended (see `end_of`), for processes whose heartbeats have stopped."""
    processes = {process.name: process for process in workers_of(reader.path.parent)}
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
    """Return the run directory below RUNS that was written to last. Raises RunDirectoryError without one."""
    run_dirs = [path.parent for path in RUNS.glob(f"*/{DATABASE}")]
    if not run_dirs:
        raise RunDirectoryError(
            f"no run below {RUNS}; name the one you mean: a run directory or its TOML file"
        )
    return max(run_dirs, key=lambda run_dir: written_at(run_dir / DATABASE))


def written_at(database: Path) -> float:
    """Return when a database was last written to, unix seconds."""
    moments = [0.0]
    for path in (database, database.with_name(f"{database.name}-wal")):
        with suppress(OSError):  # the log is removed when the last connection closes
            status = path.stat()
            if status.st_size or path == database:  # a reader leaves an empty log
                moments.append(status.st_mtime)
    return max(moments)


def find_subject(reader: Reader, name: str) -> Subject:
    """Return the trajectory with the id `name`; the id of a pool member may be shortened while it is unique.

    Raises UserError with a hint on ids that exist.
    """
    if trajectory := reader.trajectory(name):
        group = reader.groups_by_id([trajectory.group_id])[trajectory.group_id]
        return Subject.of_run(trajectory, group, reader.pool_member(name))
    if name.startswith("x"):
        members = [row for row in reader.pool(evicted=True) if row.trajectory_id.startswith(name)]
        if len(members) == 1:
            return Subject.of_pool(members[0])
        many = f"the ids of {len(members)} members begin with it, so write more of the id"
        none = "`dart data ls --pool` lists its members"
        raise UserError(
            f"no pool member {name!r} in {reader.path.parent}; {many if members else none}"
        )
    raise UserError(f"no trajectory {name!r} in {reader.path.parent}; {nearest(reader, name)}")


def check_tasks(reader: Reader, names: Iterable[str]) -> None:
    """Raise UserError for a task that neither the run nor its pool has."""
    tasks = {task_id for _, task_id in reader.instructions()}
    tasks |= {row.task_id for row in reader.pool(evicted=True)}
    for name in names:
        if name not in tasks:
            raise UserError(
                f"--task {name}: {reader.path.parent} has no such task{did_you_mean(name, tasks)}; "
                "`dart data stats` lists its tasks"
            )


def check_reason(reader: Reader, reason: str | None) -> None:
    """Raise UserError for an unknown reason that no trajectory of the run has."""
    if reason is None or reason in DROP_REASONS or reader.trajectories(reason=reason, limit=1):
        return
    raise UserError(
        f"--reason {reason}: no trajectory is dropped for it{did_you_mean(reason, DROP_REASONS)}; "
        f"the reasons are {', '.join(DROP_REASONS)}"
    )


def nearest(reader: Reader, name: str) -> str:
    """Return a hint on ids that exist, to be read after an error about the id `name`."""
    newest = reader.newest_group()
    if not newest:
        return "nothing was played in it yet"
    match = _GROUP_ID.fullmatch(name)
    if match is None:
        return (
            f"ids look like {group_id(newest)}-00; `dart data ls {reader.path.parent}` lists them"
        )
    group = group_id(int(match[1]))
    members = [row.id for row in reader.trajectories(group_ids=[group])]
    if members:
        return f"group {group} has {members[0]} to {members[-1]}"
    return f"its groups go from {group_id(1)} to {group_id(newest)}"
