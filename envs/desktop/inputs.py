"""GUI actions as input events of the X server (XTEST): the mouse and a US keyboard.

    X11InputController       performs actions on one display
    Keyboard    which key writes a character or has a name; binds spare keys to other characters

An action that has no meaning here (an unknown key, a point off the screen) does nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from Xlib import XK

from envs.actions import Action, Click, DoubleClick, Drag, KeyPress, Move, Scroll, Type
from envs.desktop.x11 import Display

STRIDE = 12  # pixels between the moves of a drag
DOUBLE_CLICK_S = 0.5  # two presses of one place closer than this would be a double click
DOUBLE_CLICK_PX = 6
MOST_NOTCHES = 50

_BUTTONS = {"left": 1, "middle": 2, "right": 3}
_UP, _DOWN, _LEFT, _RIGHT = 4, 5, 6, 7
_UNICODE = 0x01000000  # keysyms of characters beyond Latin-1 (X11/keysymdef.h)

_NAMES = {
    "enter": "Return", "return": "Return", "tab": "Tab", "backspace": "BackSpace",
    "delete": "Delete", "del": "Delete", "insert": "Insert", "ins": "Insert", "escape": "Escape",
    "esc": "Escape", "space": "space", "left": "Left", "right": "Right", "up": "Up",
    "down": "Down", "arrowleft": "Left", "arrowright": "Right", "arrowup": "Up",
    "arrowdown": "Down", "home": "Home", "end": "End", "pageup": "Page_Up", "page_up": "Page_Up",
    "pagedown": "Page_Down", "page_down": "Page_Down", "shift": "Shift_L", "ctrl": "Control_L",
    "control": "Control_L", "alt": "Alt_L", "option": "Alt_L", "meta": "Super_L",
    "super": "Super_L", "win": "Super_L", "cmd": "Super_L", "command": "Super_L", "menu": "Menu",
    **{f"f{number}": f"F{number}" for number in range(1, 13)},
}  # fmt: skip


class Keyboard:
    """The keys of a display. Keys that write nothing are bound to characters that have no key."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._keys: dict[int, tuple[int, bool]] = {}  # keysym -> keycode, shifted
        self._spare: list[int] = []
        self._bound: list[tuple[int, int]] = []  # keycode, keysym; the oldest first
        for keycode, keysyms in sorted(display.keyboard().items()):
            for shifted, keysym in enumerate(keysyms[:2]):
                if keysym:
                    self._keys.setdefault(keysym, (keycode, bool(shifted)))
            if not any(keysyms):
                self._spare.append(keycode)
        self.shift = self._keys[XK.XK_Shift_L][0]

    def named(self, name: str) -> tuple[int, bool] | None:
        """Key code of a key by its name or its character, and whether it needs shift."""
        if len(name) == 1:
            return self.write(name)
        return self._keys.get(XK.string_to_keysym(_NAMES.get(name.lower(), "")))

    def write(self, character: str) -> tuple[int, bool] | None:
        """The key that writes a character; None if no key can."""
        keysym = _keysym(character)
        if keysym is None:
            return None
        if keysym not in self._keys:
            self._lend(keysym)
        return self._keys.get(keysym)

    def takes_back(self, character: str) -> bool:
        """Whether `write` would take the key of another character for this one."""
        keysym = _keysym(character)
        return keysym is not None and keysym not in self._keys and not self._spare

    def _lend(self, keysym: int) -> None:
        if self._spare:
            keycode = self._spare.pop()
        elif self._bound:
            keycode, before = self._bound.pop(0)
            del self._keys[before]
        else:
            return
        self._display.bind_key(keycode, keysym)
        self._bound.append((keycode, keysym))
        self._keys[keysym] = (keycode, False)


