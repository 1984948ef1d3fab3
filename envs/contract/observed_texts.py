"""The texts that an environment shows beside its screenshots.

KINDS         every kind of text, in the order of a prompt
Widget        one line of an accessibility tree
outline       the text `accessibility`, made of widgets
bounded       a text cut to a length, with a note that it was cut
prompt_text   all texts of one screen as one text

A position in a text is `@(x,y)` in pixels of the screenshot. A policy has its own numbers for places, so
`prompt_text` writes positions in those.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, get_args

from bus.errors import ActionError
from envs.contract.base import ObservedKind

KINDS: tuple[ObservedKind, ...] = get_args(ObservedKind)

MOST_CHARS = 200_000
"""Characters of one text that an environment returns, at most."""

_HEADINGS: Mapping[ObservedKind, str] = {
    "accessibility": "Accessibility tree (role, name, text, position):",
    "terminal": "Terminal:",
}
_POSITION = re.compile(r"@\(([0-9]{1,5}),([0-9]{1,5})\)")
_LONGEST_NAME = 200  # characters of one widget's name or text


class Widget(NamedTuple):
    """One widget on the screen, as its application reports it."""

    role: str
    name: str
    text: str
    box: tuple[int, int, int, int] | None  # left, top, width, height, in pixels of the screenshot


def outline(widgets: Iterable[Widget]) -> str:
    """Return a line for each widget with a name or a text: its role, name, text and the middle of its box."""
    return "\n".join(_line(widget) for widget in widgets if widget.name or widget.text)


def bounded(kind: ObservedKind, text: str, most: int) -> str:
    """Return a text cut to `most` characters, with a note that it is cut.

    The first characters of a tree are returned, and the last ones of a terminal.
    """
    if len(text) <= most:
        return text
    if kind == "terminal":
        return f"[cut to the last {most} characters]\n{text[-most:]}"
    return f"{text[:most]}\n[cut to the first {most} characters]"


def prompt_text(
    texts: Mapping[ObservedKind, str], most: int, to_model: Callable[[int, int], tuple[int, int]]
) -> str:
    """Return the texts that are not empty, each under its heading and at most `most` characters long.

    `to_model` converts a pixel into the policy's numbers, and raises ActionError for one beyond the screen;
    such a position stays as it is.
    """

    def position(match: re.Match[str]) -> str:
        try:
            x, y = to_model(int(match[1]), int(match[2]))
        except ActionError:
            return match[0]
        return f"@({x},{y})"

    own_texts = {kind: texts[kind].strip() for kind in KINDS if kind in texts}
    return "\n\n".join(
        f"{_HEADINGS[kind]}\n{bounded(kind, _POSITION.sub(position, text), most)}"
        for kind, text in own_texts.items()
        if text
    )


def _line(widget: Widget) -> str:
    words = [widget.role, *(_quoted(word) for word in (widget.name, widget.text) if word)]
    if widget.text == widget.name:
        words = words[:2]
    if widget.box is not None:
        left, top, width, height = widget.box
        words.append(f"@({max(0, left + width // 2)},{max(0, top + height // 2)})")
    return " ".join(words)


def _quoted(text: str) -> str:
    text = " ".join(text.split())
    return f'"{text if len(text) <= _LONGEST_NAME else text[: _LONGEST_NAME - 3] + "..."}"'
