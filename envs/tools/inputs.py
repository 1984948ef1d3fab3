"""Mouse and keyboard as events: one state machine, and one table of key names, for every suite.

    canonical      the canonical name of a key, from any of its names
    is_shifted     returns whether a US keyboard writes a character with shift
    InputMachine   converts actions into events; keeps what is down, and the pointer's place
    Moved, Button, Wheel, Key, Text   the events, which a suite performs

Button and Wheel events have their place, since the pointer may have been elsewhere before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from envs.contract.actions import (
    Action,
    Click,
    DoubleClick,
    Drag,
    KeyDown,
    KeyPress,
    KeyUp,
    MouseButton,
    MouseDown,
    MouseUp,
    Move,
    Scroll,
    TripleClick,
    Type,
)

MOST_NOTCHES = 50  # of the wheel in one action
MOST_POINTS = 100  # of a drag
MOST_STRIDES = 64  # from one point of a drag to the next

SAME_KEY = {
    "control": "ctrl", "ctrlleft": "ctrl", "ctrlright": "ctrl", "shiftleft": "shift",
    "shiftright": "shift", "altleft": "alt", "altright": "alt", "option": "alt", "cmd": "meta",
    "command": "meta", "super": "meta", "win": "meta", "winleft": "meta", "winright": "meta",
    "return": "enter", "esc": "escape", "del": "delete", "ins": "insert", "pgup": "pageup",
    "page_up": "pageup", "pgdn": "pagedown", "page_down": "pagedown", "arrowup": "up",
    "arrowdown": "down", "arrowleft": "left", "arrowright": "right", "arrow_up": "up",
    "arrow_down": "down", "arrow_left": "left", "arrow_right": "right", "caps_lock": "capslock",
    "num_lock": "numlock", "scroll_lock": "scrolllock", "print_screen": "printscreen", "plus": "+",
}  # fmt: skip
"""Other name of a key -> its name here (envs.contract.actions.KeyPress)."""

PLAIN, SHIFTED = "`1234567890-=[]\\;',./", '~!@#$%^&*()_+{}|:"<>?'
"""Characters that the keys of a US keyboard write beside letters, without and with shift."""

Point = tuple[int, int]
"""Pixels of the screenshot."""


def canonical(key: str) -> str:
    """Return the canonical name of a key; a single character is its own name."""
    return SAME_KEY.get(key.lower(), key.lower()) if len(key) > 1 else key


def is_shifted(key: str) -> bool:
    """Return True if a US keyboard writes this character with shift."""
    return len(key) == 1 and (key in SHIFTED or "A" <= key <= "Z")


@dataclass(frozen=True)
class Moved:
    """The pointer moves.

    While a button is down it moves in several strides, since pages and windows track the path.
    """

    begin: Point
    end: Point
    strides: int = 1

    def points(self) -> list[tuple[float, float]]:
        """Return the points on the way; the last one is `end`."""
        (x0, y0), (x1, y1), count = self.begin, self.end, self.strides
        parts = [n / count for n in range(1, count + 1)]
        return [(x0 + (x1 - x0) * part, y0 + (y1 - y0) * part) for part in parts]


@dataclass(frozen=True)
class Button:
    """A mouse button goes down or up at a place."""

    name: MouseButton
    down: bool
    at: Point
    count: int = 1  # this is so many clicks in quick succession


@dataclass(frozen=True)
class Wheel:
    """The wheel turns at a place: notches right and down, negative for left and up."""

    at: Point
    dx: int
    dy: int


@dataclass(frozen=True)
class Key:
    """A key goes down or up, by its canonical name."""

    name: str
    down: bool


@dataclass(frozen=True)
class Text:
    """A text is typed; its lines end with one newline character each."""

    text: str


Event = Moved | Button | Wheel | Key | Text


@dataclass
class InputMachine:
    """The mouse and keyboard of one screen, over the actions of one episode."""

    stride: float  # most pixels between the moves of a drag
    has_key: Callable[[str], bool]  # returns True if the keyboard has a key, by its canonical name
    adds_shift: bool = False  # press shift too for a character that needs it
    most_notches: int = MOST_NOTCHES
    pointer: Point = (0, 0)
    buttons: list[MouseButton] = field(default_factory=list)  # the buttons that are down
    keys: list[str] = field(default_factory=list)
    """The keys that are down, in the order of their presses."""

    def events_of(self, action: Action) -> Iterator[Event]:
        """Return the events that perform `action`; none if it uses neither mouse nor keyboard."""
        match action:
            case Click(button=button, modifiers=held):
                return self._holding(held, self._click((action.x, action.y), button, 1))
            case DoubleClick(modifiers=held):
                return self._holding(held, self._click((action.x, action.y), "left", 2))
            case TripleClick(modifiers=held):
                return self._holding(held, self._click((action.x, action.y), "left", 3))
            case Drag(path=path, button=button, modifiers=held):
                return self._holding(held, self._drag(_thinned(path), button))
            case Move(x=x, y=y):
                return self._move((x, y))
            case MouseDown(button=button):
                return self._press(self._at(action), button)
            case MouseUp(button=button):
                return self._release(self._at(action), button)
            case Scroll(x=x, y=y, dx=dx, dy=dy):
                return self._scroll((x, y), dx, dy)
            case Type(text=text):
                return iter([Text(text.replace("\r\n", "\n").replace("\r", "\n"))])
            case KeyPress(keys=keys):
                return self._holding(keys)
            case KeyDown(key=key):
                return self._keys_down([key])
            case KeyUp(key=key):
                return self._keys_up(self._chord([key]))
            case _:
                return iter(())

    def release(self, at: Point | None = None) -> Iterator[Event]:
        """Yield events that release every button and key, the buttons `at` a place or at the pointer."""
        self.pointer = at or self.pointer
        for button in [*self.buttons]:
            yield from self._release(self.pointer, button)
        yield from self._keys_up([*self.keys])

    # --- mouse ---

    def _at(self, action: MouseDown | MouseUp) -> Point:
        """Return the place of an action, or the pointer's if it has none."""
        return self.pointer if action.x is None or action.y is None else (action.x, action.y)

    def _move(self, to: Point) -> Iterator[Event]:
        begin, self.pointer = self.pointer, to
        strides = min(MOST_STRIDES, max(2, math.ceil(math.dist(begin, to) / self.stride)))
        yield Moved(begin, to, strides if self.buttons else 1)

    def _press(self, at: Point, button: MouseButton, count: int = 1) -> Iterator[Event]:
        """Yield events that press a button; one that is down already is only moved."""
        if self.buttons and at != self.pointer:
            yield from self._move(at)
        self.pointer = at
        if button not in self.buttons:
            self.buttons.append(button)
            yield Button(button, True, at, count)

    def _release(self, at: Point, button: MouseButton, count: int = 1) -> Iterator[Event]:
        """Yield events that release a button, if it is down."""
        if at != self.pointer:
            yield from self._move(at)
        if button in self.buttons:
            self.buttons.remove(button)
            yield Button(button, False, at, count)

    def _click(self, at: Point, button: MouseButton, times: int) -> Iterator[Event]:
        for count in range(1, times + 1):
            yield from self._press(at, button, count)
            yield from self._release(at, button, count)

    def _drag(self, path: Sequence[Point], button: MouseButton) -> Iterator[Event]:
        yield from self._press(path[0], button)
        for point in path[1:]:
            yield from self._move(point)
        yield from self._release(path[-1], button)

    def _scroll(self, at: Point, dx: int, dy: int) -> Iterator[Event]:
        if self.buttons and at != self.pointer:
            yield from self._move(at)
        self.pointer, most = at, self.most_notches
        yield Wheel(at, max(-most, min(most, dx)), max(-most, min(most, dy)))

    # --- keyboard ---

    def _chord(self, keys: Iterable[str]) -> list[str]:
        """Return canonical key names in the order of their presses; none if one of them is unknown."""
        names = [canonical(key) for key in keys]
        if not all(map(self.has_key, names)):
            return []
        if self.adds_shift and "shift" not in names and any(map(is_shifted, names)):
            names.insert(0, "shift")
        return names

    def _holding(self, keys: Sequence[str], events: Iterable[Event] = ()) -> Iterator[Event]:
        """Yield `events` with keys held around them; keys that were down before stay down."""
        fresh = [key for key in self._chord(keys) if key not in self.keys]
        yield from self._keys_down(fresh)
        yield from events
        yield from self._keys_up(fresh)

    def _keys_down(self, keys: Iterable[str]) -> Iterator[Event]:
        for key in self._chord(keys):
            if key not in self.keys:
                self.keys.append(key)
                yield Key(key, True)

    def _keys_up(self, keys: Sequence[str]) -> Iterator[Event]:
        for key in reversed(keys):
            if key in self.keys:
                self.keys.remove(key)
                yield Key(key, False)


def _thinned(path: Sequence[Point]) -> Sequence[Point]:
    """Return at most MOST_POINTS points of a path, with both its ends."""
    step = -(-len(path) // (MOST_POINTS - 1))
    return [*path[:-1:step], path[-1]]
