"""The worked examples of the docs do what the docs say."""

from __future__ import annotations

import ast
from itertools import permutations
from pathlib import Path

import pytest

from dart_cli.config.load import load_config
from dart_cli.config.rules.check import check_config
from envs.actions import Click, Done
from envs.base import GuiEnv
from envs.registry import load_suite, make_env

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "lights_env.py"
SUITE = f"{EXAMPLE}:LightsSuite"


def test_the_example_is_under_sixty_lines() -> None:
    lines = [line for line in EXAMPLE.read_text().splitlines() if line.strip()]
    assert len(lines) < 60
    ast.parse("\n".join(lines))


@pytest.fixture
def env() -> GuiEnv:
    made = make_env(SUITE)
    assert isinstance(made, GuiEnv)
    return made


def test_the_example_passes_by_the_right_two_clicks_alone(env: GuiEnv) -> None:
    task = load_suite(SUITE).tasks["lights/on"]
    switches, lamps = (46, 122), (28, 84, 140)  # pixels
    for seed in range(30):
        passed = 0
        for switch in switches:
            for lamp in lamps:
                _, info = env.reset(seed=seed, options={"task": task})
                assert info["instruction"].startswith("click the ")
                _, _, blown, _, _ = env.step(Click(x=switch, y=132))
                if blown:
                    assert env.evaluate().outcome == "fail"
                    continue
                _, reward, terminated, _, _ = env.step(Click(x=lamp, y=62))
                assert terminated
                assert reward == float(env.evaluate().outcome == "pass")
                passed += env.evaluate().outcome == "pass"
        assert passed == 1


def test_the_example_ends_in_time_and_unhurt_by_clicks_on_nothing(env: GuiEnv) -> None:
    env.reset(seed=3, options={"task": load_suite(SUITE).tasks["lights/on"]})
    ends = [env.step(Click(x=84, y=10))[2:4] for _ in range(4)]
    assert ends == [(False, False)] * 3 + [(False, True)]


def test_the_example_repeats_with_its_seed_and_judges_the_state_not_the_claim(env: GuiEnv) -> None:
    task = load_suite(SUITE).tasks["lights/on"]
    first, _ = env.reset(seed=7, options={"task": task})
    again, _ = env.reset(seed=7, options={"task": task})
    assert first.screenshot == again.screenshot
    _, reward, terminated, _, _ = env.step(Done())
    assert (reward, terminated, env.evaluate().outcome) == (0.0, True, "fail")


VENDING = f"{EXAMPLE.with_name('vending_env.py')}:VendingSuite"
PARCELS = f"{EXAMPLE.with_name('parcels_env.py')}:ParcelsSuite"


@pytest.mark.parametrize(
    ("suite", "task_id"), [(VENDING, "vending/buy"), (PARCELS, "parcels/send")]
)
def test_the_page_s_environments_pass_by_their_solutions(suite: str, task_id: str) -> None:
    task, made = load_suite(suite).tasks[task_id], make_env(suite)
    for seed in range(10):
        made.reset(seed=seed, options={"task": task})
        steps = 0
        terminated = False
        while not terminated:
            _, _, terminated, truncated, _ = made.step(made.oracle_action())
            steps += 1
            assert not truncated
        assert (steps, made.evaluate().outcome) == (3, "pass")


def test_the_page_s_environment_gives_nothing_for_clicks_in_another_order() -> None:
    task, made = load_suite(VENDING).tasks["vending/buy"], make_env(VENDING)
    _, info = made.reset(seed=1, options={"task": task})
    right = [made.oracle_action()]
    for _ in range(2):
        made.step(right[-1])
        right.append(made.oracle_action())
    for order in permutations(right):
        made.reset(seed=1, options={"task": task})
        for action in order:
            if made.step(action)[2]:
                break
        assert (made.evaluate().outcome == "pass") == (list(order) == right), order
    assert info["instruction"].startswith("click the ")


GUESTS = f"{EXAMPLE.with_name('guests_env.py')}:GuestsSuite"


def test_one_guest_and_one_answer_of_all_pass() -> None:
    env = make_env(GUESTS)
    assert isinstance(env, GuiEnv)
    task = load_suite(GUESTS).tasks["guests/remove"]
    for seed in range(20):
        passed = []
        for row in range(4):
            for answer in (32, 95):  # pixels
                _, info = env.reset(seed=seed, options={"task": task})
                env.step(Click(x=63, y=21 + 28 * row))
                _, reward, terminated, _, _ = env.step(Click(x=answer, y=84))
                verdict = env.evaluate()
                assert terminated
                assert reward == float(verdict.outcome == "pass")
                if reward:
                    passed.append(f'remove "{verdict.reason.split()[1].strip(",")}"')
        assert passed == [info["instruction"]]


@pytest.mark.parametrize(
    "name", ["lights.toml", "tiles.toml", "vending.toml", "parcels.toml", "guests.toml"]
)
def test_an_example_s_configuration_is_valid(name: str) -> None:
    config = load_config(EXAMPLE.with_name(name))
    suite = config.env.suite.replace("docs/examples", str(EXAMPLE.parent))
    check_config(config.model_copy(update={"env": config.env.model_copy(update={"suite": suite})}))
