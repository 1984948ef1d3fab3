"""Single-step instructions of suite `mini`: tables, and which of them a click on a widget answers."""

from __future__ import annotations

from envs.embedded.tasks import mini
from envs.embedded.theme import COLOURS

ICON_PHRASES = {
    "ok": "click ok",
    "close": "click close",
    "next": "click next",
    "back": "click back",
    "menu": "click menu",
    "submit": "click submit",
    "trash": "click trash",
    "up": "click up",
    "down": "click down",
    "folder": "click folder",
    "list": "click list",
}
COLOUR_PHRASES = {
    "button": ("click the {} button",),
    "box": ("check the {} box",),
    "swatch": ("pick {}",),
    "file": ("click the {} file", "delete the {} file"),
}
TAB_PHRASE = "click the {} tab"

INSTRUCTIONS: tuple[str, ...] = (
    *(
        p.format(colour)
        for phrases in COLOUR_PHRASES.values()
        for p in phrases
        for colour in COLOURS
    ),
    *(TAB_PHRASE.format(shape) for shape in mini.SHAPES),
    *ICON_PHRASES.values(),
)
"""Every instruction that suite mini and its grounding questions use."""

VOCABULARY: tuple[str, ...] = tuple(
    sorted({word for text in INSTRUCTIONS for word in text.split()})
)
"""Every word of them."""


def phrases(role: str, name: str, colour: str) -> tuple[str, ...]:
    """The instructions that a click on such a widget answers."""
    if role in COLOUR_PHRASES:
        return tuple(phrase.format(colour) for phrase in COLOUR_PHRASES[role])
    if role == "tab":
        return (TAB_PHRASE.format(name.removesuffix(".tab")),)
    short = name.rpartition(".")[2]
    return (ICON_PHRASES[short],) if role and short in ICON_PHRASES else ()
