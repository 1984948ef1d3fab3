"""What a screen shows, in the form that all sources of screens of `builtin:small` share.

    Glyph    one printed character and where its middle is
    Thing    one thing that can be named: its role, its label, its box, how it looks
    Query    an instruction and its answer
    Scene    a screenshot with all of these

Sources: `drawn_screens.py` (Pillow), `browser_screens.py` (Chromium), `page_screens.py` (pages of MiniWoB++)
and `embedded_screens.py`. `questions.py` asks about the things of any of them.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, field

from PIL import Image

Box = tuple[float, float, float, float]
"""Left, top, right, bottom in pixels of the screenshot."""


@dataclass(frozen=True)
class Glyph:
    """One printed character, ASCII 33 to 126, and its middle in pixels."""

    character: str
    x: float
    y: float


@dataclass(frozen=True)
class Thing:
    """One thing on the screen; what can be pressed, and what is only to be seen."""

    role: str
    """button, link, field, checkbox, radio, tab, row, option, shape, icon, heading, text, slider, ..."""

    label: str  # the text that it bears, or that stands beside it; empty if there is none
    box: Box
    colour: str = ""
    shape: str = ""
    size: str = ""  # small or large, where both are in sight
    checked: bool | None = None  # of check boxes and radio buttons
    value: str = ""  # what a field holds, a number that is shown


@dataclass(frozen=True)
class Query:
    """One instruction and its answer.

    `answer` is text of the compact action parser in which each `{}` stands for a point in the next of `boxes`:
    "click({})", "drag({},{})", "scroll({},down)", "type(abc)", "yes".
    """

    text: str
    answer: str
    boxes: tuple[Box, ...] = ()
    kind: str = ""  # what it is reported under
    before: tuple[str, ...] | None = None
    """Earlier actions, as text, which the prompt lists; None where it lists none."""


@dataclass(frozen=True)
class Scene:
    """One screenshot and what it shows."""

    key: str  # equal keys are equal pictures
    png: bytes
    glyphs: tuple[Glyph, ...] = ()
    things: tuple[Thing, ...] = ()
    queries: tuple[Query, ...] = ()  # the source's own questions, such as a page's instruction
    unread: tuple[Box, ...] = field(default=())
    """Regions with text whose characters are not listed; tokens there teach no letters."""

    @property
    def image(self) -> Image.Image:
        """The picture, mode RGB."""
        with Image.open(io.BytesIO(self.png)) as picture:
            return picture.convert("RGB")
