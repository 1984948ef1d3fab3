"""Calls of pyautogui as actions: each by itself, and the few lines that are one action together.

SIGNATURES   the calls that there are, by dialect
read_calls   calls -> their action, and the points that it has
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

from bus.errors import ActionError
from dart_cli.language.coordinates import CoordinateMap
from dart_cli.language.parsers.base import WrittenPoint
from dart_cli.language.parsers.reading import (
    Call,
    one_of_keys,
    one_press,
    read_keys,
    text_of,
    understood,
)
from envs.contract import actions as act
from envs.contract.actions import Action, Modifier, MouseButton

LONG_WAIT_S = 20.0  # of computer.wait(), as OpenCUA's prompt promises
WAIT_S = 3.0  # of ScaleCUA's wait() without a number
MOST_WAIT_S = 60.0
MOST_NOTCHES = 10_000

Dialect = Literal["pyautogui", "scalecua"]
Point = tuple[int, int]

_SHARED: dict[str, Sequence[str]] = {
    "click": ("x", "y", "clicks", "interval", "button", "duration"),
    "leftClick": ("x", "y", "duration"),
    "doubleClick": ("x", "y", "interval", "button", "duration"),
    "tripleClick": ("x", "y", "interval", "button", "duration"),
    "rightClick": ("x", "y", "duration"),
    "middleClick": ("x", "y", "duration"),
    "moveTo": ("x", "y", "duration"),
    "dragTo": ("x", "y", "duration"),
    "scroll": ("clicks", "x", "y"),
    "write": ("message", "interval"),
    "typewrite": ("message", "interval"),
    "press": ("keys", "presses", "interval"),
    "hotkey": (),
    "keyDown": ("key",),
    "keyUp": ("key",),
}
_MORE: dict[str, Sequence[str]] = {
    "hscroll": ("clicks", "x", "y"),
    "vscroll": ("clicks", "x", "y"),
    "mouseDown": ("x", "y", "button"),
    "mouseUp": ("x", "y", "button"),
}
SIGNATURES: Mapping[Dialect, Mapping[str, Sequence[str]]] = {
    "pyautogui": {
        **{f"pyautogui.{name}": names for name, names in (_SHARED | _MORE).items()},
        "pyautogui.sleep": ("seconds",),
        "time.sleep": ("seconds",),
        "computer.triple_click": ("x", "y"),
        "computer.tripleClick": ("x", "y"),
        "computer.wait": ("seconds",),
        "computer.terminate": ("status", "answer"),
    },
    "scalecua": {
        **_SHARED,
        "wait": ("seconds",),
        "response": ("answer",),
        "terminate": ("status", "info"),
        "call_user": (),
    },
}
IGNORED = ("interval", "duration", "tween", "pause", "logScreenshot", "_pause", "mouseDownUp")
_BUTTON_OF: Mapping[str, MouseButton] = {"rightClick": "right", "middleClick": "middle"}


@dataclass(frozen=True)
class _Step:
    """One call, as an action or a part of one."""

    action: Action
    point: WrittenPoint | None = None


def read_calls(
    calls: Sequence[Call], coordinates: CoordinateMap, start: int
) -> tuple[Action, list[WrittenPoint]]:
    """Return the one action of `calls`, whose code begins at `start` of the text. Raises ActionError."""
    if not calls:
        raise ActionError("the code has no call")
    steps: list[_Step] = []
    for call in calls:
        with understood(call.name):
            step = _step(call, coordinates, start)
        steps.append(step)
        if isinstance(step.action, act.Move):
            coordinates = replace(coordinates, pointer=(step.action.x, step.action.y))
    action, used = _one_action(steps)
    return action, [step.point for step in used if step.point is not None]


def _step(call: Call, coordinates: CoordinateMap, start: int) -> _Step:
    """Return a call as an action. Raises ActionError, KeyError, TypeError, ValueError or OverflowError."""
    name = call.name.rpartition(".")[2]
    arguments = dict(call.arguments)
    if call.rest and name != "hotkey":
        raise ActionError(f"{name} has too many arguments")
    numbers = arguments.pop("x", None), arguments.pop("y", None)
    point = None
    if (numbers[0] is None) != (numbers[1] is None):
        raise ActionError(f"{name} is given both x and y or none")
    if numbers[0] is not None:
        cells = _cell(numbers[0], coordinates), _cell(numbers[1], coordinates)
        if call.point is None:
            raise ActionError(f"{name} is given y directly after x")
        point = WrittenPoint(start + call.point[0], start + call.point[1], *cells)
        place: Point | None = coordinates.to_screen(*cells)
    else:
        place = None
    if call.name == "computer.wait":
        arguments.setdefault("seconds", LONG_WAIT_S)
    action = _action(call, name, arguments, place, coordinates)
    if arguments:
        raise ActionError(f"{name} has no argument {next(iter(arguments))[:24]!r}")
    return _Step(action, point)


def _cell(number: Any, coordinates: CoordinateMap) -> int:
    """Return a number of the model's as a cell of its grid."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise ActionError("x and y are numbers")
    cells: float = number * 10**coordinates.decimals
    return math.floor(round(cells, 6))


