"""Servers, clients and keys for tests of the sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import zmq
import zmq.asyncio

from bus.messages import (
    Ack,
    Reply,
    Request,
    StopRequest,
)
from bus.requests import Replier
from tests.waiting import PATIENCE_S

ASK = StopRequest(reason="enough")


@asynccontextmanager
async def serving(
    endpoint: str, handler: Callable[[str, Request], Awaitable[Reply]], **options: int
) -> AsyncIterator[Replier]:
    async with Replier(endpoint, **options) as replier:
        task = asyncio.create_task(replier.serve(handler))
        yield replier
    await task


async def ack(client: str, request: Request) -> Reply:
    return Ack(note=f"{client.partition('.')[0]} {type(request).__name__}")


class RawDealer:
    """A client that sends any frames."""

    def __init__(self, endpoint: str) -> None:
        self.socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self.socket.connect(endpoint)

    async def send(self, *frames: bytes) -> None:
        await self.socket.send_multipart(frames)

    async def receive(self) -> list[bytes]:
        return await asyncio.wait_for(self.socket.recv_multipart(), PATIENCE_S)

    def close(self) -> None:
        self.socket.close(linger=0)


def key_pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()
