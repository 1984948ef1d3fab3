"""How the processes of a group find each other: keys that the trainer keeps, asked for over the run's bus.

    Rendezvous   the keys of the present group, in the trainer's memory, bounded
    LocalStore   a torch.distributed store over it, for the trainer's own rank
    BusStore     the same for a worker: each call is a request to the trainer

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
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed

from bus.errors import BusError, ProtocolError
from bus.messages import RendezvousReply, RendezvousRequest
from bus.requester import RequestClient

POLL_S = 0.01
ASK_S = 5.0
"""Seconds that the trainer may take for one call."""
MOST_KEYS = 4096
MOST_KEY_CHARS = 256
MOST_VALUE_BYTES = 64 * 2**10

_distributed: Any = torch.distributed  # whose type stubs lack most of what is used here
_Store: Any = _distributed.Store


class Rendezvous:
    """The keys of one group at a time; any thread may call it."""

    def __init__(self) -> None:
        """No group is open yet."""
        self._group = ""
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def open(self, group: str) -> None:
        """Forget the group before; accept keys of `group`."""
        with self._changed:
            self._group, self._values = group, {}
            self._changed.notify_all()

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
        with self._changed:
            if group != self._group:
                raise ProtocolError(f"RendezvousRequest.group: {group[:40]!r} has ended")
            for key, value in values.items():
                self._set(key, value)
            for key, amount in added.items():
                self._set(key, str(int(self._values.get(key, b"0")) + amount).encode())
            if values or added:
                self._changed.notify_all()
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

    def wait(self, group: str, wanted: Sequence[str], deadline: float) -> dict[str, bytes]:
        """The values of `wanted`, by `deadline` (time.monotonic). Raises ProtocolError, TimeoutError."""
        with self._changed:
            while True:
                found = self.change(group, {}, {}, wanted)
                if len(found) == len(set(wanted)):
                    return found
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError


class GroupStore(Protocol):
    """A torch.distributed store of one group, until `seal`."""

    def seal(self) -> None:
        """The group is made: no call reaches the trainer any more."""
        ...


class _SealableStore(_Store):  # type: ignore[misc]
    """What both stores share. A backend may look into its store until the group ends: nothing is there."""

    def __init__(self, deadline: float) -> None:
        super().__init__()
        self._deadline = deadline  # time.monotonic, of all waits together
        self._is_sealed = False

    def seal(self) -> None:
        self._is_sealed = True

    def _change(
        self, values: Mapping[str, bytes], added: Mapping[str, int], wanted: Sequence[str]
    ) -> dict[str, bytes]:
        raise NotImplementedError

    def _wait(self, wanted: Sequence[str], deadline: float) -> dict[str, bytes]:
        raise NotImplementedError

    # --- torch.distributed.Store, called from C++ -----------------------------------------------

    def set(self, key: str, value: bytes | str) -> None:
        if not self._is_sealed:
            data = value.encode() if isinstance(value, str) else bytes(value)
            with _as_runtime_error():
                self._change({key: data}, {}, [])

    def get(self, key: str) -> bytes:
        return self._waited([key], None)[key]

    def add(self, key: str, amount: int) -> int:
        with _as_runtime_error():
            return int(self._change({}, {key: amount}, [])[key])

    def check(self, keys: Sequence[str]) -> bool:
        with _as_runtime_error():
            return not self._is_sealed and len(self._change({}, {}, keys)) == len(set(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._waited(keys, timeout)

    def has_extended_api(self) -> bool:
        return False

    def _waited(self, keys: Sequence[str], timeout: timedelta | None) -> dict[str, bytes]:
        if self._is_sealed:
            raise RuntimeError("the group is made, and its store is closed")
        deadline = self._deadline
        if timeout is not None:
            deadline = min(deadline, time.monotonic() + timeout.total_seconds())
        with _as_runtime_error():
            return self._wait(keys, deadline)


@contextlib.contextmanager
def _as_runtime_error() -> Iterator[None]:
    """What a backend's caller expects of a store that fails."""
    try:
        yield
    except TimeoutError:
        raise RuntimeError("a process of the group did not join") from None
    except BusError as error:
        raise RuntimeError(f"the trainer did not answer: {error}") from None


class LocalStore(_SealableStore):
    """The trainer's own."""

    def __init__(self, rendezvous: Rendezvous, group: str, deadline: float) -> None:
        """All waits together end by `deadline` (time.monotonic)."""
        super().__init__(deadline)
        self._rendezvous = rendezvous
        self._group = group

    def _change(
        self, values: Mapping[str, bytes], added: Mapping[str, int], wanted: Sequence[str]
    ) -> dict[str, bytes]:
        return self._rendezvous.change(self._group, values, added, wanted)

    def _wait(self, wanted: Sequence[str], deadline: float) -> dict[str, bytes]:
        return self._rendezvous.wait(self._group, wanted, deadline)


class BusStore(_SealableStore):
    """A worker's. Its calls come from a thread beside the event loop `loop` of `train`."""

    def __init__(
        self,
        train: RequestClient,
        loop: asyncio.AbstractEventLoop,
        group: str,
        deadline: float,
    ) -> None:
        """All waits together end by `deadline` (time.monotonic)."""
        super().__init__(deadline)
        self._train = train
        self._loop = loop
        self._group = group

    def _change(
        self, values: Mapping[str, bytes], added: Mapping[str, int], wanted: Sequence[str]
    ) -> dict[str, bytes]:
        request = RendezvousRequest(
            group=self._group, values=dict(values), added=dict(added), wanted=list(wanted)
        )
        seconds = max(0.01, min(ASK_S, self._deadline - time.monotonic()))
        asked = asyncio.run_coroutine_threadsafe(self._train.request(request, seconds), self._loop)
        try:
            reply = asked.result(seconds + 1)  # by then the request itself has ended, or its loop
        finally:
            asked.cancel()
        assert isinstance(reply, RendezvousReply)
        return reply.values

    def _wait(self, wanted: Sequence[str], deadline: float) -> dict[str, bytes]:
        while True:
            found = self._change({}, {}, wanted)
            if len(found) == len(set(wanted)):
                return found
            if time.monotonic() >= deadline:
                raise TimeoutError
            time.sleep(POLL_S)
