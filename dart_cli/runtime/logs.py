"""Logging of one process: short lines to the terminal, everything to a file in the run directory.

    logging_to        sets up logging for a block, which contains everything that a process does
    log_dir           returns the folder of a run's log files
    cut_log           moves the content of a large log to PATH.1, so that there are two files of bounded size
    RepeatedWarnings  logs equal warnings of many slots as one line with their number
    ignore_dumps      ignores SIGUSR1, which would otherwise end the process; to be called first
    stacks_to         lets SIGUSR1 dump all stacks to a file during a block: threads, then asyncio's tasks

A process whose output `dart up` collects writes plain lines; on a terminal they are coloured. faulthandler
writes the threads' part of a dump from C, so it appears even while Python is stuck in a call, such as a GPU
kernel. The tasks' part needs Python, and appears when that call has returned.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TextIO

from bus.errors import first_line

_FILE_FORMAT = "%(asctime)s.%(msecs)03dZ %(levelname)-7s %(name)s: %(message)s"
_PLAIN_FORMAT = "%(levelname)s %(message)s"

GATHER_S = 0.5
"""Seconds in which equal warnings are counted before the first line is logged."""

MOST_LOG_BYTES = 64 * 2**20
"""Size from which a log begins anew; the file before it is kept. In a run of weeks a process writes some MiB
a day, more only if something fails again and again."""

QUIET_S = 30.0
"""Shortest time between two lines of equal warnings."""


def log_dir(run_dir: Path) -> Path:
    """Return the folder of a run's log files."""
    return run_dir / "logs"


