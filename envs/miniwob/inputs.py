"""GUI actions as commands of the DevTools protocol: pure.

    commands_of   an action -> batches of commands; a batch ends before the next begins
    rest          commands that bring mouse and keyboard to their state at the start of an episode

Points are divided by `scale`, pixels of the screenshot per CSS pixel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from envs.actions import Action, Click, DoubleClick, Drag, KeyPress, Move, Scroll, Type
from envs.miniwob.cdp import Call

NOTCH = 50  # CSS pixels that a notch of the wheel scrolls
STRIDE = 8  # CSS pixels between the moves of a drag; pages track the path, not only its ends

_BUTTONS = {"left": 1, "right": 2, "middle": 4}
_MODIFIERS = {"alt": 1, "ctrl": 2, "meta": 4, "shift": 8}
_SAME = {
    "control": "ctrl", "option": "alt", "cmd": "meta", "command": "meta", "win": "meta",
    "super": "meta", "return": "enter", "esc": "escape", "del": "delete", "arrowup": "up",
    "arrowdown": "down", "arrowleft": "left", "arrowright": "right", "page_up": "pageup",
    "page_down": "pagedown", "ins": "insert",
}  # fmt: skip


class _DomKey(NamedTuple):
    key: str  # DOM KeyboardEvent.key
    code: str  # DOM KeyboardEvent.code
    number: int  # windowsVirtualKeyCode, which pages know as keyCode
    text: str = ""  # what it writes
    shifted: bool = False


_NAMED = {
    "enter": _DomKey("Enter", "Enter", 13, "\r"),
    "tab": _DomKey("Tab", "Tab", 9),
    "backspace": _DomKey("Backspace", "Backspace", 8),
    "delete": _DomKey("Delete", "Delete", 46),
    "insert": _DomKey("Insert", "Insert", 45),
    "escape": _DomKey("Escape", "Escape", 27),
    "space": _DomKey(" ", "Space", 32, " "),
    "left": _DomKey("ArrowLeft", "ArrowLeft", 37),
    "up": _DomKey("ArrowUp", "ArrowUp", 38),
    "right": _DomKey("ArrowRight", "ArrowRight", 39),
    "down": _DomKey("ArrowDown", "ArrowDown", 40),
    "home": _DomKey("Home", "Home", 36),
    "end": _DomKey("End", "End", 35),
    "pageup": _DomKey("PageUp", "PageUp", 33),
    "pagedown": _DomKey("PageDown", "PageDown", 34),
    "shift": _DomKey("Shift", "ShiftLeft", 16),
    "ctrl": _DomKey("Control", "ControlLeft", 17),
    "alt": _DomKey("Alt", "AltLeft", 18),
    "meta": _DomKey("Meta", "MetaLeft", 91),
    **{f"f{n}": _DomKey(f"F{n}", f"F{n}", 111 + n) for n in range(1, 13)},
}

_PLAIN = "`1234567890-=[]\\;',./"
_SHIFTED = '~!@#$%^&*()_+{}|:"<>?'
_PUNCTUATION = {
    "`": ("Backquote", 192), "-": ("Minus", 189), "=": ("Equal", 187), "[": ("BracketLeft", 219),
    "]": ("BracketRight", 221), "\\": ("Backslash", 220), ";": ("Semicolon", 186),
    "'": ("Quote", 222), ",": ("Comma", 188), ".": ("Period", 190), "/": ("Slash", 191),
}  # fmt: skip


def commands_of(action: Action, scale: float) -> list[list[Call]]:
    """Commands that perform `action`; none for actions that use neither mouse nor keyboard."""
    match action:
        case Click(x=x, y=y, button=button):
            at = (x / scale, y / scale)
            return [_press(at, button, 1)]
        case DoubleClick(x=x, y=y):
            at = (x / scale, y / scale)
            return [[*_press(at, "left", 1), *_press(at, "left", 2)]]
        case Move(x=x, y=y):
            return [_move((x / scale, y / scale))]
        case Drag(path=path):
            return [_drag([(x / scale, y / scale) for x, y in path])]
        case Scroll(x=x, y=y, dx=dx, dy=dy):
            at = (x / scale, y / scale)
            wheel = f"dart.wheel({at[0]:g}, {at[1]:g}, {dx * NOTCH}, {dy * NOTCH})"
            return [[Call("Runtime.evaluate", {"expression": wheel})]]
        case Type(text=text):
            return [[call for character in text for call in _write(character)]]
        case KeyPress(keys=keys):
            return [list(_chord(keys))]
        case _:
            return []


def rest() -> list[Call]:
    """The pointer in the corner, over nothing that reacts."""
    return _move((0.0, 0.0))


def _drag(path: Sequence[tuple[float, float]]) -> list[Call]:
    first, last = path[0], path[-1]
    calls = [_mouse("mousePressed", first, button="left", buttons=1, clickCount=1)]
    for point in _way(path):
        calls += _move(point, held=1)
    return [*calls, _mouse("mouseReleased", last, button="left", buttons=0, clickCount=1)]


def _way(path: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Points from the second on, none further than STRIDE from the one before."""
    for (x0, y0), (x1, y1) in pairwise(path):
        count = max(2, math.ceil(math.hypot(x1 - x0, y1 - y0) / STRIDE))
        for n in range(1, count + 1):
            yield x0 + (x1 - x0) * n / count, y0 + (y1 - y0) * n / count


