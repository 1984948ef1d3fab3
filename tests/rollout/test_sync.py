"""Promises of taking weights in turn: what is received before a permit, and what is never at the same time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from bus.errors import WeightsError
from bus.messages import Ack, Reply, Request, RunState
from bus.weights import SyncDone, SyncReply, SyncRequest
from dart_cli.engines.base import UpdateTiming
from dart_cli.policy.weight_set import WeightSet
from dart_cli.rollout.sync import WeightSync
from dart_cli.runtime.background import background
from dart_cli.weights.manifest import MANIFEST
from dart_cli.weights.receiver import ReceivedWeights
from tests.waiting import until


class Receiver:
    """Holds a copy in `directory`, and says what it is asked; `gate` lets its preparations end."""

    def __init__(self, directory: Path) -> None:
        text = '{"policy_version": 0, "size_bytes": 0, "tensors": {}}'
        (directory / MANIFEST).write_text(text, encoding="utf-8")
        self.directory = directory
        self.prepared: list[int] = []
        self.held = -1
        self.is_busy = False
        self.fails = False
        self.gate = asyncio.Event()
        self.gate.set()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        assert not self.is_busy
        self.is_busy = True
        try:
            yield
        finally:
            self.is_busy = False

    async def prepare(self, policy_version: int) -> None:
        with self._alone():
            self.prepared.append(policy_version)
            await self.gate.wait()
            if not self.fails:
                self.held = policy_version

    async def receive(self, _path: Path, policy_version: int, _digest: str) -> ReceivedWeights:
        with self._alone():
            if self.fails:
                raise WeightsError("a does not match the manifest")
            self.held = max(self.held, policy_version)
            return ReceivedWeights(self.directory, self.held)

    def close(self) -> None:
        """Nothing to free."""


class Engine:
    """Loads a set when `gate` is open."""

    def __init__(self, receiver: Receiver) -> None:
        self.policy_version = -1
        self.is_loading = False
        self.gate = asyncio.Event()
        self.gate.set()
        self._receiver = receiver

    async def update_weights(self, _source: WeightSet, policy_version: int) -> UpdateTiming:
        assert not self._receiver.is_busy
        self.is_loading = self._receiver.is_busy = True  # none may change what it reads
        await self.gate.wait()
        self.is_loading = self._receiver.is_busy = False
        self.policy_version = policy_version
        return UpdateTiming(0.0, 0.0)

    def gauges(self) -> dict[str, float]:
        return {"in_flight": 0.0, "waiting": 0.0}


class Data:
    """Grants a permit for the newest version while `gate` is open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.newest = 0
        self.asked = 0
        self.done: list[SyncDone] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def request(self, message: Request, _deadline_s: float) -> Reply:
        if isinstance(message, SyncDone):
            self.done.append(message)
            return Ack()
        assert isinstance(message, SyncRequest)
        self.asked += 1
        await self.gate.wait()
        return SyncReply(granted=True, policy_version=self.newest, path=str(self.path), digest="d")


class Heart:
    """A heartbeat that no one hears."""

    def beat(self) -> None:
        """Nothing."""

    @contextlib.contextmanager
    def waiting(self, *_: object, **__: object) -> Iterator[None]:
        yield


class Worker:
    """A WeightSync with its surroundings."""

    def __init__(self, directory: Path) -> None:
        self.receiver = Receiver(directory)
        self.engine = Engine(self.receiver)
        self.data = Data(directory)
        self.sync = WeightSync(
            self.engine,  # type: ignore[arg-type]
            "rollout-0",
            self.data,
            Heart(),
            5.0,
            self.receiver,
        )

    def announce(self, version: int) -> None:
        self.data.newest = version
        self.sync.observe(
            RunState(run_id="r", policy_version=version, weights_path="", stopping=False, reason="")
        )


@contextlib.asynccontextmanager
async def following(directory: Path) -> AsyncIterator[Worker]:
    worker = Worker(directory)
    async with background(worker.sync.follow()):
        yield worker


async def test_a_set_is_received_before_its_permit_is_asked_for(tmp_path: Path) -> None:
    async with following(tmp_path) as worker:
        worker.receiver.gate.clear()
        worker.announce(1)
        await until(lambda: worker.receiver.prepared == [1])
        for _ in range(10):
            await asyncio.sleep(0)
        assert not worker.data.asked
        worker.receiver.gate.set()
        await until(lambda: worker.engine.policy_version == 1)
        assert worker.data.asked == 1
        assert worker.data.done[0].transfer_s > 0


async def test_newer_sets_are_received_while_the_worker_waits_for_its_permit(
    tmp_path: Path,
) -> None:
    async with following(tmp_path) as worker:
        worker.data.gate.clear()
        worker.announce(1)
        await until(lambda: worker.data.asked)
        worker.announce(2)
        await until(lambda: worker.receiver.held == 2)
        worker.data.gate.set()
        await until(lambda: worker.data.done)
        assert [done.policy_version for done in worker.data.done] == [2]
        assert worker.data.asked == 1


async def test_nothing_is_received_while_the_engine_loads(tmp_path: Path) -> None:
    async with following(tmp_path) as worker:
        worker.engine.gate.clear()
        worker.announce(1)
        await until(lambda: worker.engine.is_loading)
        worker.announce(2)
        for _ in range(10):
            await asyncio.sleep(0)
        assert worker.receiver.prepared == [1]
        worker.engine.gate.set()
        await until(lambda: worker.engine.policy_version == 2)
        assert worker.receiver.prepared == [1, 2]


async def test_what_could_not_be_prepared_is_tried_with_the_permit_and_then_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dart_cli.rollout.sync.RETRY_S", 0.01)
    async with following(tmp_path) as worker:
        worker.receiver.fails = True
        worker.announce(1)
        await until(lambda: len(worker.data.done) > 1)
        assert "a does not match the manifest" in worker.data.done[0].error
        assert worker.engine.policy_version == -1
        worker.receiver.fails = False
        await until(lambda: worker.engine.policy_version == 1)
