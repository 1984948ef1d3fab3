"""Promises of `dart serve`: the whole process, with a real data process and scripted rollout workers."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bus.endpoints import TELEMETRY_IN
from bus.errors import UserError
from bus.messages import ActRequest, Completion, Request, StopRequest
from bus.pubsub import Publisher
from bus.requests import Replier
from dart_cli.config.endpoints import run_endpoints
from dart_cli.config.schema import Config
from dart_cli.data.store.open import open_reader
from dart_cli.engines.scripted import ScriptedEngine, ScriptedResponder, say
from dart_cli.serve import worker
from tests.data.client import Client, serving
from tests.env.parts import heartbeat
from tests.serve.parts import Endpoint, Reply, first
from tests.waiting import PATIENCE_S, until


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": tmp_path / "run"},
            "env": {"suite": "mini", "tasks": ["mini/menu", "mini/popup"]},
            "data": {"group_size": 2, "groups_per_batch": 1, "max_open_groups": 4},
            "serve": {"port": 0, "sessions": 4},
        }
    )


class Rollout:
    """A rollout worker that says one thing; while it is `silent` nothing."""

    def __init__(self, config: Config, name: str, text: str) -> None:
        self.name = name
        self.silent = False
        self.requests = 0
        self._responder = ScriptedResponder(ScriptedEngine(lambda _: say(text)))
        self._replier = Replier(run_endpoints(config).address(name))
        self._tasks = [
            asyncio.create_task(self._replier.serve(self._answer)),
            asyncio.create_task(self._beat(config)),
        ]

    async def _answer(self, _client: str, request: Request) -> Completion:
        assert isinstance(request, ActRequest)
        self.requests += 1
        if self.silent:
            await asyncio.Event().wait()
        return await self._responder.answer(request)

    async def _beat(self, config: Config) -> None:
        async with Publisher(run_endpoints(config).address(TELEMETRY_IN)) as publisher:
            while True:
                publisher.publish(heartbeat(self.name, self._replier.endpoint))
                await asyncio.sleep(0.02)

    async def kill(self) -> None:
        self._tasks[1].cancel()
        await self._replier.close(linger_s=0)
        await asyncio.gather(*self._tasks, return_exceptions=True)


@dataclass
class Served:
    """The process, as an agent sees it."""

    port: int
    stop: asyncio.Event
    running: asyncio.Task[None]

    async def call(self, method: str, path: str, body: object = None) -> Reply:
        there = Endpoint(self.port, None, None, None)  # type: ignore[arg-type]
        return await there.call(method, path, body)

    async def chat(self, session: str) -> Reply:
        body = {"model": "dart", "messages": first(), "user": session}
        return await self.call("POST", "/v1/chat/completions", body)

    async def end(self, session: str, **verdict: object) -> Reply:
        return await self.call("POST", f"/v1/sessions/{session}/end", verdict)


@contextlib.asynccontextmanager
async def served(config: Config, capsys: pytest.CaptureFixture[str]) -> AsyncIterator[Served]:
    stop, output = asyncio.Event(), ""
    running = asyncio.create_task(worker.run(config, "serve-0", stop))

    def address() -> re.Match[str] | None:
        nonlocal output
        output += capsys.readouterr().err
        return re.search(r"serve-0: http://127\.0\.0\.1:(\d+)/v1\n", output)

    await until(lambda: running.done() or address())
    match = re.search(r":(\d+)/v1", output)
    assert match is not None, output
    try:
        yield Served(int(match[1]), stop, running)
    finally:
        stop.set()
        async with asyncio.timeout(PATIENCE_S):
            await running


def states(config: Config) -> dict[str, tuple[str, str]]:
    """Of each trajectory in the database its state and reason."""
    with open_reader(config.run.dir) as reader:
        return {row.id: (row.state, row.reason) for row in reader.trajectories()}


async def test_what_an_agent_plays_is_leased_filed_grouped_and_batched(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(config) as data, served(config, capsys) as there:
        rollout = Rollout(config, "rollout-0", "click(1,1)")
        opened = [await there.call("POST", "/v1/sessions", {"task": "mini/menu"}) for _ in range(2)]
        names = [each.body["id"] for each in opened]
        assert {each.body["group_id"] for each in opened} == {"g000001"}
        seen = await data.eventually(lambda seen: any(p.role == "serve" for p in seen.processes))
        [process] = [each for each in seen.processes if each.role == "serve"]
        assert (process.worker, process.gauges["slots"]) == ("serve-0", 4)
        for name, reward in zip(names, (1, 0), strict=True):
            assert (await there.chat(name)).content == "click(1,1)"
            assert (await there.end(name, reward=reward)).body["accepted"]
        batch = await data.must_batch()
        assert sorted(sample.trajectory_id for sample in batch.samples) == sorted(names)
        assert {sample.advantage > 0 for sample in batch.samples} == {True, False}
        unknown = await there.call("POST", "/v1/sessions", {"task": "mini/men"})
        assert (unknown.status, "did you mean 'mini/menu'?" in unknown.error) == (400, True)
        await rollout.kill()


async def test_a_killed_worker_costs_no_step(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(config), served(config, capsys) as there:
        first_one = Rollout(config, "rollout-0", "click(1,1)")
        first_one.silent = True
        opened = await there.call("POST", "/v1/sessions", {})
        asking = asyncio.create_task(there.chat(opened.body["id"]))
        await until(lambda: first_one.requests)
        second = Rollout(config, "rollout-1", "click(2,2)")
        await first_one.kill()
        answer = await asking
        assert (answer.status, answer.content) == (200, "click(2,2)")
        assert answer.body["dart"]["step"] == 0
        await second.kill()


async def test_an_episode_outlives_a_restart_of_data(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        before = contextlib.AsyncExitStack()
        await before.enter_async_context(serving(config))
        there = await stack.enter_async_context(served(config, capsys))
        rollout = Rollout(config, "rollout-0", "click(1,1)")
        name = (await there.call("POST", "/v1/sessions", {})).body["id"]
        await there.chat(name)
        await there.chat(name)
        await before.aclose()
        answering = asyncio.create_task(there.chat(name))
        data: Client = await stack.enter_async_context(serving(config))
        assert (await answering).status == 200
        end_reply = await there.end(name, outcome="fail")
        assert (end_reply.status, end_reply.body["steps"]) == (200, 3)
        await data.eventually(lambda seen: seen.verdicts.get("fail") == 1)
        await rollout.kill()


async def test_a_stopped_process_gives_its_leases_back(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(config):
        async with served(config, capsys) as there:
            rollout = Rollout(config, "rollout-0", "click(1,1)")
            name = (await there.call("POST", "/v1/sessions", {})).body["id"]
            await there.chat(name)
        assert states(config) == {name: ("dropped", "cancelled")}
        await rollout.kill()


async def test_the_end_of_the_run_ends_the_process(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(config) as data, served(config, capsys) as there:
        await data.tell(StopRequest(reason="enough"))
        async with asyncio.timeout(PATIENCE_S):
            await there.running


@pytest.mark.parametrize("token", ["short", "with a\nline break", "ü" * 20])
def test_a_token_that_cannot_be_one_is_refused(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(worker.TOKEN_VARIABLE, token)
    with pytest.raises(UserError, match="16 printable ASCII characters"):
        worker.token_for("127.0.0.1", guarded=False)


def test_beyond_loopback_there_is_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(worker.TOKEN_VARIABLE, raising=False)
    assert worker.token_for("127.0.0.1", guarded=False) == ""
    assert len(worker.token_for("127.0.0.1", guarded=True)) > 20
    assert len(worker.token_for("0.0.0.0", guarded=False)) > 20
    monkeypatch.setenv(worker.TOKEN_VARIABLE, "chosen-by-a-person")
    assert worker.token_for("127.0.0.1", guarded=False) == "chosen-by-a-person"
