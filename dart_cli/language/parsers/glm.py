r"""The action language of GLM-4.5V on a desktop: a thought, one call in box tokens, and a memory.

    I click the search field. <|begin_of_box|>left_click(start_box='[333,48]', element_info='search')<|end_of_box|>
    Memory:
    []

    left_click  right_click  middle_click  hover  left_double_click  (start_box='[x,y]', element_info='')
    left_drag(start_box='[x,y]', end_box='[x,y]')   scroll(start_box='[x,y]', direction='up' | 'down', step=5)
    key(keys='ctrl+c')   type(content='...')   WAIT() of 5 seconds   DONE()   FAIL()

The calls and numbers, 0-999 of each side, are those of github.com/zai-org/GLM-V, examples/gui-agent/glm-45v.
A call without box tokens before the memory is read, too. A box of four numbers means its centre. The memory
is not read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from bus.errors import ActionError
from dart_cli.language.coordinates import AS_IT_IS, CoordinateMap
from dart_cli.language.parsers.base import WrittenPoint
from dart_cli.language.parsers.reading import (
    Span,
    Verb,
    as_action_errors,
    at_point,
    calls_of,
    first_read,
    join_keys,
    not_expressed,
    quote,
    refuse_long,
    split_keys,
    text_of,
    verb_and_pixel,
)
from dart_cli.language.parsers.tools import point_of
from dart_cli.language.thoughts import reply_of, reply_starts
from envs.contract import actions as act
from envs.contract.actions import Action

WAIT_S = 5.0  # seconds of one wait, as its prompt promises
STEP = 5  # notches of a scroll that names none
MOST_NOTCHES = 10_000

_BEGIN, _END, _MEMORY = "<|begin_of_box|>", "<|end_of_box|>", "\nMemory:"
_VERBS: Mapping[str, Verb] = {
    "left_click": (act.Click, "left"),
    "right_click": (act.Click, "right"),
    "middle_click": (act.Click, "middle"),
    "left_double_click": (act.DoubleClick, ""),
    "hover": (act.Move, ""),
}
_POINTED = (*_VERBS, "left_drag", "scroll")
_NAMES = (*_POINTED, "key", "type", "WAIT", "DONE", "FAIL")
_SIGNATURES = dict.fromkeys(_NAMES, ())
_ARGUMENTS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(_VERBS, ("start_box",)),
    "left_drag": ("start_box", "end_box"),
    "scroll": ("start_box", "direction", "step"),
    "key": ("keys",),
    "type": ("content",),
    **dict.fromkeys(("WAIT", "DONE", "FAIL"), ()),
}
"""The arguments of each call, without `element_info`, which is not read."""
_TAG = re.compile(r"<(?=\||/?think(?:ing)?>)")
_BARE = re.compile(rf"(?<!\w)(?:{'|'.join(_NAMES)})\(")
_BOX = r"\s*=\s*['\"]?\s*(\[\s*\d{1,6}\s*,\s*\d{1,6}\s*(?:,\s*\d{1,6}\s*,\s*\d{1,6}\s*)?\])"


class GlmParser:
    """The PointParser of GLM's language; the module's docstring has its calls."""

    limits: Mapping[str, str] = {
        **dict.fromkeys(("click", "double_click"), "keys cannot be held during it"),
        **dict.fromkeys(
            ("triple_click", "mouse_down", "mouse_up", "key_down", "key_up", "goto"),
            "it has no such action",
        ),
        "drag": "it has two points and the left button",
        "scroll": "it turns the wheel up or down",
        "wait": f"it waits {WAIT_S:g} s",
        "answer": "it has no such action; its text is not read",
    }

    def parse(self, text: str, coordinates: CoordinateMap) -> Action:
        """Return the action of one completion; see ActionParser."""
        return self._read(text, coordinates).action

    def format(self, action: Action, coordinates: CoordinateMap, thought: str = "") -> str:
        """Return the completion of one action; see ActionParser. Box tokens in `thought` lose their <."""
        call = _call(action, coordinates)
        if call is None:
            raise not_expressed("GLM", action, self.limits)
        thought = _TAG.sub("", thought)
        return f"{thought} {_BEGIN}{call}{_END}\nMemory:\n[]".lstrip(" ")

    def as_history(self, text: str) -> str:
        """Return the completion unchanged."""
        return text

    def summary(self, text: str) -> str:
        """Return thought and action as the prompt's lines on past steps have them.

        See `summary_of` in base.py.
        """
        try:
            code = self._read(text, AS_IT_IS).code
        except ActionError:
            return ""
        thought = reply_of(text).partition("Memory:")[0]
        thought = thought.replace(_BEGIN, "").replace(_END, "").replace(code, "").strip()
        return f"Thought: {thought}\nAction: {code}"

    def write_point(self, x: int, y: int) -> str:
        """Return a point as a list; see PointParser."""
        return f"[{x},{y}]"

    def find_points(self, text: str) -> list[WrittenPoint]:
        """Return the boxes of the call; see PointParser."""
        try:
            call = self._read(text, AS_IT_IS)
        except ActionError:
            return []
        points = []
        for key in ("start_box", "end_box") if call.name in _POINTED else ():
            match = re.compile(key + _BOX).search(text, call.start)
            if match and _numbers(call.arguments.get(key)) == json.loads(match[1]):
                x, y = point_of(json.loads(match[1]))
                points.append(WrittenPoint(match.start(1), match.end(1), x, y))
        return points

    def _read(self, text: str, coordinates: CoordinateMap) -> _Call:
        """Return the one call of a completion. Raises ActionError if it has none."""
        refuse_long(text)
        return first_read(_spans(text), lambda span: self._call_at(text, span, coordinates))

    def _call_at(self, text: str, span: Span, coordinates: CoordinateMap) -> _Call:
        """Return the one call in the part `span` of the text. Raises ActionError if there is none."""
        part = text[span[0] : span[1]]
        code, start = part.strip(), span[0] + len(part) - len(part.lstrip())
        calls = calls_of(code, _SIGNATURES, ("element_info",))
        if len(calls) != 1 or calls[0].rest:
            raise ActionError("want one call with named arguments")
        name, arguments = calls[0].name, calls[0].arguments
        for key in arguments:
            if key not in _ARGUMENTS[name]:
                has = ", ".join(_ARGUMENTS[name]) or "none"
                raise ActionError(f"{name} has no argument {key[:24]!r}; it has {has}")
        with as_action_errors(name):
            return _Call(_action(name, arguments, coordinates), code, name, arguments, start)


class _Call(NamedTuple):
    """The call of a completion."""

    action: Action
    code: str
    name: str
    arguments: Mapping[str, Any]
    start: int  # where it begins in the completion


def _spans(text: str) -> list[Span]:
    """Return the parts of a text that may be its call, the likeliest first. Raises ActionError if none is.

    The call stands after the thought and before the memory. A text that it types may contain box tokens.
    """
    spans = [span for begin in reversed(reply_starts(text)) for span in _spans_from(text, begin)]
    if not spans and _BEGIN in text:
        raise ActionError(f"{_BEGIN} is not followed by {_END}")
    if not spans:
        raise ActionError(f"want one call in {_BEGIN}...{_END}")
    return spans


def _spans_from(text: str, begin: int) -> list[Span]:
    """Return the parts of the reply from character `begin` on that may be its call, the likeliest first."""
    memory = text.rfind(_MEMORY, begin)
    end = len(text) if memory < 0 else memory
    first, last = text.find(_BEGIN, begin, end), text.rfind(_BEGIN, begin, end)
    if first < 0:
        bare = _BARE.search(text, begin, end)
        return [(bare.start(), end)] if bare else []
    closed = ((box, text.rfind(_END, box, end)) for box in dict.fromkeys((last, first)))
    return [(box + len(_BEGIN), ends) for box, ends in closed if ends >= 0]


def _numbers(box: Any) -> Any:
    """Return the numbers of a box, which is a list or a text."""
    return json.loads(box) if isinstance(box, str) and len(box) < 200 else box


def _action(name: str, arguments: Mapping[str, Any], coordinates: CoordinateMap) -> Action:
    def at(key: str) -> tuple[int, int]:
        return coordinates.to_screen(*point_of(_numbers(arguments[key])))

    if name in _VERBS:
        return at_point(_VERBS[name], at("start_box"))
    match name:
        case "left_drag":
            return act.Drag(path=[at("start_box"), at("end_box")])
        case "scroll":
            x, y = at("start_box")
            step, direction = arguments.get("step", STEP), arguments["direction"]
            if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= MOST_NOTCHES:
                raise ActionError(f"step must be 0 to {MOST_NOTCHES}")
            if direction not in ("up", "down"):
                raise ActionError(f"direction must be up or down, got {str(direction)[:24]!r}")
            return act.Scroll(x=x, y=y, dy=step if direction == "down" else -step)
        case "key":
            return act.KeyPress(keys=split_keys(text_of(arguments, "keys")))
        case "type":
            return act.Type(text=text_of(arguments, "content"))
        case "WAIT":
            return act.Wait(seconds=WAIT_S)
    return act.Done() if name == "DONE" else act.Fail()


def _call(action: Action, coordinates: CoordinateMap) -> str | None:
    """Return the text of the call for an action; None if the language has none."""

    def box(x: int, y: int) -> str:
        x, y = coordinates.to_model(x, y)
        return f"'[{x},{y}]'"

    if call := verb_and_pixel(_VERBS, action):
        name, x, y = call
        return f"{name}(start_box={box(x, y)}, element_info='')"
    match action:
        case act.Drag(path=[first, last], button="left", modifiers=()):
            ends = f"start_box={box(*first)}, end_box={box(*last)}"
            return f"left_drag({ends}, element_info='')"
        case act.Scroll(dx=0, dy=dy) if abs(dy) <= MOST_NOTCHES:
            direction = "up" if dy < 0 else "down"
            at = box(action.x, action.y)
            return (
                f"scroll(start_box={at}, direction='{direction}', step={abs(dy)}, element_info='')"
            )
        case act.KeyPress():
            return f"key(keys={quote(join_keys(action.keys, '+'), ())})"
        case act.Type():
            return f"type(content={quote(action.text, (_BEGIN, _END, '</think'))})"
        case act.Wait(seconds=seconds) if seconds == WAIT_S:
            return "WAIT()"
        case act.Done():
            return "DONE()"
        case act.Fail():
            return "FAIL()"
    return None


ACTION_PARSERS: Mapping[str, Callable[[], GlmParser]] = {"glm": GlmParser}
"""The factory of this module's action parser, by name."""
