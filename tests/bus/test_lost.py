"""Promises about a lost peer: the requester learns of it from the connection, not from a timer."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bus.endpoints import Endpoints
from bus.errors import DeadlineError
from bus.messages import Ack, Reply, Request, StopRequest
from bus.requests import Replier, Requester
from tests.waiting import PATIENCE_S, until

ASK = StopRequest(reason="enough")

SILENT_SERVER = """
import asyncio, sys
from bus.requests import Replier

async def main():
    async def silent(client, request):
        print("asked", flush=True)
        await asyncio.Event().wait()

    async with Replier(sys.argv[1]) as replier:
        print(replier.endpoint, flush=True)
        await replier.serve(silent)

asyncio.run(main())
"""


class Server:
    """A real process that takes requests and never answers."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def line(self) -> str:
        assert self.process.stdout is not None
        return (await asyncio.wait_for(self.process.stdout.readline(), PATIENCE_S)).decode().strip()

    async def signal(self, number: int) -> None:
        self.process.send_signal(number)
        await self.process.wait()


@asynccontextmanager
async def silent_server(endpoint: str) -> AsyncIterator[tuple[Server, str]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SILENT_SERVER, endpoint, stdout=asyncio.subprocess.PIPE
    )
    server = Server(process)
    try:
        yield server, await server.line()
    finally:
        if process.returncode is None:
            await server.signal(signal.SIGKILL)


@pytest.fixture(params=["ipc", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "tcp":
        return "tcp://127.0.0.1:*"
    return Endpoints(tmp_path / "run").address("rollout-0")


async def given_up(task: asyncio.Task[Reply]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_pending_request_learns_at_once_that_its_server_was_killed(address: str) -> None:
    async with silent_server(address) as (server, endpoint), Requester(endpoint) as requester:
        asking = asyncio.create_task(requester.request(ASK, PATIENCE_S))
        assert await server.line() == "asked"
        await until(lambda: requester.connected)
        assert not requester.lost.is_set()
        await server.signal(signal.SIGKILL)
        await asyncio.wait_for(requester.lost.wait(), PATIENCE_S)
        assert not requester.connected
        assert not asking.done()  # it still asks any later server, until its deadline
        await given_up(asking)


async def test_a_lost_server_that_is_back_is_asked_again_before_the_retry_time(
    tmp_path: Path,
) -> None:
    endpoint = Endpoints(tmp_path / "run").address("rollout-0")

    async def ack(client: str, request: Request) -> Reply:
        return Ack()

    async with Requester(endpoint) as requester:
        async with silent_server(endpoint) as (server, _):
            asking = asyncio.create_task(requester.request(ASK, PATIENCE_S, retry_s=PATIENCE_S))
            assert await server.line() == "asked"
            await server.signal(signal.SIGKILL)
            await asyncio.wait_for(requester.lost.wait(), PATIENCE_S)
        async with serving(endpoint, ack):
            assert await asyncio.wait_for(asking, PATIENCE_S) == Ack()
            await until(lambda: requester.connected)
            assert not requester.lost.is_set()


async def test_a_stopped_server_is_not_lost(address: str) -> None:
    async with silent_server(address) as (server, endpoint), Requester(endpoint) as requester:
        asking = asyncio.create_task(requester.request(ASK, PATIENCE_S))
        assert await server.line() == "asked"
        server.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(0.3)
        assert requester.connected
        assert not requester.lost.is_set()
        await given_up(asking)


async def test_closing_watched_connections_does_not_hang_the_others(tmp_path: Path) -> None:
    endpoints = Endpoints(tmp_path / "run")

    async def ack(client: str, request: Request) -> Reply:
        return Ack()

    async with serving(endpoints.address("data"), ack):
        for _ in range(30):
            async with (
                Requester(endpoints.address("rollout-0")),  # no server
                Requester(endpoints.address("data")) as requester,
            ):
                assert await requester.request(ASK, PATIENCE_S) == Ack()


async def test_a_peer_that_was_never_there_is_not_lost(tmp_path: Path) -> None:
    endpoint = Endpoints(tmp_path / "run").address("rollout-0")
    async with Requester(endpoint) as requester:
        with pytest.raises(DeadlineError):
            await requester.request(ASK, 0.3)
        assert not requester.lost.is_set()
        assert not requester.connected


@asynccontextmanager
async def serving(
    endpoint: str, handler: Callable[[str, Request], Awaitable[Reply]]
) -> AsyncIterator[Replier]:
    async with Replier(endpoint) as replier:
        task = asyncio.create_task(replier.serve(handler))
        yield replier
    await task
