"""One command of `dart` on a node of the cluster: a Ray actor around a child process.

    RoleHost      starts the command, returns its output, and sends it signals
    Setup         the values that a node needs to run a command of this run
    ChildOutput   the output of the command since the last call

The child is the same as on one host (runtime/supervisor.py): it leads its own process group, and ends within
seconds when this process is gone, however that ended. Its output waits here, up to a limit, so a driver that
does not ask never blocks a child. Only plain values go through Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import os
import shutil
import signal
import socket
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

from bus.endpoints import make_private_dir
from bus.errors import DartError
from dart_cli.config.devices import VISIBLE
from dart_cli.config.endpoints import KEY_FILE
from dart_cli.config.values import to_toml
from dart_cli.runtime.liveness import process_liveness, start_ticks
from dart_cli.runtime.logs import log_dir
from dart_cli.runtime.supervisor import LocalProcess, start_here

CONFIG = "{config}"
"""The text that stands in a command's arguments for the configuration file, whose path differs by node."""
BUFFER_BYTES = 2**20
"""Most bytes of a child's output, and of its log, that wait here; the oldest are dropped."""
SHARED_S = 30.0
"""Seconds after which a file from another host is visible on a shared file system."""
_READ_BYTES = 65536
_LAST_OUTPUT_S = 1.0
_PORTS = range(20_000, 30_000)


class Setup(TypedDict):
    """The values that a node needs to run a command of this run."""

    config: str  # the text of the TOML file
    keys: str  # the text of the key file; empty for a node that sees the run directory
    cwd: str  # working directory of `dart up`, to which paths may be relative
    environment: dict[str, str]  # variables of `dart up` for the child
    hides_gpus: bool  # whether the child, which asked for no GPU, sees none
    shared: list[tuple[str, str]]  # a file that must be visible here, and the error if it is not


class ChildOutput(TypedDict):
    """The output of a command since the last call."""

    output: bytes
    log: bytes  # new content of its log file, if only this node has the file
    code: int | None  # exit code, once it has ended and all of its output was returned


