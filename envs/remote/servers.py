"""Several addresses, shared out to slots.

SharedServers     each may serve several slots at once; the least used first, those that failed last
Retry             waits between attempts, with a bound in all
UnreachableError  there is no server at an address
shown             the start of a server's words, for an error
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

from bus.errors import EnvError
from envs.remote.address import Address

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0


class UnreachableError(EnvError):
    """There is no server at the address: refused, no such host, no route, or it has just ended."""


def shown(text: str) -> str:
    """The start of a server's words, in one line, for an error."""
    return " ".join(text[:400].split())[:200] or "nothing"


class SharedServers:
    """Addresses that serve several slots each. Thread-safe; counts are those of this process."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        self._lock = threading.Lock()
        # Slots in processes of their own know nothing of each other: each begins at another address.
        begin = os.getpid() % len(addresses)
        self._used = dict.fromkeys((*addresses[begin:], *addresses[:begin]), 0)
        self._failed: dict[Address, float] = dict.fromkeys(addresses, 0.0)  # when it last did

    def in_order(self) -> list[Address]:
        """All of them, in the order in which to try: the least used first, of equals those that work."""
        with self._lock:
            return sorted(self._used, key=lambda each: (self._used[each], self._failed[each]))

    def took(self, address: Address) -> None:
        """One slot more uses it."""
        with self._lock:
            self._used[address] += 1
            self._failed[address] = 0.0

    def gave_back(self, address: Address) -> None:
        """One slot fewer."""
        with self._lock:
            self._used[address] -= 1

    def failed(self, address: Address) -> None:
        """It is down or full: the others come first for now."""
        with self._lock:
            self._failed[address] = time.monotonic()


class Retry:
    """Pauses that grow, until `seconds` are over."""

    def __init__(self, seconds: float, pause: Callable[[float], None] = time.sleep) -> None:
        self._until = time.monotonic() + seconds
        self._next = FIRST_PAUSE_S
        self._pause = pause

    def again(self) -> bool:
        """Wait, then True; False once the time is over."""
        left = self._until - time.monotonic()
        if left <= 0:
            return False
        self._pause(min(self._next, left))
        self._next = min(2 * self._next, LONGEST_PAUSE_S)
        return True
