"""Standard output and error of this process, whose reader may be gone, or whose disk may be full.

    take_streams     opens the three streams, so that a notice on stderr never raises; it is called first
    keep_going       lets this process go on even if its standard output is gone
    results_written  flushes standard output at the end, and returns the exit code
    say_error        prints an error in one line on stderr
    say_at_once      prints one line on stderr from a signal handler or a thread that ends the process

Standard output carries results: a command whose results cannot be written ends. Standard error carries
notices: the work of a process never depends on them.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import os
import select
import signal
import sys
from typing import TYPE_CHECKING, TextIO

from bus.errors import DiskError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

READER_GONE = 128 + signal.SIGPIPE
"""Exit code of a command whose results have no reader any more, the same as in other programs."""


class _Standard(io.FileIO):
    """A standard stream. A failed write is dropped, and ends the process if `ends_process` is True."""

    def __init__(self, descriptor: int, *, ends_process: bool) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.ends_process = ends_process
        self.fault: OSError | None = None  # the first failure

    def write(self, data: ReadableBuffer, /) -> int:
        """Return the number of bytes that were written or dropped.

        Raises SystemExit if the reader is gone, DiskError for other failures, if the stream `ends_process`.
        """
        try:
            count = super().write(data)
            if count is not None:
                return count
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        except OSError as error:
            is_first, self.fault = self.fault is None, self.fault or error
            if self.ends_process and is_first:
                raise _ending(error) from None
            return memoryview(data).nbytes


def _ending(error: OSError) -> SystemExit | DiskError:
    """Return the exception that ends the process after a failed write to standard output."""
    if error.errno == errno.EPIPE:
        return SystemExit(READER_GONE)
    return DiskError(f"standard output: {error.strerror}; send it elsewhere and run this again")


def take_streams() -> None:
    """Open closed streams on /dev/null, and replace standard output and error of this process by `_Standard`.

    Otherwise a file that is opened later would get the number of a closed stream, and receive what is
    printed.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is `descriptor`
            os.set_inheritable(descriptor, True)  # like any standard stream
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False, encoding="utf-8")  # noqa: SIM115
    if sys.stdout is sys.__stdout__:  # the capture of a test is not replaced
        sys.stdout = _stream(1, sys.stdout)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _stream(2, sys.stderr)


def _stream(descriptor: int, before: TextIO | None) -> io.TextIOWrapper:
    """Return a text stream over a `_Standard`, in Python's encoding. Characters that it lacks never raise.

    On a terminal that is not UTF-8 such a character becomes one question mark, so that tables keep their
    columns.
    """
    raw = _Standard(descriptor, ends_process=descriptor == 1)
    encoding = before.encoding if before else "utf-8"
    is_unicode = codecs.lookup(encoding).name.startswith("utf")
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=encoding,
        errors="backslashreplace" if is_unicode or descriptor == 2 else "replace",
        line_buffering=descriptor == 2 or raw.isatty() or bool(os.environ.get("PYTHONUNBUFFERED")),
    )


def keep_going() -> None:
    """Let this process go on even if its standard output is gone, because it does more than print."""
    if (raw := _results()) is not None:
        raw.ends_process = False


def results_written(code: int) -> int:
    """Flush standard output, and return the exit code for a process that would end with `code`."""
    raw = _results()
    if raw is None:
        return code
    keeps_going, raw.ends_process = not raw.ends_process, False
    was_raised = bool(code) and not keeps_going and raw.fault is not None
    with contextlib.suppress(ValueError):  # it was closed
        sys.stdout.flush()
    if was_raised or raw.fault is None:
        return code
    match _ending(raw.fault):
        case DiskError() as error:
            say_error(str(error))
            return code or error.exit_code
    return code or (0 if keeps_going else READER_GONE)


def _results() -> _Standard | None:
    """Return the raw stream under standard output; None if a test captures it."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return raw if isinstance(raw, _Standard) else None


def say_error(text: str) -> None:
    """Print an error in one line on stderr."""
    with contextlib.suppress(OSError):  # the capture of a test may raise, our stream does not
        sys.stderr.write(f"error: {' '.join(text.split())}\n")
        sys.stderr.flush()


def say_at_once(text: str) -> None:
    """Print one line on stderr; drop it if that would block, e.g. on a pipe that is not read.

    Python's stream is not used, because a signal handler may have interrupted another write to it.
    """
    with contextlib.suppress(OSError):
        writable = select.poll()
        writable.register(2, select.POLLOUT)
        if writable.poll(0):
            os.write(2, f"{text}\n".encode(errors="backslashreplace"))
