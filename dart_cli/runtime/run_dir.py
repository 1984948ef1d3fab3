"""The files of a run directory that all processes read and write: worker names, and the configuration.

claim                 takes a worker name that no living process of this host has
refuse_live           raises an error if a process of the run lives
leave_error           writes the error that ends this process
leave_end             writes that this process ends in order
leave_signal          writes the signal that killed another process
cannot_write          returns the error for a file of the run directory that cannot be written
Place                 notices that the run directory was moved or removed
save_config           writes the configuration, where `dart status DIR` finds it
save_used             writes the configuration, with the values of processes that have other settings
with_processes        returns a configuration with the values of processes that have other settings
read_used, read_run   read the configuration with which a run directory was last used
refuse_another_run    raises an error if a run would go on with another suite, model or adapters
refuse_missing        raises an error for a run directory that does not exist
leave_snapshot        writes the state of the run, for `dart status` when no data service answers
last_snapshot         reads the newest of these states
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from pydantic import ValidationError

from bus.endpoints import disk_full
from bus.errors import ConfigError, DartError, DiskError, RunDirectoryError
from dart_cli.config.adapters import adapter_change
from dart_cli.config.readers import Settings, row_of, values
from dart_cli.config.schema import Config
from dart_cli.config.values import short_value
from dart_cli.runtime.liveness import ENDED, KILLED, start_ticks
from dart_cli.runtime.work_folder import write_whole

if TYPE_CHECKING:
    from bus.snapshot import Snapshot

logger = logging.getLogger(__name__)

MAX_WORKERS = 1024  # most workers of one role on one host
_SINGLE = frozenset({"data", "train", "up"})
_WORKER_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")

IDENTITY = ("env.suite", "model.path", "policy.action_parser", "policy.coordinates")
"""Keys that define what the data of a run means: which tasks were played, which model sampled the tokens,
which action a text means. Trajectories under two values do not belong in one ledger."""

LOCK_BYTES = 1024
"""Size of a worker's lock file, which holds its pid, its `start_ticks` and how it ended."""
PLACE_S = 1.0
"""Seconds between two checks whether the run directory was moved."""
_CONFIG = "config.json"
_MOVED = "start again with run.dir at its new place, where it goes on"


# --- names ----------------------------------------------------------------------------------


@contextlib.contextmanager
def claim(config: Config, role: str, worker: str = "") -> Iterator[str]:
    """Yield a worker name that no other living process has, until the block or the process ends.

    The name is `worker`, or a free one if `worker` is empty. A run has one data process and one trainer.
    Raises ConfigError for an invalid name, RunDirectoryError if another process has the name.
    """
    if worker and not _WORKER_NAME.fullmatch(worker):
        raise ConfigError(
            f"--worker {worker!r}: use lower-case letters, digits, '.', '_' and '-', e.g. {role}-0"
        )
    if worker in _SINGLE and worker != role:
        raise ConfigError(
            f"--worker {worker!r} is the name of the run's one {worker} process: use e.g. {role}-0"
        )
    folder = config.run.dir / "workers"
    folder.mkdir(mode=0o700, exist_ok=True)
    if not worker and role in _SINGLE:
        worker = role
    names = [worker] if worker else [f"{_prefix(config, role)}-{i}" for i in range(MAX_WORKERS)]
    for name in names:
        with _open_lock(folder / f"{name}.lock") as file:
            if _locked(file):
                _write_lock(file.fileno(), _owner(), "")
                yield name
                return
            refusal = _name_in_use(config.run.dir, name, file)
    raise refusal


def refuse_live(run_dir: Path) -> None:
    """Raise RunDirectoryError if a living process of this host has a name in the run."""
    for path in sorted((run_dir / "workers").glob("*.lock")):
        with _open_lock(path) as file:
            if not _locked(file):
                raise _name_in_use(run_dir, path.stem, file)


def _name_in_use(run_dir: Path, name: str, file: IO[bytes]) -> RunDirectoryError:
    """Return the error for a name that a living process has."""
    owner = file.readline().decode("ascii", "replace").partition(" ")[0].strip() or "unknown"
    return RunDirectoryError(
        f"{name} is running already in {run_dir} (pid {owner}); "
        "stop it first, or choose another name or run.dir"
    )


def _prefix(config: Config, role: str) -> str:
    """Return the beginning of a worker name: the role, or e.g. `env-HOST` in a run over several hosts."""
    if config.bus.transport == "ipc":
        return role
    host = re.sub(r"[^a-z0-9]+", "-", socket.gethostname().lower()).strip("-")
    return f"{role}-{host[:40]}" if host else role


def _open_lock(path: Path) -> IO[bytes]:
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "rb", 0)


def _locked(file: IO[bytes]) -> bool:
    """Lock the file, and return True; return False if another living process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _owner() -> str:
    """Return the first line of this process's lock file: its pid, and its start in ticks since boot."""
    return f"{os.getpid()} {start_ticks(os.getpid())}"


