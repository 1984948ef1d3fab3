"""Promises of a step with several actions, played in the real embedded environment."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from bus.errors import ActionCausedError, EnvError
from bus.messages import StepRecord, TrajectoryEnd
from dart_cli.config.schema import JudgeConfig
from dart_cli.env.async_env import AsyncEnv, Deadlines, JudgedEnv
from dart_cli.env.carriers import ThreadedEnv
from dart_cli.env.episode import play_episode
from dart_cli.judge.evidence import Evidence
from dart_cli.judge.judge import Judge, JudgeLimits
from dart_cli.language.coordinates import make_coordinate_map
from dart_cli.language.parsers import make_action_parser
from envs.contract.actions import Action, action_from_dict
from envs.contract.base import Observation, Verdict
from envs.contract.registry import find_task
from tests.env.parts import ACTION_PARSER, Memory, Says, action_spec, lease, mini, threaded

MENU = find_task("mini", "mini/menu")
MOST = 4


class Recorded:
    """The embedded environment with a reward for each action, which may break at one of them."""

    def __init__(self, breaks_at: int = -1, error: type[EnvError] = EnvError) -> None:
        self.inner = mini()
        self.performed: list[Action] = []
        self._breaks_at, self._error = breaks_at, error

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        return self.inner.reset(seed=seed, options=options)

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        if len(self.performed) == self._breaks_at:
            raise self._error("the page is gone")
        self.performed.append(action)
        observation, _, *rest = self.inner.step(action)
        return observation, float(2 ** len(self.performed)), *rest  # type: ignore[return-value]

    def evaluate(self) -> Verdict:
        return self.inner.evaluate()

    def close(self) -> None:
        self.inner.close()


async def play(
    env: Recorded, *texts: str, most: int = MOST, max_steps: int = 8
) -> tuple[TrajectoryEnd, list[StepRecord], Says]:
    player, sink, policy = threaded(lambda: env), Memory(), Says(*texts)
    spec = dataclasses.replace(
        action_spec(images=2, turns=2), action_parser=make_action_parser("compact", most)
    )
    end = await play_episode(player, lease(max_steps=max_steps), MENU, policy, sink, spec)
    await player.close()
    return end, sink.steps, policy


def solution() -> list[str]:
    """The texts of a shortest solution of the lease's task, which is two clicks."""
    env, texts = mini(), []
    screen, _ = env.reset(seed=lease().task_seed, options={"task": MENU})
    grid = make_coordinate_map("thousandths", screen.width, screen.height)
    for _ in range(2):
        action = env.oracle_action()
        texts.append(ACTION_PARSER.format(action, grid))
        env.step(action)
    return texts


def actions_of(record: StepRecord) -> list[Action]:
    first = [] if record.action is None else [record.action]
    return [action_from_dict(action) for action in (*first, *record.more_actions)]


async def test_a_solution_in_one_completion_passes_with_one_step_and_one_screenshot() -> None:
    env = Recorded()
    end, [record], policy = await play(env, "\n".join(solution()))
    assert (end.outcome, end.stop_reason, end.steps) == ("pass", "done", 1)
    assert actions_of(record) == env.performed
    assert len(env.performed) == 2
    assert record.reward == 2.0 + 4.0
    assert len(policy.requests) == 1
    assert record.text == "\n".join(solution())


async def test_the_steps_of_a_lease_are_completions_and_the_history_shows_each_as_one_turn() -> (
    None
):
    env = Recorded()
    text = "move(1,1)\nmove(2,2)"
    end, records, policy = await play(env, text, max_steps=2)
    assert (end.stop_reason, end.steps) == ("step_limit", 2)
    assert len(env.performed) == 4
    assert [turn.text for turn in policy.requests[1].turns] == [text]
    assert policy.requests[1].turns[0].token_ids == list(text.encode())
    assert policy.requests[1].screenshot == records[1].screenshot


