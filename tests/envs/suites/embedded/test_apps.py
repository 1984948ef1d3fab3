"""Suite apps: applications with many screens, exact judges, and a way to every page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from envs.contract.actions import Done
from envs.contract.base import Task
from envs.contract.elements import Element, performing
from envs.contract.registry import load_suite, make_env, tasks_of
from envs.suites.embedded.apps.application import AppScene
from envs.suites.embedded.env import EmbeddedEnv

TASKS = tasks_of("apps")
FIRST = {"mail": "apps/mail-star", "shop": "apps/shop-add", "centre": "apps/centre-connect"}


def begin(task: str, seed: int = 1) -> EmbeddedEnv:
    env = make_env("apps")
    assert isinstance(env, EmbeddedEnv)
    env.reset(seed=seed, options={"task": task, "free": True})
    return env


def scene_of(env: EmbeddedEnv) -> AppScene:
    scene = env._playing()[0]
    assert isinstance(scene, AppScene)
    return scene


def press(env: EmbeddedEnv, *names: str) -> None:
    for name in names:
        element = next(each for each in env.elements() if each.name == name)
        env.step(performing(element, "click")[0])


def screens(application: str) -> Iterator[tuple[EmbeddedEnv, str]]:
    """Every screen that presses lead to, breadth first."""
    task = FIRST[application]
    elements: dict[str, tuple[Element, ...]] = {}
    waiting: list[tuple[Element, ...]] = [()]
    while waiting:
        way = waiting.pop(0)
        env = begin(task)
        for element in way:
            env.step(performing(element, "click")[0])
        state = env.state()
        if state.route in elements:
            continue
        elements[state.route] = way
        waiting += [
            (*way, each)
            for each in env.elements()
            if "click" in each.actions and each.role not in ("toggle", "slider")
        ]
        yield env, state.route


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.id)
def test_the_oracle_passes_every_seed_within_its_tier(task: Task) -> None:
    env = make_env("apps")
    assert isinstance(env, EmbeddedEnv)
    for seed in (*range(5), *range(1_000_000, 1_000_003)):
        _, info = env.reset(seed=seed, options={"task": task})
        assert info["need"] <= task.tier
        assert env.evaluate().outcome == "fail"
        for _ in range(info["need"]):
            *_, last = env.step(env.oracle_action())
        assert last["verdict"].outcome == "pass"


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.id)
def test_a_change_too_many_fails_and_nothing_done_too(task: Task) -> None:
    env = begin(task.id)
    assert env.evaluate().outcome == "fail"
    action = env.oracle_action()
    while not isinstance(action, Done):
        env.step(action)
        action = env.oracle_action()
    assert env.evaluate().outcome == "pass"
    scene = scene_of(env)
    scene.goal["one more"] = True
    assert env.evaluate().outcome == "fail"


@pytest.mark.parametrize(
    ("application", "least", "dead_end"),
    [("mail", 20, "signed out"), ("shop", 18, "no account"), ("centre", 20, "reset")],
)
def test_an_application_has_its_screens_and_the_oracle_finds_home_from_all_but_dead_ends(
    application: str, least: int, dead_end: str
) -> None:
    routes = []
    for env, route in screens(application):
        routes.append(route)
        if route.endswith(f"/{dead_end}"):
            assert env.elements() == []
            continue
        scene, app = scene_of(env), env._playing()[1]
        for _ in range(10):
            if scene.page == scene.first:
                break
            action = scene.to(app, scene.first)
            assert action is not None
            app.dispatch(action)
        assert scene.page == scene.first, route
    assert len(routes) >= least
    assert f"{application}/{dead_end}" in routes


@pytest.mark.parametrize("application", FIRST)
def test_a_seed_draws_texts_and_no_pages(application: str) -> None:
    tasks = [task for task in TASKS if task.params["application"] == application]
    states = {begin(task.id, seed).state() for task in tasks for seed in range(4)}
    assert len({state.id for state in states}) == 1


@pytest.mark.parametrize(
    ("application", "way", "yes"),
    [
        ("mail", ["Mail", "Log out"], "Log out"),
        ("shop", ["You", "Account", "Delete account"], "Delete"),
        ("centre", ["Storage", "Factory reset"], "Reset"),
    ],
)
def test_destructive_actions_ask_once_more_and_are_judged(
    application: str, way: list[str], yes: str
) -> None:
    env = begin(FIRST[application])
    before = scene_of(env).facts()
    press(env, *way, "Keep")
    assert scene_of(env).facts() == before
    press(env, *(way if application == "mail" else way[-1:]), yes)
    assert scene_of(env).facts() != before
    assert env.elements() == []


def test_a_paid_order_is_placed_once_and_empties_the_cart() -> None:
    env = begin("apps/shop-order")
    scene = scene_of(env)
    while not isinstance(action := env.oracle_action(), Done):
        env.step(action)
    assert len(scene.facts()["new orders"]) == 1
    press(env, "Start page", "Cart (0)")
    assert "Continue" not in {each.name for each in env.elements()}


def test_several_tasks_share_an_application_and_some_are_held_out() -> None:
    suite = load_suite("apps")
    for application in FIRST:
        tasks = [t for t in suite.tasks.values() if t.params["application"] == application]
        assert 4 <= len(tasks) <= 8
        assert {task.split for task in tasks} == {"train", "heldout"}
