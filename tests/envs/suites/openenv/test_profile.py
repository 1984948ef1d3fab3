"""Profiles are read whole or refused with the place; templates fill in typed values and evaluate nothing."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.errors import TaskError
from envs.contract.actions import (
    Action,
    Answer,
    Click,
    Done,
    DoubleClick,
    Drag,
    Fail,
    Goto,
    KeyDown,
    KeyPress,
    MouseDown,
    Move,
    Scroll,
    TripleClick,
    Type,
    Wait,
)  # fmt: skip
from envs.contract.registry import load_suite
from envs.suites.openenv.env import verdict_of
from envs.suites.openenv.profile import (
    VALUES,
    RewardTable,
    at,
    read_profile,
    read_templates,
    shipped_profiles,
)

SIZE = (100, 50)
MINIMAL = """
name = "mine"
observation = { screenshot = "screen", encoding = "list" }
actions = {}
tasks = [{ id = "one" }]
"""


def filled(template, action, **tables):
    """The payloads of an action by one template."""
    templates = read_templates({action.kind: template}, tables.get("keys", {}), "+", 120)
    return templates.payloads_of(action, SIZE)


def test_every_action_may_have_a_template():
    assert set(VALUES) == {
        each.model_fields["kind"].default for each in get_args(get_args(Action)[0])
    }


@pytest.mark.parametrize(
    ("template", "action", "payloads"),
    [
        ({"x": "$x", "at": ["$fx", "$fy"]}, Click(x=24, y=12), [{"x": 24, "at": [0.245, 0.25]}]),
        ({"x": "$x", "y": "$y"}, Move(x=-5, y=500), [{"x": 0, "y": 49}]),
        ({"b": "$button", "m": "$modifiers"}, Click(x=1, y=1, button="right", modifiers=("ctrl",)),
         [{"b": "right", "m": ["Control"]}]),
        ({"from": ["$x0", "$y0"], "to": ["$x1", "$y1"]}, Drag(path=[(1, 2), (9, 9), (3, 4)]),
         [{"from": [1, 2], "to": [3, 4]}]),
        ({"path": "$path"}, Drag(path=[(1, 2), (3, 4)]), [{"path": [[1, 2], [3, 4]]}]),
        ({"d": "$direction", "n": "$amount", "px": "$dy_px"}, Scroll(x=1, y=1, dy=-2),
         [{"d": "up", "n": 2, "px": -240}]),
        ({"d": "$direction"}, Scroll(x=1, y=1, dx=3), [{"d": "right"}]),
        ({"k": "$combination", "ks": "$keys"}, KeyPress(keys=["ctrl", "A", "x"]),
         [{"k": "Control+A+x", "ks": ["Control", "A", "x"]}]),
        ({"k": "$key"}, KeyDown(key="ctrl"), [{"k": "Control"}]),
        ({"ms": "$ms", "s": "$seconds"}, Wait(seconds=1.5), [{"ms": 1500, "s": 1.5}]),
        ({"to": "$url", "text": "$$url", "n": 3, "t": True}, Goto(url="http://a"),
         [{"to": "http://a", "text": "$url", "n": 3, "t": True}]),
        ([{"first": "$x"}, {"then": "$y"}], TripleClick(x=1, y=2), [{"first": 1}, {"then": 2}]),
        ({"say": {"$call": ["tell", "$text", 1]}}, Answer(text="it's"), [{"say": 'tell("it\'s", 1)'}]),
        ({"say": {"$calls": [["a", "$x"], ["b"]]}}, DoubleClick(x=1, y=2), [{"say": "a(1)\nb()"}]),
        ({}, Done(), [{}]),
    ],
)  # fmt: skip
def test_a_template_is_filled_in_with_typed_values(template, action, payloads):
    assert filled(template, action, keys={"ctrl": "Control"}) == payloads


@settings(max_examples=30)
@given(st.text())
def test_a_text_within_a_call_stays_a_text(text):
    (payload,) = filled({"$call": ["tell", "$text"]}, Type(text=text))
    assert isinstance(payload, str)
    call = ast.parse(payload, mode="eval").body
    assert isinstance(call, ast.Call)
    assert [ast.literal_eval(each) for each in call.args] == [text]


@pytest.mark.parametrize(
    "action",
    [
        Fail(), Click(x=1, y=1, button="right"), Click(x=1, y=1, modifiers=("shift",)), MouseDown(),
    ],
)  # fmt: skip
def test_what_no_template_says_is_not_sent(action):
    templates = read_templates({"click": {"x": "$x"}, "mouse_down": {"x": "$x"}}, {}, "+", 1)
    assert templates.payloads_of(action, SIZE) == []


def test_a_button_may_have_a_template_of_its_own():
    templates = read_templates({"click": {"l": "$x"}, "click:right": {"r": "$x"}}, {}, "+", 1)
    assert templates.payloads_of(Click(x=1, y=1), SIZE) == [{"l": 1}]
    assert templates.payloads_of(Click(x=1, y=1, button="right"), SIZE) == [{"r": 1}]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ('name = ""', "name: String should match"),
        ('encoding = "list"|encoding = "png"', "observation.encoding must be 'list'"),
        ("actions = {}|actions = { clik = {} }", "actions.clik: no action 'clik'; did you mean 'click'?"),
        ('actions = {}|actions = { click = "$z" }', r"click has no \$z; its values are \$x, \$y"),
        ('actions = {}|actions = { "wait:left" = {} }', "a button is left"),
        ('actions = {}|actions = { click = { "$call" = "x" } }', 'call is a list such as'),
        ('actions = {}|actions = { click = { "$eval" = ["x"] } }', "has nothing beside it"),
        ('tasks = [{ id = "one" }]|tasks = []', "tasks: List should have at least 1"),
        ('{ id = "one" }]|{ id = "one" }, { id = "one" }]', "one is there twice"),
        ("tasks =|rewards = 1\ntasks =", "rewards: Extra inputs"),
        ("actions = {}|actions =", "no TOML"),
        ("tasks =|reward = { low = 1.0 }\ntasks =", "reward.low must be below"),
    ],
)  # fmt: skip
def test_a_profile_that_cannot_be_used_says_where(change, why, tmp_path):
    old, _, new = change.partition("|")
    text = MINIMAL.replace(old, new) if new else MINIMAL.replace('name = "mine"', change)
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(TaskError, match=why):
        load_suite(f"openenv:{file}")


def test_a_profile_that_is_not_there_is_named(tmp_path):
    with pytest.raises(TaskError, match="did you mean 'browsergym'"):
        load_suite("openenv:browsergim")
    with pytest.raises(TaskError, match="cannot be read"):
        load_suite(f"openenv:{tmp_path}/no.toml")


@pytest.mark.parametrize("name", shipped_profiles())
def test_the_shipped_profiles_can_be_used(name):
    profile = read_profile(name, "openenv")
    for action in (Scroll(x=1, y=1, dy=1), Type(text="a"), KeyPress(keys=["enter"]), Wait()):
        assert profile.templates.payloads_of(action, SIZE)
    assert load_suite(f"openenv:{name}").tasks


def test_the_profile_that_the_page_shows_can_be_used(tmp_path):
    page = Path(__file__).parents[4] / "docs" / "environments" / "openenv.md"
    blocks = re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    (text,) = (block for block in blocks if block.startswith('name = "my_env"'))
    file = tmp_path / "my_env.toml"
    file.write_text(text)
    assert list(load_suite(f"openenv:{file}").tasks) == ["my_env/first", "my_env/second"]


def test_calls_of_browsergym_are_those_that_its_parser_reads():
    templates = read_profile("browsergym", "openenv").templates
    payloads = [
        templates.payloads_of(action, SIZE)[0]["action_str"]
        for action in (Click(x=1, y=2), Scroll(x=3, y=4, dy=1), KeyPress(keys=["ctrl", "a"]))
    ]
    assert payloads == [
        "mouse_click(1, 2, 'left')", "mouse_move(3, 4)\nscroll(0, 100)", "keyboard_press('Control+a')",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rewards", "table", "done", "outcome", "reward"),
    [
        ([0.0, 1.0], {}, True, "pass", 1.0),
        ([1.0, 0.0], {}, True, "fail", 0.0),
        ([1.0, 0.0], {"of": "max"}, True, "pass", 1.0),
        ([0.25, 0.5], {"of": "sum"}, True, "fail", 0.75),
        ([0.5], {"pass_from": 0.5}, True, "pass", 0.5),
        ([3.0], {"low": -1.0, "high": 4.0, "pass_from": 3.5}, False, "fail", 0.8),
        ([-0.1], {"clip": True}, False, "fail", 0.0),
        ([-0.1], {}, False, "invalid", None),
        ([], {}, True, "invalid", None),
        ([], {}, False, "fail", 0.0),
    ],
)
def test_rewards_become_a_verdict(rewards, table, done, outcome, reward):
    verdict = verdict_of(rewards, RewardTable(**table), is_done=done)
    assert (verdict.outcome, verdict.reward) == (outcome, reward)


def test_a_path_leads_into_the_observation():
    assert at({"a": {"b": 3}}, "a.b") == 3
    assert at({"a": [1]}, "a.b") is None
    assert at({"a": 1}, None) is None
