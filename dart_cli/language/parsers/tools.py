"""The tools of tool calls: which arguments mean which action. The syntax of the calls is in toolcall.py.

    Tool             one tool: it reads arguments as an action, and writes an action as arguments
    refuse_unknown   raises an error for an argument that an action does not have
    point_of, pixel_of, pixel_or_pointer, number_of, seconds_of, seconds_in, names_of_keys   read arguments
    COMPUTER_USE     a mouse and a keyboard: Qwen2.5-VL, Qwen3-VL, Qwen3.5, Qwen3.8, GUI-Owl, EvoCUA
    MOBILE_USE       a touchscreen: Qwen2.5-VL, Qwen3-VL, GUI-Owl
    MAI_MOBILE       the touchscreen of MAI-UI, whose swipes have a direction

The tools are those of Qwen's cookbooks (github.com/QwenLM/Qwen3-VL, cookbooks/utils/agent_function_call.py),
of EvoCUA (github.com/meituan/EvoCUA, mm_agents/evocua/prompts.py), which adds key_down and key_up, of
Qwen3.8's agent (github.com/xlang-ai/OSWorld, mm_agents/qwen), which adds left_mouse_down, left_mouse_up,
screenshot and call_user, of GUI-Owl-1.5 (github.com/X-PLUG/MobileAgent) and of MAI-UI
(github.com/Tongyi-MAI/MAI-UI, src/prompt.py).
`pixels` are notches of the wheel, as the agents of these models use it; a positive number scrolls up, or
right.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

from bus.errors import ActionError
from dart_cli.language.coordinates import CoordinateMap
from dart_cli.language.parsers.reading import (
    Verb,
    at_point,
    one_of_keys,
    one_press,
    read_keys,
    text_of,
    verb_of,
    write_keys,
)
from envs.contract import actions as act
from envs.contract.actions import Action, Modifier

Arguments = Mapping[str, Any]

WAIT_S = 1.0  # seconds of a wait that names none
MOST_WAIT_S = 60.0
MOST_NOTCHES = 10_000  # of one scroll, in either direction
SWIPE_NOTCHES = 5  # of the wheel, for one swipe in a direction

_HELD = "keys cannot be held during it"
_NONE = "it has no such action"
_NO_ADDRESS = "it has no call that opens an address"


@dataclass(frozen=True)
class Tool:
    """One tool, which reads arguments as actions and writes actions as arguments.

    `read` raises ActionError, KeyError, TypeError, ValueError or OverflowError for arguments that mean no
    action.
    """

    name: str
    read: Callable[[Arguments, CoordinateMap], Action]
    write: Callable[[Action, CoordinateMap], dict[str, Any] | None]
    """Returns None for an action that the tool does not have. Drag and Scroll may depend on the mouse
    pointer."""
    points: Mapping[str, Sequence[str]]
    """For each name of an action, the arguments that are points, in the order in which `read` uses them."""
    others: Mapping[str, Sequence[str]]
    """For each name of an action, its other arguments, except for `action`."""
    limits: Mapping[str, str]


def refuse_unknown(tool: Tool, arguments: Arguments) -> None:
    """Raise ActionError for an argument that the action does not have, unless its value is empty."""
    name = arguments.get("action")
    if not isinstance(name, str) or name not in tool.others:
        return  # `read` raises the error
    accepted = (*tool.points.get(name, ()), *tool.others[name])
    for key, value in arguments.items():
        if key != "action" and key not in accepted and value not in (None, "", []):
            has = f"it has {', '.join(accepted)}" if accepted else "it has none"
            raise ActionError(f"{name} has no argument {key[:24]!r}; {has}")


def point_of(value: Any) -> tuple[int, int]:
    """Return the model's numbers (x, y) of a list [x, y], or of the centre of a box [x1, y1, x2, y2]."""
    if not isinstance(value, list) or len(value) not in (2, 4):
        raise ActionError(f"a coordinate is 2 or 4 numbers, got {json.dumps(value)[:60]}")
    if any(isinstance(number, bool) or not isinstance(number, int | float) for number in value):
        raise ActionError(f"a coordinate is of numbers, got {json.dumps(value)[:60]}")
    return math.floor((value[0] + value[-2]) / 2), math.floor((value[1] + value[-1]) / 2)