def _action(
    call: Call, name: str, arguments: dict[str, Any], place: Point | None, on: CoordinateMap
) -> Action:
    """Return what a call does; takes what it reads out of `arguments`."""
    match name:
        case "click" | "leftClick" | "rightClick" | "middleClick":
            return _clicked(arguments.pop("clicks", 1), name, arguments, place, on)
        case "doubleClick":
            return _clicked(2, name, arguments, place, on)
        case "tripleClick" | "triple_click":
            return _clicked(3, name, arguments, place, on)
        case "moveTo":
            if place is None:
                raise ActionError(f"{name} needs x and y")
            return act.Move(x=place[0], y=place[1])
        case "dragTo":
            if place is None or on.pointer is None:
                raise ActionError(
                    "dragTo needs x and y, and a moveTo or an earlier action that it begins at"
                )
            return act.Drag(path=[on.pointer, place], button=_button(arguments))
        case "mouseDown" | "mouseUp":
            kind = act.MouseDown if name == "mouseDown" else act.MouseUp
            x, y = place or (None, None)
            return kind(x=x, y=y, button=_button(arguments))
        case "scroll" | "vscroll" | "hscroll":
            return _scrolled(name, arguments.pop("clicks"), place or on.pointer_or_centre)
        case "write" | "typewrite":
            return act.Type(text=_text(arguments, "message" if "message" in arguments else "text"))
        case "hotkey":
            rest = call.rest
            given = list(rest[0]) if len(rest) == 1 and isinstance(rest[0], list) else list(rest)
            keys = given or arguments.pop("keys", arguments.pop("args", None))
            return act.KeyPress(keys=read_keys(_names(keys)))
        case "press":
            presses = arguments.pop("presses", 1)
            given = arguments.pop("keys") if "keys" in arguments else arguments.pop("key")
            if presses != 1 or (isinstance(given, list) and len(given) > 1):
                raise ActionError("one press is one action; press in several steps")
            return act.KeyPress(keys=one_press(_names(given)))
        case "keyDown" | "keyUp":
            held = act.KeyDown if name == "keyDown" else act.KeyUp
            return held(key=one_of_keys(read_keys(_names(arguments.pop("key")))))
        case "sleep" | "wait":
            return _waited(
                arguments.pop("seconds") if name == "sleep" else arguments.pop("seconds", WAIT_S)
            )
        case "response":
            return act.Answer(text=_text(arguments, "answer"))
        case "call_user":
            return act.Fail()
    return _terminated(arguments)


def _clicked(
    clicks: Any, name: str, arguments: dict[str, Any], place: Point | None, on: CoordinateMap
) -> Action:
    x, y = place or on.pointer_or_centre
    button = _BUTTON_OF.get(name) or _button(arguments)
    if clicks == 1:
        return act.Click(x=x, y=y, button=button)
    if clicks not in (2, 3) or button != "left":
        raise ActionError(f"it clicks once, or 2 or 3 times with the left button, got {clicks!r}")
    return act.DoubleClick(x=x, y=y) if clicks == 2 else act.TripleClick(x=x, y=y)


def _button(arguments: dict[str, Any]) -> MouseButton:
    button = arguments.pop("button", "left")
    button = {"PRIMARY": "left", "SECONDARY": "right"}.get(str(button).upper(), button)
    if button not in get_args(MouseButton):
        raise ActionError(f"button must be left, right or middle, got {str(button)[:24]!r}")
    return cast("MouseButton", button)


