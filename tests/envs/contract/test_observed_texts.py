"""Promises of the texts that an environment gives beside its screenshot."""

from __future__ import annotations

from typing import Any

import pytest

from bus.errors import EnvError, TaskError
from dart_cli.env import calls
from dart_cli.language.coordinates import make_coordinate_map
from envs.contract.base import Observation
from envs.contract.observed_texts import Widget, bounded, outline, prompt_text
from envs.contract.registry import check_observe, check_options, make_env
from envs.suites.osworld.accessibility import outline_of

TREE = """<desktop-frame
  xmlns:st="https://accessibility.ubuntu.example.org/ns/state"
  xmlns:cp="https://accessibility.ubuntu.example.org/ns/component">
<application name="gedit"><frame name="notes.txt" st:showing="true" cp:screencoord="(0, 27)" cp:size="(800, 500)">
<push-button name="Save" st:showing="true" cp:screencoord="(700, 30)" cp:size="(60, 20)"/>
<push-button name="Hidden"/>
<push-button st:showing="true" cp:screencoord="(5, 5)" cp:size="(9, 9)"/>
<text name="" st:showing="true" cp:screencoord="(-10, 60)" cp:size="(800, 400)">first line
second line</text>
</frame></application></desktop-frame>"""


def test_osworlds_tree_is_a_line_for_each_named_widget_on_the_screen() -> None:
    assert outline_of(TREE).split("\n") == [
        'frame "notes.txt" @(400,277)',
        'push-button "Save" @(730,40)',
        'text "first line second line" @(390,260)',
    ]


@pytest.mark.parametrize("tree", ["no xml", '<!DOCTYPE a [<!ENTITY b "c">]><a>&b;</a>'])
def test_a_tree_that_cannot_be_read_is_an_error_of_the_guest(tree: str) -> None:
    with pytest.raises(EnvError, match="accessibility tree"):
        outline_of(tree)


def test_positions_are_in_the_numbers_that_the_policy_writes() -> None:
    coordinates = make_coordinate_map("resized", 1920, 1080)
    texts = {"accessibility": outline([Widget("button", "OK", "", (1910, 1070, 20, 20))])}
    assert prompt_text(texts, 1000, make_coordinate_map("thousandths", 100, 100).to_model) == (
        'Accessibility tree (role, name, text, position):\nbutton "OK" @(1920,1080)'
    ), "beyond the screen there are no numbers"
    inside = {"accessibility": outline([Widget("button", "OK", "OK", (950, 530, 20, 20))])}
    x, y = coordinates.to_model(960, 540)
    assert prompt_text(inside, 1000, coordinates.to_model).endswith(f'button "OK" @({x},{y})')


def test_a_text_is_bounded_and_says_where_it_was_cut() -> None:
    assert bounded("accessibility", "abc", 3) == "abc"
    assert bounded("accessibility", "abcd", 3) == "abc\n[cut to the first 3 characters]"
    assert bounded("terminal", "abcd", 3) == "[cut to the last 3 characters]\nbcd", "the newest"
    both = prompt_text({"terminal": "$ ls\n", "accessibility": " "}, 100, lambda x, y: (x, y))
    assert both == "Terminal:\n$ ls", "an empty one is left out"


def test_a_suite_without_such_texts_refuses_them() -> None:
    with pytest.raises(
        TaskError, match="suite mini gives no 'terminal'; it gives screenshots alone"
    ):
        make_env("mini", observe=("terminal",))
    with pytest.raises(TaskError, match=r"suite desktop gives no 'terminal'.*accessib"):
        check_observe("desktop", ["terminal"])
    check_observe("osworld", ["accessibility", "terminal"])


def test_the_texts_are_chosen_by_env_observe_and_by_no_option() -> None:
    with pytest.raises(TaskError, match="'observe' is no option of a suite"):
        check_options("osworld", {"observe": ["terminal"]})


class Shows:
    """An environment whose observations have any texts."""

    def __init__(self, texts: Any) -> None:
        self._screen = make_env("mini").reset(seed=1, options={"task": "mini/menu"})[0]
        self._texts = texts

    def step(self, _action: object) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        screen = self._screen
        size = screen.width, screen.height
        observation = Observation(screen.screenshot, screen.media_type, *size, self._texts)
        return observation, 0.0, False, False, {}


@pytest.mark.parametrize("texts", ["plain", {"radio": "x"}, {"terminal": b"x"}])
def test_texts_of_another_form_are_an_error_of_the_environment(texts: Any) -> None:
    with pytest.raises(EnvError, match=r"step: Observation\.texts must"):
        calls.step(Shows(texts), None)  # type: ignore[arg-type]


def test_texts_that_leave_an_environment_can_be_sent() -> None:
    step = calls.step(Shows({"terminal": "a\udcff" + "b" * 300_000}), None)  # type: ignore[arg-type]
    text = step.observation.texts["terminal"]
    assert len(text) < 200_100
    text.encode()
