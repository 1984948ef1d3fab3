r"""Calls of pyautogui as code: any text, then the code of one action at the end of the completion.

    ## Action:
    Click the search field.

    ## Code:
    ```python
    pyautogui.click(x=640, y=52)
    ```

    action parser   place of the code         calls                                  families
    pyautogui       the last ``` block        pyautogui.*, computer.*, time.sleep    OpenCUA, EvoCUA in style S1
    scalecua        <action> ... </action>    click(...), write(...), response(...)  ScaleCUA

Calls:
    click(x, y, clicks, button)  doubleClick  tripleClick  rightClick  middleClick  moveTo
    dragTo(x, y, button)  mouseDown  mouseUp
    scroll(clicks, x, y)  hscroll    positive is up, or right; without x and y they act where the pointer is
    write(message)  press(key)  hotkey(key, ...)  keyDown(key)  keyUp(key)
    computer.triple_click(x, y)  computer.wait(), of 20 seconds  time.sleep(seconds)
    computer.terminate(status='success' | 'failure', answer='...')
ScaleCUA has no mouseDown, mouseUp and hscroll. In place of computer.* it has wait(seconds), response(answer),
terminate(status) and call_user().

Several lines are read as one action in these cases: moveTo before a call without a place, mouseDown, moveTo
and mouseUp, keyDown and keyUp around a click, a drag or a press, and Enter after a text. A sleep after an
action is dropped. Keys that are pressed one after the other, and `presses` above 1, are several actions and
therefore an error.

Several actions (`policy.max_actions`) have an empty line between them. Lines without one that are no single
action, as above, are an action each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bus.errors import ActionError
from dart_cli.language.coordinates import AS_IT_IS, CoordinateMap
from dart_cli.language.parsers.base import Part, WrittenPoint, whole
from dart_cli.language.parsers.pyautogui_calls import (
    IGNORED,
    LONG_WAIT_S,
    MOST_NOTCHES,
    SIGNATURES,
    Dialect,
    read_calls,
)
from dart_cli.language.parsers.reading import (
    Span,
    calls_of,
    does_nothing,
    first_read,
    not_expressed,
    places_of,
    quote,
    refuse_long,
    statements_of,
    write_keys,
)
from dart_cli.language.thoughts import reply_of, reply_starts
from envs.contract import actions as act
from envs.contract.actions import Action, MouseButton

_CLICK_OF: Mapping[MouseButton, str] = {
    "left": "click",
    "right": "rightClick",
    "middle": "middleClick",
}

_FENCE = "```"
_FENCED_LINE = re.compile(r"^[ \t]*```", re.MULTILINE)
_BEGIN, _END = "<action>", "</action>"
_LANGUAGE = re.compile(r"(?:python|code|py)?[ \t]*\r?\n?", re.IGNORECASE)
_BARE = re.compile(r"^[ \t]*(?=(?:pyautogui|computer)\.)", re.MULTILINE)
_STEP = re.compile(r"^# ?Step ?:? ?(\d{1,6})", re.MULTILINE)
_SECTION = re.compile(
    r"^#{1,2} *Action *:?[ \t]*\r?\n(.*?)(?=^#|^```|\Z)", re.MULTILINE | re.DOTALL
)
_OPERATION = re.compile(r"<operation>(.*?)</operation>", re.DOTALL)
_TAG = re.compile(r"<(?=/?(?:action|operation|think)\b)")


class PyautoguiParser:
    """The PointParser of calls of pyautogui, in one of two dialects; the module's docstring has its calls."""

    def __init__(self, dialect: Dialect = "pyautogui") -> None:
        self._dialect: Dialect = dialect
        self._prefix = "pyautogui." if dialect == "pyautogui" else ""
        no_address = "it has no call that opens an address"
        self.limits: Mapping[str, str] = {
            "scroll": "it turns the wheel in one direction",
            "goto": no_address,
        }
        if dialect == "scalecua":
            self.limits = {
                "scroll": "it turns the wheel up or down",
                "goto": no_address,
                "drag": "it has two points",
                **dict.fromkeys(
                    ("mouse_down", "mouse_up"), "it has no such action; dragTo has both"
                ),
            }

    def parse(self, text: str, coordinates: CoordinateMap) -> Action:
        """Return the action of one completion; see ActionParser."""
        return self._read(text, coordinates)[0]

    def format(self, action: Action, coordinates: CoordinateMap, thought: str = "") -> str:
        """Return the completion of one action.

        See ActionParser. In `thought`, fences and tags of code are changed.
        """
        lines = self._lines(action, coordinates)
        if lines is None:
            raise not_expressed(self._dialect, action, self.limits)
        code = "\n".join(lines)
        if self._dialect == "scalecua":
            thought = _TAG.sub("", thought)
            operation = f"<operation>\n{thought}\n</operation>\n" if thought else ""
            return f"{operation}<action>\n{code}\n</action>"
        thought = thought.replace(_FENCE, "'''")
        action_line = f"## Action:\n{thought}\n\n## Code:\n" if thought else ""
        language = "code" if code.startswith("computer.") else "python"
        return f"{action_line}{_FENCE}{language}\n{code}\n{_FENCE}"

    def as_history(self, text: str) -> str:
        """Return the number of the step and the action in words, without thought and code.

        ScaleCUA's completions, and those without a section on the action, are returned unchanged.
        """
        section = None if self._dialect == "scalecua" else _words(_SECTION, text)
        if section is None:
            return text
        step = _STEP.search(section.string, 0, section.start())
        heading = f"# Step {step[1]}:\n" if step else ""
        return f"{heading}## Action:\n{section[1].strip()}\n"

    def summary(self, text: str) -> str:
        """Return the action in words; see `summary_of` in base.py."""
        words = _words(_OPERATION if self._dialect == "scalecua" else _SECTION, text)
        return words[1].strip() if words else ""

    def split(self, text: str) -> list[Part]:
        """Return the lines of code of each action; see SplitParser."""
        refuse_long(text)
        start, end = self._spans(text)[0]
        code = text[start:end]
        blocks = _blocks(code.strip(), start + len(code) - len(code.lstrip()))
        if len(blocks) == 1 and self._reads(text):
            return whole(text)
        parts = []
        for block in blocks:
            part = self._part(text, (block[0][0], block[-1][1]))
            parts += (
                [part] if self._reads(part.text) else [self._part(text, line) for line in block]
            )
        return parts or whole(text)

    def join(self, texts: Sequence[str]) -> str:
        """Return the first text with the code of all, and an empty line between two; see SplitParser."""
        spans = [self._spans(text)[0] for text in texts]
        codes = [text[start:end].strip() for text, (start, end) in zip(texts, spans, strict=True)]
        (start, end), code = spans[0], "\n\n".join(codes)
        return texts[0][:start] + texts[0][start:end].replace(codes[0], code, 1) + texts[0][end:]

    def _part(self, text: str, span: Span) -> Part:
        """Return characters [start, end) of a text as a completion."""
        begin, end = (f"{_FENCE}python\n", f"\n{_FENCE}") if self._prefix else (_BEGIN, _END)
        return Part(f"{begin}{text[span[0] : span[1]]}{end}", *span, len(begin))

    def _reads(self, text: str) -> bool:
        """Return True if a text is one action."""
        try:
            self.parse(text, AS_IT_IS)
        except ActionError:
            return False
        return True

    def _spans(self, text: str) -> list[Span]:
        """Return the parts of a text that may be its code, the likeliest first. Raises ActionError."""
        return _tagged(text) if self._dialect == "scalecua" else _fenced(text)

    def write_point(self, x: int, y: int) -> str:
        """Return x and y as named arguments; see PointParser."""
        return f"x={x}, y={y}"

    def find_points(self, text: str) -> list[WrittenPoint]:
        """Return the points where the calls of the action have x and y; see PointParser."""
        try:
            return self._read(text, AS_IT_IS)[1]
        except ActionError:
            return []

    def _read(self, text: str, coordinates: CoordinateMap) -> tuple[Action, list[WrittenPoint]]:
        """Return the action of a completion, and its points. Raises ActionError."""
        refuse_long(text)
        return first_read(self._spans(text), lambda span: self._action(text, span, coordinates))

    def _action(
        self, text: str, span: Span, coordinates: CoordinateMap
    ) -> tuple[Action, list[WrittenPoint]]:
        """Return the action of the code in `span` of the text, and its points. Raises ActionError."""
        code = text[span[0] : span[1]]
        calls = calls_of(code.strip(), SIGNATURES[self._dialect], IGNORED)
        return read_calls(calls, coordinates, span[0] + len(code) - len(code.lstrip()))

    def _lines(self, action: Action, coordinates: CoordinateMap) -> list[str] | None:
        """Return the lines of code for an action; None if the language has no call for it."""
        tags = (_FENCE,) if self._prefix else (_BEGIN, _END)
        call = _Writer(self._prefix, coordinates, (*tags, "</think"))
        modifiers = getattr(action, "modifiers", ())
        lines = self._unheld(action, call)
        if lines is None:
            return None
        keys = write_keys(modifiers) if modifiers else []
        down = [call.of("keyDown", quote(key, ())) for key in keys]
        up = [call.of("keyUp", quote(key, ())) for key in reversed(modifiers)]
        return [*down, *lines, *up]

    def _unheld(self, action: Action, call: _Writer) -> list[str] | None:
        """Return the lines of code for an action without the keys that are held during it."""
        scales = self._dialect == "scalecua"
        match action:
            case act.Click(button="middle") if scales:
                return [call.at("click", action, "button='middle'")]
            case act.Click():
                return [call.at(_CLICK_OF[action.button], action)]
            case act.DoubleClick():
                return [call.at("doubleClick", action)]
            case act.TripleClick():
                return [
                    call.at("click", action, "clicks=3")
                    if scales
                    else call.at("tripleClick", action)
                ]
            case act.Move():
                return [call.at("moveTo", action)]
            case act.Drag(path=[first, last]):
                button = f"button='{action.button}'"
                return [call.to("moveTo", first), call.to("dragTo", last, button)]
            case act.Drag() if not scales:
                first, *path = action.path
                button = f"button='{action.button}'"
                moves = [call.to("moveTo", point) for point in path]
                return [call.to("mouseDown", first, button), *moves, call.of("mouseUp", button)]
            case act.MouseDown() | act.MouseUp() if not scales:
                name = "mouseDown" if isinstance(action, act.MouseDown) else "mouseUp"
                button = f"button='{action.button}'"
                return [
                    call.of(name, button) if action.x is None else call.at(name, action, button)
                ]
            case act.Scroll(dx=0, dy=dy) if abs(dy) <= MOST_NOTCHES:
                return [call.at("scroll", action, first=str(-dy))]
            case act.Scroll(dx=dx, dy=0) if abs(dx) <= MOST_NOTCHES and not scales:
                return [call.at("hscroll", action, first=str(dx))]
            case act.Type():
                return [call.of("write", f"message={call.text(action.text)}")]
            case act.KeyPress(keys=[key]):
                return [call.of("press", quote(write_keys([key])[0], ()))]
            case act.KeyPress():
                return [call.of("hotkey", *(quote(key, ()) for key in write_keys(action.keys)))]
            case act.KeyDown() | act.KeyUp():
                name = "keyDown" if isinstance(action, act.KeyDown) else "keyUp"
                return [call.of(name, quote(write_keys([action.key])[0], ()))]
        return self._ending(action, call)

    def _ending(self, action: Action, call: _Writer) -> list[str] | None:
        """Return the lines of code for a wait, an answer or an end of the episode; None for other actions."""
        scales = self._dialect == "scalecua"
        terminate = "terminate" if scales else "computer.terminate"
        match action:
            case act.Wait(seconds=seconds) if not scales and seconds == LONG_WAIT_S:
                return ["computer.wait()"]
            case act.Wait(seconds=seconds):
                return [f"wait(seconds={seconds!r})" if scales else f"time.sleep({seconds!r})"]
            case act.Answer() if scales:
                return [f"response(answer={call.text(action.text)})"]
            case act.Answer():
                return [f"computer.terminate(status='success', answer={call.text(action.text)})"]
            case act.Done():
                return [f"{terminate}(status='success')"]
            case act.Fail():
                return [f"{terminate}(status='failure')"]
        return None


