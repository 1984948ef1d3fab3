r"""Tool calls: any text, then one call in <tool_call> tags at the end of the completion.

    Action: Click the search field.
    <tool_call>
    {"name": "computer_use", "arguments": {"action": "left_click", "coordinate": [640, 52]}}
    </tool_call>

    action parser     tool                    syntax    families
    toolcall          computer_use            JSON      Qwen2.5-VL, Qwen3-VL, GUI-Owl-1.5, EvoCUA
    toolcall-mobile   mobile_use              JSON      the same on a telephone
    toolcall-mai      mobile_use of MAI-UI    JSON      MAI-UI, which writes its thought in <thinking> tags
    toolcall-fara     computer_use of Fara    JSON      Fara1.5, which writes its thought without `Action:`
    toolcall-xml      computer_use            XML       Qwen3.5, Qwen3.8

The tools are in tools.py and fara.py.

Several actions (`policy.max_actions`) are several calls in a row, each in its tags, as in the chat templates of
these models; a line of words may stand before each.

The XML is written as in Qwen's newer chat templates: <function=NAME>, then <parameter=NAME> with its value on
separate lines. A text that is typed or answered may contain any tag in JSON, but not </parameter> in XML.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from bus.errors import ActionError
from dart_cli.language.coordinates import AS_IT_IS, CoordinateMap
from dart_cli.language.parsers.base import Part, WrittenPoint, whole
from dart_cli.language.parsers.fara import FARA_BROWSER
from dart_cli.language.parsers.reading import (
    as_action_errors,
    cut_lines,
    first_read,
    not_expressed,
    object_once,
    refuse_long,
)
from dart_cli.language.parsers.tools import (
    COMPUTER_USE,
    MAI_MOBILE,
    MOBILE_USE,
    Tool,
    point_of,
    refuse_unknown,
)
from dart_cli.language.thoughts import reply_of, reply_starts
from envs.contract.actions import Action

Syntax = Literal["json", "xml"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_NEXT = re.compile(r"(?<=</tool_call>)\s*(?=\S)")
"""The gap before the next of several calls."""
_TAG = re.compile(r"<(?=/?(?:tool_call|function|parameter|think|thinking)\b)")
_FUNCTION = re.compile(r"<function=([\w.-]{1,64})>")
_END_FUNCTION = "</function>"
_PARAMETER = re.compile(r"<parameter=(\w{1,64})>(.*?)</parameter>\s*", re.DOTALL)
_NUMBER = r"-?\d{1,6}(?:\.\d{1,6})?"
_LIST = rf"(\[\s*{_NUMBER}\s*,\s*{_NUMBER}\s*(?:,\s*{_NUMBER}\s*,\s*{_NUMBER}\s*)?\])"
_ACTION_LINE = re.compile(r"^Action:(.+)$", re.MULTILINE)


class ToolcallParser:
    """The PointParser of tool calls, for one tool and syntax; see the module's docstring."""

    def __init__(self, tool: Tool = COMPUTER_USE, syntax: Syntax = "json") -> None:
        self._tool = tool
        self._syntax = syntax
        self._thinks = tool is MAI_MOBILE
        self.limits: Mapping[str, str] = dict(tool.limits)
        if syntax == "xml":
            lacks = "a text cannot hold </parameter>"
            self.limits = {**self.limits, "type": lacks, "answer": lacks}
        elif tool is COMPUTER_USE:
            lacks = "keys are held by key_down before it and key_up after it"
            clicks = dict.fromkeys(("click", "double_click", "triple_click"), lacks)
            self.limits = {**self.limits, **clicks}

    def parse(self, text: str, coordinates: CoordinateMap) -> Action:
        """Return the action of one completion; see ActionParser."""
        arguments, _ = self._call(text)
        return self._read(arguments, coordinates)

    def format(self, action: Action, coordinates: CoordinateMap, thought: str = "") -> str:
        """Return the completion of one action; see ActionParser. Tags of calls in `thought` lose their <."""
        arguments = self._tool.write(action, coordinates)
        modifiers = getattr(action, "modifiers", ())
        if arguments is None or (modifiers and "click" in self.limits):
            raise not_expressed(self._tool.name, action, self.limits)
        call = f"{_OPEN}\n{self._write_call(arguments)}\n{_CLOSE}"
        thought = _TAG.sub("", thought)
        if self._thinks:
            return f"<thinking>\n{thought}\n</thinking>\n{call}"
        lead = "" if self._tool is FARA_BROWSER else "Action: "
        return f"{lead}{thought}\n{call}" if thought else call

    def as_history(self, text: str) -> str:
        """Return the completion unchanged, its thought included, as the agents of these families show it."""
        return text

    def summary(self, text: str) -> str:
        """Return the line that describes the action, or a line made of its name.

        See `summary_of` in base.py.
        """
        try:
            if line := _ACTION_LINE.search(reply_of(text).rpartition(_OPEN)[0]):
                return line[1].strip()
            arguments, _ = self._call(text)
        except ActionError:
            return ""
        return f"Performing {str(arguments.get('action'))[:40]} action"

    def split(self, text: str) -> list[Part]:
        """Return the calls of the reply, each with the words before it; see SplitParser."""
        try:
            self._call(text)
        except ActionError:
            return cut_lines(text, _NEXT, reply_starts(text)[-1])
        return whole(text)  # a text that it types may have tags of calls

    def join(self, texts: Sequence[str]) -> str:
        """Return the calls in a row; see SplitParser."""
        first, *others = texts
        return "\n".join([first, *(text[text.index(_OPEN) :] for text in others)])

    def write_point(self, x: int, y: int) -> str:
        """Return a point as a list; see PointParser."""
        return f"[{x}, {y}]"

    def find_points(self, text: str) -> list[WrittenPoint]:
        """Return the coordinates in the call that the action uses; see PointParser."""
        try:
            arguments, start = self._call(text)
            self._read(arguments, AS_IT_IS)
        except ActionError:
            return []
        points = []
        for key in self._tool.points.get(arguments["action"], ()):
            name = f'"{key}"\\s*:' if self._syntax == "json" else f"<parameter={key}>"
            match = re.compile(rf"{name}\s*{_LIST}").search(text, start)
            if match and json.loads(match[1]) == arguments.get(key):
                x, y = point_of(arguments[key])
                points.append(WrittenPoint(match.start(1), match.end(1), x, y))
        return points

    def _read(self, arguments: Mapping[str, Any], coordinates: CoordinateMap) -> Action:
        refuse_unknown(self._tool, arguments)
        with as_action_errors("the call"):
            return self._tool.read(arguments, coordinates)

    def _call(self, text: str) -> tuple[dict[str, Any], int]:
        """Return the arguments of the call that ends the text, and where it begins. Raises ActionError."""
        refuse_long(text)
        return first_read(_calls_begin(text), lambda start: self._call_at(text, start))

    def _call_at(self, text: str, start: int) -> tuple[dict[str, Any], int]:
        """Return the arguments of the call that begins at `start` and ends the text, and `start`."""
        inner = text[start + len(_OPEN) :].rstrip()
        if not inner.endswith(_CLOSE):
            raise ActionError(f"the completion does not end with {_CLOSE}")
        inner = inner[: -len(_CLOSE)]
        name, arguments = self._json(inner) if self._syntax == "json" else self._xml(inner)
        if name != self._tool.name:
            raise ActionError(f"the tool is {self._tool.name}, got {str(name)[:40]!r}")
        if not isinstance(arguments, dict):
            raise ActionError("the call has no object of arguments")
        return arguments, start

    def _json(self, inner: str) -> tuple[Any, Any]:
        try:
            call = json.loads(inner, object_pairs_hook=object_once)
        except (ValueError, RecursionError) as error:
            raise ActionError(f"the call is not one object of JSON: {str(error)[:120]}") from None
        if not isinstance(call, dict):
            raise ActionError("the call is not one object of JSON")
        return call.get("name"), call.get("arguments")

    def _xml(self, inner: str) -> tuple[str, dict[str, Any]]:
        inner = inner.strip()
        function = _FUNCTION.match(inner)
        if function is None or not inner.endswith(_END_FUNCTION):
            raise ActionError("the call is not one <function=NAME>...</function>")
        arguments: dict[str, Any] = {}
        position, body = 0, inner[function.end() : -len(_END_FUNCTION)].strip()
        while position < len(body):
            parameter = _PARAMETER.match(body, position)
            if parameter is None:
                rest = body[position : position + 24]
                raise ActionError(f"{rest!r} is no <parameter=NAME>...</parameter>")
            name, text = parameter.groups()
            if name in arguments:
                raise ActionError(f"the parameter {name!r} is given twice")
            arguments[name] = _value(name, text)
            position = parameter.end()
        return function[1], arguments

    def _write_call(self, arguments: Mapping[str, Any]) -> str:
        """Return the text of a call between its tags."""
        if self._syntax == "json":
            call = {"name": self._tool.name, "arguments": arguments}
            separators = (",", ":") if self._thinks else None
            text = json.dumps(call, ensure_ascii=False, separators=separators)
            return _TAG.sub(r"\\u003c", text)
        lines = [f"<function={self._tool.name}>"]
        for name, value in arguments.items():
            text = value if isinstance(value, str) else json.dumps(value)
            if "</parameter>" in text:
                raise ActionError(f"XML calls cannot express it: {self.limits['type']}")
            lines.append(f"<parameter={name}>\n{text}\n</parameter>")
        return "\n".join([*lines, "</function>"])


