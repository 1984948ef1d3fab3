"""Promises of mouse and keyboard in suite `miniwob`: what is held, along which path, and its release.

The real browser plays; where it or the package is not installed, these tests are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from bus.errors import MissingPartError
from dart_cli.language.coordinates import make_coordinate_map
from dart_cli.language.parsers import make_action_parser
from envs.contract.actions import (
    Action,
    Click,
    Done,
    Drag,
    KeyDown,
    KeyPress,
    KeyUp,
    MouseDown,
    MouseUp,
    Move,
    TripleClick,
    Type,
)
from envs.suites.miniwob.browser import HEIGHT, WIDTH
from envs.suites.miniwob.env import MiniwobEnv, MiniwobSuite
from envs.tools.browser.process import find_chromium
from envs.tools.miniwob_pages import find_pages

try:
    find_chromium()
    find_pages()
except MissingPartError as missing:
    pytest.skip(str(missing), allow_module_level=True)

HEARD = """(() => {
const first = !window.heard;  // a page stays loaded for the next episode of its task
window.heard = [];
if (first) for (const kind of 'mousedown mousemove mouseup click dblclick keydown keyup'.split(' '))
  addEventListener(kind, (event) => {
    const keys = ['ctrl', 'shift', 'alt', 'meta'].filter((key) => event[key + 'Key']);
    const rest = kind.startsWith('key') ? [event.key] :
      [event.button, event.buttons, event.clientX, event.clientY];
    heard.push([kind, keys.join('+'), ...rest]);
  }, true);
})(), 0"""


@pytest.fixture(scope="module")
def env() -> Iterator[MiniwobEnv]:
    instance = MiniwobSuite().make_env(browsers=1)
    yield instance
    instance.close()


class Page:
    """An episode of a page, which notes the events that reach it."""

    def __init__(self, env: MiniwobEnv, name: str) -> None:
        self.env = env
        env.reset(seed=3, options={"task": f"miniwob/{name}"})
        self.value(HEARD)

    def value(self, expression: str) -> Any:
        assert self.env._page is not None
        return self.env._page.evaluate(expression)

    def act(self, *actions: Action) -> list[list[Any]]:
        """Perform actions; the events that came of them."""
        for action in actions:
            self.env.step(action)
        return list(self.value("heard.splice(0)"))

    def centre(self, selector: str) -> tuple[int, int]:
        x, y = self.value(
            f"(() => {{ const box = document.querySelector({selector!r}).getBoundingClientRect();"
            " return [Math.round(box.left + box.width / 2), Math.round(box.top + box.height / 2)];"
            " })()"
        )
        return x, y


@pytest.fixture
def text(env: MiniwobEnv) -> Page:
    return Page(env, "enter-text")


def test_a_click_holds_its_modifiers(text: Page) -> None:
    events = text.act(Click(x=80, y=150, modifiers=("ctrl", "shift")))
    assert events == [
        ["keydown", "ctrl", "Control"],
        ["keydown", "ctrl+shift", "Shift"],
        ["mousedown", "ctrl+shift", 0, 1, 80, 150],
        ["mouseup", "ctrl+shift", 0, 0, 80, 150],
        ["click", "ctrl+shift", 0, 0, 80, 150],
        ["keyup", "ctrl", "Shift"],
        ["keyup", "", "Control"],
    ]


def test_a_key_stays_down_for_the_actions_that_follow(text: Page) -> None:
    events = text.act(
        KeyDown(key="ctrl"), Click(x=80, y=150, modifiers=("ctrl",)), KeyUp(key="ctrl")
    )
    kinds = [(event[0], event[1]) for event in events]
    assert kinds == [
        ("keydown", "ctrl"),
        ("mousedown", "ctrl"),
        ("mouseup", "ctrl"),
        ("click", "ctrl"),
        ("keyup", ""),
    ]
    assert text.act(Click(x=80, y=150))[0][:2] == ["mousedown", ""]


def test_shift_and_ctrl_change_what_is_typed(text: Page) -> None:
    x, y = text.centre("#tt")
    text.act(Click(x=x, y=y), KeyDown(key="shift"), Type(text="ab1"), KeyUp(key="shift"))
    assert text.value("document.querySelector('#tt').value") == "AB!"
    text.act(KeyDown(key="ctrl"), KeyPress(keys=["a"]), KeyUp(key="ctrl"), Type(text="c"))
    assert text.value("document.querySelector('#tt').value") == "c"


def test_three_clicks_select_the_line(text: Page) -> None:
    x, y = text.centre("#tt")
    text.act(Click(x=x, y=y), Type(text="two words"), TripleClick(x=x, y=y))
    assert text.value("String(getSelection())") == "two words"


@pytest.mark.parametrize(("button", "number", "bit"), [("left", 0, 1), ("right", 2, 2)])
def test_a_button_is_held_from_its_press_to_its_release(
    text: Page, button: Any, number: int, bit: int
) -> None:
    events = text.act(MouseDown(x=20, y=180, button=button), Move(x=60, y=180), Move(x=60, y=200))
    assert events[0] == ["mousedown", "", number, bit, 20, 180]
    moved = events[1:]
    assert {event[0] for event in moved} == {"mousemove"}
    assert {event[3] for event in moved} == {bit}
    assert len(moved) > 4  # in strides: pages follow the path
    assert text.act(MouseDown(x=61, y=200, button=button))[-1][0] == "mousemove"  # it is down
    released = text.act(MouseUp(button=button))
    assert ["mouseup", "", number, 0, 61, 200] in released
    assert text.act(MouseUp(button=button)) == []


def test_a_drag_with_the_right_button_holds_the_right_button(text: Page) -> None:
    events = text.act(Drag(path=[(20, 180), (60, 180), (60, 200)], button="right"))
    assert events[0] == ["mousedown", "", 2, 2, 20, 180]
    assert ["mousemove", "", 0, 2, 60, 180] in events
    assert ["mouseup", "", 2, 0, 60, 200] in events


@pytest.mark.parametrize("keys", [("ctrl",), ("shift",), ("alt",), ("meta",), ()])
def test_a_link_opens_no_tab_or_window_of_its_own(env: MiniwobEnv, keys: Any) -> None:
    page = Page(env, "click-link")
    page.value("document.querySelector('#area').innerHTML = '<a id=a href=#x>a link</a>', 0")
    x, y = page.centre("#a")
    page.act(Click(x=x, y=y, button="left" if keys else "middle", modifiers=keys))
    assert env._page is not None
    targets = env._page.browser.call("Target.getTargets")["targetInfos"]
    assert [target["type"] for target in targets].count("page") <= 2  # this one, and a spare one


@pytest.mark.parametrize("end", ["next reset", "end of the episode"])
def test_what_an_episode_left_down_is_released(env: MiniwobEnv, end: str) -> None:
    page = Page(env, "enter-text")
    page.act(KeyDown(key="ctrl"), KeyDown(key="a"), MouseDown(x=80, y=150, button="right"))
    if end == "end of the episode":
        env.step(Done())
        events = page.value("heard.splice(0)")
        assert [event[:3] for event in events if event[0] != "mousemove"] == [
            ["mouseup", "ctrl", 2],
            ["keyup", "ctrl", "a"],
            ["keyup", "", "Control"],
        ]
    page = Page(env, "enter-text")
    assert page.act(Click(x=80, y=150))[0] == ["mousedown", "", 0, 1, 80, 150]
    x, y = page.centre("#tt")
    page.act(Click(x=x, y=y), Type(text="a"))
    assert page.value("document.querySelector('#tt').value") == "a"


# --- draw-circle: a path of two points cannot pass it ------------------------------------------


def circle(page: Page, points: int) -> list[tuple[int, int]]:
    """Points around the mark, 20 pixels from it; the last is the first."""
    x, y = page.centre("#circ")
    turns = [2 * math.pi * n / points for n in range(points + 1)]
    return [(round(x + 20 * math.cos(turn)), round(y + 20 * math.sin(turn))) for turn in turns]


def play(page: Page, action_parser: str, actions: list[Action]) -> str:
    """The verdict after actions that a policy wrote."""
    language = make_action_parser(action_parser)
    grid = make_coordinate_map(
        "thousandths" if action_parser == "compact" else "resized", WIDTH, HEIGHT
    )
    for action in actions:
        page.env.step(language.parse(language.format(action, grid), grid))
    x, y = page.centre("#controls button")
    page.env.step(Click(x=x, y=y))
    return page.env.evaluate().outcome


def test_a_circle_is_drawn_by_a_drag_along_a_path(env: MiniwobEnv) -> None:
    page = Page(env, "draw-circle")
    path = circle(page, 24)
    assert play(page, "compact", [Drag(path=path)]) == "pass"
    page = Page(env, "draw-circle")
    assert play(page, "compact", [Drag(path=[path[0], path[12]])]) == "fail"


def test_a_circle_is_drawn_by_press_moves_and_release(env: MiniwobEnv) -> None:
    page = Page(env, "draw-circle")
    first, *way = circle(page, 24)
    moves = [Move(x=x, y=y) for x, y in way]
    assert play(page, "uitars", [MouseDown(x=first[0], y=first[1]), *moves, MouseUp()]) == "pass"
