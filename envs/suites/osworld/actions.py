"""Writes GUI actions as commands for a guest, without input or output.

    GuestWriter  writes the actions of one episode as argument lists for the guest's /execute
    RELEASE      the command that releases all buttons and keys

The model's text is sent as one JSON argument, never as code and never through a shell.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.resources import files
from typing import Any

from envs.contract.actions import Action, within
from envs.suites.osworld.guest import PYTHON
from envs.tools.inputs import Button, Event, InputMachine, Key, Moved, Text, Wheel

STRIDE = 5  # pixels between the moves of a drag
TEXT_CHUNK = 2000
"""Most characters of a text in one command: they take about 20 s, and the server gives up after 120 s."""

_NAMED_KEYS = frozenset(
    "enter tab escape backspace delete insert home left up right down pageup pagedown end space shift ctrl "
    "capslock alt meta menu printscreen pause numlock".split()
) | {f"f{n}" for n in range(1, 25)}
_SOURCE = files("envs.suites.osworld").joinpath("input_controller.py").read_text(encoding="utf-8")


class GuestWriter:
    """A writer of the actions of one episode, which are given to it in order."""

    def __init__(self) -> None:
        self._machine = InputMachine(
            STRIDE, lambda key: len(key) == 1 or key in _NAMED_KEYS, adds_shift=True
        )

    @property
    def holds(self) -> bool:
        """Whether a button or a key is down."""
        return bool(self._machine.buttons or self._machine.keys)

    def commands_of(self, action: Action, size: tuple[int, int]) -> list[list[str]]:
        """Return the commands for `action` on a screen of `size`; [] if it uses neither mouse nor keys."""
        events = self._machine.events_of(within(action, size))
        rows = [row for event in events for row in _rows_of(event)]
        if rows and rows[0][0] == "text":
            return [command_of([row]) for row in rows]
        return [command_of(rows)] if rows else []


def command_of(events: Iterable[list[Any]]) -> list[str]:
    """Return the command that performs events, each a name and plain values."""
    return [PYTHON, "-c", _SOURCE, json.dumps([*events], ensure_ascii=True)]


RELEASE = command_of([["release"]])


def _rows_of(event: Event) -> list[list[Any]]:
    """Return an event in the form that input_controller.py reads: a name and plain values."""
    match event:
        case Moved():
            return [["move", [[round(x), round(y)] for x, y in event.points()]]]
        case Button(name=name, down=down, at=at):
            return [["button", name, down, *at]]
        case Wheel(at=at, dx=dx, dy=dy):
            return [["wheel", *at, dx, dy]]
        case Key(name=name, down=down):
            return [["key", name, down]]
        case Text(text=text):
            starts = range(0, len(text), TEXT_CHUNK)
            return [["text", text[start : start + TEXT_CHUNK]] for start in starts]
