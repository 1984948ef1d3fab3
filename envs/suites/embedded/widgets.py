"""Parts of every screen: the widget protocol, containers, and the simple widgets.

A widget measures itself, gets a rectangle, paints, and handles events. It has no state: it gets its values
when it is built, reports changes through callbacks, and what must persist beyond one event is in `Ui`. The
controls of suite `desk` are in controls.py, textfield.py and menus.py, the ones of suite `mini` in marks.py.
"""
# ruff: noqa: ARG002, D102 - overrides keep the contract that the base class documents

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from envs.contract.actions import Modifier, MouseButton
from envs.suites.embedded.draw import Canvas, Rect, fit_text, line_height, text_width
from envs.suites.embedded.theme import Colour, Palette, Theme, palette_of

EventHandler = Callable[[], None]
NOWHERE = Rect(0, 0, 0, 0)


@dataclass
class Ui:
    """The state that persists between events, and what every widget reads: theme, scale, focus, offsets."""

    width: int  # pixels of the screen
    height: int  # pixels
    theme: Theme
    scale: float = 1.0  # pixels per design unit
    text_units: float = 12.0  # nominal size of text, design units
    focus: str = ""  # name of the widget that has the keyboard
    by_keyboard: bool = False  # whether the focus came by Tab, so that it is marked
    opened: str = ""  # name of the widget whose pop-up is open
    caret: int = 0  # position in the focused text field
    anchor: int = 0  # the other end of its selection
    clipboard: str = ""
    offsets: dict[str, int] = field(default_factory=dict)  # scroll offset by widget name, pixels
    _pixels: dict[float, int] = field(default_factory=dict, repr=False)  # results of `px`

    @property
    def palette(self) -> Palette:
        return palette_of(self.theme)

    @property
    def text_size(self) -> int:
        return self.px(self.text_units)

    def px(self, units: float) -> int:
        """Return a length in design units as pixels, at least one."""
        pixels = self._pixels.get(units)
        if pixels is None:
            pixels = self._pixels[units] = max(1, round(units * self.scale))
        return pixels


@dataclass(frozen=True)
class Pointer:
    """A mouse press."""

    x: int
    y: int
    button: MouseButton = "left"
    double: bool = False  # the second press of a double click
    triple: bool = False  # the third of a triple click
    modifiers: frozenset[Modifier] = frozenset()  # the modifiers that are held


class Widget:
    """A rectangle on the screen that may handle mouse and keyboard."""

    role: str = ""  # its role in grounding data; empty for decoration
    clickable: ClassVar[bool] = False
    focusable: ClassVar[bool] = False
    scrollable: ClassVar[bool] = False

    def __init__(
        self, name: str = "", *, colour: str = "", children: Iterable[Widget] = ()
    ) -> None:
        self.name = name
        self.colour = colour  # of COLOURS, if it has one
        self.label = ""  # the text on it
        self.caption = ""  # its name, if that is not the text on it
        self.children = list(children)
        self.bbox = NOWHERE
        self.visible = NOWHERE  # the part of `bbox` that no container cuts off
        self._size: tuple[int, int] | None = None

    def measure(self, ui: Ui) -> tuple[int, int]:
        """Return the (width, height) that it needs."""
        return 0, 0

    def size(self, ui: Ui) -> tuple[int, int]:
        """Return the result of `measure`, computed once, since every level of nesting needs it."""
        if self._size is None:
            self._size = self.measure(ui)
        return self._size

    def place(self, ui: Ui, box: Rect, clip: Rect) -> None:
        """Take the rectangle `box`, of which the part within `clip` is visible, and place the children."""
        self.bbox = box
        self.visible = box.cut(clip)
        self.arrange(ui, clip)

    def arrange(self, ui: Ui, clip: Rect) -> None:
        """Place the children in `self.bbox`."""

    def paint(self, ui: Ui, canvas: Canvas) -> None:
        """Draw itself and its children."""
        for child in self.children:
            child.paint(ui, canvas)

    def press(self, ui: Ui, pointer: Pointer) -> None:
        """Handle a mouse press on a point that no child handles."""

    def drag(self, ui: Ui, path: Sequence[tuple[int, int]]) -> None:
        """Handle a drag that began here."""

    def drop(self, ui: Ui, dragged: str) -> bool:
        """Handle the end of a drag of the widget named `dragged`; return False if it means nothing here."""
        return False

    def scroll(self, ui: Ui, notches: int) -> bool:
        """Handle the wheel; return False if there is nothing to scroll, so that a parent may."""
        return False

    def key(self, ui: Ui, keys: Sequence[str]) -> bool:
        """Handle a key; return False if it means nothing here."""
        return False

    def write(self, ui: Ui, text: str) -> bool:
        """Handle typed text without line ends; return False if it means nothing here."""
        return text == " " and self.key(ui, ["space"])

    def focused(self, ui: Ui) -> None:
        """Handle getting the keyboard focus by Tab."""

    def popup(self, ui: Ui) -> tuple[Widget, Rect] | None:
        """Return the pop-up to show above everything else while this widget is `ui.opened`, or None."""
        return None

    def walk(self) -> Iterator[Widget]:
        """Yield this widget and all widgets below it, in tree order."""
        yield self
        for child in self.children:
            yield from child.walk()

    def path_to(self, x: int, y: int) -> list[Widget]:
        """Return the widgets from this one to the innermost at (x, y); none if the point is not on it."""
        if not self.visible.contains(x, y):
            return []
        for child in reversed(self.children):
            path = child.path_to(x, y)
            if path:
                return [self, *path]
        return [self]


