"""Promises of suspension: a completion that was cut off continues, whole, when the gate opens."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest

from bus.endpoints import Endpoints
from bus.errors import EngineError
from bus.messages import (
    ActRequest,
    Completion,
    PointerMap,
    Reply,
    Request,
    RunState,
    Sampling,
    VersionSpan,
)
from bus.replier import Replier
from dart_cli.env import gate as gate_module
from dart_cli.env.episode import play_episode, slot_timer
from dart_cli.env.gate import ResumingPolicy, SuspendGate
from dart_cli.env.router import RolloutRouter
from envs.registry import find_task
from tests.env.parts import (
    Memory,
    RecordedWaits,
    action_spec,
    completion,
    heartbeat,
    lease,
    mini,
    threaded,
)
from tests.waiting import until

WHOLE = "click(500,500)"


def run_state(*, suspended: bool) -> RunState:
    return RunState(
        run_id="r",
        policy_version=1,
        weights_path="",
        stopping=False,
        reason="",
        suspended=suspended,
    )


def act() -> ActRequest:
    return ActRequest(
        trajectory_id="t-1",
        step=0,
        instruction="go",
        turns=[],
        screenshot=b"png",
        width=10,
        height=10,
        sampling=Sampling(temperature=1.0, max_tokens=16, seed=0),
    )


class Interrupted:
    """Says `text` a few tokens at a time: each answer but the last is suspended."""

    def __init__(self, text: str, each: int, gate: SuspendGate | None = None) -> None:
        self.text = text
        self.each = each
        self.gate = gate  # closed with each suspension
        self.asked: list[ActRequest] = []

    async def act(self, request: ActRequest) -> Completion:
        self.asked.append(request)
        done = len(request.partial.token_ids) if request.partial else 0
        upto = done + self.each
        if upto >= len(self.text):
            return completion(self.text)
        if self.gate is not None:
            self.gate.observe(run_state(suspended=True))
        return completion(self.text[:upto], stop="suspended")


def more_than(asked: list[ActRequest], times: int) -> bool:
    return len(asked) > times


async def test_an_open_gate_changes_nothing() -> None:
    policy, request = Interrupted(WHOLE, 100), act()
    resuming = ResumingPolicy(policy, SuspendGate(), slot_timer())
    assert await resuming.act(request) == completion(WHOLE)
    assert policy.asked == [request]
    assert resuming.resumed == 0


async def test_no_completion_is_begun_while_the_run_is_suspended_and_the_wait_is_reported() -> None:
    gate, split, waits, policy = (
        SuspendGate(),
        slot_timer(),
        RecordedWaits(),
        Interrupted(WHOLE, 100),
    )
    gate.observe(run_state(suspended=True))
    split.enter("waiting")
    asking = asyncio.create_task(ResumingPolicy(policy, gate, split, waits).act(act()))
    await until(lambda: split.phase == "suspended")
    gate.observe(run_state(suspended=True))  # repeated each second
    await asyncio.sleep(0.02)
    assert policy.asked == []
    assert waits.texts == ["the end of the trainer's turn"]
    gate.observe(run_state(suspended=False))
    assert (await asking).text == WHOLE
    assert split.phase == "waiting"


async def test_a_suspended_completion_goes_on_from_its_tokens_as_often_as_needed() -> None:
    gate, split = SuspendGate(), slot_timer()
    policy = Interrupted(WHOLE, 4, gate)
    resuming = ResumingPolicy(policy, gate, split)
    asking = asyncio.create_task(resuming.act(act()))
    for turn in range(1, 4):
        await until(lambda: split.phase == "suspended")
        assert len(policy.asked) == turn, "nothing goes on while the gate is closed"
        gate.observe(run_state(suspended=False))
        await until(partial(more_than, policy.asked, turn))
    whole = await asking
    assert (whole.text, whole.stop) == (WHOLE, "end")
    assert whole.sampled.token_ids == list(WHOLE.encode())
    assert (whole.queue_s, whole.engine_s) == (4 * 0.25, 4 * 0.5), "of all four answers"
    assert resuming.resumed == 3
    assert policy.asked[0].partial is None
    cut = policy.asked[2].partial
    assert cut is not None
    assert cut.token_ids == list(WHOLE[:8].encode())
    assert cut.behaviour_logprobs == [-0.5] * 8
    assert cut.entropies == [0.5] * 8
    assert cut.version_spans == [VersionSpan(version=4, start=0, end=8)]


async def test_the_maps_of_what_was_pointed_at_go_on_with_the_tokens() -> None:
    seen = PointerMap(position=0, rows=1, columns=2, heat=b"\xff\0")

    class Points(Interrupted):
        async def act(self, request: ActRequest) -> Completion:
            self.asked.append(request)
            cut = completion(WHOLE[:4], stop="suspended").model_copy(update={"pointed": [seen]})
            return cut if len(self.asked) == 1 else completion(WHOLE)

    policy = Points(WHOLE, 100)
    await ResumingPolicy(policy, SuspendGate(), slot_timer()).act(act())
    assert [request.pointed for request in policy.asked] == [[], [seen]]


async def test_what_had_not_begun_is_asked_again_as_it_was() -> None:
    class Nothing(Interrupted):
        async def act(self, request: ActRequest) -> Completion:
            self.asked.append(request)
            return completion("", stop="suspended") if len(self.asked) == 1 else completion(WHOLE)

    policy = Nothing(WHOLE, 0)
    assert (await ResumingPolicy(policy, SuspendGate(), slot_timer()).act(act())).text == WHOLE
    assert policy.asked[0] == policy.asked[1]


async def test_a_worker_that_is_suspended_first_is_not_asked_in_a_hurry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gate_module, "NOTICE_S", 1000.0)  # however slow this machine is
    gate, split = SuspendGate(), slot_timer()
    policy = Interrupted(WHOLE, 10)
    asking = asyncio.create_task(ResumingPolicy(policy, gate, split).act(act()))
    await until(lambda: policy.asked)
    assert split.phase != "suspended"
    gate.observe(run_state(suspended=True))
    await until(lambda: split.phase == "suspended")
    assert len(policy.asked) == 1
    gate.observe(run_state(suspended=False))
    assert (await asking).text == WHOLE


async def test_errors_of_the_policy_rise() -> None:
    class Broken:
        async def act(self, request: ActRequest) -> Completion:
            raise EngineError("the engine is closed")

    with pytest.raises(EngineError, match="closed"):
        await ResumingPolicy(Broken(), SuspendGate(), slot_timer()).act(act())


async def test_an_episode_records_a_suspended_completion_as_one_step() -> None:
    gate, split, sink = SuspendGate(), slot_timer(), Memory()
    resuming = ResumingPolicy(Interrupted("done()", 4, gate), gate, split)
    player = threaded(mini)
    playing = asyncio.create_task(
        play_episode(player, lease(), find_task("mini", "mini/menu"), resuming, sink, action_spec())
    )
    await until(lambda: split.phase == "suspended")
    assert sink.steps == []
    gate.observe(run_state(suspended=False))
    end = await playing
    await player.close()
    assert (end.stop_reason, end.steps) == ("done", 1)
    assert sink.steps[0].sampled.token_ids == list(b"done()")
    assert sink.steps[0].model_s >= split.seconds()["suspended"] > 0


async def test_over_sockets_another_worker_goes_on_with_a_new_request(tmp_path: Path) -> None:
    class Worker:
        def __init__(self, name: str) -> None:
            self.name = name
            self.asked: list[ActRequest] = []
            self.replier = Replier(Endpoints(tmp_path / "run").address(name))
            self.serving = asyncio.create_task(self.replier.serve(self.answer))

        async def answer(self, client: str, request: Request) -> Reply:
            assert isinstance(request, ActRequest)
            self.asked.append(request)
            reply = completion(WHOLE) if request.partial else completion("clic", stop="suspended")
            return reply.model_copy(update={"worker": self.name})

        async def close(self) -> None:
            await self.replier.close(linger_s=0)
            await self.serving

    first, second = Worker("rollout-0"), Worker("rollout-1")
    router, gate, split = RolloutRouter("env-0", 20.0), SuspendGate(), slot_timer()
    router.observe(heartbeat("rollout-0", first.replier.endpoint))
    resuming = ResumingPolicy(router, gate, split)
    asking = asyncio.create_task(resuming.act(act()))
    await until(lambda: first.asked)
    gate.observe(run_state(suspended=True))
    await until(lambda: split.phase == "suspended")
    router.observe(heartbeat("rollout-0", first.replier.endpoint, state="stopping"))
    router.observe(heartbeat("rollout-1", second.replier.endpoint))
    gate.observe(run_state(suspended=False))
    whole = await asking
    assert (whole.text, whole.worker) == (WHOLE, "rollout-1")
    cut = second.asked[0].partial
    assert cut is not None
    assert cut.token_ids == list(b"clic")
    # The first worker would repeat its recorded answer if it were asked under the same id.
    router.observe(heartbeat("rollout-0", first.replier.endpoint))
    router.observe(heartbeat("rollout-1", second.replier.endpoint, state="stopping"))
    assert (await resuming.act(act())).worker == "rollout-0"
    assert len(first.asked) == 3
    await router.close()
    await first.close()
    await second.close()
