r"""The action language of Holo3.1: one JSON object with a note, a thought and the call of one tool.

    {"note": null, "thought": "It is empty.", "tool_call": {"tool_name": "click_desktop", "element": "", "x": 333, "y": 48}}

    click_desktop(x, y, button)   double_click_desktop(x, y)   move_to_desktop(x, y)
    drag_to_desktop(x, y)   scroll_desktop(x, y, direction, scroll_size)   write_desktop(content, press_enter)
    hotkey_desktop(keys)   hold_and_tap_key_desktop(hold_keys, tap_keys)   key_down_desktop(key)   key_up_desktop(key)
    mouse_down_desktop(button)   mouse_up_desktop(button)   wait_desktop(seconds)   update_plan(goals)   answer(content)

The object and its numbers, 0-1000 of each side, are those of hub.hcompany.ai/agent-loop, which lets a program choose its
tools. The tools are those that H's agents for a desktop have. A plan stays in the history as the model wrote it, and
nothing is done. Several actions in one call, such as `overwrite` or `repeat_count`, are malformed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from bus.errors import ActionError
from dart_cli.language.coordinates import AS_IT_IS, CoordinateMap
from dart_cli.language.parsers.base import WrittenPoint
from dart_cli.language.parsers.reading import (
    Verb,
    as_action_errors,
    at_point,
    first_read,
    not_expressed,
    object_once,
    one_of_keys,
    read_keys,
    refuse_long,
    text_of,
    verb_of,
    write_keys,
)
from dart_cli.language.parsers.tools import names_of_keys, number_of, point_of, seconds_in
from dart_cli.language.thoughts import reply_starts
from envs.contract import actions as act
from envs.contract.actions import Action, MouseButton

NOTCHES = 10  # of a scroll that names none
MOST_NOTCHES = 100
INFEASIBLE = "[TASK=INFEASIBLE]"
"""What an answer has if the task cannot be done, as in H's agent for OSWorld."""

_VERBS: Mapping[str, Verb] = {
    "double_click_desktop": (act.DoubleClick, ""),
    "move_to_desktop": (act.Move, ""),
}
_TURNS = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}
_POINTED = ("click_desktop", *_VERBS, "drag_to_desktop", "scroll_desktop")
_ARGUMENTS: Mapping[str, Sequence[str]] = {
    "click_desktop": ("element", "x", "y", "button"),
    **dict.fromkeys((*_VERBS, "drag_to_desktop"), ("element", "x", "y")),
    "scroll_desktop": ("element", "x", "y", "direction", "scroll_size"),
    "write_desktop": ("content", "press_enter", "overwrite"),
    "hotkey_desktop": ("keys", "repeat_count"),
    "hold_and_tap_key_desktop": ("hold_keys", "tap_keys"),
    **dict.fromkeys(("key_down_desktop", "key_up_desktop"), ("key",)),
    **dict.fromkeys(("mouse_down_desktop", "mouse_up_desktop"), ("button",)),
    "wait_desktop": ("seconds",),
    "update_plan": ("goals",),
    "answer": ("content",),
}
_XY = re.compile(r'"x"\s*:\s*-?\d{1,6}\s*,\s*"y"\s*:\s*-?\d{1,6}')