@dataclass(frozen=True)
class _Writer:
    """Writes calls as code."""

    prefix: str
    coordinates: CoordinateMap
    unwritten: Sequence[str]  # texts that would begin or end the code, or end a thought

    def of(self, name: str, *arguments: str) -> str:
        """Return a call with these arguments."""
        return f"{self.prefix}{name}({', '.join(arguments)})"

    def to(self, name: str, point: tuple[int, int], *others: str, first: str = "") -> str:
        """Return a call at a pixel."""
        x, y = map(self._number, self.coordinates.to_model(*point))
        return self.of(name, *([first] if first else []), f"x={x}", f"y={y}", *others)

    def at(self, name: str, action: Any, *others: str, first: str = "") -> str:
        """Return a call at the pixel of an action."""
        return self.to(name, (action.x, action.y), *others, first=first)

    def text(self, text: str) -> str:
        """Return a text as a literal."""
        return quote(text, self.unwritten)

    def _number(self, cell: int) -> str:
        decimals = self.coordinates.decimals
        return f"{cell / 10**decimals:.{decimals}f}" if decimals else str(cell)


def _blocks(code: str, start: int) -> list[list[Span]]:
    """Return the statements of code that begins at character `start` of a text, as their places in the text.

    An empty line ends a block of them. Statements that do nothing are left out, and code that is no Python has
    no statements.
    """
    try:
        nodes = [node for node in statements_of(code) if not does_nothing(node)]
    except ActionError:
        return []
    blocks: list[list[Span]] = []
    line_before = 0
    for node, (first, last) in zip(nodes, places_of(code, nodes), strict=True):
        if not blocks or node.lineno > line_before + 1:
            blocks.append([])
        blocks[-1].append((start + first, start + last))
        line_before = node.end_lineno or node.lineno
    return blocks


