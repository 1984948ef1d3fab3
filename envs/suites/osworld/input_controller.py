"""The program in a guest that moves the mouse and presses keys: it performs events of envs/tools/inputs.py.

It is sent as `python -c SOURCE EVENTS` and never imported. Events are JSON, `[["button", "left", true, x, y],
["text", "a text"], ...]`: data that no shell and no interpreter executes. It runs in the guest's Python (3.10
or later) on the guest's X display, with the Xlib that pyautogui brings.

pyautogui itself takes 0.3 s to import, types `>` for `<` (its issue 198), and leaves out characters without a
key. Here such a character permanently gets one of the keyboard map's spare keys.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from Xlib import X, display
from Xlib.ext import xtest

STRIDE_S = 0.01  # time from point to point of a drag; applications track the path
DRAG_S = 5.0  # longest time of a drag
CLICK_S = 0.05  # from a move to a press, from a press to its release
KEY_S = 0.005  # between characters
REMAPPED_S = 0.15  # time in which applications apply a changed keyboard map

BUTTONS = {"left": 1, "middle": 2, "right": 3}
UP, DOWN, LEFT, RIGHT = 4, 5, 6, 7  # buttons of the wheel

UNICODE = 0x01000000  # keysym of a character beyond Latin-1, less its number
WRITTEN = {"\n": 0xFF0D, "\t": 0xFF09}
NAMED = {
    "enter": 0xFF0D, "tab": 0xFF09, "escape": 0xFF1B, "backspace": 0xFF08, "delete": 0xFFFF,
    "insert": 0xFF63, "home": 0xFF50, "left": 0xFF51, "up": 0xFF52, "right": 0xFF53,
    "down": 0xFF54, "pageup": 0xFF55, "pagedown": 0xFF56, "end": 0xFF57, "space": 0x20,
    "shift": 0xFFE1, "ctrl": 0xFFE3, "capslock": 0xFFE5, "alt": 0xFFE9, "meta": 0xFFEB,
    "menu": 0xFF67, "printscreen": 0xFF61, "pause": 0xFF13, "numlock": 0xFF7F,
    **{f"f{n}": 0xFFBD + n for n in range(1, 25)},
}  # fmt: skip
"""Keysyms (X11/keysymdef.h) by the canonical names of envs.tools.inputs."""


class GuestInputController:
    """The mouse and the keyboard of one display."""

    def __init__(self) -> None:
        self.screen = display.Display()
        info = self.screen.display.info
        self.first = info.min_keycode
        self.count = info.max_keycode - self.first + 1

    def perform(self, events: list[Any]) -> None:
        """Perform each event in turn. If one key is unknown, no key is pressed at all."""
        kinds: dict[str, Any] = {
            "move": self.move,
            "button": self.button,
            "wheel": self.wheel,
            "key": self.key,
            "text": self.write,
            "release": self.release,
        }
        keys = self.key_map()
        if any(kind == "key" and symbol_of(how[0]) not in keys for kind, *how in events):
            events = [event for event in events if event[0] != "key"]
        strides = sum(len(how[0]) for kind, *how in events if kind == "move")
        self.stride_s = min(STRIDE_S, DRAG_S / max(1, strides))
        for kind, *how in events:
            kinds[kind](*how)

    def move(self, points: list[Any]) -> None:
        """Move to one point, or drag along several."""
        for x, y in points:
            if len(points) > 1:
                time.sleep(self.stride_s)
            self.send(X.MotionNotify, x=x, y=y)

    def button(self, button: str, down: bool, x: int, y: int) -> None:
        """Press or release at a point."""
        self.send(X.MotionNotify, x=x, y=y)
        time.sleep(CLICK_S)
        self.send(X.ButtonPress if down else X.ButtonRelease, BUTTONS[button])

    def wheel(self, x: int, y: int, dx: int, dy: int) -> None:
        """Turn the wheel: right and down are positive."""
        self.send(X.MotionNotify, x=x, y=y)
        for button, notches in ((DOWN if dy > 0 else UP, dy), (RIGHT if dx > 0 else LEFT, dx)):
            for _ in range(abs(notches)):
                self.send(X.ButtonPress, button)
                self.send(X.ButtonRelease, button)

    def key(self, name: str, down: bool) -> None:
        """Press or release a key."""
        row, _ = self.key_map()[symbol_of(name)]
        self.send(X.KeyPress if down else X.KeyRelease, self.first + row)

    def release(self) -> None:
        """Release all buttons and keys that are down."""
        mask = self.screen.screen().root.query_pointer().mask
        for number in BUTTONS.values():
            if mask & X.Button1Mask << number - 1:
                self.send(X.ButtonRelease, number)
        for row, bits in enumerate(self.screen.query_keymap()):
            for bit in range(8):
                if bits >> bit & 1:
                    self.send(X.KeyRelease, row * 8 + bit)

    def write(self, text: str) -> None:
        """Type a text of any characters; unprintable ones are left out."""
        symbols = [keysym(char) for char in text if char in WRITTEN or char.isprintable()]
        keys = self.key_map()
        shift = self.first + keys[NAMED["shift"]][0]
        for number, symbol in enumerate(symbols):
            if symbol not in keys:
                keys = self.bind_keys(symbols[number:])
            row, shifted = keys[symbol]
            if shifted:
                self.send(X.KeyPress, shift)
            self.send(X.KeyPress, self.first + row)
            self.send(X.KeyRelease, self.first + row)
            if shifted:
                self.send(X.KeyRelease, shift)
            time.sleep(KEY_S)

    def key_map(self) -> dict[int, tuple[int, bool]]:
        """Return keysym -> (row of the keyboard map, whether with shift) for its first two levels."""
        keys: dict[int, tuple[int, bool]] = {}
        rows = self.screen.get_keyboard_mapping(self.first, self.count)
        for level in (1, 0):  # the unshifted level wins
            for row, symbols in enumerate(rows):
                if symbols[level]:
                    keys[symbols[level]] = (row, level == 1 and symbols[0] != symbols[1])
        return keys

    def bind_keys(self, symbols: list[int]) -> dict[int, tuple[int, bool]]:
        """Bind the first of `symbols` to the spare keys, and return the new key map.

        Spare keys are empty rows and rows that were bound for an earlier text.
        """
        rows = self.screen.get_keyboard_mapping(self.first, self.count)
        keys = self.key_map()
        missing = list(dict.fromkeys(symbol for symbol in symbols if symbol not in keys))
        spare = [row for row, bound in enumerate(rows) if not any(bound)]
        spare += [
            row
            for row, bound in enumerate(rows)
            if bound[0] > UNICODE and not {*bound} - {bound[0], 0}
        ]
        if not spare:
            raise SystemExit("the keyboard map has no spare key")
        # Applications must handle earlier keystrokes with the old map.
        time.sleep(REMAPPED_S)
        for row, symbol in zip(spare, missing, strict=False):
            self.screen.change_keyboard_mapping(self.first + row, [[symbol] * len(rows[row])])
        self.screen.sync()
        time.sleep(REMAPPED_S)
        return self.key_map()

    def send(self, event: int, detail: int = 0, x: int = 0, y: int = 0) -> None:
        """Send one event as if it came from the hardware."""
        xtest.fake_input(self.screen, event, detail, x=x, y=y)
        self.screen.sync()


def symbol_of(key: str) -> int:
    """Return the X keysym for the name or the character of a key; 0 for an unknown name."""
    return NAMED.get(key) or (keysym(key) if len(key) == 1 else 0)


def keysym(character: str) -> int:
    """Return the X keysym of a character."""
    number = ord(character)
    return WRITTEN.get(character) or (number if number < 0x100 else UNICODE | number)


if __name__ == "__main__":
    GuestInputController().perform(json.loads(sys.argv[1]))
