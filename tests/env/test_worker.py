"""Promises of `dart env`: the whole process, with a small data server and rollout over sockets."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bus.endpoints import DATA, TELEMETRY_IN, TELEMETRY_OUT
from bus.errors import EnvError, RefusedError, StoreError, TaskError
from bus.messages import (
    Ack,
    ActRequest,
    Completion,
    Heartbeat,
    JoinReply,
    JoinRequest,
    LeaseReply,
    LeaseRequest,
    Reply,
    Request,
    RunState,
    StepRecord,
    TrajectoryEnd,
)
from bus.pubsub import Forwarder, Publisher, Subscriber
from bus.requests import Replier
from dart_cli.config import endpoints
from dart_cli.config.endpoints import run_endpoints
from dart_cli.config.schema import Config
from dart_cli.engines.scripted import ScriptedEngine, ScriptedResponder, random_clicks
from dart_cli.env import async_env, carriers, data_client, worker
from envs.suites.osworld.provider import BootGate
from tests.env.gated_suite import SUITE as GATED
from tests.env.parts import heartbeat, lease
from tests.env.scored_suite import SUITE as SCORED
from tests.env.unruly_suite import SUITE
from tests.waiting import PATIENCE_S, until


def run_state(*, suspended: bool = False, stopping: bool = False) -> RunState:
    return RunState(
        run_id="r",
        policy_version=1,
        weights_path="",
        stopping=stopping,
        reason="200 updates done" if stopping else "",
        suspended=suspended,
    )


class Data:
    """As much of the data process as an env process sees: telemetry, leases, hand-ins."""

    def __init__(self, config: Config) -> None:
        endpoints = run_endpoints(config)
        inlet = endpoints.address(TELEMETRY_IN)
        self.forwarder = Forwarder(inlet, endpoints.address(TELEMETRY_OUT))
        self.publisher = Publisher(inlet)
        self.subscriber = Subscriber(endpoints.address(TELEMETRY_OUT), [Heartbeat])
        self.heartbeats: list[Heartbeat] = []
        self.listening = asyncio.create_task(self.listen())
        self.replier = Replier(endpoints.address(DATA))
        self.serving = asyncio.create_task(self.replier.serve(self.handle))
        self.leased = 0
        self.leased_of: Counter[int] = Counter()  # by slot
        self.started_at: set[float] = set()  # as requests for leases say
        self.leases_left = 1000
        self.take_back = False  # the next lease that has come to its second step
        self.too_late: set[str] = set()  # trajectories whose end is not accepted
        self.steps: list[StepRecord] = []
        self.ends: list[TrajectoryEnd] = []
        self.refuse: tuple[type[Request], Exception] | None = None  # the next of that kind
        self.task_id = "mini/click"
        self.misfits: list[str] = []  # tasks that are leased before
        self.misfit_of: dict[int, str] = {}  # slot -> the task that it is leased

    async def listen(self) -> None:
        async for message in self.subscriber:
            assert isinstance(message, Heartbeat)
            if message.role == "env":
                self.heartbeats.append(message)

    async def handle(self, client: str, request: Request) -> Reply:
        if isinstance(request, JoinRequest):
            return JoinReply()
        if self.refuse is not None and isinstance(request, self.refuse[0]):
            (_, error), self.refuse = self.refuse, None
            raise error
        if isinstance(request, LeaseRequest):
            if self.leased >= self.leases_left:
                return LeaseReply(retry_after_s=0.05, reason="all groups are open")
            self.leased += 1
            self.started_at.add(request.started_at)
            task_id = self.misfits.pop(0) if self.misfits else self.task_id
            task_id = self.misfit_of.get(request.slot, task_id)
            self.leased_of[request.slot] += 1
            suite = request.suites[0]
            one_lease = lease(task_id, seed=self.leased).model_copy(update={"suite": suite})
            return LeaseReply(lease=one_lease)
        if isinstance(request, StepRecord):
            self.steps.append(request)
            if self.take_back and request.step == 1:
                self.take_back = False
                return Ack(accepted=False, note="its group is complete")
        else:
            assert isinstance(request, TrajectoryEnd)
            self.ends.append(request)
            if request.trajectory_id in self.too_late:
                return Ack(accepted=False, note="it was dropped: surplus")
        return Ack()

    def gauge(self, name: str) -> float:
        """As the newest heartbeat has it."""
        return self.heartbeats[-1].gauges[name] if self.heartbeats else math.nan

    def stands_still(self) -> bool:
        """Whether all three slots wait for the model, and have since the heartbeat before."""
        newest = [beat.gauges for beat in self.heartbeats[-2:]]
        last = [(gauges["waiting_model"], gauges["steps"]) for gauges in newest]
        return len(last) == 2 and last[0] == last[1] and last[0][0] == 3

    async def tell(self, *, suspended: bool) -> None:
        """Publish the run's state until all env processes must have received it."""
        for _ in range(20):
            self.publisher.publish(run_state(suspended=suspended))
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        self.listening.cancel()
        self.subscriber.close()
        await self.replier.close(linger_s=0)
        await self.serving
        self.publisher.close()
        self.forwarder.close()