def _calls_begin(text: str) -> list[int]:
    """Return the places where the call may begin. Raises ActionError if there is no opening tag.

    An opening tag in the words before the call is followed by another one, without a closing tag between the
    two.
    """
    starts = []
    for reply in reply_starts(text):
        first, last = text.find(_OPEN, reply), text.rfind(_OPEN)
        starts += [first] if first >= 0 else []
        starts += [last] if 0 <= first < last and _CLOSE not in text[first:last] else []
    if not starts:
        raise ActionError(f"want one call in {_OPEN}...{_CLOSE} at the end of the completion")
    return list(dict.fromkeys(starts))


def _value(name: str, text: str) -> Any:
    """Return the value of a parameter, which is JSON unless it is a text."""
    if name in ("text", "action", "status", "button"):
        return text.removeprefix("\n").removesuffix("\n") if name == "text" else text.strip()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text.strip()
    is_key = name == "keys" and not isinstance(value, list | str)  # such as 7
    return text.strip() if is_key else value


ACTION_PARSERS: Mapping[str, Callable[[], ToolcallParser]] = {
    "toolcall": ToolcallParser,
    "toolcall-mobile": lambda: ToolcallParser(MOBILE_USE),
    "toolcall-mai": lambda: ToolcallParser(MAI_MOBILE),
    "toolcall-fara": lambda: ToolcallParser(FARA_BROWSER),
    "toolcall-xml": lambda: ToolcallParser(syntax="xml"),
}
"""The factories of this module's action parsers, by the names in the module's docstring."""