def pixel_of(arguments: Arguments, coordinates: CoordinateMap, key: str = "coordinate") -> Any:
    """Return the pixel (x, y) of the argument `key`. Raises KeyError if it is missing, else ActionError."""
    return coordinates.to_screen(*point_of(arguments[key]))


def pixel_or_pointer(arguments: Arguments, coordinates: CoordinateMap) -> tuple[int, int]:
    """Return the pixel (x, y) of `coordinate`, or where the pointer is if the call has none."""
    if arguments.get("coordinate") is None:
        return coordinates.pointer_or_centre
    return pixel_of(arguments, coordinates)  # type: ignore[no-any-return]


def number_of(value: Any) -> float:
    """Return a number, or a number in a text, as a float. Raises ActionError, ValueError for others."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ActionError(f"want a number, got {json.dumps(value)[:60]}")
    number = float(value)
    if not math.isfinite(number):
        raise ActionError("want a finite number")
    return number


def _notches(arguments: Arguments) -> int:
    number = round(number_of(arguments["pixels"]))
    if abs(number) > MOST_NOTCHES:
        raise ActionError(f"at most {MOST_NOTCHES} notches are turned at once, got {number}")
    return number


def seconds_of(arguments: Arguments) -> float:
    """Return the seconds of a wait, which are WAIT_S if the call names none."""
    return WAIT_S if arguments.get("time") is None else seconds_in(arguments["time"])


def seconds_in(value: Any) -> float:
    """Return the seconds of a wait, at most MOST_WAIT_S. Raises ActionError for others."""
    seconds = number_of(value)
    if not 0 <= seconds <= MOST_WAIT_S:
        raise ActionError(f"a wait is 0 to {MOST_WAIT_S:g} seconds, got {seconds:g}")
    return seconds


def _terminate(arguments: Arguments, failures: Sequence[str]) -> Action:
    """Return Done or Fail, by the status. Without a status it is Done, as in the agents of these models."""
    status = str(arguments.get("status", "success"))
    if status != "success" and status not in failures:
        raise ActionError(f"status must be success or {failures[0]}, got {status[:24]!r}")
    return act.Done() if status == "success" else act.Fail()


def names_of_keys(value: Any) -> list[str]:
    """Return the names of keys in a list or in one text, as they are written."""
    names = value if isinstance(value, list) else [value]
    if not all(isinstance(name, str) for name in names):
        raise ActionError(f"keys are texts, got {json.dumps(value)[:60]}")
    return names


def _wheel(x: int, y: int, *, right: int = 0, up: int = 0) -> act.Scroll:
    """Return a scroll by notches to the right or up; negative numbers mean left or down."""
    return act.Scroll(x=x, y=y, dx=right, dy=-up)


def _xy(action: Any, coordinates: CoordinateMap) -> list[int]:
    """Return the model's numbers of an action's pixel."""
    return list(coordinates.to_model(action.x, action.y))


# --- computer_use ---------------------------------------------------------------------------

_CLICKS: Mapping[str, Verb] = {
    "left_click": (act.Click, "left"),
    "click": (act.Click, "left"),  # GUI-Owl before 1.5
    "right_click": (act.Click, "right"),
    "middle_click": (act.Click, "middle"),
    "double_click": (act.DoubleClick, ""),
    "triple_click": (act.TripleClick, ""),
}
_DRAGS = ("left_click_drag", "drag")


def _modifiers(arguments: Arguments) -> tuple[Modifier, ...]:
    """Return the keys that are held during a click: Qwen3.5's `text`, e.g. "ctrl+shift"."""
    names = arguments.get("text")
    keys = read_keys([names]) if isinstance(names, str) and names else []
    if other := [key for key in keys if key not in get_args(Modifier)]:
        raise ActionError(f"a click holds ctrl, shift, alt or meta, got {other[0]!r}")
    return tuple(cast("Modifier", key) for key in keys)


