"""Typed sockets over ZeroMQ: request/reply that loses nothing, publish/subscribe for telemetry.

    Requester    asks one server; same id again and again until the answer or the deadline
    Replier      serves typed requests; a repeated id is answered from the record, never redone
    Publisher    connects to telemetry-in and sends; drops rather than waits
    Subscriber   connects to telemetry-out and iterates typed messages
    Forwarder    binds both in `data`, so that everybody else only connects

On the wire a request is `[request id, *codec frames]` (DEALER), for the server with the client's
routing id in front (ROUTER); a reply goes back the same way. Published messages are codec frames;
the kind is the topic.

What bounds what: requests in flight by `max_in_flight`, handlers by `max_handlers` (the server
reads no further while all are busy), queues by the high-water mark, frames by ZMQ_MAXMSGSIZE,
recorded replies by count and bytes. All classes but Forwarder are made inside a running loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import zmq

from bus import errors
from bus.channel import Channel, PeerWatch
from bus.codec import decode, encode, limits_of
from bus.endpoints import CurveKeys
from bus.errors import BusError, DartError, DeadlineError, ProtocolError, RefusedError
from bus.messages import ErrorReply, Message, Reply, Request
from bus.transport import HIGH_WATER_MARK, LINGER_S, bind, bound_address, connect

log = logging.getLogger(__name__)

RETRY_S = 2.0
COMPLAIN_S = 1.0
"""Between two lines in the log about messages that were refused."""
PARTING_S = 0.1
"""From a server's last answer to its end: a client whose connection closes may lose what it has
not read yet (libzmq drops the pipe of a socket with ZMQ_IMMEDIATE)."""
_ID_BYTES = 16

Handler = Callable[[str, Request], Awaitable[Reply]]
"""(client's name, request) -> reply; a DartError it raises becomes an ErrorReply."""


class _Complaints:
    """Logs what strangers send, a line a second at most: no flood of messages fills the disk."""

    def __init__(self) -> None:
        self._next_at = 0.0  # monotonic seconds
        self._untold = 0

    def tell(self, text: str) -> None:
        """Log it, or count it where one was logged a moment ago."""
        now = time.monotonic()
        if now < self._next_at:
            self._untold += 1
            return
        more = f" (and {self._untold} more since the last)" if self._untold else ""
        log.warning("%s%s", text, more)
        self._next_at, self._untold = now + COMPLAIN_S, 0


# --- request --------------------------------------------------------------------------------


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


class Requester:
    """Asks one server. Any number of tasks may ask at once; `peer` names the server in errors.

    `lost` is set while a connection that stood is gone, at once and without any timer: the server
    ended, was killed, or its host vanished. Requests in flight go on asking until their deadline;
    whoever can ask somebody else waits for `lost` too.
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
        if max_in_flight > HIGH_WATER_MARK:  # a ROUTER drops the answers its queue has no room for
            raise ValueError(f"max_in_flight of {max_in_flight}, at most {HIGH_WATER_MARK}")
        self.endpoint = endpoint
        self.connected = False
        """Whether a connection stands, keys checked."""
        self.lost = asyncio.Event()
        self._peer = peer
        self._max_in_flight = max_in_flight
        self._asking: dict[bytes, _Pending] = {}
        self._queued: dict[bytes, _Pending] = {}  # beyond max_in_flight, first come first served
        self._outbox: dict[
            bytes, _Pending
        ] = {}  # refused by ZeroMQ: nobody there, or its queue full
        self._closed = False
        self._loop = asyncio.get_running_loop()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, f"{name[:200]}.{uuid.uuid4().hex[:12]}".encode())
        # Send only into a live connection: nothing piles up for a server that is away, and the
        # first thing a restarted one hears is what is still wanted.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        self._watch = PeerWatch(socket, self._peer_is)  # before the connection can stand
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
        """Requests that wait for their answer."""
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
        is back, until `deadline_s`; `request_id` (16 bytes) may be given to ask another server the
        same thing. Raises DeadlineError; ProtocolError for an answer that is none; where the
        server refused, the error it names from bus.errors, or RefusedError.
        """
        key = request_id or os.urandom(_ID_BYTES)
        if len(key) != _ID_BYTES:
            raise ValueError(f"request_id of {len(key)} bytes, want {_ID_BYTES}")
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
            raise ValueError("this request_id is being asked already")
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

    def _peer_is(self, there: bool) -> None:
        back = there and self.lost.is_set()
        if there:
            self.lost.clear()
        elif self.connected:
            self.lost.set()
        self.connected = there
        if back:  # what the lost one took may have gone with it
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
        start = f"start `{self._peer}`" if self._peer else "start the server"
        if pending.sent:
            cure = f"{peer} took it {pending.sent} times but did not answer; see its log"
        else:
            cure = f"nobody took it there; {start}"
        return f"{_kind(message)} to {self.endpoint} had no answer in {deadline_s:g} s: {cure}"


def _kind(message: Message) -> str:
    return type(message).__name__


# --- reply ----------------------------------------------------------------------------------


class _ReplyCache:
    """The newest replies by request id, bounded by count and by bytes."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count, self._max_bytes = max_count, max_bytes
        self._replies: OrderedDict[bytes, list[bytes]] = OrderedDict()
        self._bytes = 0

    def get(self, key: bytes) -> list[bytes] | None:
        return self._replies.get(key)

    def put(self, key: bytes, frames: list[bytes]) -> None:
        """Keep the reply; the oldest go first, the newest always stays."""
        self._replies[key] = frames
        self._bytes += sum(map(len, frames))
        while len(self._replies) > 1 and (
            len(self._replies) > self._max_count or self._bytes > self._max_bytes
        ):
            _, dropped = self._replies.popitem(last=False)
            self._bytes -= sum(map(len, dropped))


@dataclass
class Served:
    """What a Replier has done so far."""

    requests: int = 0  # handed to the handler
    repeats: int = 0  # answered from the record, or joined to one in work
    malformed: int = 0  # refused by the codec
    refused: int = 0  # the handler raised a DartError
    crashed: int = 0  # the handler raised anything else


@dataclass(slots=True)
class _Execution:
    task: asyncio.Task[None]
    clients: set[bytes]


class Replier:
    """Serves typed requests at one address; each id is executed once while its reply is kept.

    After a restart of the server the record is empty: what a handler does must then be idempotent
    by the message's own keys (trajectory and step, batch id), as it is throughout `dart`.
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
        self.served = Served()
        self._complaints = _Complaints()
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
        """Answer requests until `close` is called; nothing a client sends ends it."""
        self._handler = handler
        self._channel.resume()
        try:
            await self._closing.wait()
        finally:
            self._handler = None
            self._channel.pause()

    async def close(self, linger_s: float = LINGER_S) -> None:
        """Take no more, give the handlers in work `linger_s` to answer, and free the address."""
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
        self._channel.close(linger_s)

    def _take(self, frames: list[bytes]) -> None:
        """Answer from the record, join a request in work, or start a handler for a new one."""
        if len(frames) < 2 or len(frames[1]) != _ID_BYTES:
            self.served.malformed += 1
            return
        client, key = frames[0], frames[1]
        recorded = self._record.get(key)
        if recorded is not None:
            self.served.repeats += 1
            self._answer(client, key, recorded)
            return
        if key in self._jobs:
            self.served.repeats += 1
            self._jobs[key].clients.add(client)
            return
        try:
            message = decode(frames[2:])
            if not isinstance(message, Request):
                raise ProtocolError(f"{_kind(message)} is not a request")
        except ProtocolError as error:
            self.served.malformed += 1
            self._complaints.tell(f"{self.endpoint}: refused a message: {error}")
            self._answer(client, key, encode(_error_reply(error)))
            return
        self.served.requests += 1
        assert self._handler is not None  # the channel is paused without one
        work = self._work(self._handler, client, key, message)
        self._jobs[key] = _Execution(asyncio.create_task(work), {client})
        if len(self._jobs) >= self._max_handlers:
            self._channel.pause()

    async def _work(self, handler: Handler, client: bytes, key: bytes, message: Request) -> None:
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
        try:
            return encode(await handler(client, message))
        except DartError as error:
            self.served.refused += 1
            return encode(_error_reply(error))
        except Exception:
            self.served.crashed += 1
            log.exception("%s: %s from %s failed", self.endpoint, _kind(message), client)
            return encode(
                ErrorReply(
                    error=f"{_kind(message)} failed at {self.endpoint}; its log tells why",
                    error_type=RefusedError.__name__,
                )
            )

    def _answer(self, client: bytes, key: bytes, frames: list[bytes]) -> None:
        # A ROUTER never waits: it drops what a client that is away cannot take, and that client asks
        # again. One that is there has room for all it has in flight.
        self._answered_at = time.monotonic()
        self._channel.send([client, key, *frames])


def _error_reply(error: DartError) -> ErrorReply:
    return ErrorReply(error=str(error), error_type=type(error).__name__)


# --- publish and subscribe ------------------------------------------------------------------


class Publisher:
    """Sends messages to telemetry-in; drops them where nobody listens or the queue is full."""

    def __init__(self, endpoint: str, *, curve: CurveKeys | None = None) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket = connect(context.socket(zmq.PUB), endpoint, curve)

    def publish(self, message: Message) -> None:
        """Send without waiting. Raises ProtocolError if the message cannot be encoded."""
        self._socket.send_multipart(encode(message), copy=False)

    def close(self) -> None:
        """Give what is queued a moment to go out, and close."""
        self._socket.close(linger=200)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class Subscriber:
    """Messages of the given types from telemetry-out, as an async iterator that never ends."""

    def __init__(
        self, endpoint: str, types: Iterable[type[Message]], *, curve: CurveKeys | None = None
    ) -> None:
        self.malformed = 0
        self._complaints = _Complaints()
        self._types = tuple(types)
        self._inbox: deque[list[bytes]] = deque()
        self._arrived = asyncio.Event()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        socket = context.socket(zmq.SUB)
        for message_type in self._types:
            socket.subscribe(message_type.__name__)
        self._channel = Channel(connect(socket, endpoint, curve), self._take)

    async def next(self) -> Message:
        """Wait for the next message; malformed ones are counted and passed over."""
        while True:
            while not self._inbox:
                self._arrived.clear()
                await self._arrived.wait()
            frames = self._inbox.popleft()
            self._channel.resume()
            try:
                message = decode(frames)
            except ProtocolError as error:
                self.malformed += 1
                self._complaints.tell(f"dropped a published message: {error}")
                continue
            if isinstance(message, self._types):  # a topic is a prefix: another kind may match it
                return message

    async def __aiter__(self) -> AsyncIterator[Message]:
        while True:
            yield await self.next()

    def close(self) -> None:
        """Stop; a task that iterates must be cancelled first."""
        self._channel.close(0)

    def _take(self, frames: list[bytes]) -> None:
        self._inbox.append(frames)
        self._arrived.set()
        if len(self._inbox) >= HIGH_WATER_MARK:
            self._channel.pause()  # until somebody reads: what comes then is dropped by the sender

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class Forwarder:
    """Passes everything published at one address on to the subscribers of the other.

    Runs in a thread of its own inside ZeroMQ's proxy, so heartbeats flow while the process that
    holds it is busy. One way only, SUB to PUB: an XSUB-XPUB proxy also hands on what subscribers send,
    and one ill-made message of theirs ends it.
    """

    def __init__(
        self, publish_at: str, subscribe_at: str, *, curve: CurveKeys | None = None
    ) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._inlet = bind(context.socket(zmq.SUB), publish_at, curve)
        self._inlet.subscribe(b"")
        try:
            self._outlet = bind(context.socket(zmq.PUB), subscribe_at, curve)
        except DartError:
            self._inlet.close(linger=0)
            raise
        self.publish_at = bound_address(self._inlet)
        self.subscribe_at = bound_address(self._outlet)
        control = f"inproc://forwarder-{os.getpid()}-{uuid.uuid4().hex}"
        self._switch: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self._switch.bind(control)
        self._thread = threading.Thread(
            target=self._pump, args=(context, control), name="forwarder", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and free both addresses; may be called twice."""
        if self._switch.closed:
            return
        with contextlib.suppress(zmq.Again):  # the thread has ended already: nobody is there
            self._switch.send(b"TERMINATE", zmq.NOBLOCK)
        self._thread.join(timeout=LINGER_S)
        self._switch.close(linger=0)
        self._inlet.close(linger=0)
        self._outlet.close(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _pump(self, context: zmq.Context[Any], control: str) -> None:
        stop = context.socket(zmq.PAIR)
        stop.connect(control)
        try:
            zmq.proxy_steerable(self._inlet, self._outlet, None, stop)
        except zmq.ContextTerminated:
            log.warning("forwarder ended with its context")
        finally:
            stop.close(linger=0)
