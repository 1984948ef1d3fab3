r"""Tool calls: whatever text, then one call in <tool_call> tags at the end of the completion.

    Action: Click the search field.
    <tool_call>
    {"name": "computer_use", "arguments": {"action": "left_click", "coordinate": [640, 52]}}
    </tool_call>

    action parser             tool (tools.py)         call      families
    toolcall          computer_use            JSON      Qwen2.5-VL, Qwen3-VL, GUI-Owl-1.5, EvoCUA
    toolcall-mobile   mobile_use              JSON      the same on a telephone
    toolcall-mai      mobile_use of MAI-UI    JSON      MAI-UI: its thought stands in <thinking> tags
    toolcall-xml      computer_use            XML       Qwen3.5

XML is that of Qwen's newer chat templates: <function=NAME>, then <parameter=NAME> with its value on lines of its
own. What a text types or answers may hold any tag in JSON; in XML it cannot hold </parameter>.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from bus.errors import ActionError
from dart_cli.language.coordinates import AS_IT_IS, CoordinateMap
from dart_cli.language.parsers.base import WrittenPoint
from dart_cli.language.parsers.reading import first_read, not_expressed, refuse_long, understood
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
_TAG = re.compile(r"<(?=/?(?:tool_call|function|parameter|think|thinking)\b)")
_FUNCTION = re.compile(r"<function=([\w.-]{1,64})>")
_END_FUNCTION = "</function>"
_PARAMETER = re.compile(r"<parameter=(\w{1,64})>(.*?)</parameter>\s*", re.DOTALL)
_NUMBER = r"-?\d{1,6}(?:\.\d{1,6})?"
_LIST = rf"(\[\s*{_NUMBER}\s*,\s*{_NUMBER}\s*(?:,\s*{_NUMBER}\s*,\s*{_NUMBER}\s*)?\])"
_ACTION_LINE = re.compile(r"^Action:(.+)$", re.MULTILINE)


class ToolcallParser:
    """See the module's docstring; implements `dart_cli.language.parsers.base.PointParser`."""

    def __init__(self, tool: Tool = COMPUTER_USE, syntax: Syntax = "json") -> None:
        self._tool = tool
        self._syntax = syntax
        self._thinks = tool is MAI_MOBILE
        self.limits: Mapping[str, str] = dict(tool.limits)
        if syntax == "xml":
            lacks = "a text cannot hold </parameter>"
            self.limits = {**self.limits, "type": lacks, "answer": lacks}
        elif tool is COMPUTER_USE:
            held = "keys are held by key_down before it and key_up after it"
            clicks = dict.fromkeys(("click", "double_click", "triple_click"), held)
            self.limits = {**self.limits, **clicks}

    def parse(self, text: str, coordinates: CoordinateMap) -> Action:
        """Return the action of one completion; see ActionParser."""
        arguments, _ = self._call(text)
        return self._read(arguments, coordinates)

    def format(self, action: Action, coordinates: CoordinateMap, thought: str = "") -> str:
        """Return the completion of one action; see ActionParser. A tag of calls in `thought` loses its <."""
        arguments = self._tool.write(action, coordinates)
        held = getattr(action, "modifiers", ())
        if arguments is None or (held and "click" in self.limits):
            raise not_expressed(self._tool.name, action, self.limits)
        call = f"{_OPEN}\n{self._written(arguments)}\n{_CLOSE}"
        thought = _TAG.sub("", thought)
        if self._thinks:
            return f"<thinking>\n{thought}\n</thinking>\n{call}"
        return f"Action: {thought}\n{call}" if thought else call

    def as_history(self, text: str) -> str:
        """Return the completion unchanged, its thought included, as the agents of these families show it."""
        return text

    def summary(self, text: str) -> str:
        """Return the line that names the action in words, where there is one; see `dart_cli.language.parsers.base.summary_of`."""
        try:
            if line := _ACTION_LINE.search(reply_of(text).rpartition(_OPEN)[0]):
                return line[1].strip()
            arguments, _ = self._call(text)
        except ActionError:
            return ""
        return f"Performing {str(arguments.get('action'))[:40]} action"

    def write_point(self, x: int, y: int) -> str:
        """Return a point in a list; see PointParser."""
        return f"[{x}, {y}]"

    def find_points(self, text: str) -> list[WrittenPoint]:
        """Return the coordinates of the call that the action has; see PointParser."""
        try:
            arguments, start = self._call(text)
            self._read(arguments, AS_IT_IS)
        except ActionError:
            return []
        found = []
        for key in self._tool.points.get(arguments["action"], ()):
            name = f'"{key}"\\s*:' if self._syntax == "json" else f"<parameter={key}>"
            each = re.compile(rf"{name}\s*{_LIST}").search(text, start)
            if each and json.loads(each[1]) == arguments.get(key):
                place = WrittenPoint(each.start(1), each.end(1), *point_of(arguments[key]))
                found.append(place)
        return found

    def _read(self, arguments: Mapping[str, Any], coordinates: CoordinateMap) -> Action:
        refuse_unknown(self._tool, arguments)
        with understood("the call"):
            return self._tool.read(arguments, coordinates)

    def _call(self, text: str) -> tuple[dict[str, Any], int]:
        """Return the arguments of the one call that ends the text, and where the call begins."""
        refuse_long(text)
        return first_read(_calls_begin(text), lambda start: self._call_at(text, start))

    def _call_at(self, text: str, start: int) -> tuple[dict[str, Any], int]:
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
            call = json.loads(inner, object_pairs_hook=_once)
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
            found = _PARAMETER.match(body, position)
            if found is None:
                rest = body[position : position + 24]
                raise ActionError(f"{rest!r} is no <parameter=NAME>...</parameter>")
            if found[1] in arguments:
                raise ActionError(f"the parameter {found[1]!r} is given twice")
            arguments[found[1]] = _value(found[1], found[2])
            position = found.end()
        return function[1], arguments

    def _written(self, arguments: Mapping[str, Any]) -> str:
        if self._syntax == "json":
            call = {"name": self._tool.name, "arguments": arguments}
            separators = (",", ":") if self._thinks else None
            written = json.dumps(call, ensure_ascii=False, separators=separators)
            return _TAG.sub(r"\\u003c", written)
        lines = [f"<function={self._tool.name}>"]
        for name, value in arguments.items():
            written = value if isinstance(value, str) else json.dumps(value)
            if "</parameter>" in written:
                raise ActionError(f"XML calls cannot express it: {self.limits['type']}")
            lines.append(f"<parameter={name}>\n{written}\n</parameter>")
        return "\n".join([*lines, "</function>"])