def _read_computer(arguments: Arguments, coordinates: CoordinateMap) -> Action:
    name = arguments["action"]
    if name in _CLICKS:
        place = pixel_or_pointer(arguments, coordinates)
        return at_point(_CLICKS[name], place, _modifiers(arguments))
    if name == "mouse_move":
        x, y = pixel_of(arguments, coordinates)
        return act.Move(x=x, y=y)
    if name in _DRAGS:
        return _drag(arguments, coordinates)
    if name in ("scroll", "hscroll"):
        x, y = pixel_or_pointer(arguments, coordinates)
        notches = _notches(arguments)
        return _wheel(x, y, right=notches) if name == "hscroll" else _wheel(x, y, up=notches)
    match name:
        case "type":
            return act.Type(text=text_of(arguments, "text"))
        case "key":
            return act.KeyPress(keys=read_keys(names_of_keys(arguments["keys"])))
        case "key_down":
            return act.KeyDown(key=one_of_keys(read_keys(names_of_keys(arguments["keys"]))))
        case "key_up":
            return act.KeyUp(key=one_of_keys(read_keys(names_of_keys(arguments["keys"]))))
        case "wait":
            return act.Wait(seconds=seconds_of(arguments))
        case "answer":
            return act.Answer(text=text_of(arguments, "text"))
        case "terminate":
            return _terminate(arguments, ("failure",))
        case "left_mouse_down" | "left_mouse_up":
            button = act.MouseDown if name == "left_mouse_down" else act.MouseUp
            if arguments.get("coordinate") is None:
                return button()
            x, y = pixel_of(arguments, coordinates)
            return button(x=x, y=y)
        case "screenshot":
            return act.Wait(seconds=WAIT_S)
        case "interact" | "call_user":  # GUI-Owl, Qwen3.8: the user is needed
            return act.Fail()
    raise ActionError(f"computer_use has no action {str(name)[:40]!r}")


def _drag(arguments: Arguments, coordinates: CoordinateMap) -> act.Drag:
    if arguments.get("coordinate2") is not None:
        ends = [pixel_of(arguments, coordinates, key) for key in ("coordinate", "coordinate2")]
        return act.Drag(path=ends)
    if coordinates.pointer is None:
        raise ActionError("a drag begins where the pointer is; no action has moved it yet")
    return act.Drag(path=[coordinates.pointer, pixel_of(arguments, coordinates)])


def _write_computer(action: Action, coordinates: CoordinateMap) -> dict[str, Any] | None:
    match action:
        case act.Click() | act.DoubleClick() | act.TripleClick():
            click = {"action": verb_of(_CLICKS, action), "coordinate": _xy(action, coordinates)}
            return click | ({"text": "+".join(action.modifiers)} if action.modifiers else {})
        case act.Move():
            return {"action": "mouse_move", "coordinate": _xy(action, coordinates)}
        case act.Drag(path=[first, last], button="left", modifiers=()) if (
            first == coordinates.pointer
        ):
            return {"action": "left_click_drag", "coordinate": list(coordinates.to_model(*last))}
        case act.Scroll(dx=0, dy=dy) if abs(dy) <= MOST_NOTCHES:
            return {"action": "scroll", "coordinate": _xy(action, coordinates), "pixels": -dy}
        case act.Scroll(dx=dx, dy=0) if abs(dx) <= MOST_NOTCHES:
            return {"action": "hscroll", "coordinate": _xy(action, coordinates), "pixels": dx}
        case act.Type():
            return {"action": "type", "text": action.text}
        case act.KeyPress():
            return {"action": "key", "keys": write_keys(action.keys)}
        case act.KeyDown() | act.KeyUp():
            return {"action": action.kind, "keys": write_keys([action.key])}
        case act.Wait():
            return {"action": "wait", "time": action.seconds}
        case act.Answer():
            return {"action": "answer", "text": action.text}
        case act.Done():
            return {"action": "terminate", "status": "success"}
        case act.Fail():
            return {"action": "terminate", "status": "failure"}
    return None