class HoloParser:
    """The PointParser of Holo's language; the module's docstring has its tools."""

    limits: Mapping[str, str] = {
        "click": "keys are held by key_down_desktop before it and key_up_desktop after it",
        "double_click": "it holds no keys",
        "triple_click": "it has no such action",
        "drag": "it drags with the left button from where the pointer is to one point; move there first",
        "scroll": f"it turns the wheel in one direction, {MOST_NOTCHES} notches at most",
        **dict.fromkeys(
            ("mouse_down", "mouse_up"), "it acts where the pointer is; move there first"
        ),
        "answer": "an empty one is no answer",
        "goto": "it has no call that opens an address",
    }

    def parse(self, text: str, coordinates: CoordinateMap) -> Action:
        """Return the action of one completion; see ActionParser."""
        call = _call_of(text)
        name = call["tool_name"]
        with as_action_errors(name):
            return _action(name, call, coordinates)

    def format(self, action: Action, coordinates: CoordinateMap, thought: str = "") -> str:
        """Return the completion of one action; see ActionParser."""
        call = _call_for(action, coordinates)
        if call is None:
            raise not_expressed("Holo", action, self.limits)
        step = {"note": None, "thought": thought, "tool_call": call}
        return re.sub(r"<(?=/?think)", r"\\u003c", json.dumps(step, ensure_ascii=False))

    def as_history(self, text: str) -> str:
        """Return the completion unchanged."""
        return text

    def write_point(self, x: int, y: int) -> str:
        """Return a point as two members of the call; see PointParser."""
        return f'"x": {x}, "y": {y}'

    def find_points(self, text: str) -> list[WrittenPoint]:
        """Return the place of the call; see PointParser."""
        try:
            call = _call_of(text)
            self.parse(text, AS_IT_IS)
        except ActionError:
            return []
        # The last match, since a thought before the object may have others.
        matches = list(_XY.finditer(text)) if call["tool_name"] in _POINTED else []
        match = matches[-1] if matches else None
        if match is None or json.loads(f"{{{match[0]}}}") != {"x": call["x"], "y": call["y"]}:
            return []
        return [WrittenPoint(match.start(), match.end(), call["x"], call["y"])]


def _call_of(text: str) -> dict[str, Any]:
    """Return the call of the object that is the reply. Raises ActionError if there is none."""
    refuse_long(text)
    return first_read(reversed(reply_starts(text)), lambda start: _call_in(text[start:]))


def _call_in(reply: str) -> dict[str, Any]:
    """Return the call of a reply, with the name of one of the tools and arguments that it has."""
    try:
        step = json.loads(reply, object_pairs_hook=object_once)
    except (ValueError, RecursionError) as error:
        raise ActionError(f"the reply is not one object of JSON: {str(error)[:120]}") from None
    call = step.get("tool_call") if isinstance(step, dict) else None
    if not isinstance(call, dict):
        raise ActionError('want {"note": ..., "thought": ..., "tool_call": {"tool_name": ...}}')
    name = call.get("tool_name")
    if not isinstance(name, str) or name not in _ARGUMENTS:
        raise ActionError(f"there is no tool {str(name)[:40]!r}")
    for key, value in call.items():
        if key not in ("tool_name", *_ARGUMENTS[name]) and value is not None:
            raise ActionError(
                f"{name} has no argument {key[:24]!r}; it has {', '.join(_ARGUMENTS[name])}"
            )
    return call


def _action(name: str, call: Mapping[str, Any], coordinates: CoordinateMap) -> Action:
    def at() -> tuple[int, int]:
        return coordinates.to_screen(*point_of([call["x"], call["y"]]))

    match name:
        case "click_desktop":
            return at_point((act.Click, _button(call)), at())
        case "double_click_desktop" | "move_to_desktop":
            return at_point(_VERBS[name], at())
        case "drag_to_desktop":
            if coordinates.pointer is None:
                raise ActionError("a drag begins where the pointer is; no action has moved it yet")
            return act.Drag(path=[coordinates.pointer, at()])
        case "scroll_desktop":
            return _scroll(call, at())
        case "write_desktop":
            _refuse_several(call, "overwrite", False)
            enter = call.get("press_enter") or False
            if not isinstance(enter, bool):
                raise ActionError("press_enter is true or false")
            return act.Type(text=text_of(call, "content") + "\n" * enter)
        case "hotkey_desktop":
            _refuse_several(call, "repeat_count", 1)
            return act.KeyPress(keys=read_keys(names_of_keys(call["keys"])))
        case "hold_and_tap_key_desktop":
            tapped = read_keys(names_of_keys(call["tap_keys"]))
            return act.KeyPress(
                keys=[*read_keys(names_of_keys(call["hold_keys"])), one_of_keys(tapped)]
            )
        case "key_down_desktop" | "key_up_desktop":
            key = one_of_keys(read_keys(names_of_keys(call["key"])))
            return act.KeyDown(key=key) if name == "key_down_desktop" else act.KeyUp(key=key)
        case "mouse_down_desktop":
            return act.MouseDown(button=_button(call))
        case "mouse_up_desktop":
            return act.MouseUp(button=_button(call))
        case "wait_desktop":
            return act.Wait(seconds=seconds_in(call["seconds"]))
        case "update_plan":
            return act.Wait(seconds=0.0)
    content = text_of(call, "content")
    if INFEASIBLE in content:
        return act.Fail()
    return act.Answer(text=content) if content else act.Done()


