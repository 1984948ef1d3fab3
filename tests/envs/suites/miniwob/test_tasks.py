"""Promises about the tasks of suite `miniwob`: each can be passed, and what is left out has its reason.

The real browser plays; where it or the package is not installed, these tests are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bus.errors import MissingPartError, TaskError
from envs.contract.actions import Action, Click, Wait
from envs.contract.base import GuiEnv
from envs.contract.registry import select_tasks
from envs.suites.miniwob.env import MiniwobEnv, MiniwobSuite
from envs.suites.miniwob.tasks import (
    LEFT_OUT,
    NO_ORACLE,
    PACES,
    PAGES,
    PARTIAL,
    RELOADED,
    STEP_LIMITS,
    TASKS,
    THRESHOLDS,
)
from envs.tools.browser.process import find_chromium
from envs.tools.miniwob_pages import find_pages

try:
    find_chromium()
    FOLDER = find_pages()
except MissingPartError as missing:
    pytest.skip(str(missing), allow_module_level=True)

PAGE = Path(__file__).parents[4] / "docs" / "environments" / "miniwob.md"


@pytest.fixture(scope="module")
def env() -> Iterator[MiniwobEnv]:
    instance = MiniwobSuite().make_env()
    yield instance
    instance.close()


def begin(env: GuiEnv, page: str, seed: int) -> None:
    env.reset(seed=seed, options={"task": f"miniwob/{page}"})


def middle(env: MiniwobEnv, selector: str) -> Click:
    assert env._page is not None
    x, y = env._page.evaluate(
        f"(() => {{ const box = document.querySelector('{selector}').getBoundingClientRect(); "
        "return [box.left + box.width / 2, box.top + box.height / 2].map(Math.round); })()"
    )
    return Click(x=x, y=y)


def test_every_page_of_the_package_is_a_task_or_left_out_for_a_reason() -> None:
    pages = {page.stem for page in FOLDER.glob("*.html")}
    tasks = {task.params["page"] for task in TASKS.values()}
    assert tasks | set(LEFT_OUT) == pages
    assert not tasks & set(LEFT_OUT)
    assert sum(len(pages.split()) for pages in PAGES.values()) == len(tasks)
    assert tasks >= RELOADED | PARTIAL | {*STEP_LIMITS, *THRESHOLDS, *PACES}
    assert set(THRESHOLDS) <= PARTIAL


def test_a_page_without_an_oracle_has_its_reason(env: MiniwobEnv) -> None:
    begin(env, "click-test", 0)
    env.oracle_action()
    assert env._page is not None
    solved = set(env._page.evaluate("Object.keys(dartOracleParts.solvers)"))
    assert {task.params["page"] for task in TASKS.values()} - solved == set(NO_ORACLE)
    assert solved <= {task.params["page"] for task in TASKS.values()}


def test_the_documentation_lists_every_page_of_its_own_kind() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for reasons in (LEFT_OUT, NO_ORACLE):
        for page, reason in reasons.items():
            assert f"| `{page}` | {reason} |" in text
    for page in PARTIAL:
        assert f"| `{page}` | {THRESHOLDS.get(page, 1.0):g} |" in text


def test_a_page_that_is_left_out_is_refused_with_its_reason() -> None:
    with pytest.raises(TaskError, match="leaves out 'miniwob/hover-shape': its page never ends"):
        select_tasks("miniwob", ["miniwob/hover-shape"])


@pytest.mark.parametrize(
    "page",
    [
        *("bisect-angle", "draw-circle", "moving-items", "right-angle"),  # how close is measured
        *("click-scroll-list", "count-shape", "multi-layouts", "terminal", "use-colorwheel-2"),
    ],
)
def test_the_oracle_passes(env: MiniwobEnv, page: str) -> None:
    for seed in (1, 2):
        begin(env, page, seed)
        for _ in range(TASKS[f"miniwob/{page}"].max_steps):
            if env.step(env.oracle_action())[2]:
                break
        assert env.evaluate().outcome == "pass", (page, seed, env.evaluate())


def test_every_light_of_simon_says_is_on_a_screen(env: MiniwobEnv) -> None:
    """With waits of any length: a player that remembers the lights passes within the limit."""
    for seed, wait in ((0, Wait()), (1, Wait(seconds=5)), (2, Wait(seconds=0.1)), (3, Wait())):
        begin(env, "simon-says", seed)
        assert env._page is not None
        actions: list[Action] = []
        lights: list[str] = []
        while lit := env._page.evaluate("document.querySelector('#area .push')?.id ?? ''"):
            lights.append(lit)
            actions.append(wait)
            env.step(wait)
        for light in lights:
            actions.append(middle(env, f"#{light}"))
            env.step(actions[-1])
        assert env.evaluate().outcome == "pass", (seed, lights)
        assert len(actions) <= TASKS["miniwob/simon-says"].max_steps


@pytest.mark.parametrize(("metric", "outcome"), [("threshold", "fail"), ("published", "pass")])
def test_the_published_metric_passes_every_reward_above_0(metric: str, outcome: str) -> None:
    instance = MiniwobSuite().make_env(metric=metric)  # type: ignore[arg-type]
    try:
        begin(instance, "find-greatest", 0)
        assert instance._page is not None
        instance._page.evaluate("core.endEpisode(0.1, true), 0")
        instance.step(Wait(seconds=0))
        assert instance.evaluate().outcome == outcome
        begin(instance, "find-greatest", 0)
        instance._page.evaluate("core.endEpisode(0, true), 0")
        instance.step(Wait(seconds=0))
        assert instance.evaluate().outcome == "fail"
    finally:
        instance.close()
