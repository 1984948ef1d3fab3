"""A data service that records its messages, and whole runs of a trainer against it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import torch

from bus.endpoints import DATA, Endpoints
from bus.messages import (
    Ack,
    Batch,
    BatchReply,
    BatchRequest,
    BatchTrained,
    HelloReply,
    JoinReply,
    JoinRequest,
    Reply,
    Request,
    TrainerHello,
)
from bus.requests import Replier
from bus.weights import WeightsPublished
from dart_cli.config.schema import Config
from dart_cli.train.checkpoints.checkpoint import CheckpointSaver, load_newest, path_of
from dart_cli.train.checkpoints.identity import TrainedPart, TrainerProgress
from dart_cli.train.process import run
from tests.waiting import PATIENCE_S


class Data:
    """Serves the batches that the trainer's hello and acknowledgements leave; keeps what it receives.

    `crash` is asked before each answer; if it is true, the message is noted but never answered.
    """

    def __init__(self, batches: list[Batch], crash=lambda _: False) -> None:
        self.batches = batches
        self.trained = 0
        self.known: WeightsPublished | None = None  # published before this Data began
        self.heard: list[Request] = []
        self.crashed = asyncio.Event()
        self.idle = asyncio.Event()  # set when a batch is asked for and none is left
        self.joins = asyncio.Event()  # clear while it does not answer a trainer that joins
        self.joins.set()
        self._crash = crash

    def of(self, kind: type[Request]) -> list[Request]:
        return [message for message in self.heard if isinstance(message, kind)]

    async def handle(self, _client: str, message: Request) -> Reply:
        if isinstance(message, JoinRequest):
            await self.joins.wait()
            return JoinReply()
        self.heard.append(message)
        if self._crash(message):
            self.crashed.set()
            await asyncio.sleep(60)
        if isinstance(message, TrainerHello):
            self.trained = message.last_batch_id
            publications = [m for m in self.heard if isinstance(m, WeightsPublished)]
            newest = max(publications, key=lambda m: m.policy_version, default=self.known)
            if newest is None:
                return HelloReply(policy_version=-1, digest="")
            return HelloReply(policy_version=newest.policy_version, digest=newest.digest)
        elif isinstance(message, BatchTrained):
            self.trained = max(self.trained, message.batch_id)
        elif isinstance(message, BatchRequest):
            for batch in self.batches:
                if batch.batch_id > self.trained:
                    return BatchReply(batch=batch)
            self.idle.set()
            return BatchReply(retry_after_s=0.05, reason="no group is complete")
        return Ack()


@contextlib.asynccontextmanager
async def serving(run_dir: Path, data: Data) -> AsyncIterator[None]:
    async with Replier(Endpoints(run_dir).address(DATA)) as replier:
        task = asyncio.create_task(replier.serve(data.handle))
        try:
            yield
        finally:
            await replier.close(0.0)
            await task


async def train(config: Config, data: Data) -> None:
    """Run the trainer to its end; cancel it if `data` lets it crash."""
    async with serving(config.run.dir, data), asyncio.timeout(PATIENCE_S):
        task = asyncio.create_task(run(config, asyncio.Event()))
        crash = asyncio.create_task(data.crashed.wait())
        await asyncio.wait([task, crash], return_when=asyncio.FIRST_COMPLETED)
        crash.cancel()
        if data.crashed.is_set():
            task.cancel()
            await asyncio.wait([task])
        else:
            await task


def final_weights(config: Config) -> dict[str, torch.Tensor]:
    checkpoint = load_newest(config.run.dir / "checkpoints")
    assert checkpoint is not None
    assert checkpoint.progress.updates == config.train.updates
    names = {name for name in checkpoint.tensors.names if "/" not in name}
    return {name: checkpoint.tensors.whole(name) for name in names}


def save(
    directory: Path,
    progress: TrainerProgress,
    state: Mapping[str, torch.Tensor],
    model: str = "",
    trained: TrainedPart | None = None,
) -> Path:
    """Write a checkpoint and wait for it."""
    saver = CheckpointSaver(directory, trained=trained)
    saver.begin(progress, state, model)
    assert saver.wait() == progress
    return path_of(directory, progress.updates)


EXPECTED, MARGIN = 0.25, 0.1
"""For `with_baselines`: the baseline of a step, and data.baseline_margin."""


def with_baselines(batch: Batch) -> Batch:
    """Return the batch as the data service serves it with group size 1: every second trajectory passed."""
    names = sorted({sample.trajectory_id for sample in batch.samples})
    samples = []
    for sample in batch.samples:
        reward = float(names.index(sample.trajectory_id) % 2)
        samples.append(
            sample.model_copy(
                update={
                    "reward": reward,
                    "expected": EXPECTED,
                    "advantage": reward - EXPECTED + MARGIN,
                }
            )
        )
    return batch.model_copy(update={"samples": samples})


class TensorsInMemory:
    """A checkpoint's tensors, from memory."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self._state = {name: tensor.clone() for name, tensor in state.items()}

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._state)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._state[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._state[name].dtype

    def fill(self, targets: Mapping[str, torch.Tensor]) -> None:
        for name, target in targets.items():
            target.copy_(self._state[name])


def versions(*visits: Data) -> list[int]:
    return [
        message.policy_version
        for visit in visits
        for message in visit.of(WeightsPublished)
        if isinstance(message, WeightsPublished)
    ]


def another_run(config: Config, name: str, **train_changes: object) -> Config:
    run_dir = config.run.dir.parent / name
    run_dir.mkdir(mode=0o700)
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"dir": run_dir}),
            "train": config.train.model_copy(update=train_changes),
        }
    )
