"""Keeps the commands of a run alive while a benchmark kills them.

    ChaosSupervisor   starts each command again the moment it ends, in a separate session
    role_of           the role of a process, from its worker name

Signals go to process groups, which psutil does not have: they reach re-parented children, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from dart_cli.runtime.role import GRACE_S, PARENT_VARIABLE

STATUS = "status"
"""The command whose output is read: it has no heartbeat, its own lines show that it works."""
_PAUSE_S = 0.5
"""Before a process that ended by itself is started again."""
_LINE_BYTES = 2**24
"""Longest line of a `dart status --json`."""


def role_of(name: str) -> str:
    """Return the role of a worker: `env` for `env-0`."""
    return name.partition("-")[0]


@dataclass
class ChaosSupervisor:
    """A supervisor that keeps commands of `dart` running until `end`."""

    commands: Mapping[str, Sequence[str]]  # worker name -> arguments of `dart`, data last
    log: TextIO
    ended_alone: list[str] = field(default_factory=list)  # without being killed
    spoken: set[int] = field(default_factory=set)  # process ids of STATUS that wrote a line
    _processes: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    _killed: set[int] = field(default_factory=set)
    _ending: bool = False

    def pid(self, name: str) -> int:
        """Return the id of the command's present process; 0 from a kill until the next start."""
        process = self._processes.get(name)
        if process is None or process.returncode is not None or process.pid in self._killed:
            return 0
        return process.pid

    def kill(self, name: str) -> None:
        """Send SIGKILL to the process and its children."""
        if pid := self.pid(name):
            self._killed.add(pid)
            _signal(pid, signal.SIGKILL)

    async def keep(self, name: str) -> None:
        """Run one command and start it again each time it ends."""
        while not self._ending:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "dart_cli",
                *self.commands[name],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE if name == STATUS else self.log,
                stderr=self.log,
                limit=_LINE_BYTES,
                start_new_session=True,
                env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
            )
            self._processes[name] = process
            if process.stdout is not None:
                async for _ in process.stdout:
                    self.spoken.add(process.pid)
            code = await process.wait()
            _signal(process.pid, signal.SIGKILL)  # what it left behind
            if process.pid not in self._killed and not self._ending:
                if not (name == STATUS and code == 1):  # it means: data does not answer
                    self.ended_alone.append(f"{name} ended with {code}")
                await asyncio.sleep(_PAUSE_S)

    async def end(self) -> None:
        """End all commands cleanly, the last one last: the others still send to it."""
        self._ending = True
        started = [self._processes[name] for name in self.commands if name in self._processes]
        for part in (started[:-1], started[-1:]):
            living = [process for process in part if process.returncode is None]
            for process in living:
                _signal(process.pid, signal.SIGTERM)
            waits = [asyncio.create_task(process.wait()) for process in living]
            if not waits:
                continue
            await asyncio.wait(waits, timeout=GRACE_S + 2)
            for process in living:
                if process.returncode is None:
                    _signal(process.pid, signal.SIGKILL)
            _, stuck = await asyncio.wait(waits, timeout=GRACE_S)
            for each in stuck:
                each.cancel()


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
