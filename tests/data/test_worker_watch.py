"""What processes that died, stopped or fell silent held comes back, over real sockets."""

from __future__ import annotations

import asyncio
import time
from math import isfinite
from pathlib import Path

import pytest

from bus.snapshot import Snapshot
from dart_cli.config.schema import Config
from dart_cli.data import ledger, service
from dart_cli.data.store.open import open_reader
from dart_cli.data.workers import StartsWatch
from dart_cli.runtime.supervisor import DAY_S, RESTARTS
from tests.data.client import serving
from tests.data.parts import (
    heartbeat,
    small_config,
    step_record,
)
from tests.waiting import PATIENCE_S


@pytest.mark.usefixtures("short_holds")
async def test_a_dead_environments_leases_return(config: Config) -> None:
    async with serving(config) as client:
        lease = await client.must_lease(0)
        await client.be_heard("env-0")  # and never again
        await client.eventually(lambda seen: "worker_lost" in seen.dropped)
        again = await client.must_lease(0, "env-1")
        assert again.group_id == lease.group_id
        assert not (await client.tell(step_record(lease.trajectory_id, 0))).accepted


@pytest.mark.usefixtures("short_holds")
async def test_a_service_that_was_stopped_for_a_while_takes_no_lease_back_for_its_own_silence(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "DEAD_AFTER_S", 1.0)
    async with serving(config) as client:
        lease = await client.must_lease(0)
        await client.be_heard("env-0")
        time.sleep(3 * service.DEAD_AFTER_S)  # noqa: ASYNC251 - all of it stands still, as by Ctrl-Z
        client.beat([lease.trajectory_id])
        await client.eventually(lambda seen: seen.uptime_s > 3 * service.DEAD_AFTER_S)
        assert (await client.tell(step_record(lease.trajectory_id, 0))).accepted


@pytest.mark.usefixtures("short_holds")
async def test_a_process_that_announced_its_stop_is_not_missed(config: Config) -> None:
    async with serving(config) as client:
        await client.be_heard("env-1")
        await client.be_heard("env-0", state="stopping")
        seen = await client.eventually(
            lambda seen: (
                {p.worker for p in seen.processes if not p.alive} == {"env-1"}
                and all(p.worker != "env-0" for p in seen.processes)
            )
        )
        assert not any("env-1" in warning for warning in seen.warnings)


async def test_a_process_that_was_started_again_too_often_is_a_warning(config: Config) -> None:
    async with serving(config) as client:

        async def start(started_at: float) -> Snapshot:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    beat = heartbeat("env-0").model_copy(update={"started_at": started_at})
                    client.publisher.publish(beat)
                    seen = await client.snapshot()
                    if [each.started_at for each in seen.processes if each.role == "env"] == [
                        started_at
                    ]:
                        return seen
                    await asyncio.sleep(0.05)

        for restarts in range(RESTARTS + 1):
            assert not any("env-0 was" in each for each in (await start(float(restarts))).warnings)
        seen = await start(restarts + 1.0)
        assert (
            f"env-0 was started again {restarts + 1} times within a day; logs/env-0.log shows why"
            in seen.warnings
        )


def test_restarts_are_those_of_a_day_whatever_order_heartbeats_come_in() -> None:
    watch = StartsWatch()
    for restart in range(6):
        beat = heartbeat("env-0").model_copy(update={"started_at": float(restart)})
        for late in (beat, beat.model_copy(update={"started_at": 0.0}), beat):
            watch.observe(late, 3600.0 * restart)
    watch.observe(heartbeat("env-1"), 0.0)
    assert watch.often(5 * 3600.0) == {"env-0": 5}
    assert watch.often(DAY_S + 3600.0) == {"env-0": 4}
    assert watch.often(DAY_S + 2 * 3600.0) == {}


@pytest.mark.usefixtures("short_holds")
async def test_a_lease_that_is_not_renewed_expires_and_heartbeats_renew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "LEASE_S", 1.0)
    config = small_config(tmp_path / "run")
    async with serving(config) as client:
        lost, kept = await client.must_lease(0), await client.must_lease(1)
        async with asyncio.timeout(PATIENCE_S):
            while "lease_expired" not in (await client.snapshot()).dropped:
                client.beat([kept.trajectory_id])
                await asyncio.sleep(0.05)
        assert not (await client.tell(step_record(lost.trajectory_id, 0))).accepted
        assert (await client.tell(step_record(kept.trajectory_id, 0))).accepted


@pytest.mark.parametrize(
    ("worker", "gauges"),
    [
        ("rollout-0", {"in_flight": float("inf")}),
        ("rollout-0", {"waiting": float("nan")}),
        ("env-0", {"slots": float("nan"), "seconds.playing": 1.0}),
        ("env-0", {"slots": float("inf"), "seconds.playing": float("inf")}),
        ("env-0", {"slots": 1e308, "seconds.playing": 1e308}),
        ("env-0", {"slots": 1e15, "seconds.playing": 1e15}),
    ],
    ids=str,
)
async def test_no_gauge_of_a_heartbeat_ends_the_service(
    config: Config, short_holds: None, worker: str, gauges: dict[str, float]
) -> None:
    async with serving(config) as client:
        said = heartbeat(worker).model_copy(update={"gauges": gauges})
        await client.be_heard("rollout-1")  # what comes before data listens is lost
        for state in ("starting", "ready"):
            client.publisher.publish(said.model_copy(update={"state": state}))
        client.publisher.publish(heartbeat("rollout-2"))
        seen = await client.eventually(lambda seen: "rollout-2" in names_of(seen))
        assert (worker in names_of(seen)) == (gauges.get("slots") == 1e15)
        await asyncio.sleep(0.2)  # dead workers and usage are looked at every HOUSEKEEPING_S
        await client.snapshot()
    with open_reader(config.run.dir) as reader:
        used = list(reader.usage())
    assert not used or gauges.get("slots") == 1e15  # no other process was heard
    assert all(isfinite(row.total_s) for row in used)


def names_of(seen: Snapshot) -> list[str]:
    return [process.worker for process in seen.processes]
