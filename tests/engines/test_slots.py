from __future__ import annotations

import asyncio

import pytest

from bus.errors import EngineError
from dart_cli.engines.vllm.slots import Places
from tests.waiting import until


async def queued(places: Places, count: int) -> list[asyncio.Task[bool]]:
    """So many requests for a place, all of them in the queue."""
    before = places.waiting
    asking = [asyncio.create_task(places.take()) for _ in range(count)]
    await until(lambda: places.waiting == before + count)
    return asking


async def test_places_go_to_the_requests_that_wait_longest() -> None:
    places = Places(1, max_waiting=9)
    assert await places.take()
    first, second = await queued(places, 2)
    places.leave()
    assert await first
    assert not second.done()
    places.leave()
    assert await second
    places.leave()
    assert (places.taken, places.waiting) == (0, 0)


async def test_a_cancelled_request_takes_no_place_even_in_the_moment_it_is_given() -> None:
    places = Places(1, max_waiting=9)
    assert await places.take()
    gone, given, waits = await queued(places, 3)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    places.leave()  # to `given`, which is cancelled before it runs again
    given.cancel()
    await asyncio.gather(given, return_exceptions=True)
    assert await waits
    places.leave()
    assert places.taken == 0


async def test_a_request_that_is_sent_away_has_no_place() -> None:
    places = Places(1, max_waiting=9)
    assert await places.take()
    waiting = await queued(places, 2)
    places.send_away()
    assert await asyncio.gather(*waiting) == [False, False]
    assert (places.taken, places.waiting) == (1, 0)


async def test_a_full_line_refuses_by_name() -> None:
    places = Places(1, max_waiting=1)
    assert await places.take()
    [waiting] = await queued(places, 1)
    with pytest.raises(EngineError, match="max_waiting"):
        await places.take()
    places.leave()
    assert await waiting
