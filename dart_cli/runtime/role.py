"""The life of one role's process: its name, its run directory, its signals, its end.

    run_role     runs a role's coroutine from start to clean end; returns the exit code
    finishing    puts the end off for work that would be lost
    claim        takes a worker name that no living process of this host has
    save_config  leaves the configuration in the run directory, where `dart status DIR` finds it
    read_run     the configuration that a run directory was started with

The first SIGINT or SIGTERM sets the stop event and gives the role `GRACE_S` to end cleanly, more
where it says that it is finishing something; the second, or the end of that time, ends the process at
once. Nothing acknowledged is lost either way.
SIGUSR1 dumps all stacks to the log (stacks.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import IO

from pydantic import ValidationError

from bus.endpoints import make_private_dir
from bus.errors import ConfigError, DartError, RunDirectoryError
from bus.messages import Role
from dart_cli.config.schema import Config
from dart_cli.runtime import stack_dump as stacks
from dart_cli.runtime.liveness import when_orphaned
from dart_cli.runtime.logs import logging_to

logger = logging.getLogger(__name__)

GRACE_S = 10.0
"""Seconds a process may take to end after it was asked to."""

LAST_WORK_S = 900.0
"""Seconds by which `finishing` may put off the end: a checkpoint of some 100 GB."""

PARENT_VARIABLE = "DART_PARENT_PID"

MAX_WORKERS = 1024  # of one role on one host
_SINGLE = frozenset({"data", "train", "up"})
_WORKER_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")

_CHECKPOINTS = "c[0-9]*[0-9]"  # as train/checkpoint.py names them; that module loads torch

_finishing: list[str] = []

Main = Callable[[str, asyncio.Event], Awaitable[None]]
"""A role's coroutine: (worker name, stop event) -> ends when the run is over or stop is set."""


def run_role(role: Role, config: Config, main: Main, *, worker: str = "", threads: int = 1) -> int:
    """Run one role of a run until it is over or a signal ends it; returns the exit code.

    0 after a clean end, 2 for the user's mistake, 1 for a fault; the error is one line on stderr
    and whole in the log. `threads` bounds the CPU threads of torch and BLAS in this process.
    """
    stacks.ignored()  # before others can know of us
    limit_threads(threads)
    end_with_parent()
    try:
        make_private_dir(config.run.dir)
        with (
            claim(config, role, worker) as name,
            logging_to(config.run.dir, name) as log_file,
            stacks.dumped_to(log_file),
        ):
            logger.info("%s starts, pid %d, run %s", name, os.getpid(), config.run.dir)
            if role == "data":
                try:
                    save_config(config)
                except DartError:
                    _record(name)
                    raise
            return _guarded(main, name, log_file)
    except DartError as error:
        say_error(str(error))
        return error.exit_code


@contextlib.contextmanager
def finishing(what: str) -> Iterator[None]:
    """Inside, the first signal ends this process only when `what` is done, or after `LAST_WORK_S`."""
    _finishing.append(what)
    try:
        yield
    finally:
        _finishing.remove(what)


def say_error(text: str) -> None:
    """One line on stderr."""
    sys.stderr.write(f"error: {' '.join(text.split())}\n")
    sys.stderr.flush()


