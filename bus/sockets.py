"""ZeroMQ sockets in an asyncio loop: opened with limits, time-outs and keys, driven by callbacks.

    connect, bind        set a new socket's options and its address, and close it on any error
    bound_address        returns the address of a bound socket, e.g. with the port chosen for a wildcard
    socket_file          returns the file of an ipc:// address
    remove_socket_file   removes that file, which ZeroMQ leaves behind
    Channel              an open socket: calls `take` for each message that arrives; `send` never waits
    PeerWatch            reports at once when a connection is established and when it is lost
    RefusalLog           logs warnings about refused messages, at a limited rate

ZeroMQ's descriptor is edge-triggered (zmq_getsockopt(3), ZMQ_FD): it signals once for any number of events,
and sending or receiving may consume the signal. So `Channel` reads ZMQ_EVENTS until there are none, also
after each send.

Only modules of the bus use this module; all other code uses the typed sockets of requests.py and pubsub.py.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket as unix
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from bus.codec import MAX_FRAME_BYTES
from bus.endpoints import CurveKeys, check_secure
from bus.errors import BusError, ConfigError, DartError

log = logging.getLogger(__name__)

HIGH_WATER_MARK = 256
"""Most messages in the queue of one connection; then the sender waits (request/reply) or drops them (PUB)."""
LINGER_S = 2.0
REQUEST_ID_BYTES = 16
_UNBIND_S = 1.0
_NOT_HERE = "set bus.host to an address of the host of `dart data`, and of `dart train` where it broadcasts weights"
_TCP_FIXES = {
    errno.EADDRINUSE: "stop the process that listens there (ss -ltnp), or change bus.port: `dart data` needs that "
    "port and the two after it, `dart train` the third where it broadcasts weights",
    errno.EADDRNOTAVAIL: _NOT_HERE,
    errno.ENODEV: _NOT_HERE,
}

_Socket = TypeVar("_Socket", bound=zmq.Socket[Any])


def _prepare(socket: _Socket, endpoint: str) -> _Socket:
    """Set the limits and time-outs of a new socket, and return it."""
    socket.set_hwm(HIGH_WATER_MARK)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.LINGER, int(LINGER_S * 1000))
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    if endpoint.startswith("tcp:"):
        # A host that vanished is noticed, and its connection re-established.
        socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 20000)
    return socket


@contextmanager
def _closed_on_error(socket: zmq.Socket[Any], task: str) -> Iterator[None]:
    """Close the socket if the block fails; raise an error of ZeroMQ as BusError about the `task`."""
    try:
        yield
    except DartError:
        socket.close(linger=0)
        raise
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise BusError(f"{task}: {error.strerror}") from None


def connect(socket: _Socket, endpoint: str, curve: CurveKeys | None) -> _Socket:
    """Connect the socket, now or as soon as the other side appears, and return it.

    On an error the socket is closed. Raises ConfigError for an address that needs keys, BusError if ZeroMQ
    refuses the address.
    """
    with _closed_on_error(socket, f"cannot connect to {endpoint}"):
        check_secure(endpoint, curve)
        _prepare(socket, endpoint)
        if curve is not None and endpoint.startswith("tcp:"):
            if not curve.server:
                raise ConfigError(f"endpoint {endpoint} needs the server's public key to connect")
            socket.curve_publickey = curve.public.encode("ascii")
            socket.curve_secretkey = curve.secret.encode("ascii")
            socket.curve_serverkey = curve.server.encode("ascii")
        socket.connect(endpoint)
    return socket


def bind(socket: _Socket, endpoint: str, curve: CurveKeys | None) -> _Socket:
    """Bind the socket to the address and return it; with keys, only the allowed clients can connect.

    On an error the socket is closed. Raises ConfigError, also for a tcp port in use; BusError for an ipc
    address in use.
    """
    with _closed_on_error(socket, f"cannot serve at {endpoint}"):
        check_secure(endpoint, curve)
        _check_free(endpoint)
        _prepare(socket, endpoint)
        if curve is not None and endpoint.startswith("tcp:"):
            socket.zap_domain = _AUTHENTICATORS.admit(socket.context, curve.allowed).encode("ascii")
            socket.curve_secretkey = curve.secret.encode("ascii")
            socket.curve_publickey = curve.public.encode("ascii")
            socket.curve_server = True
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            if not endpoint.startswith("tcp:") or error.errno not in _TCP_FIXES:
                raise
            raise ConfigError(
                f"cannot serve at {endpoint}: {os.strerror(error.errno)}; {_TCP_FIXES[error.errno]}"
            ) from None
    return socket


def socket_file(endpoint: str) -> tuple[str, int, int] | None:
    """Return path, device and inode of the file of a bound ipc:// address; None for other addresses."""
    path = endpoint.removeprefix("ipc://")
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return None if path == endpoint else (path, status.st_dev, status.st_ino)


def remove_socket_file(file: tuple[str, int, int] | None) -> None:
    """Remove the file of a socket that is about to close, unless another file has taken its place."""
    with suppress(OSError):
        if file is not None and socket_file(f"ipc://{file[0]}") == file:
            Path(file[0]).unlink()


def bound_address(socket: zmq.Socket[Any]) -> str:
    """Return the address of a bound socket, to which others connect."""
    address = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(address, bytes)
    return address.rstrip(b"\0").decode("utf-8")