def _button(call: Mapping[str, Any]) -> MouseButton:
    button = call.get("button") or "left"
    if button not in ("left", "right", "middle"):
        raise ActionError(f"button must be left, right or middle, got {str(button)[:24]!r}")
    return cast("MouseButton", button)


def _refuse_several(call: Mapping[str, Any], key: str, one: Any) -> None:
    """Raise ActionError for a call that is several actions: `key` has another value than `one`."""
    if call.get(key, one) != one:
        raise ActionError(f"{key} makes several actions of one call; act in several steps")


def _scroll(call: Mapping[str, Any], place: tuple[int, int]) -> Action:
    direction, size = call["direction"], call.get("scroll_size", NOTCHES)
    if direction not in _TURNS:
        raise ActionError(f"direction must be up, down, left or right, got {str(direction)[:24]!r}")
    notches = number_of(size)
    if notches != round(notches) or not 0 <= notches <= MOST_NOTCHES:
        raise ActionError(f"scroll_size must be an integer from 0 to {MOST_NOTCHES}")
    dx, dy = (turn * round(notches) for turn in _TURNS[direction])
    return act.Scroll(x=place[0], y=place[1], dx=dx, dy=dy)


def _call_for(action: Action, coordinates: CoordinateMap) -> dict[str, Any] | None:
    """Return the call for an action; None if the language has none."""

    def at(name: str, point: tuple[int, int], **others: Any) -> dict[str, Any]:
        x, y = coordinates.to_model(*point)
        return {"tool_name": name, "element": "", "x": x, "y": y, **others}

    match action:
        case act.Click(modifiers=()):
            return at("click_desktop", (action.x, action.y), button=action.button)
        case act.DoubleClick(modifiers=()) | act.Move() if name := verb_of(_VERBS, action):
            return at(name, (action.x, action.y))
        case act.Drag(path=[first, last], button="left", modifiers=()) if (
            first == coordinates.pointer
        ):
            return at("drag_to_desktop", last)
        case act.Scroll(dx=dx, dy=dy) if not (dx and dy) and abs(dx + dy) <= MOST_NOTCHES:
            turn = (dx > 0) - (dx < 0), (dy > 0) - (dy < 0)
            direction = next((name for name, each in _TURNS.items() if each == turn), "down")
            return at(
                "scroll_desktop",
                (action.x, action.y),
                direction=direction,
                scroll_size=abs(dx + dy),
            )
        case act.Type():
            return {"tool_name": "write_desktop", "content": action.text}
        case act.KeyPress():
            return {"tool_name": "hotkey_desktop", "keys": write_keys(action.keys)}
        case act.KeyDown() | act.KeyUp():
            return {"tool_name": f"{action.kind}_desktop", "key": write_keys([action.key])[0]}
        case act.MouseDown(x=None) | act.MouseUp(x=None):
            return {"tool_name": f"{action.kind}_desktop", "button": action.button}
        case act.Wait():
            return {"tool_name": "wait_desktop", "seconds": action.seconds}
        case act.Answer() if action.text and INFEASIBLE not in action.text:
            return {"tool_name": "answer", "content": action.text}
        case act.Done():
            return {"tool_name": "answer", "content": ""}
        case act.Fail():
            return {"tool_name": "answer", "content": INFEASIBLE}
    return None


ACTION_PARSERS: Mapping[str, Callable[[], HoloParser]] = {"holo": HoloParser}
"""The factory of this module's action parser, by name."""
