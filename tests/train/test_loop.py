"""Promises of the trainer's process, over real sockets, with a data service that records what it receives."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bus.endpoints import TELEMETRY_IN, TELEMETRY_OUT, Endpoints
from bus.errors import CheckpointError, ConfigError, DartError, ProtocolError
from bus.heartbeat import HeartbeatSender
from bus.messages import (
    Batch,
    BatchReply,
    BatchRequest,
    BatchTrained,
    Heartbeat,
    Reply,
    Request,
    RunState,
    TrainerHello,
)
from bus.pubsub import Forwarder, Publisher, Subscriber
from bus.weights import WeightsPublished
from dart_cli.config import endpoints
from dart_cli.config.schema import Config, LoraConfig, WeightsConfig
from dart_cli.runtime.joining import WHAT as JOINING
from dart_cli.train import data_client, loop
from dart_cli.train.base import Update
from dart_cli.train.checkpoints import checkpoint as checkpoints
from dart_cli.train.checkpoints.checkpoint import load_newest
from dart_cli.train.checkpoints.identity import (
    STATE,
    CheckpointState,
    TrainedPart,
    TrainerProgress,
)
from dart_cli.train.learner import PolicyLearner
from dart_cli.train.process import run
from dart_cli.train.trained_policy import TrainModel
from dart_cli.weights.file import FileChannel, load
from dart_cli.weights.manifest import WEIGHTS, newest_version, read_manifest
from tests.steps import steps_of, with_changes, with_steps
from tests.train.parts import (
    PATIENCE_S,
    Data,
    another_run,
    final_weights,
    save,
    serving,
    train,
    versions,
)
from tests.waiting import until


async def test_a_run_announces_each_version_once_and_acknowledges_with_the_one_on_its_way(
    config: Config, batches: list[Batch]
) -> None:
    data = Data(batches)
    await train(config, data)
    kinds = [type(message).__name__ for message in data.heard]
    assert kinds[:2] == ["TrainerHello", "WeightsPublished"]
    requests = [kind for kind in kinds if kind in ("BatchRequest", "BatchTrained")]
    assert requests == ["BatchRequest", "BatchTrained"] * 4
    assert kinds[-2:] == ["WeightsPublished", "BatchTrained"]
    assert versions(data) == [0, 1, 2, 3, 4]
    acknowledged = data.of(BatchTrained)
    assert [(m.batch_id, m.policy_version) for m in acknowledged] == [
        (number, number) for number in (1, 2, 3, 4)
    ]
    published = newest_version(config.run.dir / "weights")
    assert published is not None
    loaded = load(published.path, final_weights(config))
    assert all(torch.equal(loaded[name], value) for name, value in final_weights(config).items())


@pytest.mark.parametrize(
    "weights",
    [WeightsConfig(), WeightsConfig(channel="gloo")],
    ids=["file", "gloo"],
)
async def test_whatever_the_channel_the_last_weights_are_whole_on_disk_at_the_end(
    config: Config, batches: list[Batch], weights: WeightsConfig
) -> None:
    config = config.model_copy(update={"weights": weights})
    data = Data(batches)
    await train(config, data)
    assert versions(data) == [0, 1, 2, 3, 4]
    published = newest_version(config.run.dir / "weights")
    assert published is not None
    assert published.policy_version == 4
    assert (published.path / WEIGHTS).is_file()
    loaded = load(published.path, final_weights(config))
    assert all(torch.equal(loaded[name], value) for name, value in final_weights(config).items())
    assert not any(path.is_symlink() for path in (config.run.dir / "weights").glob("**/*"))


async def test_an_acknowledgement_carries_the_metrics_that_are_documented(
    config: Config, batches: list[Batch]
) -> None:
    data = Data(batches)
    await train(config, data)
    page = (Path(__file__).parents[2] / "docs" / "objective.md").read_text(encoding="utf-8")
    _, _, metrics = page.partition("## Metrics of an update")
    rows = re.findall(r"^\| (`.*`) \|", metrics, re.MULTILINE)
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert all(message.mismatches for message in data.of(BatchTrained))  # type: ignore[attr-defined]
    sent = [message.metrics.keys() for message in data.of(BatchTrained)]  # type: ignore[attr-defined]
    assert len(sent) == 4
    for names in sent:
        assert names <= documented
        # What a batch may lack: tokens of the present weights, or of others; a look; a critic; a teacher; experts.
        lacked = (
            "parity_",
            "stale_",
            "sees",
            "baseline_",
            "critic_",
            "teacher_",
            "taught_",
            "routing_",
        )
        assert all(name.startswith(lacked) for name in documented - names)
    events = list((config.run.dir / "tensorboard").iterdir())
    assert events
    assert all(path.stat().st_size > 0 for path in events)


async def test_metrics_of_a_batch_that_is_trained_on_again_have_names_of_their_own(
    config: Config, batches: list[Batch]
) -> None:
    config = config.model_copy(update={"train": config.train.model_copy(update={"reuse": 1})})
    data = Data([*batches[:3], batches[3].model_copy(update={"reuse": 1})])
    await train(config, data)
    *_, fresh, replayed = (message.metrics for message in data.of(BatchTrained))  # type: ignore[attr-defined]
    shared = {name for name in replayed if not name.startswith("replay_")}
    assert shared == {name for name in fresh if name.endswith("_s") or name == "lr"}
    unshared = {name for name in fresh if name not in shared and not name.startswith("stale_")}
    assert {f"replay_{name}" for name in unshared} <= replayed.keys()


@pytest.mark.parametrize("reuse", [0, 1])
async def test_only_fresh_batches_that_are_skipped_in_a_row_end_a_run(
    config: Config, batches: list[Batch], monkeypatch: pytest.MonkeyPatch, reuse: int
) -> None:
    monkeypatch.setattr(loop, "MOST_SKIPPED", 3)

    def empty(batch: Batch) -> Batch:
        samples = [sample.model_copy(update={"weight": 0.0}) for sample in batch.samples]
        return batch.model_copy(update={"samples": samples, "reuse": reuse})

    data = Data([batches[0], *map(empty, batches[1:])])
    if reuse:
        await train(config, data)
        assert len(data.of(BatchTrained)) == 4
    else:
        with pytest.raises(DartError, match="3 batches in a row were skipped"):
            await train(config, data)


@pytest.fixture(scope="module")
def straight(
    tiny_folder: Path, batches: list[Batch], make_config: Callable[[Path], Config]
) -> dict[str, torch.Tensor]:
    """The weights after four updates that nothing interrupted."""
    config = make_config(tiny_folder)
    learner = PolicyLearner(TrainModel.load(config), config.train)
    for index, batch in enumerate(batches):
        learner.update(batch, index)
    return learner.model.weights()


CRASHES = {
    "at the greeting": lambda m: isinstance(m, TrainerHello),
    "before the first weights are known": lambda m: isinstance(m, WeightsPublished),
    "with a batch asked for": lambda m: isinstance(m, BatchRequest) and m.policy_version == 2,
    "between checkpoint and publication": lambda m: (
        isinstance(m, WeightsPublished) and m.policy_version == 2
    ),
    "between publication and acknowledgement": lambda m: (
        isinstance(m, BatchTrained) and m.batch_id == 3
    ),
}


async def test_nothing_is_told_before_data_has_taken_the_settings(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, waits, plain = Data([]), asyncio.Event(), HeartbeatSender.waiting
    waited_for_it: list[bool] = []

    @contextlib.contextmanager
    def waiting(self: HeartbeatSender, what: str, *more: Any, **kwargs: Any) -> Iterator[None]:
        with plain(self, what, *more, **kwargs):
            if what == JOINING:
                waits.set()
            yield
        if what == JOINING:
            waited_for_it.append(data.joins.is_set())

    monkeypatch.setattr(HeartbeatSender, "waiting", waiting)
    none = another_run(config, "none", updates=0)
    data.joins.clear()
    training = asyncio.create_task(train(none, data))
    await waits.wait()
    assert data.heard == []
    data.joins.set()
    await training
    assert waited_for_it == [True]
    assert isinstance(data.heard[0], TrainerHello)


@pytest.mark.parametrize(
    ("where", "checkpoint_every"),
    [*((where, 2) for where in CRASHES), *((where, 1) for where in list(CRASHES)[3:])],
)
async def test_a_crash_anywhere_ends_in_the_same_weights_and_versions_only_rise(
    config: Config,
    batches: list[Batch],
    straight: dict[str, torch.Tensor],
    where: str,
    checkpoint_every: int,
) -> None:
    broken = another_run(config, "broken", checkpoint_every=checkpoint_every)
    before = Data(batches, CRASHES[where])
    await train(broken, before)
    assert before.crashed.is_set()
    after = Data(batches)
    await train(broken, after)
    final = final_weights(broken)
    assert all(torch.equal(final[name], value) for name, value in straight.items())
    numbers = versions(before, after)
    assert numbers == sorted(numbers)
    # A number never stands for two sets of weights: only that set may be published again.
    assert len(set(numbers)) >= len(numbers) - 1


async def test_a_checkpoint_in_flight_is_not_claimed_and_its_batches_are_trained_again(
    config: Config,
    batches: list[Batch],
    straight: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on, third = threading.Event(), asyncio.Event()
    original = checkpoints.write

    def slow(*args: object, **kwargs: object) -> dict[str, str]:
        digests = original(*args, **kwargs)  # type: ignore[arg-type]
        assert go_on.wait(PATIENCE_S)
        return digests

    class Noting(Data):
        async def handle(self, client: str, message: Request) -> Reply:
            if isinstance(message, BatchTrained) and message.batch_id == 3:
                third.set()
            return await super().handle(client, message)

    monkeypatch.setattr(checkpoints, "write", slow)
    first = another_run(config, "first", checkpoint_every=2)
    killed = another_run(config, "killed", checkpoint_every=2)
    before, after = Noting(batches), Data(batches)
    async with serving(first.run.dir, before), asyncio.timeout(PATIENCE_S):
        task = asyncio.create_task(run(first, asyncio.Event()))
        await third.wait()  # the checkpoint of batch 2 is still being written
        shutil.copytree(first.run.dir / "checkpoints", killed.run.dir / "checkpoints")
        go_on.set()
        await task
    assert [path.name for path in (killed.run.dir / "checkpoints").iterdir()] == [".c000002.draft"]
    published = before.of(WeightsPublished)
    after.known = max(published, key=lambda message: message.policy_version)  # type: ignore[attr-defined, assignment]
    await train(killed, after)  # what kill -9 at that moment leaves
    hello = after.heard[0]
    assert isinstance(hello, TrainerHello)
    assert (hello.last_batch_id, hello.updates) == (0, 0)
    assert [m.batch_id for m in after.of(BatchTrained)] == [1, 2, 3, 4]
    for failure in (first, killed):
        final = final_weights(failure)
        assert all(torch.equal(final[name], value) for name, value in straight.items())


async def test_a_checkpoint_that_cannot_be_written_ends_a_trainer_that_waits_for_a_batch(
    config: Config, batches: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = threading.Event()

    def full(*_: object, **__: object) -> dict[str, str]:
        assert waits.wait(PATIENCE_S)
        raise OSError(errno.ENOSPC, "No space left on device")

    class Empty(Data):
        async def handle(self, client: str, message: Request) -> Reply:
            if self.idle.is_set():
                waits.set()
            return await super().handle(client, message)

    monkeypatch.setattr(checkpoints, "write", full)
    with pytest.raises(CheckpointError, match=r"No space left.*; free space on its disk"):
        await train(config, Empty(batches[:1]))
    assert load_newest(config.run.dir / "checkpoints") is None


class Lead:
    """A learner of several ranks as the loop needs it; it records when they are told that rank 0 lives."""

    def __init__(self) -> None:
        self.gauges: dict[str, float] = {}
        self.beats = threading.Event()
        self.alone_at = ""

    def beat(self) -> None:
        self.beats.set()

    def begin_checkpoint(self, *_: object) -> None:
        """Do nothing: there are no other ranks."""

    @contextlib.contextmanager
    def alone(self, what: str) -> Iterator[None]:
        self.alone_at = what
        yield
        self.alone_at = ""


async def test_other_ranks_are_told_that_rank_0_lives_while_it_waits_for_a_checkpoint(
    config: Config, batches: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test also the last checkpoint, for which each run waits."""
    lead, make, write = Lead(), loop.Trainer._make_learner, checkpoints.write

    def made(self: loop.Trainer) -> object:
        self._lead = lead
        return make(self)

    def slow(*arguments: object, **others: object) -> object:
        lead.beats.clear()
        assert lead.beats.wait(PATIENCE_S), "no beat while a checkpoint is written"
        return write(*arguments, **others)

    monkeypatch.setattr(loop, "BEAT_S", 0.01)
    monkeypatch.setattr(loop.Trainer, "_make_learner", made)
    monkeypatch.setattr(checkpoints, "write", slow)
    await train(config, Data(batches))
    assert load_newest(config.run.dir / "checkpoints") is not None


