"""A scrolling view with its bar, and the rows of a list."""

# ruff: noqa: ARG002, D102 - overrides keep the contract that the base class documents
from __future__ import annotations

from collections.abc import Callable, Sequence

from envs.embedded.draw import Canvas, Rect, fit_text, line_height
from envs.embedded.theme import Colour
from envs.embedded.widgets import Clickable, EventHandler, Pointer, Ui, Widget

NOTCH = 66.0  # design units that one notch of the wheel moves
BAR = 12.0  # design units


class ScrollView(Widget):
    """Shows a part of its child; `ui.offsets[name]` is how far down, in pixels."""

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
        self.height = height  # design units that it wants
        self.width = width
        self.content = 0  # height of the child, pixels

    def measure(self, ui: Ui) -> tuple[int, int]:
        width = ui.px(self.width) if self.width else self.child.size(ui)[0] + ui.px(BAR)
        return width, ui.px(self.height)

    def limit(self) -> int:
        """The largest offset."""
        return max(0, self.content - self.bbox.height)

    def move(self, ui: Ui, offset: int) -> None:
        """Scroll so that `offset` pixels of the child are above the window."""
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
    """The bar of a view: a press beside the thumb scrolls a page, a drag moves it along."""

    role = "scrollbar"
    clickable = True

    def __init__(self, name: str, view: ScrollView) -> None:
        super().__init__(name)
        self.view = view

    def thumb(self, ui: Ui) -> Rect:
        """Where the thumb is."""
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
