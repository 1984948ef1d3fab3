"""Which requests may see the pages, and the security headers of every answer.

    Guard       ASGI middleware: Host header, token, methods, security headers
    host_names  the names under which a server may be addressed

A page of another site can make a browser send requests to a server on loopback (DNS rebinding);
such a request carries the other site's name in its Host header and is refused. Beyond loopback
every request needs the token: once in the address (`?token=...`), then as a cookie that no script
can read.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Collection
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dart_cli.view.site import POLICY

_METHODS = ("GET", "HEAD")
_HEADERS = {
    "content-security-policy": "; ".join(f"{key} {value}" for key, value in POLICY.items()),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class Guard:
    """Passes a request on to the pages, or refuses it."""

    def __init__(self, app: ASGIApp, *, host: str, token: str = "") -> None:
        """`host` is the address served on; an empty `token` requires none."""
        self._app = app
        self._names = host_names(host)
        self._any_address = _is_unspecified(host)
        self._token = token
        # All ports of a host share cookies: each viewer's cookie has a name of its own.
        self._cookie = f"dart-view-{hashlib.sha256(token.encode()).hexdigest()[:8]}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for key, value in _HEADERS.items():
                    headers[key] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        refused = self._refusal(Request(scope))
        await (refused or self._app)(scope, receive, send_guarded)

    def _refusal(self, request: Request) -> Response | None:
        """The answer to a request that may not pass; None for one that may."""
        if not self._is_known(request.headers.getlist("host")):
            return PlainTextResponse(
                "This server answers only under its own name; open the address it printed.",
                HTTPStatus.MISDIRECTED_REQUEST,
            )
        if request.method not in _METHODS:
            return PlainTextResponse(
                "This server is read-only: use GET or HEAD.",
                HTTPStatus.METHOD_NOT_ALLOWED,
                {"allow": ", ".join(_METHODS)},
            )
        return self._check_token(request) if self._token else None

    def _is_known(self, hosts: Collection[str]) -> bool:
        # Ours, since Starlette's TrustedHostMiddleware has no pattern for "any address" (0.0.0.0),
        # reads only the first of two Host headers, and takes no [::1] in the oldest release we allow.
        if len(hosts) != 1:
            return False
        [name] = hosts
        name = _without_port(name).lower()
        # DNS rebinding needs a host name, so a request to a bare address is no attack.
        return name in self._names or (self._any_address and _is_address(name))

    def _check_token(self, request: Request) -> Response | None:
        offered = request.query_params.get("token")
        if offered is None:
            if self._is_right(_cookie(request.headers.get("cookie", ""), self._cookie)):
                return None
        elif self._is_right(offered):
            rest = [pair for pair in parse_qsl(request.url.query) if pair[0] != "token"]
            # A path of "//name" would be another server's address.
            path = "/" + request.url.path.lstrip("/") + (f"?{urlencode(rest)}" if rest else "")
            answer = RedirectResponse(path, HTTPStatus.SEE_OTHER)
            answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")
            return answer
        return PlainTextResponse(
            "This page needs the token: open the address that `dart view` printed.",
            HTTPStatus.FORBIDDEN,
        )

    def _is_right(self, offered: str) -> bool:
        return hmac.compare_digest(offered.encode(), self._token.encode())


def host_names(host: str) -> frozenset[str]:
    """Names under which a server on `host` may be addressed; any port, as tunnels change it."""
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


def _cookie(header: str, name: str) -> str:
    try:
        found = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return found.value if found else ""