def _write_lock(handle: int, owner: str, error: str) -> None:
    """Write which process has the name and how it ended.

    The length is constant, so no free disk space is needed.
    """
    lines = f"{owner}\n{' '.join(error.split())}".encode()[: LOCK_BYTES - 1]
    os.pwrite(handle, lines.ljust(LOCK_BYTES - 1) + b"\n", 0)


def leave_error(run_dir: Path, worker: str, error: str) -> None:
    """Write the error that ends this process, which has the name `worker`. Its next start removes it."""
    with contextlib.suppress(OSError), _lock_of(run_dir, worker) as file:
        _write_lock(file.fileno(), _owner(), error)


def leave_end(run_dir: Path, worker: str) -> None:
    """Write that this process, which has the name `worker`, ends in order."""
    with contextlib.suppress(OSError), _lock_of(run_dir, worker) as file:
        _leave(file, ENDED)


def leave_signal(run_dir: Path, worker: str, number: int) -> None:
    """Write the signal that killed the process with the name `worker`, unless it wrote an error itself."""
    with contextlib.suppress(OSError), _lock_of(run_dir, worker) as file:
        _leave(file, f"{KILLED} {number}")


def _leave(file: IO[bytes], how: str) -> None:
    """Write how the process of a lock file ended, unless it wrote an error itself."""
    text = os.pread(file.fileno(), LOCK_BYTES, 0).decode("utf-8", "replace")
    owner, _, error = text.partition("\n")
    if owner.partition(" ")[0].isdecimal() and not error.strip():
        _write_lock(file.fileno(), owner, how)


def _lock_of(run_dir: Path, worker: str) -> IO[bytes]:
    """Open the lock file of a process. Raises OSError if the directory is gone or read-only."""
    return (run_dir / "workers" / f"{worker}.lock").open("r+b", 0)


# --- the place of a run ---------------------------------------------------------------------


def cannot_write(run_dir: Path, error: OSError) -> DartError | None:
    """Return the error for a file in `run_dir` that cannot be written or created, with the fix.

    Return None for an error of something else, e.g. of a missing file in another place.
    """
    if not disk_full(error) and not str(error.filename or "").startswith(str(run_dir)):
        return None
    place = error.filename if isinstance(error.filename, str) else str(run_dir)
    fault = f"{place} cannot be written: {error.strerror or error}"
    if disk_full(error) or error.errno == errno.EIO:
        return DiskError(f"{fault}; free space on its disk and start again")
    if not run_dir.is_dir():
        return RunDirectoryError(f"{run_dir} was moved or removed; {_MOVED}")
    return RunDirectoryError(f"{fault}; make {run_dir} writable for this user")


class Place:
    """The place of a run directory, which notices that another directory, or none, is there later."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._was = _identity(run_dir)

    def moved(self) -> RunDirectoryError | None:
        """Return the error if another directory, or none, is in this place now; else None."""
        if _identity(self._run_dir) == self._was:
            return None
        fault = f"{self._run_dir} was moved or removed while the run used it"
        return RunDirectoryError(f"{fault}; {_MOVED}")

    def watch(self, then: Callable[[RunDirectoryError], object]) -> threading.Event:
        """Call `then` in a new thread when the directory is moved, within `PLACE_S`.

        The watch ends when the returned event is set.
        """
        is_over = threading.Event()

        def look() -> None:
            while not is_over.wait(PLACE_S):
                if (error := self.moved()) is not None:
                    then(error)
                    return

        threading.Thread(target=look, name="place", daemon=True).start()
        return is_over


def _identity(path: Path) -> tuple[int, int] | None:
    """Return (device, inode) of a directory; None if there is none."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino


# --- the configuration of a run -------------------------------------------------------------


PROCESSES = "processes"
"""The key of config.json, beside the sections, for processes that were started with other settings than the
data process: worker -> {role, settings}."""


@dataclass(frozen=True)
class Used:
    """The configuration with which a run was last used."""

    config: Config  # each key has the value of the process that reads it
    processes: dict[str, dict[str, Any]]  # see PROCESSES


def save_config(config: Config, *, force: bool = False) -> None:
    """Write `config.json` into the run directory, and log what has changed since the run's last start.

    The values of processes that have other settings are kept until these processes join again. Raises
    ConfigError as `refuse_another_run` does, unless `force` is True.
    """
    processes: dict[str, dict[str, Any]] = {}
    if (config.run.dir / _CONFIG).exists():
        if not force:
            refuse_another_run(config)
        before = read_used(config.run.dir)
        processes = _of_this_version(before.processes)
        others = {key for process in processes.values() for key in process["settings"]}
        _log_changes(before.config, config, others)
    save_used(config.run.dir, config.model_dump(mode="json"), processes)


