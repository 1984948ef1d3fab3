"""Promises of request/reply and publish/subscribe, over real sockets."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from bus.codec import encode
from bus.endpoints import CurveKeys, Endpoints
from bus.errors import (
    BusError,
    ConfigError,
    DeadlineError,
    ProtocolError,
    RefusedError,
    StoreError,
)
from bus.messages import (
    Ack,
    ActRequest,
    Batch,
    BatchReply,
    BatchRequest,
    LeaseReply,
    LeaseRequest,
    Message,
    Reply,
    Request,
    RunState,
    Sampling,
    StatusReply,
    StatusRequest,
    StopRequest,
)
from bus.pubsub import Forwarder, Publisher, Subscriber
from bus.replier import Replier
from bus.requester import Requester
from bus.transport import HIGH_WATER_MARK
from tests.waiting import until

ASK = StopRequest(reason="enough")
DEADLINE_S = 20.0


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


@pytest.fixture
def address(tmp_path: Path) -> str:
    return Endpoints(tmp_path / "run").address("data")


class RawDealer:
    """A client that sends whatever it likes."""

    def __init__(self, endpoint: str) -> None:
        self.socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self.socket.connect(endpoint)

    async def send(self, *frames: bytes) -> None:
        await self.socket.send_multipart(frames)

    async def receive(self) -> list[bytes]:
        return await asyncio.wait_for(self.socket.recv_multipart(), DEADLINE_S)

    def close(self) -> None:
        self.socket.close(linger=0)


# --- request and reply ----------------------------------------------------------------------


async def test_a_request_gets_its_typed_reply(address: str) -> None:
    async with serving(address, ack), Requester(address, name="env-0") as requester:
        assert await requester.request(ASK, DEADLINE_S) == Ack(note="env-0 StopRequest")
        assert requester.in_flight == 0


async def test_a_screenshot_of_megabytes_crosses_unchanged(address: str) -> None:
    shot = os.urandom(3 * 2**20)
    seen: list[bytes] = []

    async def look(client: str, request: Request) -> Reply:
        assert isinstance(request, ActRequest)
        seen.append(request.screenshot)
        return StatusReply(snapshot={"same": request.screenshot})

    request = ActRequest(
        trajectory_id="t",
        step=0,
        instruction="",
        turns=[],
        screenshot=shot,
        width=1,
        height=1,
        sampling=Sampling(temperature=1, max_tokens=1, seed=0),
    )
    async with serving(address, look), Requester(address) as requester:
        with pytest.raises(ProtocolError, match="answered ActRequest with StatusReply"):
            await requester.request(request, DEADLINE_S)
    assert seen == [shot]


async def test_many_requests_are_in_flight_at_once_and_answers_find_their_askers(
    address: str,
) -> None:
    everyone_is_here = asyncio.Barrier(20)

    async def handler(client: str, request: Request) -> Reply:
        assert isinstance(request, StopRequest)
        await everyone_is_here.wait()
        return Ack(note=request.reason)

    async with serving(address, handler), Requester(address) as requester:
        asks = [requester.request(StopRequest(reason=str(i)), DEADLINE_S) for i in range(20)]
        replies = await asyncio.gather(*asks)
    assert [reply.note for reply in replies if isinstance(reply, Ack)] == [
        str(i) for i in range(20)
    ]


async def test_requests_beyond_max_in_flight_wait_within_their_deadline(address: str) -> None:
    release = asyncio.Event()

    async def handler(client: str, request: Request) -> Reply:
        await release.wait()
        return Ack()

    async with serving(address, handler) as replier, Requester(address, max_in_flight=1) as one:
        first = asyncio.create_task(one.request(ASK, DEADLINE_S))
        await asyncio.sleep(0)  # first takes the only place
        with pytest.raises(DeadlineError):
            await one.request(StatusRequest(), 0.3)
        release.set()
        await first
        assert replier.served.requests == 1


async def test_requests_made_before_a_server_come_in_order_once_it_is_there(address: str) -> None:
    asked = [str(i) for i in range(HIGH_WATER_MARK)]
    executed: list[str] = []

    async def handler(client: str, request: Request) -> Reply:
        assert isinstance(request, StopRequest)
        executed.append(request.reason)
        await asyncio.sleep(0)
        return Ack(note=request.reason)

    async with Requester(address) as requester:
        # No timer sends again: each is sent when ZeroMQ says that there is room.
        asks = [
            asyncio.create_task(
                requester.request(StopRequest(reason=reason), DEADLINE_S, retry_s=DEADLINE_S)
            )
            for reason in asked
        ]
        await asyncio.sleep(0.05)  # all of them are refused at first: nobody serves
        async with serving(address, handler, max_handlers=1):
            assert await asyncio.gather(*asks) == [Ack(note=reason) for reason in asked]
    assert executed == asked


async def test_more_requests_in_flight_than_queues_have_room_for_are_refused(address: str) -> None:
    with pytest.raises(ValueError, match="max_in_flight of 257, at most 256"):
        Requester(address, max_in_flight=HIGH_WATER_MARK + 1)


async def test_a_cancelled_request_gives_its_place_to_the_next(address: str) -> None:
    async def handler(client: str, request: Request) -> Reply:
        assert isinstance(request, StopRequest)
        if request.reason == "never answered":
            await asyncio.Event().wait()
        return Ack(note=request.reason)

    replier = Replier(address)
    task = asyncio.create_task(replier.serve(handler))
    async with Requester(address, max_in_flight=1) as requester:
        stuck = asyncio.create_task(requester.request(StopRequest(reason="never answered"), 60))
        queued = asyncio.create_task(requester.request(StopRequest(reason="gives up"), 60))
        after = asyncio.create_task(requester.request(StopRequest(reason="next"), DEADLINE_S))
        await asyncio.sleep(0)
        for given_up in (queued, stuck):
            given_up.cancel()
        assert await after == Ack(note="next")
        assert requester.in_flight == 0
    await replier.close(linger_s=0)
    await task


async def test_a_request_made_before_its_server_starts_is_answered(address: str) -> None:
    async with Requester(address) as requester:
        waiting = asyncio.create_task(requester.request(ASK, DEADLINE_S, retry_s=0.1))
        await asyncio.sleep(0.3)
        async with serving(address, ack):
            assert isinstance(await waiting, Ack)


async def test_a_request_survives_the_restart_of_its_server(address: str) -> None:
    received = asyncio.Event()

    async def never(client: str, request: Request) -> Reply:
        received.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with Requester(address) as requester:
        first = Replier(address)
        serving_first = asyncio.create_task(first.serve(never))
        waiting = asyncio.create_task(requester.request(ASK, DEADLINE_S, retry_s=0.1))
        await received.wait()
        await first.close(linger_s=0)
        await serving_first
        async with serving(address, ack):
            assert isinstance(await waiting, Ack)
            assert isinstance(await requester.request(ASK, DEADLINE_S), Ack)


async def test_a_repeated_request_is_executed_once(address: str) -> None:
    executed = 0

    async def count(client: str, request: Request) -> Reply:
        nonlocal executed
        executed += 1
        return Ack(note=str(executed))

    frames = encode(ASK)
    async with serving(address, count) as replier:
        raw = RawDealer(address)
        answers = []
        for _ in range(3):
            await raw.send(b"i" * 16, *frames)
            answers.append(await raw.receive())
        raw.close()
        assert executed == 1
        assert replier.served.repeats == 2
        assert answers == [[b"i" * 16, *encode(Ack(note="1"))]] * 3


async def test_a_repeat_joins_the_request_still_in_work(address: str) -> None:
    executed = 0
    release = asyncio.Event()

    async def slow(client: str, request: Request) -> Reply:
        nonlocal executed
        executed += 1
        await release.wait()
        return Ack(note="slow")

    async with serving(address, slow) as replier, Requester(address) as requester:
        waiting = asyncio.create_task(requester.request(ASK, DEADLINE_S, retry_s=0.02))
        await until(lambda: replier.served.repeats >= 3)
        release.set()
        assert await waiting == Ack(note="slow")
        assert executed == 1


async def test_a_lost_reply_is_given_again_to_whoever_asks_with_the_id(address: str) -> None:
    done = asyncio.Event()

    async def handler(client: str, request: Request) -> Reply:
        done.set()
        return Ack(note=client)

    async with serving(address, handler) as replier:
        first = RawDealer(address)
        await first.send(b"i" * 16, *encode(ASK))
        await done.wait()
        first.close()  # the reply has nowhere to go
        async with Requester(address) as second:
            reply = await second.request(ASK, DEADLINE_S, request_id=b"i" * 16)
        assert isinstance(reply, Ack)
        assert not reply.note.startswith("client.")
        assert replier.served.requests == 1


async def test_the_record_of_replies_is_bounded_and_keeps_the_newest(address: str) -> None:
    async with (
        serving(address, ack, record_count=1, record_bytes=1) as replier,
        Requester(address) as requester,
    ):
        for key in (b"a" * 16, b"b" * 16, b"b" * 16, b"a" * 16):
            await requester.request(ASK, DEADLINE_S, request_id=key)
        assert (replier.served.requests, replier.served.repeats) == (3, 1)


async def test_a_deadline_names_the_message_the_address_and_the_cure(address: str) -> None:
    async with Requester(address, peer="dart data") as requester:
        with pytest.raises(DeadlineError) as nobody:
            await requester.request(ASK, 0.2)
    assert str(nobody.value) == (
        f"StopRequest to {address} had no answer in 0.2 s: nobody took it there; start `dart data`"
    )


async def test_a_deadline_tells_a_silent_server_from_an_absent_one(address: str) -> None:
    async def silent(client: str, request: Request) -> Reply:
        await asyncio.Event().wait()
        raise AssertionError

    replier = Replier(address)
    task = asyncio.create_task(replier.serve(silent))
    async with Requester(address, peer="dart data") as requester:
        with pytest.raises(DeadlineError, match="dart data took it 1 times but did not answer"):
            await requester.request(ASK, 1.0)
    await replier.close(linger_s=0)
    await task


async def test_an_error_of_the_handler_rises_at_the_asker_by_its_class(address: str) -> None:
    async def broken(client: str, request: Request) -> Reply:
        raise StoreError("disk full: free some space")

    async with serving(address, broken) as replier, Requester(address) as requester:
        with pytest.raises(StoreError, match="disk full: free some space"):
            await requester.request(ASK, DEADLINE_S)
        assert replier.served.refused == 1


async def test_a_crash_of_the_handler_is_logged_and_refused_and_serving_goes_on(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def moody(client: str, request: Request) -> Reply:
        if isinstance(request, StopRequest):
            raise ZeroDivisionError("secret detail")
        return StatusReply(snapshot={})

    async with serving(address, moody), Requester(address) as requester:
        with caplog.at_level(logging.ERROR), pytest.raises(RefusedError) as refused:
            await requester.request(ASK, DEADLINE_S)
        assert "secret detail" not in str(refused.value)
        assert "ZeroDivisionError: secret detail" in caplog.text
        assert isinstance(await requester.request(StatusRequest(), DEADLINE_S), StatusReply)


async def test_garbage_never_stops_a_server(address: str) -> None:
    async with serving(address, ack) as replier:
        raw = RawDealer(address)
        kind, header = encode(ASK)
        for frames in (
            [b""],
            [b"short id", kind, header],
            [b"i" * 16],
            [b"i" * 16, b"NoSuchKind", header],
            [b"i" * 16, kind, b"\xc1garbage"],
            [b"i" * 16, kind, header, b"stray blob"],
            [b"i" * 16, *encode(Ack())],  # a reply is no request
        ):
            await raw.send(*frames)
        refusals = [await raw.receive() for _ in range(5)]
        assert {frames[1] for frames in refusals} == {b"ErrorReply"}
        async with Requester(address) as requester:
            assert isinstance(await requester.request(ASK, DEADLINE_S), Ack)
        assert replier.served.malformed == 7
        raw.close()


async def test_what_only_a_batch_may_hold_reaches_who_asks_for_one_and_no_server(
    address: str,
) -> None:
    images = {f"{index:032d}": b"x" for index in range(20_000)}  # any other message: 16,384
    batch = Batch(batch_id=1, group_ids=[], temperature=1.0, samples=[], images=images)
    reply = BatchReply(batch=batch)

    async def give(_client: str, _request: Request) -> Reply:
        return reply

    async with serving(address, give) as replier, Requester(address) as requester:
        assert await requester.request(BatchRequest(policy_version=0), DEADLINE_S) == reply
        raw = RawDealer(address)
        await raw.send(b"i" * 16, *encode(reply))
        assert b"20000 blobs, limit 16384" in (await raw.receive())[2]
        assert replier.served.malformed == 1
        raw.close()


async def test_a_malformed_request_is_refused_by_field_at_the_asker(address: str) -> None:
    async with serving(address, ack), Requester(address) as requester:
        wrong = LeaseRequest.model_construct(worker="env-0", slot="one", suites=[])
        with pytest.raises(ProtocolError, match=r"LeaseRequest\.slot: "):
            await requester.request(wrong, DEADLINE_S)


async def test_a_reply_of_the_wrong_kind_is_refused_by_name(address: str) -> None:
    async def confused(client: str, request: Request) -> Reply:
        return LeaseReply(reason="what?")

    async with serving(address, confused), Requester(address) as requester:
        with pytest.raises(ProtocolError, match="answered StopRequest with LeaseReply, want Ack"):
            await requester.request(ASK, DEADLINE_S)


async def test_handlers_never_run_beyond_their_bound(address: str) -> None:
    running, most = 0, 0

    async def handler(client: str, request: Request) -> Reply:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.005)
        running -= 1
        return Ack()

    async with serving(address, handler, max_handlers=3), Requester(address) as requester:
        await asyncio.gather(*(requester.request(ASK, DEADLINE_S) for _ in range(30)))
    assert most == 3


async def test_closing_a_server_lets_the_handlers_in_work_answer(address: str) -> None:
    started = asyncio.Event()

    async def handler(client: str, request: Request) -> Reply:
        started.set()
        await asyncio.sleep(0.1)
        return Ack(note="late but there")

    async with Requester(address) as requester:
        async with serving(address, handler):
            waiting = asyncio.create_task(requester.request(ASK, DEADLINE_S))
            await started.wait()
        assert await waiting == Ack(note="late but there")


async def test_closing_a_requester_tells_those_who_wait(address: str) -> None:
    requester = Requester(address)
    waiting = asyncio.create_task(requester.request(ASK, DEADLINE_S))
    await asyncio.sleep(0.01)
    await requester.close()
    with pytest.raises(BusError, match="requester closed"):
        await waiting


async def test_an_address_in_use_is_refused_and_its_server_goes_on(address: str) -> None:
    async with serving(address, ack), Requester(address) as requester:
        with pytest.raises(BusError, match="another process does; stop it first"):
            Replier(address)
        assert isinstance(await requester.request(ASK, DEADLINE_S), Ack)
    async with Replier("tcp://127.0.0.1:*") as replier:
        cure = r"in use; .*change bus\.port: .* that port and the two after it"
        with pytest.raises(ConfigError, match=cure):
            Replier(replier.endpoint)


def test_an_address_of_another_host_is_refused_with_the_key_to_change() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1.*; set bus\.host to an address"):
        Replier("tcp://192.0.2.1:7800", curve=CurveKeys(*key_pair()))


# --- publish and subscribe ------------------------------------------------------------------


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
    """Publish until the subscriber gets something: connections take a moment to stand."""
    waiting = asyncio.ensure_future(subscriber.next())
    async with asyncio.timeout(DEADLINE_S):
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
    async with asyncio.timeout(DEADLINE_S):
        async for message in subscriber:
            assert isinstance(message, RunState)
            yield message
            if message == last:
                return


async def test_a_malformed_publication_is_counted_and_passed_over(forwarder: Forwarder) -> None:
    async with (
        Publisher(forwarder.publish_at) as publisher,
        Subscriber(forwarder.subscribe_at, [RunState]) as subscriber,
    ):
        await published(publisher, run_state(0), subscriber)
        raw = zmq.Context.instance().socket(zmq.PUB)
        raw.connect(forwarder.publish_at)
        async with asyncio.timeout(DEADLINE_S):
            while not subscriber.malformed:
                raw.send_multipart([b"RunState", b"\xc1garbage"])
                publisher.publish(run_state(1))
                await subscriber.next()
        raw.close(linger=0)


async def test_what_a_subscriber_sends_upstream_ends_nothing(forwarder: Forwarder) -> None:
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
        # XPUB hands both parts on; XSUB keeps the second for itself, a subscription that it has
        # already, and its message never ends (libzmq 4.3.5): that killed an XSUB-XPUB forwarder.
        strangers[1].send_multipart([b"x", b"\x01abc"])
        for each in strangers:
            each.close(linger=int(1000 * DEADLINE_S))
        for version in range(1, 50):
            await published(publisher, run_state(version), subscriber)
    assert forwarder._thread.is_alive()


def test_a_forwarder_whose_thread_has_ended_still_closes(forwarder: Forwarder) -> None:
    forwarder._switch.send(b"TERMINATE")
    deadline = time.monotonic() + DEADLINE_S
    while forwarder._switch.poll(0, zmq.POLLOUT):  # ZeroMQ's own thread is still at it
        assert time.monotonic() < deadline
        time.sleep(0.01)
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
                async with asyncio.timeout(DEADLINE_S):
                    while await published(publisher, run_state(version), subscriber) != run_state(
                        version
                    ):
                        pass


# --- keys -----------------------------------------------------------------------------------


def key_pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


async def test_curve_lets_in_known_keys_and_nobody_else() -> None:
    server, known, stranger = key_pair(), key_pair(), key_pair()
    curve = CurveKeys(*server, allowed=frozenset([known[0]]))
    async with Replier("tcp://127.0.0.1:*", curve=curve) as replier:
        # The first address is a wildcard; its domain is allowed all the same.
        task = asyncio.create_task(replier.serve(ack))
        async with Requester(replier.endpoint, curve=CurveKeys(*known, server=server[0])) as friend:
            assert isinstance(await friend.request(ASK, DEADLINE_S), Ack)
        for curve in (
            CurveKeys(*stranger, server=server[0]),
            CurveKeys(*known, server=known[0]),
            None,
        ):
            async with Requester(replier.endpoint, curve=curve) as foe:
                with pytest.raises(DeadlineError):
                    await foe.request(ASK, 0.5)
        assert replier.served.requests == 1
    await task


async def test_curve_guards_telemetry_too() -> None:
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
