"""Promises of request/reply at the server, over real sockets."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from bus.codec import encode
from bus.endpoints import CurveKeys
from bus.errors import (
    BusError,
    ConfigError,
    DeadlineError,
    RefusedError,
)
from bus.messages import (
    Ack,
    Batch,
    BatchReply,
    BatchRequest,
    Reply,
    Request,
    StatusReply,
    StatusRequest,
    StopRequest,
)
from bus.requests import Replier, Requester
from bus.sockets import remove_socket_file, socket_file
from tests.bus.parts import ASK, RawDealer, ack, key_pair, serving
from tests.waiting import PATIENCE_S, until


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
        assert replier.counts.repeats == 2
        assert answers == [[b"i" * 16, *encode(Ack(note="1"))]] * 3


async def test_a_repeat_joins_the_request_being_handled(address: str) -> None:
    executed = 0
    release = asyncio.Event()

    async def slow(client: str, request: Request) -> Reply:
        nonlocal executed
        executed += 1
        await release.wait()
        return Ack(note="slow")

    async with serving(address, slow) as replier, Requester(address) as requester:
        waiting = asyncio.create_task(requester.request(ASK, PATIENCE_S, retry_s=0.02))
        await until(lambda: replier.counts.repeats >= 3)
        release.set()
        assert await waiting == Ack(note="slow")
        assert executed == 1


async def test_a_lost_reply_is_given_again_to_any_client_with_the_id(address: str) -> None:
    done = asyncio.Event()

    async def handler(client: str, request: Request) -> Reply:
        done.set()
        return Ack(note=client)

    async with serving(address, handler) as replier:
        first = RawDealer(address)
        await first.send(b"i" * 16, *encode(ASK))
        await done.wait()
        first.close()  # the reply cannot be delivered
        async with Requester(address) as second:
            reply = await second.request(ASK, PATIENCE_S, request_id=b"i" * 16)
        assert isinstance(reply, Ack)
        assert not reply.note.startswith("client.")
        assert replier.counts.requests == 1


async def test_the_record_of_replies_is_bounded_and_keeps_the_newest(address: str) -> None:
    async with (
        serving(address, ack, record_count=1, record_bytes=1) as replier,
        Requester(address) as requester,
    ):
        for key in (b"a" * 16, b"b" * 16, b"b" * 16, b"a" * 16):
            await requester.request(ASK, PATIENCE_S, request_id=key)
        assert (replier.counts.requests, replier.counts.repeats) == (3, 1)


async def test_a_crash_of_the_handler_is_logged_and_refused_and_serving_continues(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def moody(client: str, request: Request) -> Reply:
        if isinstance(request, StopRequest):
            raise ZeroDivisionError("secret detail")
        return StatusReply(snapshot={})

    async with serving(address, moody), Requester(address) as requester:
        with caplog.at_level(logging.ERROR), pytest.raises(RefusedError) as refused:
            await requester.request(ASK, PATIENCE_S)
        assert "secret detail" not in str(refused.value)
        assert "ZeroDivisionError: secret detail" in caplog.text
        assert isinstance(await requester.request(StatusRequest(), PATIENCE_S), StatusReply)


async def test_malformed_messages_never_stop_a_server(address: str) -> None:
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
            [b"i" * 16, *encode(Ack())],  # a reply, not a request
        ):
            await raw.send(*frames)
        refusals = [await raw.receive() for _ in range(5)]
        assert {frames[1] for frames in refusals} == {b"ErrorReply"}
        async with Requester(address) as requester:
            assert isinstance(await requester.request(ASK, PATIENCE_S), Ack)
        assert replier.counts.malformed == 7
        raw.close()


async def test_a_message_of_batch_size_is_accepted_by_a_client_that_wants_a_batch_and_by_no_server(
    address: str,
) -> None:
    images = {f"{index:032d}": b"x" for index in range(20_000)}  # any other message: 16,384
    batch = Batch(batch_id=1, group_ids=[], temperature=1.0, chains=[], samples=[], images=images)
    reply = BatchReply(batch=batch)

    async def give(_client: str, _request: Request) -> Reply:
        return reply

    async with serving(address, give) as replier, Requester(address) as requester:
        assert await requester.request(BatchRequest(policy_version=0), PATIENCE_S) == reply
        raw = RawDealer(address)
        await raw.send(b"i" * 16, *encode(reply))
        assert b"20000 blobs, limit 16384" in (await raw.receive())[2]
        assert replier.counts.malformed == 1
        raw.close()


async def test_handlers_never_exceed_their_bound(address: str) -> None:
    running, most = 0, 0

    async def handler(client: str, request: Request) -> Reply:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.005)
        running -= 1
        return Ack()

    async with serving(address, handler, max_handlers=3), Requester(address) as requester:
        await asyncio.gather(*(requester.request(ASK, PATIENCE_S) for _ in range(30)))
    assert most == 3


async def test_closing_a_server_lets_running_handlers_answer(address: str) -> None:
    started = asyncio.Event()

    async def handler(client: str, request: Request) -> Reply:
        started.set()
        await asyncio.sleep(0.1)
        return Ack(note="late but there")

    async with Requester(address) as requester:
        async with serving(address, handler):
            waiting = asyncio.create_task(requester.request(ASK, PATIENCE_S))
            await started.wait()
        assert await waiting == Ack(note="late but there")


async def test_an_address_in_use_is_refused_and_its_server_continues(address: str) -> None:
    async with serving(address, ack), Requester(address) as requester:
        with pytest.raises(BusError, match="another process does; stop it first"):
            Replier(address)
        assert isinstance(await requester.request(ASK, PATIENCE_S), Ack)
    async with Replier("tcp://127.0.0.1:*") as replier:
        cure = r"in use; .*change bus\.port: .* that port and the two after it"
        with pytest.raises(ConfigError, match=cure):
            Replier(replier.endpoint)


def test_an_address_of_another_host_is_refused_with_the_key_to_change() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1.*; set bus\.host to an address"):
        Replier("tcp://192.0.2.1:7800", curve=CurveKeys(*key_pair()))


async def test_curve_lets_in_known_keys_only() -> None:
    server, known, stranger = key_pair(), key_pair(), key_pair()
    curve = CurveKeys(*server, allowed=frozenset([known[0]]))
    async with Replier("tcp://127.0.0.1:*", curve=curve) as replier:
        # The first address is a wildcard; its domain is allowed all the same.
        task = asyncio.create_task(replier.serve(ack))
        async with Requester(replier.endpoint, curve=CurveKeys(*known, server=server[0])) as friend:
            assert isinstance(await friend.request(ASK, PATIENCE_S), Ack)
        for curve in (
            CurveKeys(*stranger, server=server[0]),
            CurveKeys(*known, server=known[0]),
            None,
        ):
            async with Requester(replier.endpoint, curve=curve) as foe:
                with pytest.raises(DeadlineError):
                    await foe.request(ASK, 0.5)
        assert replier.counts.requests == 1
    await task


def has_file(address: str) -> bool:
    return Path(address.removeprefix("ipc://")).exists()


async def test_the_file_of_an_address_goes_with_its_server_and_no_other_does(address: str) -> None:
    first = Replier(address)
    assert has_file(address)
    remove_socket_file(socket_file(address))  # another process may have taken the address meanwhile
    second = Replier(address)
    await first.close()
    assert has_file(address)
    await second.close()
    assert not has_file(address)
