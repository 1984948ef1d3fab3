"""Where guests come from, and how many of them boot at once.

Provider      gives an environment a guest in its initial state
UrlProvider   a guest server that runs already; one per slot
Restart       a command that restarts such a guest
container.py  the other one: a container per slot, made anew for each episode
BootGate      gives turns, since a boot needs all cores of a host and an idle guest hardly any; shared by the
              threads and processes of a user on a host
"""

from __future__ import annotations

import fcntl
import logging
import os
import random
import shlex
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bus.endpoints import make_private_dir
from bus.errors import EnvError, TaskError
from envs.options import ResourcePool
from envs.osworld.guest import Address

logger = logging.getLogger(__name__)


class Provider(Protocol):
    """One slot's source of guests. Not thread-safe."""

    keeps_state: bool  # whether a guest is as the episode before left it

    def fresh(self) -> Address:
        """A guest, in its initial state if the provider can reset it. Raises EnvError."""
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
        """The same guest each time. Raises EnvError if all are in use."""
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


POLL_S = 0.2


class BootGate:
    """Turns are locks on `most` files, which the end of a process gives back, however it ends."""

    def __init__(self, most: int, folder: Path | None = None) -> None:
        """Without a `folder` that of this user on this host."""
        self._most = most
        self._folder = folder or Path(tempfile.gettempdir()) / f"dart-osworld-{os.getuid()}"

    @contextmanager
    def turn(self, deadline_s: float) -> Iterator[None]:
        """Hold a turn while inside. Raises EnvError where there is none within `deadline_s`."""
        make_private_dir(self._folder)
        until = time.monotonic() + deadline_s
        while (held := self._take()) is None:
            if time.monotonic() > until:
                raise EnvError(
                    f"no turn to boot a guest in {deadline_s:g} s: {self._most} machines of this host boot "
                    "already; raise env.options.boots if it has cores to spare, or env.options.turn_s"
                )
            time.sleep(POLL_S * random.uniform(0.5, 1.0))  # noqa: S311 - so that waiters spread
        try:
            yield
        finally:
            os.close(held)

    def _take(self) -> int | None:
        """The file descriptor of a turn; None where all are held."""
        for number in range(self._most):
            held = os.open(
                self._folder / f"boot-{number}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
            )
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(held)
            except BaseException:
                os.close(held)
                raise
            else:
                return held
        return None