# --- containers -----------------------------------------------------------------------------


class Free(Widget):
    """A container that places each child at a given rectangle."""

    def __init__(self, placed: Iterable[tuple[Widget, Rect]], name: str = "") -> None:
        self._placed = list(placed)
        super().__init__(name, children=(widget for widget, _ in self._placed))

    def arrange(self, ui: Ui, clip: Rect) -> None:
        for widget, box in self._placed:
            widget.place(ui, box, clip)


Align = Literal["start", "centre", "end", "fill"]


class Line(Widget):
    """A container with children one after another; those in `grow` share the remaining room."""

    def __init__(
        self,
        children: Iterable[Widget],
        *,
        down: bool,
        gap: float = 6,
        pad: float = 0,
        align: Align = "fill",
        grow: Iterable[Widget] = (),
    ) -> None:
        super().__init__(children=children)
        self.down = down
        self.gap = gap  # design units
        self.pad = pad  # design units
        self.align: Align = align
        self.grow = {id(widget) for widget in grow}

    def measure(self, ui: Ui) -> tuple[int, int]:
        sizes = [child.size(ui) for child in self.children]
        main = sum(size[self.down] for size in sizes) + self._gap(ui) * max(0, len(sizes) - 1)
        cross = max((size[not self.down] for size in sizes), default=0)
        pad = 2 * ui.px(self.pad) if self.pad else 0
        return (cross + pad, main + pad) if self.down else (main + pad, cross + pad)

    def arrange(self, ui: Ui, clip: Rect) -> None:
        inner = self.bbox.inset(ui.px(self.pad)) if self.pad else self.bbox
        gap = self._gap(ui)
        sizes = [child.size(ui) for child in self.children]
        room = inner.height if self.down else inner.width
        left = room - sum(size[self.down] for size in sizes) - gap * max(0, len(sizes) - 1)
        share = max(0, left) // len(self.grow) if self.grow else 0
        at = inner.y0 if self.down else inner.x0
        for child, size in zip(self.children, sizes, strict=True):
            length = size[self.down] + (share if id(child) in self.grow else 0)
            child.place(ui, self._slot(inner, at, length, size[not self.down]), clip)
            at += length + gap

    def _gap(self, ui: Ui) -> int:
        return ui.px(self.gap) if self.gap else 0

    def _slot(self, inner: Rect, at: int, length: int, cross: int) -> Rect:
        low, high = (inner.x0, inner.x1) if self.down else (inner.y0, inner.y1)
        cross = high - low if self.align == "fill" else min(cross, high - low)
        start = {"start": low, "fill": low, "end": high - cross}.get(
            self.align, low + (high - low - cross) // 2
        )
        if self.down:
            return Rect(start, at, start + cross, at + length)
        return Rect(at, start, at + length, start + cross)