@pytest.mark.parametrize(("end_text", "stop"), [("done()", "done"), ("fail()", "gave_up")])
async def test_actions_after_one_that_ends_the_episode_are_not_performed(
    end_text: str, stop: str
) -> None:
    env = Recorded()
    end, [record], _ = await play(env, f"wait()\n{end_text}\nclick(5,5)")
    assert (end.stop_reason, end.steps) == (stop, 1)
    assert [action.kind for action in env.performed] == ["wait", end_text[:-2]]
    assert actions_of(record) == env.performed


async def test_actions_after_the_goal_are_not_performed() -> None:
    env = Recorded()
    end, [record], _ = await play(env, "\n".join([*solution(), "wait()"]))
    assert (end.outcome, len(env.performed), len(record.more_actions)) == ("pass", 2, 1)


@pytest.mark.parametrize(
    "text",
    [
        "click(5,5)\nclick(5,",
        "click(5,5)\nclik(5,5)",
        "\n".join(["wait()"] * (MOST + 1)),
        "wait()\n",
    ],
)
async def test_a_completion_with_a_malformed_part_or_too_many_does_nothing(text: str) -> None:
    env = Recorded()
    end, [record], _ = await play(env, text)
    assert (end.outcome, end.stop_reason, env.performed) == ("fail", "malformed", [])
    assert (record.action, record.more_actions) == (None, [])
    assert record.error == end.reason != ""


async def test_several_actions_are_malformed_where_one_is_allowed() -> None:
    env = Recorded()
    end, [record], _ = await play(env, "click(5,5)\nclick(6,6)", most=1)
    assert (end.stop_reason, env.performed, record.action) == ("malformed", [], None)


@pytest.mark.parametrize(
    ("error", "outcome", "stop"),
    [(EnvError, "invalid", "environment"), (ActionCausedError, "fail", "broken")],
)
async def test_an_environment_that_breaks_in_the_middle_costs_the_episode(
    error: type[EnvError], outcome: str, stop: str
) -> None:
    env = Recorded(breaks_at=1, error=error)
    end, [record], _ = await play(env, "move(100,1)\nmove(200,1)\nmove(300,1)")
    assert (end.outcome, end.stop_reason, end.steps) == (outcome, stop, 1)
    assert len(env.performed) == 1
    # The one that broke it is the last.
    assert [action["x"] for action in (record.action, *record.more_actions) if action] == [16, 33]
    assert record.reward == 2.0


async def test_a_judge_sees_the_actions_of_a_completion_and_one_screen_after_them() -> None:
    """As `dart data judge` sees them later, from the stored steps."""
    env = Recorded()
    judge = Judge(JudgeConfig(url="http://eyes", model="eyes"), JudgeLimits(attempts=1))
    seen: list[Evidence] = []

    class Watched(JudgedEnv):
        async def evaluate(self) -> Verdict:
            self._note_actions()
            assert self._evidence is not None
            seen.append(self._evidence)
            return await AsyncEnv.evaluate(self)

    player = Watched(
        ThreadedEnv(lambda: env, "t/0"), Deadlines(20.0, 20.0, 20.0), judge=judge, checks=True
    )
    spec = dataclasses.replace(action_spec(), action_parser=make_action_parser("compact", MOST))
    sink, first = Memory(), "move(1,1)\nmove(500,500)"
    says = Says(first, "wait()", "done()\nmove(9,9)")
    end = await play_episode(player, lease(), MENU, says, sink, spec)
    await player.close()
    [evidence] = seen
    stored = judge.evidence(sink.steps[0].instruction, sink.steps[0].screenshot)
    after = [*(record.screenshot for record in sink.steps[1:]), end.screenshot]
    for record, screen in zip(sink.steps, after, strict=True):
        stored.add([record.action or {}, *record.more_actions], screen)
    assert evidence.actions == stored.actions
    assert len(evidence.actions) == 4
    assert evidence.screens() == stored.screens()
    titles = [title for title, _ in stored.screens()]
    assert titles[1:-1] == ["The screen after action 2:", "The screen after action 3:"]
