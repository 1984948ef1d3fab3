"""Promises of publish/subscribe, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from bus.endpoints import CurveKeys, Endpoints
from bus.errors import (
    ConfigError,
)
from bus.messages import (
    Ack,
    Message,
    RunState,
)
from bus.pubsub import Forwarder, Publisher, Subscriber
from bus.requests import Replier, Requester
from tests.bus.parts import key_pair
from tests.waiting import PATIENCE_S, wait_until


def run_state(version: int) -> RunState:
    return RunState(
        run_id="run", policy_version=version, weights_path="", stopping=False, reason=""
    )


@pytest.fixture
def forwarder(tmp_path: Path) -> Iterator[Forwarder]:
    endpoints = Endpoints(tmp_path / "run")
    with Forwarder(
        endpoints.address("telemetry-in"), endpoints.address("telemetry-out")
    ) as forwarder:
        yield forwarder


async def published(publisher: Publisher, message: Message, subscriber: Subscriber) -> Message:
    """Publish until the subscriber gets something: connections take a moment to be established."""
    waiting = asyncio.ensure_future(subscriber.next())
    async with asyncio.timeout(PATIENCE_S):
        while not waiting.done():
            publisher.publish(message)
            await asyncio.wait([waiting], timeout=0.02)
    return await waiting


async def test_published_messages_reach_subscribers_of_their_type_only(
    forwarder: Forwarder,
) -> None:
    async with (
        Publisher(forwarder.publish_at) as publisher,
        Subscriber(forwarder.subscribe_at, [RunState]) as subscriber,
    ):
        assert await published(publisher, run_state(0), subscriber) == run_state(0)
        publisher.publish(Ack(note="not for you"))
        publisher.publish(run_state(1))
        seen = {m.policy_version async for m in _until(subscriber, run_state(1))}
        assert seen <= {0, 1}


async def _until(subscriber: Subscriber, last: RunState) -> AsyncIterator[RunState]:
    async with asyncio.timeout(PATIENCE_S):
        async for message in subscriber:
            assert isinstance(message, RunState)
            yield message
            if message == last:
                return


async def test_a_malformed_publication_is_counted_and_skipped(forwarder: Forwarder) -> None:
    async with (
        Publisher(forwarder.publish_at) as publisher,
        Subscriber(forwarder.subscribe_at, [RunState]) as subscriber,
    ):
        await published(publisher, run_state(0), subscriber)
        raw = zmq.Context.instance().socket(zmq.PUB)
        raw.connect(forwarder.publish_at)
        async with asyncio.timeout(PATIENCE_S):
            while not subscriber.malformed:
                raw.send_multipart([b"RunState", b"\xc1garbage"])
                publisher.publish(run_state(1))
                await subscriber.next()
        raw.close(linger=0)


async def test_messages_that_a_subscriber_sends_upstream_do_not_end_the_forwarder(
    forwarder: Forwarder,
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    strangers = [context.socket(zmq.XSUB) for _ in range(2)]
    for each in strangers:
        each.connect(forwarder.subscribe_at)
    async with (
        Publisher(forwarder.publish_at) as publisher,
        Subscriber(forwarder.subscribe_at, [RunState]) as subscriber,
    ):
        strangers[0].send(b"\x01abc")
        await published(publisher, run_state(0), subscriber)
        # XPUB forwards both parts; XSUB keeps the second for itself, a subscription that it has
        # already, and its message never ends (libzmq 4.3.5): that killed an XSUB-XPUB forwarder.
        strangers[1].send_multipart([b"x", b"\x01abc"])
        for each in strangers:
            each.close(linger=int(1000 * PATIENCE_S))
        for version in range(1, 50):
            await published(publisher, run_state(version), subscriber)
    assert forwarder._thread.is_alive()


def test_a_forwarder_whose_thread_has_ended_still_closes(forwarder: Forwarder) -> None:
    forwarder._switch.send(b"TERMINATE")
    # ZeroMQ's own thread still sends
    wait_until(lambda: not forwarder._switch.poll(0, zmq.POLLOUT))
    forwarder.close()
    forwarder.close()


async def test_subscribers_and_publishers_find_a_forwarder_that_starts_late_and_restarts(
    tmp_path: Path,
) -> None:
    endpoints = Endpoints(tmp_path / "run")
    inlet, outlet = endpoints.address("telemetry-in"), endpoints.address("telemetry-out")
    async with Publisher(inlet) as publisher, Subscriber(outlet, [RunState]) as subscriber:
        for version in range(2):
            with Forwarder(inlet, outlet):
                async with asyncio.timeout(PATIENCE_S):
                    while await published(publisher, run_state(version), subscriber) != run_state(
                        version
                    ):
                        pass


async def test_curve_protects_telemetry_too() -> None:
    server, known, stranger = key_pair(), key_pair(), key_pair()
    with Forwarder(
        "tcp://127.0.0.1:*",
        "tcp://127.0.0.1:*",
        curve=CurveKeys(*server, allowed=frozenset([known[0]])),
    ) as forwarder:
        mine = CurveKeys(*known, server=server[0])
        async with (
            Publisher(forwarder.publish_at, curve=mine) as publisher,
            Publisher(
                forwarder.publish_at, curve=CurveKeys(*stranger, server=server[0])
            ) as intruder,
            Subscriber(forwarder.subscribe_at, [RunState], curve=mine) as subscriber,
        ):
            for _ in range(20):
                intruder.publish(run_state(666))
                assert await published(publisher, run_state(1), subscriber) == run_state(1)


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://10.0.0.1:1"])
async def test_a_socket_beyond_loopback_needs_keys(endpoint: str) -> None:
    for kind in (Replier, Requester, Publisher):
        with pytest.raises(ConfigError, match=r"needs CURVE keys"):
            kind(endpoint)
    with pytest.raises(ConfigError, match=r"needs CURVE keys"):
        Subscriber(endpoint, [RunState])
