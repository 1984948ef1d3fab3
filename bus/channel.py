"""A ZeroMQ socket in an asyncio loop, by callbacks: no task, no future and no poll for a message.

    Channel        calls `take` for each message that comes in; `send` never waits
    PeerWatch      reports at once when a connection is established and when it is lost

ZeroMQ's descriptor is edge-triggered (zmq_getsockopt(3), ZMQ_FD): it signals once for any number of
events, and sending or receiving may consume the signal. So `Channel` reads ZMQ_EVENTS until
nothing is left, also after each send.

Only the bus's own modules use it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

_BURST = 4
"""Messages taken before other callbacks of the loop run."""

_COPY_BYTES = 256 * 2**10
"""Smaller frames are copied to be sent: sending without a copy costs more for them."""


class Channel:
    """Owns an open socket and drives it from the running loop."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        take: Callable[[list[bytes]], None],
        *,
        room: Callable[[], None] | None = None,
    ) -> None:
        """`take` gets each message's frames; `room` is called when a refused send may be tried again."""
        self._socket = socket
        socket.copy_threshold = _COPY_BYTES
        self._take = take
        self._room = room
        self._blocked = False  # a send was refused: call `room` when there is room
        self._paused = False
        self._again: asyncio.Handle | None = None
        self._loop = asyncio.get_running_loop()
        self._descriptor: int = socket.FD
        self._loop.add_reader(self._descriptor, self._turn)
        self._soon()  # earlier messages are not signalled again

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._socket.closed

    def send(self, frames: Sequence[bytes]) -> bool:
        """Queue a message; False, with nothing queued, if that would block."""
        socket = self._socket
        last = len(frames) - 1
        try:
            # Only the first frame can be refused: ZeroMQ counts messages, not frames.
            for index, frame in enumerate(frames):
                socket.send(frame, _NOBLOCK if index == last else _NOBLOCK_MORE, copy=False)
        except zmq.Again:
            self._blocked = True
            self._soon()  # room may have come meanwhile
            return False
        if self._events() & _POLLIN:  # the send may have consumed its signal
            self._soon()
        return True

    def pause(self) -> None:
        """Leave incoming messages in ZeroMQ's queue, and so in the sender's."""
        self._paused = True

    def resume(self) -> None:
        """Take messages again."""
        if self._paused and not self.closed:
            self._paused = False
            self._soon()

    def close(self, linger_s: float) -> None:
        """Take nothing more; sent messages have `linger_s` to go out."""
        if not self.closed:
            self._loop.remove_reader(self._descriptor)
            self._socket.close(linger=int(linger_s * 1000))

    def _events(self) -> int:
        events = self._socket.getsockopt(zmq.EVENTS)
        assert isinstance(events, int)
        return events

    def _soon(self) -> None:
        if self._again is None:
            self._again = self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        if self._again is not None:
            self._again.cancel()
            self._again = None
        socket = self._socket
        for _ in range(_BURST):
            if socket.closed:
                return
            events = self._events()
            if self._blocked and events & _POLLOUT:
                self._blocked = False
                if self._room is not None:
                    self._room()
                continue
            if self._paused or not events & _POLLIN:
                return
            self._take(socket.recv_multipart(_NOBLOCK))
        self._soon()


_POLLIN = int(zmq.POLLIN)
_POLLOUT = int(zmq.POLLOUT)
_NOBLOCK = int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


class PeerWatch:
    """Reports at once when a socket's connection is established, keys checked, and when it is lost.

    A killed process's connections are closed by its kernel; a host that vanished is noticed by
    ZeroMQ's own heartbeat on tcp:// (transport.py). Attempts to reconnect are not reported.
    """

    def __init__(self, socket: zmq.Socket[Any], report: Callable[[bool], None]) -> None:
        self._watched = socket
        self._report = report
        address = f"inproc://watch-{uuid.uuid4().hex}"
        socket.monitor(address, int(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED))
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(socket.context.underlying)
        events = context.socket(zmq.PAIR)
        events.set_hwm(0)  # a full queue would block ZeroMQ's thread
        events.connect(address)
        self._channel = Channel(events, self._take)

    def close(self) -> None:
        """Stop watching; to be called before the watched socket is closed."""
        if not self._watched.closed:
            self._watched.monitor(
                None, 0
            )  # first: its thread would wait for a listener that is gone
        self._channel.close(0)

    def _take(self, frames: list[bytes]) -> None:
        self._report(parse_monitor_message(frames)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED)
