"""How the processes of a group find each other: keys that the trainer keeps, asked for over the run's bus.

    Rendezvous   the keys of the present group, in the trainer's memory, bounded
    GroupStore   a torch.distributed store over them
    over_bus     how a worker reaches them: each call is a request to the trainer

The backends write a few hundred bytes for each process: its address, or NCCL's id. They travel as all
messages of the run do, under CURVE where it has keys, so that an outsider neither reads nor plants an
address. A process that waits for a key asks again each `POLL_S`: the trainer keeps no waiting calls.
Stores are written for torch.distributed, which calls them from C++ with the interpreter's lock.
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
"""Seconds that the trainer may take for one call."""
MOST_KEYS = 4096
MOST_KEY_CHARS = 256
MOST_VALUE_BYTES = 64 * 2**10

_distributed: Any = torch.distributed  # whose type stubs lack most of what is used here
_Store: Any = _distributed.Store

ChangeKeys = Callable[[Mapping[str, bytes], Mapping[str, int], Sequence[str]], dict[str, bytes]]
"""Store values, add to counters, look up: Rendezvous.change of one group. Raises BusError."""


class Rendezvous:
    """The keys of one group at a time; any thread may call it."""

    def __init__(self) -> None:
        """No group is open yet."""
        self._group = ""
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def open(self, group: str) -> None:
        """Forget the group before; accept keys of `group`."""
        with self._lock:
            self._group, self._values = group, {}

    def answer(self, request: RendezvousRequest) -> RendezvousReply:
        """Store and look up. Raises ProtocolError for another group, and beyond the bounds."""
        values = self.change(request.group, request.values, request.added, request.wanted)
        return RendezvousReply(values=values)

    def change(
        self,
        group: str,
        values: Mapping[str, bytes],
        added: Mapping[str, int],
        wanted: Sequence[str],
    ) -> dict[str, bytes]:
        """Store `values`, add to counters; the sums, and those of `wanted` that are known."""
        with self._lock:
            if group != self._group:
                raise ProtocolError(f"RendezvousRequest.group: {group[:40]!r} has ended")
            for key, value in values.items():
                self._set(key, value)
            for key, amount in added.items():
                self._set(key, str(int(self._values.get(key, b"0")) + amount).encode())
            return {k: self._values[k] for k in (*added, *wanted) if k in self._values}

    def _set(self, key: str, value: bytes) -> None:
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
    """Return a worker's calls, from a thread beside the event loop `loop` of `train`; each ends by `deadline` (time.monotonic)."""

    def change(
        values: Mapping[str, bytes], added: Mapping[str, int], wanted: Sequence[str]
    ) -> dict[str, bytes]:
        request = RendezvousRequest(
            group=group, values=dict(values), added=dict(added), wanted=list(wanted)
        )
        seconds = max(0.01, min(ASK_S, deadline - time.monotonic()))
        asked = asyncio.run_coroutine_threadsafe(train.request(request, seconds), loop)
        try:
            reply = asked.result(seconds + 1)  # by then the request itself has ended, or its loop
        finally:
            asked.cancel()
        assert isinstance(reply, RendezvousReply)
        return reply.values

    return change


class GroupStore(_Store):  # type: ignore[misc]
    """A torch.distributed store over the keys of one group, until `seal`.

    A backend may look into its store until the group ends: then nothing is there.
    """

    def __init__(self, change: ChangeKeys, deadline: float) -> None:
        """All waits together end by `deadline` (time.monotonic)."""
        super().__init__()
        self._change = change
        self._deadline = deadline
        self._is_sealed = False

    def seal(self) -> None:
        """Note that the group is made: no call reaches the trainer any more."""
        self._is_sealed = True

    # --- torch.distributed.Store, called from C++ -----------------------------------------------

    def set(self, key: str, value: bytes | str) -> None:
        """Store a value. Raises RuntimeError."""
        if not self._is_sealed:
            data = value.encode() if isinstance(value, str) else bytes(value)
            with _as_runtime_error():
                self._change({key: data}, {}, [])

    def get(self, key: str) -> bytes:
        """Return a value, waited for. Raises RuntimeError."""
        return self._waited([key], None)[key]

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; its sum. Raises RuntimeError."""
        with _as_runtime_error():
            return int(self._change({}, {key: amount}, [])[key])

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all have values. Raises RuntimeError."""
        with _as_runtime_error():
            return not self._is_sealed and len(self._change({}, {}, keys)) == len(set(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all have values. Raises RuntimeError."""
        self._waited(keys, timeout)

    def has_extended_api(self) -> bool:
        """Return False: the store has only the calls above."""
        return False

    def _waited(self, keys: Sequence[str], timeout: timedelta | None) -> dict[str, bytes]:
        if self._is_sealed:
            raise RuntimeError("the group is made, and its store is closed")
        deadline = self._deadline
        if timeout is not None:
            deadline = min(deadline, time.monotonic() + timeout.total_seconds())
        with _as_runtime_error():
            while len(found := self._change({}, {}, keys)) < len(set(keys)):
                if time.monotonic() >= deadline:
                    raise RuntimeError("a process of the group did not join")
                time.sleep(POLL_S)
            return found


@contextlib.contextmanager
def _as_runtime_error() -> Iterator[None]:
    """Yield what a backend's caller expects of a store that fails."""
    try:
        yield
    except (BusError, TimeoutError) as error:
        raise RuntimeError(f"the trainer did not answer: {error}") from None
