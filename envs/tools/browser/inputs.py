"""GUI actions as commands of the DevTools protocol.

    PageInput    the mouse and keyboard of one page
    turn_wheel   the browser's own command for the wheel; a page may perform the wheel itself

The browser does not remember what is down: each command names the buttons and modifiers that are down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from envs.contract.actions import Action, MouseButton
from envs.tools.browser.cdp import Call
from envs.tools.inputs import (
    PLAIN,
    SHIFTED,
    Button,
    Event,
    InputMachine,
    Key,
    Moved,
    Text,
    Wheel,
    is_shifted,
)

NOTCH = 50  # CSS pixels that a notch of the wheel scrolls
STRIDE = 8  # CSS pixels between the moves of a drag

_BUTTONS: dict[MouseButton, int] = {"left": 1, "right": 2, "middle": 4}
_MODIFIERS = {"alt": 1, "ctrl": 2, "meta": 4, "shift": 8}
_CORNER = (0, 0)


class _DomKey(NamedTuple):
    key: str  # DOM KeyboardEvent.key
    code: str  # DOM KeyboardEvent.code
    number: int  # windowsVirtualKeyCode, which pages read as keyCode
    text: str = ""  # what it writes


_NAMED_KEYS = {
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

_PUNCTUATION = {
    "`": ("Backquote", 192), "-": ("Minus", 189), "=": ("Equal", 187), "[": ("BracketLeft", 219),
    "]": ("BracketRight", 221), "\\": ("Backslash", 220), ";": ("Semicolon", 186),
    "'": ("Quote", 222), ",": ("Comma", 188), ".": ("Period", 190), "/": ("Slash", 191),
}  # fmt: skip


Turn = Callable[[float, float, int, int], Call]
"""A function that returns the command with which the wheel turns: x, y, and how far it scrolls right and
down, all in CSS pixels."""


def turn_wheel(x: float, y: float, dx: int, dy: int) -> Call:
    """Return the browser's own command for the wheel; its reply needs frames that are drawn meanwhile."""
    place = {"type": "mouseWheel", "x": x, "y": y, "deltaX": dx, "deltaY": dy}
    return Call("Input.dispatchMouseEvent", place)


class PageInput:
    """The mouse and keyboard of one page.

    `scale` is pixels of the screenshot per CSS pixel, and `turn` gives the command for the wheel.
    """

    def __init__(self, scale: float, turn: Turn = turn_wheel) -> None:
        self._scale = scale
        self._turn = turn
        self._machine = InputMachine(
            STRIDE * scale, lambda key: _dom_key(key) is not None, most_notches=10**6
        )
        self._buttons = 0  # the buttons that are down, as DOM MouseEvent.buttons
        self._modifier_bits = 0  # modifiers that are down, as the protocol's bits

    def commands_of(self, action: Action) -> list[Call]:
        """Return the commands that perform `action`; none if it uses neither mouse nor keyboard."""
        return self._commands(self._machine.events_of(action))

    def rest(self) -> list[Call]:
        """Return commands that release everything and move the pointer into the corner, off every widget."""
        release_calls = self._commands(self._machine.release(_CORNER))
        return [*release_calls, *self._move_calls(Moved(_CORNER, _CORNER))]

    def _commands(self, events: Iterable[Event]) -> list[Call]:
        return [call for event in events for call in self._calls_of(event)]

    def _calls_of(self, event: Event) -> Iterator[Call]:
        """Yield the commands that perform an event, and note which buttons and modifiers are down."""
        match event:
            case Moved():
                yield from self._move_calls(event)
            case Button(name=name, down=down, at=at, count=count):
                self._buttons = (
                    self._buttons | _BUTTONS[name] if down else self._buttons & ~_BUTTONS[name]
                )
                kind = "mousePressed" if down else "mouseReleased"
                yield self._mouse(kind, at, name, clickCount=count)
            case Wheel(at=(x, y), dx=dx, dy=dy):
                yield self._turn(x / self._scale, y / self._scale, dx * NOTCH, dy * NOTCH)
            case Key(name=name, down=down):
                bit = _MODIFIERS.get(name, 0)
                self._modifier_bits = (
                    self._modifier_bits | bit if down else self._modifier_bits & ~bit
                )
                if key := _dom_key(name):
                    yield _stroke(key, self._modifier_bits, down=down)
            case Text(text=text):
                for character in text:
                    yield from self._write(character)

    def _move_calls(self, event: Moved) -> Iterator[Call]:
        """Yield the commands of a move so that the page receives it at once.

        Chromium holds moves back and merges them until a frame begins or an event of another kind comes.
        Here that is the release of no button, which pages do not receive.
        """
        button = next((name for name, bit in _BUTTONS.items() if self._buttons & bit), "none")
        for at in event.points():
            yield self._mouse("mouseMoved", at, button)
            yield self._mouse("mouseReleased", at, "none")

    def _mouse(self, kind: str, at: tuple[float, float], button: str, **more: Any) -> Call:
        """Return a mouse command at a place. A press has its place, so that it needs no move before it."""
        place = {"x": at[0] / self._scale, "y": at[1] / self._scale}
        params = {"type": kind, **place, "button": button, "buttons": self._buttons}
        return Call(
            "Input.dispatchMouseEvent", {**params, "modifiers": self._modifier_bits, **more}
        )

    def _write(self, character: str) -> Iterator[Call]:
        """Yield the commands that type a character; without a key on a US keyboard it is inserted as text."""
        key = _dom_key({"\n": "enter", "\t": "tab"}.get(character, character))
        if key is None:
            yield Call("Input.insertText", {"text": character})
            return
        modifiers = self._modifier_bits | (_MODIFIERS["shift"] if is_shifted(character) else 0)
        yield _stroke(key, modifiers, down=True)
        yield _stroke(key, modifiers, down=False)


def _dom_key(name: str) -> _DomKey | None:
    """Return the key of that name, or the key of a US keyboard that writes the character, or None."""
    if len(name) != 1:
        return _NAMED_KEYS.get(name)
    if not name.isascii() or not name.isprintable():
        return None
    if name == " ":
        return _NAMED_KEYS["space"]
    if name.isalpha():
        return _DomKey(name, f"Key{name.upper()}", ord(name.upper()), name)
    plain = PLAIN[SHIFTED.index(name)] if name in SHIFTED else name
    code, number = _PUNCTUATION.get(plain) or (f"Digit{plain}", ord(plain))
    return _DomKey(name, code, number, name)


def _stroke(key: _DomKey, modifiers: int, *, down: bool) -> Call:
    """Return the command with which a key goes down or up while `modifiers` are held."""
    key = _with_shift(key) if modifiers & _MODIFIERS["shift"] else key
    params = {"modifiers": modifiers, "key": key.key, "code": key.code}
    params |= {"type": "keyUp", "windowsVirtualKeyCode": key.number}
    if down:
        command = modifiers & ~_MODIFIERS["shift"]  # with ctrl, alt or meta a key writes nothing
        text = "" if command else key.text
        params |= {"type": "keyDown" if text else "rawKeyDown", "text": text}
    return Call("Input.dispatchKeyEvent", params)


def _with_shift(key: _DomKey) -> _DomKey:
    """Return the key as it is while shift is held."""
    if len(key.text) == 1 and key.text in PLAIN:
        return _dom_key(SHIFTED[PLAIN.index(key.text)]) or key
    return _dom_key(key.text.upper()) or key if key.text.isalpha() else key
