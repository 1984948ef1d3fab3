"""Existing resources shared out to slots: running guests, connected devices."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

from bus.errors import EnvError, TaskError

T = TypeVar("T", bound=Hashable)


class ResourcePool(Generic[T]):
    """`items` of option `option`, each used by one slot at a time. Raises TaskError for a duplicate."""

    def __init__(self, items: Sequence[T], option: str) -> None:
        if len(set(items)) < len(items):
            raise TaskError(f"{option} names one twice; each slot needs its own")
        self._count = len(items)
        self._free = list(items)
        self._option = option
        self._lock = threading.Lock()

    def take(self) -> T:
        """Take a free one. Raises EnvError."""
        with self._lock:
            if not self._free:
                raise EnvError(
                    f"all {self._count} of env.options.{self._option} are in use; "
                    "env.slots must not be greater than their number"
                )
            return self._free.pop(0)

    def give_back(self, item: T) -> None:
        """Put it back."""
        with self._lock:
            self._free.insert(0, item)
