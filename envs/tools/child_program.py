"""A program of dart in another interpreter, which answers requests over its pipes within deadlines.

    ChildProgram   the process: started at the first request; if it hangs, killed with all that it started
    find_named     the interpreter that an option or a variable names

It serves libraries whose version pins exclude dart's. The program is run as `python -c SOURCE` and
is never imported. For each request it reads a JSON line on stdin and writes a JSON line to its original
stdout. If that line has `blobs`, a list of lengths, that many bytes follow it. The stderr of the program is
its log.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bus.errors import EnvError
from envs.tools.process_tree import kill_tree

MOST_LINE = 16 << 20  # bytes of an answer's line
MOST_BLOBS = 256 << 20  # bytes of all its blobs
_BLOCK = 1 << 16
_LOG_TAIL = 4096

Answer = tuple[dict[str, Any], list[bytes]]


def find_named(name: str) -> str | None:
    """Return the absolute path of the interpreter called `name`; None if there is none.

    Links are not followed, since a venv's interpreter is a link out of the venv.
    """
    path = shutil.which(Path(name).expanduser())
    return None if path is None else str(Path(path).absolute())


class ChildProgram:
    """The process of a program; not thread-safe: one slot owns it. Raises EnvError.

    It runs in `folder`, with `variables` added to its environment.
    """

    def __init__(
        self,
        python: str,
        source: str,
        *,
        arguments: Sequence[str] = (),
        folder: str | Path = "",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._command = [python, "-c", source, *arguments]
        self._folder = folder or tempfile.gettempdir()
        self._variables = dict(variables or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""  # bytes that were read from the process and are not used yet
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()

    @property
    def pid(self) -> int | None:
        """The process id; None if no process runs."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def start(self) -> None:
        """Start the process if none runs, and return at once."""
        if self.pid is not None:
            return
        self.end()
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                cwd=self._folder,
                env={**os.environ, **self._variables},
                start_new_session=True,
            )
        except OSError as error:
            raise EnvError(f"cannot start {self._command[0]}: {error.strerror}") from error

    def ask(self, request: Mapping[str, Any], deadline_s: float, what: str) -> Answer:
        """Return the answer to a request and its blobs. The process is started if none runs.

        Raises EnvError, which names the request by `what`, if the answer is an error, if it does not come in
        time, and if the process ends. In the last two cases everything that the process started is killed.
        """
        self.start()
        until = time.monotonic() + deadline_s
        try:
            self._write(json.dumps(request).encode() + b"\n", until)
            answer = json.loads(self._line(until))
            if not isinstance(answer, dict):
                raise ValueError(f"an answer that is a {type(answer).__name__}")  # noqa: TRY004 - as below
            lengths = [int(length) for length in answer.pop("blobs", ())]
            if sum(lengths) > MOST_BLOBS or min(lengths, default=0) < 0:
                raise ValueError(f"blobs of {lengths} bytes")
            blobs = [self._bytes(length, until) for length in lengths]
        except TimeoutError:
            self.end()
            raise EnvError(f"{what}: no answer in {deadline_s:g} s") from None
        except (OSError, ValueError, EOFError) as error:
            self.end()
            raise EnvError(f"{what}: its process ended: {self.last_line() or error}") from error
        except BaseException:
            self.end()  # part of an answer may still come
            raise
        if "error" in answer:
            raise EnvError(f"{what}: {answer['error']}")
        return answer, blobs

    def last_line(self) -> str:
        """Return the last line that the process wrote to stderr."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _LOG_TAIL))
        lines = self._log.read().decode("utf-8", "replace").split("\n")
        self._log.seek(0, os.SEEK_END)
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def end(self) -> None:
        """Kill the process and all processes that it started."""
        process, self._process = self._process, None
        self._rest = b""
        if process is None:
            return
        kill_tree(process.pid)
        with suppress(ProcessLookupError):  # the rest of the group, if the process itself has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):  # unread requests
                    pipe.close()

    def close(self) -> None:
        """Kill the process; may be called twice."""
        self.end()
        self._log.close()

    def _write(self, line: bytes, until: float) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        pipe, rest = self._process.stdin.fileno(), memoryview(line)
        os.set_blocking(pipe, False)
        while rest:
            if not select.select([], [pipe], [], max(0.0, until - time.monotonic()))[1]:
                raise TimeoutError
            rest = rest[os.write(pipe, rest) :]

    def _line(self, until: float) -> bytes:
        while b"\n" not in self._rest:
            if len(self._rest) > MOST_LINE:
                raise ValueError(f"a line of more than {MOST_LINE} bytes")
            self._rest += self._more(until)
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _bytes(self, length: int, until: float) -> bytes:
        parts, have = [self._rest], len(self._rest)
        while have < length:
            parts.append(self._more(until))
            have += len(parts[-1])
        whole = b"".join(parts)
        self._rest = whole[length:]
        return whole[:length]

    def _more(self, until: float) -> bytes:
        """Return the next bytes of the process. Raises TimeoutError after `until`, EOFError at the end."""
        assert self._process is not None
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        if not select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
            raise TimeoutError
        block = os.read(pipe, _BLOCK)
        if not block:
            raise EOFError("it closed its output")
        return block
