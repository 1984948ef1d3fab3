"""The actions of a task's solution, on elements of the page.

Solution   follows the entries of a solution, from the present page to the next action
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib.resources import files
from typing import Any

from bus.errors import EnvError, NoOracleError
from envs.contract.actions import (
    Action,
    Answer,
    Click,
    Done,
    DoubleClick,
    Drag,
    Fail,
    Goto,
    KeyPress,
    Move,
    Scroll,
    TripleClick,
    Type,
    Wait,
    action_from_dict,
)
from envs.suites.web.checking import Instance
from envs.suites.web.schema import Move as Entry
from envs.tools.browser.inputs import NOTCH

MOST_SCROLLS = 20  # for one entry of a solution
Point = tuple[int, int]


class Solution:
    """The solution of one episode. After an action that is not the solution's it knows no way on."""

    def __init__(self, instance: Instance, evaluate: Callable[[str], Any], scale: float) -> None:
        """Follow the task of `instance`; `evaluate` returns the value of an expression in the page."""
        self._instance = instance
        self._evaluate = evaluate
        self._scale = scale
        self._entries = instance.task.solution
        self._at = 0  # the entry that comes next
        self._opened = False  # whether the list of the entry `choose` is open
        self._scrolls = 0
        self._next: Action | None = None  # what was returned last
        self._left = False  # whether another action was played

    def action(self) -> Action:
        """Return the next action.

        Raises NoOracleError if the task has no solution, EnvError if it leads no further from here.
        """
        task = self._instance.task
        if not task.feasible:
            return Fail()
        if not self._entries:
            raise NoOracleError(f"{task.id} has no solution")
        if self._left:
            raise EnvError(f"{task.id}: its solution does not apply after other actions")
        if self._at >= len(self._entries):
            self._next = Done()
        else:
            self._next = self._action_of(self._entries[self._at])
        return self._next

    def follow(self, action: Action) -> None:
        """Note that an action was played."""
        if action != self._next:
            self._left = True
            return
        self._next = None
        if isinstance(action, Scroll):  # on the way to an element
            self._scrolls += 1
            return
        entry = self._entries[self._at] if self._at < len(self._entries) else None
        if entry is not None and entry.kind == "choose" and not self._opened:
            self._opened = True
            return
        self._at, self._opened, self._scrolls = self._at + 1, False, 0

    def _action_of(self, entry: Entry) -> Action:
        fill, kind = self._instance.text, entry.kind
        match kind:
            case "type":
                return Type(text=fill(entry.type or ""))
            case "keys":
                keys = entry.keys if isinstance(entry.keys, list) else _split(entry.keys or "")
                return KeyPress(keys=[fill(key) for key in keys])
            case "goto":
                return Goto(url=self._instance.address(entry.goto or ""))
            case "answer":
                return Answer(text=fill(entry.answer or ""))
            case "wait":
                return Wait(seconds=entry.wait or 0.0)
            case "action":
                return action_from_dict(entry.action or {})
            case "choose" if self._opened:
                selector, text = _options(self._selector(entry.choose or "")), entry.text
            case _:
                selector = self._selector(entry.selector)
                text = None if kind == "choose" else entry.text
        place = self._place(entry, selector, None if text is None else fill(text))
        if isinstance(place, Scroll):
            return place
        x, y = place
        if kind == "drag":
            end = self._place(entry, self._selector(entry.to or ""), None)
            if isinstance(end, Scroll):
                raise EnvError(
                    f"{self._where(entry)}: {entry.to} is out of sight, so nothing is dragged there"
                )
            return Drag(path=[(x, y), end])
        if kind == "right_click":
            return Click(x=x, y=y, button="right")
        return _POINTING[kind](x=x, y=y)

    def _place(self, entry: Entry, selector: str, text: str | None) -> Point | Scroll:
        """Return the pixel of an element, or the scroll that brings it into sight."""
        nth = 0 if selector != self._selector(entry.selector) else entry.nth
        arguments = ", ".join(map(json.dumps, (selector, text, nth)))
        try:
            answer = self._evaluate(f"({_script()})({arguments})")
        except EnvError as error:
            raise EnvError(f"{self._where(entry)}: {error}") from error
        if not isinstance(answer, dict):
            raise EnvError(f"{self._where(entry)}: the page answers {answer!r}")
        if "x" not in answer:
            what = f" with the text {text!r}" if text is not None else ""
            raise EnvError(
                f"{self._where(entry)}: no element {selector}{what} can be seen "
                f"({answer['matches']} match, {answer['named']} with that text, {answer['shown']} shown)"
            )
        x, y = round(answer["x"] * self._scale), round(answer["y"] * self._scale)
        if "scroll" not in answer:
            return x, y
        if self._scrolls >= MOST_SCROLLS:
            raise EnvError(
                f"{self._where(entry)}: {selector} does not come into sight by scrolling"
            )
        dx, dy = (_notches(distance) for distance in answer["scroll"])
        return Scroll(x=x, y=y, dx=dx, dy=dy)

    def _selector(self, template: str) -> str:
        """Return a selector with its names in braces filled in; quotes in a value are escaped."""
        return self._instance.escaped(template, lambda text: re.sub(r"([\\\"'])", r"\\\1", text))

    def _where(self, entry: Entry) -> str:
        return f"{self._instance.task.id}: solution[{self._entries.index(entry)}]"


_POINTING: Mapping[str, Callable[..., Action]] = {
    "click": Click,
    "choose": Click,
    "double_click": DoubleClick,
    "triple_click": TripleClick,
    "hover": Move,
}


def _options(selector: str) -> str:
    """Return the selector of the options of a drop-down list."""
    return ", ".join(f"{part.strip()} option" for part in selector.split(","))


def _split(keys: str) -> list[str]:
    """Return the keys of a text such as `ctrl+a` or `+`."""
    return [keys] if len(keys) == 1 else [key.strip() or "+" for key in keys.split("+")]


def _notches(distance: float) -> int:
    """Return the notches of the wheel that scroll so far, CSS pixels."""
    if not distance:
        return 0
    return math.ceil(distance / NOTCH) if distance > 0 else math.floor(distance / NOTCH)


@lru_cache(maxsize=1)
def _script() -> str:
    return files("envs.suites.web").joinpath("locate.js").read_text(encoding="utf-8")