def column(
    *children: Widget,
    gap: float = 6,
    pad: float = 0,
    align: Align = "fill",
    grow: Sequence[Widget] = (),
) -> Line:
    """Return a container with children from top to bottom; gaps in design units."""
    return Line(children, down=True, gap=gap, pad=pad, align=align, grow=grow)


def row(
    *children: Widget,
    gap: float = 6,
    pad: float = 0,
    align: Align = "centre",
    grow: Sequence[Widget] = (),
) -> Line:
    """Return a container with children from left to right; gaps in design units."""
    return Line(children, down=False, gap=gap, pad=pad, align=align, grow=grow)


class Panel(Widget):
    """A filled area with one child inside and a margin of `pad` design units."""

    def __init__(
        self, child: Widget | None = None, *, fill: Colour, pad: float = 0, edge: bool = False
    ) -> None:
        super().__init__(children=() if child is None else (child,))
        self.fill = fill
        self.pad = pad
        self.edge = edge

    def measure(self, ui: Ui) -> tuple[int, int]:
        pad = 2 * ui.px(self.pad) if self.pad else 0
        width, height = self.children[0].size(ui) if self.children else (0, 0)
        return width + pad, height + pad

    def arrange(self, ui: Ui, clip: Rect) -> None:
        for child in self.children:
            child.place(ui, self.bbox.inset(ui.px(self.pad)) if self.pad else self.bbox, clip)

    def paint(self, ui: Ui, canvas: Canvas) -> None:
        canvas.fill(self.bbox, self.fill)
        if self.edge:
            canvas.frame(self.bbox, ui.theme.edge)
        with canvas.on(self.fill):
            super().paint(ui, canvas)


class Sized(Widget):
    """A container that needs a given size; a side of 0 is the child's own."""

    def __init__(self, child: Widget, width: float = 0, height: float = 0) -> None:
        super().__init__(children=(child,))
        self.width = width  # design units
        self.height = height  # design units

    def measure(self, ui: Ui) -> tuple[int, int]:
        width, height = self.children[0].size(ui)
        return (
            ui.px(self.width) if self.width else width,
            ui.px(self.height) if self.height else height,
        )

    def arrange(self, ui: Ui, clip: Rect) -> None:
        self.children[0].place(ui, self.bbox, clip)


class Window(Widget):
    """A title bar and a body; `on_close` gives it a close button."""

    TITLE = 24.0  # design units

    def __init__(
        self,
        body: Widget,
        *,
        title: str = "",
        on_close: EventHandler | None = None,
        name: str = "window",
        title_units: float = TITLE,
        fill: Colour | None = None,
        shadow: bool = False,
    ) -> None:
        self.close = (
            None if on_close is None else TitleButton("close", on_close, name=f"{name}.close")
        )
        super().__init__(name, children=[body] if self.close is None else [body, self.close])
        self.body = body
        self.title = title
        self.title_units = title_units
        self.fill = fill
        self.shadow = shadow

    def measure(self, ui: Ui) -> tuple[int, int]:
        width, height = self.body.size(ui)
        return width + 2, height + ui.px(self.title_units) + 1

    def arrange(self, ui: Ui, clip: Rect) -> None:
        x0, y0, x1, y1 = self.bbox
        bar = ui.px(self.title_units)
        if self.close is not None:
            self.close.place(ui, Rect(x1 - 1 - bar, y0, x1 - 1, y0 + bar), clip)
        self.body.place(ui, Rect(x0 + 1, y0 + bar, x1 - 1, y1 - 1), clip)

    def paint(self, ui: Ui, canvas: Canvas) -> None:
        x0, y0, x1, y1 = self.bbox
        theme, bar = ui.theme, ui.px(self.title_units)
        if self.shadow:
            depth = ui.px(4)
            canvas.fill(Rect(x0 + depth, y0 + depth, x1 + depth, y1 + depth), theme.shadow)
        canvas.fill(self.bbox, self.fill or theme.window)
        canvas.frame(self.bbox, theme.title)
        canvas.fill(Rect(x0, y0, x1, y0 + bar), theme.title)
        if self.title:
            size = ui.text_size
            y = y0 + (bar - line_height(size)) // 2
            title = fit_text(self.title, size, x1 - x0 - bar - ui.px(12))
            canvas.text(x0 + ui.px(8), y, title, size, theme.title_ink, theme.title)
        else:
            side = ui.px(5)
            for i in range(3):
                x, y = x0 + ui.px(6 + 8 * i), y0 + (bar - side) // 2
                canvas.ellipse(Rect(x, y, x + side, y + side), theme.muted, theme.title)
        with canvas.on(self.fill or theme.window):
            super().paint(ui, canvas)


