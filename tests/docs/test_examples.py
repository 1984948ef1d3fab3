"""The worked examples of the docs do what the docs say."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

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


def test_the_example_passes_by_the_right_click_alone(env: GuiEnv) -> None:
    task = load_suite(SUITE).tasks["lights/on"]
    passed = 0
    for seed in range(30):
        outcomes = []
        for lamp in range(3):
            _, info = env.reset(seed=seed, options={"task": task})
            assert info["instruction"].startswith("click the ")
            _, reward, terminated, _, _ = env.step(Click(x=lamp * 56 + 28, y=82))
            outcomes.append(env.evaluate().outcome == "pass")
            assert terminated == outcomes[-1]
            assert reward == float(outcomes[-1])
        passed += sum(outcomes)
        assert sum(outcomes) == 1
    assert passed == 30


def test_the_example_repeats_with_its_seed_and_judges_the_state_not_the_claim(env: GuiEnv) -> None:
    task = load_suite(SUITE).tasks["lights/on"]
    first, _ = env.reset(seed=7, options={"task": task})
    again, _ = env.reset(seed=7, options={"task": task})
    assert first.screenshot == again.screenshot
    _, reward, terminated, _, _ = env.step(Done())
    assert (reward, terminated, env.evaluate().outcome) == (0.0, True, "fail")
