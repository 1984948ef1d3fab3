"""The worked examples of the docs do what the docs say."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from dart_cli.config.load import load_config
from dart_cli.config.rules.check import check_config
from envs.contract.actions import Action, Click, Done, Type
from envs.contract.base import GuiEnv, Solvable, Task
from envs.contract.registry import load_suite, make_env

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
GUESTS = f"{EXAMPLES / 'guests_env.py'}:GuestsSuite"
LOGIN = f"{EXAMPLES / 'login_env.py'}:LoginSuite"
PLAYED = [(GUESTS, "guests/remove", 2), (LOGIN, "login/enter", 6)]
"""Suite, task, steps of its solution."""

ANSWERS = (Click(x=32, y=84), Click(x=95, y=84))
"""The buttons of the dialog of the guests."""


def made(suite: str, task_id: str, seed: int) -> tuple[GuiEnv, str]:
    """The environment, reset, and its instruction."""
    env = make_env(suite)
    task: Task = load_suite(suite).tasks[task_id]
    _, info = env.reset(seed=seed, options={"task": task})
    return env, info["instruction"]


def solve(env: GuiEnv, steps: int) -> list[Action]:
    """So many steps of the environment's own solution."""
    taken = []
    for _ in range(steps):
        assert isinstance(env, Solvable)
        taken.append(env.oracle_action())
        env.step(taken[-1])
    return taken


def test_the_first_example_is_short() -> None:
    lines = [line for line in (EXAMPLES / "guests_env.py").read_text().splitlines() if line.strip()]
    assert len(lines) < 70
    ast.parse("\n".join(lines))


@pytest.mark.parametrize(("suite", "task_id", "steps"), PLAYED)
def test_an_example_passes_by_its_solution(suite: str, task_id: str, steps: int) -> None:
    for seed in range(20):
        env, _ = made(suite, task_id, seed)
        solve(env, steps - 1)
        assert env.evaluate().outcome == "fail"
        assert isinstance(env, Solvable)
        _, _, terminated, truncated, _ = env.step(env.oracle_action())
        assert (terminated, truncated, env.evaluate().outcome) == (True, False, "pass"), seed


@pytest.mark.parametrize(("suite", "task_id", "steps"), PLAYED)
def test_an_example_repeats_with_its_seed(suite: str, task_id: str, steps: int) -> None:
    env = make_env(suite)
    for seed in range(5):
        looks = []
        for _ in range(2):
            shown, info = env.reset(seed=seed, options={"task": task_id})
            looks.append([info["instruction"], shown.screenshot])
            for action in [*solve(env, 1), Done()]:
                looks[-1].append(env.step(action)[0].screenshot)
        assert looks[0] == looks[1]
        assert looks[0][1] != looks[0][2], "a step changes the screen"


@pytest.mark.parametrize(("suite", "task_id", "steps"), PLAYED)
def test_an_example_judges_the_state_and_ends_in_time(suite: str, task_id: str, steps: int) -> None:
    env, _ = made(suite, task_id, 3)
    most = load_suite(suite).tasks[task_id].max_steps
    ends = [env.step(Click(x=1, y=1))[2:4] for _ in range(most - 1)]
    assert ends == [(False, False)] * (most - 1)
    assert env.step(Done())[3]
    assert env.evaluate().outcome == "fail"


def test_one_guest_and_one_answer_of_all_pass() -> None:
    for seed in range(20):
        passed = []
        for row in range(4):
            for answer in ANSWERS:
                env, instruction = made(GUESTS, "guests/remove", seed)
                env.step(Click(x=63, y=21 + 28 * row))
                _, reward, terminated, _, _ = env.step(answer)
                verdict = env.evaluate()
                assert terminated
                assert reward == float(verdict.outcome == "pass")
                if reward:
                    passed.append(f'remove "{verdict.reason.split()[1].strip(",")}"')
        assert passed == [instruction]


@pytest.mark.parametrize("wrong", ["user", "password"])
def test_a_wrong_name_or_password_stays_outside_and_can_be_typed_again(wrong: str) -> None:
    env: Any = made(LOGIN, "login/enter", 5)[0]
    for name in ("user", "password"):
        env.step(middle(env.form[name]))
        env.step(Type(text="kavotu" if name == wrong else env.account[name]))
    env.step(middle(env.form["login"]))
    assert not env.inside
    assert env.evaluate().outcome == "fail"
    solve(env, 4 if wrong == "user" else 3)
    assert env.evaluate().outcome == "pass"


def test_who_logs_out_has_failed() -> None:
    env: Any = made(LOGIN, "login/enter", 6)[0]
    solve(env, 5)
    assert env.inside
    assert env.step(middle(env.welcome["logout"]))[2]
    assert env.evaluate().outcome == "fail"


def middle(box: tuple[int, int, int, int]) -> Click:
    return Click(x=(box[0] + box[2]) // 2, y=(box[1] + box[3]) // 2)


@pytest.mark.parametrize("name", ["guests.toml", "login.toml", "tiles.toml"])
def test_an_example_s_configuration_is_valid(name: str) -> None:
    config = load_config(EXAMPLES / name)
    suite = config.env.suite.replace("docs/examples", str(EXAMPLES))
    check_config(config.model_copy(update={"env": config.env.model_copy(update={"suite": suite})}))
