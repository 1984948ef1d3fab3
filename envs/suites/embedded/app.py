"""Layers of widgets, and how events are dispatched to them.

A scene returns its layers, bottom to top; the open pop-up of a widget is one more. The topmost layer under
the pointer gets the event. A modal layer blocks the layers beneath it; a pop-up closes when something else
is pressed. After each event the layers are built again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast, get_args

from envs.contract.actions import (
    Action,
    Click,
    DoubleClick,
    Drag,
    KeyDown,
    KeyPress,
    KeyUp,
    Modifier,
    MouseButton,
    MouseDown,
    MouseUp,
    Move,
    Scroll,
    TripleClick,
    Type,
)
from envs.suites.embedded.draw import Canvas, Rect
from envs.suites.embedded.widgets import EventHandler, Pointer, Ui, Widget
from envs.tools.inputs import canonical

MAX_TYPED = 1000  # characters of one Type action that are used


@dataclass(frozen=True)
class Layer:
    """A widget tree at a place on the screen."""

    root: Widget
    box: Rect
    modal: bool = False  # blocks the layers beneath it
    dims: bool = False  # darkens the layers beneath it
    on_outside: EventHandler | None = None  # for a press outside of it
    on_escape: EventHandler | None = None
    on_enter: EventHandler | None = None  # for an Enter that nothing else handles


@dataclass(frozen=True)
class WidgetInfo:
    """A widget that can be seen and reached now."""

    role: str  # button, icon, box, file, ...
    name: str  # unique on the screen
    colour: str  # of theme.COLOURS; empty if it has none
    label: str  # the text on it; empty if it has none
    bbox: Rect  # its visible part, pixels

    @property
    def centre(self) -> tuple[int, int]:
        """The pixel to click."""
        return self.bbox.centre


class App:
    """A screen of layers: it dispatches actions to them and paints them."""

    def __init__(self, ui: Ui, layers: Callable[[], list[Layer]]) -> None:
        self.ui = ui
        self._build = layers
        self.layers: list[Layer] = []
        self._pointer = (0, 0)
        # Button that is down -> the path of the pointer since then.
        self._pressed: dict[MouseButton, list[tuple[int, int]]] = {}
        self._keys_down: list[str] = []  # keys that are down, in the order of their presses
        self.refresh()

    def refresh(self) -> None:
        """Build and place the layers of the present state."""
        screen = Rect(0, 0, self.ui.width, self.ui.height)
        self.layers = self._build()
        for layer in self.layers:
            layer.root.place(self.ui, layer.box, screen)
        opened = self.find(self.ui.opened) if self.ui.opened else None
        popup = opened.popup(self.ui) if opened is not None else None
        if popup is None:
            self.ui.opened = ""
        else:
            root, box = popup
            root.place(self.ui, box, screen)
            close = self._close_popup
            self.layers.append(Layer(root, box, modal=True, on_outside=close, on_escape=close))

    def paint(self) -> Canvas:
        """Return the present screen."""
        ui = self.ui
        canvas = Canvas.blank(ui.width, ui.height, ui.palette, ui.theme.wall)
        for layer in self.layers:
            if layer.dims:
                canvas.dim()
            layer.root.paint(ui, canvas)
        return canvas

    # --- widgets ----------------------------------------------------------------------------

    def find(self, name: str) -> Widget | None:
        """Return the widget of that name in the topmost layer that has it, reachable or not."""
        for layer in reversed(self.layers):
            for widget in layer.root.walk():
                if widget.name == name:
                    return widget
        return None

    def see(self, name: str) -> WidgetInfo | None:
        """Return the widget of that name, if a click on the middle of its visible part reaches it."""
        for layer in reversed(self.layers):
            for widget in layer.root.walk():
                if widget.name == name and self.reaches(widget):
                    return _info(widget)
            if layer.modal:
                return None
        return None

    def widgets(self) -> list[WidgetInfo]:
        """Return all widgets that have a role and can be reached now."""
        infos = []
        for layer in reversed(self.layers):
            infos += [
                _info(widget)
                for widget in layer.root.walk()
                if widget.role and widget.clickable and self.reaches(widget)
            ]
            if layer.modal:
                break
        return infos

    def reaches(self, widget: Widget) -> bool:
        """Return True if a click on the middle of the visible part reaches the widget."""
        if widget.visible.width <= 0 or widget.visible.height <= 0:
            return False
        return widget in self.path(*widget.visible.centre)

    def path(self, x: int, y: int) -> list[Widget]:
        """Return the widgets at (x, y) from a layer's root inwards; empty if none can be reached."""
        layer = self._layer_at(x, y)
        return layer.root.path_to(x, y) if layer is not None else []

    def _layer_at(self, x: int, y: int) -> Layer | None:
        for layer in reversed(self.layers):
            if layer.box.contains(x, y) or layer.modal:
                return layer
        return None

    # --- events -----------------------------------------------------------------------------

    def dispatch(self, action: Action) -> None:
        """Perform one action; an action that hits nothing changes nothing.

        Widgets get whole presses and drags, so that a button that goes down acts when it goes up again.
        """
        match action:
            case Click():
                self._point(action.x, action.y)
                self._press(self._at(action.button, action.modifiers))
            case DoubleClick() | TripleClick():
                self._point(action.x, action.y)
                self._repeat(2 if isinstance(action, DoubleClick) else 3, action.modifiers)
            case Drag():
                self._point(*action.path[-1])
                self._drag(action.path, action.button)
            case MouseDown():
                self._point(action.x, action.y)
                self._pressed.setdefault(action.button, [self._pointer])
            case MouseUp():
                self._point(action.x, action.y)
                self._release(action.button)
            case Scroll():
                self._point(action.x, action.y)
                self._scroll(action)
            case Type():
                self._type(action.text[:MAX_TYPED])
            case KeyPress():
                keys = [canonical(key) for key in action.keys]
                self._key([*(key for key in self._modifiers() if key not in keys), *keys])
            case KeyDown():
                self._key_down(canonical(action.key))
            case KeyUp(key=key) if canonical(key) in self._keys_down:
                self._keys_down.remove(canonical(key))
            case Move():
                self._point(action.x, action.y)
            case _:
                return
        self.refresh()

    # --- buttons and keys that are down, and the pointer ---

    def _point(self, x: int | None, y: int | None) -> None:
        """Move the pointer, if a point is given, and add its place to the paths of the pressed buttons."""
        if x is not None and y is not None:
            self._pointer = (x, y)
        for path in self._pressed.values():
            path.append(self._pointer)

    def _at(self, button: MouseButton, modifiers: Sequence[Modifier] = ()) -> Pointer:
        """Return a press at the pointer, with `modifiers` and those keys that are down."""
        modifiers_down = frozenset(cast("Modifier", key) for key in self._modifiers())
        return Pointer(*self._pointer, button, modifiers=modifiers_down | {*modifiers})

    def _release(self, button: MouseButton) -> None:
        path = self._pressed.pop(button, None)
        if path is None:
            return
        if set(path) == {path[0]}:
            self._press(self._at(button))
        else:
            self._drag(path, button)

    def _modifiers(self) -> list[str]:
        return [key for key in self._keys_down if key in get_args(Modifier)]

    def _key_down(self, key: str) -> None:
        if key in self._keys_down:
            return
        self._keys_down.append(key)
        if key not in get_args(Modifier):
            self._key([*self._modifiers(), key])

    # --- events of widgets ---

    def _press(self, pointer: Pointer) -> None:
        self.ui.by_keyboard = False
        layer = self._layer_at(pointer.x, pointer.y)
        if layer is None:
            return
        if not layer.box.contains(pointer.x, pointer.y):
            if layer.on_outside is not None:
                layer.on_outside()
            return
        path = layer.root.path_to(pointer.x, pointer.y)
        for widget in reversed(path):
            if widget.clickable:
                if widget.focusable:
                    if "shift" in pointer.modifiers and self.ui.focus != widget.name:
                        self.ui.anchor = 0  # the anchor was in another field
                    self.ui.focus = widget.name
                elif pointer.button == "left":
                    self.ui.focus = ""
                widget.press(self.ui, pointer)
                return
        self.ui.focus = ""

    def _repeat(self, times: int, modifiers: Sequence[Modifier]) -> None:
        """Press several times in quick succession; a widget that a press brings up may get the next press."""
        first = self._at("left", modifiers)
        before = [widget.name for widget in self.path(first.x, first.y)]
        self._press(first)
        for number in range(2, times + 1):
            self.refresh()
            same = [widget.name for widget in self.path(first.x, first.y)] == before
            self._press(replace(first, double=same and number == 2, triple=same and number == 3))

    def _drag(self, path: Sequence[tuple[int, int]], button: MouseButton) -> None:
        if button != "left":
            return
        dragged = next((w for w in reversed(self.path(*path[0])) if w.clickable), None)
        if dragged is None:
            return
        dragged.drag(self.ui, path)
        for widget in reversed(self.path(*path[-1])):
            if widget is not dragged and widget.drop(self.ui, dragged.name):
                return

    def _scroll(self, action: Scroll) -> None:
        if not action.dy:
            return
        for widget in reversed(self.path(action.x, action.y)):
            if widget.scrollable and widget.scroll(self.ui, action.dy):
                return

    def _type(self, text: str) -> None:
        """Type a text: line ends and tabs are keys, the text between them goes to the focused widget."""
        for piece in re.split(r"([\n\t])", text):
            if piece in ("\n", "\t"):
                self._key(["enter" if piece == "\n" else "tab"])
            elif {"ctrl", "alt", "meta"}.intersection(self._keys_down):
                for character in piece:
                    self._key([*self._modifiers(), character])
            elif piece:
                focused = self._focused()
                if focused is not None:
                    focused.write(self.ui, piece.upper() if "shift" in self._keys_down else piece)
            self.refresh()

    def _key(self, keys: Sequence[str]) -> None:
        focused = self._focused()
        if len(keys) == 1 and len(keys[0]) == 1 and keys[0].isprintable():
            if focused is not None:
                focused.write(self.ui, keys[0])
            return
        if focused is not None and focused.key(self.ui, keys):
            return
        top = self.layers[-1]
        if list(keys) == ["escape"] and top.on_escape is not None:
            top.on_escape()
        elif list(keys) == ["enter"] and top.on_enter is not None:
            top.on_enter()
        elif list(keys) in (["tab"], ["shift", "tab"]):
            self._move_focus(top, -1 if len(keys) == 2 else 1)

    def _focused(self) -> Widget | None:
        """Return the widget that gets the keys: the owner of the open pop-up, else the focused one on top."""
        if self.ui.opened:
            return self.find(self.ui.opened)
        top = self.layers[-1].root
        return next((w for w in top.walk() if w.name and w.name == self.ui.focus), None)

    def _move_focus(self, top: Layer, step: int) -> None:
        names = [widget.name for widget in top.root.walk() if widget.focusable and widget.name]
        if not names:
            return
        at = names.index(self.ui.focus) + step if self.ui.focus in names else min(step, 0)
        self.ui.focus = names[at % len(names)]
        self.ui.by_keyboard = True
        widget = self.find(self.ui.focus)
        if widget is not None:
            widget.focused(self.ui)

    def _close_popup(self) -> None:
        self.ui.opened = ""


def _info(widget: Widget) -> WidgetInfo:
    return WidgetInfo(widget.role, widget.name, widget.colour, widget.label, widget.visible)
