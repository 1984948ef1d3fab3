"""Where guests come from, and how many of them boot at once.

Provider      gives an environment a guest in its initial state
UrlProvider   a guest server that runs already; one per slot
Restart       a command that restarts such a guest
container.py  the other one: a container per slot, made anew for each episode
BootGate      gives turns, since a boot needs all cores of its machine and a guest that plays hardly any; shared by
              the threads and processes of a user on a host
boots_at_once how many turns there are where no option says it
"""

from __future__ import annotations

import fcntl
import logging
import os
import random
import shlex
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bus.endpoints import make_private_dir
from bus.errors import EnvError, TaskError
from envs.contract.queueing import QueuePlace, leave_if_given_up, queueing
from envs.suites.osworld.guest import Address
from envs.tools.resource_pools import ResourcePool

logger = logging.getLogger(__name__)


class Provider(Protocol):
    """One slot's source of guests. Not thread-safe."""

    keeps_state: bool  # whether a guest is as the episode before left it

    def fresh(self) -> Address:
        """Return a guest, in its initial state if the provider can reset it. Raises EnvError."""
        ...

    def restart(self) -> bool:
        """Restart the guest, which shows no screen; False where that is not possible. Raises EnvError."""
        ...

    def close(self) -> None:
        """Release the guest; may be called twice."""
        ...


@dataclass(frozen=True)
class Restart:
    """A command of this host that restarts a guest; it runs without a shell.

    `{host}`, `{port}` and `{url}` in its words are the guest's.
    """

    command: str
    deadline_s: float

    def __post_init__(self) -> None:
        try:
            words = shlex.split(self.command)
        except ValueError as error:
            raise TaskError(f"env.options.restart {self.command!r}: {error}") from None
        if not words:
            raise TaskError("env.options.restart is blank; name a command, or leave it out")

    def run(self, address: Address) -> None:
        """Restart the guest at `address`. Raises EnvError with the last line that it wrote."""
        told = {"{host}": address.host, "{port}": str(address.server_port), "{url}": address.url}
        command = shlex.split(self.command)
        for mark, value in told.items():
            command = [word.replace(mark, value) for word in command]
        what = f"env.options.restart of guest {address.url}"
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=self.deadline_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise EnvError(f"{what}: not done in {self.deadline_s:g} s") from None
        except OSError as error:
            raise EnvError(f"{what}: {command[0]}: {error.strerror}") from None
        if done.returncode != 0:
            last = (done.stderr or done.stdout).decode("utf-8", "replace").strip()
            told_last = last.rpartition("\n")[2][:300] or "it wrote nothing"
            raise EnvError(f"{what}: exit code {done.returncode}: {told_last}")


class UrlProvider:
    """A guest that is used as it is: changes of an episode stay."""

    keeps_state = True

    def __init__(self, urls: ResourcePool[Address], restart: Restart | None = None) -> None:
        self._urls = urls
        self._restart = restart
        self._address: Address | None = None

    def fresh(self) -> Address:
        """Return the same guest each time. Raises EnvError if all are in use."""
        if self._address is None:
            self._address = self._urls.take()
        return self._address

    def restart(self) -> bool:
        """Run the command, if there is one."""
        if self._restart is None or self._address is None:
            return False
        logger.warning("restarting guest %s", self._address.url)
        self._restart.run(self._address)
        return True

    def close(self) -> None:
        """Release the guest."""
        address, self._address = self._address, None
        if address is not None:
            self._urls.give_back(address)


BOOT_SHARE = 0.5
"""Of a host's cores that boots may use: the others are left to guests that play and to the run's own processes."""


