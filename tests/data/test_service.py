"""The service's promises, over real sockets and a real database."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import bus.codec
import bus.requests
from bus.errors import (
    CheckpointError,
    ConfigError,
    ProtocolError,
    RunDirectoryError,
    StoreError,
    TaskError,
)
from bus.messages import (
    Batch,
    BatchReply,
    BatchTrained,
    LeaseRequest,
    Message,
    Outcome,
    StopRequest,
)
from bus.weights import WeightsPublished
from dart_cli.algo.statistics import Z_95
from dart_cli.config.schema import Config
from dart_cli.config.task_split import training_tasks
from dart_cli.data import batches, next_batch, overview, progress, run_end, service
from dart_cli.data.batches import BatchPlan
from dart_cli.data.scheduler import make_scheduler
from dart_cli.data.store.open import open_reader, open_store
from dart_cli.data.store.reader import Reader
from dart_cli.runtime.background import background
from tests.data.client import Client, connect, serving
from tests.data.parts import (
    MIXED,
    pool_member,
    small_config,
    step_record,
    trajectory_end,
)
from tests.waiting import PATIENCE_S

DRAWN = 400
"""Trajectories among which each of two tasks surely has its newest ones."""

_PROCESS = """
import asyncio, pathlib, sys
from dart_cli.config.schema import Config
from dart_cli.data.service import run
config = Config.model_validate_json(pathlib.Path(sys.argv[1]).read_text())
asyncio.run(run(config, asyncio.Event()))
"""


class Processes:
    """`dart data` as a process of its own that can be killed and started again."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._file = folder / "config.json"
        self._file.write_text(config.model_dump_json())
        self.start()

    def start(self) -> None:
        """Start one."""
        self._process = subprocess.Popen([sys.executable, "-c", _PROCESS, str(self._file)])

    def kill(self) -> None:
        """kill -9."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(PATIENCE_S)


@pytest.fixture
def processes(config: Config, tmp_path: Path) -> Iterator[Processes]:
    running = Processes(config, tmp_path)
    yield running
    running.kill()


async def train(client: Client, version: int) -> int:
    """Take a batch and acknowledge it; returns its id."""
    batch = await client.must_batch(version)
    done = BatchTrained(batch_id=batch.batch_id, policy_version=version + 1, metrics={"loss": 0.5})
    assert (await client.tell(done)).accepted
    return batch.batch_id


async def test_a_run_from_lease_to_trained(config: Config) -> None:
    async with serving(config) as client:
        assert (await client.greet(0)).policy_version == -1
        for version in range(2):
            groups = [await client.play_group(MIXED, version=version) for _ in range(2)]
            batch = await client.must_batch(version)
            assert batch.group_ids == groups
            assert batch.reward == 0.5
            await client.eventually(lambda seen, batch=batch: seen.success == batch.success)  # type: ignore[misc]
            assert set(batch.images) == {h for s in batch.samples for h in batch.image_hashes(s)}
            assert await train(client, version) == version + 1
    with open_reader(config.run.dir) as reader:
        assert {t.state for t in reader.trajectories()} == {"trained"}
        assert len(reader.metrics("loss")) == 2


async def test_what_is_acknowledged_is_durable(config: Config) -> None:
    async with serving(config) as client:
        lease = await client.must_lease(0)
        with open_reader(config.run.dir) as reader:
            assert [t.id for t in reader.trajectories()] == [lease.trajectory_id]
            for step in range(5):
                await client.tell(step_record(lease.trajectory_id, step))
                assert len(reader.steps(lease.trajectory_id)) == step + 1
            await client.tell(trajectory_end(lease.trajectory_id, 5))
            [row] = reader.trajectories(state="finished")
            assert row.outcome == "pass"


async def test_a_held_batch_request_is_answered_the_moment_a_batch_is_ready(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "HOLD_S", 2 * PATIENCE_S)
    async with serving(config) as client:
        held = asyncio.create_task(client.batch())
        for _ in range(2):
            await client.play_group(MIXED)
        reply = await held
        assert reply.batch is not None


@pytest.mark.usefixtures("short_holds")
async def test_steps_are_acknowledged_while_a_slow_batch_is_loaded_once(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    loaded: list[int] = []
    original = next_batch.load

    def slow(reader: Reader, plan: BatchPlan) -> Batch:
        loaded.append(plan.batch_id)
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return original(reader, plan)

    monkeypatch.setattr(next_batch, "load", slow)
    async with serving(config) as client:
        for _ in range(config.data.groups_per_batch):
            await client.play_group(MIXED)
        first = asyncio.create_task(client.must_batch())
        assert await asyncio.to_thread(begun.wait, PATIENCE_S)
        again = asyncio.create_task(client.must_batch())  # the trainer asks again meanwhile
        lease = await client.must_lease(0)
        await client.submit(lease, "pass", steps=3)
        with open_reader(config.run.dir) as reader:
            assert reader.batches() == []  # nothing is filed before it is known to fit
        assert not first.done()
        assert not again.done()
        go_on.set()
        assert (await first).batch_id == (await again).batch_id == 1
        assert len((await first).images) > 0
        assert loaded == [1]


async def test_steps_are_acknowledged_while_a_batch_is_encoded(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(message: Message) -> list[bytes]:
        if isinstance(message, BatchReply) and message.batch is not None:
            begun.set()
            assert go_on.wait(PATIENCE_S)
        return bus.codec.encode(message)

    monkeypatch.setattr(bus.requests, "encode", slow)
    async with serving(config) as client:
        for _ in range(config.data.groups_per_batch):
            await client.play_group(MIXED)
        batch = asyncio.create_task(client.must_batch())
        assert await asyncio.to_thread(begun.wait, PATIENCE_S)
        await client.submit(await client.must_lease(0), "pass", steps=3)
        assert not batch.done()
        go_on.set()
        assert (await batch).batch_id == 1


async def test_a_batch_whose_trainer_begins_elsewhere_while_it_is_loaded_is_not_served(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    original = next_batch.load

    def slow(reader: Reader, plan: BatchPlan) -> Batch:
        if plan.batch_id == 2 and not begun.is_set():
            begun.set()
            assert go_on.wait(PATIENCE_S)
        return original(reader, plan)

    async with serving(config) as client:
        for version in range(2):
            if version:
                await train(client, 0)
            for _ in range(config.data.groups_per_batch):
                await client.play_group(MIXED, version=version)
        monkeypatch.setattr(next_batch, "load", slow)
        asked = asyncio.create_task(client.must_batch(1))
        assert await asyncio.to_thread(begun.wait, PATIENCE_S)
        await client.greet(0)  # from before batch 1
        go_on.set()
        assert (await asked).batch_id == 1
        assert (await client.must_batch(1)).batch_id == 1


async def test_a_request_that_cannot_be_answered_returns_what_it_waits_for(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "HOLD_S", 0.1)
    async with serving(config) as client:
        slots = config.data.max_open_groups * config.data.group_size
        for slot in range(slots):
            assert (await client.lease(slot)).lease
        refused = await client.lease(slots)
        assert refused.lease is None
        assert "max_open_groups = 6" in refused.reason
        waiting = await client.batch()
        assert waiting.reason == "0 of 2 groups with a gradient are ready, 6 more play"


async def test_an_unacknowledged_batch_is_served_again_after_a_restart(config: Config) -> None:
    async with serving(config) as client:
        for _ in range(2):
            await client.play_group(MIXED)
        before = await client.must_batch()
    async with serving(config) as client:
        assert await client.must_batch() == before


def batches_hold(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch may have so many bytes."""
    limits = replace(bus.codec.BATCH_LIMITS, total_bytes=most)
    monkeypatch.setattr(bus.codec, "BATCH_LIMITS", limits)