class X11InputController:
    """Mouse and keyboard of one display. `handled` waits until applications have handled their events."""

    def __init__(
        self, display: Display, width: int, height: int, handled: Callable[[], None]
    ) -> None:
        self._display = display
        self._width, self._height = width, height
        self._handled = handled
        self._keyboard = Keyboard(display)
        self._pressed = (-math.inf, 0, 0)  # the last press of the left button: when, where

    def perform(self, action: Action) -> None:
        """Perform `action` and wait for the server. Raises EnvError."""
        match action:
            case Click(x=x, y=y, button=button) if self._on_screen(x, y):
                self._press(x, y, _BUTTONS[button], 1)
            case DoubleClick(x=x, y=y) if self._on_screen(x, y):
                self._press(x, y, _BUTTONS["left"], 2)
            case Move(x=x, y=y) if self._on_screen(x, y):
                self._display.move(x, y)
            case Drag(path=path) if all(self._on_screen(x, y) for x, y in path):
                self._drag(path)
            case Scroll(x=x, y=y, dx=dx, dy=dy) if self._on_screen(x, y):
                self._scroll(x, y, dx, dy)
            case Type(text=text):
                self._type(text)
            case KeyPress(keys=keys):
                self._chord(keys)
            case _:
                pass
        self._display.sync()

    def _on_screen(self, x: int, y: int) -> bool:
        return 0 <= x < self._width and 0 <= y < self._height

    def _press(self, x: int, y: int, button: int, count: int) -> None:
        when, last_x, last_y = self._pressed
        if math.hypot(x - last_x, y - last_y) < DOUBLE_CLICK_PX:
            time.sleep(max(0.0, when + DOUBLE_CLICK_S - time.monotonic()))
        self._display.move(x, y)
        for _ in range(count):
            self._display.button(button, down=True)
            self._display.button(button, down=False)
        self._pressed = (time.monotonic(), x, y)

    def _drag(self, path: Sequence[tuple[int, int]]) -> None:
        # Applications decide at the first moves whether this is a drag, and ask each widget that it
        # passes whether it accepts a drop; both while events wait.
        self._display.move(*path[0])
        self._display.button(1, down=True)
        self._handled()
        for x, y in _way(path):
            self._display.move(x, y)
            self._handled()
        self._display.move(*path[-1])
        self._handled()
        self._display.button(1, down=False)
        self._pressed = (time.monotonic(), *path[-1])

    def _scroll(self, x: int, y: int, dx: int, dy: int) -> None:
        self._display.move(x, y)
        for button, notches in (
            (_DOWN if dy > 0 else _UP, abs(dy)),
            (_RIGHT if dx > 0 else _LEFT, abs(dx)),
        ):
            for _ in range(min(notches, MOST_NOTCHES)):
                self._display.button(button, down=True)
                self._display.button(button, down=False)

    def _type(self, text: str) -> None:
        for character in text:
            if self._keyboard.takes_back(character):
                self._handled()  # earlier keystrokes are read with the earlier keyboard map
            key = self._keyboard.write(character)
            if key is not None:
                self._strike(*key)

    def _strike(self, keycode: int, shifted: bool) -> None:
        if shifted:
            self._display.key(self._keyboard.shift, down=True)
        self._display.key(keycode, down=True)
        self._display.key(keycode, down=False)
        if shifted:
            self._display.key(self._keyboard.shift, down=False)

    def _chord(self, keys: Sequence[str]) -> None:
        """All down in order, all up in reverse; a chord with an unknown key does nothing."""
        found = [self._keyboard.named(key) for key in keys]
        known = [key for key in found if key is not None]
        if len(known) < len(found):
            return
        codes = [keycode for keycode, _ in known]
        if any(shifted for _, shifted in known) and self._keyboard.shift not in codes:
            codes.insert(0, self._keyboard.shift)
        for keycode in codes:
            self._display.key(keycode, down=True)
        for keycode in reversed(codes):
            self._display.key(keycode, down=False)


def _keysym(character: str) -> int | None:
    """X11's number of a character."""
    if character in "\n\r":
        return int(XK.XK_Return)
    if character == "\t":
        return int(XK.XK_Tab)
    number = ord(character)
    if 0x20 <= number <= 0x7E or 0xA0 <= number <= 0xFF:
        return number
    return _UNICODE + number if number > 0xFF else None


def _way(path: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Points from the second on, none further than STRIDE from the one before."""
    for (x0, y0), (x1, y1) in pairwise(path):
        count = max(2, math.ceil(math.hypot(x1 - x0, y1 - y0) / STRIDE))
        for n in range(1, count + 1):
            yield round(x0 + (x1 - x0) * n / count), round(y0 + (y1 - y0) * n / count)
