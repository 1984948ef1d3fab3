"""Writes GUI actions as scripts for an Android device's shell, without input or output.

    scripts_of    returns the scripts of an action; each is run to its end before the next one
    finger_after  returns where the finger stays on the screen after an action
    lift          returns the script that takes the finger off the screen
    unwritten     returns the characters of a text that `input text` cannot write

Text is quoted for the device's shell. `input text` reads `%s` as a blank and has no escape for it, so that a
text with `%s` is written in two pieces. It fails on characters that the virtual keyboard lacks; those are
left out, unless the ADB Keyboard input method takes all text.

A device has a finger in place of a pointer. Clicks with modifier keys, drags with another button than the
left one, and keys that stay down have no meaning on it and do nothing.
"""

from __future__ import annotations

import base64
import re
import shlex
from collections.abc import Iterator, Sequence

from envs.contract.actions import (
    Action,
    Click,
    DoubleClick,
    Drag,
    KeyPress,
    MouseDown,
    MouseUp,
    Move,
    Scroll,
    TripleClick,
    Type,
    within,
)
from envs.tools.inputs import canonical

SWIPE_MS = 400
LONG_PRESS_MS = 800  # a right click is a press of this length
NOTCH = 0.08  # fraction of the screen's height or width that a notch of the wheel scrolls
TEXT_CHUNK = 200  # characters in one `input text`
MOST_POINTS = 40  # of a drag

KEYCODES = {
    "home": 3, "back": 4, "up": 19, "down": 20, "left": 21, "right": 22, "volume_up": 24,
    "volume_down": 25, "power": 26, ",": 55, ".": 56, "alt": 57, "shift": 59, "tab": 61,
    "space": 62, "enter": 66, "backspace": 67, "-": 69, "=": 70, "menu": 82, "pageup": 92,
    "pagedown": 93, "escape": 111, "delete": 112, "ctrl": 113, "meta": 117, "end": 123,
    "app_switch": 187, "recent": 187, "recents": 187,
    **{str(n): 7 + n for n in range(10)},
    **{chr(ord("a") + n): 29 + n for n in range(26)},
    **{f"f{n}": 130 + n for n in range(1, 13)},
}  # fmt: skip
"""dart's name of a key -> code of android.view.KeyEvent; `home` is the device's button."""

_PIECES = re.compile(r"\n|\t|[^\n\t]+")


Finger = tuple[int, int] | None
"""The pixel where the finger touches the screen; None if it does not."""


def scripts_of(
    action: Action, size: tuple[int, int], finger: Finger = None, *, adb_keyboard: bool
) -> list[str]:
    """Return the scripts of `action` on a screen of `size`; [] for an action without meaning on a device."""
    match within(action, size):
        case Click(x=x, y=y, button="right", modifiers=()):
            return [_swipe((x, y), (x, y), LONG_PRESS_MS)]
        case Click(x=x, y=y, modifiers=()):
            return [_tap((x, y))]
        case DoubleClick(x=x, y=y, modifiers=()):
            return [_taps((x, y), 2)]
        case TripleClick(x=x, y=y, modifiers=()):
            return [_taps((x, y), 3)]
        case Drag(path=path, button="left", modifiers=()):
            return [_drag(path)]
        case (Move() | MouseDown(button="left") | MouseUp(button="left")) as touch:
            return _touch(touch, finger)
        case Scroll(x=x, y=y, dx=dx, dy=dy):
            return [_scroll((x, y), dx, dy, size)] if dx or dy else []
        case Type(text=text):
            return list(_write(text.replace("\r\n", "\n").replace("\r", "\n"), adb_keyboard))
        case KeyPress(keys=keys):
            return _press(keys)
        case _:
            return []


def finger_after(action: Action, size: tuple[int, int], finger: Finger) -> Finger:
    """Return where the finger touches the screen after `action`."""
    match within(action, size):
        case MouseDown(x=int(x), y=int(y), button="left"):
            return x, y
        case Move(x=x, y=y) if finger is not None:
            return x, y
        case MouseUp(button="left"):
            return None
        case _:
            return finger


