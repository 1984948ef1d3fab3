"""The parts that the servers of `dart view` and `dart serve` share: sockets, limits, and checks of requests.

listen       binds a socket, so that a port in use is reported before anything starts
make_server  makes a uvicorn server with our limits
address      returns the URL of the server
HttpGuard    ASGI middleware that checks Host header, method and token; each server has its own subclass
host_names   returns the names by which a server may be addressed

A page of another site can make a browser send requests to a server on loopback (DNS rebinding). Such a
request has the other site's name in its Host header and is refused. On other addresses than loopback every
request needs the token.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import socket
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from http import HTTPStatus
from typing import ClassVar

import uvicorn
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bus.errors import UserError

LOOPBACK = "127.0.0.1"
_PORTS = 20  # number of ports that are tried
_STOP_S = 3


def listen(
    host: str, port: int | None, first: int, names: tuple[str, str] = ("--host", "--port")
) -> socket.socket:
    """Return a listening socket on `port`; 0 means any free port, None the first free one from `first` on.

    `names` are the options of host and port, for messages. Raises UserError if no port can be used.
    """
    host_option, port_option = names
    candidates = range(first, first + _PORTS) if port is None else (port,)
    why = "nothing"
    for candidate in candidates:
        try:
            family = socket.getaddrinfo(host, candidate, type=socket.SOCK_STREAM)[0][0]
            return socket.create_server((host, candidate), family=family)
        except UnicodeError:
            raise UserError(
                f"{host_option} {host} is not a host name; use an address of this host, "
                f"e.g. {LOOPBACK}"
            ) from None
        except OSError as error:
            why = error.strerror or str(error)
    fix = f"name a free one, or {port_option} 0 for any"
    fix = fix if port is not None else f"name one with {port_option}"
    raise UserError(
        f"{host_option} {host}: port {candidates[-1]} cannot be served on: {why}; {fix}"
    )


class _QuietServer(uvicorn.Server):
    """A server in a process that handles signals itself."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signal handlers as they are."""
        yield


def make_server(app: ASGIApp, most_requests: int, *, signals: bool = True) -> uvicorn.Server:
    """Return a server for `app`, to be started with `serve(sockets=[...])`.

    It answers more than `most_requests` at the same time with 503. Without `signals` only `should_exit` ends
    it.
    """
    kind = uvicorn.Server if signals else _QuietServer
    return kind(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            limit_concurrency=most_requests,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=_STOP_S,
            proxy_headers=False,
            lifespan="off",
            ws="none",
        )
    )


def address(host: str, port: int) -> str:
    """Return the URL of a server's first page."""
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host  # noqa: S104 - compared
    name = f"[{name}]" if ":" in name else name
    return f"http://{name}:{port}/"


# --- who may ask -------------------------------------------------------------------------


class HttpGuard(ABC):
    """Middleware that passes a request on to the application or refuses it."""

    methods: ClassVar[tuple[str, ...]]
    """HTTP methods that are passed on."""
    headers: ClassVar[Mapping[str, str]]
    """Headers of every answer."""
    wrong_host: ClassVar[str]
    """The text of the answer to a request with another host name."""
    wrong_method: ClassVar[str]
    """The text of the answer to a request with another method."""

    def __init__(self, app: ASGIApp, *, host: str, token: str = "") -> None:
        """Guard `app`, which is served on the address `host`.

        An empty `token` means that none is required.
        """
        self._app = app
        self._names = host_names(host)
        self._any_address = _is_unspecified(host)
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an ASGI call on to the application, or answer it with the refusal."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for key, value in self.headers.items():
                    headers[key] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        refusal = self._refusal(Request(scope))
        await (refusal or self._app)(scope, receive, send_guarded)

    @abstractmethod
    def refused(self, status: HTTPStatus, text: str, headers: Mapping[str, str]) -> Response:
        """Return the answer to a request that is refused."""

    @abstractmethod
    def check_token(self, request: Request) -> Response | None:
        """Return the answer to a request without the token; None if the request has it."""

    def is_right(self, offered: str) -> bool:
        """Return True if `offered` is the token."""
        return hmac.compare_digest(offered.encode(), self._token.encode())

    def check_origin(self, request: Request) -> Response | None:  # noqa: ARG002 - for subclasses
        """Return the answer to a request that another site's page may have caused; None for others."""
        return None

    def _refusal(self, request: Request) -> Response | None:
        """Return the answer to a request that is refused; None if it may pass."""
        if not self._is_known(request.headers.getlist("host")):
            return self.refused(HTTPStatus.MISDIRECTED_REQUEST, self.wrong_host, {})
        if request.method not in self.methods:
            allowed = {"allow": ", ".join(self.methods)}
            return self.refused(HTTPStatus.METHOD_NOT_ALLOWED, self.wrong_method, allowed)
        if (refusal := self.check_origin(request)) is not None:
            return refusal
        return self.check_token(request) if self._token else None

    def _is_known(self, hosts: Collection[str]) -> bool:
        """Return True if there is one Host header, and it names this server."""
        # Starlette's TrustedHostMiddleware is not used: it has no pattern for "any address" (0.0.0.0), reads
        # only the first of two Host headers, and takes no [::1] in the oldest release that we allow.
        if len(hosts) != 1:
            return False
        [name] = hosts
        name = _without_port(name).lower()
        # DNS rebinding needs a host name, so a request to a bare address is no attack.
        return name in self._names or (self._any_address and _is_address(name))


def host_names(host: str) -> frozenset[str]:
    """Return the names by which a server on `host` may be addressed.

    Ports do not matter, because tunnels change them.
    """
    names = {"localhost", "127.0.0.1", "[::1]", host.lower(), f"[{host.lower()}]"}
    if _is_unspecified(host):
        names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
    return frozenset(names)


def _is_unspecified(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _without_port(name: str) -> str:
    head, colon, port = name.rpartition(":")
    return head if colon and port.isdigit() and (":" not in head or head.endswith("]")) else name
