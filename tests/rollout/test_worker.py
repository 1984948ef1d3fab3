"""Promises of a rollout worker, over real sockets; the model is a random tiny one."""

from __future__ import annotations

import asyncio
import contextlib
import io
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageDraw

from bus.endpoints import TELEMETRY_IN, TELEMETRY_OUT, Endpoints
from bus.errors import ConfigError, DeadlineError, ModelError
from bus.messages import ActRequest, Completion, Heartbeat, RunState, Sampling
from bus.sockets import Forwarder, Publisher, Requester, Subscriber
from dart_cli.config import Config, ModelConfig, RolloutConfig, RunConfig
from dart_cli.policy.model import load_policy, weight_tensors
from dart_cli.policy.tiny import build_tiny, save
from dart_cli.rollout.worker import run
from dart_cli.weights.file import WEIGHTS, FileChannel, publish

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained tiny model as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("tiny")
    save(folder, *build_tiny(seed=0), build={})
    return folder


@pytest.fixture
def config(tmp_path: Path, tiny_folder: Path) -> Config:
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    return Config(
        run=RunConfig(dir=run_dir),
        model=ModelConfig(path=str(tiny_folder)),
        rollout=RolloutConfig(max_batch=8, max_tokens=6),
    )


class Announcer:
    """Says once in 50 ms which weights are the newest, and keeps the workers' heartbeats."""

    def __init__(self) -> None:
        self.state = RunState(
            run_id="test", policy_version=-1, weights_path="", stopping=False, reason=""
        )
        self.newest: Heartbeat | None = None
        self._heard = asyncio.Condition()

    def announce(self, path: Path, version: int) -> None:
        self.state = self.state.model_copy(
            update={"weights_path": str(path), "policy_version": version}
        )

    def stop(self) -> None:
        self.state = self.state.model_copy(update={"stopping": True, "reason": "enough"})

    async def heard(self, condition, deadline_s: float = 60.0) -> Heartbeat:
        """The first heartbeat that meets `condition`."""
        async with asyncio.timeout(deadline_s), self._heard:
            while self.newest is None or not condition(self.newest):
                await self._heard.wait()
            return self.newest

    async def say(self, publisher: Publisher) -> None:
        while True:
            publisher.publish(self.state)
            await asyncio.sleep(0.05)

    async def listen(self, heartbeats: Subscriber) -> None:
        async for heartbeat in heartbeats:
            assert isinstance(heartbeat, Heartbeat)
            async with self._heard:
                self.newest = heartbeat
                self._heard.notify_all()


@contextlib.asynccontextmanager
async def telemetry(run_dir: Path) -> AsyncIterator[Announcer]:
    """What data does for telemetry."""
    endpoints = Endpoints(run_dir)
    announcer = Announcer()
    with Forwarder(endpoints.address(TELEMETRY_IN), endpoints.address(TELEMETRY_OUT)):
        async with (
            Publisher(endpoints.address(TELEMETRY_IN)) as publisher,
            Subscriber(endpoints.address(TELEMETRY_OUT), [Heartbeat]) as heartbeats,
        ):
            tasks = [
                asyncio.create_task(announcer.say(publisher)),
                asyncio.create_task(announcer.listen(heartbeats)),
            ]
            try:
                yield announcer
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)


def screen(seed: int) -> bytes:
    """A screenshot of 168 x 168 pixels with a coloured box."""
    image = Image.new("RGB", (168, 168), "white")
    x, y = 7 * (seed % 20), 5 * (seed % 23)
    ImageDraw.Draw(image).rectangle((x, y, x + 30, y + 20), fill=(seed * 37 % 256, 90, 160))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def act_request(trajectory: str, step: int, temperature: float = 1.0) -> ActRequest:
    return ActRequest(
        trajectory_id=trajectory,
        step=step,
        instruction="click the red button",
        turns=[],
        screenshot=screen(step),
        width=168,
        height=168,
        sampling=Sampling(temperature=temperature, max_tokens=6, seed=step),
    )


@contextlib.asynccontextmanager
async def worker(config: Config):
    stop = asyncio.Event()
    task = asyncio.create_task(run(config, "rollout-0", stop))
    try:
        yield task
    finally:
        stop.set()
        async with asyncio.timeout(20):
            await task


def scripted(config: Config) -> Config:
    rollout = config.rollout.model_copy(update={"engine": "scripted"})
    return config.model_copy(update={"rollout": rollout})


def asks(config: Config) -> Requester:
    return Requester(Endpoints(config.run.dir).address("rollout-0"), peer="rollout-0")


def weights_of(config: Config, shift: float = 0.0) -> dict[str, torch.Tensor]:
    tensors = weight_tensors(load_policy(config.model.path).model)
    return {name: tensor.detach() + shift for name, tensor in tensors.items()}


