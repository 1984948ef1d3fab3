"""What a person types, in pixels of the screenshot: `click 84 60`, `type hello`, `key ctrl+s`.

HELP     every command with what it does
parse    text -> Action. Raises ActionError with the usage of the command
spell    Action -> text; parse(spell(action)) is the action
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence

from bus.errors import ActionError
from envs.actions import (
    Action,
    Answer,
    Click,
    Done,
    DoubleClick,
    Drag,
    Fail,
    KeyPress,
    MouseButton,
    Move,
    Scroll,
    Type,
    Wait,
)

NOTCHES = 3  # wheel notches of `scroll X Y down`

HELP = {
    "click X Y": "press at a point of the screenshot, in pixels",
    "right X Y": "press the right button; `middle X Y` the middle one",
    "double X Y": "press twice",
    "move X Y": "move the pointer",
    "drag X Y X Y ...": "press at the first point, let go at the last",
    "scroll X Y DY [DX]": "turn the wheel so many notches down and right; `up` and `down` are 3",
    "type TEXT": "type; \\n is Enter",
    "key KEYS": "press keys together: enter, ctrl+s",
    "wait [SECONDS]": "do nothing",
    "done": "declare the task done",
    "fail": "declare the task infeasible",
    "answer TEXT": "answer a question, which ends the task",
}
"""Usage -> meaning, of the commands that are actions."""

_BUTTONS: dict[str, MouseButton] = {"click": "left", "right": "right", "middle": "middle"}
_WORDS = (*(usage.split()[0] for usage in HELP), "middle")


def parse(line: str) -> Action:
    """The action a line names. Raises ActionError with the usage of the command."""
    word, _, rest = line.strip().partition(" ")
    if word not in _WORDS:
        close = difflib.get_close_matches(word, _WORDS, n=1)
        hint = f"did you mean {close[0]}?" if close else "`help` lists the commands"
        raise ActionError(f"no command {word!r}; {hint}")
    try:
        return _PARSERS[word](word, rest)
    except ValueError:
        usage = next((each for each in HELP if each.startswith(f"{word} ")), f"{word} X Y")
        raise ActionError(f"usage: {usage}") from None


def spell(action: Action) -> str:
    """The line that names an action."""
    match action:
        case Click():
            word = next(name for name, button in _BUTTONS.items() if button == action.button)
            return f"{word} {action.x} {action.y}"
        case DoubleClick():
            return f"double {action.x} {action.y}"
        case Move():
            return f"move {action.x} {action.y}"
        case Drag():
            return "drag " + " ".join(f"{x} {y}" for x, y in action.path)
        case Scroll():
            return f"scroll {action.x} {action.y} {action.dy} {action.dx}"
        case Type():
            return f"type {_quoted(action.text)}"
        case KeyPress():
            return f"key {'+'.join('plus' if key == '+' else key for key in action.keys)}"
        case Wait():
            return f"wait {action.seconds:g}"
        case Answer():
            return f"answer {_quoted(action.text)}"
        case Done() | Fail():
            return action.kind


def _point(text: str) -> tuple[int, int]:
    x, y = text.split()
    return int(x), int(y)


def _click(word: str, rest: str) -> Action:
    x, y = _point(rest)
    return Click(x=x, y=y, button=_BUTTONS[word])


def _double(_word: str, rest: str) -> Action:
    x, y = _point(rest)
    return DoubleClick(x=x, y=y)


def _move(_word: str, rest: str) -> Action:
    x, y = _point(rest)
    return Move(x=x, y=y)


def _drag(_word: str, rest: str) -> Action:
    numbers = [int(each) for each in rest.split()]
    if len(numbers) < 4 or len(numbers) % 2:
        raise ValueError
    return Drag(path=list(zip(numbers[::2], numbers[1::2], strict=True)))


def _scroll(_word: str, rest: str) -> Action:
    x, y, *turn = rest.split()
    if not 1 <= len(turn) <= 2:
        raise ValueError
    dy, dx = (*(_notches(each) for each in turn), 0)[:2]
    return Scroll(x=int(x), y=int(y), dy=dy, dx=dx)


def _notches(text: str) -> int:
    return {"up": -NOTCHES, "down": NOTCHES}.get(text) or int(text)


def _type(word: str, rest: str) -> Action:
    if not rest:
        raise ValueError
    return Type(text=_plain(rest)) if word == "type" else Answer(text=_plain(rest))


def _key(_word: str, rest: str) -> Action:
    keys: Sequence[str] = rest.lower().split("+")
    if not rest or not all(keys):
        raise ValueError
    return KeyPress(keys=["+" if key == "plus" else key for key in keys])


def _wait(_word: str, rest: str) -> Action:
    seconds = float(rest) if rest else 1.0
    if not 0 <= seconds <= 60:
        raise ValueError
    return Wait(seconds=seconds)


def _end(word: str, rest: str) -> Action:
    if rest:
        raise ValueError
    return Done() if word == "done" else Fail()


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _plain(text: str) -> str:
    parts = text.split("\\\\")
    return "\\".join(part.replace("\\n", "\n") for part in parts)


_PARSERS: dict[str, Callable[[str, str], Action]] = {
    **dict.fromkeys(_BUTTONS, _click),
    "double": _double,
    "move": _move,
    "drag": _drag,
    "scroll": _scroll,
    "type": _type,
    "answer": _type,
    "key": _key,
    "wait": _wait,
    "done": _end,
    "fail": _end,
}
