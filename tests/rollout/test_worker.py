"""Promises of a rollout worker, over real sockets; the model is a random tiny one."""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageDraw

from bus.endpoints import DATA, TELEMETRY_IN, TELEMETRY_OUT, TRAIN, Endpoints
from bus.errors import (
    ConfigError,
    DeadlineError,
    EngineError,
    EngineGoneError,
    ModelError,
    PromptError,
    RefusedError,
    StoreError,
)
from bus.messages import (
    Ack,
    ActRequest,
    Completion,
    Heartbeat,
    JoinReply,
    JoinRequest,
    Reply,
    Request,
    RunState,
    SampledTokens,
    Sampling,
)
from bus.pubsub import Forwarder, Publisher, Subscriber
from bus.requests import Replier, Requester
from bus.weights import SyncDone, SyncReply, SyncRequest
from dart_cli.config import endpoints
from dart_cli.config.schema import (
    Config,
    LoraConfig,
    ModelConfig,
    PolicyConfig,
    RolloutConfig,
    RunConfig,
    WeightsConfig,
)
from dart_cli.engines.base import Model, UpdateTiming
from dart_cli.engines.scripted import ScriptedEngine, ScriptedResponder, say
from dart_cli.language.coordinates import make_coordinate_map
from dart_cli.language.parsers import make_action_parser
from dart_cli.policy.loader import load_policy, weight_tensors
from dart_cli.policy.weight_set import WeightSet
from dart_cli.rollout import sync
from dart_cli.rollout import worker as rollout_worker
from dart_cli.rollout.worker import load_model, run
from dart_cli.runtime.background import background
from dart_cli.runtime.joining import WHAT as JOINING
from dart_cli.train.publishing import make_channel
from dart_cli.weights.broadcast.channel import BroadcastChannel
from dart_cli.weights.file import FileChannel
from dart_cli.weights.manifest import WEIGHTS, Published
from scripts.tiny_model import build_tiny, save
from tests.simulated import WORDY
from tests.waiting import PATIENCE_S, until
from tests.weights.sets import publish

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


class Data:
    """What data is to a worker: publishes 20 times a second which weights are the newest, and grants permits.

    A permit names what was announced last; while `holds` is set it is not granted. Each of
    `refusals` answers one request of its kind. Heartbeats and SyncDones are kept.
    """

    def __init__(self) -> None:
        self.state = RunState(
            run_id="test", policy_version=-1, weights_path="", stopping=False, reason=""
        )
        self.digest = ""
        self.holds = False
        self.refusals: list[tuple[type[Request], Exception]] = []
        self.asked: list[SyncRequest] = []
        self.done: list[SyncDone] = []
        self.newest: Heartbeat | None = None
        self.joins = asyncio.Event()  # clear while it does not answer a process that joins
        self.joins.set()
        self._heard = asyncio.Condition()

    def announce(self, published: Published) -> None:
        self.digest = published.digest
        self.change(weights_path=str(published.path), policy_version=published.policy_version)

    def change(self, **fields: object) -> None:
        self.state = self.state.model_copy(update=fields)

    def stop(self) -> None:
        self.change(stopping=True, reason="enough")

    async def until(self, condition: Callable[[], bool], deadline_s: float = PATIENCE_S) -> None:
        """Wait until a message makes `condition` true."""
        async with asyncio.timeout(deadline_s), self._heard:
            while not condition():
                await self._heard.wait()

    async def heard(
        self, condition: Callable[[Heartbeat], bool], deadline_s: float = PATIENCE_S
    ) -> Heartbeat:
        """The first heartbeat that meets `condition`."""
        await self.until(lambda: self.newest is not None and condition(self.newest), deadline_s)
        assert self.newest is not None
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

    async def answer(self, _client: str, request: Request) -> Reply:
        if isinstance(request, JoinRequest):
            await self.joins.wait()
        async with self._heard:
            self._heard.notify_all()
            if self.refusals and isinstance(request, self.refusals[0][0]):
                raise self.refusals.pop(0)[1]
            if isinstance(request, SyncDone):
                self.done.append(request)
                return Ack()
            if isinstance(request, JoinRequest):
                return JoinReply()
            assert isinstance(request, SyncRequest)
            self.asked.append(request)
        if self.holds:
            await asyncio.sleep(0.05)
            return SyncReply(reason="rollout-9 takes weights")
        return SyncReply(
            granted=True,
            policy_version=self.state.policy_version,
            path=self.state.weights_path,
            digest=self.digest,
        )


