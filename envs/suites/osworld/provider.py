"""Provides guests, and limits how many of them boot at once.

Provider       the protocol of what provides an environment with a guest in its initial state
UrlProvider    the provider of guests that run already, one for each slot; container.py has the provider of
               guests in containers
Restart        a command that restarts such a guest
BootGate       gives turns to boot: a boot needs all cores of its machine, a guest that plays needs hardly
               any; the threads and processes of a user on a host share it
boots_at_once  returns how many turns there are if no option sets the number
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
    """A provider of guests for one slot. Not thread-safe."""

    keeps_state: bool  # whether a guest is in the state in which the previous episode left it

    def fresh(self) -> Address:
        """Return a guest, in its initial state if the provider can reset it. Raises EnvError."""
        ...

    def restart(self) -> bool:
        """Restart a guest that shows no screen; return False if that is not possible. Raises EnvError."""
        ...

    def close(self) -> None:
        """Release the guest; may be called twice."""
        ...


@dataclass(frozen=True)
class Restart:
    """A command of this host that restarts a guest; it runs without a shell.

    `{host}`, `{port}` and `{url}` in its words stand for the guest's.
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
        """Restart the guest at `address`. Raises EnvError with the last line that the command wrote."""
        values = {"{host}": address.host, "{port}": str(address.server_port), "{url}": address.url}
        command = shlex.split(self.command)
        for mark, value in values.items():
            command = [word.replace(mark, value) for word in command]
        what = f"env.options.restart of guest {address.url}"
        try:
            result = subprocess.run(
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
        if result.returncode != 0:
            output = (result.stderr or result.stdout).decode("utf-8", "replace").strip()
            last_line = output.rpartition("\n")[2][:300] or "it wrote nothing"
            raise EnvError(f"{what}: exit code {result.returncode}: {last_line}")


class UrlProvider:
    """A provider of a guest that runs already. Changes that an episode makes stay."""

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
        """Run the restart command and return True; return False if there is none."""
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
"""Share of a host's cores that boots may use. Guests that play and the run's processes need the others."""


def boots_at_once(cores: int, cpus: int) -> int:
    """Return how many machines of `cpus` cores boot at once on a host of `cores`, at least one.

    For example, 12 machines of 4 cores boot at once on a host of 100.
    """
    return max(1, int(cores * BOOT_SHARE) // cpus)


CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""A container's limit (cgroup v2): microseconds of processor time, or "max", and microseconds of a period."""


def usable_cores(quota: Path = CPU_QUOTA) -> int:
    """Return how many cores this process may use, within the limit of its container."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # there is no limit, or it cannot be read
        most, period = map(int, quota.read_text(encoding="ascii").split())
        cores = min(cores, max(1, most // period))
    return cores


POLL_S = 0.2
FAR_POLL_S = 1.0
"""The pause of a call before which as many others wait as may boot at once."""
_QUEUE, _TURNS = "queue.lock", "boot-{}.lock"


class BootGate:
    """A gate that gives turns to boot a machine, in order of arrival.

    A turn is a lock on one of `most` files. A place in the queue is a lock on one byte of a file; a later
    place is a later byte. The kernel releases both when a process ends, however it ends. A call may take a
    turn if fewer than `most` others wait before it, so that a stopped process does not block all others.
    """

    def __init__(self, most: int, folder: Path | None = None) -> None:
        """Keep the lock files in `folder`, by default in the folder of this user on this host."""
        self._most = most
        self._folder = folder or Path(tempfile.gettempdir()) / f"dart-osworld-{os.getuid()}"

    @contextmanager
    def turn(self, patience_s: float) -> Iterator[None]:
        """Wait for a turn in a queue (envs/contract/queueing.py), and hold it while a block runs.

        Raises EnvError once no machine has begun to boot for `patience_s`.
        """
        leave_if_given_up()
        make_private_dir(self._folder)
        turn = self._wait(patience_s)
        try:
            yield
        finally:
            os.close(turn)

    def _wait(self, patience_s: float) -> int:
        """Wait for a turn and return its file descriptor."""
        queue = self._open(_QUEUE)
        try:
            place = _lock_place(queue)
            if not self._is_far(queue, place) and (turn := self._take()) is not None:
                return turn
            with queueing(
                f"a turn to boot a guest, {self._most} boot at once", patience_s
            ) as waiting:
                return self._wait_at(queue, place, waiting, patience_s)
        finally:
            os.close(queue)

    def _wait_at(self, queue: int, place: int, waiting: QueuePlace, patience_s: float) -> int:
        """Wait at a place of the queue for a turn, and return its file descriptor. Raises EnvError."""
        last_times = self._turn_times()
        while True:
            is_far = self._is_far(queue, place)
            if not is_far and (turn := self._take()) is not None:
                return turn
            if (times := self._turn_times()) != last_times:
                last_times = times
                waiting.moved()
            # A random pause: calls that look at the same moment would find the locks of each other.
            if not waiting.pause((FAR_POLL_S if is_far else POLL_S) * random.uniform(0.5, 1.0)):  # noqa: S311
                raise EnvError(self._no_turn(patience_s))

    def _is_far(self, queue: int, place: int) -> bool:
        """Return True if as many wait before `place` as may boot at once."""
        waiting, spans = 0, [(0, place)]
        while spans and waiting < self._most:
            start, end = spans.pop()
            if start < end and (other := _first_locked(queue, start, end)) is not None:
                waiting += 1
                spans += [(start, other), (other + 1, end)]
        return waiting >= self._most

    def _take(self) -> int | None:
        """Take a turn and return its file descriptor; None if all turns are taken."""
        for number in range(self._most):
            turn = self._open(_TURNS.format(number))
            try:
                fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(turn, 0)
                os.write(turn, str(os.getpid()).encode())
            except BlockingIOError:
                os.close(turn)
            except BaseException:
                os.close(turn)
                raise
            else:
                return turn
        return None

    def _open(self, name: str) -> int:
        return os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _turn_times(self) -> list[int]:
        """Return the times at which turns were taken last; the list changes whenever a turn is taken."""
        paths = (self._folder / _TURNS.format(number) for number in range(self._most))
        return [path.stat().st_mtime_ns for path in paths if path.exists()]

    def _no_turn(self, patience_s: float) -> str:
        """Return the message for a call that gives up."""
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


# Locks on bytes of open files (F_OFD_SETLK of fcntl(2)) also exclude threads of one process from each other.
# The kernel can be asked which bytes before a place are locked, so that no list of waiting calls is needed.
_FLOCK = "hhqqi"  # l_type, l_whence, l_start, l_len, l_pid


def _lock_place(queue: int) -> int:
    """Lock a byte behind all bytes that were locked before, and return its place."""
    while True:
        place = time.monotonic_ns()  # all processes of a host have the same clock
        lock = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)
        with suppress(BlockingIOError):  # another call took the place in the same nanosecond
            fcntl.fcntl(queue, fcntl.F_OFD_SETLK, lock)
            return place


def _first_locked(queue: int, start: int, end: int) -> int | None:
    """Return a place in [start, end) that another call holds; None if there is none."""
    query = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, start, end - start, 0)
    kind, _, place, _, _ = struct.unpack(_FLOCK, fcntl.fcntl(queue, fcntl.F_OFD_GETLK, query))
    return None if kind == fcntl.F_UNLCK else place
