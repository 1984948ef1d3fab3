"""Request/reply that loses nothing, the client's end.

    RequestClient    what callers need of a Requester, as a protocol
    Requester        asks one server; sends the same id again until the answer or the deadline

On the wire a request is `[request id, *codec frames]` (DEALER), for the server with the client's
routing id in front (ROUTER); a reply goes back the same way.

What bounds what: requests in flight by `max_in_flight`, the queue by the high-water mark, frames by
ZMQ_MAXMSGSIZE. A Requester is made inside a running loop.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

import zmq

from bus import errors
from bus.channel import Channel, PeerWatch
from bus.codec import decode, encode, limits_of
from bus.endpoints import CurveKeys
from bus.errors import BusError, DartError, DeadlineError, ProtocolError, RefusedError
from bus.heartbeat import start
from bus.messages import ErrorReply, Message, Reply, Request
from bus.transport import HIGH_WATER_MARK, REQUEST_ID_BYTES, connect

RETRY_S = 2.0


@dataclass(eq=False, slots=True)
class _Pending:
    key: bytes
    frames: list[bytes]  # the key and the message
    answer: asyncio.Future[list[bytes]]
    late: Callable[[_Pending], DeadlineError]
    deadline: float  # of the loop's clock
    retry_s: float
    timer: asyncio.TimerHandle | None = None
    sent: int = 0


class RequestClient(Protocol):
    """What callers need of a Requester."""

    async def request(self, message: Request, deadline_s: float) -> Reply:
        """The server's answer. Raises DeadlineError, and what the server refuses with."""
        ...


