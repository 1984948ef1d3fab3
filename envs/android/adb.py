"""adb as a program: one device, commands with a deadline, screenshots.

find_adb       the program, or the install step
AdbTransport   run(args, deadline_s) -> bytes, and methods built on it
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from bus.errors import EnvError, MissingPartError

POLL_S = 0.5
_PNG = b"\x89PNG\r\n\x1a\n"
_MOST_CHATTER = 4096  # bytes of warnings before a screenshot


def find_adb(named: str = "") -> str:
    """The program: `named`, or the first on PATH. Raises MissingPartError with the install step."""
    found = shutil.which(Path(named or "adb").expanduser())
    if found is None:
        cure = "apt install adb, or set env.options.adb to its path"
        raise MissingPartError(f"no adb at {named or 'any place of PATH'}: {cure}")
    return found


class AdbTransport:
    """One device, named by its `serial`; without one adb takes the only one there is.

    Raises EnvError if adb or the device fails.
    """

    def __init__(self, adb: str, serial: str = "", *, deadline_s: float = 30.0) -> None:
        self.name = serial or "the device"
        self._command = [adb, *(("-s", serial) if serial else ())]
        self._deadline_s = deadline_s

    def run(self, args: Sequence[str], deadline_s: float | None = None) -> bytes:
        """Output of `adb ARGS...`. Raises EnvError if it fails or exceeds its deadline."""
        seconds = self._deadline_s if deadline_s is None else deadline_s
        what = " ".join(args)[:80]
        try:
            # A session of its own: a hung adb is killed with whatever it started, but for its
            # server, which is all slots' and detaches itself.
            process = subprocess.Popen(
                [*self._command, *args],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise EnvError(f"cannot run {self._command[0]}: {error.strerror}") from error
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise EnvError(f"{self.name}: adb {what}: no answer in {seconds:g} s") from None
        finally:
            _end(process)
        if process.returncode != 0:
            said = (errors.strip() or output.strip()).decode("utf-8", "replace")
            line = said.rpartition("\n")[2][:200] or "nothing"
            raise EnvError(f"{self.name}: adb {what}: exit code {process.returncode}: {line}")
        return output

    def shell(self, command: str | Sequence[str], deadline_s: float | None = None) -> str:
        """Output of a command on the device. A list reaches its program word by word.

        adb joins its arguments with blanks, and the device's shell reads the whole: here the words
        of a list are quoted for that shell. A text is a script for it.
        """
        script = command if isinstance(command, str) else shlex.join(command)
        return self.run(["shell", script], deadline_s).decode("utf-8", "replace")

    def screenshot(self) -> bytes:
        """The screen as PNG."""
        # Not `shell`, which turns line ends of older devices into CR LF.
        output = self.run(["exec-out", "screencap", "-p"])
        start = output.find(_PNG, 0, _MOST_CHATTER)  # devices with several displays warn first
        if start < 0:
            said = " ".join(output[:200].decode("utf-8", "replace").split())
            raise EnvError(f"{self.name}: screencap gave no PNG: {said or 'nothing'}")
        return output[start:]

    def wait_ready(self, deadline_s: float) -> None:
        """Return when the device has booted. Raises EnvError after `deadline_s`."""
        until, last = time.monotonic() + deadline_s, "it is booting"
        while (left_s := until - time.monotonic()) > 0:
            try:
                if self.shell("getprop sys.boot_completed", min(10.0, left_s)).strip() == "1":
                    return
            except EnvError as error:
                last = str(error)
            time.sleep(min(POLL_S, max(0.0, until - time.monotonic())))
        raise EnvError(f"{self.name} was not ready in {deadline_s:g} s: {last}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the rest of its processes, and close its pipes."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
