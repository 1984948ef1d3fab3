"""Logging of one process: short lines to the terminal, all of it to a file in the run directory.

    logging_to        the one block around all that a process does
    log_dir           the folder of a run's log files
    RepeatedWarnings  equal warnings of many slots, as one line with their number

A process whose output `dart up` collects writes plain lines; on a terminal they are coloured.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from bus.errors import first_line

_FILE_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s"
_PLAIN_FORMAT = "%(levelname)s %(message)s"

GATHER_S = 0.5
"""Seconds in which equal warnings are counted before the first line of them."""

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

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Called where a record cannot be written."""
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
        """The record as it is shown on a terminal."""
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

    coloured = RichHandler(
        console=Console(stderr=True), show_path=False, rich_tracebacks=False, log_time_format="%X"
    )
    coloured.setFormatter(_OneLine(f"{worker}: %(message)s"))
    return coloured