class Requester:
    """Asks one server. Any number of tasks may ask at once; `peer` names the server in errors.

    `lost` is set as soon as an established connection is lost, without any timer: the server ended,
    was killed, or its host vanished. Requests in flight are still repeated until their deadline; a
    caller that can ask another server waits for `lost` too.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        name: str = "client",
        peer: str = "",
        curve: CurveKeys | None = None,
        max_in_flight: int = HIGH_WATER_MARK,
    ) -> None:
        if max_in_flight > HIGH_WATER_MARK:  # a ROUTER drops answers that its queue has no room for
            raise ValueError(f"max_in_flight of {max_in_flight}, at most {HIGH_WATER_MARK}")
        self.endpoint = endpoint
        self.connected = False
        """Whether a connection is established, keys checked."""
        self.lost = asyncio.Event()
        self._peer = peer
        self._max_in_flight = max_in_flight
        self._asking: dict[bytes, _Pending] = {}
        self._queued: dict[bytes, _Pending] = {}  # beyond max_in_flight, first come first served
        self._outbox: dict[
            bytes, _Pending
        ] = {}  # refused by ZeroMQ: no connection, or its queue is full
        self._closed = False
        self._loop = asyncio.get_running_loop()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, f"{name[:200]}.{uuid.uuid4().hex[:12]}".encode())
        # Send only into a live connection: nothing piles up for an absent server, and a restarted
        # one first receives what is still wanted.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        self._watch = PeerWatch(socket, self._peer_is)  # before a connection can be established
        try:
            connect(socket, endpoint, curve)
        except DartError:
            self._watch.close()
            raise
        self._channel = Channel(socket, self._take, room=self._send_outbox)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def in_flight(self) -> int:
        """Requests that wait for an answer."""
        return len(self._asking)

    async def request(
        self,
        message: Request,
        deadline_s: float,
        retry_s: float = RETRY_S,
        *,
        request_id: bytes | None = None,
    ) -> Reply:
        """The server's answer, of the request's `reply_type`.

        The request is sent again with the same id every `retry_s` seconds, and when a lost server
        is back, until `deadline_s`; pass `request_id` (16 bytes) to ask another server the same
        thing. Raises DeadlineError; ProtocolError for an invalid answer; where the server refused,
        the error it names from bus.errors, or RefusedError.
        """
        key = request_id or os.urandom(REQUEST_ID_BYTES)
        if len(key) != REQUEST_ID_BYTES:
            raise ValueError(f"request_id of {len(key)} bytes, want {REQUEST_ID_BYTES}")
        pending = _Pending(
            key,
            [key, *encode(message)],
            self._loop.create_future(),
            lambda asked: DeadlineError(self._late(message, asked, deadline_s)),
            self._loop.time() + deadline_s,
            retry_s,
        )
        self._enter(pending)
        try:
            frames = await pending.answer
        finally:
            self._leave(pending)
        answer = decode(frames, limits_of(message.reply_type))
        if not isinstance(answer, Reply):
            raise ProtocolError(f"{self.endpoint} answered with {type(answer).__name__}")
        return self._checked(message, answer)

    async def close(self) -> None:
        """Give up what is in flight (its callers get a BusError) and close."""
        self._closed = True
        for pending in [*self._asking.values(), *self._queued.values()]:
            if not pending.answer.done():
                pending.answer.set_exception(BusError(f"{self.endpoint}: requester closed"))
        self._watch.close()
        self._channel.close(0)

    def _enter(self, pending: _Pending) -> None:
        if self._closed:
            raise BusError(f"{self.endpoint}: requester closed")
        if pending.key in self._asking or pending.key in self._queued:
            raise ValueError("a request with this request_id is in flight already")
        if len(self._asking) < self._max_in_flight:
            self._asking[pending.key] = pending
            self._send(pending)
        else:
            self._queued[pending.key] = pending
        self._set_timer(pending)

    def _leave(self, pending: _Pending) -> None:
        if pending.timer is not None:
            pending.timer.cancel()
        self._outbox.pop(pending.key, None)
        self._queued.pop(pending.key, None)
        if self._asking.pop(pending.key, None) and self._queued and not self._closed:
            key = next(iter(self._queued))
            self._asking[key] = self._queued.pop(key)
            self._send(self._asking[key])

    def _send(self, pending: _Pending) -> None:
        if self._outbox or not self._channel.send(pending.frames):
            self._outbox[pending.key] = pending
        else:
            pending.sent += 1

    def _send_outbox(self) -> None:
        while self._outbox:
            pending = next(iter(self._outbox.values()))
            if not self._channel.send(pending.frames):
                return
            del self._outbox[pending.key]
            pending.sent += 1

    def _set_timer(self, pending: _Pending) -> None:
        at = min(pending.deadline, self._loop.time() + pending.retry_s)
        pending.timer = self._loop.call_at(at, self._tick, pending)

    def _tick(self, pending: _Pending) -> None:
        if pending.answer.done():
            return
        if self._loop.time() >= pending.deadline:
            pending.answer.set_exception(pending.late(pending))
            return
        if pending.key in self._asking:
            self._send(pending)
        self._set_timer(pending)

    def _take(self, frames: list[bytes]) -> None:
        pending = self._asking.get(frames[0])
        if pending is not None and not pending.answer.done():  # else: answered before
            pending.answer.set_result(frames[1:])

    def _peer_is(self, present: bool) -> None:
        back = present and self.lost.is_set()
        if present:
            self.lost.clear()
        elif self.connected:
            self.lost.set()
        self.connected = present
        if back:  # what the lost server had taken may be lost too
            for pending in self._asking.values():
                if not pending.answer.done():
                    self._send(pending)

    def _checked(self, message: Request, reply: Reply) -> Reply:
        if isinstance(reply, ErrorReply):
            known = getattr(errors, reply.error_type, None)
            if isinstance(known, type) and issubclass(known, DartError):
                raise known(reply.error)
            raise RefusedError(f"{self.endpoint} refused {_kind(message)}: {reply.error}")
        if not isinstance(reply, message.reply_type):
            raise ProtocolError(
                f"{self.endpoint} answered {_kind(message)} with {_kind(reply)}, "
                f"want {message.reply_type.__name__}"
            )
        return reply

    def _late(self, message: Request, pending: _Pending, deadline_s: float) -> str:
        peer = self._peer or "the server"
        cure = start(self._peer) if self._peer else "start the server"
        if pending.sent:
            why = f"{peer} received it {pending.sent} times but did not answer; see its log"
        else:
            why = f"no process serves there; {cure}"
        return f"{_kind(message)} to {self.endpoint} had no answer in {deadline_s:g} s: {why}"


def _kind(message: Message) -> str:
    return type(message).__name__
