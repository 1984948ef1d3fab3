"""Logging of one process: short lines to the terminal, all of it to a file in the run directory.

    logging_to        the one block around all that a process does
    log_dir           the folder of a run's log files
    cut_log           keeps a log that only grows within two generations of bounded size
    RepeatedWarnings  equal warnings of many slots, as one line with their number
    ignore_dumps      called first of all: SIGUSR1 would otherwise end the process
    stacks_to         while inside, SIGUSR1 dumps all stacks to the given file: threads, then asyncio's tasks

A process whose output `dart up` collects writes plain lines; on a terminal they are coloured. Of a dump
faulthandler writes the threads' part from C, so it appears also while Python is stuck in a call that
does not return, such as a GPU kernel. The tasks' part needs Python, and appears when that call has
returned.
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
"""Seconds in which equal warnings are counted before the first line of them."""

MOST_LOG_BYTES = 64 * 2**20
"""Size from which a log begins anew; the generation before it is kept. A process of a run of weeks writes some MiB
a day, more only where something goes wrong again and again."""

QUIET_S = 30.0
"""Shortest time between two lines of equal warnings."""


def log_dir(run_dir: Path) -> Path:
    """Directory of a run's log files."""
    return run_dir / "logs"


@contextlib.contextmanager
def logging_to(run_dir: Path, worker: str, *, terminal: bool = True) -> Iterator[Path]:
    """Log to the terminal (stderr) and to `logs/WORKER.log`, which is appended to; gives its path.

    Warnings of Python libraries go the same way. The previous set-up is restored afterwards.
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
    """Copy a log of more than `most` bytes to PATH.1, in place of an older one, and empty it.

    It stays the same file: every process that appends to it goes on. A log for whose copy the disk has no room
    stays as it is. Raises OSError where the copy fails.
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
    """Equal warnings that come in great number, as when all slots miss the same process: one line with a count.

    Used inside a running loop. The first line comes after `GATHER_S`, a further one of the same text no
    sooner than `QUIET_S` later.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._untold: dict[str, int] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def add(self, text: str) -> None:
        """One more warning of this text."""
        if text not in self._untold:
            self._untold[text] = 0
            self._tell_in(GATHER_S, text)
        self._untold[text] += 1

    def close(self) -> None:
        """Tell what was not told yet."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for text in list(self._untold):
            self._tell(text)

    def _tell_in(self, seconds: float, text: str) -> None:
        def tell() -> None:
            del self._timers[text]
            if self._tell(text):
                self._untold[text] = 0
                self._tell_in(QUIET_S, text)

        self._timers[text] = asyncio.get_running_loop().call_later(seconds, tell)

    def _tell(self, text: str) -> bool:
        number = self._untold.pop(text)
        if number:
            self._logger.warning("%s%s", text, f" ({number} times)" if number > 1 else "")
        return bool(number)


class _LogFile(logging.FileHandler):
    """A log file whose disk may be full: that is reported once, in one line."""

    _is_told = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record; a log that has grown too large begins anew."""
        super().emit(record)
        with contextlib.suppress(OSError):  # the log goes on growing
            cut_log(Path(self.baseFilename))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Report a record that cannot be written; an OSError is reported only once."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._is_told:
            self._is_told = True
            with contextlib.suppress(OSError):
                sys.stderr.write(
                    f"WARNING {self.baseFilename}: {error.strerror}; log lines are lost\n"
                )


class _OneLine(logging.Formatter):
    """Of an exception the type and the text: the traceback is in the log file."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as it is shown on a terminal."""
        record.message = record.getMessage()
        text = self.formatMessage(record)
        error = record.exc_info[1] if record.exc_info else None
        return text if error is None else f"{text}: {type(error).__name__}: {first_line(error)}"


def _terminal_handler(worker: str) -> logging.Handler:
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
    """Ignore SIGUSR1 until `stacks_to` knows where to write."""
    signal.signal(DUMP_SIGNAL, signal.SIG_IGN)


@contextlib.contextmanager
def stacks_to(log_file: Path) -> Iterator[None]:
    """On SIGUSR1 append a dump to `log_file`; for the main thread."""
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
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:  # no event loop runs
        tasks = set()
    lines = [f"{len(tasks)} asyncio tasks"]
    for task in sorted(tasks, key=asyncio.Task.get_name)[:_MOST_TASKS]:
        lines.append(f"Task {task.get_name()}:")
        lines += [f"  {place}" for place in _awaited(task.get_coro())]
    # Its own handle, which only this handler uses: no other write can be interrupted by it.
    file.write("\n".join([*lines, DUMP_END, ""]))
    file.flush()


def _awaited(waiting: Any) -> Iterator[str]:
    """Yield the line that a coroutine is at, and what it awaits, outermost first."""
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