class Rollout:
    """A rollout worker with a scripted engine: clicks anywhere."""

    def __init__(self, config: Config) -> None:
        self.responder = ScriptedResponder(ScriptedEngine(random_clicks("compact")))
        self.silent = asyncio.Event()
        self.requests = 0
        self.replier = Replier(run_endpoints(config).address("rollout-0"))
        self.tasks = [
            asyncio.create_task(self.replier.serve(self.answer)),
            asyncio.create_task(self.beat(config)),
        ]

    async def answer(self, client: str, request: Request) -> Completion:
        assert isinstance(request, ActRequest)
        self.requests += 1
        if self.silent.is_set():
            await asyncio.Event().wait()
        return await self.responder.answer(request)

    async def beat(self, config: Config) -> None:
        async with Publisher(run_endpoints(config).address(TELEMETRY_IN)) as publisher:
            while True:
                publisher.publish(heartbeat("rollout-0", self.replier.endpoint))
                await asyncio.sleep(0.02)

    async def close(self) -> None:
        await self.replier.close(linger_s=0)
        self.tasks[1].cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@asynccontextmanager
async def env_process(config: Config, slots: int = 3) -> AsyncIterator[asyncio.Event]:
    stop = asyncio.Event()
    task = asyncio.create_task(worker.run(config, "env-0", slots, stop))
    try:
        yield stop
    finally:
        stop.set()
        async with asyncio.timeout(PATIENCE_S):
            await task


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": tmp_path / "run"},
            "env": {"suite": "mini", "slots": 3},
        }
    )


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "BACK_OFF_S", (0.05,))
    monkeypatch.setattr(endpoints, "DEADLINE_S", 1.0)


async def test_slots_play_leases_one_after_the_other_and_hand_everything_in(
    config: Config,
) -> None:
    data, rollout = Data(config), Rollout(config)
    async with env_process(config):
        await until(lambda: len(data.ends) >= 12)
    whole = [end for end in data.ends if end.stop_reason != "cancelled"]
    assert len({end.trajectory_id for end in whole}) == len(whole)
    for end in whole:
        steps = [record.step for record in data.steps if record.trajectory_id == end.trajectory_id]
        assert steps == list(range(end.steps)), "each step once, in order, before the end"
        assert end.outcome in ("pass", "fail")
    await rollout.close()
    await data.close()


async def test_processes_start_in_any_order_and_waits_are_reported(config: Config) -> None:
    async with env_process(config):
        data = Data(config)
        await until(lambda: data.heartbeats)
        await until(lambda: "start `dart rollout CONFIG`" in data.heartbeats[-1].waiting_for)
        assert data.heartbeats[-1].state == "waiting"
        assert data.leased == 0, "no lease is taken that cannot be played"
        rollout = Rollout(config)
        await until(lambda: data.ends)
    await rollout.close()
    await data.close()


