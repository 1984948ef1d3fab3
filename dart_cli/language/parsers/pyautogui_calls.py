"""Reads calls of pyautogui, which may be on several lines, as one action.

SIGNATURES   the calls of each dialect, with their arguments by position
read_calls   returns the action of some calls, and the points that they name
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
    as_action_errors,
    one_of_keys,
    one_press,
    read_keys,
    text_of,
)
from envs.contract import actions as act
from envs.contract.actions import Action, Modifier, MouseButton

LONG_WAIT_S = 20.0  # seconds of computer.wait(), as OpenCUA's prompt promises
WAIT_S = 3.0  # seconds of ScaleCUA's wait() without a number
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
    point: WrittenPoint | None = None  # None for a call without x and y


def read_calls(
    calls: Sequence[Call], coordinates: CoordinateMap, start: int
) -> tuple[Action, list[WrittenPoint]]:
    """Return the one action of `calls`, and its points; the code begins at character `start` of the text.

    Raises ActionError if the calls are no action, or more than one.
    """
    if not calls:
        raise ActionError("the code has no call")
    steps: list[_Step] = []
    for call in calls:
        with as_action_errors(call.name):
            step = _step(call, coordinates, start)
        steps.append(step)
        if isinstance(step.action, act.Move):
            coordinates = replace(coordinates, pointer=(step.action.x, step.action.y))
    action, used = _one_action(steps)
    return action, [step.point for step in used if step.point is not None]


def _step(call: Call, coordinates: CoordinateMap, start: int) -> _Step:
    """Return a call as an action. Raises ActionError, KeyError, TypeError, ValueError or OverflowError."""
    # 1. Read its point.
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
    # 2. Read its other arguments, which `_action` takes out of the dict.
    if call.name == "computer.wait":
        arguments.setdefault("seconds", LONG_WAIT_S)
    action = _action(call, name, arguments, place, coordinates)
    if arguments:
        raise ActionError(f"{name} has no argument {next(iter(arguments))[:24]!r}")
    return _Step(action, point)


def _cell(number: Any, coordinates: CoordinateMap) -> int:
    """Return one of the model's numbers as a cell of the model's grid. Raises ActionError for no number."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise ActionError("x and y are numbers")
    cells: float = number * 10**coordinates.decimals
    return math.floor(round(cells, 6))


def _action(
    call: Call, name: str, arguments: dict[str, Any], place: Point | None, on: CoordinateMap
) -> Action:
    """Return the action of a call at `place`; the arguments that it reads are removed from `arguments`."""
    match name:
        case "click" | "leftClick" | "rightClick" | "middleClick":
            return _click(arguments.pop("clicks", 1), name, arguments, place, on)
        case "doubleClick":
            return _click(2, name, arguments, place, on)
        case "tripleClick" | "triple_click":
            return _click(3, name, arguments, place, on)
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
            return _scroll(name, arguments.pop("clicks"), place or on.pointer_or_centre)
        case "write" | "typewrite":
            return act.Type(text=_text(arguments, "message" if "message" in arguments else "text"))
        case "hotkey":
            rest = call.rest
            by_position = (
                list(rest[0]) if len(rest) == 1 and isinstance(rest[0], list) else list(rest)
            )
            keys = by_position or arguments.pop("keys", arguments.pop("args", None))
            return act.KeyPress(keys=read_keys(_names(keys)))
        case "press":
            presses = arguments.pop("presses", 1)
            keys = arguments.pop("keys") if "keys" in arguments else arguments.pop("key")
            if presses != 1 or (isinstance(keys, list) and len(keys) > 1):
                raise ActionError("one press is one action; press in several steps")
            return act.KeyPress(keys=one_press(_names(keys)))
        case "keyDown" | "keyUp":
            key_action = act.KeyDown if name == "keyDown" else act.KeyUp
            return key_action(key=one_of_keys(read_keys(_names(arguments.pop("key")))))
        case "sleep" | "wait":
            return _wait(
                arguments.pop("seconds") if name == "sleep" else arguments.pop("seconds", WAIT_S)
            )
        case "response":
            return act.Answer(text=_text(arguments, "answer"))
        case "call_user":
            return act.Fail()
    return _terminate(arguments)


