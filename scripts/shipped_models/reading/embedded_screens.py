"""Scenes of the embedded suites: `mini` with the tiny base's own questions, `desk` and `apps` to read.

    ReadingCanvas   a canvas that keeps the characters that it draws and that stay in sight
    mini_scene      a screen of suite mini, and what scripts/shipped_models/build_tiny.py asks about it
    desk_scene      a screen of a lettered application; questions.py asks about its things

A screen is a state on the way of a task's solution; which step comes next is never asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from itertools import pairwise
from random import Random
from typing import Any, Literal

from envs.contract.actions import Done
from envs.suites.embedded.app import App
from envs.suites.embedded.draw import Canvas, Rect, encode, font, line_height
from envs.suites.embedded.scene import ICON_PHRASES
from envs.suites.embedded.suites import AppsSuite, DeskSuite
from envs.suites.embedded.theme import DESK_THEMES, Colour
from envs.suites.embedded.widgets import Ui, Widget
from scripts.grounding_screens import grounding_screen
from scripts.shipped_models.reading.scene import Box, Glyph, Query, Scene, Thing

MINI_CLICKS, MINI_IDLE = 5, 1
"""Questions about a screen of suite mini that a click answers, and that none does: those of
scripts/shipped_models/build_tiny.py."""

DESK = (448, 336)
"""Size of a screen of a lettered application, in pixels."""

WALK = 4
"""Most steps of a solution before a screen is taken."""

MAX_SCALE = 1.6
"""Of the lettered applications, in pixels of a design unit."""

ROLES: Mapping[str, str] = {
    "box": "checkbox",
    "combo": "select",
    "list": "select",
    "swatch": "option",
}
"""Roles of the toolkit that have another name here."""

COVERED = "covered"
"""Role of what is in sight and cannot be pressed: a dialog lies over it."""

Suite = Literal["desk", "apps"]


class ReadingCanvas(Canvas):
    """A canvas whose `glyphs` are the characters in sight: neither cut off nor painted over."""

    def __init__(self, *arguments: Any, glyphs: list[Glyph] | None = None) -> None:
        super().__init__(*arguments)
        self.glyphs: list[Glyph] = [] if glyphs is None else glyphs

    def text(
        self, x: int, y: int, text: str, size: int, colour: Colour, on: Colour | None = None
    ) -> None:
        """Write one line; see Canvas."""
        super().text(x, y, text, size, colour, on)
        middle = y + line_height(size) / 2
        visible = self._visible()
        for character, offset in zip(text, _middles(text, size), strict=True):
            if "!" <= character <= "~" and _holds(visible, x + offset, middle):
                self.glyphs.append(Glyph(character, x + offset, middle))

    def fill(self, box: Rect, colour: Colour) -> None:
        """Paint a rectangle; see Canvas."""
        super().fill(box, colour)
        self._cover(box)

    def rounded(
        self, box: Rect, radius: int, colour: Colour, *, edge: Colour | None = None
    ) -> None:
        """Paint a rectangle with round corners; see Canvas."""
        super().rounded(box, radius, colour, edge=edge)
        self._cover(box)

    @contextmanager
    def clip(self, box: Rect) -> Iterator[Canvas]:
        """Yield a canvas that draws inside `box` only; see Canvas."""
        ox, oy = self.origin
        part = self.image.crop((box.x0 - ox, box.y0 - oy, box.x1 - ox, box.y1 - oy))
        inner = ReadingCanvas(part, self.palette, self.ground, (box.x0, box.y0), glyphs=self.glyphs)
        yield inner
        self.image.paste(inner.image, (box.x0 - ox, box.y0 - oy))

    def _visible(self) -> Rect:
        (left, top), (width, height) = self.origin, self.image.size
        return Rect(left, top, left + width, top + height)

    def _cover(self, box: Rect) -> None:
        """Forget what the box hides; lines and carets hide nothing."""
        if self.glyphs and min(box.width, box.height) > 3:
            hidden = box.cut(self._visible())
            self.glyphs[:] = [g for g in self.glyphs if not _holds(hidden, g.x, g.y)]


def read_app(app: App) -> ReadingCanvas:
    """Return the present screen as App.paint draws it, with its characters."""
    ui = app.ui
    canvas = ReadingCanvas.blank(ui.width, ui.height, ui.palette, ui.theme.wall)
    assert isinstance(canvas, ReadingCanvas)
    for layer in app.layers:
        if layer.dims:
            canvas.dim()
        layer.root.paint(ui, canvas)
    return canvas


def mini_scene(seed: int) -> Scene:
    """Return a screen of suite mini, with questions that a click answers and some that none does.

    The latter are answered with any widget in sight, at random: what leads where is not for the base to know.
    """
    screen = grounding_screen(seed)
    rng = Random(f"small/mini/{seed}")
    pairs = rng.sample(screen.questions, min(MINI_CLICKS, len(screen.questions)))
    queries = [Query(text, "click({})", (_box(at),), "mini") for text, at in pairs]
    vain = rng.sample(screen.idle, min(MINI_IDLE, len(screen.idle)))
    vain += [text for text, _ in screen.satisfied]
    queries += [
        Query(text, "click({})", (_box(rng.choice(screen.sights)),), "mini idle") for text in vain
    ]
    queries.append(Query("what screen", screen.kind, (), "mini screen"))
    canvas = read_app(screen.app)
    things = _things(screen.app, canvas)
    key = f"mini/{seed}/168x168"
    return Scene(key, encode(canvas), tuple(canvas.glyphs), things, tuple(queries))


def desk_scene(suite: Suite, seed: int) -> Scene:
    """Return a screen of suite desk or apps, of a task that may be trained on."""
    rng = Random(f"small/{suite}/{seed}")
    suite_of_name = _suite(suite)
    names = [task.id for task in suite_of_name.tasks.values() if task.split == "train"]
    name = rng.choice(names)
    width, height = DESK
    design = suite_of_name.size
    scale = min(width / design[0], height / design[1], MAX_SCALE)
    of_task = Random(f"{name}/{seed}")  # so that the environment has the same screen
    ui = Ui(width, height, of_task.choice(DESK_THEMES), scale)
    scene = suite_of_name.scenes[name](of_task, ui)
    app = App(ui, scene.layers)
    for _ in range(rng.randint(0, WALK)):
        action = scene.solve(app)
        if isinstance(action, Done) or scene.over:
            break
        app.dispatch(action)
    canvas = read_app(app)
    key = f"{name}/{seed}/{width}x{height}"
    return Scene(key, encode(canvas), tuple(canvas.glyphs), _things(app, canvas), _icons(app))


@lru_cache(maxsize=2)
def _suite(name: Suite) -> DeskSuite:
    return AppsSuite() if name == "apps" else DeskSuite()


@lru_cache(maxsize=16384)
def _middles(text: str, size: int) -> tuple[float, ...]:
    """Return the middle of each character, in pixels from the text's left."""
    ends = [font(size).getlength(text[:at]) for at in range(len(text) + 1)]
    return tuple((a + b) / 2 for a, b in pairwise(ends))