class RoleHost:
    """The actor around one child process. Its methods run in one event loop; only `new_output` waits."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._life = uuid.uuid4().hex
        self._folder: Path | None = None
        self._setup: Setup | None = None
        self._process: LocalProcess | None = None
        self._pumping: asyncio.Task[None] | None = None
        self._output = bytearray()
        self._dropped = 0  # bytes of output
        self._log_read = 0  # bytes of the log
        self._code: int | None = None
        self._news = asyncio.Event()

    async def describe(self) -> dict[str, Any]:
        """Return node, host and version of dart. `life` differs after each start of the actor."""
        import ray

        from dart_cli import __version__

        context = ray.get_runtime_context()
        return {
            "life": self._life,
            "node": context.get_node_id(),
            "host": socket.gethostname(),
            "version": __version__,
        }

    async def ports(self, count: int, excluded: Sequence[int] = ()) -> int:
        """Return the first of `count` consecutive free ports that are not `excluded`; 0 if there are none."""
        for step in range(0, len(_PORTS), count):
            first = _PORTS[(os.getpid() * count + step) % len(_PORTS)]
            if any(port in excluded for port in range(first, first + count)):
                continue
            with contextlib.suppress(OSError), contextlib.ExitStack() as sockets:
                for port in range(first, first + count):
                    sockets.enter_context(socket.create_server(("", port)))
                return first
        return 0

    async def prepare(self, setup: Setup) -> str:
        """Create the private folder of this command; return what prevents a start here, or an empty text."""
        try:
            self._folder = self._folder or _private_folder()
            (self._folder / "run.toml").write_text(setup["config"], encoding="utf-8")
            if setup["keys"]:
                _write_private(self._folder / "keys", setup["keys"])
        except (DartError, OSError) as error:
            return f"{error}"
        until = time.monotonic() + SHARED_S
        for path, problem in setup["shared"]:
            while not Path(path).exists():  # noqa: ASYNC240 - a stat, for which no other call waits
                if time.monotonic() > until:
                    return problem
                await asyncio.sleep(0.25)
        self._setup = setup
        return ""

    async def start(self, arguments: Sequence[str], environment: dict[str, str]) -> None:
        """End an earlier child, and start `dart ARGUMENTS`. This node's file replaces CONFIG in them."""
        assert self._folder is not None
        assert self._setup is not None
        await self._forget()
        command = [
            str(self._folder / "run.toml") if argument == CONFIG else argument
            for argument in arguments
        ]
        if self._setup["keys"] and CONFIG in arguments:
            own = {"run.dir": self._run_dir, "bus.keys": self._folder / "keys"}
            for key, path in own.items():
                command += ["--set", f"{key}={to_toml(str(path))}"]
        cwd = Path(self._setup["cwd"])
        self._process = await start_here(
            self._worker,
            command,
            asyncio.Event(),
            env=self._environment(environment),
            cwd=cwd if cwd.is_dir() else self._folder,  # noqa: ASYNC240 - a stat
        )
        self._pumping = asyncio.create_task(self._pump(self._process))

    async def new_output(self, life: str, within_s: float) -> ChildOutput | None:
        """Return new output as soon as there is some, at the latest after `within_s` seconds.

        Return None if `life` belongs to an earlier start of this actor.
        """
        if life != self._life:
            return None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._news.wait()
        self._news.clear()
        output, self._output = bytes(self._output), bytearray()
        if self._dropped:
            output = b"\nWARNING %d bytes of output were dropped\n" % self._dropped + output
            self._dropped = 0
        code = self._code
        if code is not None:
            self._news.set()
        return {"output": output, "log": self._log(), "code": code}

    async def signal(self, life: str, number: int) -> None:
        """Send a signal to the child and everything it started, unless `life` belongs to an earlier start."""
        if self._process is not None and life == self._life:
            self._process.signal_group(signal.Signals(number))

    async def close(self) -> None:
        """End the child, and remove the private folder."""
        await self._forget()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    # --- the child --------------------------------------------------------------------------

    @property
    def _run_dir(self) -> Path:
        assert self._folder is not None
        return self._folder / "run"

    def _environment(self, environment: dict[str, str]) -> dict[str, str]:
        """Return the child's environment variables, without Ray's settings, thread limits and debugger."""
        assert self._setup is not None
        own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        for name in ("OMP_NUM_THREADS", "PYTHONBREAKPOINT"):
            own.pop(name, None)
        if self._setup["hides_gpus"]:
            own[VISIBLE] = ""
        return own | self._setup["environment"] | environment

    async def _pump(self, process: LocalProcess) -> None:
        """Collect the child's output and its exit code."""
        reading = asyncio.create_task(self._read(process))
        code = await process.wait()
        process.signal_group(signal.SIGKILL)  # processes that the child left behind
        await asyncio.wait([reading], timeout=_LAST_OUTPUT_S)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        self._code = code
        self._news.set()

    async def _read(self, process: LocalProcess) -> None:
        """Read output into the buffer until its end, and drop the oldest bytes if it is full."""
        while chunk := await process.output.read(_READ_BYTES):
            self._output += chunk
            over = len(self._output) - BUFFER_BYTES
            if over > 0:
                self._dropped += over
                del self._output[:over]
            self._news.set()

    def _log(self) -> bytes:
        """Return new content of the child's log; nothing if the driver sees the run directory itself."""
        if self._setup is None or not self._setup["keys"] or self._folder is None:
            return b""
        with contextlib.suppress(OSError):
            with (log_dir(self._run_dir) / f"{self._worker}.log").open("rb") as file:
                file.seek(self._log_read)
                more = file.read(BUFFER_BYTES)
            self._log_read += len(more)
            return more
        return b""

    async def _forget(self) -> None:
        """Kill the current child, if there is one, and drop its output."""
        if self._process is not None and self._pumping is not None:
            self._process.signal_group(signal.SIGKILL)
            await self._pumping
        self._process, self._pumping, self._code = None, None, None
        self._output.clear()
        self._news.clear()


def _private_folder() -> Path:
    """Create a folder that no other user can enter. Folders of processes that are gone are removed."""
    parent = make_private_dir(Path("/tmp") / f"dart-{os.getuid()}")  # noqa: S108 - checked to be ours
    prefix = f"ray-{socket.gethostname()[:40]}-"
    for path in parent.glob(f"{glob.escape(prefix)}*"):
        pid, ticks, *_ = [*path.name.removeprefix(prefix).split("-"), ""]
        is_ours = pid.isdecimal() and ticks.isdecimal()
        if is_ours and process_liveness(int(pid), ticks=int(ticks)) == "gone":
            shutil.rmtree(path, ignore_errors=True)
    own = f"{prefix}{os.getpid()}-{start_ticks(os.getpid())}-"
    return Path(tempfile.mkdtemp(prefix=own, dir=parent))


def _write_private(folder: Path, keys: str) -> None:
    """Write the run's keys as `dart keys` writes them."""
    make_private_dir(folder)
    path = folder / KEY_FILE
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(keys)