_CLICKED = (*_CLICKS, "mouse_move", "scroll", "hscroll")
_BUTTON = ("left_mouse_down", "left_mouse_up")
COMPUTER_USE = Tool(
    "computer_use",
    _read_computer,
    _write_computer,
    dict.fromkeys((*_CLICKED, *_BUTTON), ("coordinate",))
    | dict.fromkeys(_DRAGS, ("coordinate", "coordinate2")),
    {
        **dict.fromkeys(_CLICKS, ("text",)),
        **dict.fromkeys(("mouse_move", "screenshot", *_BUTTON, *_DRAGS), ()),
        **dict.fromkeys(("scroll", "hscroll"), ("pixels",)),
        **dict.fromkeys(("type", "answer", "interact", "call_user"), ("text",)),
        **dict.fromkeys(("key", "key_down", "key_up"), ("keys",)),
        "wait": ("time",),
        "terminate": ("status",),
    },
    {
        "drag": "it drags with the left button from where the pointer is to one point; move there first",
        "scroll": "it turns the wheel in one direction",
        "goto": _NO_ADDRESS,
        **dict.fromkeys(("mouse_down", "mouse_up"), f"{_NONE}; left_click_drag has both"),
    },
)

# --- mobile_use -----------------------------------------------------------------------------

_BUTTONS = ("back", "home", "menu", "enter")
_TAPS: Mapping[str, Verb] = {
    "click": (act.Click, "left"),
    "long_press": (act.Click, "right"),
    "double_click": (act.DoubleClick, ""),
}


def _read_touch(arguments: Arguments, coordinates: CoordinateMap) -> Action:
    """Return the action of a call that both mobile tools have."""
    name = arguments["action"]
    if name in _TAPS:
        return at_point(_TAPS[name], pixel_of(arguments, coordinates))
    match name:
        case "type":
            return act.Type(text=text_of(arguments, "text"))
        case "answer":
            return act.Answer(text=text_of(arguments, "text"))
        case "system_button":
            button = text_of(arguments, "button").lower()
            if button not in _BUTTONS:
                raise ActionError(f"button must be Back, Home, Menu or Enter, got {button[:24]!r}")
            return act.KeyPress(keys=[button])
        case "wait":
            return act.Wait(seconds=seconds_of(arguments))
        case "terminate":
            return _terminate(arguments, ("failure", "fail"))
        case "open":
            raise ActionError("no suite opens an application by its name; tap its icon")
    raise ActionError(f"mobile_use has no action {str(name)[:40]!r}")


def _write_touch(action: Action, coordinates: CoordinateMap) -> dict[str, Any] | None:
    match action:
        case act.Click(modifiers=()) if name := verb_of(_TAPS, action):
            return {"action": name, "coordinate": _xy(action, coordinates)}
        case act.Type():
            return {"action": "type", "text": action.text}
        case act.Answer():
            return {"action": "answer", "text": action.text}
        case act.Done():
            return {"action": "terminate", "status": "success"}
    return None


def _read_mobile(arguments: Arguments, coordinates: CoordinateMap) -> Action:
    match arguments["action"]:
        case "swipe":
            ends = [pixel_of(arguments, coordinates, key) for key in ("coordinate", "coordinate2")]
            return act.Drag(path=ends)
        case "key":
            return act.KeyPress(keys=one_press([text_of(arguments, "text")]))
        case "interact":  # GUI-Owl: the user is needed
            return act.Fail()
    return _read_touch(arguments, coordinates)


def _write_mobile(action: Action, coordinates: CoordinateMap) -> dict[str, Any] | None:
    match action:
        case act.Click(button="right", modifiers=()):
            return {"action": "long_press", "coordinate": _xy(action, coordinates), "time": 1}
        case act.Drag(path=[first, last], button="left", modifiers=()):
            start, end = (list(coordinates.to_model(x, y)) for x, y in (first, last))
            return {"action": "swipe", "coordinate": start, "coordinate2": end}
        case act.KeyPress(keys=[key]) if key in _BUTTONS:
            return {"action": "system_button", "button": key.capitalize()}
        case act.KeyPress(keys=[key]):
            return {"action": "key", "text": write_keys([key])[0]}
        case act.Wait():
            return {"action": "wait", "time": action.seconds}
        case act.Fail():
            return {"action": "terminate", "status": "failure"}
    return _write_touch(action, coordinates)


