"""A client of JSON over HTTP for one server, with a deadline and a bound on each reply.

JsonClient    a connection to the server; calls raise EnvError
RefusedError  the server answered with an error status

A call is never repeated, since the server may have performed it. Redirects are refused.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import select
import ssl
import time
from collections.abc import Mapping
from typing import Any

from bus.errors import EnvError, first_line
from envs.tools.remote.servers import Access, Address, UnreachableError, excerpt

_BLOCK = 1 << 16
_FRESH_S = 2.0
"""Seconds after which an idle connection is not used again, since servers close them (uvicorn after 5 s)."""


class RefusedError(EnvError):
    """The server answered with an error status."""

    def __init__(self, message: str, status: int, detail: str) -> None:
        super().__init__(message)
        self.status = status
        self.detail = detail  # the server's message


class JsonClient:
    """A connection to one server. Not thread-safe."""

    def __init__(self, address: Address, access: Access, *, what: str, reply_mb: float) -> None:
        """Set the name of the server in errors (`what`) and the most megabytes of an answer (`reply_mb`)."""
        self.address = address
        self._access = access
        self._what = what
        self._most = int(reply_mb * (1 << 20))
        self._connection: http.client.HTTPConnection | None = None
        self._used_at = 0.0  # time.monotonic() after its last answer

    def call(
        self, method: str, route: str, body: Mapping[str, Any] | None = None, *, deadline_s: float
    ) -> dict[str, Any]:
        """Send a request and return the JSON object of the answer. Raises EnvError."""
        where = self._where(route)
        until = time.monotonic() + deadline_s
        content = None if body is None else json.dumps(body).encode()
        headers = {"Accept": "application/json", **self._access.headers}
        if content is not None:
            headers["Content-Type"] = "application/json"
        try:
            status, answer = self._exchange(method, route, content, headers, until)
        except TimeoutError as error:
            self.close()
            raise EnvError(f"{where}: no whole answer in {deadline_s:g} s") from error
        except EnvError:
            self.close()
            raise
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise EnvError(f"{where}: {type(error).__name__}: {first_line(error)}") from error
        return self._read(where, status, answer)

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _where(self, route: str) -> str:
        return f"{self._what} {self.address.http}{route.partition('?')[0]}"

    def _exchange(
        self, method: str, route: str, body: bytes | None, headers: dict[str, str], until: float
    ) -> tuple[int, bytes]:
        connection = self._connect(route, until)
        sock = connection.sock
        sock.settimeout(_seconds_left(until))
        connection.request(method, self.address.path + route, body, headers)
        response = connection.getresponse()
        blocks, size = [], 0
        while True:
            sock.settimeout(_seconds_left(until))
            block = response.read1(_BLOCK)
            if not block:
                break
            size += len(block)
            if size > self._most:
                raise EnvError(
                    f"{self._where(route)} answers more than {self._most / (1 << 20):g} MiB; "
                    "env.options.reply_mb bounds an answer"
                )
            blocks.append(block)
        response.close()  # read1 leaves it open at its end, and the connection could not be used again
        if response.will_close:
            self.close()
        self._used_at = time.monotonic()
        return response.status, b"".join(blocks)

    def _connect(self, route: str, until: float) -> http.client.HTTPConnection:
        """Return the connection; open a new one if the server may have closed it.

        A request on a closed connection would fail, and requests are not repeated.
        """
        connection = self._connection
        if connection is not None and connection.sock is not None:
            idle_s = time.monotonic() - self._used_at
            if idle_s < _FRESH_S and not select.select([connection.sock], [], [], 0)[0]:
                return connection
        self.close()
        address, timeout = self.address, _seconds_left(until)
        if address.secure:
            connection = http.client.HTTPSConnection(
                address.bare_host, address.port, timeout=timeout, context=self._access.tls
            )
        else:
            connection = http.client.HTTPConnection(
                address.bare_host, address.port, timeout=timeout
            )
        try:
            connection.connect()
        except ssl.SSLError as error:
            raise EnvError(f"{self._where(route)}: TLS failed: {first_line(error)}") from error
        except TimeoutError:
            raise
        except OSError as error:
            raise UnreachableError(
                f"{self._where(route)}: no server answers there ({first_line(error)})"
            ) from error
        self._connection = connection
        return connection

    def _read(self, where: str, status: int, answer: bytes) -> dict[str, Any]:
        if 300 <= status < 400:
            raise EnvError(
                f"{where} answers with a redirect ({status}); name the address itself in env.options.url"
            )
        value: object = None
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(answer)
        if status != 200:
            detail = value.get("detail") if isinstance(value, dict) else None
            text = excerpt(str(detail) if detail else answer.decode("utf-8", "replace"))
            raise RefusedError(f"{where} answers {status}: {text}", status, text)
        if not isinstance(value, dict):
            raise EnvError(
                f"{where} answers no JSON object: {excerpt(answer.decode('utf-8', 'replace'))}"
            )
        return value


def _seconds_left(until: float) -> float:
    """Return the seconds until a time. Raises TimeoutError if it is over."""
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