def _of_this_version(processes: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return `processes` without keys that this version of dart does not have."""
    present = values(Config())
    return {
        worker: {
            **process,
            "settings": {k: v for k, v in process["settings"].items() if k in present},
        }
        for worker, process in processes.items()
    }


def save_used(
    run_dir: Path, tree: dict[str, Any], processes: Mapping[str, Mapping[str, Any]]
) -> None:
    """Write `config.json`: the data process's configuration `tree`, with the other values of `processes`."""
    tree = with_processes(tree, processes)
    path = run_dir / _CONFIG
    partial = path.with_suffix(".tmp")
    text = json.dumps({**tree, PROCESSES: processes} if processes else tree, indent=1)
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def with_processes(
    tree: dict[str, Any], processes: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the configuration `tree` in which each key has the value of the process that reads it first."""
    tree = deepcopy(tree)
    for process in processes.values():
        for key, value in process["settings"].items():
            if row_of(key).readers[0] == process["role"]:
                _put(tree, key, value)
    return tree


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set `section.key` in a dumped configuration. Missing inner sections are created."""
    *sections, name = key.split(".")
    outer, node = tree, tree
    for section in sections:
        outer, node = node, node.get(section) or {}
        outer[section] = node
    node[name] = value
    if len(sections) > 1 and value is None:  # an inner section is unset as a whole
        outer[sections[-1]] = None


def _log_changes(before: Config, now: Config, but: Collection[str]) -> None:
    """Log each key whose value has changed since the run's last start, except the keys in `but`."""
    was, is_ = values(before), values(now)
    was["train.lr"], is_["train.lr"] = before.train.lr, now.train.lr
    for key, value in is_.items():
        if key not in but and was[key] != value:
            logger.warning(
                "%s was %s at the run's last start, is %s now",
                key,
                short_value(was[key]),
                short_value(value),
            )


def refuse_another_run(now: Config) -> None:
    """Raise ConfigError if the run in `now.run.dir` was started with another value of a key in `IDENTITY`.

    Other adapters (`model.lora`) are refused, too. A model folder or suite file with another spelling of its
    path is the same one.
    """
    if not (now.run.dir / _CONFIG).exists():
        return
    last = read_run(now.run.dir)
    before, after = Settings.of(last), Settings.of(now)
    for key in IDENTITY:
        if not after.agrees(before, key):
            raise ConfigError(
                f"{key} = {after.value(key)!r}, but the run in {now.run.dir} was started with "
                f"{before.value(key)!r}; set it "
                "back, choose another run.dir, or go on with both in one run by --force"
            )
    if problem := adapter_change(last.model.lora, now.model.lora):
        raise ConfigError(
            f"{problem} when the run in {now.run.dir} was started; set it back, choose another run.dir, "
            "or, as long as there is no checkpoint, go on by --force"
        )


def refuse_missing(target: Path) -> None:
    """Raise RunDirectoryError for a run directory that does not exist. A TOML file is not checked."""
    if target.suffix != ".toml" and not target.exists():
        raise RunDirectoryError(
            f"no such run: {target}; name a run directory that `dart data` or `dart up` made, or the TOML "
            "file of the run"
        )


def read_run(run_dir: Path) -> Config:
    """Return the configuration with which the run in `run_dir` was last used.

    Raises RunDirectoryError if it is not a run directory.
    """
    return read_used(run_dir).config


def read_used(run_dir: Path) -> Used:
    """Return the configuration with which a run was last used, and the processes with other settings.

    Raises RunDirectoryError if `run_dir` is not a run directory.
    """
    path = run_dir / _CONFIG
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        processes = stored.pop(PROCESSES, {}) if isinstance(stored, dict) else {}
        config = Config.model_validate_json(json.dumps(stored))
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is of another version"
        raise RunDirectoryError(
            f"{run_dir}: no readable config.json ({why}); name a run directory that "
            "`dart data` or `dart up` made, or the TOML file of the run"
        ) from None
    # A run directory may have been moved, or be named from elsewhere.
    here = config.run.model_copy(update={"dir": run_dir})
    return Used(config.model_copy(update={"run": here}), processes)


# --- the last state of a run ------------------------------------------------------------

_SNAPSHOT = "snapshot.json"


def leave_snapshot(run_dir: Path, snapshot: Mapping[str, Any]) -> None:
    """Write a dumped Snapshot. If that fails, e.g. on a full disk, the older one stays."""
    with contextlib.suppress(OSError):
        write_whole(run_dir / _SNAPSHOT, json.dumps(snapshot).encode())


def last_snapshot(run_dir: Path) -> Snapshot | None:
    """Return the last Snapshot; None if there is none, or another version of dart wrote it."""
    from bus.snapshot import Snapshot  # late: all messages

    try:
        return Snapshot.model_validate_json((run_dir / _SNAPSHOT).read_bytes())
    except (OSError, ValidationError):
        return None