def _words(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """Return the match of `pattern` in a completion, after its thought, or None."""
    try:
        return pattern.search(reply_of(text))
    except ActionError:
        return None


def _tagged(text: str) -> list[Span]:
    """Return the parts of a text, between ScaleCUA's tags, that may be its code.

    Raises ActionError if none is.
    """
    end = text.rfind(_END)
    starts = [
        start
        for begin in reply_starts(text)
        for start in (text.find(_BEGIN, begin), text.rfind(_BEGIN, begin, end))
        if 0 <= start < end
    ]
    if not starts or text[end + len(_END) :].strip():
        raise ActionError("want <action>...</action> at the end of the completion")
    return [(start + len(_BEGIN), end) for start in dict.fromkeys(starts)]


def _fenced(text: str) -> list[Span]:
    """Return the parts of a text that may be its code: the last block in fences, else calls without fences.

    Raises ActionError if there are none.
    """
    begin, end = reply_starts(text)[-1], text.rfind(_FENCE)
    if end < begin:
        bare = _BARE.search(text[begin:])
        if bare is None:
            raise ActionError("want a block of code in ``` at the end of the completion")
        return [(begin + bare.end(), len(text))]
    starts = _fences(text, begin, end)
    if not starts or text[end + len(_FENCE) :].strip():
        raise ActionError("the completion does not end with a whole block of code in ```")
    languages = (_LANGUAGE.match(text, start, end) for start in starts)
    return [(language.end(), end) for language in languages if language]


def _fences(text: str, begin: int, end: int) -> list[int]:
    """Return where the block that ends at `end` may begin; a text that it types may contain a fence, too."""
    lines = [match.end() for match in _FENCED_LINE.finditer(text, 0, end)]
    in_reply = [line for line in lines if line > begin]
    inline = text.rfind(_FENCE, 0, end)
    return list(
        dict.fromkeys(
            [*lines[-1:], *in_reply[:1], *([inline + len(_FENCE)] if inline >= 0 else [])]
        )
    )


ACTION_PARSERS: Mapping[str, Callable[[], PyautoguiParser]] = {
    "pyautogui": PyautoguiParser,
    "scalecua": lambda: PyautoguiParser("scalecua"),
}
"""The factories of this module's action parsers, by the names in the module's docstring."""