def limit_threads(threads: int) -> None:
    """Bound the CPU threads of libraries that are not loaded yet; what the user set stays."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, str(threads))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def end_with_parent() -> None:
    """If a `dart up` started this process, end it (as SIGTERM does) when that one is gone."""
    parent = os.environ.pop(PARENT_VARIABLE, "")
    if parent:
        when_orphaned(int(parent), lambda: os.kill(os.getpid(), signal.SIGTERM))


def _guarded(main: Main, name: str, log_file: Path) -> int:
    """Run `main`; every error becomes an exit code, one line and a record in the log."""
    stopping = _Stopping(name)
    try:
        asyncio.run(stopping.watch(main))
    except DartError as error:
        _record(name)
        say_error(str(error))
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - the end of the process: told, recorded, exit code 1
        _record(name)
        say_error(f"{name} broke: {type(error).__name__}: {error}; the traceback is in {log_file}")
        return 1
    finally:
        stopping.forget()
    logger.info("%s ended", name)
    return 0


def _record(name: str) -> None:
    """Write the current exception with its traceback to the log file, not to the terminal."""
    record = logger.makeRecord(
        logger.name, logging.ERROR, __file__, 0, "%s ends with an error", (name,), sys.exc_info()
    )
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(record)


class _Stopping:
    """Turns signals into the stop event, and keeps the promise that the process then ends."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._event: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deadline: threading.Timer | None = None
        self._asked_at = 0.0  # monotonic seconds of the first signal
        self._put_off = False

    async def watch(self, main: Main) -> None:
        """Run `main` with a stop event that SIGINT and SIGTERM set."""
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        # Not loop.add_signal_handler: that one never runs while the loop is busy with a long call.
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, self._on_signal)
        await main(self._name, self._event)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._deadline is not None:
            os._exit(128 + number)
        # Before a word is said: whoever reads it may send the second signal at once.
        self._asked_at = time.monotonic()
        self._end_in(GRACE_S)
        _write(f"{self._name}: stopping; a second signal stops at once")
        if self._loop is not None and self._event is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: it ended by itself
                self._loop.call_soon_threadsafe(self._event.set)

    def _end_in(self, seconds: float) -> None:
        self._deadline = threading.Timer(seconds, self._too_late)
        self._deadline.daemon = True
        self._deadline.start()

    def _too_late(self) -> None:
        waited_s = time.monotonic() - self._asked_at
        if _finishing and waited_s < LAST_WORK_S:
            _write(
                f"progress: {self._name} is still {_finishing[-1]}; a second signal stops at once"
            )
            self._put_off = True
            self._end_in(GRACE_S / 2)
        elif self._put_off:  # it is done, and the rest has its time
            self._put_off = False
            self._end_in(GRACE_S)
        else:
            _write(f"{self._name}: did not end within {waited_s:.0f} s of the signal")
            os._exit(1)

    def forget(self) -> None:
        """The process ended in time."""
        if self._deadline is not None:
            self._deadline.cancel()


def _write(text: str) -> None:
    """Write a line to stderr from a signal handler, which may have interrupted another write."""
    with contextlib.suppress(OSError):  # nobody reads it any more
        os.write(2, f"{text}\n".encode())


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
        with (folder / f"{name}.lock").open("a+", encoding="ascii") as file:
            if _locked(file):
                yield name
                return
            file.seek(0)
            owner = file.read().strip() or "unknown"
    raise RunDirectoryError(
        f"{names[-1]} is running already in {config.run.dir} (pid {owner}); "
        "stop it first, or choose another name or run.dir"
    )


def _prefix(config: Config, role: str) -> str:
    """`env`, or `env-HOST` where processes of several hosts meet in one run."""
    if config.bus.transport == "ipc":
        return role
    host = re.sub(r"[^a-z0-9]+", "-", socket.gethostname().lower()).strip("-")
    return f"{role}-{host[:40]}" if host else role


def _locked(file: IO[str]) -> bool:
    """Lock the file and write our pid, unless another living process holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return True


# --- the configuration of a run -------------------------------------------------------------


def save_config(config: Config) -> None:
    """Write `config.json` into the run directory; say what changed since the run's last start.

    Raises ConfigError where the trainer would go on from the checkpoint of another model.
    """
    path = config.run.dir / "config.json"
    if path.exists():
        refuse_another_model(config)
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


def refuse_another_model(now: Config) -> None:
    """Raise ConfigError where a run that has a checkpoint has another model or action language."""
    has_begun = (now.run.dir / "config.json").exists()
    if not (has_begun and any((now.run.dir / "checkpoints").glob(_CHECKPOINTS))):
        return
    last = read_run(now.run.dir)
    for key, before, after in (
        ("model.path", last.model.path, now.model.path),
        ("policy.codec", last.policy.codec, now.policy.codec),
    ):
        is_same_path = key == "model.path" and Path.cwd() / before == Path.cwd() / after
        if before != after and not is_same_path:
            raise ConfigError(
                f"{key} = {after!r}, but {now.run.dir} has checkpoints of {before!r}; "
                f"choose another run.dir, or set {key} back"
            )


def read_run(run_dir: Path) -> Config:
    """The configuration that the run in `run_dir` was last started with.

    Raises RunDirectoryError if it is no run directory.
    """
    path = run_dir / "config.json"
    try:
        config = Config.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is of another version"
        raise RunDirectoryError(
            f"{run_dir}: no readable config.json ({why}); name a run directory that "
            "`dart data` or `dart up` made, or the TOML file of the run"
        ) from None
    # A run directory may have been moved, or be named from elsewhere.
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": run_dir})})
