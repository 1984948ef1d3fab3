"""A web application that dart starts, watches and ends, and requests to it.

AppServer   the process of one application at a port of its own, with what it wrote
ask         one HTTP request and its answer
HttpAnswer  the status and the body of an answer
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any

from bus.errors import EnvError
from envs.contract.queueing import leave_if_given_up
from envs.tools.process_tree import kill_tree

MOST_BODY = 64 << 20  # bytes of an answer
_BLOCK = 1 << 16
_POLL_S = 0.05
_LOG_TAIL = 4096
_CONNECT_S = 2.0  # the longest answer while a server starts
STARTS = 3  # tries: between choosing a port and its use another program may take it

KEEPER = """
import os, shutil, signal, subprocess, sys, threading
child = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL, start_new_session=True)
def end():
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
def watch():
    while os.read(0, 1):
        pass
    end()
threading.Thread(target=watch, daemon=True).start()
code = child.wait()
end()
shutil.rmtree(sys.argv[1], ignore_errors=True)
os._exit(code if code >= 0 else 128 - code)
"""
"""The program between dart and the server: once dart has ended, also by `kill -9`, it ends the server and removes its folder."""


@dataclass(frozen=True)
class HttpAnswer:
    """The answer to a request."""

    status: int
    body: bytes

    @property
    def text(self) -> str:
        """The body as text."""
        return self.body.decode("utf-8", "replace")

    def value(self) -> Any:
        """Return the body as a JSON value; as text if it is no JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return self.text


def ask(
    method: str,
    address: str,
    *,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
    deadline_s: float = 20.0,
) -> HttpAnswer:
    """Send a request, `body` as JSON if it is not None, and return the answer, whatever its status.

    Raises EnvError if there is no whole answer within `deadline_s`. Proxies of the environment are not used.
    """
    what = f"{method} {address}"
    until = time.monotonic() + deadline_s
    data = None if body is None else json.dumps(body).encode()
    own_headers = {"Content-Type": "application/json"} if data is not None else {}
    request = urllib.request.Request(  # noqa: S310 - addresses of the user's own file
        address, data=data, headers={**own_headers, **(headers or {})}, method=method
    )
    try:
        try:
            answer = _OPENER.open(request, timeout=deadline_s)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            parts, size = [], 0
            while block := answer.read(_BLOCK):
                parts.append(block)
                size += len(block)
                if size > MOST_BODY:
                    raise EnvError(f"{what}: the answer is larger than {MOST_BODY} bytes")
                if time.monotonic() > until:
                    raise TimeoutError
            return HttpAnswer(answer.status or 0, b"".join(parts))
    except TimeoutError:
        raise EnvError(f"{what}: no whole answer in {deadline_s:g} s") from None
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError):
            raise EnvError(f"{what}: no answer in {deadline_s:g} s") from None
        raise EnvError(f"{what}: {reason or type(error).__name__}") from None


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class AppServer:
    """The process of a web application. Not thread-safe: one slot owns it.

    `command` may have {port} and {folder}, an empty folder of this server alone; both are also in its
    environment, as PORT and DART_FOLDER. It runs in the folder `place`; None for the empty one.
    """

    def __init__(self, command: Sequence[str], place: Path | None, *, start_s: float) -> None:
        self._command = tuple(command)
        self._place = place
        self._start_s = start_s
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None  # what the server writes
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self.port = 0
        self.starts = 0

    @property
    def folder(self) -> Path:
        """The folder of the present server."""
        assert self._scratch is not None, "a server runs"
        return Path(self._scratch.name)

    @property
    def pid(self) -> int | None:
        """The process id of the program that keeps the server; None if none runs."""
        return self._process.pid if self._process is not None and self.running else None

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self._process is not None and self._process.poll() is None

    def start(self, address: str) -> None:
        """Start the server anew and wait until it answers at `address`, which may have {port}.

        Raises EnvError, with the last line that the server wrote, if it ends or does not answer in time.
        """
        for tries_left in reversed(range(STARTS)):
            self.end()
            self._launch()
            try:
                if self._answers(address.replace("{port}", str(self.port)), may_end=tries_left > 0):
                    return
            except BaseException:
                self.end()
                raise

    def why_down(self, patience_s: float = 0.0) -> str:
        """Return how the server ended, with the last line that it wrote; empty while it runs.

        Its end is waited for, for `patience_s`: a connection that it closed may be noticed before it.
        """
        process = self._process
        if process is None:
            return ""
        try:
            code = process.wait(patience_s)
        except subprocess.TimeoutExpired:
            return ""
        return f"the server ended with exit code {code}{self.last_line()}"

    def last_line(self) -> str:
        """Return the last line that the server wrote, as the end of a sentence; empty if there is none."""
        if self._log is None:
            return ""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _LOG_TAIL))
        lines = self._log.read().decode("utf-8", "replace").split("\n")
        self._log.seek(0, os.SEEK_END)
        line = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return line and f"; it wrote last: {line[:300]}"

    def end(self) -> None:
        """Kill the server and everything that it started; may be called twice."""
        process, self._process = self._process, None
        if process is not None:
            kill_tree(process.pid)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            scratch.cleanup()

    def close(self) -> None:
        """Kill the server and forget what it wrote."""
        self.end()
        if self._log is not None:
            self._log.close()
            self._log = None

    def _launch(self) -> None:
        self.starts += 1
        if self._log is None:
            self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self._log.seek(0)
        self._log.truncate()
        self._scratch = tempfile.TemporaryDirectory(prefix="dart-app-", ignore_cleanup_errors=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        values = {"{port}": str(self.port), "{folder}": self._scratch.name}
        command = list(self._command)
        for name, value in values.items():
            command = [part.replace(name, value) for part in command]
        own = {"PORT": str(self.port), "DART_FOLDER": self._scratch.name}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", KEEPER, self._scratch.name, *command],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=self._log,
                cwd=self._place or self._scratch.name,
                env={**os.environ, **own},
                start_new_session=True,
            )
        except OSError as error:
            raise EnvError(f"cannot start {command[0]}: {error.strerror}") from error

    def _answers(self, address: str, *, may_end: bool) -> bool:
        """Wait until the server answers; return False if it has ended and `may_end`."""
        until = time.monotonic() + self._start_s
        while True:
            if reason := self.why_down():
                if may_end and "address already in use" in reason.lower():
                    return False
                raise EnvError(f"{' '.join(self._command)}: {reason}")
            try:
                if ask("GET", address, deadline_s=_CONNECT_S).status < 500:
                    return True
            except EnvError:
                pass
            if time.monotonic() > until:
                raise EnvError(
                    f"{' '.join(self._command)}: no answer from {address} in {self._start_s:g} s{self.last_line()}"
                )
            leave_if_given_up()
            time.sleep(_POLL_S)