def _calls_begin(text: str) -> list[int]:
    """Return where the call may begin. Raises ActionError where no tag begins one.

    A tag in the words before the call is followed by another one, with no end of a call between the two.
    """
    starts = []
    for reply in reply_starts(text):
        first, last = text.find(_OPEN, reply), text.rfind(_OPEN)
        starts += [first] if first >= 0 else []
        starts += [last] if 0 <= first < last and _CLOSE not in text[first:last] else []
    if not starts:
        raise ActionError(f"want one call in {_OPEN}...{_CLOSE} at the end of the completion")
    return list(dict.fromkeys(starts))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is given twice")
    return found


def _value(name: str, written: str) -> Any:
    """Return a parameter's value: JSON for what is no text."""
    if name in ("text", "action", "status", "button"):
        return written.removeprefix("\n").removesuffix("\n") if name == "text" else written.strip()
    try:
        value = json.loads(written)
    except (ValueError, RecursionError):
        return written.strip()
    is_key = name == "keys" and not isinstance(value, list | str)  # such as 7
    return written.strip() if is_key else value


ACTION_PARSERS: Mapping[str, Callable[[], ToolcallParser]] = {
    "toolcall": ToolcallParser,
    "toolcall-mobile": lambda: ToolcallParser(MOBILE_USE),
    "toolcall-mai": lambda: ToolcallParser(MAI_MOBILE),
    "toolcall-xml": lambda: ToolcallParser(syntax="xml"),
}
"""By the names in the module's docstring."""
