"""Leases that data holds keep nothing else waiting, and their wait is that of the last minute."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from bus.messages import Ack, LeaseReply, LeaseRequest, Reply, Request
from bus.requests import Replier, Requester
from bus.sockets import HIGH_WATER_MARK
from dart_cli.env.data_client import DataClient, LeaseWaitStats
from tests.data.parts import trajectory_end
from tests.env.parts import RecordedWaits, lease
from tests.waiting import PATIENCE_S, until


async def test_a_step_is_taken_however_many_slots_wait_for_a_lease(tmp_path: Path) -> None:
    holding, go_on = 0, asyncio.Event()

    async def handle(_client: str, request: Request) -> Reply:
        nonlocal holding
        if isinstance(request, LeaseRequest):
            holding += 1
            await go_on.wait()
            return LeaseReply(lease=lease())
        return Ack(note="taken")

    slots = HIGH_WATER_MARK + 40  # of one connection no more are in flight
    waits: Any = RecordedWaits()
    address = f"ipc://{tmp_path}/data"
    async with Replier(address, max_handlers=4096) as replier:
        serving = asyncio.create_task(replier.serve(handle))
        async with Requester(address) as requester, Requester(address) as leases:
            data = DataClient(requester, leases, PATIENCE_S, waits)
            asking = [
                asyncio.create_task(
                    data.lease(LeaseRequest(worker="env-0", slot=slot, suites=["mini"]))
                )
                for slot in range(slots)
            ]
            await until(lambda: holding == HIGH_WATER_MARK)
            assert (await data.end(trajectory_end("t-1", 0))).note == "taken"
            assert not any(task.done() for task in asking)
            go_on.set()
            await asyncio.gather(*asking)
            assert holding == slots
        await replier.close()
        await serving


async def test_nothing_is_leased_before_data_has_taken_the_settings(tmp_path: Path) -> None:
    requests: list[Request] = []

    async def handle(_client: str, request: Request) -> Reply:
        requests.append(request)
        return LeaseReply(lease=lease()) if isinstance(request, LeaseRequest) else Ack()

    waits, joined = RecordedWaits(), asyncio.Event()
    reporter: Any = waits
    address = f"ipc://{tmp_path}/data"
    async with Replier(address) as replier:
        serving = asyncio.create_task(replier.serve(handle))
        async with Requester(address) as requester, Requester(address) as leases:
            data = DataClient(requester, leases, PATIENCE_S, reporter, joined)
            request = LeaseRequest(worker="env-0", slot=0, suites=["mini"])
            asking = asyncio.create_task(data.lease(request))
            await until(lambda: waits.texts == ["the data service to accept its settings"])
            end = trajectory_end("t-1", 0)
            await data.end(end)  # a lease that was asked for would have been asked for before
            assert requests == [end]
            joined.set()
            await asking
            assert requests == [end, request]
        await replier.close()
        await serving


def test_the_wait_for_leases_is_of_the_last_minute() -> None:
    now = 0.0
    stats = LeaseWaitStats(clock=lambda: now)
    assert stats.gauges() == {"leases": 0, "lease_wait_s": 0, "lease_p99_s": 0}
    stats.note(3.0)  # at the start all slots ask at once
    assert stats.gauges()["lease_p99_s"] == 3.0
    now = 61.0
    stats.note(0.01)
    assert stats.gauges() == {"leases": 2, "lease_wait_s": 3.01, "lease_p99_s": 0.01}
