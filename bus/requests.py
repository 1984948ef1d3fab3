"""Request/reply that loses no request, both ends.

    Requester        sends requests to one server, and repeats them until the answer or the deadline
    RequestClient    the protocol of a Requester for its callers
    Replier          serves typed requests; a repeated id is answered from its record, never executed again
    EncodedReply     a reply that its handler has encoded already, e.g. in a thread
    ReplierCounts    counts of what a Replier has done

On the wire a request is `[request id, *frames of codec.py]` (DEALER); the server receives it with the
client's routing id in front (ROUTER), and a reply goes back in the same way.

Everything is bounded: requests in flight by `max_in_flight`, handlers by `max_handlers` (the server reads
no further while all are busy), queues by the high-water mark, frames by ZMQ_MAXMSGSIZE, recorded replies by
count and bytes. A Requester and a Replier must be made inside a running event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, Self

import zmq

from bus import errors
from bus.codec import decode, encode, limits_of
from bus.endpoints import CurveKeys
from bus.errors import BusError, DartError, DeadlineError, ProtocolError, RefusedError
from bus.heartbeat import start
from bus.messages import ErrorReply, Message, Reply, Request
from bus.sockets import (
    HIGH_WATER_MARK,
    LINGER_S,
    REQUEST_ID_BYTES,
    Channel,
    PeerWatch,
    RefusalLog,
    bind,
    bound_address,
    connect,
    remove_socket_file,
    socket_file,
)

log = logging.getLogger(__name__)

RETRY_S = 2.0


@dataclass(eq=False, slots=True)
class _Pending:
    """A request that waits for its answer."""

    key: bytes
    frames: list[bytes]  # the key and the message
    answer: asyncio.Future[list[bytes]]
    late: Callable[[_Pending], DeadlineError]
    deadline: float  # of the loop's clock
    retry_s: float
    timer: asyncio.TimerHandle | None = None
    sent: int = 0


class RequestClient(Protocol):
    """The method of a Requester that callers use."""

    async def request(self, message: Request, deadline_s: float) -> Reply:
        """Return the server's answer. Raises DeadlineError, or the error with which the server refused."""
        ...