def _click(
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
    """Return the mouse button of a call, by default the left, and remove it from `arguments`."""
    button = arguments.pop("button", "left")
    button = {"PRIMARY": "left", "SECONDARY": "right"}.get(str(button).upper(), button)
    if button not in get_args(MouseButton):
        raise ActionError(f"button must be left, right or middle, got {str(button)[:24]!r}")
    return cast("MouseButton", button)


def _scroll(name: str, clicks: Any, place: Point) -> Action:
    if isinstance(clicks, bool) or not isinstance(clicks, int | float):
        raise ActionError("clicks is a number")
    notches = round(clicks)
    if abs(notches) > MOST_NOTCHES:
        raise ActionError(f"at most {MOST_NOTCHES} notches are turned at once, got {notches}")
    x, y = place
    if name == "hscroll":
        return act.Scroll(x=x, y=y, dx=notches)
    return act.Scroll(x=x, y=y, dy=-notches)


def _text(arguments: dict[str, Any], key: str) -> str:
    """Return an argument that is a text, and remove it from `arguments`."""
    text = text_of(arguments, key)
    del arguments[key]
    return text


def _names(value: Any) -> list[str]:
    """Return the names of keys in a list or in one text, as they are written."""
    names = value if isinstance(value, list) else [value]
    if not names or not all(isinstance(name, str) for name in names):
        raise ActionError("keys are texts")
    return names


def _wait(seconds: Any) -> Action:
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not 0 <= seconds <= MOST_WAIT_S:
        raise ActionError(f"a wait is 0 to {MOST_WAIT_S:g} seconds")
    return act.Wait(seconds=seconds)


def _terminate(arguments: dict[str, Any]) -> Action:
    """Return Answer, Done or Fail, by the status and the answer of a call that ends the episode."""
    status = arguments.pop("status", "success")
    arguments.pop("info", None)
    if status not in ("success", "failure", "fail"):
        raise ActionError(f"status must be success or failure, got {str(status)[:24]!r}")
    if status == "success" and arguments.get("answer") is not None:
        return act.Answer(text=_text(arguments, "answer"))
    arguments.pop("answer", None)
    return act.Done() if status == "success" else act.Fail()


def _one_action(steps: list[_Step]) -> tuple[Action, list[_Step]]:
    """Return the one action of all steps, and the steps whose points it has.

    Raises ActionError for several actions.
    """
    # 1. Drop waits after the action.
    while len(steps) > 1 and isinstance(steps[-1].action, act.Wait):
        steps = steps[:-1]
    # 2. Take off the keys that are held around the action.
    modifiers: list[Modifier] = []
    while len(steps) > 2 and isinstance(first := steps[0].action, act.KeyDown):
        last = steps[-1].action
        if not isinstance(last, act.KeyUp) or last.key != first.key:
            break
        modifiers.append(cast("Modifier", first.key))
        steps = steps[1:-1]
    # 3. Join a move with the call that follows it.
    while len(steps) > 1 and isinstance(move := steps[0].action, act.Move):
        if isinstance(steps[1].action, act.Drag):
            break
        if steps[1].point is not None:  # the call names a place itself
            steps = steps[1:]
        else:
            steps = [_Step(_at_move(steps[1].action, move), steps[0].point), *steps[2:]]
    # 4. The rest is one call, or one of a few sequences.
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
    return (_with_modifiers(action, modifiers) if modifiers else action), steps


def _at_move(action: Action, move: act.Move) -> Action:
    """Return an action that names no place, at the place of the move before it.

    Most actions have the place already: they were read with the pointer there.
    """
    if isinstance(action, act.MouseDown | act.MouseUp) and action.x is None:
        return action.model_copy(update={"x": move.x, "y": move.y})
    if getattr(action, "x", None) is None:
        raise ActionError(f"2 actions in one step: move and {action.kind}; write one")
    return action


def _path(down: act.MouseDown, moves: Sequence[Action], up: act.MouseUp) -> act.Drag:
    """Return mouseDown, moves and mouseUp as one drag. Raises ActionError if they are no drag."""
    points = [down, *moves, *([up] if up.x is not None else [])]
    are_moves = all(isinstance(move, act.Move) for move in moves)
    if down.x is None or not are_moves or len(points) < 2:
        raise ActionError("a drag is mouseDown at a point, moves, and mouseUp")
    return act.Drag(path=[(point.x, point.y) for point in points], button=down.button)  # type: ignore[union-attr]


def _with_modifiers(action: Action, modifiers: list[Modifier]) -> Action:
    """Return an action during which keys are held. Raises ActionError if none can be held during it."""
    if isinstance(action, act.KeyPress):
        others = [key for key in action.keys if key not in modifiers]
        return act.KeyPress(keys=[*modifiers, *others])
    if not isinstance(action, act.Click | act.DoubleClick | act.TripleClick | act.Drag):
        raise ActionError(
            f"keys are held during a click, a drag or a press, not during {action.kind}"
        )
    if other := [key for key in modifiers if key not in get_args(Modifier)]:
        raise ActionError(f"a click holds ctrl, shift, alt or meta, got {other[0]!r}")
    return action.model_copy(update={"modifiers": tuple(modifiers)})