def _move(at: tuple[float, float], held: int = 0) -> list[Call]:
    """A move that pages receive at once.

    Chromium holds moves back, merged into one, until a frame begins or an event of another kind
    comes: here the release of no button, which pages do not receive. Presses need no move: they
    carry the position of the pointer, too.
    """
    moved = _mouse("mouseMoved", at, buttons=held, button="left" if held else "none")
    return [moved, _mouse("mouseReleased", at, buttons=held, button="none")]


def _press(at: tuple[float, float], button: str, count: int) -> list[Call]:
    held = _BUTTONS[button]
    return [
        _mouse("mousePressed", at, button=button, buttons=held, clickCount=count),
        _mouse("mouseReleased", at, button=button, buttons=0, clickCount=count),
    ]


def _mouse(kind: str, at: tuple[float, float], **more: Any) -> Call:
    return Call("Input.dispatchMouseEvent", {"type": kind, "x": at[0], "y": at[1], **more})


def _write(character: str) -> list[Call]:
    """One character of a text. A character without a key on a US keyboard is inserted as it is."""
    if character == "\n":
        key = _NAMED["enter"]
    elif character == "\t":
        key = _NAMED["tab"]
    else:
        found = _key_of(character)
        if found is None:
            return [Call("Input.insertText", {"text": character})]
        key = found
    held = _MODIFIERS["shift"] if key.shifted else 0
    return [_down(key, held), _up(key, held)]


def _chord(keys: Sequence[str]) -> Iterator[Call]:
    """All down in order, all up in reverse; a chord with an unknown key does nothing."""
    pressed = [_named(key) for key in keys]
    known = [each for each in pressed if each is not None]
    if len(known) < len(keys):
        return
    held = 0
    for name, key in known:
        held |= _MODIFIERS.get(name, 0)
        yield _down(key, held)
    for name, key in reversed(known):
        held &= ~_MODIFIERS.get(name, 0)
        yield _up(key, held)


def _named(name: str) -> tuple[str, _DomKey] | None:
    short = name.lower() if len(name) > 1 else name
    short = _SAME.get(short, short)
    key = _NAMED.get(short) or _key_of(short)
    return None if key is None else (short, key)


def _key_of(character: str) -> _DomKey | None:
    """The key of a US keyboard that writes `character`."""
    if len(character) != 1 or not character.isascii() or not character.isprintable():
        return None
    if character == " ":
        return _NAMED["space"]
    if character.isalpha():
        upper = character.upper()
        return _DomKey(character, f"Key{upper}", ord(upper), character, character == upper)
    shifted = character in _SHIFTED
    plain = _PLAIN[_SHIFTED.index(character)] if shifted else character
    code, number = _PUNCTUATION.get(plain) or (f"Digit{plain}", ord(plain))
    return _DomKey(character, code, number, character, shifted)


def _down(key: _DomKey, held: int) -> Call:
    command = held & ~_MODIFIERS["shift"]  # with ctrl, alt or meta a key writes nothing
    text = "" if command else key.text
    kind = "keyDown" if text else "rawKeyDown"
    return Call("Input.dispatchKeyEvent", {**_event(kind, key, held), "text": text})


def _up(key: _DomKey, held: int) -> Call:
    return Call("Input.dispatchKeyEvent", _event("keyUp", key, held))


def _event(kind: str, key: _DomKey, held: int) -> dict[str, Any]:
    return {
        "type": kind,
        "modifiers": held,
        "key": key.key,
        "code": key.code,
        "windowsVirtualKeyCode": key.number,
    }
