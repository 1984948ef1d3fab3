"""The calls of UI-Venus in three dialects: which call means which action. venus.py has the tags around a call.

    Dialect    the calls of one dialect, which it reads as actions, and writes for actions
    DESKTOP    UI-Venus-2 on a desktop
    BROWSER    UI-Venus-1.5 in a browser
    PHONE      UI-Venus-1.5 on a telephone
    WAIT_S     seconds of a wait

Those of UI-Venus-2 are in github.com/inclusionAI/UI-Venus, models/computer; those of UI-Venus-1.5 in its
models/navigation and Venus_framework, and in its report (arXiv 2602.09082, table 8).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bus.errors import ActionError
from dart_cli.language.coordinates import CoordinateMap
from dart_cli.language.parsers.reading import (
    Verb,
    at_point,
    one_of_keys,
    quote,
    read_keys,
    text_of,
    verb_and_pixel,
    write_keys,
)
from dart_cli.language.parsers.tools import SWIPE_NOTCHES, names_of_keys, point_of
from envs.contract import actions as act
from envs.contract.actions import Action

Arguments = Mapping[str, Any]

WAIT_S = 1.0  # seconds of one wait
MOST_NOTCHES = 4096  # of one swipe, as the prompt of UI-Venus-2 says

_UNWRITTEN = ("<action>", "</action>", "</think")
"""Tags that a literal never contains."""
_POINTER = "it acts where the pointer is; move there first"
_NONE = "it has no such action"
_HELD = "it holds no keys"


@dataclass(frozen=True)
class Dialect:
    """The calls of one dialect.

    `read` returns the action of a call, by its name and arguments. It raises ActionError, KeyError, TypeError,
    ValueError or OverflowError for arguments that mean no action.
    """

    title: str
    read: Callable[[str, Arguments, CoordinateMap], Action]
    write: Callable[[Action, CoordinateMap], str | None]
    """Returns the call of an action; None if the dialect has none. Scroll may depend on the mouse pointer."""
    arguments: Mapping[str, Sequence[str]]
    """The names of the arguments of each call."""
    limits: Mapping[str, str]


def _point(arguments: Arguments, key: str, coordinates: CoordinateMap) -> tuple[int, int]:
    return coordinates.to_screen(*point_of(arguments[key]))


def _quoted(text: str) -> str:
    return quote(text, _UNWRITTEN)


def _listed(keys: Sequence[str]) -> str:
    """Return the names of keys as a list. Raises ActionError for a name that is not one of ours."""
    return f"[{', '.join(map(repr, write_keys(keys)))}]"


# --- UI-Venus-2 on a desktop ------------------------------------------------------------------

_CLICKS: Mapping[str, Verb] = {
    "Click": (act.Click, "left"),
    "RightClick": (act.Click, "right"),
    "MiddleClick": (act.Click, "middle"),
    "DoubleClick": (act.DoubleClick, ""),
    "TripleClick": (act.TripleClick, ""),
}
_VERBS: Mapping[str, Verb] = {**_CLICKS, "Hover": (act.Move, "")}
_BUTTONS: Mapping[str, Callable[..., Action]] = {"MouseDown": act.MouseDown, "MouseUp": act.MouseUp}


def _read_desktop(name: str, arguments: Arguments, coordinates: CoordinateMap) -> Action:
    def at(key: str) -> tuple[int, int]:
        return _point(arguments, key, coordinates)

    if name in _CLICKS:
        return at_point(
            _CLICKS[name], at("box") if "box" in arguments else coordinates.pointer_or_centre
        )
    if name in _BUTTONS:
        x, y = at("box") if "box" in arguments else (None, None)
        return _BUTTONS[name](x=x, y=y)
    match name:
        case "Hover":
            return at_point(_VERBS[name], at("box"))
        case "Drag":
            start = at("start") if "start" in arguments else coordinates.pointer
            if start is None:
                raise ActionError("a drag begins where the pointer is; no action has moved it yet")
            return act.Drag(path=[start, at("end")])
        case "Swipe":
            return _swipe(arguments, coordinates)
        case "Type":
            return act.Type(text=text_of(arguments, "content") if arguments else "")
        case "Hotkey":
            if arguments.get("repeat", 1) != 1:
                raise ActionError("keys are pressed once an action; press in several steps")
            return act.KeyPress(keys=read_keys(names_of_keys(arguments["keys"])))
        case "KeyDown" | "KeyUp":
            key = one_of_keys(read_keys(names_of_keys(arguments["keys"])))
            return act.KeyDown(key=key) if name == "KeyDown" else act.KeyUp(key=key)
        case "Wait":
            return act.Wait(seconds=WAIT_S)
        case "CallUser":
            return act.Fail()
    answer = text_of(arguments, "content") if arguments else ""
    return act.Answer(text=answer) if answer else act.Done()


def _swipe(arguments: Arguments, coordinates: CoordinateMap) -> Action:
    """Return the scroll of a swipe, at the pointer; a positive amount is up, or right."""
    x, y = coordinates.pointer_or_centre
    amount, axis = arguments["amount"], arguments["axis"]
    if isinstance(amount, bool) or not isinstance(amount, int) or abs(amount) > MOST_NOTCHES:
        raise ActionError(f"amount must be an integer from -{MOST_NOTCHES} to {MOST_NOTCHES}")
    if axis not in ("vertical", "horizontal"):
        raise ActionError(f"axis must be vertical or horizontal, got {str(axis)[:24]!r}")
    turn = {"dx": amount} if axis == "horizontal" else {"dy": -amount}
    return act.Scroll(x=x, y=y, **turn)


def _write_desktop(action: Action, coordinates: CoordinateMap) -> str | None:

    def at(x: int, y: int) -> str:
        x, y = coordinates.to_model(x, y)
        return f"({x}, {y})"

    if call := verb_and_pixel(_VERBS, action):
        name, x, y = call
        return f"{name}(box={at(x, y)})"
    match action:
        case act.Drag(path=[first, last], button="left", modifiers=()):
            return f"Drag(start={at(*first)}, end={at(*last)})"
        case act.MouseDown(button="left") | act.MouseUp(button="left"):
            name = "MouseDown" if isinstance(action, act.MouseDown) else "MouseUp"
            place = "" if action.x is None or action.y is None else f"box={at(action.x, action.y)}"
            return f"{name}({place})"
        case act.Scroll() if (action.x, action.y) == coordinates.pointer_or_centre:
            return _swipe_call(action)
        case act.Type():
            return f"Type(content={_quoted(action.text)})"
        case act.KeyPress():
            return f"Hotkey(keys={_listed(action.keys)})"
        case act.KeyDown() | act.KeyUp():
            name = "KeyDown" if isinstance(action, act.KeyDown) else "KeyUp"
            return f"{name}(keys={_listed([action.key])})"
        case act.Wait(seconds=seconds) if seconds == WAIT_S:
            return "Wait()"
        case act.Answer() if action.text:
            return f"Finished(content={_quoted(action.text)})"
        case act.Done():
            return "Finished(content='')"
        case act.Fail():
            return "CallUser(content='')"
    return None


def _swipe_call(action: act.Scroll) -> str | None:
    """Return the call of a scroll in one direction; None for another scroll."""
    if (action.dx and action.dy) or max(abs(action.dx), abs(action.dy)) > MOST_NOTCHES:
        return None
    if action.dx:
        return f"Swipe(amount={action.dx}, axis='horizontal')"
    return f"Swipe(amount={-action.dy}, axis='vertical')"


DESKTOP = Dialect(
    "UI-Venus-2",
    _read_desktop,
    _write_desktop,
    {
        **dict.fromkeys((*_VERBS, *_BUTTONS), ("box",)),
        "Drag": ("end", "start"),
        "Swipe": ("amount", "axis"),
        "Hotkey": ("keys", "repeat"),
        **dict.fromkeys(("KeyDown", "KeyUp"), ("keys",)),
        **dict.fromkeys(("Type", "CallUser", "Finished"), ("content",)),
        "Wait": (),
    },
    {
        **dict.fromkeys(
            ("click", "double_click", "triple_click"),
            "keys are held by KeyDown before it and KeyUp after it",
        ),
        "drag": "it has two points and the left button",
        "scroll": f"it turns the wheel in one direction; {_POINTER}",
        **dict.fromkeys(("mouse_down", "mouse_up"), "it has the left button"),
        "wait": f"it waits {WAIT_S:g} s",
        "answer": "an empty one is no answer",
        "goto": _NONE,
    },
)

# --- UI-Venus-1.5 -----------------------------------------------------------------------------

_TAPS: Mapping[str, Verb] = {"Click": (act.Click, "left"), "LongPress": (act.Click, "right")}
_MOUSE: Mapping[str, Verb] = {
    **_TAPS,
    "DoubleClick": (act.DoubleClick, ""),
    "Hover": (act.Move, ""),
}
_PRESSES: Mapping[str, list[str]] = {"PressEnter": ["enter"], "PressBack": ["alt", "left"]}
_PHONE_BUTTONS: Mapping[str, list[str]] = {
    "PressEnter": ["enter"],
    "PressBack": ["back"],
    "PressHome": ["home"],
    "PressRecent": ["recent"],
}
_TURNS: Mapping[str, int] = {"down": SWIPE_NOTCHES, "up": -SWIPE_NOTCHES}


def _read_either(name: str, arguments: Arguments, coordinates: CoordinateMap) -> Action:
    """Return the action of a call that browsers and telephones have."""
    match name:
        case "Drag":
            return act.Drag(path=[_point(arguments, key, coordinates) for key in ("start", "end")])
        case "Type":
            return act.Type(text=text_of(arguments, "content"))
        case "Wait":
            return act.Wait(seconds=WAIT_S)
        case "Finished":
            answer = text_of(arguments, "content") if arguments else ""
            return act.Answer(text=answer) if answer else act.Done()
        case "CallUser":
            answer = text_of(arguments, "content")
            return act.Answer(text=answer) if answer else act.Fail()
    raise ActionError("no suite opens an application by its name; click its icon")  # Launch


def _write_either(action: Action) -> str | None:
    match action:
        case act.Type():
            return f"Type(content={_quoted(action.text)})"
        case act.Wait(seconds=seconds) if seconds == WAIT_S:
            return "Wait()"
        case act.Answer() if action.text:
            return f"CallUser(content={_quoted(action.text)})"
        case act.Done():
            return "Finished(content='')"
        case act.Fail():
            return "CallUser(content='')"
    return None


def _place(x: int, y: int, coordinates: CoordinateMap) -> str:
    """Return the text of a pixel."""
    x, y = coordinates.to_model(x, y)
    return f"({x},{y})"


def _from_to(action: act.Drag, coordinates: CoordinateMap) -> str:
    start, end = (_place(x, y, coordinates) for x, y in action.path)
    return f"start={start}, end={end}"


def _press_of(presses: Mapping[str, list[str]], action: act.KeyPress) -> str | None:
    """Return the call that presses the keys of an action; None if there is none."""
    return next((f"{name}()" for name, keys in presses.items() if keys == action.keys), None)


def _read_browser(name: str, arguments: Arguments, coordinates: CoordinateMap) -> Action:
    if name in _MOUSE:
        return at_point(_MOUSE[name], _point(arguments, "box", coordinates))
    if name in _PRESSES:
        return act.KeyPress(keys=_PRESSES[name])
    match name:
        case "Scroll":
            direction = text_of(arguments, "direction")
            if direction not in _TURNS:
                raise ActionError(f"direction must be down or up, got {direction[:24]!r}")
            x, y = coordinates.pointer_or_centre
            return act.Scroll(x=x, y=y, dy=_TURNS[direction])
        case "Hotkey":
            return act.KeyPress(keys=read_keys(names_of_keys(arguments["keys"])))
        case "Launch" if arguments.get("url"):
            return act.Goto(url=text_of(arguments, "url"))
        case "PressHome" | "PressRecent":
            raise ActionError(f"{name} is a button of a telephone, which a browser lacks")
    return _read_either(name, arguments, coordinates)


def _write_browser(action: Action, coordinates: CoordinateMap) -> str | None:
    if call := verb_and_pixel(_MOUSE, action):
        name, x, y = call
        return f"{name}(box={_place(x, y, coordinates)})"
    match action:
        case act.Drag(path=[_, _], button="left", modifiers=()):
            return f"Drag({_from_to(action, coordinates)})"
        case act.Scroll(dx=0) if (action.x, action.y) == coordinates.pointer_or_centre:
            turns = (name for name, notches in _TURNS.items() if notches == action.dy)
            return next((f"Scroll(direction={name!r})" for name in turns), None)
        case act.KeyPress():
            return _press_of(_PRESSES, action) or f"Hotkey(keys={_listed(action.keys)})"
        case act.Goto():
            return f"Launch(url={_quoted(action.url)})"
    return _write_either(action)


def _read_phone(name: str, arguments: Arguments, coordinates: CoordinateMap) -> Action:
    if name in _TAPS:
        return at_point(_TAPS[name], _point(arguments, "box", coordinates))
    if name in _PHONE_BUTTONS:
        return act.KeyPress(keys=_PHONE_BUTTONS[name])
    return _read_either("Drag" if name == "Scroll" else name, arguments, coordinates)


def _write_phone(action: Action, coordinates: CoordinateMap) -> str | None:
    if call := verb_and_pixel(_TAPS, action):
        name, x, y = call
        return f"{name}(box={_place(x, y, coordinates)})"
    match action:
        case act.Drag(path=[_, _], button="left", modifiers=()):
            return f"Scroll({_from_to(action, coordinates)})"
        case act.KeyPress():
            return _press_of(_PHONE_BUTTONS, action)
    return _write_either(action)


_EITHER: Mapping[str, Sequence[str]] = {
    "Drag": ("start", "end"),
    "Launch": ("app",),
    **dict.fromkeys(("Type", "CallUser", "Finished"), ("content",)),
    **dict.fromkeys(("Wait", *_PHONE_BUTTONS), ()),
}
_LACKS = {
    **dict.fromkeys(("triple_click", "mouse_down", "mouse_up", "key_down", "key_up"), _NONE),
    "wait": f"it waits {WAIT_S:g} s",
    "answer": "an empty one is no answer",
}
BROWSER = Dialect(
    "UI-Venus-1.5 in a browser",
    _read_browser,
    _write_browser,
    {
        **_EITHER,
        **dict.fromkeys(_MOUSE, ("box",)),
        "Scroll": ("direction",),
        "Launch": ("app", "url"),
        "Hotkey": ("keys",),
    },
    {
        **_LACKS,
        "click": f"a click, or a long press for the right button; {_HELD}",
        "double_click": _HELD,
        "drag": "it has two points and the left button",
        "scroll": f"it turns the wheel {SWIPE_NOTCHES} notches up or down; {_POINTER}",
    },
)
PHONE = Dialect(
    "UI-Venus-1.5 on a telephone",
    _read_phone,
    _write_phone,
    {
        **_EITHER,
        **dict.fromkeys(_TAPS, ("box",)),
        "Scroll": ("start", "end", "direction"),  # which the points have already
    },
    {
        **_LACKS,
        **dict.fromkeys(("double_click", "move", "goto"), _NONE),
        "click": f"a tap, or a long press for the right button; {_HELD}",
        "drag": "it has two points and the finger",
        "scroll": f"{_NONE}; drag the finger",
        "keypress": "it has the buttons enter, back, home and recent",
    },
)
