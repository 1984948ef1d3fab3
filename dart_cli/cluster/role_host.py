"""One command of `dart` on a node of the cluster: an actor of Ray's around a child process.

    RoleHost     starts the command, passes on what it prints, sends it signals
    Setup        what a node needs to run a command of this run
    ChildOutput      what the command has printed since it was last asked

The child is the same as on one box (runtime/supervisor.py): it leads its own process group, and ends within
seconds when this process is gone, however that ended. What it prints waits here, up to a bound, and so a
driver that does not ask stops no child. Only plain values go through Ray.
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
"""In the arguments of a command: the configuration file, which each node has at a place of its own."""
KEPT_BYTES = 2**20
"""Of a child's output, and of its log, that wait to be asked for; the oldest are dropped."""
SHARED_S = 30.0
"""Seconds after which a file that another host made is visible on a shared file system."""
_READ_BYTES = 65536
_LAST_OUTPUT_S = 1.0
_PORTS = range(20_000, 30_000)


class Setup(TypedDict):
    """What a node needs to run a command of this run."""

    config: str  # the text of the TOML file
    keys: str  # the text of the key file; empty for a node that sees the run directory
    cwd: str  # where `dart up` was started: paths of the configuration may be relative to it
    environment: dict[str, str]  # of `dart up`, for the child
    hides_gpus: bool  # of the node, from a process that asked for none
    shared: list[tuple[str, str]]  # a file that must be visible here, and the error if it is not


class ChildOutput(TypedDict):
    """What a command has printed since it was last asked."""

    output: bytes
    log: bytes  # of its log file, where that is on this node alone
    code: int | None  # once it has ended and all of its output was asked for


