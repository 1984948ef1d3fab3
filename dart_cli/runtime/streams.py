"""Standard output and error of this process, whose reader may be gone, or whose disk may be full.

    take_streams     first of all: the three streams are open, and a notice on stderr never raises
    keep_going       from now on this process works on where its standard output is gone, too
    results_written  at the end: the exit code, with what became of standard output
    say_error        one line on stderr
    say_at_once      one line on stderr from a signal handler or a thread that ends the process

Standard output has results: a command whose results cannot be written ends. Standard error has notices: what a
process must do never depends on them.
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
"""Exit code of a command whose results had no reader any more, as other programs have it."""


class _Standard(io.FileIO):
    """A standard stream: a write that fails is dropped, and ends the process if it `ends_process`."""

    def __init__(self, descriptor: int, *, ends_process: bool) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.ends_process = ends_process
        self.fault: OSError | None = None  # the first one

    def write(self, data: ReadableBuffer, /) -> int:
        """Bytes written, or dropped. Raises SystemExit where the reader is gone, DiskError elsewhere."""
        try:
            written = super().write(data)
            if written is not None:
                return written
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        except OSError as error:
            is_first, self.fault = self.fault is None, self.fault or error
            if self.ends_process and is_first:
                raise _ending(error) from None
            return memoryview(data).nbytes


def _ending(error: OSError) -> SystemExit | DiskError:
    if error.errno == errno.EPIPE:
        return SystemExit(READER_GONE)
    return DiskError(f"standard output: {error.strerror}; send it elsewhere and run this again")


def take_streams() -> None:
    """Open the streams that are closed on /dev/null, and make those of this process as described above.

    A file that is opened later would else get the number of a closed one, and with it what is printed.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            os.set_inheritable(descriptor, True)  # as a stream is: children have it, too
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False, encoding="utf-8")  # noqa: SIM115
    if sys.stdout is sys.__stdout__:  # a test's capture stays
        sys.stdout = _stream(1, sys.stdout)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _stream(2, sys.stderr)


def _stream(descriptor: int, before: TextIO | None) -> io.TextIOWrapper:
    """Return a stream over a `_Standard`, in Python's encoding; what that does not have never ends the process.

    On a terminal that is not UTF-8 a character becomes one question mark, so that tables keep their columns.
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
    """For a process that has more to do than to print: it works on where its standard output is gone."""
    if (raw := _results()) is not None:
        raw.ends_process = False


def results_written(code: int) -> int:
    """Write what is left of the results; returns the exit code of a process that would end with `code`."""
    raw = _results()
    if raw is None:
        return code
    worked_on, raw.ends_process = not raw.ends_process, False
    is_told = bool(code) and not worked_on and raw.fault is not None  # it was raised
    with contextlib.suppress(ValueError):  # it was closed
        sys.stdout.flush()
    if is_told or raw.fault is None:
        return code
    match _ending(raw.fault):
        case DiskError() as error:
            say_error(str(error))
            return code or error.exit_code
    return code or (0 if worked_on else READER_GONE)


def _results() -> _Standard | None:
    """Return what is under standard output; None where a test captures it."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return raw if isinstance(raw, _Standard) else None


def say_error(text: str) -> None:
    """One line on stderr."""
    with contextlib.suppress(OSError):  # of a capture: ours never raises
        sys.stderr.write(f"error: {' '.join(text.split())}\n")
        sys.stderr.flush()


def say_at_once(text: str) -> None:
    """One line on stderr; dropped where it cannot be taken now, e.g. by a pipe that is not read.

    Around Python's stream: a signal handler may have interrupted another write.
    """
    with contextlib.suppress(OSError):
        writable = select.poll()
        writable.register(2, select.POLLOUT)
        if writable.poll(0):
            os.write(2, f"{text}\n".encode(errors="backslashreplace"))
