"""The tool of Fara1.5, a mouse, a keyboard and addresses in a browser; toolcall.py has the syntax of its calls.

    FARA_BROWSER   the tool: which arguments mean which action

Its calls and numbers, 0-1000 of each side, are those of github.com/microsoft/fara, src/fara/agents/fara. `pixels`
of a scroll are thousandths of the screen; NOTCH pixels of the screen are one notch of the wheel.
A fact that is memorised stays in the history as the model wrote it, and nothing is done. A question to the user ends
the episode, because no person answers it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote_plus

from bus.errors import ActionError
from dart_cli.language.coordinates import CoordinateMap
from dart_cli.language.parsers.reading import (
    Verb,
    at_point,
    read_keys,
    text_of,
    verb_of,
    write_keys,
)
from dart_cli.language.parsers.tools import (
    MOST_NOTCHES,
    Arguments,
    Tool,
    names_of_keys,
    number_of,
    pixel_of,
    pixel_or_pointer,
    seconds_of,
)
from envs.contract import actions as act
from envs.contract.actions import Action

NOTCH = (
    100  # pixels of the screen that one notch of the wheel scrolls, as in envs/suites/browsergym
)
MOST_SIDE = 10_000
"""Pixels of the longest side of a screen; a map that stands for no screen (AS_IT_IS) has longer ones."""
SEARCH = "https://www.bing.com/search?q={query}&FORM=QBLH"
"""The address that a search opens, which is that of its own agent."""

_CLICKS: Mapping[str, Verb] = {
    "left_click": (act.Click, "left"),
    "right_click": (act.Click, "right"),
    "double_click": (act.DoubleClick, ""),
    "triple_click": (act.TripleClick, ""),
}
_SCHEMES = ("https://", "http://", "file://", "about:")


def _read(arguments: Arguments, coordinates: CoordinateMap) -> Action:
    name = arguments["action"]
    if name in _CLICKS:
        return at_point(_CLICKS[name], pixel_or_pointer(arguments, coordinates))
    match name:
        case "mouse_move":
            x, y = pixel_of(arguments, coordinates)
            return act.Move(x=x, y=y)
        case "left_click_drag":
            if coordinates.pointer is None:
                raise ActionError("a drag begins where the pointer is; no action has moved it yet")
            return act.Drag(path=[coordinates.pointer, pixel_of(arguments, coordinates)])
        case "scroll":
            x, y = coordinates.pointer_or_centre
            return act.Scroll(x=x, y=y, dy=-_notches(arguments, coordinates.height))
        case "hscroll":
            x, y = coordinates.pointer_or_centre
            return act.Scroll(x=x, y=y, dx=_notches(arguments, coordinates.width))
        case "type":
            return act.Type(text=text_of(arguments, "text"))
        case "key":
            return act.KeyPress(keys=read_keys(names_of_keys(arguments["keys"])))
        case "visit_url":
            return act.Goto(url=_address(text_of(arguments, "url").strip()))
        case "web_search":
            return act.Goto(url=SEARCH.format(query=quote_plus(text_of(arguments, "query"))))
        case "history_back":
            return act.KeyPress(keys=["alt", "left"])
        case "pause_and_memorize_fact":
            text_of(arguments, "fact")
            return act.Wait(seconds=0.0)
        case "wait":
            return act.Wait(seconds=seconds_of(arguments))
        case "ask_user_question":
            return act.Fail()
        case "terminate":
            answer = text_of(arguments, "answer") if arguments.get("answer") else ""
            return act.Answer(text=answer) if answer else act.Done()
        case "read_page_answer_question":
            raise ActionError("no suite reads a page as text; look at the screenshot")
    raise ActionError(f"computer_use of Fara has no action {str(name)[:40]!r}")


def _notches(arguments: Arguments, side: int) -> int:
    """Return the notches of a scroll by `pixels` thousandths of `side`, at least one unless it is 0."""
    pixels = number_of(arguments["pixels"])
    notches = round(pixels * min(side, MOST_SIDE) / 1000 / NOTCH) or (pixels > 0) - (pixels < 0)
    if abs(notches) > MOST_NOTCHES:
        raise ActionError(f"at most {MOST_NOTCHES} notches are turned at once, got {notches}")
    return notches


def _address(text: str) -> str:
    """Return the address that a text names, as Fara's own agent reads it: several words are a search."""
    if text.startswith(_SCHEMES):
        return text
    if " " in text:
        return SEARCH.format(query=quote_plus(text))
    if not text:
        raise ActionError("url is empty")
    return f"https://{text}"


