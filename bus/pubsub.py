"""Publish/subscribe for telemetry: no process waits for a message, and messages may be dropped.

    Publisher    connects to telemetry-in and sends messages
    Subscriber   connects to telemetry-out and iterates over typed messages
    Forwarder    binds both addresses in the data service, so that all other processes only connect

Published messages are the frames of codec.py; their kind is the topic. Queues are bounded by the high-water
mark, frames by ZMQ_MAXMSGSIZE. A Subscriber must be made inside a running event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import uuid
from collections import deque
from collections.abc import AsyncIterator, Iterable
from types import TracebackType
from typing import Any, Self

import zmq

from bus.codec import decode, encode
from bus.endpoints import CurveKeys
from bus.errors import DartError, ProtocolError
from bus.messages import Message
from bus.sockets import (
    HIGH_WATER_MARK,
    LINGER_S,
    Channel,
    RefusalLog,
    bind,
    bound_address,
    connect,
    remove_socket_file,
    socket_file,
)

log = logging.getLogger(__name__)


class Publisher:
    """A sender of messages to telemetry-in. It drops a message if no process listens or the queue is full."""

    def __init__(self, endpoint: str, *, curve: CurveKeys | None = None) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket = connect(context.socket(zmq.PUB), endpoint, curve)

    def publish(self, message: Message) -> None:
        """Send a message without waiting. Raises ProtocolError if it cannot be encoded."""
        self._socket.send_multipart(encode(message), copy=False)

    def close(self) -> None:
        """Close the socket; messages in its queue are still sent, for at most 0.2 s."""
        self._socket.close(linger=200)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class Subscriber:
    """An endless async iterator over the messages of some types from telemetry-out."""

    def __init__(
        self, endpoint: str, types: Iterable[type[Message]], *, curve: CurveKeys | None = None
    ) -> None:
        self.malformed = 0
        self._refusals = RefusalLog()
        self._types = tuple(types)
        self._inbox: deque[list[bytes]] = deque()
        self._arrived = asyncio.Event()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        socket = context.socket(zmq.SUB)
        for message_type in self._types:
            socket.subscribe(message_type.__name__)
        self._channel = Channel(connect(socket, endpoint, curve), self._take)

    async def next(self) -> Message:
        """Wait for the next message and return it; malformed ones are counted and skipped."""
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
                self._refusals.warn(f"dropped a published message: {error}")
                continue
            if isinstance(message, self._types):  # a topic is a prefix, which other kinds may have
                return message

    async def __aiter__(self) -> AsyncIterator[Message]:
        while True:
            yield await self.next()

    def close(self) -> None:
        """Close the socket; a task that iterates must be cancelled first."""
        self._channel.close(0)

    def _take(self, frames: list[bytes]) -> None:
        self._inbox.append(frames)
        self._arrived.set()
        if len(self._inbox) >= HIGH_WATER_MARK:
            self._channel.pause()  # until the iterator reads; the sender drops messages meanwhile

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class Forwarder:
    """A forwarder of everything published at one address to the subscribers of another.

    It runs ZeroMQ's proxy in a thread, so that heartbeats are forwarded while its process is busy. It
    forwards one way only, from SUB to PUB: an XSUB-XPUB proxy also forwards what subscribers send, and one
    malformed message of theirs ends it.
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
        self._files = [socket_file(address) for address in (self.publish_at, self.subscribe_at)]
        control = f"inproc://forwarder-{os.getpid()}-{uuid.uuid4().hex}"
        self._switch: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self._switch.bind(control)
        self._thread = threading.Thread(
            target=self._pump, args=(context, control), name="forwarder", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and free both addresses. It may be called twice."""
        if self._switch.closed:
            return
        with contextlib.suppress(zmq.Again):  # the thread has ended already
            self._switch.send(b"TERMINATE", zmq.NOBLOCK)
        self._thread.join(timeout=LINGER_S)
        self._switch.close(linger=0)
        for file in self._files:
            remove_socket_file(file)
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
        """Forward messages until `close` stops the proxy; this runs in the thread."""
        stop = context.socket(zmq.PAIR)
        stop.connect(control)
        try:
            zmq.proxy_steerable(self._inlet, self._outlet, None, stop)
        except zmq.ContextTerminated:
            log.warning("the forwarder of telemetry ended with its ZeroMQ context")
        finally:
            stop.close(linger=0)