class Requester:
    """A client of one server, for any number of tasks; `peer` is the server's name in errors.

    `lost` is set as soon as an established connection is lost, without any timer: the server ended, was
    killed, or its host vanished. Requests in flight are still repeated until their deadline. A caller that
    can use another server should wait for `lost`, too.
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
        if max_in_flight > HIGH_WATER_MARK:  # a ROUTER drops answers that do not fit into its queue
            raise ValueError(f"max_in_flight of {max_in_flight}, at most {HIGH_WATER_MARK}")
        self.endpoint = endpoint
        self.connected = False
        """True while a connection is established and its keys are checked."""
        self.lost = asyncio.Event()
        self._peer = peer
        self._max_in_flight = max_in_flight
        self._asking: dict[bytes, _Pending] = {}
        self._queued: dict[bytes, _Pending] = {}  # beyond max_in_flight, first come first served
        # Requests that ZeroMQ refused: there is no connection, or its queue is full.
        self._outbox: dict[bytes, _Pending] = {}
        self._closed = False
        self._loop = asyncio.get_running_loop()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, f"{name[:200]}.{uuid.uuid4().hex[:12]}".encode())
        # Send only into a live connection: no requests pile up for an absent server, and a restarted one gets
        # only requests that are still in flight.
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
        """Number of requests that wait for an answer."""
        return len(self._asking)

    async def request(
        self,
        message: Request,
        deadline_s: float,
        retry_s: float = RETRY_S,
        *,
        request_id: bytes | None = None,
    ) -> Reply:
        """Return the server's answer, of the request's `reply_type`.

        The request is sent again with the same id every `retry_s` seconds, and when a lost server is back,
        until `deadline_s`. Pass `request_id` (16 bytes) to send the same request to another server. Raises
        DeadlineError; ProtocolError for an invalid answer; and, if the server refuses, the server's own error
        of bus.errors, or RefusedError for an unknown one.
        """
        key = request_id or os.urandom(REQUEST_ID_BYTES)
        if len(key) != REQUEST_ID_BYTES:
            raise ValueError(f"request_id of {len(key)} bytes, want {REQUEST_ID_BYTES}")
        pending = _Pending(
            key,
            [key, *encode(message)],
            self._loop.create_future(),
            lambda late: DeadlineError(self._late_text(message, late, deadline_s)),
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
        """Close the connection; callers whose requests are in flight get a BusError."""
        self._closed = True
        for pending in [*self._asking.values(), *self._queued.values()]:
            if not pending.answer.done():
                pending.answer.set_exception(BusError(f"{self.endpoint}: requester closed"))
        self._watch.close()
        self._channel.close(0)

    def _enter(self, pending: _Pending) -> None:
        """Send a request, or queue it if there are `max_in_flight` already. Raises BusError once closed."""
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
        """Forget a request that has ended, and send the first of the queued ones."""
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
        """Send a request again, or end it with a DeadlineError."""
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
        """Note that the connection was established or lost; repeat requests to a server that is back."""
        back = present and self.lost.is_set()
        if present:
            self.lost.clear()
        elif self.connected:
            self.lost.set()
        self.connected = present
        if back:  # requests that the lost server had received may be lost, too
            for pending in self._asking.values():
                if not pending.answer.done():
                    self._send(pending)

    def _checked(self, message: Request, reply: Reply) -> Reply:
        """Return the reply if it has the right type; raise the error that the server answered with."""
        if isinstance(reply, ErrorReply):
            kind = getattr(errors, reply.error_type, None)
            if isinstance(kind, type) and issubclass(kind, DartError):
                raise kind(reply.error)
            raise RefusedError(f"{self.endpoint} refused {_kind(message)}: {reply.error}")
        if not isinstance(reply, message.reply_type):
            raise ProtocolError(
                f"{self.endpoint} answered {_kind(message)} with {_kind(reply)}, "
                f"want {message.reply_type.__name__}"
            )
        return reply

    def _late_text(self, message: Request, pending: _Pending, deadline_s: float) -> str:
        peer = self._peer or "the server"
        fix = start(self._peer) if self._peer else "start the server"
        if pending.sent:
            why = f"{peer} received it {pending.sent} times but did not answer; see its log"
        else:
            why = f"no process serves there; {fix}"
        return f"{_kind(message)} to {self.endpoint} had no answer in {deadline_s:g} s: {why}"


def _kind(message: Message) -> str:
    return type(message).__name__


# --- the server's end ----------------------------------------------------------------------

PARTING_S = 0.1
"""Pause between a server's last answer and its end. A client may lose answers that it has not read when its
connection closes (libzmq drops the pipe of a socket with ZMQ_IMMEDIATE)."""


@dataclass(frozen=True)
class EncodedReply:
    """A reply as its frames."""

    frames: list[bytes]

    @classmethod
    def of(cls, reply: Reply) -> Self:
        """Return the encoded reply. Raises as `encode` does."""
        return cls(encode(reply))


Handler = Callable[[str, Request], Awaitable[Reply | EncodedReply]]
"""(client's name, request) -> reply. A DartError that it raises becomes an ErrorReply."""


class _ReplyCache:
    """The newest replies by request id, bounded by count and by bytes."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count, self._max_bytes = max_count, max_bytes
        self._replies: OrderedDict[bytes, list[bytes]] = OrderedDict()
        self._bytes = 0

    def get(self, key: bytes) -> list[bytes] | None:
        return self._replies.get(key)

    def put(self, key: bytes, frames: list[bytes]) -> None:
        """Add a reply; the oldest ones are removed to keep the bounds, the newest always stays."""
        self._replies[key] = frames
        self._bytes += sum(map(len, frames))
        while len(self._replies) > 1 and (
            len(self._replies) > self._max_count or self._bytes > self._max_bytes
        ):
            _, oldest = self._replies.popitem(last=False)
            self._bytes -= sum(map(len, oldest))


@dataclass
class ReplierCounts:
    """Counts of what a Replier has done."""

    requests: int = 0  # passed to the handler
    repeats: int = 0  # answered from the record, or joined to a request that is being handled
    malformed: int = 0  # not a request that codec.py can decode
    refused: int = 0  # the handler raised a DartError
    crashed: int = 0  # the handler raised another exception


@dataclass(slots=True)
class _Execution:
    """A request that is being handled, and the clients that wait for its reply."""

    task: asyncio.Task[None]
    clients: set[bytes]


class Replier:
    """A server of typed requests at one address; each id is executed once while its reply is in the record.

    After a restart of the server the record is empty. So handlers must be idempotent by the message's own
    keys (trajectory and step, batch id), as all handlers of `dart` are.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        curve: CurveKeys | None = None,
        max_handlers: int = 64,
        record_count: int = 8192,
        record_bytes: int = 256 * 2**20,
    ) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a client that reconnects keeps its name
        bind(socket, endpoint, curve)
        self.endpoint = bound_address(socket)
        self._file = socket_file(self.endpoint)
        self.counts = ReplierCounts()
        self._refusals = RefusalLog()
        self._channel = Channel(socket, self._take)
        self._channel.pause()  # until there is a handler
        self._handler: Handler | None = None
        self._max_handlers = max_handlers
        self._record = _ReplyCache(record_count, record_bytes)
        self._jobs: dict[bytes, _Execution] = {}
        self._answered_at = -PARTING_S  # monotonic seconds
        self._closing = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def serve(self, handler: Handler) -> None:
        """Answer requests until `close` is called; no message from a client can end it."""
        self._handler = handler
        self._channel.resume()
        try:
            await self._closing.wait()
        finally:
            self._handler = None
            self._channel.pause()

    async def close(self, linger_s: float = LINGER_S) -> None:
        """Accept no more requests, give running handlers `linger_s` to answer, and free the address."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._channel.pause()
        tasks = [job.task for job in self._jobs.values()]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=linger_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        parting_s = self._answered_at + PARTING_S - time.monotonic()
        await asyncio.sleep(max(0.0, min(parting_s, linger_s)))
        remove_socket_file(self._file)
        self._channel.close(linger_s)

    def _take(self, frames: list[bytes]) -> None:
        """Handle one message: answer from the record, join a running handler, or start one."""
        if len(frames) < 2 or len(frames[1]) != REQUEST_ID_BYTES:
            self.counts.malformed += 1
            return
        # 1. A repeated request.
        client, key = frames[0], frames[1]
        reply = self._record.get(key)
        if reply is not None:
            self.counts.repeats += 1
            self._answer(client, key, reply)
            return
        if key in self._jobs:
            self.counts.repeats += 1
            self._jobs[key].clients.add(client)
            return
        # 2. A malformed request.
        try:
            message = decode(frames[2:])
            if not isinstance(message, Request):
                raise ProtocolError(f"{_kind(message)} is not a request")
        except ProtocolError as error:
            self.counts.malformed += 1
            self._refusals.warn(f"{self.endpoint}: refused a message: {error}")
            self._answer(client, key, encode(_error_reply(error)))
            return
        # 3. A new request.
        self.counts.requests += 1
        assert self._handler is not None  # the channel is paused without one
        work = self._work(self._handler, client, key, message)
        self._jobs[key] = _Execution(asyncio.create_task(work), {client})
        if len(self._jobs) >= self._max_handlers:
            self._channel.pause()

    async def _work(self, handler: Handler, client: bytes, key: bytes, message: Request) -> None:
        """Handle a new request, record its reply, and answer all clients that sent it."""
        try:
            frames = await self._handle(handler, client.decode("utf-8", "replace"), message)
            self._record.put(key, frames)
            for waiting in self._jobs[key].clients:
                self._answer(waiting, key, frames)
        finally:
            del self._jobs[key]
            if self._handler is not None:
                self._channel.resume()

    async def _handle(self, handler: Handler, client: str, message: Request) -> list[bytes]:
        """Return the frames of the handler's reply; an error becomes an ErrorReply."""
        try:
            reply = await handler(client, message)
            return reply.frames if isinstance(reply, EncodedReply) else encode(reply)
        except DartError as error:
            self.counts.refused += 1
            return encode(_error_reply(error))
        except Exception:
            self.counts.crashed += 1
            log.exception("%s: %s from %s failed", self.endpoint, _kind(message), client)
            return encode(
                ErrorReply(
                    error=f"{_kind(message)} failed at {self.endpoint}; see its log",
                    error_type=RefusedError.__name__,
                )
            )

    def _answer(self, client: bytes, key: bytes, frames: list[bytes]) -> None:
        # A ROUTER never waits: it drops answers to an absent client, which sends its request again. A
        # connected client's queue can hold the answers to all of its requests in flight.
        self._answered_at = time.monotonic()
        self._channel.send([client, key, *frames])


def _error_reply(error: DartError) -> ErrorReply:
    return ErrorReply(error=str(error), error_type=type(error).__name__)