_TOUCH = {
    "goto": _NO_ADDRESS,
    "click": f"a tap, or a long press for the right button; {_HELD}",
    **dict.fromkeys(("double_click", "triple_click"), f"{_NONE}; tap in several steps"),
    **dict.fromkeys(("move", "mouse_down", "mouse_up", "key_down", "key_up"), _NONE),
}
_TAPPED = dict.fromkeys(_TAPS, ("coordinate",))
_TOUCH_OTHERS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("click", "double_click"), ()),
    **dict.fromkeys(("long_press", "wait"), ("time",)),
    **dict.fromkeys(("type", "answer", "open"), ("text",)),
    "system_button": ("button",),
    "terminate": ("status",),
}
MOBILE_USE = Tool(
    "mobile_use",
    _read_mobile,
    _write_mobile,
    {**_TAPPED, "swipe": ("coordinate", "coordinate2")},
    {**_TOUCH_OTHERS, **dict.fromkeys(("key", "interact"), ("text",)), "swipe": ()},
    {
        **_TOUCH,
        "drag": "a swipe has two points",
        "scroll": f"{_NONE}; swipe",
        "keypress": "one key at a time",
    },
)

# --- MAI-UI ---------------------------------------------------------------------------------

_SWIPES = {  # by the direction of the finger: a swipe up shows what is below
    "up": (0, SWIPE_NOTCHES),
    "down": (0, -SWIPE_NOTCHES),
    "left": (SWIPE_NOTCHES, 0),
    "right": (-SWIPE_NOTCHES, 0),
}


def _read_mai(arguments: Arguments, coordinates: CoordinateMap) -> Action:
    match arguments["action"]:
        case "swipe":
            direction = text_of(arguments, "direction")
            if direction not in _SWIPES:
                raise ActionError(
                    f"direction must be up, down, left or right, got {direction[:24]!r}"
                )
            if arguments.get("coordinate") is None:
                x, y = coordinates.centre
            else:
                x, y = pixel_of(arguments, coordinates)
            dx, dy = _SWIPES[direction]
            return act.Scroll(x=x, y=y, dx=dx, dy=dy)
        case "drag":
            keys = ("start_coordinate", "end_coordinate")
            return act.Drag(path=[pixel_of(arguments, coordinates, key) for key in keys])
        case "ask_user":
            return act.Fail()
    return _read_touch(arguments, coordinates)


def _write_mai(action: Action, coordinates: CoordinateMap) -> dict[str, Any] | None:
    match action:
        case act.DoubleClick(modifiers=()):
            return {"action": "double_click", "coordinate": _xy(action, coordinates)}
        case act.Drag(path=[first, last], button="left", modifiers=()):
            start, end = (list(coordinates.to_model(x, y)) for x, y in (first, last))
            return {"action": "drag", "start_coordinate": start, "end_coordinate": end}
        case act.Scroll():
            for direction, notches in _SWIPES.items():
                if notches == (action.dx, action.dy):
                    at = _xy(action, coordinates)
                    return {"action": "swipe", "direction": direction, "coordinate": at}
        case act.KeyPress(keys=[key]) if key in _BUTTONS:
            return {"action": "system_button", "button": key}
        case act.Wait(seconds=seconds) if seconds == WAIT_S:
            return {"action": "wait"}
        case act.Fail():
            return {"action": "terminate", "status": "fail"}
    return _write_touch(action, coordinates)


MAI_MOBILE = Tool(
    "mobile_use",
    _read_mai,
    _write_mai,
    {
        **_TAPPED,
        "swipe": ("coordinate",),
        "drag": ("start_coordinate", "end_coordinate"),
    },
    {**_TOUCH_OTHERS, "swipe": ("direction",), "drag": (), "ask_user": ("text",)},
    {
        **_TOUCH,
        "double_click": _HELD,
        "drag": "it has two points and the finger",
        "scroll": f"a swipe in one direction is {SWIPE_NOTCHES} notches",
        "keypress": "it has the buttons back, home, menu and enter",
        "wait": f"it waits {WAIT_S:g} s",
    },
)
