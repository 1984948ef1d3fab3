"""A session at an OpenEnv server: a WebSocket, one request at a time, one reply to each.

Session            a session, which connects when it is made; its requests raise EnvError
Reply              an observation with its reward
CapacityError      the server has as many sessions as it may
ClosedError        the connection is gone: the server ended or restarted
import_websockets  returns the package, or raises an error with the install step
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

from bus.errors import EnvError, MissingPartError, first_line
from envs.tools.remote.images import CutNumbers, cut_numbers
from envs.tools.remote.servers import Access, Address, UnreachableError, excerpt

INSTALL = "pip install -e '.[openenv]' in dart's folder"
CLOSE_S = 2.0

_FIXES = {
    "CAPACITY_REACHED": "start the server with a greater max_concurrent_envs, name more servers in "
    "env.options.url, or set env.slots to what they hold",
    "FACTORY_ERROR": "the server cannot make its environment; its log has the reason",
    "VALIDATION_ERROR": "the environment does not take this payload: correct [actions] or [reset] of the "
    "profile",
    "UNKNOWN_TYPE": "the server does not support OpenEnv's messages reset, step and close",
}


class CapacityError(EnvError):
    """The server has as many sessions as it may."""


class ClosedError(EnvError):
    """The connection is gone: the server ended, restarted, or closed the session."""


@dataclass(frozen=True)
class Reply:
    """The answer to a reset or a step."""

    observation: Mapping[str, Any]
    reward: float | None
    is_done: bool
    pixels: CutNumbers | None
    """The screenshot, if it is a list of numbers, which is read separately."""


class Session:
    """A session at a server. Not thread-safe."""

    def __init__(
        self,
        address: Address,
        access: Access,
        *,
        connect_s: float,
        reply_mb: float,
        numbers: str | None,
    ) -> None:
        """Connect within `connect_s`. `numbers` is the key whose list of numbers is read separately."""
        self.address = address
        self._numbers = numbers
        self._reply_mb = reply_mb
        self._lifetime = contextlib.ExitStack()
        self._websocket: Any = self._open(address, access, connect_s)

    def request(self, kind: str, data: object, deadline_s: float) -> Reply:
        """Send `reset` or `step`, and return the reply. Raises EnvError."""
        exceptions = import_websockets().exceptions
        until = time.monotonic() + deadline_s
        try:
            # A message that the server sent before it closed the connection can still be read.
            with contextlib.suppress(exceptions.ConnectionClosed):
                self._websocket.send(json.dumps({"type": kind, "data": data}))
            raw = self._websocket.recv(timeout=max(0.0, until - time.monotonic()), decode=False)
        except TimeoutError as error:
            raise EnvError(f"{self._where(kind)}: no answer in {deadline_s:g} s") from error
        except exceptions.ConnectionClosed as error:
            raise self._closing_error(kind, error) from error
        except (OSError, exceptions.WebSocketException) as error:
            raise ClosedError(f"{self._where(kind)}: {first_line(error)}") from error
        return self._read(kind, raw if isinstance(raw, bytes) else raw.encode())

    def close(self) -> None:
        """Send `close` to the server and close the connection; errors of both are ignored."""
        with contextlib.suppress(Exception):
            self._websocket.send('{"type": "close"}')
        with contextlib.suppress(Exception):
            self._lifetime.close()

    def _where(self, kind: str) -> str:
        return f"server {self.address.websocket}/ws: {kind}"

    def _open(self, address: Address, access: Access, connect_s: float) -> Any:
        websockets = import_websockets()
        where = f"server {address.websocket}/ws"
        try:
            # With this socket, neither proxies nor redirects decide where the token is sent.
            sock = socket.create_connection((address.bare_host, address.port), connect_s)
        except OSError as error:
            raise UnreachableError(
                f"{where}: no server answers there ({first_line(error)})"
            ) from error
        self._lifetime.callback(sock.close)
        try:
            return self._lifetime.enter_context(
                websockets.sync.client.connect(
                    f"{address.websocket}/ws",
                    sock=sock,
                    ssl=access.tls if address.secure else None,
                    additional_headers=access.headers,
                    compression=None if address.is_local else "deflate",
                    open_timeout=connect_s,
                    close_timeout=CLOSE_S,
                    ping_interval=None,  # an environment may block its server; deadlines suffice
                    max_size=int(self._reply_mb * (1 << 20)),
                )
            )
        except BaseException as error:
            self._lifetime.close()
            if isinstance(error, ssl.SSLError):
                raise EnvError(f"{where}: TLS failed: {first_line(error)}") from error
            raise self._handshake_error(where, error) from error

    def _handshake_error(self, where: str, error: BaseException) -> BaseException:
        """Return the error to raise for a handshake that failed."""
        exceptions = import_websockets().exceptions
        if isinstance(error, TimeoutError):
            return UnreachableError(f"{where}: no handshake in time")
        for cause in (error, error.__cause__):
            if isinstance(cause, exceptions.InvalidStatus):
                status = cause.response.status_code
                if 300 <= status < 400:
                    why = "a redirect; name the address itself in env.options.url"
                    return EnvError(f"{where} answers with {why}")
                fix = "is it the address of an OpenEnv server?"
                if status in (401, 403):
                    fix = "set env.options.token_env"
                return EnvError(f"{where} answers {status}; {fix}")
        if isinstance(error, OSError | exceptions.WebSocketException | ValueError | EOFError):
            return UnreachableError(f"{where}: no WebSocket there ({first_line(error)})")
        return error

    def _closing_error(self, kind: str, error: Any) -> EnvError:
        """Return the error to raise for a connection that was closed."""
        if error.sent is not None and error.sent.code == 1009:
            return EnvError(
                f"{self._where(kind)}: the answer has more than {self._reply_mb:g} MiB; "
                "env.options.reply_mb bounds it"
            )
        return ClosedError(f"{self._where(kind)}: the server closed the connection")

    def _read(self, kind: str, raw: bytes) -> Reply:
        """Return the reply in a message of the server. Raises EnvError for an error or another message."""
        pixels = cut_numbers(raw, self._numbers) if self._numbers else None
        try:
            message = json.loads(raw if pixels is None else pixels.rest)
        except (ValueError, RecursionError):
            text = excerpt(raw[:400].decode("utf-8", "replace"))
            raise EnvError(f"{self._where(kind)}: no JSON: {text}") from None
        type_, data = _parts(message)
        if type_ == "error":
            raise self._error(kind, data)
        observation, reward, is_done = (data.get(key) for key in ("observation", "reward", "done"))
        is_observation = type_ == "observation" and isinstance(observation, dict)
        if not is_observation or not isinstance(is_done, bool):
            raise EnvError(
                f"{self._where(kind)}: no observation, but {excerpt(json.dumps(message))}"
            )
        if isinstance(reward, bool | int):
            reward = float(reward)
        if reward is not None and not (isinstance(reward, float) and abs(reward) < float("inf")):
            raise EnvError(f"{self._where(kind)}: the reward is {reward!r}, want a number or null")
        return Reply(cast("Mapping[str, Any]", observation), reward, is_done, pixels)

    def _error(self, kind: str, data: Mapping[str, Any]) -> EnvError:
        """Return the server's error, with the fix if there is one."""
        code = str(data.get("code") or "UNKNOWN")
        text = str(data.get("message") or "no message")
        first = (
            data["errors"][0] if isinstance(data.get("errors"), list) and data["errors"] else None
        )
        if isinstance(first, dict):
            place = first.get("loc")
            where = ".".join(map(str, place)) if isinstance(place, list) else ""
            text = f"{text}: {where}: {first.get('msg')}"
        fix = f"; {_FIXES[code]}" if code in _FIXES else ""
        error = CapacityError if code == "CAPACITY_REACHED" else EnvError
        return error(f"{self._where(kind)}: {code}: {excerpt(text)}{fix}")


def import_websockets() -> ModuleType:
    """Return the package websockets. Raises MissingPartError with the install step."""
    try:
        import websockets.exceptions
        import websockets.sync.client
    except ImportError:
        raise MissingPartError(f"suite openenv needs the package websockets: {INSTALL}") from None
    return websockets


def _parts(message: object) -> tuple[object, Mapping[str, Any]]:
    """Return the type and the data of a message."""
    data = message.get("data") if isinstance(message, dict) else None
    return (message.get("type") if isinstance(message, dict) else None), (
        data if isinstance(data, dict) else {}
    )
