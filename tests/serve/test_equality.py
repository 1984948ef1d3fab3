"""What another program plays through the endpoint is what `dart env` would have played, token for token."""

from __future__ import annotations

import asyncio
import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bus.messages import ActRequest, Completion, StepRecord, Turn
from dart_cli.engines.responder import PolicyResponder
from dart_cli.engines.transformers_engine import TransformersEngine
from dart_cli.env.episode import Episode
from dart_cli.policy.loader import LoadedPolicy, load_policy
from dart_cli.policy.prompt import PromptRenderer
from envs.contract.registry import find_task, make_env
from tests.env.parts import Lenient, Memory, action_spec, lease, mini, threaded
from tests.serve.parts import Endpoint, endpoint, url

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "chat_loop.py"
SAME = frozenset(StepRecord.model_fields) - {"model_s", "env_s", "reward", "error"}


class Answers:
    """The tiny model in this process."""

    def __init__(self, policy: LoadedPolicy) -> None:
        self.engine = TransformersEngine(policy)
        self.responder = PolicyResponder(policy, self.engine, PromptRenderer(policy))

    async def act(self, request: ActRequest) -> Completion:
        return await self.responder.answer(request)


@pytest.fixture(scope="module")
def policy() -> LoadedPolicy:
    return load_policy("builtin:tiny")


@pytest.fixture
def loop() -> ModuleType:
    """The worked example."""
    spec = importlib.util.spec_from_file_location("chat_loop", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def native(answers: Answers, task_id: str, seed: int) -> Memory:
    """The steps and the end of an episode of `dart env`."""
    env, sink = threaded(mini), Memory()
    one_lease = lease(task_id, seed=seed, max_steps=find_task("mini", task_id).max_steps)
    await Episode(env, one_lease, find_task("mini", task_id), answers, sink, action_spec()).play()
    await env.close()
    return sink


async def test_the_example_files_what_a_native_episode_files(
    policy: LoadedPolicy, loop: ModuleType
) -> None:
    """For the same leases and weights every field is the same but times and names."""
    answers = Answers(policy)
    async with endpoint(answers) as there:
        tasks = ["mini/menu", "mini/popup", "mini/scroll", "mini/confirm", "mini/form"]
        there.data.tasks, there.data.max_steps = list(tasks), 0
        loop.BASE = f"http://127.0.0.1:{there.port}/v1/sessions"
        env = make_env("mini")
        for _ in tasks:
            await asyncio.to_thread(loop.episode, env)
        own = Answers(policy)  # with a cache of its own: no number may come from the other's
        expected = [await native(own, task, i) for i, task in enumerate(tasks, 1)]
        served = {end.trajectory_id: end for end in there.data.ends}
        assert len(served) == 5
        assert any(len(sink.steps) > 1 for sink in expected), "some episodes have a second step"
        for sink in expected:
            [end] = sink.ends
            steps = [each for each in there.data.steps if each.trajectory_id == end.trajectory_id]
            _assert_same(steps, sink.steps)
            mine = served[end.trajectory_id]
            assert (mine.steps, mine.outcome, mine.reward, mine.stop_reason) == (
                *(end.steps, end.outcome, end.reward, end.stop_reason),
            )
    await own.engine.close()
    await answers.engine.close()


async def test_an_agent_that_shows_the_same_history_gets_the_same_tokens(
    policy: LoadedPolicy,
) -> None:
    """Three screenshots, all past completions: of each the prompt has the tokens that were sampled."""
    answers = Answers(policy)
    async with endpoint(answers) as there:
        there.data.max_steps, task = 5, "mini/scroll"
        own = Answers(policy)
        sink, there.data.sampling_seed = await _with_limit(own, task, 5)
        await own.engine.close()
        assert len(sink.steps) >= 4
        await _replay(there, task, sink.steps)
        _assert_same(there.data.steps, sink.steps, SAME - {"action"})  # of any text, a wait
    await answers.engine.close()


async def _with_limit(answers: Answers, task_id: str, steps: int) -> tuple[Memory, int]:
    """A native episode of at most so many steps, with history, and its sampling seed: the first that is long enough."""
    for attempt in range(20):
        env, sink = threaded(mini), Memory()
        one_lease = lease(task_id, seed=1, max_steps=steps)
        sampling = one_lease.sampling.model_copy(update={"seed": 1000 + 10 * attempt})
        one_lease = one_lease.model_copy(update={"sampling": sampling})
        spec = replace(action_spec(images=3, turns=8), action_parser=Lenient())
        await Episode(env, one_lease, find_task("mini", task_id), answers, sink, spec).play()
        await env.close()
        if len(sink.steps) >= 4:
            break
    return sink, one_lease.sampling.seed


async def _replay(there: Endpoint, task: str, steps: list[StepRecord]) -> None:
    """Show an agent's endpoint the screens of an episode, as a prompt with that history would."""
    name = await there.open(task=task)
    past: list[tuple[bytes, str]] = []
    for record in steps:
        answer = await there.chat(name, _messages(record, past, steps[0].instruction))
        assert answer.content == record.text
        past.append((record.screenshot, record.text))
    await there.end(name, outcome="fail")


def _messages(
    record: StepRecord, past: list[tuple[bytes, str]], instruction: str
) -> list[dict[str, Any]]:
    first_kept = len(past) - 2  # of three screenshots the newest is this one
    messages: list[dict[str, Any]] = []
    opening = [{"type": "text", "text": instruction}]
    turns = [Turn(text=text, screenshot=image) for image, text in past]
    for place, turn in enumerate(turns):
        parts = [_image_part(turn.screenshot)] if place >= first_kept and turn.screenshot else []
        if parts + opening:
            messages.append({"role": "user", "content": parts + opening})
        messages.append({"role": "assistant", "content": turn.text})
        opening = []
    return [*messages, {"role": "user", "content": [_image_part(record.screenshot), *opening]}]


def _image_part(image: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(image)}}


def _assert_same(
    served: list[StepRecord], expected: list[StepRecord], fields: frozenset[str] = SAME
) -> None:
    assert len(served) == len(expected) > 0
    for mine, theirs in zip(served, expected, strict=True):
        for name in fields:
            assert getattr(mine, name) == getattr(theirs, name), name
        assert any(mine.sampled.behaviour_logprobs)
