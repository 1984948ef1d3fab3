r"""The action languages of UI-Venus: a thought, then one call in <action> tags.

    <think>The search field is empty.</think>
    <action>Click(box=(333, 48))</action>

    action parser   families                                 after the call
    venus           UI-Venus-2 on a desktop                  nothing
    venus-web       UI-Venus-1.5 in a browser                <conclusion>what the call does</conclusion>
    venus-mobile    UI-Venus-1.5 on a telephone              the same

Calls of venus:
    Click  RightClick  MiddleClick  DoubleClick  TripleClick  MouseDown  MouseUp   (box=(x, y)) or ()
    Hover(box=(x, y))   Drag(end=(x, y), start=(x, y))   Swipe(amount=-5, axis='vertical' | 'horizontal')
    Type(content='')   Hotkey(keys=['ctrl', 'c'])   KeyDown(keys=['shift'])   KeyUp(keys=['shift'])
    Wait()   CallUser(content='')   Finished(content='')
Calls of venus-web and venus-mobile:
    Click(box=(x,y))   LongPress(box=(x,y)), a right click   Drag(start=(x,y), end=(x,y))
    Type(content='')   PressEnter()   PressBack()   Wait()   Finished(content='')
    CallUser(content=''), an answer; without a text the task cannot be done
Of venus-web alone:
    DoubleClick(box=(x,y))   Hover(box=(x,y))   Scroll(direction='down' | 'up')   Hotkey(keys=['ctrl', 'c'])
    Launch(url='')
Of venus-mobile alone:
    Scroll(start=(x,y), end=(x,y)), which is how a drag is written   PressHome()   PressRecent()

Numbers are 0-999 of each side. What each call means is in venus_calls.py.

In `venus` a call without a place acts where the pointer is. `amount` is in notches of the wheel; its own agent is
not published with a program that scrolls. Several actions (`policy.max_actions`) are one
Sequence(actions=[Click(box=(333, 48)), ...]); `repeat` is malformed. In the others a text may have quotes that are
not escaped, which their own agent reads.
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
    as_action_errors,
    calls_of,
    first_read,
    not_expressed,
    places_of,
    refuse_long,
    statements_of,
)
from dart_cli.language.parsers.tools import point_of
from dart_cli.language.parsers.venus_calls import BROWSER, DESKTOP, PHONE, Dialect
from dart_cli.language.thoughts import reply_starts
from envs.contract.actions import Action

_BEGIN, _END = "<action>", "</action>"
_POINTS = ("box", "end", "start")
_TAG = re.compile(r"<(?=/?(?:action|conclusion|think|thinking)>)")
_NUMBER = r"-?\d{1,6}(?:\.\d{1,6})?"
_SEQUENCE = re.compile(r"Sequence\s*\(")
_PAIR = rf"[(\[]\s*{_NUMBER}\s*,\s*{_NUMBER}\s*(?:,\s*{_NUMBER}\s*,\s*{_NUMBER}\s*)?[)\]]"
_TEXT = re.compile(r"(\w+)\(\s*content\s*=\s*(['\"])(.*)\2\s*\)", re.DOTALL)
"""A call with a text, whose quotes may not be escaped."""


class VenusParser:
    """The PointParser of one dialect; the module's docstring has the calls."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self.limits: Mapping[str, str] = dialect.limits

    def parse(self, text: str, coordinates: CoordinateMap) -> Action:
        """Return the action of one completion; see ActionParser."""
        return self._read(text, coordinates).action

    def format(self, action: Action, coordinates: CoordinateMap, thought: str = "") -> str:
        """Return the completion of one action; see ActionParser. Tags in `thought` lose their <."""
        call = self._dialect.write(action, coordinates)
        if call is None:
            raise not_expressed(self._dialect.title, action, self.limits)
        return self._completion(call, _TAG.sub("", thought))

    def as_history(self, text: str) -> str:
        """Return the completion unchanged, its thought included, as its own agent passes it on."""
        return text

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

    def _completion(self, call: str, thought: str) -> str:
        """Return the completion of a call."""
        lead = f"<think>{thought}</think>\n" if thought else ""
        return f"{lead}{_BEGIN}{call}{_END}"

    def _codes(self, code: str) -> list[str]:
        """Return the readings of a call as code, the likeliest first."""
        # A text may be written over lines.
        return [code, code.replace("\r", "\\r").replace("\n", "\\n")]

    def _read(self, text: str, coordinates: CoordinateMap) -> _Call:
        """Return the one call of a completion. Raises ActionError if it has none."""
        refuse_long(text)
        return first_read(_spans(text), lambda span: self._call_at(text, span, coordinates))

    def _call_at(self, text: str, span: Span, coordinates: CoordinateMap) -> _Call:
        """Return the one call in the part `span` of the text. Raises ActionError if there is none."""
        part = text[span[0] : span[1]]
        code, start = part.strip(), span[0] + len(part) - len(part.lstrip())
        if _SEQUENCE.match(code):
            raise ActionError("a Sequence is several actions; one completion is one action")
        its = self._dialect.arguments
        signatures = dict.fromkeys(its, ())
        calls = first_read(self._codes(code), lambda each: calls_of(each, signatures, ()))
        if len(calls) != 1 or calls[0].rest:
            raise ActionError("want one call with named arguments")
        name, arguments = calls[0].name, calls[0].arguments
        for key in arguments:
            if key not in its[name]:
                has = ", ".join(its[name]) or "none"
                raise ActionError(f"{name} has no argument {key[:24]!r}; it has {has}")
        with as_action_errors(name):
            return _Call(self._dialect.read(name, arguments, coordinates), arguments, start)


