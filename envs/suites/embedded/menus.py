"""Widgets that open above the others: drop-downs, menus and modal dialogs."""

# ruff: noqa: ARG002, D102 - overrides keep the contract that the base class documents
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from envs.suites.embedded.app import Layer
from envs.suites.embedded.controls import BAR, Button, ScrollView
from envs.suites.embedded.draw import Canvas, Rect, fit_text, line_height, text_width
from envs.suites.embedded.widgets import (
    Clickable,
    EventHandler,
    Gap,
    Panel,
    Pointer,
    Ui,
    Widget,
    Window,
    column,
    row,
)

OPTION = 22.0  # height of one option or entry, design units
LONGEST = 6  # options that are visible at once


class Combo(Clickable):
    """A closed drop-down list; a press opens its options."""

    role = "combo"

    def __init__(
        self,
        name: str,
        value: str,
        options: Sequence[str],
        on_choose: Callable[[str], None],
        *,
        width: float = 120,
    ) -> None:
        super().__init__(name)
        self.value = value
        self.label = value
        self.options = list(options)
        self.on_choose = on_choose
        self.width = width

    def measure(self, ui: Ui) -> tuple[int, int]:
        return ui.px(self.width), ui.px(24)

    def press(self, ui: Ui, pointer: Pointer) -> None:
        if pointer.button == "left":
            ui.opened = self.name
            ui.offsets.pop(f"{self.name}.options", None)

    def key(self, ui: Ui, keys: Sequence[str]) -> bool:
        name = keys[0]
        if len(keys) != 1:
            return False
        if name in ("enter", "space"):
            ui.opened = "" if ui.opened else self.name
        elif name in ("up", "down"):
            at = self.options.index(self.value) if self.value in self.options else -1
            at = min(max(0, at + (1 if name == "down" else -1)), len(self.options) - 1)
            self.on_choose(self.options[at])
        elif name == "escape" and ui.opened:
            ui.opened = ""
        else:
            return False
        return True

    def popup(self, ui: Ui) -> tuple[Widget, Rect] | None:
        options = [
            Option(f"{self.name}.{text}", text, partial(self._choose, ui, text), text == self.value)
            for text in self.options
        ]
        view = ScrollView(f"{self.name}.options", column(*options, gap=0))
        rows = min(len(options), LONGEST)
        height = rows * options[0].size(ui)[1] + 2
        box = self.bbox
        below = box.y1 + height <= ui.height
        top = box.y1 if below else max(0, box.y0 - height)
        root = Panel(view, fill=ui.theme.field, pad=0.4, edge=True)
        return root, Rect(box.x0, top, box.x1, top + height)

    def _choose(self, ui: Ui, text: str) -> None:
        ui.opened = ""
        self.on_choose(text)

    def paint(self, ui: Ui, canvas: Canvas) -> None:
        theme, box, size = ui.theme, self.bbox, ui.text_size
        edge = theme.accent if ui.opened == self.name else theme.edge
        canvas.rounded(box, ui.px(4), theme.field, edge=edge)
        y = box.y0 + (box.height - line_height(size)) // 2
        text = fit_text(self.value, size, box.width - box.height - ui.px(7))
        canvas.text(box.x0 + ui.px(7), y, text, size, theme.ink, theme.field)
        arrow = Rect(box.x1 - box.height, box.y0, box.x1, box.y1).inset(ui.px(7))
        canvas.icon("chevron", arrow, theme.muted, theme.field)
        self.ring(ui, canvas)


class Option(Clickable):
    """One choice of an open drop-down, or one entry of a menu."""

    role = "option"
    focusable = False

    def __init__(
        self,
        name: str,
        label: str,
        on_press: EventHandler,
        selected: bool = False,
        *,
        enabled: bool = True,
    ) -> None:
        super().__init__(name, on_press, enabled=enabled)
        self.label = label
        self.selected = selected

    def measure(self, ui: Ui) -> tuple[int, int]:
        return text_width(self.label, ui.text_size) + 2 * ui.px(10), ui.px(OPTION)

    def paint(self, ui: Ui, canvas: Canvas) -> None:
        theme, box, size = ui.theme, self.bbox, ui.text_size
        ground = theme.select if self.selected else canvas.ground
        if self.selected:
            canvas.fill(box, ground)
        y = box.y0 + (box.height - line_height(size)) // 2
        text = fit_text(self.label, size, box.width - ui.px(12))
        ink = theme.ink if self.enabled else theme.muted
        canvas.text(box.x0 + ui.px(8), y, text, size, ink, ground)


