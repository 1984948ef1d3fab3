"""Promises of publication beside training: each version whole, once, in order, whatever is slow or fails."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from benchmarks.simulation.learner import TimedLearner
from benchmarks.simulation.times import Times
from bus.endpoints import TELEMETRY_IN, TELEMETRY_OUT, Endpoints
from bus.errors import WeightsError
from bus.messages import Batch, BatchReply, BatchRequest, BatchTrained, Heartbeat, Reply, Request
from bus.pubsub import Forwarder, Subscriber
from bus.weights import WeightsPublished
from dart_cli.config.schema import Config
from dart_cli.train import loop
from dart_cli.train.base import Update
from dart_cli.train.checkpoints.identity import checkpoint_paths
from dart_cli.train.learner import PolicyLearner
from dart_cli.train.process import run
from dart_cli.train.publishing import Publications
from dart_cli.train.trained_policy import TrainModel
from dart_cli.weights import file
from dart_cli.weights.file import load
from dart_cli.weights.flat_weights import FlatWeights, TensorCopy
from dart_cli.weights.manifest import newest_version, path_of
from dart_cli.weights.storage import atomic_directory
from tests.simulated import QUICK
from tests.train.parts import Data, another_run, final_weights, serving, train, versions
from tests.waiting import PATIENCE_S, until

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def timed(config: Config, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A run of three updates that take no time and change one number."""
    monkeypatch.setattr(loop, "make_learner", lambda _: TimedLearner(Times(train_s=0.0)))
    train = config.train.model_copy(update={"learner": QUICK, "updates": 3})
    return config.model_copy(update={"train": train})


class Slow:
    """A writer with which some versions wait for `go_on` before they are written, or fail."""

    def __init__(self, *which: int) -> None:
        """Let the versions `which` wait."""
        self.which = which
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.error: OSError | None = None

    def __call__(self, target: Path) -> AbstractContextManager[Path]:
        if int(target.name.removeprefix("v")) in self.which:
            self.reached.set()
            assert self.go_on.wait(PATIENCE_S)
            if self.error is not None:
                raise self.error
        return atomic_directory(target)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    slow = Slow(1)
    monkeypatch.setattr(file, "atomic_directory", slow)
    yield slow
    slow.go_on.set()


def trained(data: Data) -> list[BatchTrained]:
    return [message for message in data.heard if isinstance(message, BatchTrained)]


def number(path: Path) -> int:
    """The number that a version of the timed learner holds: its updates."""
    [value] = load(path, {"timed.updates": torch.zeros(1, dtype=torch.int64)}).values()
    return int(value)


