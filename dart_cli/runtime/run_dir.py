"""What a process takes and leaves in a run directory: its worker name, and the run's configuration.

claim               takes a worker name that no living process of this host has
refuse_live         the error where a process of the run lives
leave_error         leaves why this process ended; leave_end, that it ended in order; leave_signal, what killed another
cannot_write        the error where a file of the run directory cannot be written
Place               tells whether the run directory was moved or removed
save_config         leaves the configuration, where `dart status DIR` finds it
read_run            the configuration that a run directory was started with
leave_snapshot      leaves the run at one moment, for `dart status` where no data service answers
last_snapshot       the newest of these
refuse_another_run  the error where a run would go on with another suite, model or adapters
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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from pydantic import ValidationError

from bus.endpoints import disk_full
from bus.errors import ConfigError, DartError, DiskError, RunDirectoryError
from bus.snapshot import Snapshot
from dart_cli.config.adapters import adapter_change
from dart_cli.config.old_keys import without_old
from dart_cli.config.schema import Config
from dart_cli.runtime.kept_folder import write_whole
from dart_cli.runtime.liveness import ENDED, KILLED, start_ticks

logger = logging.getLogger(__name__)

MAX_WORKERS = 1024  # of one role on one host
_SINGLE = frozenset({"data", "train", "up"})
_WORKER_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")

IDENTITY = ("env.suite", "model.path", "policy.codec", "policy.coordinates")
"""Keys that say what the data of a run means: which tasks were played, which model sampled the tokens,
what a text means as an action. Trajectories under two values do not belong in one ledger."""


LOCK_BYTES = 1024
"""Of a worker's lock file: its pid with its `start_ticks`, and why it ended."""
PLACE_S = 1.0
"""Between two looks whether the run directory is where it was."""
_MOVED = "start again with run.dir at its new place, where it goes on"


# --- names ----------------------------------------------------------------------------------


@contextlib.contextmanager
def claim(config: Config, role: str, worker: str = "") -> Iterator[str]:
    """A worker name that no other living process has; given back when the block or process ends.

    `worker` asks for a certain one. A run has one data and one train process. Raises ConfigError
    for an impossible name, RunDirectoryError where the name is taken.
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
            taken = _taken(config.run.dir, name, file)
    raise taken


def refuse_live(run_dir: Path) -> None:
    """Raise RunDirectoryError where a living process of this host has a name in the run."""
    for path in sorted((run_dir / "workers").glob("*.lock")):
        with _open_lock(path) as file:
            if not _locked(file):
                raise _taken(run_dir, path.stem, file)


def _taken(run_dir: Path, name: str, file: IO[bytes]) -> RunDirectoryError:
    """Return the error of a name that a living process has."""
    owner = file.readline().decode("ascii", "replace").partition(" ")[0].strip() or "unknown"
    return RunDirectoryError(
        f"{name} is running already in {run_dir} (pid {owner}); "
        "stop it first, or choose another name or run.dir"
    )


def _prefix(config: Config, role: str) -> str:
    """`env`, or `env-HOST` where processes of several hosts meet in one run."""
    if config.bus.transport == "ipc":
        return role
    host = re.sub(r"[^a-z0-9]+", "-", socket.gethostname().lower()).strip("-")
    return f"{role}-{host[:40]}" if host else role


def _open_lock(path: Path) -> IO[bytes]:
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "rb", 0)


def _locked(file: IO[bytes]) -> bool:
    """Lock the file, unless another living process holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _owner() -> str:
    """Return the line of a lock file that says which process has the name, whatever the host's clock says."""
    return f"{os.getpid()} {start_ticks(os.getpid())}"


def _write_lock(handle: int, owner: str, error: str) -> None:
    """Write which process has the name and how it ended, always as long: in place, it needs no free space."""
    lines = f"{owner}\n{' '.join(error.split())}".encode()[: LOCK_BYTES - 1]
    os.pwrite(handle, lines.ljust(LOCK_BYTES - 1) + b"\n", 0)


def leave_error(run_dir: Path, worker: str, error: str) -> None:
    """Leave why this process, which has the name `worker`, ends. Its next start removes it."""
    with contextlib.suppress(OSError), _lock_of(run_dir, worker) as file:
        _write_lock(file.fileno(), _owner(), error)


def leave_end(run_dir: Path, worker: str) -> None:
    """Leave that this process, which has the name `worker`, ends in order."""
    with contextlib.suppress(OSError), _lock_of(run_dir, worker) as file:
        _leave(file, ENDED)


def leave_signal(run_dir: Path, worker: str, number: int) -> None:
    """Leave by which signal the process that had the name `worker` was killed, unless it left an error itself."""
    with contextlib.suppress(OSError), _lock_of(run_dir, worker) as file:
        _leave(file, f"{KILLED} {number}")


def _leave(file: IO[bytes], how: str) -> None:
    """Leave how the process of a lock file ended, unless it left an error."""
    text = os.pread(file.fileno(), LOCK_BYTES, 0).decode("utf-8", "replace")
    owner, _, error = text.partition("\n")
    if owner.partition(" ")[0].isdecimal() and not error.strip():
        _write_lock(file.fileno(), owner, how)


