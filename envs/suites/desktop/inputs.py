"""Performs GUI actions as input events of the X server (XTEST): a mouse and a US keyboard.

    X11InputController   performs actions on one display
    Keyboard             the keys of a display; binds spare keys to characters without a key

An action without a meaning on this display (an unknown key, a point off the screen) does nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

from Xlib import XK

from envs.contract.actions import Action, within
from envs.suites.desktop.x11 import Display
from envs.tools.inputs import Button, Event, InputMachine, Key, Moved, Text, Wheel

STRIDE = 12  # pixels between the moves of a drag
DOUBLE_CLICK_S = 0.5  # two presses at one place within this time would be a double click
DOUBLE_CLICK_PX = 6

_BUTTONS = {"left": 1, "middle": 2, "right": 3}
_UP, _DOWN, _LEFT, _RIGHT = 4, 5, 6, 7
_UNICODE = 0x01000000  # keysyms of characters beyond Latin-1 (X11/keysymdef.h)

_NAMES = {
    "enter": "Return", "tab": "Tab", "backspace": "BackSpace", "delete": "Delete",
    "insert": "Insert", "escape": "Escape", "space": "space", "left": "Left", "right": "Right",
    "up": "Up", "down": "Down", "home": "Home", "end": "End", "pageup": "Page_Up",
    "pagedown": "Page_Down", "shift": "Shift_L", "ctrl": "Control_L", "alt": "Alt_L",
    "meta": "Super_L", "menu": "Menu", **{f"f{number}": f"F{number}" for number in range(1, 13)},
}  # fmt: skip
"""dart's name of a key -> X11's name."""


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

    def key_of(self, name: str) -> tuple[int, bool] | None:
        """Return (key code, whether it needs shift) for a key's name or character; None if there is none."""
        if len(name) == 1:
            return self.write(name)
        return self._keys.get(XK.string_to_keysym(_NAMES.get(name, "")))

    def write(self, character: str) -> tuple[int, bool] | None:
        """Return (key code, whether it needs shift) to write a character; None if no key can."""
        keysym = _keysym(character)
        if keysym is None:
            return None
        if keysym not in self._keys:
            self._bind(keysym)
        return self._keys.get(keysym)

    def takes_back(self, character: str) -> bool:
        """Return True if `write` would take another character's key for this one."""
        keysym = _keysym(character)
        return keysym is not None and keysym not in self._keys and not self._spare

    def _bind(self, keysym: int) -> None:
        """Bind a spare key to `keysym`; without one, the key that was bound first."""
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
    """A controller of the mouse and the keyboard of one display.

    `wait_handled` waits until applications have handled their events.
    """

    def __init__(
        self, display: Display, width: int, height: int, wait_handled: Callable[[], None]
    ) -> None:
        self._display = display
        self._size = (width, height)
        self._wait_handled = wait_handled
        self._keyboard = Keyboard(display)
        self._last_press = (-math.inf, 0, 0)  # (time, x, y)
        self._machine = InputMachine(
            STRIDE,
            lambda key: self._keyboard.key_of(key) is not None,
            adds_shift=True,
            pointer=(width // 2, height // 2),  # where an X server puts it
        )

    def perform(self, action: Action) -> None:
        """Perform `action` and wait for the server; an action off the screen does nothing.

        Raises EnvError.
        """
        if within(action, self._size) == action:
            self._perform(self._machine.events_of(action))

    def release(self) -> None:
        """Release the buttons and keys that are down. Raises EnvError."""
        self._perform(self._machine.release())

    def _perform(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case Moved():
                    self._move(event)
                case Button():
                    self._button(event)
                case Wheel(at=at, dx=dx, dy=dy):
                    self._display.move(*at)
                    self._turn(_DOWN if dy > 0 else _UP, abs(dy))
                    self._turn(_RIGHT if dx > 0 else _LEFT, abs(dx))
                case Key(name=name, down=down):
                    if key := self._keyboard.key_of(name):
                        self._display.key(key[0], down)
                case Text(text=text):
                    self._type(text)
        self._display.sync()

    def _move(self, event: Moved) -> None:
        """Move the pointer; in a drag, wait for the applications after each stride.

        At the first moves they decide whether this is a drag, and they ask each widget under the pointer
        whether it accepts a drop, while further events wait.
        """
        if event.strides > 1:
            self._wait_handled()
        for x, y in event.points():
            self._display.move(round(x), round(y))
            if event.strides > 1:
                self._wait_handled()

    def _button(self, event: Button) -> None:
        if event.down and event.count == 1:
            self._display.move(*event.at)
            when, *last = self._last_press
            if math.dist(event.at, last) < DOUBLE_CLICK_PX:  # else it would be a double click
                time.sleep(max(0.0, when + DOUBLE_CLICK_S - time.monotonic()))
        if not event.down:
            self._last_press = (time.monotonic(), *event.at)
        self._display.button(_BUTTONS[event.name], event.down)

    def _turn(self, button: int, notches: int) -> None:
        for down in (True, False) * notches:
            self._display.button(button, down)

    def _type(self, text: str) -> None:
        for character in text:
            if self._keyboard.takes_back(character):
                self._wait_handled()  # applications read earlier keystrokes with the earlier keyboard map
            key = self._keyboard.write(character)
            if key is not None:
                self._strike(*key)

    def _strike(self, keycode: int, shifted: bool) -> None:
        """Press and release a key, with shift if `shifted` and shift is not down already."""
        shifts = shifted and "shift" not in self._machine.keys
        if shifts:
            self._display.key(self._keyboard.shift, down=True)
        self._display.key(keycode, down=True)
        self._display.key(keycode, down=False)
        if shifts:
            self._display.key(self._keyboard.shift, down=False)


def _keysym(character: str) -> int | None:
    """Return X11's keysym of a character; None if it has none."""
    if character in "\n\r":
        return int(XK.XK_Return)
    if character == "\t":
        return int(XK.XK_Tab)
    number = ord(character)
    if 0x20 <= number <= 0x7E or 0xA0 <= number <= 0xFF:
        return number
    return _UNICODE + number if number > 0xFF else None