async def test_a_missing_data_process_is_named(
    config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with env_process(config):
        await until(lambda: "waits for dart data at ipc://" in caplog.text)
    assert "start `dart data CONFIG`" in caplog.text


async def test_play_goes_on_when_data_is_restarted(config: Config) -> None:
    first, rollout = Data(config), Rollout(config)
    async with env_process(config):
        await until(lambda: first.ends)
        await first.close()
        second = Data(config)
        await until(lambda: len(second.ends) >= 3)
    trajectories = {record.trajectory_id for record in first.steps}
    assert any(record.trajectory_id in trajectories for record in second.steps + first.steps)
    await rollout.close()
    await second.close()


async def test_heartbeats_name_the_leases_in_play_and_the_load(config: Config) -> None:
    data, rollout = Data(config), Rollout(config)
    rollout.silent.set()
    async with env_process(config):
        await until(lambda: data.leased == 3)
        await until(lambda: data.heartbeats and len(data.heartbeats[-1].trajectories) == 3)
        last = data.heartbeats[-1]
        assert sorted(last.trajectories) == ["t-1", "t-2", "t-3"]
        assert last.state == "ready"
        assert (last.gauges["slots"], last.gauges["playing"], last.gauges["idle"]) == (3, 3, 0)
        assert last.gauges["waiting_model"] == 3
        assert last.waiting_for == "a completion from rollout-0"
    await rollout.close()
    await data.close()


async def test_a_stopped_process_gives_its_leases_back(config: Config) -> None:
    data, rollout = Data(config), Rollout(config)
    rollout.silent.set()
    async with env_process(config) as stop:
        await until(lambda: data.leased == 3)
        await until(lambda: data.heartbeats and len(data.heartbeats[-1].trajectories) == 3)
        stop.set()
        await until(lambda: len(data.ends) == 3)
    assert {(end.outcome, end.stop_reason) for end in data.ends} == {("invalid", "cancelled")}
    assert {end.trajectory_id for end in data.ends} == {"t-1", "t-2", "t-3"}
    await until(lambda: data.heartbeats[-1].state == "stopping")
    await rollout.close()
    await data.close()


async def test_the_process_ends_and_does_not_hang_when_the_run_is_over(config: Config) -> None:
    data, rollout = Data(config), Rollout(config)
    over = run_state(stopping=True)
    running = asyncio.create_task(worker.run(config, "env-0", 2, asyncio.Event()))
    await until(lambda: data.ends)
    async with asyncio.timeout(PATIENCE_S):
        while not running.done():
            data.publisher.publish(over)
            await asyncio.wait([running], timeout=0.05)
    await running
    await rollout.close()
    await data.close()


async def test_without_work_slots_ask_again_and_report_why_they_wait(config: Config) -> None:
    data, rollout = Data(config), Rollout(config)
    data.leases_left = 0
    async with env_process(config):
        await until(
            lambda: (
                data.heartbeats
                and data.heartbeats[-1].waiting_for
                == "a lease from the data service: all groups are open"
            )
        )
        await until(lambda: data.heartbeats[-1].waiting_s > 0.2)  # longer than a single question
        data.leases_left = 1000
        await until(lambda: data.ends)
    await rollout.close()
    await data.close()


async def test_a_refusal_by_data_costs_one_episode_and_no_slot(config: Config) -> None:
    data, rollout = Data(config), Rollout(config)
    async with env_process(config, slots=1):
        await until(lambda: data.ends)
        data.refuse = (StepRecord, RefusedError("a bug of data"))
        await until(lambda: data.refuse is None)
        before = len(data.ends)
        await until(lambda: len(data.ends) >= before + 2)
    await rollout.close()
    await data.close()


async def test_a_full_disk_of_data_costs_no_step_and_no_verdict(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_client, "STORE_PAUSE_S", 0.02)
    data, rollout = Data(config), Rollout(config)
    async with env_process(config, slots=1):
        for kind in (LeaseRequest, StepRecord, TrajectoryEnd):
            data.refuse = (kind, StoreError("disk full"))
            await until(lambda: data.refuse is None)
        whole = data.leased - 1  # the next one is leased only when all before are submitted
        await until(lambda: data.gauge("episodes") > whole)
        assert data.gauge("invalid") == 0
    steps_by_end = {
        end.trajectory_id: end.steps for end in data.ends if end.stop_reason != "cancelled"
    }
    assert {f"t-{number}" for number in range(1, whole + 1)} <= steps_by_end.keys()
    for name, steps in steps_by_end.items():
        filed = [record.step for record in data.steps if record.trajectory_id == name]
        assert filed == list(range(steps))
    await rollout.close()
    await data.close()


async def test_an_environment_that_breaks_gives_invalid_episodes_and_is_made_anew(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 0
    make_env = async_env.make_env

    def make_badly_at_first(suite: str, **options: object) -> object:
        nonlocal count
        count += 1
        if count == 1:
            raise ConnectionError("the container is away")
        return make_env(suite, **options)

    monkeypatch.setattr(async_env, "make_env", make_badly_at_first)
    data, rollout = Data(config), Rollout(config)
    async with env_process(config, slots=1):
        await until(lambda: len(data.ends) >= 3)
    assert (data.ends[0].outcome, data.ends[0].stop_reason) == ("invalid", "environment")
    assert "the container is away" in data.ends[0].reason
    assert {end.outcome for end in data.ends[1:3]} <= {"pass", "fail"}
    assert count == 2
    await rollout.close()
    await data.close()


async def test_an_unruly_environment_costs_its_slot_alone_which_is_restarted_and_counted(
    config: Config,
) -> None:
    env = {
        "suite": SUITE,
        "slots": 2,
        "reset_deadline_s": 0.3,
        "step_deadline_s": 0.3,
        "evaluate_deadline_s": 0.3,
    }
    config = config.model_copy(update={"env": config.env.model_copy(update=env)})
    data, rollout = Data(config), Rollout(config)
    data.task_id = "unruly/well"
    data.misfits = [
        f"unruly/{kind}"
        for kind in ("reset-hang", "step-exit", "evaluate-none", "step-hang", "reset-raise", "true")
    ]
    broken = len(data.misfits)
    async with env_process(config, slots=2):
        await until(lambda: len(data.ends) >= broken + 10)
        await until(lambda: data.gauge("restarts") == broken)
        assert data.gauge("hung") == 2
        assert data.gauge("invalid") == broken
    outcomes = [end.outcome for end in data.ends if end.stop_reason != "cancelled"]
    assert outcomes.count("invalid") == broken
    assert {"pass", "fail"} >= set(outcomes[-3:])
    await rollout.close()
    await data.close()


@pytest.fixture
def hanging(config: Config, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Two environments of a slot may hang."""
    for module in (carriers, async_env):
        monkeypatch.setattr(module, "MOST_HUNG", 2)
    monkeypatch.setattr(worker, "LOOK_S", 0.01)
    env = {"suite": SUITE, "slots": 3, "reset_deadline_s": 1.0}
    return config.model_copy(update={"env": config.env.model_copy(update=env)})


async def test_a_slot_whose_environments_hang_leases_nothing_more_and_the_others_play(
    hanging: Config,
) -> None:
    data, rollout = Data(hanging), Rollout(hanging)
    data.task_id, data.misfit_of = "unruly/well", {1: "unruly/reset-hang"}
    async with env_process(hanging):
        await until(lambda: data.gauge("hung") >= 2)
        before = len(data.ends)
        await until(lambda: len(data.ends) >= before + 10)
        assert data.leased_of[1] == 2
        waits = {wait.what for beat in data.heartbeats[-1:] for wait in beat.waits}
        assert "an environment of env-0/1 to return" in waits
    await rollout.close()
    await data.close()


async def test_a_process_most_of_whose_slots_are_stuck_ends_with_an_error(
    hanging: Config,
) -> None:
    data, rollout = Data(hanging), Rollout(hanging)
    data.task_id = "unruly/well"
    data.misfit_of = dict.fromkeys((0, 2), "unruly/reset-hang")
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(
            EnvError, match=r"most slots of env-0, e\.g\. env-0/0: 2 of its env.*hang"
        ):
            await worker.run(hanging, "env-0", 3, asyncio.Event())
    assert (data.leased_of[0], data.leased_of[2]) == (2, 2)
    assert data.heartbeats[-1].state != "stopping"  # it is missed
    await rollout.close()
    await data.close()


async def test_an_environment_that_the_action_broke_has_failed_and_is_made_anew_without_a_pause(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "BACK_OFF_S", (3600.0,))
    config = config.model_copy(
        update={"env": config.env.model_copy(update={"suite": SCORED, "slots": 1})}
    )
    data, rollout = Data(config), Rollout(config)
    data.task_id = "scored/breaks"
    async with env_process(config, slots=1):
        await until(lambda: len(data.ends) >= 4)
        await until(lambda: data.gauge("restarts") >= 3)
    ends = [end for end in data.ends if end.stop_reason != "cancelled"]
    assert {(end.outcome, end.stop_reason, end.reward) for end in ends} == {("fail", "broken", 0.0)}
    assert data.started_at == {data.heartbeats[0].started_at}
    await rollout.close()
    await data.close()


async def test_an_environment_that_kills_its_own_process_costs_its_slot_alone(
    config: Config,
) -> None:
    env = {"suite": SUITE, "slots": 2, "isolation": "process"}
    config = config.model_copy(update={"env": config.env.model_copy(update=env)})
    data, rollout = Data(config), Rollout(config)
    data.task_id = "unruly/well"
    data.misfits = ["unruly/step-die", "unruly/step-raise"]
    async with env_process(config, slots=2):
        await until(lambda: len(data.ends) >= 8 and data.gauge("restarts") == 2)
        assert data.gauge("hung") == 0
    reasons = [end.reason for end in data.ends if end.stop_reason == "environment"]
    assert sorted(reason.rpartition(": ")[0].partition(": ")[2] for reason in reasons) == [
        *("step", "step: ZeroDivisionError")
    ]
    assert {end.outcome for end in data.ends[-3:] if end.stop_reason != "cancelled"} <= {
        *("pass", "fail")
    }
    await rollout.close()
    await data.close()


async def test_a_task_that_the_suite_does_not_have_ends_the_process_with_the_cure(
    config: Config,
) -> None:
    data, rollout = Data(config), Rollout(config)
    data.task_id = "mini/clik"
    with pytest.raises(TaskError, match="did you mean 'mini/click'"):
        async with asyncio.timeout(PATIENCE_S):
            await worker.run(config, "env-0", 2, asyncio.Event())
    await rollout.close()
    await data.close()


async def test_every_second_of_every_slot_is_in_one_phase(config: Config) -> None:
    data, rollout = Data(config), Rollout(config)
    async with env_process(config):
        await until(lambda: len(data.ends) >= 6)
        await until(lambda: len(data.heartbeats) >= 3)
    before, after = data.heartbeats[0], data.heartbeats[-1]
    phases = {name for name in after.gauges if name.startswith("seconds.")}
    names = ("playing", "waiting", "resetting", "queueing", "idle", "dead")
    assert phases == {f"seconds.{name}" for name in names}
    spent_s = sum(after.gauges[name] - before.gauges[name] for name in phases)
    assert spent_s == pytest.approx(3 * (after.sent_at - before.sent_at), rel=0.05)
    for name in ("playing", "waiting", "resetting", "idle"):
        assert after.gauges[f"seconds.{name}"] > before.gauges[f"seconds.{name}"]
    assert after.gauges["seconds.dead"] == after.gauges["seconds.queueing"] == 0
    await rollout.close()
    await data.close()


async def test_slots_in_a_queue_keep_their_leases_and_leave_with_the_process(
    config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "arrive").touch()
    env = {"suite": GATED, "slots": 3, "options": {"folder": str(tmp_path)}}
    config = Config.model_validate({"run": {"dir": tmp_path / "run"}, "env": env})
    data, rollout = Data(config), Rollout(config)
    data.task_id = "gated/one"
    with BootGate(1, tmp_path / "turns").turn(0.0):
        async with env_process(config):
            await until(lambda: data.gauge("queueing") == 3)
            beat = data.heartbeats[-1]
            assert sorted(beat.trajectories) == ["t-1", "t-2", "t-3"]  # the leases that it renews
            assert beat.gauges["resetting"] == 0
            [wait] = beat.waits
            assert (wait.on, wait.count, wait.deadline_s) == ("queue", 3, 0)
            assert wait.what.startswith("a turn to boot a guest, 1 boot at once (at most 1800 s in")
        assert [end.stop_reason for end in data.ends] == ["cancelled"] * 3
    assert not (tmp_path / "boots").exists()
    assert "did not close" not in caplog.text
    await rollout.close()
    await data.close()


async def test_waits_for_leases_and_routes_are_reported(config: Config) -> None:
    data, rollout = Data(config), Rollout(config)
    async with env_process(config):
        await until(lambda: len(data.ends) >= 6)
        await until(lambda: data.gauge("episodes") >= 6)
    gauges = data.heartbeats[-1].gauges
    assert gauges["leases"] >= 6
    assert 0 < gauges["lease_p99_s"] <= gauges["lease_wait_s"]
    assert (gauges["rerouted"], gauges["affine"]) == (0, 1)
    assert gauges["resumed"] == 0
    await rollout.close()
    await data.close()


async def test_a_verdict_that_comes_too_late_counts_as_a_lease_lost(config: Config) -> None:
    data, rollout = Data(config), Rollout(config)
    data.too_late, data.leases_left = {"t-1", "t-3"}, 4
    async with env_process(config, slots=1):
        await until(lambda: data.gauge("episodes") == 4)
    last = data.heartbeats[-1].gauges
    assert {end.outcome for end in data.ends[:4]} <= {"pass", "fail"}
    assert (last["invalid"], last["leases_lost"]) == (2, 2)
    await rollout.close()
    await data.close()


async def test_after_a_lease_was_taken_back_the_slot_plays_on_at_once(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "BACK_OFF_S", (1000.0,))
    data, rollout = Data(config), Rollout(config)
    data.take_back = True
    async with env_process(config, slots=1):
        await until(lambda: any(end.stop_reason == "cancelled" for end in data.ends))
        before = len(data.ends)
        await until(lambda: len(data.ends) >= before + 2)
        await until(lambda: data.gauge("leases_lost") == 1)
    await rollout.close()
    await data.close()
