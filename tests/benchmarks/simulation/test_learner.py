"""Promises of the learner that only takes time, alone and in the real trainer."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.simulation.engine import check_complete
from benchmarks.simulation.learner import TimedLearner
from benchmarks.simulation.times import Times
from bus.endpoints import TELEMETRY_IN, TELEMETRY_OUT, Endpoints
from bus.errors import StoreError
from bus.messages import (
    Batch,
    BatchRequest,
    BatchTrained,
    Chain,
    Heartbeat,
    JoinRequest,
    Reply,
    Request,
    Sample,
    TrainerHello,
    VersionSpan,
)
from bus.packed import float64s, int32s
from bus.pubsub import Forwarder, Subscriber
from bus.weights import WeightsPublished
from dart_cli.config.schema import Config, RunConfig, TrainConfig
from dart_cli.runtime import joining
from dart_cli.train import data_client, loop
from dart_cli.train.base import Update, batch_metrics
from dart_cli.train.process import run
from dart_cli.weights.file import load
from dart_cli.weights.manifest import newest_version
from tests.simulated import QUICK
from tests.train.parts import Data, TensorsInMemory, another_run, final_weights, serving, versions
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[3]


def batch(number: int, samples: int = 3) -> Batch:
    return Batch(
        batch_id=number,
        group_ids=["g0"],
        temperature=1.0,
        chains=[Chain(token_ids=int32s([1, 4, 5]), image_hashes=[])],
        samples=[
            Sample(
                group_id="g0",
                trajectory_id=f"t{i}",
                step=0,
                chain=0,
                start=1,
                end=3,
                images=0,
                behaviour_logprobs=float64s([0.0, 0.0]),
                version_spans=[
                    VersionSpan(version=0, start=0, end=1),
                    VersionSpan(version=2, start=1, end=2),
                ],
                advantage=float(i % 2),
                weight=0.0 if i == 0 else 1.0,
            )
            for i in range(samples)
        ],
        images={},
    )


@pytest.fixture
def timed(tmp_path: Path) -> Config:
    train = TrainConfig(learner=QUICK, updates=3)
    return Config(run=RunConfig(dir=tmp_path / "run"), train=train)


def test_an_update_takes_its_time_and_counts_what_it_was_given() -> None:
    learner = TimedLearner(Times(train_s=0.2, train_sample_s=0.1, speedup=10.0))
    began = time.monotonic()
    update = learner.update(batch(1), 0)
    assert time.monotonic() - began >= 0.05
    assert update.applied
    assert update.metrics == {"samples": 3.0, "tokens": 4.0, "skipped": 0.0}


def test_each_update_has_weights_of_its_own_which_a_checkpoint_brings_back() -> None:
    learner = TimedLearner(Times(train_s=0.0, train_sample_s=0.0))
    seen = []
    for number in range(3):
        learner.update(batch(number), number)
        seen.append({name: value.clone() for name, value in learner.model.weights().items()})
    assert len({int(value) for held in seen for value in held.values()}) == 3
    other = TimedLearner(Times())
    other.restore(TensorsInMemory(seen[1]))
    assert other.model.weights() == seen[1]
    with pytest.raises(ValueError, match="has none"):
        other.restore(TensorsInMemory({"w": torch.ones(1)}))


async def test_a_run_publishes_real_sets_and_resumes_from_real_checkpoints(timed: Config) -> None:
    short = another_run(timed, "short", updates=2)
    batches = [batch(number) for number in (1, 2, 3)]
    first, second = Data(batches), Data(batches)
    longer = timed.model_copy(update={"run": short.run})
    for config, data in ((short, first), (longer, second)):
        async with serving(config.run.dir, data), asyncio.timeout(PATIENCE_S):
            await run(config, asyncio.Event())
    hello = second.of(TrainerHello)[0]
    assert isinstance(hello, TrainerHello)
    assert (hello.last_batch_id, hello.updates) == (2, 2)
    assert versions(first, second) == [0, 1, 2, 2, 3]
    published = newest_version(short.run.dir / "weights")
    assert published is not None
    check_complete(published.path, 3)
    assert [int(value) for value in final_weights(longer).values()] == [3]
    trained = first.of(BatchTrained)[0]
    assert isinstance(trained, BatchTrained)
    assert trained.metrics["samples"] == 3
    assert trained.metrics["step_s"] >= 0.05
    assert {"waiting_s", "publish_s", "checkpoint_s", "staleness_mean"} <= trained.metrics.keys()


async def test_weights_are_published_where_the_update_whose_turn_it_is_was_skipped(
    timed: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Skips(TimedLearner):
        def update(self, batch: Batch, number: int, version: int | None = None) -> Update:
            if batch.batch_id == 3:
                return Update(applied=False, metrics={"samples": 3.0, "tokens": 4.0})
            return super().update(batch, number, version)

    monkeypatch.setattr(loop, "make_learner", lambda _: Skips(Times(train_s=0.0)))
    rarely = timed.model_copy(
        update={"weights": timed.weights.model_copy(update={"publish_every": 4})}
    )
    data = Data([batch(number) for number in (1, 2, 3)])
    async with serving(rarely.run.dir, data), asyncio.timeout(PATIENCE_S):
        await run(rarely, asyncio.Event())
    assert versions(data) == [0, 1]
    published = newest_version(rarely.run.dir / "weights")
    assert published is not None
    held = load(published.path, final_weights(rarely))
    assert [int(value) for value in held.values()] == [2]


async def test_the_trainer_outlives_a_data_process_whose_disk_is_full(
    timed: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (data_client, joining):
        monkeypatch.setattr(module, "RETRY_S", 0.05)
    refused: set[type[Request]] = set()

    class Full(Data):
        async def handle(self, client: str, message: Request) -> Reply:
            if type(message) not in refused:
                refused.add(type(message))
                raise StoreError("disk full")
            return await super().handle(client, message)

    data = Full([batch(number) for number in (1, 2, 3)])
    async with serving(timed.run.dir, data), asyncio.timeout(PATIENCE_S):
        await run(timed, asyncio.Event())
    assert refused == {JoinRequest, TrainerHello, WeightsPublished, BatchRequest, BatchTrained}
    assert [message.batch_id for message in data.of(BatchTrained)] == [1, 2, 3]  # type: ignore[attr-defined]
    assert versions(data) == [0, 1, 2, 3]


async def test_every_second_of_the_trainer_is_in_one_phase(timed: Config) -> None:
    endless = timed.model_copy(update={"train": timed.train.model_copy(update={"updates": 100})})
    data, stop, endpoints = Data([batch(1), batch(2)]), asyncio.Event(), Endpoints(timed.run.dir)
    with Forwarder(endpoints.address(TELEMETRY_IN), endpoints.address(TELEMETRY_OUT)):
        async with (
            serving(timed.run.dir, data),
            asyncio.timeout(PATIENCE_S),
            Subscriber(endpoints.address(TELEMETRY_OUT), [Heartbeat]) as heartbeats,
        ):
            began = time.monotonic()
            task = asyncio.create_task(run(endless, stop))
            async for heartbeat in heartbeats:
                assert isinstance(heartbeat, Heartbeat)
                if heartbeat.gauges["updates"] == 2 and heartbeat.state == "waiting":
                    break
            lived = time.monotonic() - began
            stop.set()
            await task
    gauges = heartbeat.gauges
    phases = {name: gauges[f"seconds.{name}"] for name in PHASES}
    assert phases["training"] >= 2 * 0.05
    assert all(seconds > 0 for seconds in phases.values())
    assert sum(phases.values()) <= lived
    assert gauges["tokens"] == 8


PHASES = ("starting", "waiting", "training", "publishing")


def test_the_trainer_of_a_timed_run_loads_no_model_code() -> None:
    script = (
        "import sys, dart_cli.train.loop, benchmarks.simulation.learner; "
        "sys.exit('transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=PATIENCE_S)


def test_staleness_is_counted_over_tokens() -> None:
    assert batch_metrics(batch(1, samples=4), 5) == {
        "staleness_mean": 4.0,
        "staleness_max": 5.0,
        "advantage_abs_mean": 0.5,
        "groups": 1.0,
    }
