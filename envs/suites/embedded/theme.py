"""Colours: the eight that tasks name, the themes, and the palette in which a screen is drawn.

Screens are drawn as palette indices, one byte a pixel, which makes lossless PNG encoding faster than JPEG.
Entries 0 to 127 are the theme's colours and the blends that anti-aliasing needs; entry 128 + i is entry i
dimmed, for the layers behind a modal dialog.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache

Colour = tuple[int, int, int]

COLOURS: dict[str, Colour] = {
    "red": (226, 29, 42),
    "orange": (255, 138, 0),
    "yellow": (255, 221, 20),
    "green": (18, 158, 62),
    "cyan": (0, 204, 218),
    "blue": (28, 82, 235),
    "purple": (136, 38, 196),
    "pink": (255, 118, 188),
}
"""The colours that instructions name, easy to tell apart."""

WHITE: Colour = (255, 255, 255)
BLACK: Colour = (0, 0, 0)
HALF = 128


@dataclass(frozen=True)
class Theme:
    """The colours of the parts of a screen."""

    name: str
    wall: Colour  # behind the windows
    shadow: Colour  # on the wall
    window: Colour  # a window's body
    panel: Colour  # tool bars, side bars, dialog bodies
    field: Colour  # text fields, lists, check boxes
    edge: Colour  # outlines and separators
    ink: Colour  # text
    muted: Colour  # secondary text, decoration
    title: Colour  # title bars
    title_ink: Colour
    control: Colour  # neutral buttons
    control_ink: Colour
    accent: Colour  # default buttons, focus, selected entries
    accent_ink: Colour
    select: Colour  # the selected row


LIGHT = Theme(
    name="light",
    wall=(164, 178, 196),
    shadow=(140, 154, 172),
    window=(248, 249, 251),
    panel=(232, 236, 241),
    field=WHITE,
    edge=(172, 181, 193),
    ink=(28, 34, 44),
    muted=(126, 136, 150),
    title=(70, 82, 102),
    title_ink=WHITE,
    control=(44, 54, 72),
    control_ink=WHITE,
    accent=(36, 99, 210),
    accent_ink=WHITE,
    select=(206, 222, 250),
)
DARK = Theme(
    name="dark",
    wall=(18, 21, 28),
    shadow=(10, 12, 16),
    window=(38, 43, 54),
    panel=(50, 56, 69),
    field=(28, 32, 41),
    edge=(92, 101, 119),
    ink=(236, 240, 246),
    muted=(142, 152, 170),
    title=(22, 26, 34),
    title_ink=(236, 240, 246),
    control=(222, 228, 238),
    control_ink=(28, 34, 44),
    accent=(92, 150, 255),
    accent_ink=(14, 20, 32),
    select=(56, 76, 116),
)
SAND = Theme(
    name="sand",
    wall=(120, 108, 98),
    shadow=(98, 88, 80),
    window=(252, 246, 234),
    panel=(240, 230, 212),
    field=(255, 252, 246),
    edge=(190, 174, 150),
    ink=(52, 42, 34),
    muted=(146, 130, 112),
    title=(88, 70, 58),
    title_ink=(255, 248, 236),
    control=(70, 56, 46),
    control_ink=(255, 248, 236),
    accent=(24, 110, 120),
    accent_ink=WHITE,
    select=(206, 230, 226),
)
THEMES: tuple[Theme, ...] = (LIGHT, DARK, SAND)
DESK_THEMES: tuple[Theme, ...] = (
    replace(LIGHT, name="day", wall=(124, 152, 188), shadow=(96, 120, 152), title=(58, 72, 96)),
    replace(DARK, name="night", wall=(58, 72, 104), shadow=(40, 50, 74), title=(24, 29, 39)),
    replace(SAND, name="dune", wall=(172, 150, 126), shadow=(140, 120, 100)),
)


def blend(over: Colour, under: Colour, alpha: float) -> Colour:
    """Return the colour of `over` on `under` at opacity `alpha`, 0 to 1."""
    return (
        round(over[0] * alpha + under[0] * (1 - alpha)),
        round(over[1] * alpha + under[1] * (1 - alpha)),
        round(over[2] * alpha + under[2] * (1 - alpha)),
    )


class Palette:
    """The 256 colours of one theme's screens, the same in every process.

    Any other colour is drawn as the nearest of them.
    """

    LEVELS = 4  # steps of anti-aliasing between background and foreground

    def __init__(self, theme: Theme) -> None:
        self.theme = theme
        self.colours = _entries(theme)
        dimmed = [blend(BLACK, colour, 0.55) for colour in self.colours]
        padding = [BLACK] * (HALF - len(self.colours))
        self.plte = bytes(v for c in (*self.colours, *padding, *dimmed, *padding) for v in c)
        self.dim_table = bytes(i if i >= HALF else i + HALF for i in range(256))
        self._index = {colour: i for i, colour in enumerate(self.colours)}
        self._ramps: dict[tuple[Colour, Colour], bytes] = {}

    def index(self, colour: Colour) -> int:
        """Return the entry nearest to `colour`."""
        entry = self._index.get(colour)
        if entry is None:
            entry = min(
                range(len(self.colours)),
                key=lambda i: sum(
                    (a - b) ** 2 for a, b in zip(colour, self.colours[i], strict=True)
                ),
            )
            self._index[colour] = entry
        return entry

    def ramp(self, over: Colour, under: Colour) -> bytes:
        """Return a table [256] from the coverage of `over` on `under` to the palette entry."""
        table = self._ramps.get((over, under))
        if table is None:
            steps = [
                self.index(blend(over, under, i / self.LEVELS)) for i in range(self.LEVELS + 1)
            ]
            table = bytes(steps[round(a / 255 * self.LEVELS)] for a in range(256))
            self._ramps[over, under] = table
        return table


@lru_cache(maxsize=64)
def palette_of(theme: Theme) -> Palette:
    """Return the palette of a theme, which is made once."""
    return Palette(theme)


def _entries(theme: Theme) -> list[Colour]:
    """Return at most 128 colours: first the theme's own and COLOURS, then the blends in order of use."""
    base = [getattr(theme, field.name) for field in fields(theme) if field.name != "name"]
    base_colours = [WHITE, BLACK, *base, *COLOURS.values()]
    text_pairs = [
        (theme.ink, theme.window),
        (theme.ink, theme.field),
        (theme.title_ink, theme.title),
        (theme.control_ink, theme.control),
        (theme.accent_ink, theme.accent),
        (theme.ink, theme.panel),
        (theme.ink, theme.select),
        (theme.muted, theme.window),
        (theme.muted, theme.panel),
    ]
    shape_pairs = [(theme.control, theme.window), (theme.control, theme.panel)]
    shape_pairs += [(theme.accent, theme.window), (theme.accent, theme.field)]
    shape_pairs += [(theme.edge, theme.window), (theme.edge, theme.panel)]
    blends = [blend(o, u, a) for o, u in text_pairs for a in (0.25, 0.5, 0.75)]
    blends += [blend(o, u, 0.5) for o, u in shape_pairs]
    for alpha in (0.5, 0.25, 0.75):
        for colour in COLOURS.values():
            blends += [blend(colour, theme.window, alpha), blend(colour, theme.panel, alpha)]
        blends += [blend(WHITE, colour, alpha) for colour in COLOURS.values()]
    return list(dict.fromkeys([*base_colours, *blends]))[:HALF]