async def test_each_version_holds_the_weights_after_its_update_however_late_it_is_copied(
    config: Config,
    batches: list[Batch],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy ends only when the next optimizer step is about to change the weights."""
    due, hold, into = threading.Event(), Publications.before_change, TensorCopy.into
    began: list[int] = []

    def about_to_change(self: Publications) -> None:
        due.set()
        hold(self)

    def late(self: TensorCopy, flat: FlatWeights) -> Tensors:
        began.append(len(began))
        if 0 < began[-1] < 4:  # of those that another update follows
            assert due.wait(PATIENCE_S)
            due.clear()
        return into(self, flat)

    monkeypatch.setattr(Publications, "before_change", about_to_change)
    monkeypatch.setattr(TensorCopy, "into", late)
    kept_weights = config.weights.model_copy(update={"keep": 9})
    config = config.model_copy(update={"weights": kept_weights})
    await train(config, Data(batches))
    assert began == [0, 1, 2, 3, 4]
    straight = PolicyLearner(TrainModel.load(config), config.train)
    for version in range(5):
        if version:
            straight.update(batches[version - 1], version - 1)
        expected = straight.model.weights()
        loaded = load(path_of(config.run.dir / "weights", version), expected)
        assert all(torch.equal(loaded[name], value) for name, value in expected.items()), version


async def test_the_next_update_is_computed_while_a_version_is_written(
    timed: Config, batches: list[Batch], slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, observed, update = Data(batches), [], TimedLearner.update

    def noted(self: TimedLearner, batch: Batch, *others: int | None) -> Update:
        result = update(self, batch, *others)  # type: ignore[arg-type]
        if batch.batch_id == 2:
            observed.extend([len(trained(data)), *versions(data)])
            slow.go_on.set()
        return result

    monkeypatch.setattr(TimedLearner, "update", noted)
    await train(timed, data)
    assert observed == [1, 0]  # batch 1 is acknowledged, v0 alone is announced
    assert versions(data) == [0, 1, 2, 3]
    assert [(m.batch_id, m.policy_version) for m in trained(data)] == [(1, 1), (2, 2), (3, 3)]
    result = [m.metrics for m in trained(data)]
    assert [metrics["publish_s"] > 0 for metrics in result][1:] == [True, True]
    assert all(metrics["publish_stall_s"] > 0 for metrics in result)


async def test_data_that_waits_for_a_version_before_it_serves_the_next_batch_gets_it(
    timed: Config, batches: list[Batch]
) -> None:
    """Let the trainer wait for a batch that waits for the version that it publishes, as in lockstep."""

    class Lockstep(Data):
        async def handle(self, client: str, message: Request) -> Reply:
            if isinstance(message, BatchRequest) and max(versions(self)) < self.trained:
                self.heard.append(message)
                return BatchReply(retry_after_s=0.01, reason="weights are on their way")
            return await super().handle(client, message)

    data = Lockstep(batches)
    await train(timed, data)
    assert versions(data) == [0, 1, 2, 3]
    assert [m.batch_id for m in trained(data)] == [1, 2, 3]


async def test_a_version_that_cannot_be_written_ends_a_trainer_that_waits_for_a_batch(
    timed: Config, batches: list[Batch], slow: Slow
) -> None:
    slow.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    data = Data(batches[:1])
    async with serving(timed.run.dir, data), asyncio.timeout(PATIENCE_S):
        task = asyncio.create_task(run(timed, asyncio.Event()))
        await data.idle.wait()  # it waits for batch 2
        slow.go_on.set()
        with pytest.raises(
            WeightsError, match=r"v000001 cannot be written: .*; free space on its disk"
        ):
            await task
    assert [m.batch_id for m in trained(data)] == [1]
    assert versions(data) == [0]


async def test_a_copy_that_fails_ends_the_update_that_would_have_changed_the_weights(
    config: Config, batches: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    hold, into = Publications.before_change, TensorCopy.into
    due, made = threading.Event(), []

    def about_to_change(self: Publications) -> None:
        due.set()
        hold(self)

    def fails(self: TensorCopy, flat: FlatWeights) -> Tensors:
        made.append(flat)
        if len(made) == 2:
            due.clear()
            assert due.wait(PATIENCE_S)
            raise WeightsError("no copy of v1")
        return into(self, flat)

    monkeypatch.setattr(Publications, "before_change", about_to_change)
    monkeypatch.setattr(TensorCopy, "into", fails)
    data = Data(batches)
    with pytest.raises(WeightsError, match="no copy of v1"):
        await train(config, data)
    assert [m.batch_id for m in trained(data)] == [1]
    assert versions(data) == [0]


async def test_a_stop_waits_for_the_version_on_its_way(
    timed: Config, batches: list[Batch], slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete, data, stop = Publications.complete, Data(batches[:1]), asyncio.Event()

    async def ending(self: Publications) -> None:
        if stop.is_set():
            slow.go_on.set()
        await complete(self)

    monkeypatch.setattr(Publications, "complete", ending)
    async with serving(timed.run.dir, data), asyncio.timeout(PATIENCE_S):
        task = asyncio.create_task(run(timed, stop))
        await data.idle.wait()
        assert versions(data) == [0]
        stop.set()
        await task
    assert versions(data) == [0, 1]
    assert number(path_of(timed.run.dir / "weights", 1)) == 1


async def test_the_last_version_is_announced_before_its_update_is_acknowledged(
    timed: Config, batches: list[Batch], slow: Slow
) -> None:
    """Check the order of messages: the data service ends the run at the last acknowledgement."""
    slow.which = (3,)
    threading.Thread(target=lambda: slow.reached.wait(PATIENCE_S) and slow.go_on.set()).start()
    data = Data(batches)
    await train(timed, data)
    kinds = [m for m in data.heard if isinstance(m, BatchTrained | WeightsPublished)]
    assert [type(each).__name__ for each in kinds[-2:]] == ["WeightsPublished", "BatchTrained"]


async def test_a_skipped_update_publishes_nothing_and_leaves_what_is_on_its_way(
    timed: Config, batches: list[Batch], slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Skips(TimedLearner):
        def update(self, batch: Batch, done: int, version: int | None = None) -> Update:
            if batch.batch_id == 2:
                assert version == 1  # though it is not complete, these are its weights
                slow.go_on.set()
                return Update(applied=False, metrics={"samples": 3.0, "tokens": 4.0})
            return super().update(batch, done, version)

    monkeypatch.setattr(loop, "make_learner", lambda _: Skips(Times(train_s=0.0)))
    data = Data(batches)
    await train(timed, data)
    assert versions(data) == [0, 1, 2]
    assert [(m.batch_id, m.policy_version) for m in trained(data)] == [(1, 1), (2, 1), (3, 2)]
    counts = [m.updates for m in data.heard if isinstance(m, WeightsPublished)]
    assert counts == [0, 1, 2]  # that changed the weights
    newest = newest_version(timed.run.dir / "weights")
    assert newest is not None
    assert number(newest.path) == 2


async def test_a_standstill_is_counted_as_publishing_and_what_is_hidden_is_not(
    timed: Config, batches: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of v1 is not over when update 2 would change the weights."""
    stands, into, made = threading.Event(), TensorCopy.into, []

    def slow_copy(self: TensorCopy, flat: FlatWeights) -> Tensors:
        made.append(flat)
        if len(made) == 2:
            assert stands.wait(PATIENCE_S)
        return into(self, flat)

    monkeypatch.setattr(TensorCopy, "into", slow_copy)
    data, endpoints = Data(batches), Endpoints(timed.run.dir)
    with Forwarder(endpoints.address(TELEMETRY_IN), endpoints.address(TELEMETRY_OUT)):
        async with (
            serving(timed.run.dir, data),
            asyncio.timeout(PATIENCE_S),
            Subscriber(endpoints.address(TELEMETRY_OUT), [Heartbeat]) as heartbeats,
        ):
            task = asyncio.create_task(run(timed, asyncio.Event()))
            async for heartbeat in heartbeats:
                assert isinstance(heartbeat, Heartbeat)
                if heartbeat.state == "syncing" and heartbeat.gauges["updates"] == 1:
                    break
            before = heartbeat.gauges["seconds.publishing"]
            async for later in heartbeats:
                assert isinstance(later, Heartbeat)
                if later.gauges["seconds.publishing"] > before + 0.5:
                    break  # it goes on
            stands.set()
            await task
    stalls = [m.metrics["publish_stall_s"] for m in trained(data)]
    assert stalls[1] > 0.5


async def copy_as_it_stands(source: Path, target: Path) -> None:
    """Copy a folder as it would remain after a kill; copy again if threads have written meanwhile."""

    def state() -> dict[Path, tuple[int, int]]:
        result = {path: path.stat() for path in sorted(source.rglob("*"))}
        return {path: (stat.st_mtime_ns, stat.st_size) for path, stat in result.items()}

    while True:
        with contextlib.suppress(FileNotFoundError, shutil.Error):
            before = state()
            shutil.copytree(source, target)
            if state() == before:
                return
        shutil.rmtree(target, ignore_errors=True)
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("checkpoint_every", [1, 2])
async def test_a_kill_while_a_version_is_on_its_way_loses_nothing_and_trains_nothing_twice(
    config: Config,
    batches: list[Batch],
    slow: Slow,
    checkpoint_every: int,
) -> None:
    """Resume, with the same ledger, from the files that kill -9 leaves after an acknowledgement."""
    slow.which = (3,)
    alive = another_run(config, "alive", checkpoint_every=checkpoint_every)
    killed = another_run(config, "killed", checkpoint_every=checkpoint_every)
    before = Data(batches)
    async with serving(alive.run.dir, before), asyncio.timeout(PATIENCE_S):
        task = asyncio.create_task(run(alive, asyncio.Event()))
        await until(lambda: any(m.batch_id == 3 for m in trained(before)) and slow.reached.is_set())
        await until(lambda: bool(checkpoint_paths(alive.run.dir / "checkpoints")))
        heard = list(before.heard)
        for name in ("checkpoints", "weights"):
            await copy_as_it_stands(alive.run.dir / name, killed.run.dir / name)
        slow.go_on.set()
        await task
    assert max(m.policy_version for m in heard if isinstance(m, WeightsPublished)) == 2
    assert max(m.policy_version for m in heard if isinstance(m, BatchTrained)) == 3
    after = Data(batches)
    after.heard = [m for m in heard if isinstance(m, WeightsPublished)]  # data's ledger
    await train(killed, after)
    announced = [m for m in after.heard if isinstance(m, WeightsPublished)]
    numbers = [m.policy_version for m in announced]
    assert numbers == sorted(numbers)
    assert set(numbers) == {0, 1, 2, 3, 4}  # 3 too: no one has heard of the version that was lost
    # Of a number that is announced again the weights are the same.
    assert len({(m.policy_version, m.digest) for m in announced}) == 5
    [hello] = [m for m in after.heard if type(m).__name__ == "TrainerHello"]
    assert [m.batch_id for m in trained(after)] == list(range(hello.last_batch_id + 1, 5))
    expected = final_weights(alive)
    final = final_weights(killed)
    assert all(torch.equal(final[name], value) for name, value in expected.items())
    loaded = load(Path(announced[-1].path), expected)
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())
