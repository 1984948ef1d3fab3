"""Labelled controls: buttons, check boxes, radios, toggles, tabs, sliders, scrolling views, list rows.

Text entry is in textfield.py, drop-downs and menus in menus.py.
"""

# ruff: noqa: ARG002, D102 - overrides keep the contract that the base class documents
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from envs.suites.embedded.draw import Canvas, Rect, fit_text, line_height, text_width
from envs.suites.embedded.theme import Colour
from envs.suites.embedded.widgets import Clickable, EventHandler, Line, Pointer, Ui, Widget, row

CONTROL_HEIGHT = 24.0  # design units


class Button(Clickable):
    """A push button with a label; the primary one of a dialog is filled."""

    role = "button"

    def __init__(
        self,
        name: str,
        label: str,
        on_press: EventHandler,
        *,
        primary: bool = False,
        enabled: bool = True,
        pad: float = 10,
    ) -> None:
        super().__init__(name, on_press, enabled=enabled)
        self.label = label
        self.primary = primary
        self.pad = pad  # design units to the left and right of the label

    def measure(self, ui: Ui) -> tuple[int, int]:
        width = text_width(self.label, ui.text_size) + 2 * ui.px(self.pad)
        return width, ui.px(CONTROL_HEIGHT)

    def paint(self, ui: Ui, canvas: Canvas) -> None:
        theme = ui.theme
        fill, ink, edge = theme.field, theme.ink, theme.edge
        if not self.enabled:
            fill, ink = theme.panel, theme.muted
        elif self.primary:
            fill, ink, edge = theme.accent, theme.accent_ink, theme.accent
        canvas.rounded(self.bbox, ui.px(5), fill, edge=edge)
        size = ui.text_size
        text = fit_text(self.label, size, self.bbox.width - ui.px(4))
        box = self.bbox.centred(text_width(text, size), line_height(size))
        canvas.text(box.x0, box.y0, text, size, ink, fill)
        self.ring(ui, canvas)


class Marked(Clickable):
    """A control that shows a mark on the left and a label to the right of it."""

    def __init__(self, name: str, label: str, on: bool, on_press: EventHandler) -> None:
        super().__init__(name, on_press)
        self.label = label
        self.is_on = on

    def mark_width(self, ui: Ui) -> int:
        """Return the width of the mark, pixels."""
        return ui.px(16)

    def measure(self, ui: Ui) -> tuple[int, int]:
        text = text_width(self.label, ui.text_size)
        width = self.mark_width(ui) + (ui.px(7) + text + ui.px(4) if self.label else 0)
        return width, ui.px(22)

    def mark(self, ui: Ui, canvas: Canvas, box: Rect) -> None:
        """Draw the mark into `box`."""

    def paint(self, ui: Ui, canvas: Canvas) -> None:
        box, width, side = self.bbox, self.mark_width(ui), ui.px(16)
        top = box.y0 + (box.height - side) // 2
        self.mark(ui, canvas, Rect(box.x0, top, box.x0 + width, top + side))
        if self.label:
            size = ui.text_size
            x, y = box.x0 + width + ui.px(7), box.y0 + (box.height - line_height(size)) // 2
            canvas.text(x, y, fit_text(self.label, size, box.x1 - x), size, ui.theme.ink)
        self.ring(ui, canvas)


class CheckBox(Marked):
    """A box that is ticked or not."""

    role = "checkbox"

    def mark(self, ui: Ui, canvas: Canvas, box: Rect) -> None:
        theme = ui.theme
        if self.is_on:
            canvas.rounded(box, ui.px(4), theme.accent)
            canvas.icon("check", box.inset(ui.px(2)), theme.accent_ink, theme.accent)
        else:
            canvas.rounded(box, ui.px(4), theme.field, edge=theme.muted)


class Radio(Marked):
    """One of several choices, of which only one is on."""

    role = "radio"

    def mark(self, ui: Ui, canvas: Canvas, box: Rect) -> None:
        theme = ui.theme
        if self.is_on:
            canvas.ellipse(box, theme.accent)
            canvas.icon("circle", box.inset(ui.px(5)), theme.accent_ink, theme.accent)
        else:
            canvas.icon("ring", box, theme.muted)