def lift(finger: tuple[int, int]) -> str:
    """Return the script that takes the finger off the screen."""
    return f"input motionevent UP {finger[0]} {finger[1]}"


def _touch(action: Move | MouseDown | MouseUp, finger: Finger) -> list[str]:
    """Return the script that puts the finger down at a point, moves it, or takes it off the screen."""
    at = finger if action.x is None or action.y is None else (action.x, action.y)
    if at is None or (finger is None and not isinstance(action, MouseDown)):
        return []
    if isinstance(action, MouseUp):
        return [lift(at)]
    event = "DOWN" if finger is None else "MOVE"
    return [f"input motionevent {event} {at[0]} {at[1]}"]


def unwritten(text: str) -> str:
    """Return the characters, each once, that `input text` cannot write."""
    lacking = (char for char in text if char not in "\n\t\r" and not _is_writable(char))
    return "".join(dict.fromkeys(lacking))


def _is_writable(character: str) -> bool:
    return character.isascii() and character.isprintable()


def _write(text: str, adb_keyboard: bool) -> Iterator[str]:
    for piece in _PIECES.findall(text):
        if piece in ("\n", "\t"):
            yield f"input keyevent {KEYCODES['enter' if piece == chr(10) else 'tab']}"
            continue
        if adb_keyboard:
            for start in range(0, len(piece), TEXT_CHUNK):
                data = piece[start : start + TEXT_CHUNK].encode("utf-8", "replace")
                yield f"am broadcast -a ADB_INPUT_B64 --es msg {base64.b64encode(data).decode()}"
            continue
        writable = "".join(filter(_is_writable, piece))
        for part in re.split("(?<=%)(?=s)", writable):
            for start in range(0, len(part), TEXT_CHUNK):
                chunk = part[start : start + TEXT_CHUNK]
                yield f"input text {shlex.quote(chunk.replace(' ', '%s'))}"


def _press(keys: Sequence[str]) -> list[str]:
    """Return the command for one key, or for several keys together; [] if one of them is unknown.

    A capital letter is the key of the letter with shift.
    """
    names = [canonical(key) for key in keys]
    if "shift" not in names and any("A" <= name <= "Z" for name in names):
        names.insert(0, "shift")
    codes = [KEYCODES.get(name.lower()) for name in names]
    if None in codes:
        return []
    kind = "keyevent" if len(codes) == 1 else "keycombination"
    return [f"input {kind} {' '.join(map(str, codes))}"]


def _drag(path: Sequence[tuple[int, int]]) -> str:
    if len(path) == 2:
        return _swipe(path[0], path[1], SWIPE_MS)
    stride = -(-len(path) // (MOST_POINTS - 1))
    (first, *way), last = path[:-1:stride], path[-1]
    moves = [("MOVE", point) for point in (*way, last)]
    events = [("DOWN", first), *moves, ("UP", last)]
    return "; ".join(f"input motionevent {event} {x} {y}" for event, (x, y) in events)


def _scroll(at: tuple[int, int], dx: int, dy: int, size: tuple[int, int]) -> str:
    """Return a swipe in the opposite direction. It stays away from the edges, where system gestures begin."""
    ends = []
    for place, notches, side in zip(at, (dx, dy), size, strict=True):
        way = round(min(max(notches, -10), 10) * NOTCH * side)
        low, high = side // 10, side - 1 - side // 10
        begin = min(max(place, low + max(way, 0)), high + min(way, 0)) if way else place
        ends.append((begin, min(max(begin - way, low), high) if way else place))
    return _swipe((ends[0][0], ends[1][0]), (ends[0][1], ends[1][1]), SWIPE_MS)


def _tap(at: tuple[int, int]) -> str:
    return f"input tap {at[0]} {at[1]}"


def _taps(at: tuple[int, int], times: int) -> str:
    # In parallel: the program takes longer to start than a double tap may last.
    return f"{' & sleep 0.1; '.join([_tap(at)] * times)}; wait"


def _swipe(first: tuple[int, int], last: tuple[int, int], ms: int) -> str:
    return f"input swipe {first[0]} {first[1]} {last[0]} {last[1]} {ms}"