@contextlib.asynccontextmanager
async def permits(run_dir: Path, data: Data) -> AsyncIterator[None]:
    """Data answers."""
    async with Replier(Endpoints(run_dir).address(DATA)) as replier:
        task = asyncio.create_task(replier.serve(data.answer))
        yield
        await replier.close(0.0)
        await task


@contextlib.asynccontextmanager
async def telemetry(run_dir: Path, *, answers: bool = True) -> AsyncIterator[Data]:
    """Data's telemetry, and the data process itself if it `answers`."""
    endpoints = Endpoints(run_dir)
    data = Data()
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(
            Forwarder(endpoints.address(TELEMETRY_IN), endpoints.address(TELEMETRY_OUT))
        )
        publisher = await stack.enter_async_context(Publisher(endpoints.address(TELEMETRY_IN)))
        heartbeats = await stack.enter_async_context(
            Subscriber(endpoints.address(TELEMETRY_OUT), [Heartbeat])
        )
        if answers:
            await stack.enter_async_context(permits(run_dir, data))
        async with background(data.say(publisher), data.listen(heartbeats)):
            yield data


def screen(seed: int) -> bytes:
    """A screenshot of 168 x 168 pixels with a coloured box."""
    image = Image.new("RGB", (168, 168), "white")
    x, y = 7 * (seed % 20), 5 * (seed % 23)
    ImageDraw.Draw(image).rectangle((x, y, x + 30, y + 20), fill=(seed * 37 % 256, 90, 160))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def act_request(trajectory: str, step: int, max_tokens: int = 6) -> ActRequest:
    return ActRequest(
        trajectory_id=trajectory,
        step=step,
        instruction="click the red button",
        turns=[],
        screenshot=screen(step),
        width=168,
        height=168,
        sampling=Sampling(temperature=1.0, max_tokens=max_tokens, seed=step),
    )


@contextlib.asynccontextmanager
async def worker(config: Config):
    stop = asyncio.Event()
    task = asyncio.create_task(run(config, "rollout-0", stop))
    try:
        yield task
    finally:
        stop.set()
        async with asyncio.timeout(PATIENCE_S):
            await task


def scripted(config: Config, engine: str = "scripted") -> Config:
    rollout = config.rollout.model_copy(update={"engine": engine})
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
        data.announce(publish({"w": torch.zeros(1)}, config.run.dir / "weights", 4))
        reply = await client.request(act_request("t", 1), deadline_s=PATIENCE_S)
        assert isinstance(reply, Completion)
        assert [span.version for span in reply.sampled.version_spans] == [4]
        heartbeat = await data.heard(lambda hb: hb.state == "ready")
        assert heartbeat.endpoint == client.endpoint
        assert {
            "in_flight",
            "waiting",
            "tokens",
            "load_s",
            "syncs",
            "sync_wait_s",
            "transfer_s",
            "pause_s",
        } <= set(heartbeat.gauges)


async def test_nothing_is_taken_before_data_has_taken_the_settings(config: Config) -> None:
    async with telemetry(config.run.dir) as data:
        data.joins.clear()
        async with worker(scripted(config)):
            data.announce(publish({"w": torch.zeros(1)}, config.run.dir / "weights", 4))
            await data.heard(lambda hb: hb.waiting_for == JOINING)
            assert data.asked == []
            data.joins.set()
            await data.heard(lambda hb: hb.policy_version == 4)
        data.refusals = [(JoinRequest, ConfigError("dart rollout does not read data.group_size"))]
        with pytest.raises(ConfigError, match="does not read data"):
            await run(scripted(config), "rollout-0", asyncio.Event())


