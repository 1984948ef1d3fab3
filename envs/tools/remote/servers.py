"""The servers of remote environments: their addresses, TLS and tokens, and how slots share them.

    read_addresses     the addresses in the option `url` of a suite
    Access             TLS and a bearer token; read_access reads it from the options `token_env` and `ca_file`
    SharedServers      servers that each serve several slots, the least used first
    Retry              pauses between attempts, with a limit on their sum
    UnreachableError   the error if there is no server at an address
    excerpt            the start of a server's text, for an error

The token is read from the environment variable when a slot's environment is made. It is in no configuration,
message or log.
"""

from __future__ import annotations

import os
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from urllib.parse import urlsplit

from bus.errors import EnvError, TaskError
from envs.contract.queueing import queueing

_SECURE = {"http": False, "ws": False, "https": True, "wss": True}
_LOOPBACK = ("localhost", "127.", "[::1]")


@dataclass(frozen=True)
class Address:
    """The address of a server."""

    host: str  # an IPv6 address in brackets
    port: int
    secure: bool = False  # TLS
    path: str = ""  # before the server's own routes, e.g. /space

    @property
    def http(self) -> str:
        """The start of an HTTP address."""
        return f"http{'s' if self.secure else ''}://{self.host}:{self.port}{self.path}"

    @property
    def websocket(self) -> str:
        """The start of a WebSocket address."""
        return f"ws{self.http.removeprefix('http')}"

    @property
    def bare_host(self) -> str:
        """The host for a socket: an IPv6 address without brackets."""
        return self.host.strip("[]")

    @property
    def is_local(self) -> bool:
        """Whether the server runs on this machine."""
        return self.host.startswith(_LOOPBACK)


def read_address(url: str, default_port: int) -> Address:
    """Return the address in `http://HOST:PORT/PATH`, or https, ws, wss. Raises TaskError."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.username or parts.password:
        raise TaskError(
            "url must not hold a name or password; name an environment variable with the token: "
            "env.options.token_env"
        )
    if parts.scheme not in _SECURE or not parts.hostname or parts.query or parts.fragment:
        raise TaskError(
            f"url must be http://HOST:PORT or https://HOST:PORT (ws and wss are the same), got {url!r}"
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    secure = _SECURE[parts.scheme]
    return Address(host, port or (443 if secure else default_port), secure, parts.path.rstrip("/"))


def read_addresses(url: object, default_port: int) -> tuple[Address, ...]:
    """Return the addresses of the option `url`, an address or a list of addresses. Raises TaskError."""
    urls = [url] if isinstance(url, str) else url
    if not isinstance(urls, Sequence) or not all(isinstance(address, str) for address in urls):
        raise TaskError(f"url must be an address or a list of addresses, got {url!r}")
    addresses = tuple(read_address(address, default_port) for address in urls if address)
    if not addresses:
        raise TaskError(
            "url names no server: set env.options.url, or --option url=http://HOST:PORT of dart env check"
        )
    if len(set(addresses)) < len(addresses):
        raise TaskError("url names one server twice")
    return addresses


@dataclass(frozen=True)
class Access:
    """The credentials of requests: a bearer token, and the certificate authority."""

    token: str = field(default="", repr=False)  # bearer token; empty: none
    ca_file: str = ""
    """The certificate of the authority that signed the servers' certificates; empty: the system's."""

    @property
    def headers(self) -> dict[str, str]:
        """The headers that carry the token."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    @cached_property
    def tls(self) -> ssl.SSLContext:
        """The TLS context, which checks certificates and host names."""
        return ssl.create_default_context(cafile=self.ca_file or None)


def read_access(token_env: object, ca_file: object, addresses: Sequence[Address]) -> Access:
    """Return the access that `token_env` (the name of an environment variable) and `ca_file` give.

    Raises TaskError.
    """
    if not isinstance(token_env, str) or not isinstance(ca_file, str):
        raise TaskError("token_env and ca_file must be texts")
    token = os.environ.get(token_env, "") if token_env else ""
    if token_env and not token:
        raise TaskError(f"token_env: the environment variable {token_env!r} is not set")
    if not token.isascii() or not token.isprintable():
        raise TaskError(f"token_env: {token_env} holds characters that no token has")
    for address in addresses:
        if token and not (address.secure or address.is_local):
            raise TaskError(
                f"url: {address.http} would carry the token of {token_env} unencrypted; use https, or a "
                "tunnel that ends on this machine"
            )
    access = Access(token, ca_file)
    try:
        if ca_file:
            _ = access.tls
    except (OSError, ssl.SSLError) as error:
        raise TaskError(f"ca_file: {ca_file} cannot be read: {error}") from None
    return access


FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0


class UnreachableError(EnvError):
    """No server is reachable at the address: refused, unknown host, no route, or the server just ended."""


def excerpt(text: str) -> str:
    """Return the start of a server's text, in one line, for an error."""
    return " ".join(text[:400].split())[:200] or "nothing"


class SharedServers:
    """Servers that each serve several slots. Thread-safe; it counts the slots of this process."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        self._lock = threading.Lock()
        # Slots in separate processes do not share this object, so each process begins at another address.
        begin = os.getpid() % len(addresses)
        self._used = dict.fromkeys((*addresses[begin:], *addresses[:begin]), 0)
        # Address -> time.monotonic() of its last failure; 0.0 if there was none.
        self._failed: dict[Address, float] = dict.fromkeys(addresses, 0.0)

    def in_order(self) -> list[Address]:
        """Return the addresses in the order in which to try them: the least used first.

        Of addresses with the same number of slots, the one that failed last is the last.
        """
        with self._lock:
            return sorted(
                self._used, key=lambda address: (self._used[address], self._failed[address])
            )

    def took(self, address: Address) -> None:
        """Count one more slot that uses the server."""
        with self._lock:
            self._used[address] += 1
            self._failed[address] = 0.0

    def gave_back(self, address: Address) -> None:
        """Count one slot fewer."""
        with self._lock:
            self._used[address] -= 1

    def failed(self, address: Address) -> None:
        """Note that a server is down or full, so that the others come first for now."""
        with self._lock:
            self._failed[address] = time.monotonic()


class Retry:
    """Growing pauses between attempts, until `seconds` are over.

    The deadline of the call stands still in a pause.
    """

    def __init__(self, seconds: float, pause: Callable[[float], object] | None = None) -> None:
        self._seconds = seconds
        self._until = time.monotonic() + seconds
        self._next = FIRST_PAUSE_S
        self._pause = pause or self._wait

    def again(self) -> bool:
        """Pause, then return True; return False once the time is over.

        Raises GivenUpError if the slot no longer waits for the call.
        """
        left = self._until - time.monotonic()
        if left <= 0:
            return False
        self._pause(min(self._next, left))
        self._next = min(2 * self._next, LONGEST_PAUSE_S)
        return True

    def _wait(self, seconds: float) -> None:
        with queueing("a server that is down or full", self._seconds) as place:
            place.pause(seconds)