async def test_other_ranks_are_told_what_rank_0_does_alone(
    config: Config, batches: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read or write the files of a whole model: ranks wait longer for that than for a command."""
    lead, make = Lead(), loop.Trainer._make_learner
    result: dict[str, set[str]] = {}

    def made(self: loop.Trainer) -> object:
        learner = make(self)
        self._lead = lead
        return learner

    def noting(place: object, name: str) -> None:
        function = getattr(place, name)

        def noted(*arguments: object, **others: object) -> object:
            result.setdefault(name, set()).add(lead.alone_at)
            return function(*arguments, **others)

        monkeypatch.setattr(place, name, noted)

    monkeypatch.setattr(loop.Trainer, "_make_learner", made)
    for place, names in {
        loop: ("identity_of", "load_newest"),
        FileChannel: ("resume", "publish", "close"),
    }.items():
        for name in names:
            noting(place, name)
    await train(config, Data(batches))
    reading, publishing = "reading the model folder and the checkpoints", "publishing its weights"
    assert result == {
        "identity_of": {reading},
        "load_newest": {reading},
        "resume": {publishing},
        "publish": {publishing},
        "close": {"bringing its weights and its last checkpoint to disk"},
    }


async def test_the_hello_names_what_the_checkpoint_holds(
    config: Config, batches: list[Batch]
) -> None:
    short = another_run(config, "short", updates=2, checkpoint_every=2)
    await train(short, Data(batches))
    longer = short.model_copy(update={"train": config.train})
    data = Data(batches)
    await train(longer, data)
    hello = data.heard[0]
    assert isinstance(hello, TrainerHello)
    assert (hello.last_batch_id, hello.updates, hello.policy_version) == (2, 2, 1)
    assert [m.batch_id for m in data.of(BatchTrained)] == [3, 4]


async def test_a_batch_that_is_in_the_weights_is_acknowledged_not_trained(
    config: Config, batches: list[Batch], straight: dict[str, torch.Tensor]
) -> None:
    class Forgetful(Data):
        async def handle(self, client: str, message: Request) -> Reply:
            requests = len(self.of(BatchRequest))
            if isinstance(message, BatchRequest) and requests == 1:
                self.heard.append(message)
                return BatchReply(batch=self.batches[0])
            return await super().handle(client, message)

    data = Forgetful(batches)
    await train(config, data)
    assert [m.batch_id for m in data.of(BatchTrained)] == [1, 1, 2, 3, 4]
    final = final_weights(config)
    assert all(torch.equal(final[name], value) for name, value in straight.items())


async def test_a_stop_ends_with_a_checkpoint_of_everything(
    config: Config, batches: list[Batch]
) -> None:
    config = another_run(config, "stopped", checkpoint_every=100, updates=100)
    data, stop = Data(batches[:3]), asyncio.Event()
    async with serving(config.run.dir, data), asyncio.timeout(PATIENCE_S):
        task = asyncio.create_task(run(config, stop))
        await data.idle.wait()
        stop.set()
        await task
    checkpoint = load_newest(config.run.dir / "checkpoints")
    assert checkpoint is not None
    assert checkpoint.progress.batches_trained == [1, 2, 3]


class Busy(Data):
    """A data service that is there, and takes longer to answer than an absent one is waited for."""

    async def handle(self, client: str, message: Request) -> Reply:
        if isinstance(message, WeightsPublished | BatchTrained) and self.trained:
            await asyncio.sleep(3 * data_client.LAST_REPORT_S)
        return await super().handle(client, message)


async def test_an_update_under_way_at_a_stop_is_announced_acknowledged_and_in_the_last_checkpoint(
    config: Config,
    batches: list[Batch],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(data_client, "LAST_REPORT_S", 0.2)
    caplog.set_level(logging.INFO)
    config = another_run(config, "stopped", checkpoint_every=100, updates=100)
    config = config.model_copy(update={"weights": WeightsConfig(publish_every=10)})
    shares = {"success": 0.25, "reward": 0.5}
    data, stop = Busy([batches[0], batches[1].model_copy(update=shares)]), asyncio.Event()
    update, here = PolicyLearner.update, asyncio.get_running_loop()

    def stop_within(learner: PolicyLearner, batch: Batch, *index: Any) -> Update:
        if batch.batch_id == 2:
            here.call_soon_threadsafe(stop.set)
        return update(learner, batch, *index)

    monkeypatch.setattr(PolicyLearner, "update", stop_within)
    async with serving(config.run.dir, data), asyncio.timeout(PATIENCE_S):
        await run(config, stop)
    assert [type(message) for message in data.heard[-2:]] == [WeightsPublished, BatchTrained]
    assert [message.updates for message in data.of(WeightsPublished)] == [0, 2]  # type: ignore[attr-defined]
    checkpoint = load_newest(config.run.dir / "checkpoints")
    assert checkpoint is not None
    assert (checkpoint.progress.updates, checkpoint.progress.policy_version) == (2, 1)
    assert "ends after its update on batch 2, within 900 s" in caplog.text
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
    lines = [re.sub(r"loss [\d.]+", "loss", each) for each in caplog.messages if "update" in each]
    assert any("batch 1: loss, success -, reward -, entropy" in each for each in lines)
    assert any("batch 2: loss, success 0.25, reward 0.50, entropy" in each for each in lines)


async def test_a_stop_while_it_waits_publishes_the_updates_that_no_version_has(
    config: Config, batches: list[Batch]
) -> None:
    config = another_run(config, "stopped", checkpoint_every=1, updates=100)
    config = config.model_copy(update={"weights": WeightsConfig(publish_every=10)})
    data, stop = Data(batches[:1]), asyncio.Event()
    async with serving(config.run.dir, data), asyncio.timeout(PATIENCE_S):
        task = asyncio.create_task(run(config, stop))
        await data.idle.wait()
        stop.set()
        await task
    assert [message.updates for message in data.of(WeightsPublished)] == [0, 1]  # type: ignore[attr-defined]


async def test_a_trainer_that_is_stopped_says_goodbye(config: Config) -> None:
    data, stop, endpoints = Data([]), asyncio.Event(), Endpoints(config.run.dir)
    with Forwarder(endpoints.address(TELEMETRY_IN), endpoints.address(TELEMETRY_OUT)):
        async with (
            serving(config.run.dir, data),
            asyncio.timeout(PATIENCE_S),
            Subscriber(endpoints.address(TELEMETRY_OUT), [Heartbeat]) as heartbeats,
        ):
            task = asyncio.create_task(run(config, stop))
            async for heartbeat in heartbeats:
                assert isinstance(heartbeat, Heartbeat)
                if heartbeat.state == "waiting":
                    stop.set()
                elif heartbeat.state == "stopping":
                    break
            await task


async def test_at_the_end_of_the_run_the_trainer_ends_and_does_not_hang(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop, "LOG_WAIT_S", 0.2)
    caplog.set_level(logging.INFO)
    data, endpoints = Data([]), Endpoints(config.run.dir)
    over = RunState(
        run_id="r", policy_version=0, weights_path="", stopping=True, reason="all updates done"
    )
    with Forwarder(endpoints.address(TELEMETRY_IN), endpoints.address(TELEMETRY_OUT)):
        async with (
            serving(config.run.dir, data),
            asyncio.timeout(PATIENCE_S),
            Publisher(endpoints.address(TELEMETRY_IN)) as publisher,
            Subscriber(endpoints.address(TELEMETRY_OUT), [Heartbeat]) as heartbeats,
        ):
            task = asyncio.create_task(run(config, asyncio.Event()))
            async for heartbeat in heartbeats:
                assert isinstance(heartbeat, Heartbeat)
                if "no group is complete" in heartbeat.waiting_for and heartbeat.waiting_s > 0.5:
                    break  # after many questions, which together are one wait
            assert (heartbeat.state, heartbeat.policy_version) == ("waiting", 0)
            while not task.done():
                publisher.publish(over)
                await asyncio.sleep(0.05)
            await task
    assert "is loaded, its weights are v0" in caplog.text
    assert "s for a batch: no group is complete" in caplog.text


async def test_the_trainer_waits_for_a_data_process_that_is_not_there_yet(
    config: Config,
    batches: list[Batch],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoints, "DEADLINE_S", 0.3)
    data = Data(batches)
    caplog.set_level("INFO")
    async with asyncio.timeout(PATIENCE_S):
        task = asyncio.create_task(run(config, asyncio.Event()))
        await until(lambda: "waits for dart data at ipc://" in caplog.text)
        assert not task.done()
        async with serving(config.run.dir, data):
            await task
    assert [m.batch_id for m in data.of(BatchTrained)] == [1, 2, 3, 4]


async def test_a_batch_of_another_model_ends_the_trainer_with_its_cause(
    config: Config, batches: list[Batch]
) -> None:
    step = with_changes(steps_of(batches[0])[0], token_ids=[10**6], behaviour_logprobs=[0.0])
    data = Data([with_steps(batches[0], [step])])
    with pytest.raises(ProtocolError, match="batch 1"):
        await train(config, data)


async def test_a_batch_that_data_cannot_send_ends_the_trainer_with_its_line(config: Config) -> None:
    class Refuses(Data):
        async def handle(self, client: str, message: Request) -> Reply:
            if isinstance(message, BatchRequest):
                raise ConfigError("batch 1 cannot be sent; lower data.groups_per_batch")
            return await super().handle(client, message)

    with pytest.raises(ConfigError, match=r"lower data\.groups_per_batch") as failure:
        await train(config, Refuses([]))
    assert failure.value.exit_code == 2


async def test_a_checkpoint_of_another_model_is_refused_with_the_cure(
    config: Config, batches: list[Batch]
) -> None:
    save(config.run.dir / "checkpoints", TrainerProgress(updates=1), {"w": torch.zeros(1)})
    with pytest.raises(ConfigError, match=r"choose another run\.dir") as refused:
        await train(config, Data(batches))
    assert refused.value.exit_code == 2  # no restart helps


def contents(run_dir: Path) -> dict[Path, bytes]:
    """The files of its checkpoints and weights."""
    folders = (run_dir / "checkpoints", run_dir / "weights")
    return {p: p.read_bytes() for folder in folders for p in folder.rglob("*") if p.is_file()}


async def test_the_settings_of_adapters_are_part_of_checkpoints_and_of_each_version(
    config: Config, batches: list[Batch]
) -> None:
    first, other = (
        config.model_copy(update={"model": config.model.model_copy(update={"lora": lora})})
        for lora in (LoraConfig(rank=2, alpha=4.0), LoraConfig(rank=2, alpha=8.0))
    )
    short = first.train.model_copy(update={"updates": 1})
    await train(first.model_copy(update={"train": short}), Data(batches))
    [checkpoint] = (config.run.dir / "checkpoints").iterdir()
    assert CheckpointState.model_validate_json(
        (checkpoint / STATE).read_text()
    ).trained == TrainedPart(lora=first.model.lora)
    weights = config.run.dir / "weights"
    assert [
        read_manifest(path).lora for path in weights.iterdir() if path.name.startswith("v")
    ] == [first.model.lora] * 2
    before = contents(config.run.dir)
    data = Data(batches)
    with pytest.raises(
        ConfigError, match=r"^model\.lora\.alpha = 8\.0, but it was 4\.0"
    ) as refused:
        await train(other, data)
    assert refused.value.exit_code == 2
    assert contents(config.run.dir) == before
    assert data.heard == [], "nothing was told to data"


async def test_a_trainer_whose_weights_were_deleted_goes_on_above_every_number_that_data_knows(
    config: Config, batches: list[Batch]
) -> None:
    short = another_run(config, "short", updates=2, checkpoint_every=2)
    first = Data(batches)
    await train(short, first)
    shutil.rmtree(short.run.dir / "weights")
    second = Data(batches)
    second.known = WeightsPublished(policy_version=9, path="gone", digest="d", updates=9)
    await train(short.model_copy(update={"train": config.train}), second)
    assert versions(first, second) == [0, 1, 2, 10, 11, 12]
    shares = [each.updates for each in second.of(WeightsPublished)]  # type: ignore[attr-defined]
    assert shares == [2, 3, 4]
