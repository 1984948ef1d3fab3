r"""The action language of UI-Venus-2 on a desktop: a thought, then one call in <action> tags.

    <think>The search field is empty.</think>
    <action>Click(box=(333, 48))</action>

    Click  RightClick  MiddleClick  DoubleClick  TripleClick  MouseDown  MouseUp   (box=(x, y)) or ()
    Hover(box=(x, y))   Drag(end=(x, y), start=(x, y))   Swipe(amount=-5, axis='vertical' | 'horizontal')
    Type(content='')   Hotkey(keys=['ctrl', 'c'])   KeyDown(keys=['shift'])   KeyUp(keys=['shift'])
    Wait()   CallUser(content='')   Finished(content='')

The calls and numbers, 0-999 of each side, are those of github.com/inclusionAI/UI-Venus, models/computer. A call
without a place acts where the pointer is. `amount` is in notches of the wheel; its own agent is not published with
a program that scrolls. Several actions (`policy.max_actions`) are one Sequence(actions=[Click(box=(333, 48)), ...]);
`repeat` is malformed.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from bus.errors import ActionError
from dart_cli.language.coordinates import AS_IT_IS, CoordinateMap
from dart_cli.language.parsers.base import Part, WrittenPoint, whole
from dart_cli.language.parsers.reading import (
    Span,
    Verb,
    as_action_errors,
    at_point,
    calls_of,
    first_read,
    not_expressed,
    one_of_keys,
    places_of,
    quote,
    read_keys,
    refuse_long,
    statements_of,
    text_of,
    verb_and_pixel,
    write_keys,
)
from dart_cli.language.parsers.tools import names_of_keys, point_of
from dart_cli.language.thoughts import reply_starts
from envs.contract import actions as act
from envs.contract.actions import Action

WAIT_S = 1.0  # seconds of one wait
MOST_NOTCHES = 4096  # of one swipe, as its prompt says

_BEGIN, _END = "<action>", "</action>"
_CLICKS: Mapping[str, Verb] = {
    "Click": (act.Click, "left"),
    "RightClick": (act.Click, "right"),
    "MiddleClick": (act.Click, "middle"),
    "DoubleClick": (act.DoubleClick, ""),
    "TripleClick": (act.TripleClick, ""),
}
_VERBS: Mapping[str, Verb] = {**_CLICKS, "Hover": (act.Move, "")}
_BUTTONS: Mapping[str, Callable[..., Action]] = {"MouseDown": act.MouseDown, "MouseUp": act.MouseUp}
_ARGUMENTS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys((*_VERBS, *_BUTTONS), ("box",)),
    "Drag": ("end", "start"),
    "Swipe": ("amount", "axis"),
    "Hotkey": ("keys", "repeat"),
    **dict.fromkeys(("KeyDown", "KeyUp"), ("keys",)),
    **dict.fromkeys(("Type", "CallUser", "Finished"), ("content",)),
    "Wait": (),
}
_SIGNATURES = dict.fromkeys(_ARGUMENTS, ())
_POINTS = ("box", "end", "start")
_TAG = re.compile(r"<(?=/?(?:action|think|thinking)>)")
_NUMBER = r"-?\d{1,6}(?:\.\d{1,6})?"
_SEQUENCE = re.compile(r"Sequence\s*\(")
_PAIR = rf"[(\[]\s*{_NUMBER}\s*,\s*{_NUMBER}\s*(?:,\s*{_NUMBER}\s*,\s*{_NUMBER}\s*)?[)\]]"
_POINTER = "it acts where the pointer is; move there first"


class VenusParser:
    """The PointParser of UI-Venus-2's language; the module's docstring has its calls."""

    limits: Mapping[str, str] = {
        **dict.fromkeys(
            ("click", "double_click", "triple_click"),
            "keys are held by KeyDown before it and KeyUp after it",
        ),
        "drag": "it has two points and the left button",
        "scroll": f"it turns the wheel in one direction; {_POINTER}",
        **dict.fromkeys(("mouse_down", "mouse_up"), "it has the left button"),
        "wait": f"it waits {WAIT_S:g} s",
        "answer": "an empty one is no answer",
        "goto": "it has no such action",
    }

    def parse(self, text: str, coordinates: CoordinateMap) -> Action:
        """Return the action of one completion; see ActionParser."""
        return self._read(text, coordinates).action

    def format(self, action: Action, coordinates: CoordinateMap, thought: str = "") -> str:
        """Return the completion of one action; see ActionParser. Tags in `thought` lose their <."""
        call = _call(action, coordinates)
        if call is None:
            raise not_expressed("UI-Venus-2", action, self.limits)
        thought = _TAG.sub("", thought)
        lead = f"<think>{thought}</think>\n" if thought else ""
        return f"{lead}{_BEGIN}{call}{_END}"

    def as_history(self, text: str) -> str:
        """Return the completion unchanged, its thought included, as its own agent passes it on."""
        return text

    def split(self, text: str) -> list[Part]:
        """Return the calls of a Sequence, or the whole text; see SplitParser."""
        refuse_long(text)
        for start, end in _spans(text):
            part = text[start:end]
            begin = start + len(part) - len(part.lstrip())
            if _SEQUENCE.match(text, begin):
                return _sequence(text, begin, end)
        return whole(text)

    def join(self, texts: Sequence[str]) -> str:
        """Return the thought of the first text, and a Sequence of all calls; see SplitParser."""
        starts = [text.index(_BEGIN) for text in texts]
        calls = [
            text[start + len(_BEGIN) : text.rindex(_END)]
            for text, start in zip(texts, starts, strict=True)
        ]
        lead = texts[0][: starts[0]]
        return f"{lead}{_BEGIN}Sequence(actions=[{', '.join(calls)}]){_END}"

    def write_point(self, x: int, y: int) -> str:
        """Return a point in parentheses; see PointParser."""
        return f"({x}, {y})"

    def find_points(self, text: str) -> list[WrittenPoint]:
        """Return the places of the call; see PointParser."""
        try:
            call = self._read(text, AS_IT_IS)
        except ActionError:
            return []
        points = []
        for key in _POINTS:
            match = re.compile(rf"\b{key}\s*=\s*({_PAIR})").search(text, call.start)
            if key in call.arguments and match:
                x, y = point_of(json.loads(f"[{match[1][1:-1]}]"))
                points.append(WrittenPoint(match.start(1), match.end(1), x, y))
        return sorted(points, key=lambda point: point.start)

    def _read(self, text: str, coordinates: CoordinateMap) -> _Call:
        """Return the one call of a completion. Raises ActionError if it has none."""
        refuse_long(text)
        return first_read(_spans(text), lambda span: _call_at(text, span, coordinates))


class _Call(NamedTuple):
    """The call of a completion."""

    action: Action
    arguments: Mapping[str, Any]
    start: int  # where it begins in the completion


def _spans(text: str) -> list[Span]:
    """Return the parts of a text that may be its call, the likeliest first. Raises ActionError if none is.

    A text that the call types may contain the tags.
    """
    spans = []
    for begin in reversed(reply_starts(text)):
        first, last = text.find(_BEGIN, begin), text.rfind(_BEGIN, begin)
        end = text.rfind(_END, begin)
        has_several = (
            _END in text[first:last]
        )  # the last tag is another call, or in a text that is typed
        tags = (first,) if has_several else dict.fromkeys((first, last))
        spans += [(tag + len(_BEGIN), end) for tag in tags if 0 <= tag < end]
    if not spans:
        raise ActionError(f"want one call in {_BEGIN}...{_END}")
    return spans


def _sequence(text: str, begin: int, end: int) -> list[Part]:
    """Return the calls of the Sequence in the characters [begin, end) of a text. Raises ActionError."""
    code = text[begin:end].rstrip()
    match statements_of(code):
        case [
            ast.Expr(
                value=ast.Call(
                    args=[], keywords=[ast.keyword(arg="actions", value=ast.List(elts=calls))]
                )
            )
        ] if calls:
            return [
                Part(f"{_BEGIN}{code[start:end]}{_END}", begin + start, begin + end, len(_BEGIN))
                for start, end in places_of(code, calls)
            ]
    raise ActionError("want Sequence(actions=[CALL, CALL, ...])")


def _call_at(text: str, span: Span, coordinates: CoordinateMap) -> _Call:
    """Return the one call in the part `span` of the text. Raises ActionError if there is none."""
    part = text[span[0] : span[1]]
    code, start = part.strip(), span[0] + len(part) - len(part.lstrip())
    if _SEQUENCE.match(code):
        raise ActionError("a Sequence is several actions; one completion is one action")
    one_line = code.replace("\r", "\\r").replace("\n", "\\n")  # a text may be written over lines
    calls = first_read((code, one_line), lambda each: calls_of(each, _SIGNATURES, ()))
    if len(calls) != 1 or calls[0].rest:
        raise ActionError("want one call with named arguments")
    name, arguments = calls[0].name, calls[0].arguments
    for key in arguments:
        if key not in _ARGUMENTS[name]:
            has = ", ".join(_ARGUMENTS[name]) or "none"
            raise ActionError(f"{name} has no argument {key[:24]!r}; it has {has}")
    with as_action_errors(name):
        return _Call(_action(name, arguments, coordinates), arguments, start)


def _action(name: str, arguments: Mapping[str, Any], coordinates: CoordinateMap) -> Action:
    def at(key: str) -> tuple[int, int]:
        return coordinates.to_screen(*point_of(arguments[key]))

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


def _swipe(arguments: Mapping[str, Any], coordinates: CoordinateMap) -> Action:
    """Return the scroll of a swipe, at the pointer; a positive amount is up, or right."""
    x, y = coordinates.pointer_or_centre
    amount, axis = arguments["amount"], arguments["axis"]
    if isinstance(amount, bool) or not isinstance(amount, int) or abs(amount) > MOST_NOTCHES:
        raise ActionError(f"amount must be an integer from -{MOST_NOTCHES} to {MOST_NOTCHES}")
    if axis not in ("vertical", "horizontal"):
        raise ActionError(f"axis must be vertical or horizontal, got {str(axis)[:24]!r}")
    turn = {"dx": amount} if axis == "horizontal" else {"dy": -amount}
    return act.Scroll(x=x, y=y, **turn)


def _call(action: Action, coordinates: CoordinateMap) -> str | None:
    """Return the text of the call for an action; None if the language has none."""

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


def _quoted(text: str) -> str:
    return quote(text, (_BEGIN, _END, "</think"))


def _listed(keys: Sequence[str]) -> str:
    """Return the names of keys as a list. Raises ActionError for a name that is not one of ours."""
    return f"[{', '.join(map(repr, write_keys(keys)))}]"


ACTION_PARSERS: Mapping[str, Callable[[], VenusParser]] = {"venus": VenusParser}
"""The factory of this module's action parser, by name."""