def _scrolled(name: str, turned: Any, place: Point) -> Action:
    if isinstance(turned, bool) or not isinstance(turned, int | float):
        raise ActionError("clicks is a number")
    turned = round(turned)
    if abs(turned) > MOST_NOTCHES:
        raise ActionError(f"at most {MOST_NOTCHES} notches are turned at once, got {turned}")
    x, y = place
    return (
        act.Scroll(x=x, y=y, dx=turned) if name == "hscroll" else act.Scroll(x=x, y=y, dy=-turned)
    )


def _text(arguments: dict[str, Any], key: str) -> str:
    text = text_of(arguments, key)
    del arguments[key]
    return text


def _names(value: Any) -> list[str]:
    """Return the names of keys in a list, or in one text, as they are written."""
    names = value if isinstance(value, list) else [value]
    if not names or not all(isinstance(each, str) for each in names):
        raise ActionError("keys are texts")
    return names


def _waited(seconds: Any) -> Action:
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not 0 <= seconds <= MOST_WAIT_S:
        raise ActionError(f"a wait is 0 to {MOST_WAIT_S:g} seconds")
    return act.Wait(seconds=seconds)


def _terminated(arguments: dict[str, Any]) -> Action:
    status = arguments.pop("status", "success")
    arguments.pop("info", None)
    if status not in ("success", "failure", "fail"):
        raise ActionError(f"status must be success or failure, got {str(status)[:24]!r}")
    if status == "success" and arguments.get("answer") is not None:
        return act.Answer(text=_text(arguments, "answer"))
    arguments.pop("answer", None)
    return act.Done() if status == "success" else act.Fail()


def _one_action(steps: list[_Step]) -> tuple[Action, list[_Step]]:
    """Return what the calls do together, and those whose points it has. Raises ActionError for several actions."""
    while len(steps) > 1 and isinstance(steps[-1].action, act.Wait):
        steps = steps[:-1]
    held: list[Modifier] = []
    while len(steps) > 2 and isinstance(first := steps[0].action, act.KeyDown):
        last = steps[-1].action
        if not isinstance(last, act.KeyUp) or last.key != first.key:
            break
        held.append(cast("Modifier", first.key))
        steps = steps[1:-1]
    while len(steps) > 1 and isinstance(move := steps[0].action, act.Move):
        if isinstance(steps[1].action, act.Drag):
            break
        if steps[1].point is not None:  # it names its own place
            steps = steps[1:]
        else:
            steps = [_Step(_there(steps[1].action, move), steps[0].point), *steps[2:]]
    action = steps[0].action
    match [step.action for step in steps]:
        case [_]:
            pass
        case [act.Move(), act.Drag() as action]:
            pass
        case [act.Type() as typed, act.KeyPress(keys=["enter"])]:
            action = act.Type(text=f"{typed.text}\n")
        case [act.MouseDown() as down, *moves, act.MouseUp() as up] if down.button == up.button:
            action = _path(down, moves, up)
        case _:
            raise ActionError(f"{len(steps)} actions in one step; write one")
    return (_holding(action, held) if held else action), steps


def _there(action: Action, move: act.Move) -> Action:
    """Return an action without a place of its own, after a move; the pointer was there when it was read."""
    if isinstance(action, act.MouseDown | act.MouseUp) and action.x is None:
        return action.model_copy(update={"x": move.x, "y": move.y})
    if getattr(action, "x", None) is None:
        raise ActionError(f"2 actions in one step: move and {action.kind}; write one")
    return action


def _path(down: act.MouseDown, moves: Sequence[Action], up: act.MouseUp) -> act.Drag:
    points = [down, *moves, *([up] if up.x is not None else [])]
    if down.x is None or not all(isinstance(each, act.Move) for each in moves) or len(points) < 2:
        raise ActionError("a drag is mouseDown at a point, moves, and mouseUp")
    return act.Drag(path=[(point.x, point.y) for point in points], button=down.button)  # type: ignore[union-attr]


def _holding(action: Action, held: list[Modifier]) -> Action:
    """Return an action while keys are held."""
    if isinstance(action, act.KeyPress):
        return act.KeyPress(keys=[*held, *(key for key in action.keys if key not in held)])
    if not isinstance(action, act.Click | act.DoubleClick | act.TripleClick | act.Drag):
        raise ActionError(
            f"keys are held during a click, a drag or a press, not during {action.kind}"
        )
    if other := [key for key in held if key not in get_args(Modifier)]:
        raise ActionError(f"a click holds ctrl, shift, alt or meta, got {other[0]!r}")
    return action.model_copy(update={"modifiers": tuple(held)})
