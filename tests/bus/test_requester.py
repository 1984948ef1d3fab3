"""Promises of request/reply to the client, over real sockets."""

from __future__ import annotations

import asyncio
import os

import pytest

from bus.errors import (
    BusError,
    DeadlineError,
    ProtocolError,
    StoreError,
)
from bus.messages import (
    Ack,
    ActRequest,
    LeaseReply,
    LeaseRequest,
    Reply,
    Request,
    Sampling,
    StatusReply,
    StatusRequest,
    StopRequest,
)
from bus.requests import Replier, Requester
from bus.sockets import HIGH_WATER_MARK
from tests.bus.parts import ASK, ack, serving
from tests.waiting import PATIENCE_S


async def test_a_request_gets_its_typed_reply(address: str) -> None:
    async with serving(address, ack), Requester(address, name="env-0") as requester:
        assert await requester.request(ASK, PATIENCE_S) == Ack(note="env-0 StopRequest")
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
            await requester.request(request, PATIENCE_S)
    assert seen == [shot]


async def test_many_requests_are_in_flight_at_once_and_each_gets_its_own_answer(
    address: str,
) -> None:
    everyone_is_here = asyncio.Barrier(20)

    async def handler(client: str, request: Request) -> Reply:
        assert isinstance(request, StopRequest)
        await everyone_is_here.wait()
        return Ack(note=request.reason)

    async with serving(address, handler), Requester(address) as requester:
        asks = [requester.request(StopRequest(reason=str(i)), PATIENCE_S) for i in range(20)]
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
        first = asyncio.create_task(one.request(ASK, PATIENCE_S))
        await asyncio.sleep(0)  # the first takes the only place
        with pytest.raises(DeadlineError):
            await one.request(StatusRequest(), 0.3)
        release.set()
        await first
        assert replier.counts.requests == 1


async def test_requests_made_before_a_server_starts_are_sent_in_order_once_it_does(
    address: str,
) -> None:
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
                requester.request(StopRequest(reason=reason), PATIENCE_S, retry_s=PATIENCE_S)
            )
            for reason in asked
        ]
        await asyncio.sleep(0.05)  # all of them are refused at first: no server
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
        after = asyncio.create_task(requester.request(StopRequest(reason="next"), PATIENCE_S))
        await asyncio.sleep(0)
        for given_up in (queued, stuck):
            given_up.cancel()
        assert await after == Ack(note="next")
        assert requester.in_flight == 0
    await replier.close(linger_s=0)
    await task


async def test_a_request_made_before_its_server_starts_is_answered(address: str) -> None:
    async with Requester(address) as requester:
        waiting = asyncio.create_task(requester.request(ASK, PATIENCE_S, retry_s=0.1))
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
        waiting = asyncio.create_task(requester.request(ASK, PATIENCE_S, retry_s=0.1))
        await received.wait()
        await first.close(linger_s=0)
        await serving_first
        async with serving(address, ack):
            assert isinstance(await waiting, Ack)
            assert isinstance(await requester.request(ASK, PATIENCE_S), Ack)


async def test_a_deadline_names_the_message_the_address_and_the_cure(address: str) -> None:
    async with Requester(address, peer="dart data") as requester:
        with pytest.raises(DeadlineError) as late:
            await requester.request(ASK, 0.2)
    assert str(late.value) == (
        f"StopRequest to {address} had no answer in 0.2 s: no process serves there; start `dart data CONFIG`"
    )


async def test_a_deadline_distinguishes_a_silent_server_from_an_absent_one(address: str) -> None:
    async def silent(client: str, request: Request) -> Reply:
        await asyncio.Event().wait()
        raise AssertionError

    replier = Replier(address)
    task = asyncio.create_task(replier.serve(silent))
    async with Requester(address, peer="dart data") as requester:
        with pytest.raises(DeadlineError, match="dart data received it 1 times but did not answer"):
            await requester.request(ASK, 1.0)
    await replier.close(linger_s=0)
    await task


async def test_an_error_of_the_handler_is_raised_at_the_client_by_its_class(address: str) -> None:
    async def broken(client: str, request: Request) -> Reply:
        raise StoreError("disk full: free some space")

    async with serving(address, broken) as replier, Requester(address) as requester:
        with pytest.raises(StoreError, match="disk full: free some space"):
            await requester.request(ASK, PATIENCE_S)
        assert replier.counts.refused == 1


async def test_a_malformed_request_is_refused_by_field_at_the_client(address: str) -> None:
    async with serving(address, ack), Requester(address) as requester:
        wrong = LeaseRequest.model_construct(worker="env-0", slot="one", suites=[])
        with pytest.raises(ProtocolError, match=r"LeaseRequest\.slot: "):
            await requester.request(wrong, PATIENCE_S)


async def test_a_reply_of_the_wrong_kind_is_refused_by_name(address: str) -> None:
    async def confused(client: str, request: Request) -> Reply:
        return LeaseReply(reason="what?")

    async with serving(address, confused), Requester(address) as requester:
        with pytest.raises(ProtocolError, match="answered StopRequest with LeaseReply, want Ack"):
            await requester.request(ASK, PATIENCE_S)


async def test_closing_a_requester_raises_in_waiting_callers(address: str) -> None:
    requester = Requester(address)
    waiting = asyncio.create_task(requester.request(ASK, PATIENCE_S))
    await asyncio.sleep(0.01)
    await requester.close()
    with pytest.raises(BusError, match="requester closed"):
        await waiting
