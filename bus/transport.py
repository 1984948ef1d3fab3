"""Opening ZeroMQ sockets: limits, time-outs, keys, and addresses that are free.

    connect, bind   give a fresh socket its options and its address; closed again on any error
    bound_address   where it really serves, e.g. the port chosen for a wildcard
    socket_file, remove_socket_file   the file of an ipc:// address, which ZeroMQ leaves behind

Only the bus's own modules use it; all other code uses the typed sockets of requester.py, replier.py
and pubsub.py.
"""

from __future__ import annotations

import errno
import os
import socket as unix
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import zmq
from zmq.auth.thread import ThreadAuthenticator

from bus.codec import MAX_FRAME_BYTES
from bus.endpoints import CurveKeys, check_secure
from bus.errors import BusError, ConfigError, DartError

HIGH_WATER_MARK = 256
"""Messages that wait on one connection before the sender waits (request/reply) or drops (PUB)."""
LINGER_S = 2.0
REQUEST_ID_BYTES = 16
_UNBIND_S = 1.0
_NOT_HERE = "set bus.host to an address of the host of `dart data`, and of `dart train` where it broadcasts weights"
_TCP_CURES = {
    errno.EADDRINUSE: "stop the process that listens there (ss -ltnp), or change bus.port: `dart data` needs that "
    "port and the two after it, `dart train` the third where it broadcasts weights",
    errno.EADDRNOTAVAIL: _NOT_HERE,
    errno.ENODEV: _NOT_HERE,
}

_Socket = TypeVar("_Socket", bound=zmq.Socket[Any])


def _prepare(socket: _Socket, endpoint: str) -> _Socket:
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
    try:
        yield
    except DartError:
        socket.close(linger=0)
        raise
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise BusError(f"{task}: {error.strerror}") from None


def connect(socket: _Socket, endpoint: str, curve: CurveKeys | None) -> _Socket:
    """Connect, now or as soon as the other side appears. Raises ConfigError, BusError."""
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
    """Serve at the address and let in only the allowed keys.

    Raises ConfigError, also for a tcp port in use; BusError for an ipc address in use.
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
            if not endpoint.startswith("tcp:") or error.errno not in _TCP_CURES:
                raise
            raise ConfigError(
                f"cannot serve at {endpoint}: {os.strerror(error.errno)}; {_TCP_CURES[error.errno]}"
            ) from None
    return socket


def socket_file(endpoint: str) -> tuple[str, int, int] | None:
    """Path, device and inode of the file at which a bound ipc:// address serves; None for others."""
    path = endpoint.removeprefix("ipc://")
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return None if path == endpoint else (path, found.st_dev, found.st_ino)


def remove_socket_file(file: tuple[str, int, int] | None) -> None:
    """Remove the file of a socket that is about to close, unless another lies in its place."""
    with suppress(OSError):
        if file is not None and socket_file(f"ipc://{file[0]}") == file:
            Path(file[0]).unlink()


def bound_address(socket: zmq.Socket[Any]) -> str:
    """The address a bound socket serves at, as others connect to it."""
    address = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(address, bytes)
    return address.rstrip(b"\0").decode("utf-8")


def _check_free(endpoint: str) -> None:
    """Refuse an ipc:// address where a process listens: ZeroMQ would take it over without an error.

    A server that has just closed listens a moment longer, in ZeroMQ's own thread; this waits up to
    a second for that. Raises BusError.
    """
    path = endpoint.removeprefix("ipc://")
    deadline = time.monotonic() + _UNBIND_S
    while path != endpoint and Path(path).exists():
        with unix.socket(unix.AF_UNIX) as probe:
            try:
                probe.connect(path)
            except OSError:
                return  # left behind by a process that is gone
        if time.monotonic() > deadline:
            raise BusError(f"cannot serve at {endpoint}: another process does; stop it first")
        time.sleep(0.01)


class _AllowedKeys:
    """What the authenticator asks for one address: is this public key let in?"""

    def __init__(self, allowed: Iterable[str]) -> None:
        self._allowed = frozenset(allowed)

    def callback(self, domain: str, key: bytes) -> bool:  # noqa: ARG002 - pyzmq calls it so
        """`key` is Z85 text."""
        return key.decode("ascii") in self._allowed


class _Authenticators:
    """One ZAP authenticator per context; without one, ZeroMQ lets in any key."""

    def __init__(self) -> None:
        self._by_context: dict[int, ThreadAuthenticator] = {}

    def admit(self, context: zmq.Context[Any], allowed: Iterable[str]) -> str:
        """Let these keys into the socket that uses the returned ZAP domain."""
        authenticator = self._by_context.get(context.underlying)
        if authenticator is None:
            authenticator = ThreadAuthenticator(zmq.Context.shadow(context.underlying))
            authenticator.start()
            self._by_context[context.underlying] = authenticator
        domain = uuid.uuid4().hex
        authenticator.configure_curve_callback(domain, credentials_provider=_AllowedKeys(allowed))
        return domain


_AUTHENTICATORS = _Authenticators()
