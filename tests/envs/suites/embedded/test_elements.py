"""What an explorer is told of the embedded suites is what is there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from envs.contract.actions import KeyPress, Type
from envs.contract.elements import Element, Explorable, Operation, performing
from envs.contract.registry import make_env, tasks_of
from envs.suites.embedded.controls import ScrollView
from envs.suites.embedded.env import EmbeddedEnv


def start(suite: str, task: str, seed: int = 0) -> EmbeddedEnv:
    env = make_env(suite)
    assert isinstance(env, EmbeddedEnv)
    env.reset(seed=seed, options={"task": task})
    env._max_steps = 10_000
    return env


def element_named(env: EmbeddedEnv, name: str) -> Element:
    return next(each for each in env.elements() if each.name == name)


def act(env: EmbeddedEnv, name: str, operation: Operation = "click", text: str = "") -> None:
    for action in performing(element_named(env, name), operation, text):
        env.step(action)


def screens(suite: str) -> Iterator[EmbeddedEnv]:
    """Every template at its start, and with a menu, list or dialog open on the way to its goal."""
    for at, task in enumerate(tasks_of(suite)):
        env = start(suite, task.id, at)
        yield env
        for _ in range(3):
            *_, terminated, _, _ = env.step(env.oracle_action())
            if terminated:
                break
            yield env


@pytest.mark.parametrize("suite", ["mini", "desk"])
def test_a_click_in_the_middle_of_an_element_reaches_its_widget(suite: str) -> None:
    for env in screens(suite):
        _, app = env._playing()
        reached = {tuple(info.bbox): info for info in app.widgets()}
        elements = env.elements()
        for element in elements:
            left, top, right, bottom = element.box
            x, y = element.centre
            assert 0 <= left <= x < right <= app.ui.width
            assert 0 <= top <= y < bottom <= app.ui.height
            widgets = app.path(x, y)
            if element.actions == ("scroll",):
                assert any(isinstance(each, ScrollView) for each in widgets)
                continue
            pressed = next(each for each in reversed(widgets) if each.clickable)
            assert tuple(pressed.visible) == element.box
            assert reached[element.box].role == element.role
        assert len({each.place for each in elements}) == len(elements)


def test_the_same_screen_is_the_same_state_twice() -> None:
    for env in screens("desk"):
        assert (env.state(), env.elements()) == (env.state(), env.elements())


def test_texts_that_differ_by_seed_are_no_other_state() -> None:
    ids = {start("desk", "desk/files-open", seed).state().id for seed in range(8)}
    assert len(ids) == 1
    ids = {start("desk", "desk/sign-up", seed).state().id for seed in range(8)}
    assert len(ids) == 1


def test_typing_is_no_other_state_and_navigation_is() -> None:
    env = start("desk", "desk/settings-three")
    assert isinstance(env, Explorable)
    pages = {}
    for page in ("Network", "Display", "Sound", "Privacy", "System"):
        act(env, page)
        pages[page] = env.state().id
    assert len(set(pages.values())) == 5
    act(env, "Network")
    assert env.state().id == pages["Network"]
    act(env, "Proxy")
    opened = env.state()
    assert opened.id != pages["Network"]
    assert "Proxy" in opened.route
    env.step(KeyPress(keys=["escape"]))
    assert env.state().id == pages["Network"]
    act(env, "Search", "type", "zzz")
    nothing = env.state().id
    env.step(Type(text="z"))
    assert env.state().id == nothing


def test_a_control_is_called_what_stands_beside_it() -> None:
    env = start("desk", "desk/settings-three")
    act(env, "Sound")
    assert {"Volume", "Alerts", "Output", "Mute"} <= {each.name for each in env.elements()}
    assert element_named(env, "Search").actions == ("click", "type")


def test_a_dialog_alone_can_be_reached_and_the_screen_beneath_still_counts() -> None:
    env = start("desk", "desk/files-open")
    before = env.state().id
    act(env, "New folder")
    assert {each.name for each in env.elements()} == {"Name", "Cancel", "Create", "close"}
    assert env.state().id != before
    act(env, "Cancel")
    assert env.state().id == before


def test_what_is_disabled_is_no_element_and_another_state_once_it_works() -> None:
    env = start("desk", "desk/files-open")
    before = env.state().id
    assert "Rename" not in {each.name for each in env.elements()}
    row = next(each for each in env.elements() if each.role == "row")
    assert row.actions == ("click", "double_click")
    act(env, row.name)
    assert "Rename" in {each.name for each in env.elements()}
    assert env.state().id != before