def _write(action: Action, coordinates: CoordinateMap) -> dict[str, Any] | None:
    match action:
        case act.Click() | act.DoubleClick() | act.TripleClick() if name := verb_of(
            _CLICKS, action
        ):
            return {
                "action": name,
                "coordinate": list(coordinates.to_model(action.x, action.y)),
            }
        case act.Move():
            return {
                "action": "mouse_move",
                "coordinate": list(coordinates.to_model(action.x, action.y)),
            }
        case act.Drag(path=[first, last], button="left", modifiers=()) if (
            first == coordinates.pointer
        ):
            return {"action": "left_click_drag", "coordinate": list(coordinates.to_model(*last))}
        case act.Scroll() if (action.x, action.y) == coordinates.pointer_or_centre:
            return _write_scroll(action, coordinates)
        case act.Type():
            return {"action": "type", "text": action.text}
        case act.KeyPress():
            return {"action": "key", "keys": write_keys(action.keys)}
        case act.Goto() if _address(action.url.strip()) == action.url:
            return {"action": "visit_url", "url": action.url}
        case act.Wait():
            return {"action": "wait", "time": action.seconds}
        case act.Answer() if action.text:
            return {"action": "terminate", "answer": action.text}
        case act.Done():
            return {"action": "terminate"}
        case act.Fail():
            return {"action": "ask_user_question", "question": ""}
    return None


def _write_scroll(action: act.Scroll, coordinates: CoordinateMap) -> dict[str, Any] | None:
    """Return the call of a scroll in one direction; None for another scroll."""
    if (action.dx and action.dy) or max(abs(action.dx), abs(action.dy)) > MOST_NOTCHES:
        return None
    if action.dx:
        return {"action": "hscroll", "pixels": _thousandths(action.dx, coordinates.width)}
    return {"action": "scroll", "pixels": _thousandths(-action.dy, coordinates.height)}


def _thousandths(notches: int, side: int) -> int:
    """Return the thousandths of `side` that so many notches scroll."""
    return round(notches * NOTCH * 1000 / side)


_NONE = "it has no such action"
_POINTED = (*_CLICKS, "mouse_move", "left_click_drag")
FARA_BROWSER = Tool(
    "computer_use",
    _read,
    _write,
    dict.fromkeys(_POINTED, ("coordinate",)),
    {
        **dict.fromkeys(_POINTED, ()),
        **dict.fromkeys(("scroll", "hscroll"), ("pixels",)),
        "type": ("text",),
        "key": ("keys",),
        "visit_url": ("url",),
        "web_search": ("query",),
        "history_back": (),
        "pause_and_memorize_fact": ("fact",),
        **dict.fromkeys(("ask_user_question", "read_page_answer_question"), ("question",)),
        "wait": ("time",),
        "terminate": ("answer", "status"),
    },
    {
        "click": "it clicks the left or right button, and holds no keys",
        **dict.fromkeys(("double_click", "triple_click"), "it holds no keys"),
        "drag": "it drags with the left button from where the pointer is to one point; move there first",
        "scroll": "it turns the wheel in one direction where the pointer is; move there first",
        "goto": "it opens addresses with a scheme",
        "answer": "an empty one is no answer",
        **dict.fromkeys(("mouse_down", "mouse_up", "key_down", "key_up"), _NONE),
    },
)
