"""A judge's verdict counts where a task has no evaluator; beside one it is an opinion, and says so."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from bus.errors import UserError
from bus.messages import TrajectoryEnd
from dart_cli.config.schema import JudgeConfig
from dart_cli.env.async_env import Deadlines, JudgedEnv
from dart_cli.env.carriers import ThreadedEnv
from dart_cli.env.episode import play_episode, slot_timer
from dart_cli.judge.evidence import Answer
from dart_cli.judge.judge import Judge, JudgeLimits
from envs.contract.base import GuiEnv, Observation, Verdict
from envs.contract.registry import find_task
from tests.chat.chat_server import Says as Answers
from tests.chat.chat_server import chat
from tests.env.parts import Memory, Oracle, RecordedWaits, Says, action_spec, lease, mini
from tests.env.unruly_suite import SCREEN
from tests.waiting import until

MENU = find_task("mini", "mini/menu")
PASS, FAIL = '{"verdict": "pass", "reason": "done"}', '{"verdict": "fail", "reason": "not yet"}'


class NeverAsked:
    """The embedded environment of a task without an evaluator."""

    def __init__(self) -> None:
        self.inner = mini()

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        task = (options or {})["task"]
        return self.inner.reset(seed=seed, options={"task": replace(task, evaluated=True)})

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        return self.inner.step(action)

    def evaluate(self) -> Verdict:
        raise AssertionError("there is no evaluator")

    def close(self) -> None:
        self.inner.close()


def play(answers: Answers, *, evaluated: bool, checks: bool, solves: bool = True) -> TrajectoryEnd:
    async def run(url: str) -> TrajectoryEnd:
        gui: GuiEnv = mini() if evaluated else NeverAsked()
        inner = gui if evaluated else gui.inner  # type: ignore[attr-defined]
        config = JudgeConfig(url=url, model="eyes")
        judged = JudgedEnv(
            ThreadedEnv(lambda: gui, "t/0"),
            Deadlines(20.0, 20.0, 20.0),
            judge=Judge(config, JudgeLimits(attempts=1)),
            checks=checks,
        )
        try:
            policy = Oracle(inner) if solves else Says("wait()")
            task = replace(MENU, evaluated=evaluated)
            sink = Memory()
            await play_episode(judged, lease(max_steps=3), task, policy, sink, action_spec())
        finally:
            await judged.close()
        [end] = sink.ends
        return end

    with chat(answers) as url:
        return asyncio.run(run(url))


def test_a_judge_decides_where_there_is_no_evaluator() -> None:
    end = play(lambda _: FAIL, evaluated=False, checks=False)
    assert (end.outcome, end.reward, end.stop_reason) == ("fail", 0.0, "done")
    assert end.reason.startswith("judged by eyes#")
    assert end.reason.endswith("score 0: not yet")
    assert end.judgement is not None
    assert (end.judgement.use, end.judgement.score) == ("missing", 0.0)


def test_without_an_answer_the_verdict_is_invalid() -> None:
    end = play(lambda _: 500, evaluated=False, checks=False)
    assert (end.outcome, end.reward) == ("invalid", None)
    assert "no verdict of judge eyes#" in end.reason
    assert "answers 500" in end.reason


def test_the_evaluator_decides_and_the_opinion_stands_beside_it() -> None:
    end = play(lambda _: FAIL, evaluated=True, checks=True)
    assert (end.outcome, end.reward) == ("pass", 1.0)
    assert "judge" not in end.reason
    assert end.judgement is not None
    assert (end.judgement.use, end.judgement.outcome, end.judgement.reason) == (
        "check",
        "fail",
        "not yet",
    )
    other = play(lambda _: PASS, evaluated=True, checks=True, solves=False)
    assert other.outcome == "fail"
    assert other.judgement is not None
    assert other.judgement.outcome == "pass"


async def test_a_place_at_the_judge_is_a_wait_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, timer = RecordedWaits(), slot_timer()
    judge = Judge(JudgeConfig(url="http://eyes", model="eyes"), JudgeLimits(concurrent=1))
    questions, answers = asyncio.Queue[str](), asyncio.Event()

    async def answer(self: Judge, *_: object) -> Answer:
        questions.put_nowait(timer.phase)
        await answers.wait()
        return Answer(1.0, "done")

    monkeypatch.setattr(Judge, "_answer", answer)
    envs = [
        JudgedEnv(
            ThreadedEnv(mini, "t/0"),
            Deadlines(20.0, 20.0, 20.0),
            *reported,
            judge=judge,
            checks=False,
        )
        for reported in ((), (waits, timer))
    ]
    evidence = judge.evidence("click", SCREEN.screenshot)
    first = asyncio.create_task(envs[0]._ask_judge(evidence, "missing"))
    assert await questions.get() == "idle"
    second = asyncio.create_task(envs[1]._ask_judge(evidence, "missing"))
    await until(lambda: timer.phase == "queueing")
    assert questions.empty()
    answers.set()
    assert [each.score for each in await asyncio.gather(first, second)] == [1.0, 1.0]
    assert await questions.get() == "idle"
    whole = (f"the judge {judge.name} of t/0", "environment", 300.0)
    queued = f"a place at the judge {judge.name} (at most 300 s in which none moves on)"
    reported = [(wait.what, wait.on, wait.deadline_s) for wait in waits.all]
    assert reported == [whole, (queued, "queue", None), whole]
    for each in envs:
        await each.close()


def test_a_judge_for_what_is_missing_is_not_asked_where_there_is_an_evaluator() -> None:
    questions: list[object] = []
    end = play(lambda body: questions.append(body) or PASS, evaluated=True, checks=False)  # type: ignore[func-returns-value]
    assert (end.outcome, end.judgement, questions) == ("pass", None, [])


def test_a_wrong_key_ends_what_needs_the_judge_and_only_is_noted_beside_an_evaluator() -> None:
    with pytest.raises(UserError, match=r"env\.judge\.key_env"):
        play(lambda _: 401, evaluated=False, checks=False)
    end = play(lambda _: 401, evaluated=True, checks=True)
    assert end.outcome == "pass"
    assert end.judgement is not None
    assert (end.judgement.outcome, end.judgement.calls) == ("invalid", 0)
    assert "401" in end.judgement.reason