async def test_a_missing_data_process_is_named(
    config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with worker(scripted(config)):
        await until(lambda: "waits for dart data at ipc://" in caplog.text)
    assert "start `dart data CONFIG`" in caplog.text


async def test_at_the_end_of_the_run_the_worker_ends_and_does_not_hang(config: Config) -> None:
    async with telemetry(config.run.dir) as data, worker(scripted(config)) as task:
        await data.heard(lambda hb: hb.role == "rollout")
        data.stop()
        async with asyncio.timeout(PATIENCE_S):
            await task


async def test_a_refused_set_leaves_the_old_weights_serving_and_says_why(config: Config) -> None:
    weights = config.run.dir / "weights"
    good = publish(weights_of(config), weights, 1)
    async with telemetry(config.run.dir) as data, worker(config), asks(config) as client:
        data.announce(good)
        before = await client.request(act_request("t", 1), deadline_s=PATIENCE_S)
        bad = publish(weights_of(config, 1.0), weights, 2)
        (bad.path / WEIGHTS).write_bytes(b"\0" * bad.size_bytes)
        data.announce(bad)
        heartbeat = await data.heard(lambda hb: "v2 refused" in hb.waiting_for)
        assert "no safetensors file" in heartbeat.waiting_for
        assert (heartbeat.state, heartbeat.policy_version) == ("ready", 1)
        during = await client.request(act_request("t", 1), deadline_s=PATIENCE_S)
        assert isinstance(before, Completion)
        assert isinstance(during, Completion)
        assert during.sampled.token_ids == before.sampled.token_ids
        assert during.sampled.behaviour_logprobs == pytest.approx(
            before.sampled.behaviour_logprobs, abs=1e-6
        )
        data.announce(publish(weights_of(config), weights, 3))
        heartbeat = await data.heard(lambda hb: hb.policy_version == 3)
        assert heartbeat.waiting_for == ""


@pytest.mark.parametrize("is_linked", [False, True], ids=["no folder", "links to its memory"])
async def test_weights_that_only_the_trainer_s_host_has_are_refused_with_the_cure(
    config: Config, is_linked: bool
) -> None:
    made = publish(weights_of(config), config.run.dir / "weights", 1)
    elsewhere = made.path.with_name("elsewhere")
    if is_linked:
        weights = made.path / WEIGHTS
        weights.unlink()
        weights.symlink_to(elsewhere)
    else:
        made.path.rename(elsewhere)
    async with telemetry(config.run.dir) as data, worker(config):
        data.announce(made)
        await data.until(lambda: bool(data.done))
        [done] = data.done[:1]
        assert "weights.directory" in done.error
        assert "hosts" in done.error


async def test_a_broadcast_serves_and_refuses_as_files_do(config: Config) -> None:
    config = config.model_copy(update={"weights": WeightsConfig(channel="gloo")})
    channel = make_channel(config)
    good = weights_of(config)
    moved = {name: tensor + 1e-4 for name, tensor in good.items()}
    poisoned = {name: tensor * float("nan") for name, tensor in good.items()}
    async with contextlib.AsyncExitStack() as stack:
        data = await stack.enter_async_context(telemetry(config.run.dir))
        if isinstance(channel, BroadcastChannel):
            replier = Replier(Endpoints(config.run.dir).address(TRAIN))
            await stack.enter_async_context(replier)
            await stack.enter_async_context(background(replier.serve(channel.answer)))
        await stack.enter_async_context(worker(config))
        client = await stack.enter_async_context(asks(config))
        data.announce(channel.resume(good, 0))
        await data.heard(lambda hb: hb.policy_version == 0)
        data.announce(channel.publish(moved, 1))
        await data.heard(lambda hb: hb.policy_version == 1)
        data.announce(channel.publish(poisoned, 2))
        heartbeat = await data.heard(lambda hb: "v2 refused" in hb.waiting_for)
        assert "has values that are not finite" in heartbeat.waiting_for
        reply = await client.request(act_request("t", 1), deadline_s=PATIENCE_S)
        assert isinstance(reply, Completion)
        assert [span.version for span in reply.sampled.version_spans] == [1]
        data.announce(channel.publish(good, 3))
        await data.heard(lambda hb: hb.policy_version == 3 and not hb.waiting_for)
        await data.until(lambda: len(data.done) == 4)
        assert [bool(done.error) for done in data.done] == [False, False, True, False]
        assert all(done.error or done.transfer_s > 0 for done in data.done)
    assert not (config.run.dir / "copies" / "rollout-0").exists()
    channel.close()


async def test_the_worker_takes_what_the_permit_names_and_skips_what_is_in_between(
    config: Config,
) -> None:
    weights = config.run.dir / "weights"
    async with telemetry(config.run.dir) as data, worker(scripted(config)):
        data.announce(tiny_set(weights, 1))
        await data.heard(lambda hb: hb.policy_version == 1)
        data.holds = True
        data.announce(tiny_set(weights, 2))
        await data.heard(lambda hb: "rollout-9 takes weights" in hb.waiting_for)
        await data.heard(lambda hb: hb.waiting_s > 1.0)  # longer than a single question
        for version in (3, 4, 5):
            data.announce(tiny_set(weights, version))
        data.holds = False
        await data.heard(lambda hb: hb.policy_version == 5 and not hb.waiting_for)
        await data.until(lambda: len(data.done) == 2)
        assert [done.policy_version for done in data.done] == [1, 5]
        assert data.asked[0].policy_version == -1
        assert {asked.policy_version for asked in data.asked[1:]} == {1}
        assert data.done[1].waited_s > 0.05
        assert data.done[1].error == ""


async def test_while_data_is_away_the_old_weights_serve_and_then_the_newest_are_taken(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "DEADLINE_S", 0.2)
    weights = config.run.dir / "weights"
    impatient = scripted(config)
    async with (
        telemetry(config.run.dir, answers=False) as data,
        worker(impatient),
        asks(config) as client,
    ):
        async with permits(config.run.dir, data):
            data.announce(tiny_set(weights, 1))
            await data.until(lambda: len(data.done) == 1)
        data.announce(tiny_set(weights, 2))
        heartbeat = await data.heard(lambda hb: "its turn to take weights" in hb.waiting_for)
        assert heartbeat.state == "ready"
        reply = await client.request(act_request("t", 1), deadline_s=PATIENCE_S)
        assert isinstance(reply, Completion)
        assert [span.version for span in reply.sampled.version_spans] == [1]
        async with permits(config.run.dir, data):
            await data.heard(lambda hb: hb.policy_version == 2)


async def test_whatever_data_refuses_with_the_worker_serves_on_and_asks_again(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "RETRY_S", 0.1)
    weights = config.run.dir / "weights"
    async with telemetry(config.run.dir) as data, worker(scripted(config)), asks(config) as client:
        data.refusals = [
            (SyncRequest, StoreError("disk full")),
            (SyncRequest, RefusedError("not now")),
            (SyncDone, StoreError("disk full")),
        ]
        data.announce(tiny_set(weights, 1))
        await data.until(lambda: not data.refusals)
        data.announce(tiny_set(weights, 2))
        await data.until(lambda: [done.policy_version for done in data.done] == [2])
        reply = await client.request(act_request("t", 1), deadline_s=PATIENCE_S)
        assert isinstance(reply, Completion)
        assert [span.version for span in reply.sampled.version_spans] == [2]


async def test_a_set_that_is_not_the_one_announced_is_refused(config: Config) -> None:
    weights = config.run.dir / "weights"
    async with telemetry(config.run.dir) as data, worker(scripted(config)):
        data.announce(tiny_set(weights, 1))
        await data.heard(lambda hb: hb.policy_version == 1)
        data.announce(replace(tiny_set(weights, 2), digest="0" * 128))
        heartbeat = await data.heard(lambda hb: "v2 refused" in hb.waiting_for)
        assert "not the one announced" in heartbeat.waiting_for
        data.announce(replace(tiny_set(weights, 3), policy_version=4))
        heartbeat = await data.heard(lambda hb: "v4 refused" in hb.waiting_for)
        assert "v000003 is v3" in heartbeat.waiting_for
        await data.until(lambda: len(data.done) == 3)
        assert [bool(done.error) for done in data.done] == [False, True, True]
        assert heartbeat.policy_version == 1
        data.announce(tiny_set(weights, 5))
        await data.heard(lambda hb: hb.policy_version == 5 and hb.waiting_for == "")


async def test_adapters_of_other_settings_are_refused(config: Config) -> None:
    """Their shapes are the same: the engine would multiply them by another factor."""
    pytest.importorskip("peft")
    mine, other = LoraConfig(rank=2, alpha=4.0), LoraConfig(rank=2, alpha=8.0)
    config = config.model_copy(update={"model": config.model.model_copy(update={"lora": mine})})
    adapters = weight_tensors(load_policy(config.model.path, lora=mine).model)
    weights = config.run.dir / "weights"
    async with telemetry(config.run.dir) as data, worker(config):
        data.announce(publish(adapters, weights, 1, lora=mine))
        await data.heard(lambda hb: hb.policy_version == 1)
        data.announce(publish(adapters, weights, 2, lora=other))
        heartbeat = await data.heard(lambda hb: "v2 refused" in hb.waiting_for)
        assert "model.lora.alpha = 4.0, but it was 8.0" in heartbeat.waiting_for
        assert heartbeat.policy_version == 1


async def test_a_refused_set_is_tried_again(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "RETRY_S", 0.1)
    weights = config.run.dir / "weights"
    async with telemetry(config.run.dir) as data, worker(scripted(config)):
        data.announce(tiny_set(weights, 1))
        await data.heard(lambda hb: hb.policy_version == 1)
        published = tiny_set(weights, 2)
        away = published.path.rename(weights / "elsewhere")
        data.announce(published)
        # After many tries, which together are one wait.
        await data.heard(lambda hb: "v2 refused" in hb.waiting_for and hb.waiting_s > 1.0)
        await data.until(lambda: len(data.done) >= 4)
        assert all("never complete" in done.error for done in data.done[1:])
        away.rename(published.path)
        await data.heard(lambda hb: hb.policy_version == 2)


async def test_a_suspended_run_begins_nothing_and_loses_nothing(config: Config) -> None:
    weights = config.run.dir / "weights"
    slow = scripted(config, WORDY).model_copy(
        update={"policy": PolicyConfig(action_parser="uitars")}
    )
    async with telemetry(config.run.dir) as data, worker(slow), asks(config) as client:
        data.announce(tiny_set(weights, 1))
        await data.heard(lambda hb: hb.state == "ready")
        request = act_request("t", 0, max_tokens=100)
        asking = asyncio.create_task(client.request(request, deadline_s=PATIENCE_S))
        await data.heard(lambda hb: hb.gauges.get("in_flight") == 1.0)
        data.change(suspended=True)
        first = await asking
        assert isinstance(first, Completion)
        assert (first.stop, first.worker) == ("suspended", "rollout-0")
        again = request.model_copy(update={"partial": partial_of(first)})
        second = await client.request(again, deadline_s=PATIENCE_S)
        assert isinstance(second, Completion)
        assert (second.stop, partial_of(second)) == ("suspended", partial_of(first))
        data.announce(tiny_set(weights, 2))
        await data.heard(lambda hb: hb.policy_version == 2)
        data.change(suspended=False)
        third = second
        while third.stop == "suspended":
            third = await client.request(again, deadline_s=PATIENCE_S)
            assert isinstance(third, Completion)
        assert third.sampled.token_ids[: len(first.sampled.token_ids)] == first.sampled.token_ids
        assert third.stop == "end"
        assert third.sampled.version_spans[-1].version == 2
        make_action_parser("uitars").parse(third.text, make_coordinate_map("thousandths", 168, 168))
        await data.heard(lambda hb: {"seconds.busy", "seconds.syncing", "load_s"} <= {*hb.gauges})


async def test_a_worker_whose_engine_fails_repeatedly_ends_and_one_that_recovers_does_not(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ScriptedEngine(lambda _: say("click(1,2)"), policy_version=-1)

    class Flaky(ScriptedResponder):
        async def answer(self, request: ActRequest) -> Completion:
            if request.trajectory_id == "bad":
                raise EngineError("CUDA error: an illegal memory access")
            return await super().answer(request)

    monkeypatch.setattr(rollout_worker, "load_model", lambda _: Model(engine, Flaky(engine)))
    most = rollout_worker.FAULTS_PER_PLACE * config.rollout.max_batch
    stop = asyncio.Event()
    async with telemetry(config.run.dir) as data, asks(config) as client:
        running = asyncio.create_task(run(config, "rollout-0", stop))
        data.announce(tiny_set(config.run.dir / "weights", 1))
        for trajectories in (["bad"] * (most - 1) + ["good"], ["bad"] * (most - 1)):
            for step, trajectory in enumerate(trajectories):
                asking = client.request(act_request(trajectory, step), deadline_s=PATIENCE_S)
                if trajectory == "good":
                    assert isinstance(await asking, Completion)
                else:
                    with pytest.raises(EngineError, match="CUDA"):
                        await asking
        assert not running.done()
        with contextlib.suppress(EngineError, DeadlineError):
            await client.request(act_request("bad", 0), deadline_s=1.0)
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(EngineError, match=f"{most} requests in a row .*illegal memory"):
                await running


async def test_requests_that_a_model_cannot_take_end_no_worker(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ScriptedEngine(lambda _: say("click(1,2)"), policy_version=-1)

    class Picky(ScriptedResponder):
        async def answer(self, request: ActRequest) -> Completion:
            if request.trajectory_id == "long":
                raise PromptError("it needs 9000 positions")
            return await super().answer(request)

    monkeypatch.setattr(rollout_worker, "load_model", lambda _: Model(engine, Picky(engine)))
    stop = asyncio.Event()
    async with telemetry(config.run.dir) as data, asks(config) as client:
        running = asyncio.create_task(run(config, "rollout-0", stop))
        data.announce(tiny_set(config.run.dir / "weights", 1))
        for step in range(rollout_worker.FAULTS_PER_PLACE * config.rollout.max_batch + 1):
            with pytest.raises(PromptError, match="9000 positions"):
                await client.request(act_request("long", step), deadline_s=PATIENCE_S)
        good = await client.request(act_request("good", 0), deadline_s=PATIENCE_S)
        assert isinstance(good, Completion)
        stop.set()
        await running


async def test_a_worker_whose_engine_is_gone_ends_at_once(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ScriptedEngine(lambda _: say("click(1,2)"), policy_version=-1)

    class Gone(ScriptedResponder):
        async def answer(self, request: ActRequest) -> Completion:
            raise EngineGoneError("its processes have died")

    monkeypatch.setattr(rollout_worker, "load_model", lambda _: Model(engine, Gone(engine)))
    async with telemetry(config.run.dir) as data, asks(config) as client:
        running = asyncio.create_task(run(config, "rollout-0", asyncio.Event()))
        data.announce(tiny_set(config.run.dir / "weights", 1))
        with contextlib.suppress(EngineGoneError, DeadlineError):
            await client.request(act_request("t", 0), deadline_s=PATIENCE_S)
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(EngineError, match="have died"):
                await running


async def test_a_worker_whose_engine_breaks_as_it_takes_weights_says_so_and_ends(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Breaks(ScriptedEngine):
        async def update_weights(self, source: WeightSet, policy_version: int) -> UpdateTiming:
            if policy_version > 1:
                raise EngineGoneError("its tensors are of two versions")
            return await super().update_weights(source, policy_version)

    engine = Breaks(lambda _: say("click(1,2)"), policy_version=-1)
    model = Model(engine, ScriptedResponder(engine))
    monkeypatch.setattr(rollout_worker, "load_model", lambda _: model)
    weights = config.run.dir / "weights"
    async with telemetry(config.run.dir) as data:
        running = asyncio.create_task(run(config, "rollout-0", asyncio.Event()))
        data.announce(tiny_set(weights, 1))
        await data.heard(lambda hb: hb.state == "ready")
        data.announce(tiny_set(weights, 2))
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(EngineGoneError, match="two versions"):
                await running
        assert [done.error for done in data.done] == ["", "its tensors are of two versions"]


def partial_of(completion: Completion) -> SampledTokens:
    return completion.sampled


def tiny_set(weights: Path, version: int) -> Published:
    return publish({"w": torch.full((1,), float(version))}, weights, version)


_WORKER_PROCESS = """
import asyncio, sys
from dart_cli.config.schema import Config
from dart_cli.rollout.worker import load_model, run
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
            reply = await client.request(act_request(f"t{index}", step), deadline_s=PATIENCE_S)
            assert isinstance(reply, Completion)
            assert reply.sampled.version_spans[-1].end == len(reply.sampled.token_ids)
            versions[index] += [span.version for span in reply.sampled.version_spans]
            step += 1

    try:
        async with (
            asyncio.timeout(PATIENCE_S),
            telemetry(config.run.dir) as data,
            asks(config) as client,
        ):
            data.announce(channel.publish(tensors, 0))
            await data.heard(lambda hb: hb.state == "ready")
            async with asyncio.TaskGroup() as group:
                for index in versions:
                    group.create_task(ask(client, index))
                for version in range(1, published):
                    tensors = {name: tensor + 1e-4 for name, tensor in tensors.items()}
                    data.announce(channel.publish(tensors, version))
                    await asyncio.sleep(0.1)
            data.stop()
            assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()  # or another test finds it running
    for seen in versions.values():
        assert seen == sorted(seen)
    assert len(set().union(*map(set, versions.values()))) > 2


_LOADING_PROCESS = """
import sys
from dart_cli.config.schema import Config
from dart_cli.runtime.role import run_role
from dart_cli.rollout import worker

def slow(config):
    import time
    print("loads", flush=True)
    while True:
        time.sleep(0.01)

if sys.argv[2] == "slow":
    worker.load_model = slow
config = Config.model_validate_json(sys.argv[1])

async def serve(name, stop):
    await worker.run(config, name, stop)

sys.exit(run_role("rollout", config, serve))
"""


@pytest.mark.parametrize(("what", "after_s"), [("slow", 0.0), ("real", 0.7)])
async def test_a_worker_that_is_stopped_while_it_loads_ends_cleanly_and_does_not_hang(
    config: Config, what: str, after_s: float
) -> None:
    process = subprocess.Popen(  # noqa: ASYNC220 - starting it blocks for a moment only
        [sys.executable, "-c", _LOADING_PROCESS, config.model_dump_json(), what],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        if what == "slow":
            assert process.stdout is not None
            await asyncio.to_thread(process.stdout.readline)
        else:  # somewhere in the imports
            address = Endpoints(config.run.dir).address("rollout-0")
            await until(Path(address.removeprefix("ipc://")).exists)  # signals are handled by now
            await asyncio.sleep(after_s)
        process.send_signal(signal.SIGTERM)
        _, errors = await asyncio.to_thread(process.communicate, timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait()  # or another test finds it running
    assert process.returncode == 0, errors.decode()
    assert b"did not end" not in errors


def test_a_folder_that_is_no_model_is_named(config: Config, tmp_path: Path) -> None:
    broken = config.model_copy(
        update={"model": config.model.model_copy(update={"path": str(tmp_path)})}
    )
    with pytest.raises(ModelError, match=r"config\.json"):
        asyncio.run(run(broken, "rollout-0", asyncio.Event()))


@pytest.mark.parametrize("host", ["no.such.host.", "a..b"])
async def test_a_host_that_cannot_be_reached_is_named(config: Config, host: str) -> None:
    beyond = config.model_copy(update={"bus": config.bus.model_copy(update={"host": host})})
    with pytest.raises(ConfigError, match=rf"bus\.host = '{re.escape(host)}' cannot be reached"):
        await run(beyond, "rollout-0", asyncio.Event())


async def test_an_engine_of_a_users_own_is_loaded_by_its_name(
    config: Config, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from dart_cli.engines.base import Model\n"
        "from dart_cli.engines.scripted import ScriptedEngine, ScriptedResponder, say\n"
        "def make(config):\n"
        "    engine = ScriptedEngine(lambda _: say(config.policy.action_parser[:4]), policy_version=-1)\n"
        "    return Model(engine, ScriptedResponder(engine))\n"
        "def nothing(config): ...\n"
    )
    own = scripted(config, f"{file}:make")
    async with telemetry(config.run.dir) as data, worker(own), asks(config) as client:
        data.announce(publish({"w": torch.zeros(1)}, config.run.dir / "weights", 1))
        await data.heard(lambda hb: hb.state == "ready")
        reply = await client.request(act_request("t", 0), deadline_s=PATIENCE_S)
        assert isinstance(reply, Completion)
        assert reply.text == "comp"
    with pytest.raises(ConfigError, match="returned NoneType, not a Model"):
        load_model(scripted(config, f"{file}:nothing"))


def test_vllm_is_told_how_many_tokens_the_screens_in_play_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, object] = {}

    def engine(*_: object, **options: object) -> ScriptedEngine:
        given.update(options)
        return ScriptedEngine(lambda _: say("noop"))

    monkeypatch.setattr("dart_cli.engines.vllm.engine.VllmEngine", engine)
    config = Config.model_validate(
        {
            "run": {"dir": tmp_path / "run"},
            "rollout": {"engine": "vllm"},
            "policy": {"history_images": 2},
            "env": {"slots": 5, "options": {"size": "336x168"}},
        }
    )
    load_model(config)
    assert given["screen_tokens"] == 5 * (2 + 1) * (336 // 28) * (168 // 28)


async def test_a_worker_that_is_stopped_while_its_model_loads_is_not_missed(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, stop = threading.Event(), asyncio.Event()
    monkeypatch.setattr(rollout_worker, "load_model", lambda _: loaded.wait(PATIENCE_S))
    async with telemetry(config.run.dir) as data:
        running = asyncio.create_task(run(config, "rollout-0", stop))
        await data.heard(lambda beat: beat.state == "starting")
        stop.set()
        await data.heard(lambda beat: beat.state == "stopping")
        await running
    loaded.set()


async def test_a_worker_that_is_stopped_before_data_has_taken_its_settings_is_not_missed(
    config: Config,
) -> None:
    stop = asyncio.Event()
    async with telemetry(config.run.dir) as data:
        data.joins.clear()
        running = asyncio.create_task(run(scripted(config), "rollout-0", stop))
        await data.heard(lambda beat: beat.waiting_for == JOINING)
        stop.set()
        await data.heard(lambda beat: beat.state == "stopping")
        await running