def _lock_of(run_dir: Path, worker: str) -> IO[bytes]:
    """Open the lock file of a process. Raises OSError where the directory is gone, or can only be read."""
    return (run_dir / "workers" / f"{worker}.lock").open("r+b", 0)


# --- the place of a run ---------------------------------------------------------------------


def cannot_write(run_dir: Path, error: OSError) -> DartError | None:
    """The error for a file in `run_dir` that cannot be written or made: place, fault and cure.

    None for an error of something else, e.g. of another file that is not there.
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
    """A directory as it was when this was made."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._was = _identity(run_dir)

    def moved(self) -> RunDirectoryError | None:
        """The error where another directory, or none, is here now."""
        if _identity(self._run_dir) == self._was:
            return None
        fault = f"{self._run_dir} was moved or removed while the run used it"
        return RunDirectoryError(f"{fault}; {_MOVED}")

    def watch(self, then: Callable[[RunDirectoryError], object]) -> threading.Event:
        """Call `then`, in a thread of its own, within `PLACE_S` of a move; set the event to end it."""
        is_over = threading.Event()

        def look() -> None:
            while not is_over.wait(PLACE_S):
                if (error := self.moved()) is not None:
                    then(error)
                    return

        threading.Thread(target=look, name="place", daemon=True).start()
        return is_over


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


# --- the configuration of a run -------------------------------------------------------------


def save_config(config: Config, *, force: bool = False) -> None:
    """Write `config.json` into the run directory; log what changed since the run's last start.

    Raises ConfigError as `refuse_another_run` does, unless `force`.
    """
    path = config.run.dir / "config.json"
    if path.exists():
        if not force:
            refuse_another_run(config)
        last = read_run(config.run.dir)
        before, now = last.model_dump(mode="json"), config.model_dump(mode="json")
        for section, values in now.items():
            for key, value in values.items():
                if before[section].get(key) != value:
                    logger.warning(
                        "%s.%s was %s at the run's last start, is %s now",
                        *(section, key, before[section].get(key), value),
                    )
    partial = path.with_suffix(".tmp")
    partial.write_text(config.model_dump_json(indent=1), encoding="utf-8")
    partial.replace(path)


def refuse_another_run(now: Config) -> None:
    """Raise ConfigError where the run in `now.run.dir` was started with another value of `IDENTITY`.

    So are other adapters (`model.lora`). A model folder or suite file that is only named in another way is the same.
    """
    if not (now.run.dir / "config.json").exists():
        return
    last = read_run(now.run.dir)
    for key in IDENTITY:
        section, _, name = key.partition(".")
        before, after = (str(getattr(getattr(each, section), name)) for each in (last, now))
        if before != after and _whole(before) != _whole(after):
            raise ConfigError(
                f"{key} = {after!r}, but the run in {now.run.dir} was started with {before!r}; set it "
                "back, choose another run.dir, or go on with both in one run by --force"
            )
    if problem := adapter_change(last.model.lora, now.model.lora):
        raise ConfigError(
            f"{problem} when the run in {now.run.dir} was started; set it back, choose another run.dir, "
            "or, as long as there is no checkpoint, go on by --force"
        )


def _whole(name: str) -> str:
    """A path, or the path of `file.py:Suite`, as one from the root; other names are their own."""
    path, colon, suite = name.partition(".py:")
    return os.path.realpath(path) + colon + suite if colon or os.sep in name else name


def refuse_missing(target: Path) -> None:
    """Raise RunDirectoryError for a run directory that does not exist; a TOML file is not looked for."""
    if target.suffix != ".toml" and not target.exists():
        raise RunDirectoryError(
            f"no such run: {target}; name a run directory that `dart data` or `dart up` made, or the TOML "
            "file of the run"
        )


def read_run(run_dir: Path) -> Config:
    """The configuration that the run in `run_dir` was last started with.

    Raises RunDirectoryError if it is not a run directory.
    """
    path = run_dir / "config.json"
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        current = without_old(stored) if isinstance(stored, dict) else stored
        config = Config.model_validate_json(json.dumps(current))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is of another version"
        raise RunDirectoryError(
            f"{run_dir}: no readable config.json ({why}); name a run directory that "
            "`dart data` or `dart up` made, or the TOML file of the run"
        ) from None
    # A run directory may have been moved, or be named from elsewhere.
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": run_dir})})


# --- the run as it was last seen ------------------------------------------------------------

_SNAPSHOT = "snapshot.json"


def leave_snapshot(run_dir: Path, snapshot: Mapping[str, Any]) -> None:
    """Leave a Snapshot, dumped. Where that fails, e.g. on a full disk, the older one stays."""
    with contextlib.suppress(OSError):
        write_whole(run_dir / _SNAPSHOT, json.dumps(snapshot).encode())


def last_snapshot(run_dir: Path) -> Snapshot | None:
    """Return what `leave_snapshot` last wrote; None if that is nothing, or another version of dart wrote it."""
    try:
        return Snapshot.model_validate_json((run_dir / _SNAPSHOT).read_bytes())
    except (OSError, ValidationError):
        return None
