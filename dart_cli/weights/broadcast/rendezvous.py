"""How the processes of a group find each other: the trainer keeps keys, which workers request over the bus.

    Rendezvous   the keys of the present group in the trainer's memory, bounded in number and size
    GroupStore   a torch.distributed store over these keys
    over_bus     a worker's function to change the keys: each call is a request to the trainer

The backends write a few hundred bytes for each process: its address, or NCCL's id. These are sent like all
messages of the run, encrypted by CURVE if the run has keys, so that an outsider can neither read nor insert
an address. A process that waits for a key asks again each `POLL_S`, so the trainer has no waiting calls.
torch.distributed calls a store from C++, holding the interpreter's lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed

from bus.errors import BusError, ProtocolError
from bus.requests import RequestClient
from bus.weights import RendezvousReply, RendezvousRequest

POLL_S = 0.01
ASK_S = 5.0
"""Seconds within which the trainer must answer one call."""
MOST_KEYS = 4096
MOST_KEY_CHARS = 256
MOST_VALUE_BYTES = 64 * 2**10

_distributed: Any = torch.distributed  # whose type stubs lack most of what is used here
_Store: Any = _distributed.Store

ChangeKeys = Callable[[Mapping[str, bytes], Mapping[str, int], Sequence[str]], dict[str, bytes]]
"""A function that stores values, adds to counters and looks up keys, as Rendezvous.change does for one group.
It raises BusError."""


class Rendezvous:
    """The keys of one group at a time. Any thread may call it."""

    def __init__(self) -> None:
        """Begin without a group; `open` opens one."""
        self._group = ""
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def open(self, group: str) -> None:
        """Forget the keys of the group before; accept keys of `group`."""
        with self._lock:
            self._group, self._values = group, {}

    def answer(self, request: RendezvousRequest) -> RendezvousReply:
        """Answer a worker's request. Raises ProtocolError for another group, and beyond the bounds."""
        values = self.change(request.group, request.values, request.added, request.keys)
        return RendezvousReply(values=values)

    def change(
        self,
        group: str,
        values: Mapping[str, bytes],
        added: Mapping[str, int],
        keys: Sequence[str],
    ) -> dict[str, bytes]:
        """Store `values` and add to counters; return the sums, and the values of those `keys` that exist."""
        with self._lock:
            if group != self._group:
                raise ProtocolError(f"RendezvousRequest.group: {group[:40]!r} has ended")
            for key, value in values.items():
                self._set(key, value)
            for key, amount in added.items():
                self._set(key, str(int(self._values.get(key, b"0")) + amount).encode())
            return {k: self._values[k] for k in (*added, *keys) if k in self._values}

    def _set(self, key: str, value: bytes) -> None:
        """Store a value. Raises ProtocolError beyond the bounds of the keys."""
        is_new = key not in self._values
        if (
            len(key) > MOST_KEY_CHARS
            or len(value) > MOST_VALUE_BYTES
            or (is_new and len(self._values) >= MOST_KEYS)
        ):
            raise ProtocolError(f"RendezvousRequest: {key[:40]!r} is beyond what a group may store")
        self._values[key] = value


def over_bus(
    train: RequestClient, loop: asyncio.AbstractEventLoop, group: str, deadline: float
) -> ChangeKeys:
    """Return the function by which a worker stores, adds to and looks up the keys of `group`.

    It may be called in any thread but the one of `loop`, the event loop of the client `train`. Each call
    ends by `deadline` (time.monotonic).
    """

    def change(
        values: Mapping[str, bytes], added: Mapping[str, int], keys: Sequence[str]
    ) -> dict[str, bytes]:
        request = RendezvousRequest(
            group=group, values=dict(values), added=dict(added), keys=list(keys)
        )
        seconds = max(0.01, min(ASK_S, deadline - time.monotonic()))
        future = asyncio.run_coroutine_threadsafe(train.request(request, seconds), loop)
        try:
            reply = future.result(seconds + 1)  # by then the request, or its loop, has ended
        finally:
            future.cancel()
        assert isinstance(reply, RendezvousReply)
        return reply.values

    return change


class GroupStore(_Store):  # type: ignore[misc]
    """A torch.distributed store over the keys of one group, until `seal`.

    A backend may look into its store until the group ends; after `seal` it is empty.
    """

    def __init__(self, change: ChangeKeys, deadline: float) -> None:
        """End all waits by `deadline` (time.monotonic)."""
        super().__init__()
        self._change = change
        self._deadline = deadline
        self._is_sealed = False

    def seal(self) -> None:
        """Record that the group is complete: calls no longer reach the trainer."""
        self._is_sealed = True

    # --- torch.distributed.Store, called from C++ -----------------------------------------------

    def set(self, key: str, value: bytes | str) -> None:
        """Store a value. Raises RuntimeError."""
        if not self._is_sealed:
            data = value.encode() if isinstance(value, str) else bytes(value)
            with _as_runtime_error():
                self._change({key: data}, {}, [])

    def get(self, key: str) -> bytes:
        """Wait for a value and return it. Raises RuntimeError."""
        return self._waited([key], None)[key]

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its sum. Raises RuntimeError."""
        with _as_runtime_error():
            return int(self._change({}, {key: amount}, [])[key])

    def check(self, keys: Sequence[str]) -> bool:
        """Return True if all keys have values. Raises RuntimeError."""
        with _as_runtime_error():
            return not self._is_sealed and len(self._change({}, {}, keys)) == len(set(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values. Raises RuntimeError."""
        self._waited(keys, timeout)

    def has_extended_api(self) -> bool:
        """Return False: the store has only the calls above."""
        return False

    def _waited(self, keys: Sequence[str], timeout: timedelta | None) -> dict[str, bytes]:
        """Wait until all keys have values, and return these. Raises RuntimeError."""
        if self._is_sealed:
            raise RuntimeError("the group is made, and its store is closed")
        deadline = self._deadline
        if timeout is not None:
            deadline = min(deadline, time.monotonic() + timeout.total_seconds())
        with _as_runtime_error():
            while len(values := self._change({}, {}, keys)) < len(set(keys)):
                if time.monotonic() >= deadline:
                    raise RuntimeError("a process of the group did not join")
                time.sleep(POLL_S)
            return values


@contextlib.contextmanager
def _as_runtime_error() -> Iterator[None]:
    """Raise errors of the bus as RuntimeError, which torch.distributed expects of a store."""
    try:
        yield
    except (BusError, TimeoutError) as error:
        raise RuntimeError(f"the trainer did not answer: {error}") from None
