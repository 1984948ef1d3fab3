"""The web application of docs/examples/web: its tasks, what its pages report, and what an explorer sees."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bus.errors import MissingPartError
from envs.contract.actions import Click, Done, Wait
from envs.contract.elements import Explorable
from envs.suites.web.env import WebEnv, WebSuite
from envs.tools.browser.process import find_chromium

try:
    find_chromium()
except MissingPartError as missing:
    pytest.skip(str(missing), allow_module_level=True)

FILE = Path(__file__).parents[4] / "docs" / "examples" / "web" / "guests.toml"
SUITE = WebSuite(FILE)


@pytest.fixture(scope="module")
def env() -> Iterator[WebEnv]:
    instance = SUITE.make_env()
    yield instance
    instance.close()


def begin(env: WebEnv, task: str, seed: int = 0, **options: object) -> str:
    _, info = env.reset(seed=seed, options={"task": f"guests/{task}", **options})
    return str(info["instruction"])


@pytest.mark.parametrize("task", ["invite", "dinner", "add", "dinner-tab"])
def test_a_solution_passes_on_its_last_action(env: WebEnv, task: str) -> None:
    instructions = set()
    for seed in range(3):
        instructions.add(begin(env, task, seed))
        for _ in range(SUITE.tasks[f"guests/{task}"].tier):
            assert env.evaluate().outcome == "fail"
            _, reward, terminated, truncated, _ = env.step(env.oracle_action())
        assert (reward, terminated, truncated) == (1.0, True, False)
        assert env.evaluate().outcome == "pass"
    assert len(instructions) > 1, "a seed draws its own instance"
    assert SUITE.tasks[f"guests/{task}"].split == ("heldout" if task == "dinner-tab" else "train")


def test_an_explorer_goes_on_at_the_goal(env: WebEnv) -> None:
    begin(env, "invite", free=True)
    for _ in range(2):
        _, _, terminated, truncated, _ = env.step(env.oracle_action())
        assert not terminated
        assert not truncated
    assert env.evaluate().outcome == "pass"


def test_a_change_beside_the_task_fails_it(env: WebEnv) -> None:
    begin(env, "invite")
    env.step(env.oracle_action())
    send = env.oracle_action()
    env.gui.ask("send('/dinner', {dinner: 'Cake'})")
    env.step(send)
    verdict = env.evaluate()
    assert verdict.outcome == "fail"
    assert "dinner" in verdict.reason


def test_what_a_page_reports_comes_with_the_call_in_which_it_happened(env: WebEnv) -> None:
    begin(env, "invite")
    env.gui.ask("setTimeout(() => { fetch('/missing'); nothing.at.all }, 10), 1")
    info = env.step(Wait(seconds=0.5))[-1]
    assert len(info["app_log"]) == 2
    assert any("404" in line and "/missing" in line for line in info["app_log"])
    assert any("ReferenceError: nothing is not defined" in line for line in info["app_log"])
    assert env.step(Done())[-1]["app_log"] == []
    _, info = env.reset(seed=1, options={"task": "guests/invite"})
    assert info["app_log"] == [], "an episode has no lines of the one before it"


def test_an_explorer_sees_the_elements_of_the_screen_and_its_state(env: WebEnv) -> None:
    assert isinstance(env, Explorable)
    states = set()
    for seed in range(3):
        begin(env, "invite", seed)
        states.add(env.state())
    assert len(states) == 1, "neither names nor sessions make another screen"
    names = [element.name for element in env.elements()]
    assert names[:2] == ["Guests", "Dinner"]
    assert names[-2:] == ["New guest", "Add"]
    tab = env.elements()[1].centre
    env.step(Click(x=tab[0], y=tab[1]))
    assert env.state().route == "/#dinner"
    assert [element.role for element in env.elements()] == ["tab"] * 2 + ["radio"] * 3
