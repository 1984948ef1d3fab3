"""Widgets without letters, for policies that cannot read: they show colours, icons and shapes."""

# ruff: noqa: D102 - overrides keep the contract that the base class documents
from __future__ import annotations

from collections.abc import Callable

from envs.suites.embedded.draw import Canvas, Rect, line_height, text_width
from envs.suites.embedded.theme import COLOURS, Colour
from envs.suites.embedded.widgets import Clickable, EventHandler, Ui, Widget


class ColourButton(Clickable):
    """A plain button of one of COLOURS."""

    role = "button"

    def __init__(
        self, name: str, colour: str, on_press: EventHandler, *, radius: float = 6
    ) -> None:
        super().__init__(name, on_press, colour=colour)
        self.radius = radius

    def paint(self, ui: Ui, canvas: Canvas) -> None:
        canvas.rounded(self.bbox, ui.px(self.radius), COLOURS[self.colour])


class Swatch(ColourButton):
    """One choice of a list of colours."""

    role = "swatch"


class IconButton(Clickable):
    """A neutral button that shows an icon, or a short text instead."""

    role = "icon"

    def __init__(
        self,
        name: str,
        icon: str,
        on_press: EventHandler | None = None,
        *,
        enabled: bool = True,
        text: str = "",
    ) -> None:
        super().__init__(name, on_press, enabled=enabled)
        self.icon = icon
        self.text = text

    def measure(self, ui: Ui) -> tuple[int, int]:
        return ui.px(28), ui.px(28)

    def paint(self, ui: Ui, canvas: Canvas) -> None:
        theme = ui.theme
        fill = theme.control if self.enabled else theme.edge
        canvas.rounded(self.bbox, ui.px(5), fill)
        if self.text:
            size = ui.px(16)
            box = self.bbox.centred(text_width(self.text, size), line_height(size))
            canvas.text(box.x0, box.y0, self.text, size, theme.control_ink, fill)
        else:
            side = round(min(self.bbox.width, self.bbox.height) * 0.64)
            canvas.icon(self.icon, self.bbox.centred(side, side), theme.control_ink, fill)
        self.ring(ui, canvas)


class ColourBox(Clickable):
    """A check box of one of COLOURS: hollow, or filled with a check mark."""

    role = "box"

    def __init__(self, name: str, colour: str, checked: bool, on_press: EventHandler) -> None:
        super().__init__(name, on_press, colour=colour)
        self.checked = checked

    def paint(self, ui: Ui, canvas: Canvas) -> None:
        colour = COLOURS[self.colour]
        canvas.rounded(self.bbox, ui.px(4), colour)
        if self.checked:
            canvas.icon("check", self.bbox.inset(ui.px(3)), ui.theme.field, colour)
        else:
            canvas.fill(self.bbox.inset(ui.px(6)), ui.theme.field)


class Glyph(Clickable):
    """An icon that can be pressed and selected: a file, a folder."""

    def __init__(
        self,
        name: str,
        icon: str,
        on_press: EventHandler,
        *,
        ink: Colour,
        colour: str = "",
        selected: bool = False,
    ) -> None:
        super().__init__(name, on_press, colour=colour)
        self.role = icon
        self.icon = icon
        self.ink = ink
        self.selected = selected

    def paint(self, ui: Ui, canvas: Canvas) -> None:
        ground = canvas.ground
        if self.selected:
            ground = ui.theme.select
            canvas.rounded(self.bbox, ui.px(4), ground, edge=ui.theme.accent)
        side = min(self.bbox.width, self.bbox.height) - ui.px(4)
        canvas.icon(self.icon, self.bbox.centred(side, side), self.ink, ground)


class ShapeTab(Clickable):
    """A shape on a tab strip."""

    role = "tab"

    def __init__(self, shape: str, on_press: EventHandler, *, active: bool) -> None:
        super().__init__(f"{shape}.tab", on_press)
        self.shape = shape
        self.active = active

    def paint(self, ui: Ui, canvas: Canvas) -> None:
        ground = ui.theme.window if self.active else ui.theme.panel
        canvas.fill(self.bbox, ground)
        side = ui.px(18)
        ink = ui.theme.ink if self.active else ui.theme.muted
        canvas.icon(self.shape, self.bbox.centred(side, side), ink, ground)


class ColourCombo(Clickable):
    """A closed drop-down list that shows its colour."""

    role = "list"

    def __init__(self, name: str, value: Colour, on_press: EventHandler) -> None:
        super().__init__(name, on_press)
        self.value = value

    def paint(self, ui: Ui, canvas: Canvas) -> None:
        theme, box = ui.theme, self.bbox
        canvas.rounded(box, ui.px(4), theme.field, edge=theme.ink)
        arrow = Rect(box.x1 - box.height, box.y0, box.x1, box.y1)
        pad = ui.px(6)
        canvas.fill(Rect(box.x0 + pad, box.y0 + pad, arrow.x0, box.y1 - pad), self.value)
        canvas.icon("chevron", arrow.inset(ui.px(7)), theme.ink, theme.field)


class Wheel(Widget):
    """An area that calls `on_scroll` when the wheel turns."""

    scrollable = True

    def __init__(self, child: Widget, on_scroll: Callable[[int], None]) -> None:
        super().__init__(children=[child])
        self.on_scroll = on_scroll

    def arrange(self, ui: Ui, clip: Rect) -> None:
        self.children[0].place(ui, self.bbox, clip)

    def scroll(self, ui: Ui, notches: int) -> bool:  # noqa: ARG002
        self.on_scroll(notches)
        return True