def _check_free(endpoint: str) -> None:
    """Raise BusError for an ipc:// address at which a process listens; ZeroMQ would replace its socket file.

    A server that has just closed listens a moment longer, in ZeroMQ's thread; this waits up to a second for
    that.
    """
    path = endpoint.removeprefix("ipc://")
    deadline = time.monotonic() + _UNBIND_S
    while path != endpoint and Path(path).exists():
        with unix.socket(unix.AF_UNIX) as probe:
            try:
                probe.connect(path)
            except OSError:
                return  # the file of a process that has ended
        if time.monotonic() > deadline:
            raise BusError(f"cannot serve at {endpoint}: another process does; stop it first")
        time.sleep(0.01)


class _AllowedKeys:
    """The public keys that the authenticator admits at one address."""

    def __init__(self, allowed: Iterable[str]) -> None:
        self._allowed = frozenset(allowed)

    def callback(self, domain: str, key: bytes) -> bool:  # noqa: ARG002 - pyzmq calls it so
        """Return True if the key, a Z85 text, is allowed."""
        return key.decode("ascii") in self._allowed


class _Authenticators:
    """The ZAP authenticators, one for each context; without one, ZeroMQ admits any key."""

    def __init__(self) -> None:
        self._by_context: dict[int, ThreadAuthenticator] = {}

    def admit(self, context: zmq.Context[Any], allowed: Iterable[str]) -> str:
        """Return a new ZAP domain; a socket that uses it admits these keys."""
        authenticator = self._by_context.get(context.underlying)
        if authenticator is None:
            authenticator = ThreadAuthenticator(zmq.Context.shadow(context.underlying))
            authenticator.start()
            self._by_context[context.underlying] = authenticator
        domain = uuid.uuid4().hex
        authenticator.configure_curve_callback(domain, credentials_provider=_AllowedKeys(allowed))
        return domain


_AUTHENTICATORS = _Authenticators()


# --- in the loop ----------------------------------------------------------------------------

_BURST = 4
"""Messages that are handled before other callbacks of the loop run."""

_COPY_BYTES = 256 * 2**10
"""Smaller frames are copied to be sent, which costs less for them than sending without a copy."""


class Channel:
    """An open socket that is driven by the running event loop."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        take: Callable[[list[bytes]], None],
        *,
        room: Callable[[], None] | None = None,
    ) -> None:
        """Call `take` with each message's frames, and `room` when a refused send may succeed."""
        self._socket = socket
        socket.copy_threshold = _COPY_BYTES
        self._take = take
        self._room = room
        self._blocked = False  # a send was refused: call `room` when it may succeed
        self._paused = False
        self._again: asyncio.Handle | None = None
        self._loop = asyncio.get_running_loop()
        self._descriptor: int = socket.FD
        self._loop.add_reader(self._descriptor, self._turn)
        self._soon()  # the descriptor does not signal earlier messages again

    @property
    def closed(self) -> bool:
        """True if `close` was called."""
        return self._socket.closed

    def send(self, frames: Sequence[bytes]) -> bool:
        """Queue a message; return False, with nothing queued, if that would block."""
        socket = self._socket
        last = len(frames) - 1
        try:
            # Only the first frame can be refused, since ZeroMQ counts messages and not frames.
            for index, frame in enumerate(frames):
                socket.send(frame, _NOBLOCK if index == last else _NOBLOCK_MORE, copy=False)
        except zmq.Again:
            self._blocked = True
            self._soon()  # the queue may have drained meanwhile
            return False
        if self._events() & _POLLIN:  # the send may have consumed its signal
            self._soon()
        return True

    def pause(self) -> None:
        """Leave incoming messages in the queues of ZeroMQ and of the sender."""
        self._paused = True

    def resume(self) -> None:
        """Receive messages again."""
        if self._paused and not self.closed:
            self._paused = False
            self._soon()

    def close(self, linger_s: float) -> None:
        """Receive no more messages; close when the queued ones are sent, or after `linger_s` seconds."""
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
        """Handle up to _BURST events of the socket; then let other callbacks of the loop run."""
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
    """A watch that reports at once when a socket's connection is established and when it is lost.

    The kernel closes the connections of a killed process; ZeroMQ's heartbeat on tcp:// notices a host that
    has vanished. Attempts to reconnect are not reported.
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
        """Stop watching; call it before the watched socket is closed."""
        if not self._watched.closed:
            # This must come first, or ZeroMQ's thread would wait for a listener that is gone.
            self._watched.monitor(None, 0)
        self._channel.close(0)

    def _take(self, frames: list[bytes]) -> None:
        self._report(parse_monitor_message(frames)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED)


WARNING_INTERVAL_S = 1.0
"""Time between two warnings of one log about refused messages."""


class RefusalLog:
    """A log of refused messages with at most one warning a second, so that a flood cannot fill the disk."""

    def __init__(self) -> None:
        self._next_at = 0.0  # monotonic seconds
        self._skipped = 0

    def warn(self, text: str) -> None:
        """Log a warning, or only count it if the last one is less than WARNING_INTERVAL_S old."""
        now = time.monotonic()
        if now < self._next_at:
            self._skipped += 1
            return
        more = f" (and {self._skipped} more since the last)" if self._skipped else ""
        log.warning("%s%s", text, more)
        self._next_at, self._skipped = now + WARNING_INTERVAL_S, 0