class Toggle(Marked):
    """A switch."""

    role = "toggle"

    def mark_width(self, ui: Ui) -> int:
        return ui.px(30)

    def mark(self, ui: Ui, canvas: Canvas, box: Rect) -> None:
        theme = ui.theme
        ground = theme.accent if self.is_on else theme.edge
        canvas.rounded(box, box.height // 2, ground)
        side = box.height - 2 * ui.px(2)
        x = box.x1 - ui.px(2) - side if self.is_on else box.x0 + ui.px(2)
        y = box.y0 + (box.height - side) // 2
        ink = theme.accent_ink if self.is_on else theme.field
        canvas.ellipse(Rect(x, y, x + side, y + side), ink, ground)


def radios(
    name: str, options: Sequence[str], value: str, on_choose: Callable[[str], None]
) -> list[Widget]:
    """Return a radio button for each option, named `name.option`."""
    return [
        Radio(f"{name}.{option}", option, option == value, partial(on_choose, option))
        for option in options
    ]


class TextTab(Clickable):
    """One label of a tab strip."""

    role = "tab"

    def __init__(self, name: str, label: str, on_press: EventHandler, *, active: bool) -> None:
        super().__init__(name, on_press)
        self.label = label
        self.active = active

    def measure(self, ui: Ui) -> tuple[int, int]:
        return text_width(self.label, ui.text_size) + 2 * ui.px(11), ui.px(26)

    def paint(self, ui: Ui, canvas: Canvas) -> None:
        theme, box, size = ui.theme, self.bbox, ui.text_size
        fill = theme.window if self.active else theme.panel
        canvas.fill(box, fill)
        if self.active:
            canvas.fill(Rect(box.x0, box.y0, box.x1, box.y0 + ui.px(2)), theme.accent)
        text = box.centred(text_width(self.label, size), line_height(size))
        canvas.text(
            text.x0, text.y0, self.label, size, theme.ink if self.active else theme.muted, fill
        )
        self.ring(ui, canvas)


def tabs(name: str, labels: Sequence[str], active: str, on_go: Callable[[str], None]) -> Line:
    """Return a strip of tabs, named `name.label`."""
    return row(
        *(
            TextTab(f"{name}.{label}", label, partial(on_go, label), active=label == active)
            for label in labels
        ),
        gap=0,
    )


class NavItem(Clickable):
    """One entry of a side bar."""

    role = "item"

    def __init__(self, name: str, label: str, on_press: EventHandler, *, active: bool) -> None:
        super().__init__(name, on_press)
        self.label = label
        self.active = active

    def measure(self, ui: Ui) -> tuple[int, int]:
        return text_width(self.label, ui.text_size) + 2 * ui.px(10), ui.px(24)

    def paint(self, ui: Ui, canvas: Canvas) -> None:
        theme, box, size = ui.theme, self.bbox, ui.text_size
        fill: Colour = theme.accent if self.active else canvas.ground
        if self.active:
            canvas.rounded(box, ui.px(5), fill)
        y = box.y0 + (box.height - line_height(size)) // 2
        ink = theme.accent_ink if self.active else theme.ink
        text = fit_text(self.label, size, box.width - ui.px(14))
        canvas.text(box.x0 + ui.px(10), y, text, size, ink, fill)
        self.ring(ui, canvas)


class Slider(Clickable):
    """A knob on a track; a press or a drag moves it to the pointer."""

    role = "slider"

    def __init__(
        self,
        name: str,
        value: int,
        on_change: Callable[[int], None],
        *,
        low: int = 0,
        high: int = 100,
        step: int = 10,
        width: float = 150,
    ) -> None:
        super().__init__(name)
        self.value = value
        self.on_change = on_change
        self.low = low
        self.high = high
        self.step = step
        self.width = width

    def measure(self, ui: Ui) -> tuple[int, int]:
        return ui.px(self.width), ui.px(22)

    def _track(self, ui: Ui) -> tuple[int, int]:
        """Return x of the knob's middle at the lowest and at the highest value."""
        radius = ui.px(7)
        return self.bbox.x0 + radius, self.bbox.x1 - radius

    def x_of(self, ui: Ui, value: int) -> int:
        """Return x of the knob's middle at `value`."""
        left, right = self._track(ui)
        return left + round((right - left) * (value - self.low) / (self.high - self.low))

    def value_at(self, ui: Ui, x: int) -> int:
        """Return the value whose place is nearest to `x`."""
        left, right = self._track(ui)
        share = (min(max(x, left), right) - left) / max(1, right - left)
        return self.low + round(share * (self.high - self.low) / self.step) * self.step

    def press(self, ui: Ui, pointer: Pointer) -> None:
        if pointer.button == "left":
            self.on_change(self.value_at(ui, pointer.x))

    def drag(self, ui: Ui, path: Sequence[tuple[int, int]]) -> None:
        self.on_change(self.value_at(ui, path[-1][0]))

    def key(self, ui: Ui, keys: Sequence[str]) -> bool:
        step = {"left": -1, "down": -1, "right": 1, "up": 1}.get(keys[0], 0) * self.step
        goal = {"home": self.low, "end": self.high}.get(keys[0], self.value + step)
        if len(keys) != 1 or goal == self.value:
            return False
        self.on_change(min(max(goal, self.low), self.high))
        return True

    def paint(self, ui: Ui, canvas: Canvas) -> None:
        theme, box, radius = ui.theme, self.bbox, ui.px(7)
        middle, half = (box.y0 + box.y1) // 2, max(1, ui.px(2))
        left, right = self._track(ui)
        x = self.x_of(ui, self.value)
        canvas.fill(Rect(left, middle - half, right, middle + half), theme.edge)
        canvas.fill(Rect(left, middle - half, x, middle + half), theme.accent)
        canvas.ellipse(Rect(x - radius, middle - radius, x + radius, middle + radius), theme.accent)
        self.ring(ui, canvas)


class Key(Button):
    """A big key, as on a calculator."""

    def measure(self, ui: Ui) -> tuple[int, int]:
        return ui.px(44), ui.px(34)


NOTCH = 66.0  # design units that one notch of the wheel moves
BAR = 12.0  # design units


class ScrollView(Widget):
    """A view of a part of its child, which begins `ui.offsets[name]` pixels below the child's top."""

    scrollable = True

    def __init__(
        self,
        name: str,
        child: Widget,
        *,
        height: float = 60,
        width: float = 0,
        fill: Colour | None = None,
    ) -> None:
        super().__init__(name)
        self.fill = fill
        self.child = child
        self.bar = ScrollBar(f"{name}.bar", self)
        self.height = height  # design units that it needs
        self.width = width
        self.content = 0  # height of the child, pixels

    def measure(self, ui: Ui) -> tuple[int, int]:
        width = ui.px(self.width) if self.width else self.child.size(ui)[0] + ui.px(BAR)
        return width, ui.px(self.height)

    def limit(self) -> int:
        """Return the largest offset."""
        return max(0, self.content - self.bbox.height)

    def move(self, ui: Ui, offset: int) -> None:
        """Scroll so that `offset` pixels of the child are above the view."""
        ui.offsets[self.name] = min(max(0, offset), self.limit())

    def arrange(self, ui: Ui, clip: Rect) -> None:
        self.content = self.child.size(ui)[1]
        box, limit = self.bbox, self.limit()
        offset = min(max(0, ui.offsets.get(self.name, 0)), limit)
        right = box.x1 - (ui.px(BAR) if limit else 0)
        inner = Rect(box.x0, box.y0, right, box.y1)
        top = box.y0 - offset
        self.child.place(ui, Rect(box.x0, top, right, top + self.content), inner.cut(clip))
        self.children = [self.child]
        if limit:
            self.bar.place(ui, Rect(right, box.y0, box.x1, box.y1), clip)
            self.children.append(self.bar)

    def scroll(self, ui: Ui, notches: int) -> bool:
        if not self.limit():
            return False
        self.move(ui, ui.offsets.get(self.name, 0) + notches * ui.px(NOTCH))
        return True

    def paint(self, ui: Ui, canvas: Canvas) -> None:
        ground = self.fill or canvas.ground
        if self.fill is not None:
            canvas.fill(self.bbox, ground)
        with canvas.on(ground):
            if self.limit():
                with canvas.clip(self.bbox) as inner:
                    self.child.paint(ui, inner)
                self.bar.paint(ui, canvas)
            else:
                self.child.paint(ui, canvas)


class ScrollBar(Widget):
    """The scroll bar of a view: a press beside the thumb scrolls by a page, a drag moves the thumb."""

    role = "scrollbar"
    clickable = True

    def __init__(self, name: str, view: ScrollView) -> None:
        super().__init__(name)
        self.view = view

    def thumb(self, ui: Ui) -> Rect:
        """Return the rectangle of the thumb."""
        box, view = self.bbox, self.view
        length = max(ui.px(14), box.height * box.height // max(1, view.content))
        room, limit = box.height - length, max(1, view.limit())
        top = box.y0 + room * min(ui.offsets.get(view.name, 0), limit) // limit
        return Rect(box.x0, top, box.x1, top + length)

    def press(self, ui: Ui, pointer: Pointer) -> None:
        thumb = self.thumb(ui)
        page = self.bbox.height - ui.px(22)
        step = page if pointer.y >= thumb.y1 else -page if pointer.y < thumb.y0 else 0
        self.view.move(ui, ui.offsets.get(self.view.name, 0) + step)

    def drag(self, ui: Ui, path: Sequence[tuple[int, int]]) -> None:
        thumb = self.thumb(ui)
        if not thumb.contains(*path[0]):
            return
        room = max(1, self.bbox.height - thumb.height)
        moved = (path[-1][1] - path[0][1]) * self.view.limit() // room
        self.view.move(ui, ui.offsets.get(self.view.name, 0) + moved)

    def paint(self, ui: Ui, canvas: Canvas) -> None:
        canvas.fill(self.bbox, ui.theme.panel)
        pad = max(1, ui.px(3))
        canvas.fill(self.thumb(ui).inset(pad, 1), ui.theme.muted)


class ListRow(Clickable):
    """One line of a list: an icon, a text, and a note on the right."""

    role = "row"

    def __init__(
        self,
        name: str,
        label: str,
        on_select: EventHandler,
        *,
        note: str = "",
        icon: str = "",
        selected: bool = False,
        on_open: EventHandler | None = None,
        on_menu: Callable[[int, int], None] | None = None,
        on_drop: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(name, on_select)
        self.label = label
        self.note = note
        self.icon = icon
        self.selected = selected
        self.on_open = on_open
        self.on_menu = on_menu
        self.on_drop = on_drop

    def measure(self, ui: Ui) -> tuple[int, int]:
        return ui.px(120), ui.px(22)

    def press(self, ui: Ui, pointer: Pointer) -> None:
        if pointer.button == "right" and self.on_menu is not None:
            self.activate()
            self.on_menu(pointer.x, pointer.y)
        elif pointer.button == "left" and pointer.double and self.on_open is not None:
            self.on_open()
        elif pointer.button == "left":
            self.activate()

    def key(self, ui: Ui, keys: Sequence[str]) -> bool:
        if list(keys) == ["enter"] and self.on_open is not None:
            self.on_open()
            return True
        return super().key(ui, keys)

    def drop(self, ui: Ui, dragged: str) -> bool:
        if self.on_drop is None:
            return False
        self.on_drop(dragged)
        return True

    def paint(self, ui: Ui, canvas: Canvas) -> None:
        theme, box, size = ui.theme, self.bbox, ui.text_size
        ground = theme.select if self.selected else canvas.ground
        if self.selected:
            canvas.fill(box, ground)
        x, y = box.x0 + ui.px(7), box.y0 + (box.height - line_height(size)) // 2
        if self.icon:
            side = ui.px(15)
            top = box.y0 + (box.height - side) // 2
            ink = theme.accent if self.icon == "folder" else theme.muted
            canvas.icon(self.icon, Rect(x, top, x + side, top + side), ink, ground)
            x += side + ui.px(7)
        right = box.x1 - ui.px(6)
        if self.note:
            left = max(x, box.x0 + box.width * 2 // 3)
            note = fit_text(self.note, size, right - left)
            canvas.text(left, y, note, size, theme.muted, ground)
            right = left - ui.px(6)
        canvas.text(x, y, fit_text(self.label, size, right - x), size, theme.ink, ground)
        self.ring(ui, canvas)
