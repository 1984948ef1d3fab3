"""The base class of suite `desk`, which shows a lettered window, and the moves of its solutions.

reach, fill, choose and slide return the oracle's next action towards something; finish ends the episode.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from random import Random
from typing import ClassVar

from bus.errors import EnvError
from envs.contract.actions import Action, Click, Done, DoubleClick, KeyPress, Scroll, Type
from envs.contract.base import Verdict
from envs.suites.embedded.app import App, Layer
from envs.suites.embedded.controls import NOTCH, ScrollView, Slider
from envs.suites.embedded.draw import Rect
from envs.suites.embedded.menus import Combo
from envs.suites.embedded.scene import NOT_YET, REACHED, Scene
from envs.suites.embedded.textfield import TextField
from envs.suites.embedded.widgets import EventHandler, Ui, Widget, Window


class DeskScene(Scene):
    """A window somewhere on the screen, with the dialogs and menus that are open above it."""

    title: ClassVar[str] = ""
    units: ClassVar[tuple[int, int]] = (420, 300)
    """The least width and height of the window, design units; it grows with its content."""

    def __init__(self, rng: Random, ui: Ui) -> None:
        super().__init__(rng, ui)
        self.set_up()
        width, height = self._window().size(ui)
        width = min(ui.width, max(width, ui.px(self.units[0])) + ui.px(rng.randint(0, 16)))
        height = min(ui.height, max(height, ui.px(self.units[1])) + ui.px(rng.randint(0, 16)))
        x, y = rng.randint(0, ui.width - width), rng.randint(0, ui.height - height)
        self.window = Rect(x, y, x + width, y + height)

    @abstractmethod
    def set_up(self) -> None:
        """Draw the state, the goal and the instruction from the seeded generator."""

    @abstractmethod
    def body(self) -> Widget:
        """Return the content of the window."""

    def above(self) -> list[Layer]:
        """Return the dialogs and menus that are open."""
        return []

    def on_close(self) -> EventHandler | None:
        """Return the handler of the window's close button; None if it has none."""
        return None

    def layers(self) -> list[Layer]:
        """Return the layers of the window and of what is open above it."""
        return [Layer(self._window(), self.window), *self.above()]

    def _window(self) -> Window:
        return Window(self.body(), title=self.title, on_close=self.on_close(), shadow=True)


def compare(state: Mapping[str, object], goal: Mapping[str, object]) -> Verdict:
    """Return pass if both are equal, else fail with the first difference."""
    for key in [*goal, *(key for key in state if key not in goal)]:
        if key not in state:
            return Verdict("fail", f"{key} is missing")
        if key not in goal:
            return Verdict("fail", f"{key} should not be there")
        if state[key] != goal[key]:
            return Verdict("fail", f"{key} is {state[key]!r}, not {goal[key]!r}")
    return REACHED


def verdict_if(reached: bool) -> Verdict:
    """Return pass if the goal is reached, else fail."""
    return REACHED if reached else NOT_YET


# --- the oracle's moves -----------------------------------------------------------------------


def reach(app: App, name: str, *, double: bool = False) -> Action:
    """Return the click on a widget, or the action that brings it into reach: scroll, or close what is above.

    Raises EnvError if there is no such widget or no way to it.
    """
    widget = app.find(name)
    if widget is None:
        if app.layers[-1].on_escape is not None:
            return KeyPress(keys=["escape"])
        names = ", ".join(info.name for info in app.widgets())
        raise EnvError(f"the oracle looks for {name!r}, but there is only: {names}")
    info = app.see(name)
    if info is not None and 2 * info.bbox.height > widget.bbox.height:
        x, y = info.centre
        return DoubleClick(x=x, y=y) if double else Click(x=x, y=y)
    view = _view_of(app, widget)
    if view is not None and app.see(view.bar.name) is not None:
        x, y = view.child.visible.centre
        away = widget.bbox.centre[1] - view.bbox.centre[1]
        notches = round(away / app.ui.px(NOTCH)) or (1 if away > 0 else -1)
        return Scroll(x=x, y=y, dy=notches)
    if app.layers[-1].on_escape is not None:
        return KeyPress(keys=["escape"])
    raise EnvError(f"the oracle cannot reach {name!r}")


def fill(app: App, name: str, want: str) -> Action | None:
    """Return the next action towards the text `want` in a field; None if the field has it."""
    field = app.find(name)
    if isinstance(field, TextField) and field.value == want:
        return None
    if not isinstance(field, TextField) or app.ui.opened or app.ui.focus != name:
        return reach(app, name)
    start, end = field.selection(app.ui)
    if end - start == len(field.value):
        return Type(text=want) if want else KeyPress(keys=["backspace"])
    return KeyPress(keys=["ctrl", "a"])


def choose(app: App, name: str, want: str) -> Action | None:
    """Return the next action towards the choice `want` of a drop-down; None if it is chosen."""
    combo = app.find(name)
    if isinstance(combo, Combo) and combo.value == want:
        return None
    return reach(app, f"{name}.{want}" if app.ui.opened == name else name)


def slide(app: App, name: str, want: int) -> Action | None:
    """Return the next action that moves a slider to `want`; None if it is there."""
    slider = app.find(name)
    if isinstance(slider, Slider) and slider.value == want:
        return None
    if not isinstance(slider, Slider) or app.see(name) is None:
        return reach(app, name)
    return Click(x=slider.x_of(app.ui, want), y=slider.bbox.centre[1])


def finish(app: App) -> Action:
    """Return `done`, or the key that closes what is still open."""
    if app.ui.opened or (app.layers[-1].modal and app.layers[-1].on_escape is not None):
        return KeyPress(keys=["escape"])
    return Done()


def _view_of(app: App, widget: Widget) -> ScrollView | None:
    """Return the scrolling view that contains `widget`; None if there is none."""
    for layer in reversed(app.layers):
        for candidate in layer.root.walk():
            if isinstance(candidate, ScrollView) and widget in candidate.child.walk():
                return candidate
    return None
