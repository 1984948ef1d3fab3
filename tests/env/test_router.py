"""Promises of the router, against real ROUTER servers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bus.endpoints import Endpoints
from bus.errors import DeadlineError, EngineError
from bus.messages import ActRequest, Completion, PointerMap, Reply, Request, Sampling, VersionSpan
from bus.requests import Replier
from dart_cli.engines.scripted import ScriptedEngine, ScriptedResponder, say
from dart_cli.env.router import RolloutRouter
from tests.env.parts import RecordedWaits, completion, heartbeat
from tests.waiting import PATIENCE_S, until


def act(trajectory_id: str = "t-1", step: int = 0) -> ActRequest:
    return ActRequest(
        trajectory_id=trajectory_id,
        step=step,
        instruction="go",
        turns=[],
        screenshot=b"png",
        width=10,
        height=10,
        sampling=Sampling(temperature=1.0, max_tokens=16, seed=0),
    )


class Rollout:
    """A rollout worker: real sockets, answers with its own name once released."""

    def __init__(self, endpoint: str, name: str, *, holding: bool = False) -> None:
        self.name = name
        self.request_count = 0
        self.go = asyncio.Event()
        if not holding:
            self.go.set()
        self.replier = Replier(endpoint)
        self.task = asyncio.create_task(self.replier.serve(self.answer))

    async def answer(self, client: str, request: Request) -> Reply:
        self.request_count += 1
        await self.go.wait()
        return completion(self.name)

    async def kill(self) -> None:
        await self.replier.close(linger_s=0)
        await self.task


@asynccontextmanager
async def rollouts(
    run: Path, *names: str, holding: bool = False, **options: float
) -> AsyncIterator[tuple[RolloutRouter, dict[str, Rollout]]]:
    endpoints = Endpoints(run)
    servers = {name: Rollout(endpoints.address(name), name, holding=holding) for name in names}
    router = RolloutRouter(
        "env-0",
        options.get("deadline_s", 20.0),
        absent_s=options.get("absent_s", 20.0),
        dead_after_s=options.get("dead_after_s", 1.0),
    )
    for name, server in servers.items():
        router.observe(heartbeat(name, server.replier.endpoint))
    try:
        yield router, servers
    finally:
        await router.close()
        for server in servers.values():
            await server.kill()


async def asked_first(each: dict[str, Rollout]) -> tuple[Rollout, Rollout]:
    """Of two workers, which chance decides between: the one that was asked, and the other."""
    await until(lambda: any(server.request_count for server in each.values()))
    one, other = each.values()
    return (one, other) if one.request_count else (other, one)


async def test_requests_go_to_the_worker_with_the_least_in_flight(tmp_path: Path) -> None:
    async with rollouts(tmp_path / "run", "rollout-0", "rollout-1", holding=True) as (router, each):
        asks = [asyncio.create_task(router.act(act(f"t-{i}"))) for i in range(6)]
        await until(lambda: [each[name].request_count for name in sorted(each)] == [3, 3])
        assert router.in_flight == 6
        for server in each.values():
            server.go.set()
        texts = Counter(reply.text for reply in await asyncio.gather(*asks))
        assert texts == {"rollout-0": 3, "rollout-1": 3}
        assert router.in_flight == 0


async def test_a_trajectory_stays_with_its_worker_while_load_allows(tmp_path: Path) -> None:
    async with rollouts(tmp_path / "run", "rollout-0", "rollout-1") as (router, each):
        first = {t: (await router.act(act(t))).text for t in ("t-1", "t-2", "t-3")}
        for step in range(1, 4):
            for trajectory, server in first.items():
                assert (await router.act(act(trajectory, step))).text == server
        assert router.routed.gauges() == {"rerouted": 0.0, "affine": 1.0, "resumed": 0.0}
        # With three more in flight than the other, even its own trajectory goes elsewhere.
        home = each[first["t-1"]]
        home.go.clear()
        waiting = [asyncio.create_task(router.act(act("t-1", 9))) for _ in range(3)]
        await until(lambda: router.in_flight == 3)
        assert (await router.act(act("t-1", 10))).text != home.name
        home.go.set()
        await asyncio.gather(*waiting)


async def test_a_worker_far_behind_the_newest_is_asked_only_where_there_is_no_other(
    tmp_path: Path,
) -> None:
    async with rollouts(tmp_path / "run", "rollout-0", "rollout-1") as (_, each):
        ends = {name: server.replier.endpoint for name, server in each.items()}
        router = RolloutRouter("env-1", 20.0, max_staleness=2)
        router.observe(heartbeat("rollout-0", ends["rollout-0"], version=3))
        assert (await router.act(act())).text == "rollout-0"
        router.observe(heartbeat("rollout-1", ends["rollout-1"], version=5))
        assert router.ready() == ["rollout-0", "rollout-1"]
        router.observe(heartbeat("rollout-1", ends["rollout-1"], version=6))
        assert router.ready() == ["rollout-1"]
        assert (await router.act(act(step=1))).text == "rollout-1", "even where it was before"
        router.observe(heartbeat("rollout-1", ends["rollout-1"], version=6, state="syncing"))
        assert router.ready() == ["rollout-0"]
        await router.close()


async def test_a_lost_connection_sends_a_request_elsewhere_before_the_worker_falls_silent(
    tmp_path: Path,
) -> None:
    async with rollouts(
        tmp_path / "run", "rollout-0", "rollout-1", holding=True, dead_after_s=1000.0
    ) as (router, each):
        asks = [asyncio.create_task(router.act(act(f"t-{i}"))) for i in range(6)]
        await until(lambda: [each[name].request_count for name in sorted(each)] == [3, 3])
        each["rollout-1"].go.set()
        await each["rollout-0"].kill()
        async with asyncio.timeout(PATIENCE_S):
            assert {reply.text for reply in await asyncio.gather(*asks)} == {"rollout-1"}
        assert router.ready() == ["rollout-1"]
        assert router.routed.rerouted == 3


async def test_a_worker_whose_connection_is_back_is_asked_again(tmp_path: Path) -> None:
    async with rollouts(tmp_path / "run", "rollout-0", dead_after_s=1000.0) as (router, each):
        assert (await router.act(act())).text == "rollout-0"
        await each["rollout-0"].kill()
        await until(lambda: router.ready() == [])
        ask = asyncio.create_task(router.act(act(step=1)))
        again = Rollout(Endpoints(tmp_path / "run").address("rollout-0"), "again")
        assert (await ask).text == "again"
        await again.kill()


async def test_a_worker_that_joins_gets_the_new_trajectories_until_it_has_its_share(
    tmp_path: Path,
) -> None:
    async with rollouts(tmp_path / "run", "rollout-0", "rollout-1") as (router, _):
        for i in range(8):
            await router.act(act(f"old-{i}"))
        late = Rollout(Endpoints(tmp_path / "run").address("rollout-2"), "rollout-2")
        router.observe(heartbeat("rollout-2", late.replier.endpoint))
        assert [(await router.act(act(f"new-{i}"))).text for i in range(4)] == ["rollout-2"] * 4
        for i in range(8):
            router.forget(f"old-{i}")
        texts = {(await router.act(act(f"newer-{i}"))).text for i in range(8)}
        assert texts == {"rollout-0", "rollout-1"}, "a request that is over is no load"
        await late.kill()


async def test_when_a_worker_dies_its_requests_are_answered_by_another(tmp_path: Path) -> None:
    async with rollouts(tmp_path / "run", "rollout-0", "rollout-1", holding=True) as (router, each):
        asks = [asyncio.create_task(router.act(act(f"t-{i}"))) for i in range(4)]
        await until(lambda: sum(server.request_count for server in each.values()) == 4)
        victim, survivor = each["rollout-0"], each["rollout-1"]
        await victim.kill()  # no goodbye: it only falls silent
        survivor.go.set()
        async with asyncio.timeout(PATIENCE_S):
            while not all(ask.done() for ask in asks):
                router.observe(heartbeat("rollout-1", survivor.replier.endpoint))
                await asyncio.sleep(0.05)
        assert {ask.result().text for ask in asks} == {"rollout-1"}
        assert survivor.request_count == 4
        assert router.ready() == ["rollout-1"]


async def test_where_no_heartbeat_arrives_no_worker_is_dead(tmp_path: Path) -> None:
    """All telemetry goes through data: while it is away the workers answer as ever."""
    async with rollouts(tmp_path / "run", "rollout-0", dead_after_s=0.01) as (router, each):
        await asyncio.sleep(0.1)  # ten times what would be death
        assert router.ready() == ["rollout-0"]
        assert (await router.act(act())).text == "rollout-0"
        await asyncio.sleep(0.1)
        router.observe(heartbeat("data", "").model_copy(update={"role": "data"}))
        assert router.ready() == [], "others speak, so it is silent"
        router.observe(heartbeat("rollout-0", each["rollout-0"].replier.endpoint))
        assert router.ready() == ["rollout-0"]


async def test_a_worker_that_says_goodbye_is_left_at_once(tmp_path: Path) -> None:
    async with rollouts(tmp_path / "run", "rollout-0", "rollout-1", holding=True) as (router, each):
        ask = asyncio.create_task(router.act(act()))
        first, other = await asked_first(each)
        other.go.set()
        router.observe(heartbeat(first.name, first.replier.endpoint, state="stopping"))
        assert (await ask).text == other.name


async def test_a_worker_that_was_started_anew_is_left_at_once(tmp_path: Path) -> None:
    async with rollouts(tmp_path / "run", "rollout-0", "rollout-1", holding=True) as (router, each):
        ask = asyncio.create_task(router.act(act()))
        first, other = await asked_first(each)
        other.go.set()
        # The same name and address; the process behind it loads its model and answers no request.
        router.observe(heartbeat(first.name, first.replier.endpoint, state="starting"))
        assert (await ask).text == other.name


async def test_a_worker_taking_weights_is_asked_only_where_none_is_ready(tmp_path: Path) -> None:
    async with rollouts(tmp_path / "run", "rollout-0", "rollout-1") as (router, each):
        ends = {name: server.replier.endpoint for name, server in each.items()}
        router.observe(heartbeat("rollout-0", ends["rollout-0"], state="syncing"))
        assert router.ready() == ["rollout-1"]
        router.observe(heartbeat("rollout-1", ends["rollout-1"], state="starting"))
        assert (await router.act(act())).text == "rollout-0"


async def test_a_worker_that_appears_late_answers_what_waited_for_it(tmp_path: Path) -> None:
    async with rollouts(tmp_path / "run") as (router, _):
        ask = asyncio.create_task(router.act(act()))
        ready = asyncio.create_task(router.wait_ready())
        await asyncio.sleep(0.05)
        assert not ready.done()
        late = Rollout(Endpoints(tmp_path / "run").address("rollout-9"), "rollout-9")
        router.observe(heartbeat("rollout-9", late.replier.endpoint))
        await ready
        assert (await ask).text == "rollout-9"
        await late.kill()


async def test_a_wait_for_the_first_worker_says_what_to_start_or_what_that_waits_for() -> None:
    waits = RecordedWaits()
    router = RolloutRouter("env-0", 5.0, waits=waits)
    ready = asyncio.create_task(router.wait_ready())
    await until(lambda: waits.texts == ["dart rollout: start `dart rollout CONFIG`"])
    loading = heartbeat("rollout-0", "ipc:///nowhere", state="starting")
    router.observe(loading.model_copy(update={"waiting_for": "the model to load"}))
    await until(lambda: waits.texts[-1] == "rollout-0 to be ready: it waits for the model to load")
    router.observe(loading)
    await until(lambda: waits.texts[-1] == "rollout-0 to be ready: it is starting")
    assert {wait.on for wait in waits.all} == {"rollout"}
    assert len({wait.since for wait in waits.all}) == 1, "one wait, whatever it is called"
    ready.cancel()
    await router.close()


async def test_a_request_waits_for_a_worker_that_is_away_longer_than_its_deadline(
    tmp_path: Path,
) -> None:
    async with rollouts(tmp_path / "run", "rollout-0", holding=True, deadline_s=3.0) as (
        router,
        each,
    ):
        ask = asyncio.create_task(router.act(act()))
        await until(lambda: each["rollout-0"].request_count == 1)
        await each["rollout-0"].kill()
        await asyncio.sleep(3.5)  # more than the whole deadline without a worker
        assert not ask.done()
        late = Rollout(Endpoints(tmp_path / "run").address("rollout-9"), "rollout-9")
        router.observe(heartbeat("rollout-9", late.replier.endpoint))
        assert (await ask).text == "rollout-9"
        await late.kill()


async def test_where_no_worker_comes_the_error_says_what_to_start(tmp_path: Path) -> None:
    async with rollouts(tmp_path / "run", absent_s=0.2) as (router, _):
        with pytest.raises(DeadlineError) as late:
            await router.act(act("t-1", 3))
    assert str(late.value) == (
        "step 3 of t-1: after 0.2 s no rollout worker is ready: start `dart rollout CONFIG`"
    )


async def test_a_worker_that_moved_is_asked_at_its_new_address(tmp_path: Path) -> None:
    async with rollouts(tmp_path / "run", "rollout-0", holding=True) as (router, each):
        ask = asyncio.create_task(router.act(act()))
        await until(lambda: each["rollout-0"].request_count == 1)
        moved = Rollout(Endpoints(tmp_path / "run").address("elsewhere"), "moved")
        router.observe(heartbeat("rollout-0", moved.replier.endpoint))
        assert (await ask).text == "moved"
        await moved.kill()


async def test_heartbeats_of_others_and_bad_addresses_are_passed_over(tmp_path: Path) -> None:
    async with rollouts(tmp_path / "run") as (router, _):
        router.observe(heartbeat("env-0", "").model_copy(update={"role": "env"}))
        router.observe(heartbeat("rollout-0", "tcp://0.0.0.0:1"))
        router.observe(heartbeat("rollout-1", f"ipc:///{'long/' * 50}"))
        assert router.ready() == []


async def test_a_scripted_engine_answers_over_the_bus_and_its_errors_rise(tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda request: say("click(1,2)", logprob=-0.1, entropy=0.2))
    responder = ScriptedResponder(engine)

    async def answer(client: str, request: Request) -> Completion:
        assert isinstance(request, ActRequest)
        if request.trajectory_id == "t-2":
            raise EngineError("the engine is closed")
        return await responder.answer(request)

    async with Replier(Endpoints(tmp_path / "run").address("rollout-0")) as replier:
        task = asyncio.create_task(replier.serve(answer))
        router = RolloutRouter("env-0", 20.0)
        router.observe(heartbeat("rollout-0", replier.endpoint))
        reply = await router.act(act())
        assert (reply.text, reply.stop, reply.sampled.entropies[0]) == ("click(1,2)", "end", 0.2)
        with pytest.raises(EngineError, match="engine is closed"):
            await router.act(act("t-2"))
        await router.close()
    await task


# --- suspended completions --------------------------------------------------------------------

WHOLE = "click(500,500)"


class Suspending(Rollout):
    """Says `WHOLE` a few tokens at a time: each answer but the last is suspended."""

    def __init__(self, endpoint: str, name: str, each: int) -> None:
        super().__init__(endpoint, name)
        self.each = each
        self.requests: list[ActRequest] = []
        self.looked = [PointerMap(position=0, rows=1, columns=2, heat=b"\xff\0")]

    async def answer(self, client: str, request: Request) -> Reply:
        assert isinstance(request, ActRequest)
        self.request_count += 1
        self.requests.append(request)
        await self.go.wait()
        upto = len(request.partial or ()) + self.each
        if upto >= len(WHOLE):
            return completion(WHOLE).model_copy(update={"worker": self.name})
        cut = completion(WHOLE[:upto], stop="suspended")
        return cut.model_copy(update={"pointed": self.looked if upto else []})


@asynccontextmanager
async def suspending(run: Path, name: str, each: int) -> AsyncIterator[Suspending]:
    server = Suspending(Endpoints(run).address(name), name, each)
    try:
        yield server
    finally:
        await server.kill()


async def test_a_suspended_completion_goes_on_from_its_tokens_as_often_as_needed(
    tmp_path: Path,
) -> None:
    router = RolloutRouter("env-0", 20.0)
    async with suspending(tmp_path / "run", "rollout-0", 4) as server:
        router.observe(heartbeat("rollout-0", server.replier.endpoint))
        whole = await router.act(act())
        await router.close()
    assert (whole.text, whole.stop) == (WHOLE, "end")
    assert whole.sampled.token_ids == list(WHOLE.encode())
    assert (whole.queue_s, whole.engine_s) == (4 * 0.25, 4 * 0.5), "of all four answers"
    assert router.routed.gauges()["resumed"] == 3
    assert server.requests[0].partial is None
    cut = server.requests[2].partial
    assert cut is not None
    assert cut.token_ids == list(WHOLE[:8].encode())
    assert cut.behaviour_logprobs == [-0.5] * 8
    assert cut.version_spans == [VersionSpan(version=4, start=0, end=8)]
    assert [request.pointed for request in server.requests] == [[], *[server.looked] * 3]


async def test_what_had_not_begun_is_asked_again_as_it_was(tmp_path: Path) -> None:
    router = RolloutRouter("env-0", 20.0)
    async with suspending(tmp_path / "run", "rollout-0", 0) as server:
        router.observe(heartbeat("rollout-0", server.replier.endpoint))
        asking = asyncio.create_task(router.act(act()))
        await until(lambda: server.request_count > 1)
        server.each = len(WHOLE)
        assert (await asking).text == WHOLE
        await router.close()
    assert server.requests[0] == server.requests[1]
    assert router.routed.gauges()["resumed"] == 0


async def test_another_worker_goes_on_with_a_suspended_completion(tmp_path: Path) -> None:
    router = RolloutRouter("env-0", 20.0)
    run = tmp_path / "run"
    async with (
        suspending(run, "rollout-0", 4) as first,
        suspending(run, "rollout-1", 100) as second,
    ):
        first.go.clear()
        router.observe(heartbeat("rollout-0", first.replier.endpoint))
        asking = asyncio.create_task(router.act(act()))
        await until(lambda: first.request_count)
        router.observe(heartbeat("rollout-1", second.replier.endpoint))
        router.observe(heartbeat("rollout-0", first.replier.endpoint, state="syncing"))
        first.go.set()
        whole = await asking
        await router.close()
    assert (whole.text, whole.worker) == (WHOLE, "rollout-1")
    cut = second.requests[0].partial
    assert cut is not None
    assert cut.token_ids == list(WHOLE[:4].encode())
