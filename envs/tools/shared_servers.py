"""Servers of web applications that all environments of a process share.

    SharedServers   servers by name: each is started for its first episode, and again if it has died; ended with
                    the last environment

It serves applications that keep the state of each episode apart themselves, by the id of a session. A server
that dies costs the episodes that use it at that time.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from envs.contract.queueing import SharedLock
from envs.tools.app_server import STARTS, AppServer

Maker = Callable[[str], tuple[AppServer, str]]
"""Makes the server of a name, and the address, with {port}, at which it answers once it has started."""


@dataclass
class _Entry:
    server: AppServer
    ready: str
    users: int = 0  # episodes that use it
    lock: SharedLock = field(default_factory=lambda: SharedLock("the start of a shared server"))


class SharedServers:
    """Servers by name. Its methods may be called from any thread."""

    def __init__(self, make: Maker, *, start_s: float, most: int) -> None:
        """Prepare for at most `most` servers at once beside those that episodes use."""
        self._make = make
        self._longest_s = (STARTS + 1) * start_s
        self._most = most
        self._lock = (
            threading.Lock()
        )  # guards the entries and the number of environments, for moments only
        self._entries: dict[str, _Entry] = {}  # the least recently used one first
        self._environments = 0

    def join(self) -> None:
        """Count one more environment."""
        with self._lock:
            self._environments += 1
            if self._environments == 1:
                atexit.register(self._end_all)

    def leave(self) -> None:
        """Count one environment less; the last one ends all servers."""
        with self._lock:
            self._environments -= 1
            is_last = self._environments == 0
        if is_last:
            atexit.unregister(self._end_all)
            self._end_all()

    def take(self, name: str) -> AppServer:
        """Return a running server for an episode, until `give_back`. Raises EnvError if it cannot be started."""
        with self._lock:
            entry = self._entries.pop(name, None) or _Entry(*self._make(name))
            self._entries[name] = entry
            entry.users += 1
            idle = self._surplus()
        for server in idle:
            server.close()
        try:
            with entry.lock.hold(
                self._longest_s, f"{name} has been started for {self._longest_s:g} s"
            ):
                if not entry.server.running:
                    entry.server.start(entry.ready)
        except BaseException:
            self.give_back([name])
            raise
        return entry.server

    def give_back(self, names: Iterable[str]) -> None:
        """End the use of servers that `take` returned."""
        with self._lock:
            for name in names:
                if entry := self._entries.get(name):
                    entry.users -= 1

    def pids(self) -> list[int]:
        """Return the process ids of the servers that run."""
        with self._lock:
            servers = [entry.server for entry in self._entries.values()]
        return [server.pid for server in servers if server.pid is not None]

    def _surplus(self) -> list[AppServer]:
        """Take the servers out that no episode uses, beyond `most`; the caller must hold the lock."""
        idle = [name for name, entry in self._entries.items() if entry.users == 0]
        beyond = idle[: max(0, len(self._entries) - self._most)]
        return [self._entries.pop(name).server for name in beyond]

    def _end_all(self) -> None:
        with self._lock:
            entries, self._entries = list(self._entries.values()), {}
        for entry in entries:
            entry.server.close()