@dataclass(frozen=True)
class Entry:
    """One entry of a menu."""

    name: str
    label: str
    on_press: EventHandler
    enabled: bool = True


class MenuTitle(Clickable):
    """A word of the menu bar that opens a menu."""

    role = "menu"

    def __init__(self, name: str, label: str, entries: Sequence[Entry]) -> None:
        super().__init__(name)
        self.label = label
        self.entries = entries

    def measure(self, ui: Ui) -> tuple[int, int]:
        return text_width(self.label, ui.text_size) + 2 * ui.px(9), ui.px(22)

    def press(self, ui: Ui, pointer: Pointer) -> None:
        ui.opened = self.name

    def key(self, ui: Ui, keys: Sequence[str]) -> bool:
        if list(keys) in (["enter"], ["space"], ["down"]) and not ui.opened:
            ui.opened = self.name
        elif list(keys) == ["escape"] and ui.opened:
            ui.opened = ""
        else:
            return False
        return True

    def popup(self, ui: Ui) -> tuple[Widget, Rect] | None:
        def choose(entry: Entry) -> None:
            ui.opened = ""
            entry.on_press()

        return menu_panel(ui, self.entries, choose, self.bbox.x0, self.bbox.y1)

    def paint(self, ui: Ui, canvas: Canvas) -> None:
        theme, box, size = ui.theme, self.bbox, ui.text_size
        ground = theme.select if ui.opened == self.name else canvas.ground
        canvas.fill(box, ground)
        text = box.centred(text_width(self.label, size), line_height(size))
        canvas.text(text.x0, text.y0, self.label, size, theme.ink, ground)
        self.ring(ui, canvas)


def menu_panel(
    ui: Ui, entries: Sequence[Entry], choose: Callable[[Entry], None], x: int, y: int
) -> tuple[Widget, Rect]:
    """Return the open menu and its rectangle at (x, y), moved if it would leave the screen."""
    options = [
        Option(entry.name, entry.label, partial(choose, entry), enabled=entry.enabled)
        for entry in entries
    ]
    root = Panel(column(*options, gap=0), fill=ui.theme.field, pad=2, edge=True)
    width, height = root.size(ui)
    width += ui.px(BAR)
    x, y = max(0, min(x, ui.width - width)), max(0, min(y, ui.height - height))
    return root, Rect(x, y, x + width, y + height)


def context_menu(
    ui: Ui, entries: Sequence[Entry], at: tuple[int, int], on_close: EventHandler
) -> Layer:
    """Return the layer of a menu at the pointer; any press closes it."""

    def choose(entry: Entry) -> None:
        on_close()
        entry.on_press()

    root, box = menu_panel(ui, entries, choose, *at)
    return Layer(root, box, modal=True, on_outside=on_close, on_escape=on_close)


def dialog(
    ui: Ui,
    name: str,
    title: str,
    body: Widget,
    buttons: Sequence[tuple[str, str, EventHandler]],
    *,
    on_close: EventHandler,
    over: Rect,
) -> Layer:
    """Return the layer of a modal dialog in the middle of `over`; the last of `buttons` is the default.

    `buttons` are (name, label, handler).
    """
    last = len(buttons) - 1
    button_widgets = [
        Button(f"{name}.{key}", label, handler, primary=i == last)
        for i, (key, label, handler) in enumerate(buttons)
    ]
    gap = Gap()
    inner = column(body, row(gap, *button_widgets, grow=[gap]), gap=12, pad=12)
    window = Window(inner, title=title, on_close=on_close, name=name, fill=ui.theme.panel)
    width, height = window.size(ui)
    width = min(max(width, ui.px(190)), ui.width)
    box = over.centred(width, height)
    x = max(0, min(box.x0, ui.width - width))
    y = max(0, min(box.y0, ui.height - height))
    placed = Rect(x, y, x + width, y + height)
    return Layer(
        window,
        placed,
        modal=True,
        dims=True,
        on_escape=on_close,
        on_enter=buttons[last][2] if buttons else None,
    )