@contextlib.contextmanager
def logging_to(run_dir: Path, worker: str, *, terminal: bool = True) -> Iterator[Path]:
    """Log to stderr and to `logs/WORKER.log` while the block runs, and yield the path of that file.

    The file is appended to. Warnings of Python libraries are logged, too. The earlier set-up is restored at
    the end.
    """
    path = log_dir(run_dir) / f"{worker}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    to_file = _LogFile(path, encoding="utf-8", errors="backslashreplace")
    formatter = logging.Formatter(_FILE_FORMAT, datefmt="%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    to_file.setFormatter(formatter)
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    root.handlers[:] = [to_file, *([_terminal_handler(worker)] if terminal else [])]
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    for noisy in ("httpx", "PIL", "matplotlib", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        yield path
    finally:
        logging.captureWarnings(False)
        root.handlers[:] = before
        root.setLevel(level)
        with contextlib.suppress(OSError):  # what is not written by now is lost
            to_file.close()


def cut_log(path: Path, most: int | None = None) -> None:
    """Copy a log of more than `most` bytes to PATH.1, replacing an older copy, and empty it.

    The log stays the same file, so that every process that appends to it can go on. If the disk has no room
    for the copy, the log stays as it is. Raises OSError if the copy fails.
    """
    size = path.stat().st_size
    limit = MOST_LOG_BYTES if most is None else most
    if size <= limit or size > shutil.disk_usage(path.parent).free:
        return
    draft = path.with_name(f"{path.name}.1.tmp")
    try:
        shutil.copyfile(path, draft)
        draft.replace(path.with_name(f"{path.name}.1"))
    finally:
        draft.unlink(missing_ok=True)
    os.truncate(path, 0)


class RepeatedWarnings:
    """A log of equal warnings that come in great number, e.g. when all slots miss the same process.

    It logs one line with a count: the first one after `GATHER_S`, a further one of the same text at least
    `QUIET_S` later. Use it inside a running event loop.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._counts: dict[str, int] = {}  # warnings that are not logged yet
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def add(self, text: str) -> None:
        """Count one more warning with this text."""
        if text not in self._counts:
            self._counts[text] = 0
            self._log_in(GATHER_S, text)
        self._counts[text] += 1

    def close(self) -> None:
        """Log all warnings that are not logged yet."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for text in list(self._counts):
            self._log(text)

    def _log_in(self, seconds: float, text: str) -> None:
        """Log the warnings with this text after some seconds, and again as long as new ones come."""

        def log() -> None:
            del self._timers[text]
            if self._log(text):
                self._counts[text] = 0
                self._log_in(QUIET_S, text)

        self._timers[text] = asyncio.get_running_loop().call_later(seconds, log)

    def _log(self, text: str) -> bool:
        """Log the counted warnings with this text as one line. Return False if there are none."""
        number = self._counts.pop(text)
        if number:
            self._logger.warning("%s%s", text, f" ({number} times)" if number > 1 else "")
        return bool(number)


class _LogFile(logging.FileHandler):
    """A log file that reports a full disk once, in one line, and begins anew when it is too large."""

    _is_reported = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, and begin the log anew if it has grown too large."""
        super().emit(record)
        with contextlib.suppress(OSError):  # then the log simply grows
            cut_log(Path(self.baseFilename))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Report a record that cannot be written; an OSError is reported only once."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._is_reported:
            self._is_reported = True
            with contextlib.suppress(OSError):
                sys.stderr.write(
                    f"WARNING {self.baseFilename}: {error.strerror}; log lines are lost\n"
                )


class _OneLine(logging.Formatter):
    """A formatter that shows type and text of an exception. Its traceback is in the log file."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a line for the terminal."""
        record.message = record.getMessage()
        text = self.formatMessage(record)
        error = record.exc_info[1] if record.exc_info else None
        return text if error is None else f"{text}: {type(error).__name__}: {first_line(error)}"


def _terminal_handler(worker: str) -> logging.Handler:
    """Return a handler for stderr: coloured on a terminal, else plain."""
    if not sys.stderr.isatty():
        plain = logging.StreamHandler()
        plain.setFormatter(_OneLine(_PLAIN_FORMAT))
        return plain
    from rich.console import Console
    from rich.logging import RichHandler
    from rich.text import Text

    from dart_cli.runtime.tables import clock

    coloured = RichHandler(
        console=Console(stderr=True),
        show_path=False,
        rich_tracebacks=False,
        log_time_format=lambda at: Text(clock(at.timestamp())),
    )
    coloured.setFormatter(_OneLine(f"{worker}: %(message)s"))
    return coloured


# --- stacks ------------------------------------------------------------------------------


DUMP_SIGNAL = signal.SIGUSR1
DUMP_END = "end of stacks"
_MOST_TASKS = 200
_MOST_FRAMES = 30


def ignore_dumps() -> None:
    """Ignore SIGUSR1 until `stacks_to` handles it."""
    signal.signal(DUMP_SIGNAL, signal.SIG_IGN)


@contextlib.contextmanager
def stacks_to(log_file: Path) -> Iterator[None]:
    """Append a dump to `log_file` at each SIGUSR1 while the block runs. For the main thread only."""
    with log_file.open("a", encoding="utf-8") as file:

        def on_signal(_number: int, _frame: FrameType | None) -> None:
            _write_tasks(file)

        before = signal.signal(DUMP_SIGNAL, on_signal)
        faulthandler.register(DUMP_SIGNAL, file, all_threads=True, chain=True)
        try:
            yield
        finally:
            faulthandler.unregister(DUMP_SIGNAL)
            signal.signal(DUMP_SIGNAL, signal.SIG_IGN if before is None else before)


def _write_tasks(file: TextIO) -> None:
    """Write the stacks of asyncio's tasks."""
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:  # no event loop runs
        tasks = set()
    lines = [f"{len(tasks)} asyncio tasks"]
    for task in sorted(tasks, key=asyncio.Task.get_name)[:_MOST_TASKS]:
        lines.append(f"Task {task.get_name()}:")
        lines += [f"  {place}" for place in _awaited(task.get_coro())]
    # Only this handler uses the file handle, so it cannot interrupt another write to it.
    file.write("\n".join([*lines, DUMP_END, ""]))
    file.flush()


def _awaited(waiting: Any) -> Iterator[str]:
    """Yield the line at which a coroutine is, then the lines of what it awaits, outermost first."""
    for _ in range(_MOST_FRAMES):
        kind = next((kind for kind in ("cr", "gi", "ag") if hasattr(waiting, f"{kind}_code")), "")
        if not kind:
            if waiting is not None:
                yield f"awaits {type(waiting).__name__}"
            return
        code: CodeType = getattr(waiting, f"{kind}_code")
        frame: FrameType | None = getattr(waiting, f"{kind}_frame")
        line = frame.f_lineno if frame else code.co_firstlineno
        yield f'File "{code.co_filename}", line {line} in {code.co_qualname}'
        waiting = getattr(waiting, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
