from __future__ import annotations

import asyncio

from dart_cli.engines.vllm.batch_slots import BatchSlots
from tests.waiting import until


async def queued(slots: BatchSlots, count: int) -> list[asyncio.Task[bool]]:
    """`count` callers that ask for a slot, all of them waiting."""
    before = slots.waiting
    asking = [asyncio.create_task(slots.acquire()) for _ in range(count)]
    await until(lambda: slots.waiting == before + count)
    return asking


async def test_slots_go_to_the_callers_that_wait_longest() -> None:
    slots = BatchSlots(1)
    assert await slots.acquire()
    first, second = await queued(slots, 2)
    slots.release()
    assert await first
    assert not second.done()
    slots.release()
    assert await second
    slots.release()
    assert (slots.in_use, slots.waiting) == (0, 0)


async def test_a_cancelled_caller_takes_no_slot_even_in_the_moment_it_is_given() -> None:
    slots = BatchSlots(1)
    assert await slots.acquire()
    gone, given, waits = await queued(slots, 3)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    slots.release()  # to `given`, which is cancelled before it resumes
    given.cancel()
    await asyncio.gather(given, return_exceptions=True)
    assert await waits
    slots.release()
    assert slots.in_use == 0


async def test_a_caller_that_is_turned_away_has_no_slot() -> None:
    slots = BatchSlots(1)
    assert await slots.acquire()
    waiting = await queued(slots, 2)
    slots.turn_away()
    assert await asyncio.gather(*waiting) == [False, False]
    assert (slots.in_use, slots.waiting) == (1, 0)