class RoleHost:
    """See the module. Its methods run in one loop; each is short but `printed`, which waits."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._life = uuid.uuid4().hex
        self._folder: Path | None = None
        self._setup: Setup | None = None
        self._process: LocalProcess | None = None
        self._pumping: asyncio.Task[None] | None = None
        self._output = bytearray()
        self._dropped = 0  # bytes
        self._log_read = 0  # bytes
        self._code: int | None = None
        self._news = asyncio.Event()

    async def describe(self) -> dict[str, Any]:
        """Where this is; `life` differs after each start of the actor."""
        import ray

        from dart_cli import __version__

        context = ray.get_runtime_context()
        return {
            "life": self._life,
            "node": context.get_node_id(),
            "host": socket.gethostname(),
            "version": __version__,
        }

    async def ports(self, count: int, kept: Sequence[int] = ()) -> int:
        """Return the first of `count` ports in a row that are free here, none of them `kept`; 0 without any."""
        for step in range(0, len(_PORTS), count):
            first = _PORTS[(os.getpid() * count + step) % len(_PORTS)]
            if any(port in kept for port in range(first, first + count)):
                continue
            with contextlib.suppress(OSError), contextlib.ExitStack() as held:
                for port in range(first, first + count):
                    held.enter_context(socket.create_server(("", port)))
                return first
        return 0

    async def prepare(self, setup: Setup) -> str:
        """Make the private folder of this command; returns what prevents a start here, or nothing."""
        try:
            self._folder = self._folder or _private_folder()
            (self._folder / "run.toml").write_text(setup["config"], encoding="utf-8")
            if setup["keys"]:
                _write_private(self._folder / "keys", setup["keys"])
        except (DartError, OSError) as error:
            return f"{error}"
        until = time.monotonic() + SHARED_S
        for path, problem in setup["shared"]:
            while not Path(path).exists():  # noqa: ASYNC240 - a stat, which no other call waits for
                if time.monotonic() > until:
                    return problem
                await asyncio.sleep(0.25)
        self._setup = setup
        return ""

    async def start(self, arguments: Sequence[str], environment: dict[str, str]) -> None:
        """Start `dart ARGUMENTS`, for CONFIG the file of this node; what an earlier start left is ended."""
        assert self._folder is not None
        assert self._setup is not None
        await self._forget()
        given = [str(self._folder / "run.toml") if each == CONFIG else each for each in arguments]
        if self._setup["keys"] and CONFIG in arguments:
            own = {"run.dir": self._run_dir, "bus.keys": self._folder / "keys"}
            for key, path in own.items():
                given += ["--set", f"{key}={to_toml(str(path))}"]
        cwd = Path(self._setup["cwd"])
        self._process = await start_here(
            self._worker,
            given,
            asyncio.Event(),
            env=self._environment(environment),
            cwd=cwd if cwd.is_dir() else self._folder,  # noqa: ASYNC240 - a stat
        )
        self._pumping = asyncio.create_task(self._pump(self._process))

    async def printed(self, life: str, within_s: float) -> ChildOutput | None:
        """Return what is new, as soon as anything is, or after `within_s`; None for another life of this actor."""
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
        """To the child and everything it started, of this life of the actor."""
        if self._process is not None and life == self._life:
            self._process.signal_group(signal.Signals(number))

    async def close(self) -> None:
        """End what is left, and remove the private folder."""
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
        """Return the child's environment, without Ray's settings, thread limits and debugger."""
        assert self._setup is not None
        ours = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        for name in ("OMP_NUM_THREADS", "PYTHONBREAKPOINT"):
            ours.pop(name, None)
        if self._setup["hides_gpus"]:
            ours[VISIBLE] = ""
        return ours | self._setup["environment"] | environment

    async def _pump(self, process: LocalProcess) -> None:
        """Keep what the child prints, and how it ends."""
        reading = asyncio.create_task(self._read(process))
        code = await process.wait()
        process.signal_group(signal.SIGKILL)  # what it left behind
        await asyncio.wait([reading], timeout=_LAST_OUTPUT_S)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        self._code = code
        self._news.set()

    async def _read(self, process: LocalProcess) -> None:
        while chunk := await process.output.read(_READ_BYTES):
            self._output += chunk
            over = len(self._output) - KEPT_BYTES
            if over > 0:
                self._dropped += over
                del self._output[:over]
            self._news.set()

    def _log(self) -> bytes:
        """Return what its log has more; empty where the driver sees the run directory itself."""
        if self._setup is None or not self._setup["keys"] or self._folder is None:
            return b""
        with contextlib.suppress(OSError):
            with (log_dir(self._run_dir) / f"{self._worker}.log").open("rb") as file:
                file.seek(self._log_read)
                more = file.read(KEPT_BYTES)
            self._log_read += len(more)
            return more
        return b""

    async def _forget(self) -> None:
        """End the present child, if there is one, and forget what it printed."""
        if self._process is not None and self._pumping is not None:
            self._process.signal_group(signal.SIGKILL)
            await self._pumping
        self._process, self._pumping, self._code = None, None, None
        self._output.clear()
        self._news.clear()


def _private_folder() -> Path:
    """Return a folder that no other user can enter; those of processes that are gone are removed."""
    parent = make_private_dir(Path("/tmp") / f"dart-{os.getuid()}")  # noqa: S108 - checked to be ours
    mine = f"ray-{socket.gethostname()[:40]}-"
    for path in parent.glob(f"{glob.escape(mine)}*"):
        pid, ticks, *_ = [*path.name.removeprefix(mine).split("-"), ""]
        is_one = pid.isdecimal() and ticks.isdecimal()
        if is_one and process_liveness(int(pid), ticks=int(ticks)) == "gone":
            shutil.rmtree(path, ignore_errors=True)
    own = f"{mine}{os.getpid()}-{start_ticks(os.getpid())}-"
    return Path(tempfile.mkdtemp(prefix=own, dir=parent))


def _write_private(folder: Path, keys: str) -> None:
    """Write the run's keys as `dart keys` writes them."""
    make_private_dir(folder)
    path = folder / KEY_FILE
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(keys)