class SequenceParser(VenusParser):
    """The parser of UI-Venus-2, whose Sequence has several actions; a SplitParser."""

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


class ConclusionParser(VenusParser):
    """The parser of UI-Venus-1.5, whose completions end with a conclusion."""

    def summary(self, text: str) -> str:
        """Return thought and call in their tags, without the conclusion, as its own agent passes them on.

        The result is empty if there is no call in tags. See `summary_of` in base.py.
        """
        thought, closing, reply = text.partition("</think>")
        if not closing or _BEGIN in thought:  # the call types the tag
            thought, reply = "", text
        call, end, _ = reply.partition(_BEGIN)[2].partition(_END)
        if not end:
            return ""
        thought = thought.lstrip().removeprefix("<think>").strip("\n")
        call = call.strip("\n")
        return f"<think>{thought}</think>{_BEGIN}{call}{_END}"

    def write_point(self, x: int, y: int) -> str:
        """Return a point in parentheses; see PointParser."""
        return f"({x},{y})"

    def _completion(self, call: str, thought: str) -> str:
        """Return the completion of a call, with an empty conclusion, whose tags its own agent needs."""
        return f"{super()._completion(call, thought)}\n<conclusion></conclusion>"

    def _codes(self, code: str) -> list[str]:
        """Return the readings of a call as code; in the last one, the quotes within its text are escaped."""
        codes = super()._codes(code)
        match = _TEXT.fullmatch(code)
        if match is None or re.search(rf"{match[2]}\s*[,)]", match[3]):  # which may end the text
            return codes
        name, mark, text = match.groups()
        text = re.sub(
            r"\\.|['\"]",
            lambda each: f"\\{mark}" if each[0] == mark else each[0],
            text,
            flags=re.DOTALL,
        )
        return [*codes, *super()._codes(f"{name}(content={mark}{text}{mark})")]


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
        # The last tag is another call, or in a text that is typed.
        has_several = _END in text[first:last]
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


ACTION_PARSERS: Mapping[str, Callable[[], VenusParser]] = {
    "venus": lambda: SequenceParser(DESKTOP),
    "venus-web": lambda: ConclusionParser(BROWSER),
    "venus-mobile": lambda: ConclusionParser(PHONE),
}
"""The factories of this module's action parsers, by name."""
