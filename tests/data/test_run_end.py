"""The end of a run while the trainer still works: the data service outlives it, and counts what it announced."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest

from bus.heartbeat import Liveness
from bus.messages import BatchTrained, StopRequest
from dart_cli.config.schema import Config
from dart_cli.data import run_end, service
from dart_cli.data.store.open import open_reader, open_store
from dart_cli.runtime.background import background
from tests.data.client import Client, connect
from tests.data.parts import MIXED, heartbeat, make_ledger
from tests.waiting import PATIENCE_S, until

UPDATE = "its update on batch 1"

pytestmark = pytest.mark.usefixtures("short_holds")


@pytest.fixture(autouse=True)
def _waits_for_no_one_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_end, "STOP_S", 0.0)
    monkeypatch.setattr(service, "DEAD_AFTER_S", 2 * PATIENCE_S)


@pytest.fixture
def dead_pid() -> int:
    """The pid of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        return ended.pid


@asynccontextmanager
async def in_an_update(config: Config, stop: asyncio.Event) -> AsyncIterator[Client]:
    """A service whose trainer has batch 1, at weights v0; the service ends within the block."""
    running = asyncio.create_task(service.run(config, stop))
    async with connect(config) as client:
        await client.greet(0)
        await client.publish(0)
        for _ in range(2):
            await client.play_group(MIXED)
        assert (await client.must_batch()).batch_id == 1
        yield client
        async with asyncio.timeout(PATIENCE_S):
            await running


@asynccontextmanager
async def working(client: Client, state: str = "stopping") -> AsyncIterator[None]:
    """A trainer of this host that works on its update, by its heartbeats, which the service has heard."""
    here, pid = socket.gethostname(), os.getpid()
    beats = heartbeat("train", state=state, waiting_for=UPDATE, host=here, pid=pid)

    async def beat() -> None:
        while True:
            client.publisher.publish(beats)
            await asyncio.sleep(0.02)

    async with background(beat()):
        await client.eventually(lambda seen: any(p.waiting_for == UPDATE for p in seen.processes))
        yield


async def be_awaited(client: Client) -> None:
    """Return once the service has waited for the trainer for longer than for any other process."""
    for _ in range(10):
        await client.eventually(lambda seen: UPDATE in seen.ending)
        await asyncio.sleep(run_end.STOP_LEAST_S / 5)


async def acknowledge(client: Client, metrics: Mapping[str, float] | None = None) -> None:
    done = BatchTrained(batch_id=1, policy_version=1, metrics=dict(metrics or {}))
    assert (await client.tell(done)).accepted


def leave(client: Client) -> None:
    """Send the last heartbeat of a trainer that has nothing left to do."""
    client.publisher.publish(heartbeat("train", state="stopping"))


def counted(config: Config) -> tuple[int, int, int]:
    """The updates of the run, the number of its newest version, and the updates in that."""
    with open_reader(config.run.dir) as reader:
        updates = sum(batch.state == "trained" for batch in reader.batches())
        newest = reader.newest_version()
    assert newest is not None
    return updates, newest.policy_version, newest.updates


async def test_an_update_that_is_under_way_when_the_run_ends_is_counted_everywhere(
    config: Config,
) -> None:
    async with in_an_update(config, asyncio.Event()) as client:
        async with working(client):
            await client.tell(StopRequest(reason="enough"))
            await be_awaited(client)
            await client.publish(1)
            await acknowledge(client)
        leave(client)
    assert counted(config) == (1, 1, 1)


@pytest.mark.parametrize(
    ("done", "want"),
    [
        ("", (0, 0, 0)),
        ("acknowledged", (0, 0, 0)),
        ("announced", (1, 1, 1)),
        ("announced, acknowledged", (1, 1, 1)),
        ("acknowledged as skipped", (1, 0, 0)),
    ],
)
async def test_of_a_trainer_that_is_killed_what_it_announced_counts(
    config: Config, dead_pid: int, done: str, want: tuple[int, int, int]
) -> None:
    async with in_an_update(config, asyncio.Event()) as client:
        async with working(client):
            await client.tell(StopRequest(reason="enough"))
            await be_awaited(client)
            if "announced" in done:
                await client.publish(1)
            if "acknowledged" in done:
                await acknowledge(client, {"skipped": float("skipped" in done)})
        client.publisher.publish(
            heartbeat("train", waiting_for=UPDATE, host=socket.gethostname(), pid=dead_pid)
        )
    assert counted(config) == want


async def test_an_update_that_takes_longer_than_the_deadline_is_counted_nowhere(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with in_an_update(config, asyncio.Event()) as client, working(client):
        await acknowledge(client)
        await client.tell(StopRequest(reason="enough"))
        await be_awaited(client)
        monkeypatch.setattr(run_end, "TRAINER_S", 0.0)
        await until(lambda: "does not wait any longer" in caplog.text)
    assert f"does not wait any longer for train: {UPDATE}" in caplog.text
    assert "v0 holds 0 updates, which count; the run counted 1" in caplog.text
    assert counted(config) == (0, 0, 0)


async def test_a_signal_ends_data_after_a_trainer_that_ends_too(config: Config) -> None:
    stop = asyncio.Event()
    async with in_an_update(config, stop) as client:
        async with working(client):
            stop.set()
            await be_awaited(client)
            await client.publish(1)
            await acknowledge(client)
        leave(client)
    assert counted(config) == (1, 1, 1)


@pytest.mark.parametrize("state", ["waiting", "training"])
async def test_a_signal_to_all_of_which_data_hears_first_ends_data_after_the_trainer(
    config: Config, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    stop = asyncio.Event()
    async with in_an_update(config, stop) as client:
        async with working(client, state):
            monkeypatch.setattr(run_end, "STOP_LEAST_S", 2 * PATIENCE_S)
            stop.set()
            await client.eventually(lambda seen: UPDATE in seen.ending)
        async with working(client):
            await client.eventually(lambda seen: any(p.state == "stopping" for p in seen.processes))
            monkeypatch.setattr(run_end, "STOP_LEAST_S", 0.0)
            await client.publish(1)
            await acknowledge(client)
        leave(client)
    assert counted(config) == (1, 1, 1)


def test_a_run_ends_once_it_has_needed_attention_for_long_in_a_row(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = config.train.model_copy(update={"attention_minutes": 2.0})
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with open_store(config.run.dir) as store:
        store.begin_run(0, "{}", [])
        ledger = make_ledger(config, store)
        ends, never = (
            run_end.RunEnd(each, store, ledger, Liveness())
            for each in (config.model_copy(update={"train": train}), config)
        )
        for seconds, what, is_over in (
            (0, "a stall", False),
            (119, "another", False),
            (1, "", False),
            (500, "a stall", False),
            (120, "the stall", True),
        ):
            now += seconds
            for end in (ends, never):
                end.note_attention(what)
                assert bool(end.bound(0.0)) == (is_over and end is ends)
        assert ends.bound(0.0) == (
            "it needed attention for 2 minutes (train.attention_minutes): the stall"
        )
        ends.discount_pause(1.0)
        assert ends.bound(0.0) == ""


async def test_a_signal_ends_data_at_once_where_the_trainer_goes_on(config: Config) -> None:
    stop = asyncio.Event()
    async with in_an_update(config, stop) as client:
        await acknowledge(client)  # what it announces next, the next data process hears
        async with working(client, "training"):
            stop.set()
    assert counted(config) == (1, 0, 0)
