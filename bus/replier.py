"""Request/reply that loses nothing, the server's end.

    Replier        serves typed requests; a repeated id is answered from the record, never executed again
    EncodedReply   an answer that its handler has encoded already, in a thread: a large one
    Served         counters of what it has done

The frames are those of bus/requester.py. What bounds what: handlers by `max_handlers` (the server
reads no further while all are busy), queues by the high-water mark, frames by ZMQ_MAXMSGSIZE,
recorded replies by count and bytes. A Replier is made inside a running loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Self

import zmq

from bus.channel import Channel
from bus.codec import decode, encode
from bus.endpoints import CurveKeys
from bus.errors import DartError, ProtocolError, RefusedError
from bus.messages import ErrorReply, Message, Reply, Request
from bus.refusals import RefusalLog
from bus.transport import (
    LINGER_S,
    REQUEST_ID_BYTES,
    bind,
    bound_address,
    remove_socket_file,
    socket_file,
)

log = logging.getLogger(__name__)

PARTING_S = 0.1
"""Pause between a server's last answer and its end: a client whose connection closes may lose what
it has not read yet (libzmq drops the pipe of a socket with ZMQ_IMMEDIATE)."""


@dataclass(frozen=True)
class EncodedReply:
    """A reply as its frames."""

    frames: list[bytes]

    @classmethod
    def of(cls, reply: Reply) -> Self:
        """Raises as `encode` does."""
        return cls(encode(reply))


Handler = Callable[[str, Request], Awaitable[Reply | EncodedReply]]
"""(client's name, request) -> reply; a DartError it raises becomes an ErrorReply."""


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
    repeats: int = 0  # answered from the record, or joined to one being handled
    malformed: int = 0  # refused by the codec
    refused: int = 0  # the handler raised a DartError
    crashed: int = 0  # the handler raised anything else


@dataclass(slots=True)
class _Execution:
    task: asyncio.Task[None]
    clients: set[bytes]


class Replier:
    """Serves typed requests at one address; each id is executed once while its reply is kept.

    After a restart of the server the record is empty: handlers must then be idempotent by the
    message's own keys (trajectory and step, batch id), as all handlers of `dart` are.
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
        self.served = Served()
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
        """Answer requests until `close` is called; no message of a client ends it."""
        self._handler = handler
        self._channel.resume()
        try:
            await self._closing.wait()
        finally:
            self._handler = None
            self._channel.pause()

    async def close(self, linger_s: float = LINGER_S) -> None:
        """Take no more requests, give running handlers `linger_s` to answer, and free the address."""
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
        """Answer from the record, join a request being handled, or start a handler for a new one."""
        if len(frames) < 2 or len(frames[1]) != REQUEST_ID_BYTES:
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
            self._refusals.warn(f"{self.endpoint}: refused a message: {error}")
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
            reply = await handler(client, message)
            return reply.frames if isinstance(reply, EncodedReply) else encode(reply)
        except DartError as error:
            self.served.refused += 1
            return encode(_error_reply(error))
        except Exception:
            self.served.crashed += 1
            log.exception("%s: %s from %s failed", self.endpoint, _kind(message), client)
            return encode(
                ErrorReply(
                    error=f"{_kind(message)} failed at {self.endpoint}; see its log",
                    error_type=RefusedError.__name__,
                )
            )

    def _answer(self, client: bytes, key: bytes, frames: list[bytes]) -> None:
        # A ROUTER never waits: it drops answers to an absent client, which asks again. A connected
        # client has room for all it has in flight.
        self._answered_at = time.monotonic()
        self._channel.send([client, key, *frames])


def _error_reply(error: DartError) -> ErrorReply:
    return ErrorReply(error=str(error), error_type=type(error).__name__)


def _kind(message: Message) -> str:
    return type(message).__name__