async def test_a_batch_too_large_to_send_is_refused_with_the_cure_and_the_cure_works(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    batches_hold(10_000, monkeypatch)  # of its 16 screenshots each has 1,284
    async with serving(config) as client:
        groups = [await client.play_group(MIXED) for _ in range(2)]
        with caplog.at_level(logging.WARNING, "dart_cli.data.service"):
            for _ in range(2):
                with pytest.raises(ConfigError) as refused:
                    await client.batch()
        line = str(refused.value)
        assert line.startswith("batch 1 of 2 groups, 16 steps and 16 screenshots cannot be sent")
        assert "bytes in all, limit 10000; lower data.groups_per_batch, now 2" in line
        assert len(line.splitlines()) == 1
        assert line in caplog.text
        await client.eventually(lambda seen: seen.groups.ready == 2)
    with open_reader(config.run.dir) as reader:
        assert {group.state for group in reader.groups()} == {"ready"}
        assert reader.batches() == []
    batches_hold(15_000, monkeypatch)
    async with serving(small_config(config.run.dir, groups_per_batch=1)) as client:
        for batch_id, group in enumerate(groups, start=1):
            assert (await client.must_batch(batch_id - 1)).group_ids == [group]
            assert await train(client, batch_id - 1) == batch_id


async def test_a_batch_that_was_filed_too_large_is_refused_with_another_cure(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(config) as client:
        for _ in range(2):
            await client.play_group(MIXED)
        await client.must_batch()
    batches_hold(10_000, monkeypatch)
    async with serving(config) as client:
        with pytest.raises(ConfigError, match=r"limit 10000; .*choose another run\.dir"):
            await client.batch()


async def test_open_groups_go_on_after_a_restart(config: Config) -> None:
    async with serving(config) as client:
        leases = [await client.must_lease(slot) for slot in range(4)]
        await client.submit(leases[0], "pass")
        await client.tell(step_record(leases[1].trajectory_id, 0))
    async with serving(config) as client:
        await client.tell(step_record(leases[1].trajectory_id, 1))
        await client.tell(trajectory_end(leases[1].trajectory_id, 2, "fail"))
        for lease in leases[2:]:
            await client.submit(lease, "fail")
        await client.play_group(MIXED)
        assert leases[0].group_id in (await client.must_batch()).group_ids


async def test_a_second_service_on_a_live_run_is_refused(config: Config) -> None:
    async with serving(config):
        with pytest.raises(RunDirectoryError, match=f"process {os.getpid()}"):
            await service.run(config, asyncio.Event())


async def test_faults_reach_the_asker_as_what_they_are(config: Config) -> None:
    async with serving(config) as client:
        with pytest.raises(TaskError, match="plays mini"):
            await client.requester.request(
                LeaseRequest(worker="env-0", slot=0, suites=["other"]), PATIENCE_S
            )
        with pytest.raises(CheckpointError, match="different runs"):
            await client.greet(9)
        lease = await client.must_lease(0)
        wrong = step_record(lease.trajectory_id, 0).model_copy(update={"image_hashes": ["0"]})
        with pytest.raises(ProtocolError, match="image_hashes"):
            await client.tell(wrong)
        assert (await client.tell(step_record(lease.trajectory_id, 0))).accepted


async def test_a_database_that_breaks_ends_the_service_and_acknowledges_nothing(
    config: Config,
) -> None:
    stop = asyncio.Event()
    with open_store(config.run.dir) as store:
        store.begin_run(0, "{}", [])
        tasks = training_tasks(config)
        live = service.DataService(config, store, tasks, make_scheduler(config, tasks))
        running = asyncio.create_task(live.serve(stop))
        async with connect(config) as client:
            lease = await client.must_lease(0)
            [size] = store._rows("PRAGMA page_count")
            store._connection.execute(f"PRAGMA max_page_count = {size['page_count']}")
            accepted: list[int] = []
            telling = asyncio.create_task(tell_steps(client, lease.trajectory_id, accepted))
            with pytest.raises(StoreError, match="free space"):
                await running
            telling.cancel()
            [told] = await asyncio.gather(telling, return_exceptions=True)
            assert isinstance(told, StoreError | asyncio.CancelledError)
    with open_reader(config.run.dir) as reader:
        assert accepted
        assert {step.step for step in reader.steps(lease.trajectory_id)} >= set(accepted)


async def tell_steps(client: Client, name: str, accepted: list[int]) -> None:
    for step in range(500):
        await client.tell(step_record(name, step))
        accepted.append(step)


@pytest.fixture
def time_to_be_heard(short_holds: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a run that is over last until `followed`, however busy the machine is."""
    monkeypatch.setattr(run_end, "STOP_LEAST_S", 2 * PATIENCE_S)
    monkeypatch.setattr(service, "DEAD_AFTER_S", 2 * PATIENCE_S)
    monkeypatch.setattr(run_end, "STOP_S", 2 * PATIENCE_S)


async def followed(running: asyncio.Task[None]) -> None:
    """Take the time to hear of the end from a run that is over, and wait for its process's end."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(run_end, "STOP_LEAST_S", 0.0)
        async with asyncio.timeout(PATIENCE_S):
            await running


@pytest.mark.usefixtures("time_to_be_heard")
async def test_the_run_ends_after_its_updates_and_all_processes_hear_of_it(config: Config) -> None:
    config = config.model_copy(update={"train": config.train.model_copy(update={"updates": 1})})
    running = asyncio.create_task(service.run(config, asyncio.Event()))
    async with connect(config) as client:
        for _ in range(2):
            await client.play_group(MIXED)
        await train(client, 0)
        reply = await client.lease(0)
        assert reply.lease is None
        assert reply.reason == "the run is over: 1 updates are done"
        state = await client.state()
        while not state.stopping:
            state = await client.state()
        assert state.reason == "1 updates are done"
        await followed(running)


@pytest.mark.usefixtures("time_to_be_heard")
async def test_the_run_ends_after_its_trajectories_of_any_outcome_and_stays_over(
    config: Config,
) -> None:
    config = config.model_copy(
        update={"train": config.train.model_copy(update={"max_trajectories": 6})}
    )
    running = asyncio.create_task(service.run(config, asyncio.Event()))
    async with connect(config) as client:
        await client.play_group(MIXED)
        await client.play(0, "fail")
        seen = await client.snapshot()
        assert (seen.ended_trajectories, seen.max_trajectories, seen.stopping) == (5, 6, False)
        lease = await client.must_lease(0)
        await client.tell(trajectory_end(lease.trajectory_id, 0, "invalid"))
        reply = await client.lease(0)
        assert reply.reason == "the run is over: 6 trajectories were played"
        await followed(running)
    running = asyncio.create_task(service.run(config, asyncio.Event()))
    async with connect(config) as client:
        assert (await client.lease(0)).reason == "the run is over: 6 trajectories were played"
        await followed(running)


@pytest.mark.usefixtures("short_holds")
async def test_a_run_ends_when_it_has_learned_stays_over_and_goes_on_for_more(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "NEWEST", 16)

    async def play(stop_at: float, most: int) -> list[str]:
        """Play trajectories that pass; why there were no more of them, if so."""
        train = config.train.model_copy(update={"stop_at": stop_at})
        async with serving(config.model_copy(update={"train": train})) as client:
            for _ in range(most):
                if (reply := await client.lease(0)).lease is None:
                    return [reply.reason]
                await client.submit(reply.lease, "pass", steps=1)
            return []

    assert await play(0.8, 12) == []  # a task has too few, whatever the other has
    [reason] = await play(0.8, DRAWN)
    assert "learned: success is at least 0.806 (train.stop_at = 0.8)" in reason
    with open_reader(config.run.dir) as reader:
        assert reader.run().learned == pytest.approx(16 / (16 + Z_95**2))
        played = reader.total("trajectories")
    for stop_at in (0.8, 0.5):
        [reason] = await play(stop_at, 1)
        assert "learned" in reason
    with open_reader(config.run.dir) as reader:
        assert reader.total("trajectories") == played
    for stop_at in (0.9, 0.0):  # more is asked for, or the rule is off
        assert await play(stop_at, 1) == []


@pytest.mark.usefixtures("time_to_be_heard")
async def test_what_is_ready_after_the_last_trajectory_is_trained_on_while_a_trainer_lives(
    config: Config,
) -> None:
    played = 2 * len(MIXED)  # two groups: a batch
    config = config.model_copy(
        update={"train": config.train.model_copy(update={"max_trajectories": played})}
    )
    running = asyncio.create_task(service.run(config, asyncio.Event()))
    async with connect(config) as client:
        await client.greet(0)
        await client.be_heard("train")
        for _ in range(2):
            await client.play_group(MIXED)
        seen = await client.snapshot()
        assert (seen.ended_trajectories, seen.stopping) == (played, False)
        assert await train(client, 0) == 1
        await client.until(lambda state: state.stopping)
        await followed(running)


async def test_a_run_also_ends_where_its_last_trajectory_was_lost_before_its_first_step(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process was replaced: nothing is in play, and nothing else tells of it."""
    monkeypatch.setattr(service, "HOUSEKEEPING_S", 0.05)
    config = config.model_copy(
        update={"train": config.train.model_copy(update={"max_trajectories": 1})}
    )
    running = asyncio.create_task(service.run(config, asyncio.Event()))
    async with connect(config) as client:
        assert (await client.lease(0, started_at=1.0)).lease
        assert (await client.lease(0, started_at=2.0)).lease is None
        await followed(running)


async def beat(client: Client) -> None:
    """An environment that is heard again and again."""
    while True:
        client.beat([])
        await asyncio.sleep(0.05)


@pytest.mark.usefixtures("time_to_be_heard")
async def test_a_stop_request_ends_the_run_but_not_before_the_others_have_left(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = asyncio.create_task(service.run(config, asyncio.Event()))
    async with connect(config) as client:
        lease = await client.must_lease(0)
        async with background(beat(client)):
            await client.tell(StopRequest(reason="enough"))
            assert (await client.lease(1)).reason == "the run is over: enough"
            await client.submit(lease, "pass")  # what is in play may still be submitted
            monkeypatch.setattr(
                run_end, "STOP_LEAST_S", 1.0
            )  # twenty times as long as between beats
            await asyncio.sleep(run_end.STOP_LEAST_S + 0.5)
            assert not running.done()
        await followed(running)
    with open_reader(config.run.dir) as reader:
        assert [t.id for t in reader.trajectories(state="finished")] == [lease.trajectory_id]


@pytest.mark.usefixtures("time_to_be_heard")
async def test_a_stop_request_outlives_kill_9_and_then_lets_the_run_go_on(
    config: Config, processes: Processes
) -> None:
    async with connect(config) as client:
        await client.tell(StopRequest(reason="enough"))
        await asyncio.to_thread(processes.kill)
    running = asyncio.create_task(service.run(config, asyncio.Event()))
    async with connect(config) as client:
        state = await client.state()
        assert (state.stopping, state.reason) == (True, "enough")
    await followed(running)
    async with serving(config) as client:
        assert not (await client.state()).stopping
        await client.must_lease(0)


async def test_stopping_the_process_does_not_stop_the_run(config: Config) -> None:
    async with serving(config) as client:
        lease = await client.must_lease(0)
    async with serving(config) as client:
        assert not (await client.state()).stopping
        await client.submit(lease, "pass")


@pytest.mark.usefixtures("short_holds")
async def test_the_database_stays_within_its_bound_as_far_as_training_allows(
    config: Config,
) -> None:
    config = config.model_copy(update={"data": config.data.model_copy(update={"max_gb": 1e-6})})
    async with serving(config) as client:
        failed = await client.play_group(["fail"] * 4)
        needed = await client.play_group(MIXED)
        seen = await client.eventually(lambda seen: any("max_gb" in w for w in seen.warnings))
        assert seen.groups.ready == 1
        with open_reader(config.run.dir) as reader:
            screens = {
                group: reader.screenshots(
                    step.screenshot
                    for trajectory in reader.trajectories(group_ids=[group])
                    for step in reader.steps(trajectory.id)
                )
                for group in (failed, needed)
            }
        assert [len(found) for found in screens.values()] == [0, 8]


async def test_new_weights_are_announced_at_once_and_after_a_restart(config: Config) -> None:
    async with serving(config) as client:
        assert (await client.state()).policy_version == -1
        await client.tell(WeightsPublished(policy_version=3, path="w/3", digest="d", updates=3))
        state = await client.state()
        while state.policy_version == -1:
            state = await client.state()
        assert (state.policy_version, state.weights_path) == (3, "w/3")
    async with serving(config) as client:
        assert (await client.state()).policy_version == 3


async def test_the_snapshot_shows_the_state_of_the_run(config: Config) -> None:
    async with serving(config) as client:
        await client.play_group(MIXED)
        await client.play_group(["fail"] * 4)
        await client.play_group(MIXED)
        await train(client, 0)
        await client.tell(WeightsPublished(policy_version=1, path="w", digest="d", updates=1))
        await client.must_lease(0)
        await client.be_heard("env-0")
        seen = await client.snapshot()
    assert (seen.updates, seen.updates_total, seen.policy_version) == (1, 200, 1)
    assert seen.trajectories == {"trained": 8, "dropped": 4, "leased": 1}
    assert seen.dropped == {"all_fail": 4}
    assert seen.verdicts == {"pass": 4, "fail": 8, "invalid": 0}
    groups = seen.groups
    assert (groups.open, groups.ready, groups.trained, groups.limit) == (1, 0, 2, 6)
    assert groups.dropped == {"all_fail": 1}
    assert sum(task.trajectories for task in seen.tasks) == 12
    assert sum(task.weight for task in seen.tasks) == pytest.approx(1.0)
    played = [task.passed / task.trajectories for task in seen.tasks if task.trajectories]
    assert seen.success_curve[0] == pytest.approx(sum(played) / len(played))
    assert seen.metrics == {"loss": 0.5, "reward": 0.5}
    assert seen.staleness.histogram == {0: 48}
    assert seen.rates.trajectories > 0


@pytest.mark.usefixtures("short_holds")
async def test_a_role_that_fell_silent_is_a_stall_and_only_one_that_was_never_heard_is_missing(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "DEAD_AFTER_S", 0.5)
    async with serving(config) as client:
        assert (await client.snapshot()).warnings == [], "the others may not be connected yet"
        monkeypatch.setattr(overview, "HEARD_AFTER_S", 0.0)
        await client.be_heard("rollout-0", version=0)
        (config.run.dir / "workers").mkdir(mode=0o700, exist_ok=True)
        (config.run.dir / "workers" / "train.lock").write_text("4194303\nno room")
        seen = await client.eventually(lambda seen: any(s.who == "rollout-0" for s in seen.stalls))
    assert seen.warnings == [
        "waits for dart env: start `dart env CONFIG`",
        "waits for dart train: start `dart train CONFIG`; train has ended: no room",
    ]


async def test_a_success_from_outside_makes_a_failed_group_a_batch(config: Config) -> None:
    data = config.data.model_copy(update={"pool_ratio": 0.2, "high_entropy": 0.5})
    config = config.model_copy(update={"data": data})
    with open_store(config.run.dir) as store:
        for task_id in config.env.tasks:
            store.add_pool_member(*pool_member(f"x{task_id}", task_id=task_id))
    async with serving(config) as client:
        await client.play_group(["fail"] * 4)
        await client.play_group(["fail"] * 4)
        batch = await client.must_batch()
        outside = [each for each in batch.samples if each.trajectory_id.startswith("x")]
        assert len(outside) == 4
        assert all(not each.behaviour_logprobs and not each.version_spans for each in outside)
        assert all(each.advantage > 0 for each in outside)
        done = BatchTrained(batch_id=batch.batch_id, policy_version=1, metrics={})
        assert (await client.tell(done)).accepted
        seen = await client.eventually(lambda seen: "pool_tokens" in seen.metrics)
        assert seen.groups.pool == 2
        assert seen.metrics["pool_tokens"] == pytest.approx(4 / len(batch.samples))
        assert seen.metrics["steps_left_out"] == pytest.approx(1 - len(batch.samples) / 20)
        assert seen.verdicts["pass"] == 0


async def test_kill_9_loses_nothing_acknowledged_and_clients_go_on(
    config: Config, processes: Processes
) -> None:
    acknowledged: list[str] = []
    submitted: asyncio.Queue[str] = asyncio.Queue()
    enough = 40

    async def slot(client: Client, number: int) -> None:
        while len(acknowledged) < enough:
            lease = await client.must_lease(number)
            for step in range(3):
                await client.tell(step_record(lease.trajectory_id, step))
            outcome: Outcome = "pass" if number % 2 else "fail"
            ack = await client.tell(trajectory_end(lease.trajectory_id, 3, outcome))
            if ack.accepted:
                acknowledged.append(lease.trajectory_id)
                submitted.put_nowait(lease.trajectory_id)

    async def trainer(client: Client) -> None:
        version = 0
        while len(acknowledged) < enough:
            reply = await client.batch(version)
            if reply.batch is not None:
                version += 1
                done = BatchTrained(
                    batch_id=reply.batch.batch_id, policy_version=version, metrics={}
                )
                assert (await client.tell(done)).accepted

    async def killer() -> None:
        for _ in range(3):
            for _ in range(enough // 4):
                await submitted.get()
            await asyncio.to_thread(processes.kill)
            processes.start()

    async with connect(config) as client:
        await asyncio.gather(trainer(client), killer(), *(slot(client, i) for i in range(4)))
    processes.kill()
    with open_reader(config.run.dir) as reader:
        for name in acknowledged:
            row = reader.trajectory(name)
            assert row is not None
            assert row.outcome in ("pass", "fail")
            assert [step.step for step in reader.steps(name)] == [0, 1, 2]
        sampled = [
            (sample.trajectory_id, sample.step)
            for batch in reader.batches()
            for sample in reader.batch_steps(batch.id)
        ]
        assert len(sampled) == len(set(sampled))


def on_policy(config: Config, **train: object) -> Config:
    """Each group is trained on by the very weights that played it, and each batch once more."""
    return config.model_copy(
        update={
            "data": config.data.model_copy(update={"max_staleness": 0, "max_open_groups": 0}),
            "train": config.train.model_copy(update={"reuse": 1, **train}),
        }
    )


async def test_a_batch_is_trained_on_again_by_a_service_that_was_started_again(
    config: Config,
) -> None:
    config = on_policy(config)
    served: list[Batch] = []
    for version in range(5):
        async with serving(config) as client:
            if version in (0, 1, 3):
                for _ in range(config.data.groups_per_batch):
                    await client.play_group(MIXED, version=version)
            served.append(await client.must_batch(version))
            assert await train(client, version) == version + 1
    assert [batch.reuse for batch in served] == [0, 0, 1, 0, 1]
    assert served[2].samples == served[0].samples
    assert served[2].images == served[0].images
    assert served[4].samples == served[1].samples


async def test_a_slot_that_waits_for_a_replay_plays_the_moment_it_is_refused(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "HOLD_S", 2 * PATIENCE_S)
    monkeypatch.setattr(service, "SNAPSHOT_S", 0.0)
    monkeypatch.setattr(batches, "most_behind", lambda **_: -1)  # any batch is too old
    config = on_policy(config)
    async with serving(config) as client:
        for version in range(2):
            for _ in range(config.data.groups_per_batch):
                await client.play_group(MIXED, version=version)
            await train(client, version)
        held = asyncio.create_task(client.lease(0))
        await client.eventually(lambda seen: seen.queues.free_slots == 1)
        assert not held.done()
        asked = asyncio.create_task(client.batch(2))
        assert (await held).lease is not None
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
    with open_reader(config.run.dir) as reader:
        assert reader.refused_replays() == {1: "stale"}