def boots_at_once(cores: int, cpus: int) -> int:
    """Return how many machines of `cpus` cores boot at once on a host of `cores`: 12 of 4 cores on 100, at least one."""
    return max(1, int(cores * BOOT_SHARE) // cpus)


CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Microseconds of processor time, or "max", in a period of so many: a container's limit (cgroup v2)."""


def usable_cores(quota: Path = CPU_QUOTA) -> int:
    """Return the number of cores that this process may use: those that it may run on, within its container's limit."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # no limit, or none that is known
        most, period = map(int, quota.read_text(encoding="ascii").split())
        cores = min(cores, max(1, most // period))
    return cores


POLL_S = 0.2
FAR_POLL_S = 1.0
"""The same for those before whom as many wait as may boot at once."""
_QUEUE, _TURNS = "queue.lock", "boot-{}.lock"


class BootGate:
    """Turns to boot a machine, for the first that come first.

    A turn is a lock on one of `most` files, a place in the queue a lock on one byte of a file, which lies the
    further behind the later it was taken. The end of a process gives both back, however it ends. Those before whom
    fewer than `most` others wait may take a turn, so that a process that is stopped does not hold up all.
    """

    def __init__(self, most: int, folder: Path | None = None) -> None:
        """Without a `folder` that of this user on this host."""
        self._most = most
        self._folder = folder or Path(tempfile.gettempdir()) / f"dart-osworld-{os.getuid()}"

    @contextmanager
    def turn(self, patience_s: float) -> Iterator[None]:
        """Hold a turn while inside; wait for it in a queue (envs/contract/queueing.py).

        Raises EnvError once no machine has begun to boot for `patience_s`.
        """
        leave_if_given_up()
        make_private_dir(self._folder)
        held = self._wait(patience_s)
        try:
            yield
        finally:
            os.close(held)

    def _wait(self, patience_s: float) -> int:
        """Return the file descriptor of a turn."""
        queue = self._open(_QUEUE)
        try:
            place = _lock_place(queue)
            if not self._are_before(queue, place) and (held := self._take()) is not None:
                return held
            with queueing(
                f"a turn to boot a guest, {self._most} boot at once", patience_s
            ) as waiting:
                return self._wait_at(queue, place, waiting, patience_s)
        finally:
            os.close(queue)

    def _wait_at(self, queue: int, place: int, waiting: QueuePlace, patience_s: float) -> int:
        seen = self._begun()
        while True:
            is_far = self._are_before(queue, place)
            if not is_far and (held := self._take()) is not None:
                return held
            if (begun := self._begun()) != seen:
                seen = begun
                waiting.moved()
            # They look at different moments, or each would find the locks of the others.
            if not waiting.pause((FAR_POLL_S if is_far else POLL_S) * random.uniform(0.5, 1.0)):  # noqa: S311
                raise EnvError(self._hopeless(patience_s))

    def _are_before(self, queue: int, place: int) -> bool:
        """Return True if as many wait before `place` as may boot at once."""
        waiting, spans = 0, [(0, place)]
        while spans and waiting < self._most:
            start, end = spans.pop()
            if start < end and (other := _first_locked(queue, start, end)) is not None:
                waiting += 1
                spans += [(start, other), (other + 1, end)]
        return waiting >= self._most

    def _take(self) -> int | None:
        """Return the file descriptor of a turn; None where all are held."""
        for number in range(self._most):
            held = self._open(_TURNS.format(number))
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(held, 0)
                os.write(held, str(os.getpid()).encode())
            except BlockingIOError:
                os.close(held)
            except BaseException:
                os.close(held)
                raise
            else:
                return held
        return None

    def _open(self, name: str) -> int:
        return os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _begun(self) -> list[int]:
        """Return a value that changes whenever a turn is taken."""
        paths = (self._folder / _TURNS.format(number) for number in range(self._most))
        return [path.stat().st_mtime_ns for path in paths if path.exists()]

    def _hopeless(self, patience_s: float) -> str:
        pids = [
            path.read_text(errors="replace") or "?"
            for number in range(self._most)
            if (path := self._folder / _TURNS.format(number)).exists()
        ]
        return (
            f"no turn to boot a guest: none of the {self._most} that boot on this host has ended its boot in "
            f"{patience_s:g} s (processes {', '.join(sorted(set(pids)))}); end what hangs, or raise "
            "env.options.boots if the host has cores to spare, env.options.turn_s if boots take so long"
        )


# Locks on bytes, of open files (F_OFD_SETLK of fcntl(2)): threads of one process exclude each other, too, and what
# is locked before a place is asked for without a list of those who wait.
_FLOCK = "hhqqi"  # l_type, l_whence, l_start, l_len, l_pid


def _lock_place(queue: int) -> int:
    """Lock the byte behind all that were locked before; return its place."""
    while True:
        place = time.monotonic_ns()  # the same clock for all processes of a host
        wanted = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)
        with suppress(BlockingIOError):  # another took it in the same nanosecond
            fcntl.fcntl(queue, fcntl.F_OFD_SETLK, wanted)
            return place


def _first_locked(queue: int, start: int, end: int) -> int | None:
    """Return a place from `start` up to, but not including, `end` that another one holds."""
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, start, end - start, 0)
    kind, _, found, _, _ = struct.unpack(_FLOCK, fcntl.fcntl(queue, fcntl.F_OFD_GETLK, asked))
    return None if kind == fcntl.F_UNLCK else found
