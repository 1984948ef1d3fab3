"""Guests or devices that an option of a suite names, each used by one slot at a time.

ResourcePool   the items of one option, taken and given back
SharedPools    one pool for all environments of a process that name the same items
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from bus.errors import EnvError, TaskError

T = TypeVar("T", bound=Hashable)


class ResourcePool(Generic[T]):
    """The items that `option` names, each used by one slot at a time. Raises TaskError for a duplicate."""

    def __init__(self, items: Sequence[T], option: str) -> None:
        if len(set(items)) < len(items):
            raise TaskError(f"{option} names one twice; each slot needs its own")
        self._count = len(items)
        self._free = list(items)
        self._option = option
        self._lock = threading.Lock()

    def take(self) -> T:
        """Take a free item out of the pool and return it. Raises EnvError if none is free."""
        with self._lock:
            if not self._free:
                raise EnvError(
                    f"all {self._count} of env.options.{self._option} are in use; env.slots must not be greater "
                    "than their number, and an environment that hangs keeps its own"
                )
            return self._free.pop(0)

    def give_back(self, item: T) -> None:
        """Put an item back into the pool."""
        with self._lock:
            self._free.insert(0, item)


class SharedPools(Generic[T]):
    """The pools of one option: all environments of a process that name the same items share a pool."""

    def __init__(self, option: str, read: Callable[[str], T]) -> None:
        self._option = option
        self._read = read
        self._pools: dict[tuple[str, ...], ResourcePool[T]] = {}
        self._lock = threading.Lock()

    def of(self, value: str | Sequence[str]) -> ResourcePool[T]:
        """Return the pool of one name or several. Raises TaskError for a name that `read` refuses."""
        names = (value,) if isinstance(value, str) else tuple(value)
        with self._lock:
            if names not in self._pools:
                self._pools[names] = ResourcePool(
                    [self._read(name) for name in names], self._option
                )
            return self._pools[names]
