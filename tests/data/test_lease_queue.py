"""A held request for a lease is answered as soon as there is one, over real sockets."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dart_cli.config.schema import Config
from dart_cli.data import service
from tests.data.client import serving
from tests.data.parts import (
    heartbeat,
    small_config,
    step_record,
    trajectory_end,
)
from tests.waiting import PATIENCE_S


async def test_a_held_lease_request_is_answered_the_moment_a_place_is_free(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "HOLD_S", 2 * PATIENCE_S)
    config = config.model_copy(
        update={"data": config.data.model_copy(update={"max_open_groups": 2})}
    )
    async with serving(config) as client:
        leases = [await client.must_lease(slot) for slot in range(8)]
        held = asyncio.create_task(client.lease(99))
        for lease in leases[:4]:
            await client.submit(lease, "fail")  # the group is dropped, its place is free
        assert (await held).lease is not None


async def test_a_slot_of_a_process_that_stops_is_leased_nothing(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "HOLD_S", 2 * PATIENCE_S)
    config = config.model_copy(
        update={"data": config.data.model_copy(update={"max_open_groups": 2})}
    )
    async with serving(config) as client:
        leases = [await client.must_lease(slot) for slot in range(8)]
        held = [asyncio.create_task(client.lease(99, worker)) for worker in ("env-1", "env-2")]
        await client.eventually(lambda seen: seen.queues.free_slots == 2)
        while not held[0].done():  # the first may find no connection
            client.publisher.publish(heartbeat("env-1", state="stopping"))
            await asyncio.sleep(0.05)
        assert (await held[0]).lease is None
        await client.submit(leases[0], "invalid")
        assert (await held[1]).lease is not None


async def test_what_a_slot_has_leased_already_is_answered_at_once(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "HOLD_S", 2 * PATIENCE_S)
    async with serving(config) as client:
        full = config.data.max_open_groups * config.data.group_size
        leases = [await client.must_lease(slot) for slot in range(full)]
        held = asyncio.create_task(client.lease(0, "env-1"))
        await client.eventually(lambda seen: seen.queues.free_slots == 1)
        assert await client.must_lease(3) == leases[3]  # the answer was lost
        await client.tell(step_record(leases[5].trajectory_id, 0))
        again = await client.must_lease(5)  # its process was restarted
        assert again.group_id == leases[5].group_id
        assert again.trajectory_id != leases[5].trajectory_id
        for lease in leases[8:12]:
            await client.submit(lease, "fail")
        assert (await held).lease is not None


async def test_what_a_slot_gives_up_goes_to_those_that_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "HOLD_S", 2 * PATIENCE_S)
    config = small_config(tmp_path / "run", max_open_groups=2, group_size=2)
    async with serving(config) as client:
        leases = [await client.must_lease(slot) for slot in range(4)]
        for _ in range(2):  # what slot 0 plays then is the group's last attempt
            await client.tell(trajectory_end(leases[0].trajectory_id, 0, "invalid"))
            leases[0] = await client.must_lease(0)
        await client.tell(step_record(leases[0].trajectory_id, 0))
        await client.tell(trajectory_end(leases[1].trajectory_id, 0, "fail"))
        held = asyncio.create_task(client.lease(7))
        await client.eventually(lambda seen: seen.queues.free_slots == 1)
        asked = asyncio.create_task(client.lease(0))  # gives up what it played: the group is over
        assert (await held).lease is not None
        assert (await asked).lease is not None