async def test_nothing_is_answered_before_the_first_weights(config: Config) -> None:
    async with telemetry(config.run.dir) as data, worker(scripted(config)), asks(config) as client:
        heartbeat = await data.heard(lambda hb: "first weights" in hb.waiting_for)
        assert (heartbeat.state, heartbeat.policy_version) == ("starting", -1)
        with pytest.raises(DeadlineError):
            await client.request(act_request("t", 0), deadline_s=0.3)
        data.announce(publish({"w": torch.zeros(1)}, config.run.dir / "weights", 4).path, 4)
        reply = await client.request(act_request("t", 1), deadline_s=20)
        assert isinstance(reply, Completion)
        assert [span.version for span in reply.version_spans] == [4]
        heartbeat = await data.heard(lambda hb: hb.state == "ready")
        assert heartbeat.endpoint == client.endpoint
        assert {"in_flight", "waiting", "busy_s", "idle_s", "sync_s", "tokens"} <= set(
            heartbeat.gauges
        )


async def test_the_end_of_the_run_ends_the_worker(config: Config) -> None:
    async with telemetry(config.run.dir) as data, worker(scripted(config)) as task:
        await data.heard(lambda hb: hb.role == "rollout")
        data.stop()
        async with asyncio.timeout(20):
            await task


async def test_a_refused_set_leaves_the_old_weights_serving_and_says_why(config: Config) -> None:
    weights = config.run.dir / "weights"
    good = publish(weights_of(config), weights, 1)
    async with telemetry(config.run.dir) as data, worker(config), asks(config) as client:
        data.announce(good.path, 1)
        before = await client.request(act_request("t", 1), deadline_s=60)
        bad = publish(weights_of(config, 1.0), weights, 2)
        (bad.path / WEIGHTS).write_bytes(b"\0" * bad.size_bytes)
        data.announce(bad.path, 2)
        heartbeat = await data.heard(lambda hb: "v2 refused" in hb.waiting_for)
        assert "the digest differs" in heartbeat.waiting_for
        assert (heartbeat.state, heartbeat.policy_version) == ("ready", 1)
        during = await client.request(act_request("t", 1), deadline_s=60)
        assert isinstance(before, Completion)
        assert isinstance(during, Completion)
        assert during.token_ids == before.token_ids
        assert during.behaviour_logprobs == pytest.approx(before.behaviour_logprobs, abs=1e-6)
        data.announce(publish(weights_of(config), weights, 3).path, 3)
        heartbeat = await data.heard(lambda hb: hb.policy_version == 3)
        assert heartbeat.waiting_for == ""


async def test_a_set_that_was_removed_meanwhile_is_replaced_by_the_newest(config: Config) -> None:
    weights = config.run.dir / "weights"
    newest = publish(weights_of(config), weights, 9)
    async with telemetry(config.run.dir) as data, worker(config):
        data.announce(weights / "v000007", 7)
        await data.heard(lambda hb: hb.policy_version == newest.policy_version)


_WORKER_PROCESS = """
import asyncio, sys
from dart_cli.config import Config
from dart_cli.rollout.worker import run
asyncio.run(run(Config.model_validate_json(sys.argv[1]), "rollout-0", asyncio.Event()))
"""


async def test_publication_under_load_loses_no_request(config: Config) -> None:
    """The worker is another process; 8 clients ask without pause while 12 versions are published."""
    channel = FileChannel(config.run.dir / "weights", keep=2)
    tensors = weights_of(config)
    process = subprocess.Popen(  # noqa: ASYNC220 - starting it blocks for a moment only
        [sys.executable, "-c", _WORKER_PROCESS, config.model_dump_json()], cwd=ROOT
    )
    versions: dict[int, list[int]] = {index: [] for index in range(8)}
    published = 12

    async def ask(client: Requester, index: int) -> None:
        step = 0
        while published - 1 not in versions[index]:
            reply = await client.request(act_request(f"t{index}", step), deadline_s=60)
            assert isinstance(reply, Completion)
            (span,) = reply.version_spans
            assert (span.start, span.end) == (0, len(reply.token_ids))
            versions[index].append(span.version)
            step += 1

    try:
        async with (
            asyncio.timeout(50),
            telemetry(config.run.dir) as data,
            asks(config) as client,
        ):
            data.announce(channel.publish(tensors, 0).path, 0)
            await data.heard(lambda hb: hb.state == "ready")
            async with asyncio.TaskGroup() as group:
                for index in versions:
                    group.create_task(ask(client, index))
                for version in range(1, published):
                    tensors = {name: tensor + 1e-4 for name, tensor in tensors.items()}
                    data.announce(channel.publish(tensors, version).path, version)
                    await asyncio.sleep(0.1)
            data.stop()
            assert await asyncio.to_thread(process.wait, 20) == 0
    finally:
        process.kill()
    for seen in versions.values():
        assert seen == sorted(seen)
    assert len(set().union(*map(set, versions.values()))) > 2


def test_a_folder_that_is_no_model_is_named(config: Config, tmp_path: Path) -> None:
    broken = config.model_copy(
        update={"model": config.model.model_copy(update={"path": str(tmp_path)})}
    )
    with pytest.raises(ModelError, match=r"config\.json"):
        asyncio.run(run(broken, "rollout-0", asyncio.Event()))


async def test_a_host_that_cannot_be_reached_is_named(config: Config) -> None:
    beyond = config.model_copy(
        update={"bus": config.bus.model_copy(update={"transport": "tcp", "host": "no.such.host."})}
    )
    with pytest.raises(ConfigError, match=r"bus\.host = 'no\.such\.host\.' cannot be reached"):
        await run(beyond, "rollout-0", asyncio.Event())
