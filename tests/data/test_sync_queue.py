"""Turns of trainer and rollouts, and which worker takes new weights when, over real sockets."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bus.errors import (
    StoreError,
)
from bus.messages import (
    BatchTrained,
)
from dart_cli.config.schema import Config
from dart_cli.data import service, versions
from dart_cli.data.store.open import open_reader
from dart_cli.data.store.writer import Store
from tests.data.client import serving
from tests.data.parts import (
    MIXED,
    heartbeat,
    small_config,
    sync_done,
)
from tests.waiting import PATIENCE_S


async def test_synchronous_rollouts_are_suspended_from_a_full_batch_until_all_have_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "HOLD_S", 2 * PATIENCE_S)
    config = small_config(tmp_path / "run", scheduling="batch")
    async with serving(config) as client:
        await client.publish(0)
        for worker in ("rollout-0", "rollout-1"):
            await client.be_heard(worker, version=0)
        for _ in range(2):
            await client.play_group(MIXED)
        batch = await client.must_batch(0)
        held = asyncio.create_task(client.lease(0))
        await client.publish(1)
        await client.tell(BatchTrained(batch_id=batch.batch_id, policy_version=1, metrics={}))
        await client.be_heard("rollout-0", version=1)
        await client.until(lambda state: state.policy_version == 1 and state.suspended)
        assert not held.done()
        await client.tell(sync_done("rollout-1", 1))
        assert (await held).lease is not None
        await client.until(lambda state: state.policy_version == 1 and not state.suspended)


@pytest.mark.usefixtures("short_holds")
async def test_in_the_trainers_turn_a_slot_gets_what_it_waits_for(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", scheduling="batch")
    async with serving(config) as client:
        await client.play_group(MIXED)
        await client.play_group(MIXED)
        await client.must_batch(0)
        waiting = await client.lease(0)
        assert waiting.reason == "the trainer's turn: batch 1 is not trained on yet"
    async with serving(config) as client:
        await client.until(lambda state: state.suspended)
        assert (await client.lease(0)).reason == waiting.reason


@pytest.mark.usefixtures("short_holds")
async def test_a_turn_waits_for_no_dead_worker_and_ends_when_another_has_the_weights(
    tmp_path: Path,
) -> None:
    config = small_config(tmp_path / "run", scheduling="batch")
    unserved = "no rollout worker serves weights v1 yet"
    async with serving(config) as client, asyncio.timeout(PATIENCE_S):
        await client.publish(0)
        await client.be_heard("rollout-0", version=0)  # and never again
        await client.publish(1)
        while (told := (await client.lease(0)).reason) != unserved:
            assert told == "rollout-0 must take weights v1 first"
        await client.until(lambda state: state.suspended)  # older ones may come before it
        held = asyncio.create_task(client.must_lease(0))
        while not held.done():
            client.publisher.publish(heartbeat("rollout-1", 1))
            await asyncio.sleep(0.05)
        await client.until(lambda state: not state.suspended)


async def test_one_worker_after_the_other_takes_the_weights_that_are_newest_then(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "HOLD_S", 2 * PATIENCE_S)
    async with serving(config) as client:
        first_ones = asyncio.create_task(client.sync("rollout-0", -1))  # before there are any
        await client.publish(0)
        reply = await first_ones
        assert (reply.granted, reply.policy_version) == (True, 0)
        await client.tell(sync_done("rollout-0", 0))
        await client.publish(1)
        reply = await client.sync("rollout-0", 0)
        assert (reply.granted, reply.policy_version, reply.path, reply.digest) == (
            True,
            1,
            "w/1",
            "d1",
        )
        held = asyncio.create_task(client.sync("rollout-1", 0))
        await client.publish(2)
        assert not held.done()
        assert (await client.sync("rollout-2", -1)).granted  # a new worker delays no other
        await client.tell(sync_done("rollout-0", 1))
        reply = await held
        assert (reply.granted, reply.policy_version) == (True, 2)
        told = await client.sync("rollout-2", 2)
        assert (told.granted, told.reason) == (False, "rollout-2 serves the newest weights, v2")
        assert (await client.tell(sync_done("rollout-1", 2))).accepted
    with open_reader(config.run.dir) as reader:
        syncs = [(row.worker, row.policy_version) for row in reader.syncs()]
        assert syncs == [("rollout-0", 0), ("rollout-0", 1), ("rollout-1", 2)]
        assert all(row.granted_at <= row.done_at for row in reader.syncs())


@pytest.mark.usefixtures("short_holds")
async def test_a_worker_without_a_permit_gets_its_holders_name_and_a_restart_frees_all(
    config: Config,
) -> None:
    async with serving(config) as client:
        await client.publish(1)
        assert (await client.sync("rollout-0", 0)).granted
        told = await client.sync("rollout-1", 0)
        assert not told.granted
        assert told.reason == "rollout-0 must have taken weights first; weights.concurrent = 1"
    async with serving(config) as client:
        assert (await client.sync("rollout-1", 0)).granted


async def test_a_database_that_fails_while_a_worker_waits_for_its_turn_is_the_error_it_gets(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise StoreError("run.db: disk I/O error; free space")

    async def serve() -> None:
        async with serving(config) as client:
            await client.publish(1)
            assert (await client.sync("rollout-0", 0)).granted
            held = asyncio.create_task(client.sync("rollout-1", 0))
            assert (await client.sync("rollout-2", -1)).granted  # the one before has arrived, too
            done = client.tell(sync_done("rollout-0", 1))
            await asyncio.gather(done, held, return_exceptions=True)

    monkeypatch.setattr(service, "HOLD_S", 2 * PATIENCE_S)
    monkeypatch.setattr(Store, "add_sync", broken)
    with pytest.raises(StoreError, match="free space"):
        await serve()


@pytest.mark.usefixtures("short_holds")
async def test_a_worker_first_heard_of_after_it_was_given_a_permit_keeps_it(
    config: Config,
) -> None:
    async with serving(config) as client:
        await client.publish(1)
        assert (await client.sync("rollout-0", 0)).granted
        await client.be_heard("rollout-0", version=0)
        told = await client.sync("rollout-1", 0)
        assert told.reason.startswith("rollout-0 must have taken weights first")


async def test_a_worker_that_asks_again_with_the_newest_weights_waits_no_longer(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "HOLD_S", 2 * PATIENCE_S)
    async with serving(config) as client:
        await client.publish(1)
        assert (await client.sync("rollout-0", 0)).granted
        held = asyncio.create_task(client.sync("rollout-1", 0))
        assert (await client.sync("rollout-2", -1)).granted  # the one before has arrived, too
        assert not (await client.sync("rollout-1", 1)).granted
        assert (await held).reason == "the worker has asked again since"
        assert (await client.tell(sync_done("rollout-0", 1))).accepted
        assert (await client.sync("rollout-3", 0)).granted  # no other worker holds a permit


@pytest.mark.usefixtures("short_holds")
@pytest.mark.parametrize("end", ["dead", "late", "goodbye"])
async def test_a_worker_that_never_comes_back_holds_the_others_up_no_longer(
    config: Config, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if end == "late":
        monkeypatch.setattr(versions, "PERMIT_S", 0.2)
    async with serving(config) as client:
        await client.publish(1)
        if end == "dead":
            await client.be_heard("rollout-0", version=0)
        assert (await client.sync("rollout-0", 0)).granted
        if end == "goodbye":
            await client.be_heard("rollout-0", version=0, state="stopping")
        async with asyncio.timeout(PATIENCE_S):
            while not (await client.sync("rollout-1", 0)).granted:
                pass


@pytest.mark.usefixtures("short_holds")
async def test_a_worker_keeps_its_weights_until_a_restarted_trainer_is_past_them(
    tmp_path: Path,
) -> None:
    async with serving(small_config(tmp_path / "run")) as client:
        await client.greet(0)
        for version in range(3):
            await client.publish(version)
        await client.greet(0)
        await client.publish(3, updates=0)
        kept = await client.sync("rollout-0", 2)
        assert not kept.granted
        assert "v3 is not ahead of the v2 that serves" in kept.reason
        assert (await client.sync("rollout-1", -1)).policy_version == 3
        await client.publish(4, updates=3)
        assert (await client.sync("rollout-0", 2)).policy_version == 4
