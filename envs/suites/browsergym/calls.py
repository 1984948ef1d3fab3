"""GUI actions as calls of program.py.

    CallWriter   converts the actions of one episode into calls
    MEANINGS     keys with a meaning for the browser itself, as calls

A call is a name and plain values. Points are in pixels of the screenshot.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from envs.contract.actions import Action, Answer, Done, Fail, Goto, KeyPress, Wait
from envs.tools.inputs import Button, Event, InputMachine, Key, Moved, Text, Wheel, canonical

Call = tuple[Any, ...]

NOTCH = 100  # CSS pixels that a notch of the wheel scrolls
STRIDE = 8  # pixels between the moves of a drag
MOST_NOTCHES = 1000

MEANINGS: Mapping[tuple[str, ...], Call] = {
    ("alt", "left"): ("back",),
    ("alt", "right"): ("forward",),
    ("f5",): ("reload",),
    ("ctrl", "r"): ("reload",),
    ("ctrl", "t"): ("new_tab",),
    ("ctrl", "w"): ("close_tab",),
    ("ctrl", "tab"): ("turn_tab", 1),
    ("ctrl", "pagedown"): ("turn_tab", 1),
    ("ctrl", "shift", "tab"): ("turn_tab", -1),
    ("ctrl", "pageup"): ("turn_tab", -1),
    **{("ctrl", str(number)): ("tab", number - 1) for number in range(1, 9)},
    ("ctrl", "9"): ("tab", -1),
}

_KEYS = {
    "ctrl": "Control", "alt": "Alt", "shift": "Shift", "meta": "Meta", "enter": "Enter",
    "tab": "Tab", "space": "Space", "backspace": "Backspace", "delete": "Delete",
    "insert": "Insert", "escape": "Escape", "up": "ArrowUp", "down": "ArrowDown",
    "left": "ArrowLeft", "right": "ArrowRight", "home": "Home", "end": "End", "pageup": "PageUp",
    "pagedown": "PageDown", **{f"f{number}": f"F{number}" for number in range(1, 13)},
}  # fmt: skip
"""Name of a key here -> its name in the browser."""


class CallWriter:
    """Converts the actions of one episode into calls, in their order."""

    def __init__(self) -> None:
        self._machine = InputMachine(
            STRIDE, lambda key: _browser_key(key) is not None, most_notches=MOST_NOTCHES
        )

    def calls_of(self, action: Action) -> list[Call]:
        """Return the calls that perform `action`; none if it does nothing here."""
        match action:
            case KeyPress(keys=keys) if call := MEANINGS.get(tuple(map(canonical, keys))):
                return [call]
            case Goto(url=url):
                return [("goto", url)]
            case Wait(seconds=seconds):
                return [("wait", seconds)]
            case Answer(text=text):
                return [("message", text)]
            case Done():
                return [("message", "")]
            case Fail():
                return [("infeasible", "")]
            case _:
                events = self._machine.events_of(action)
                return [call for event in events for call in _calls_of_event(event)]


def _calls_of_event(event: Event) -> Iterator[Call]:
    """Yield the calls that perform an event of the mouse or the keyboard."""
    match event:
        case Moved(end=end, strides=strides):
            yield ("move", *end, strides)
        case Button(name=name, down=down, at=at, count=count):
            if down and count == 1:
                yield ("move", *at, 1)
            yield ("button_down" if down else "button_up", name, count)
        case Wheel(at=at, dx=dx, dy=dy):
            yield ("move", *at, 1)
            yield ("wheel", NOTCH * dx, NOTCH * dy)
        case Key(name=name, down=down):
            yield ("key_down" if down else "key_up", _browser_key(name))
        case Text(text=text):
            for piece in re.findall(r"\n|\t|[^\n\t]+", text):
                key = {"\n": "Enter", "\t": "Tab"}.get(piece)
                yield from (("key_down", key), ("key_up", key)) if key else (("type", piece),)


def _browser_key(name: str) -> str | None:
    """Return the browser's name of a key; None if it has no such key."""
    if len(name) == 1:
        return name if name.isascii() and name.isprintable() and name != " " else None
    return _KEYS.get(name)