def _icons(app: App) -> tuple[Query, ...]:
    """Return questions about icons, which questions.py cannot name."""
    boxes_by_phrase: dict[str, list[Box]] = {}
    for widget in app.widgets():
        phrase = ICON_PHRASES.get(widget.name.rpartition(".")[2])
        if phrase and widget.role == "icon":
            boxes_by_phrase.setdefault(phrase, []).append(_box(widget.bbox))
    return tuple(
        Query(phrase, "click({})", tuple(boxes), "icon")
        for phrase, boxes in boxes_by_phrase.items()
        if len(boxes) == 1
    )


def _things(app: App, canvas: ReadingCanvas) -> tuple[Thing, ...]:
    reached = {id(widget) for widget in _reached(app)}
    return tuple(
        _thing(widget, canvas, reached=id(widget) in reached)
        for depth, layer in enumerate(app.layers)
        for widget in layer.root.walk()
        if widget.role
        and min(widget.visible.width, widget.visible.height) > 3
        and not any(above.box.contains(*widget.visible.centre) for above in app.layers[depth + 1 :])
    )


def _reached(app: App) -> Iterator[Widget]:
    for layer in reversed(app.layers):
        for widget in layer.root.walk():
            if widget.role and widget.clickable and app.reaches(widget):
                yield widget
        if layer.modal:
            return


def _thing(widget: Any, canvas: ReadingCanvas, *, reached: bool) -> Thing:
    role = ROLES.get(widget.role, widget.role)
    name = widget.name if widget.name[:1].isupper() and "." not in widget.name else ""
    label = name if role == "select" else widget.label or name
    value = str(getattr(widget, "value", "") or "")
    if getattr(widget, "secret", False):
        value = ""
    shape = ""
    if role == "icon":
        shape = str(getattr(widget, "icon", ""))
    elif widget.role == "tab" and not widget.label:
        shape = widget.name.removesuffix(".tab")
    ticked = getattr(widget, "is_on", getattr(widget, "checked", None))
    return Thing(
        role=role if reached else COVERED,
        label=label if _is_shown(label, canvas) else "",
        box=_box(widget.visible),
        colour=widget.colour,
        shape=shape,
        checked=ticked,
        value=value if _is_shown(value, canvas) else "",
    )


def _is_shown(text: str, canvas: ReadingCanvas) -> bool:
    """Return True if the whole text stands somewhere on the screen."""
    return bool(text) and "".join(text.split()) in "".join(g.character for g in canvas.glyphs)


def _holds(box: Rect, x: float, y: float) -> bool:
    return box.x0 <= x < box.x1 and box.y0 <= y < box.y1


def _box(at: Rect) -> Box:
    return float(at.x0), float(at.y0), float(at.x1), float(at.y1)
