"""An editable line of text with caret, selection and clipboard."""

# ruff: noqa: D102 - overrides keep the contract that the base class documents
from __future__ import annotations

from collections.abc import Callable, Sequence

from envs.suites.embedded.draw import Canvas, Rect, fit_text, line_height, text_width
from envs.suites.embedded.widgets import Clickable, EventHandler, Pointer, Ui

MAX_LENGTH = 200  # characters


class TextField(Clickable):
    """A text in a box. Its caret and the other end of its selection are `ui.caret` and `ui.anchor`."""

    role = "field"

    def __init__(
        self,
        name: str,
        value: str,
        on_change: Callable[[str], None],
        *,
        width: float = 150,
        hint: str = "",
        secret: bool = False,
        on_enter: EventHandler | None = None,
    ) -> None:
        super().__init__(name)
        self.value = value
        self.label = hint
        self.on_change = on_change
        self.on_enter = on_enter
        self.width = width
        self.secret = secret

    # --- editing ----------------------------------------------------------------------------

    def selection(self, ui: Ui) -> tuple[int, int]:
        """Return the first selected position and one past the last; they are equal if nothing is selected."""
        length = len(self.value)
        caret, anchor = min(ui.caret, length), min(ui.anchor, length)
        return min(caret, anchor), max(caret, anchor)

    def write(self, ui: Ui, text: str) -> bool:
        start, end = self.selection(ui)
        clean = "".join(character for character in text if character.isprintable())
        self._set(ui, self.value[:start] + clean + self.value[end:], start + len(clean))
        return True

    def key(self, ui: Ui, keys: Sequence[str]) -> bool:
        shift = "shift" in keys
        control = "ctrl" in keys or "cmd" in keys
        name = keys[-1].lower()
        if control:
            return self._command(ui, name)
        start, end = self.selection(ui)
        caret = min(ui.caret, len(self.value))
        if name == "enter" and self.on_enter is not None:
            self.on_enter()
        elif name == "space":
            self.write(ui, " ")
        elif name == "backspace":
            start = max(0, start - 1) if start == end else start
            self._set(ui, self.value[:start] + self.value[end:], start)
        elif name == "delete":
            end = end + 1 if start == end else end
            self._set(ui, self.value[:start] + self.value[end:], start)
        elif name == "left":
            self._move(ui, start if start != end and not shift else caret - 1, shift)
        elif name == "right":
            self._move(ui, end if start != end and not shift else caret + 1, shift)
        elif name in ("home", "up"):
            self._move(ui, 0, shift)
        elif name in ("end", "down"):
            self._move(ui, len(self.value), shift)
        elif shift and len(name) == 1:
            self.write(ui, keys[-1].upper())
        else:
            return False
        return True

    def focused(self, ui: Ui) -> None:
        ui.anchor, ui.caret = 0, len(self.value)

    def _command(self, ui: Ui, name: str) -> bool:
        start, end = self.selection(ui)
        if name == "a":
            ui.anchor, ui.caret = 0, len(self.value)
        elif name in ("c", "x"):
            if start != end and not self.secret:
                ui.clipboard = self.value[start:end]
                if name == "x":
                    self._set(ui, self.value[:start] + self.value[end:], start)
        elif name == "v":
            self.write(ui, ui.clipboard)
        else:
            return False
        return True

    def _set(self, ui: Ui, value: str, caret: int) -> None:
        self.value = value[:MAX_LENGTH]
        ui.caret = ui.anchor = min(caret, len(self.value))
        self.on_change(self.value)

    def _move(self, ui: Ui, caret: int, keep_anchor: bool) -> None:
        ui.caret = min(max(0, caret), len(self.value))
        if not keep_anchor:
            ui.anchor = ui.caret

    # --- the mouse --------------------------------------------------------------------------

    def press(self, ui: Ui, pointer: Pointer) -> None:
        at = self._at(ui, pointer.x)
        if pointer.triple:
            ui.anchor, ui.caret = 0, len(self.value)
        elif pointer.double:
            ui.anchor, ui.caret = self._word(at)
        elif "shift" in pointer.modifiers:
            ui.caret = at
        else:
            ui.caret = ui.anchor = at

    def drag(self, ui: Ui, path: Sequence[tuple[int, int]]) -> None:
        ui.focus = self.name
        ui.anchor, ui.caret = self._at(ui, path[0][0]), self._at(ui, path[-1][0])

    def _at(self, ui: Ui, x: int) -> int:
        """Return the caret position nearest to `x`."""
        text, first = self._visible_text(ui)
        left = self.bbox.x0 + ui.px(6)
        widths = [text_width(text[:i], ui.text_size) for i in range(len(text) + 1)]
        nearest = min(range(len(widths)), key=lambda i: abs(left + widths[i] - x))
        return first + nearest

    def _word(self, at: int) -> tuple[int, int]:
        """Return the ends of the word at position `at`."""
        start = end = at
        while start > 0 and self.value[start - 1].isalnum():
            start -= 1
        while end < len(self.value) and self.value[end].isalnum():
            end += 1
        return start, end

    # --- looks ------------------------------------------------------------------------------

    def measure(self, ui: Ui) -> tuple[int, int]:
        return ui.px(self.width), ui.px(24)

    def _visible_text(self, ui: Ui) -> tuple[str, int]:
        """Return the visible part of the text and its first position; the caret is always visible."""
        text = "•" * len(self.value) if self.secret else self.value
        room = self.bbox.width - 2 * ui.px(6)
        caret = min(ui.caret, len(text)) if ui.focus == self.name else 0
        first = 0
        while first < caret and text_width(text[first:caret], ui.text_size) > room:
            first += 1
        last = len(text)
        while last > max(caret, first) and text_width(text[first:last], ui.text_size) > room:
            last -= 1
        return text[first:last], first

    def paint(self, ui: Ui, canvas: Canvas) -> None:
        theme, box, size = ui.theme, self.bbox, ui.text_size
        here = ui.focus == self.name
        canvas.rounded(box, ui.px(4), theme.field, edge=theme.accent if here else theme.edge)
        x, y = box.x0 + ui.px(6), box.y0 + (box.height - line_height(size)) // 2
        if not self.value and not here:
            hint = fit_text(self.label, size, box.x1 - x - ui.px(6))
            canvas.text(x, y, hint, size, theme.muted, theme.field)
        text, first = self._visible_text(ui)
        canvas.text(x, y, text, size, theme.ink, theme.field)
        if not here:
            return
        start, end = (min(max(at - first, 0), len(text)) for at in self.selection(ui))
        if start != end:
            left = x + text_width(text[:start], size)
            part = text[start:end]
            area = Rect(left, y, left + text_width(part, size), y + line_height(size))
            canvas.fill(area, theme.select)
            canvas.text(left, y, part, size, theme.ink, theme.select)
        caret = min(max(ui.caret - first, 0), len(text))
        left = x + text_width(text[:caret], size)
        canvas.fill(Rect(left, y, left + max(1, ui.px(1.2)), y + line_height(size)), theme.accent)