# --- simple widgets -------------------------------------------------------------------------


class Clickable(Widget):
    """A widget that does one thing when it is pressed, or gets Enter or Space."""

    clickable = True
    focusable = True

    def __init__(
        self,
        name: str,
        on_press: EventHandler | None = None,
        *,
        colour: str = "",
        enabled: bool = True,
    ) -> None:
        super().__init__(name, colour=colour)
        self.on_press = on_press
        self.enabled = enabled

    def press(self, ui: Ui, pointer: Pointer) -> None:
        if pointer.button == "left":
            self.activate()

    def key(self, ui: Ui, keys: Sequence[str]) -> bool:
        if list(keys) in (["enter"], ["space"]):
            self.activate()
            return True
        return False

    def activate(self) -> None:
        """Call the handler, unless the widget is disabled."""
        if self.enabled and self.on_press is not None:
            self.on_press()

    def ring(self, ui: Ui, canvas: Canvas) -> None:
        """Mark the keyboard focus."""
        if ui.by_keyboard and ui.focus == self.name:
            canvas.frame(self.bbox, ui.theme.accent, ui.px(1.5))


class TitleButton(Clickable):
    """The close button of a title bar."""

    role = "icon"

    def __init__(self, icon: str, on_press: EventHandler, *, name: str) -> None:
        super().__init__(name, on_press)
        self.icon = icon

    def paint(self, ui: Ui, canvas: Canvas) -> None:
        side = round(self.bbox.height * 0.58)
        canvas.icon(self.icon, self.bbox.centred(side, side), ui.theme.title_ink, ui.theme.title)


class Picture(Widget):
    """An icon as decoration."""

    def __init__(self, icon: str, *, ink: Colour, units: float = 16) -> None:
        super().__init__()
        self.icon = icon
        self.ink = ink
        self.units = units

    def measure(self, ui: Ui) -> tuple[int, int]:
        return ui.px(self.units), ui.px(self.units)

    def paint(self, ui: Ui, canvas: Canvas) -> None:
        canvas.icon(self.icon, self.bbox, self.ink)


class Fill(Widget):
    """A plain area as decoration: a line that stands for text, a colour chip."""

    def __init__(self, fill: Colour, *, radius: float = 0) -> None:
        super().__init__()
        self.fill = fill
        self.radius = radius

    def paint(self, ui: Ui, canvas: Canvas) -> None:
        canvas.rounded(self.bbox, ui.px(self.radius) if self.radius else 0, self.fill)


class Gap(Widget):
    """Empty space of a size in design units, e.g. for `Line.grow`."""

    def __init__(self, width: float = 0, height: float = 0) -> None:
        super().__init__()
        self.width = width
        self.height = height

    def measure(self, ui: Ui) -> tuple[int, int]:
        return round(self.width * ui.scale), round(self.height * ui.scale)


class Label(Widget):
    """One line of text, shortened with dots if it does not fit."""

    def __init__(self, text: str, *, muted: bool = False, size: float = 1.0) -> None:
        super().__init__()
        self.text = text
        self.muted = muted
        self.relative = size  # to the usual text size

    def measure(self, ui: Ui) -> tuple[int, int]:
        size = round(ui.text_size * self.relative)
        return text_width(self.text, size), line_height(size)

    def paint(self, ui: Ui, canvas: Canvas) -> None:
        size = round(ui.text_size * self.relative)
        text = fit_text(self.text, size, self.bbox.width)
        y = self.bbox.y0 + (self.bbox.height - line_height(size)) // 2
        canvas.text(self.bbox.x0, y, text, size, ui.theme.muted if self.muted else ui.theme.ink)
