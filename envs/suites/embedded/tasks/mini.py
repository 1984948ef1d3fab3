"""Scenes of suite `mini`: the mechanics of GUIs shown in colours, shapes and icons, without letters.

The class of a scene decides where the target is (`ClickScene`: in sight; `MenuScene`: behind a menu icon;
...). Two things can be added to any of them: pop-up dialogs that must be closed first (`popup`), and a
dialog that asks for confirmation at the end (`confirm`).

Suite `recall` has one scene of the same parts: a slide show, and at its end a question about one of its
pictures.
"""

# ruff: noqa: ARG002, D102 - overrides keep the contract that the base class documents
from __future__ import annotations

from abc import abstractmethod
from functools import partial
from random import Random
from typing import ClassVar

from envs.contract.actions import Action
from envs.contract.base import Verdict
from envs.suites.embedded.app import App, Layer
from envs.suites.embedded.draw import Rect
from envs.suites.embedded.marks import (
    ColourButton,
    IconButton,
)
from envs.suites.embedded.scene import NOT_YET, REACHED, Scene, click
from envs.suites.embedded.theme import COLOURS
from envs.suites.embedded.widgets import (
    Clickable,
    EventHandler,
    Fill,
    Free,
    Panel,
    Picture,
    Ui,
    Widget,
    Window,
    row,
)

SHAPES = ("circle", "square", "triangle", "diamond", "star")
Placed = list[tuple[Widget, Rect]]
Spot = tuple[str, Rect]  # a colour and its place


def grid(rng: Random, ui: Ui, box: Rect, count: int, cell: tuple[int, int]) -> list[Rect]:
    """Return `count` cells of a random regular grid on `box`, none smaller than `cell` (design units)."""
    columns = box.width // ui.px(cell[0])
    rows = box.height // ui.px(cell[1])
    shapes = [(c, r) for c in range(1, columns + 1) for r in range(1, rows + 1) if c * r >= count]
    fitting = [(c, r) for c, r in shapes if c * r <= max(4, 2 * count)]
    across, down = rng.choice(fitting or shapes)
    width, height = box.width // across, box.height // down
    cells = [
        Rect(x, y, x + width, y + height)
        for y in range(box.y0, box.y0 + down * height, height)
        for x in range(box.x0, box.x0 + across * width, width)
    ]
    return rng.sample(cells, count)


class MiniScene(Scene):
    """A window, the dialogs above it, and the one target that the instruction names."""

    ends_at_goal = True
    phrase: ClassVar[str] = "click the {colour} button"

    def __init__(self, rng: Random, ui: Ui, *, popup: int = 0, confirm: bool = False) -> None:
        super().__init__(rng, ui)
        self.confirms = confirm
        self.palette = rng.sample(list(COLOURS), len(COLOURS))
        self.target = self.palette[0]
        self.instruction = self.phrase.format(colour=self.target)
        self.committed: str | None = None  # the colours that were chosen for good
        self.pending: str | None = None  # the colours that wait for confirmation
        self.window = self._random_window()
        self.body = self._inside(self.window)
        self.radius = rng.choice((2, 6, 14))
        self.button_size = rng.randint(36, 48), rng.randint(27, 34)
        self.popups = int(popup)  # pop-ups that are still to be closed, one behind the other
        self._draw_popup()
        self.confirm_box = self._random_dialog()
        self.set_up()

    @abstractmethod
    def set_up(self) -> None:
        """Draw the content of the window from the seeded generator."""

    @abstractmethod
    def content(self) -> Placed:
        """Return the content of the window."""

    @abstractmethod
    def route(self, app: App) -> str:
        """Return the name of the widget to click next if no dialog is in the way."""

    @abstractmethod
    def wander(self, rng: Random) -> None:
        """Go to a random state to which clicks could have led."""

    def overlay(self) -> Layer | None:
        """Return the layer that is open above the window and below the dialogs; None if there is none."""
        return None

    @property
    def popup_open(self) -> bool:
        """Whether a pop-up blocks the window."""
        return self.popups > 0

    # --- the goal ---------------------------------------------------------------------------

    def act(self, what: str) -> None:
        """Handle a press of a target: commit it, or ask for confirmation first."""
        if self.confirms:
            self.pending = what
        else:
            self.commit(what)

    def commit(self, what: str) -> None:
        """Make the choice final, which ends the episode."""
        self.committed = what
        self.pending = None
        self.over = True

    def evaluate(self) -> Verdict:
        if self.committed == self.target:
            return REACHED
        if self.committed is not None:
            return Verdict("fail", f"{self.committed} was chosen, not {self.target}")
        return NOT_YET

    def solve(self, app: App) -> Action:
        if self.popup_open:
            return click(app, "popup.close" if self.popup_has == "close" else "popup.ok")
        if self.pending is not None:
            return click(app, "confirm.ok" if self.pending == self.target else "confirm.close")
        return click(app, self.route(app))

    # --- the screen -------------------------------------------------------------------------

    def layers(self) -> list[Layer]:
        layers = [Layer(Window(Free(self.content()), title_units=16), self.window)]
        overlay = self.overlay()
        if overlay is not None:
            layers.append(overlay)
        if self.pending is not None:
            layers.append(self._confirm_dialog(self.pending))
        if self.popup_open:
            layers.append(self._popup_dialog())
        return layers

    def buttons(self, spots: list[Spot]) -> Placed:
        """Return buttons that choose their colour."""
        return [
            (
                ColourButton(
                    f"{colour}.button",
                    colour,
                    partial(self.act, colour),
                    radius=self.radius,
                ),
                box,
            )
            for colour, box in spots
        ]

    def spread(self, box: Rect, colours: list[str]) -> list[Spot]:
        """Return a place for a button for each colour."""
        width, height = (self.ui.px(side) for side in self.button_size)
        cells = grid(self.rng, self.ui, box, len(colours), (self.button_size[0] + 4, 36))
        return [(c, cell.centred(width, height)) for c, cell in zip(colours, cells, strict=True)]

    def others(self, fewest: int, most: int) -> list[str]:
        """Return some colours that are not the target."""
        return self.rng.sample(self.palette[1:], self.rng.randint(fewest, most))

    def control(
        self, name: str, icon: str, on_press: EventHandler, *, enabled: bool = True
    ) -> IconButton:
        """Return a neutral icon button on the window."""
        return IconButton(name, icon, on_press, enabled=enabled)

    def _random_window(self) -> Rect:
        ui, rng = self.ui, self.rng
        unit = min(ui.width, ui.height)
        width = min(ui.width, round(unit * rng.uniform(0.93, 0.98)))
        height = min(ui.height, round(unit * rng.uniform(0.93, 0.98)))
        x, y = rng.randint(0, ui.width - width), rng.randint(0, ui.height - height)
        return Rect(x, y, x + width, y + height)

    def _inside(self, window: Rect) -> Rect:
        pad = self.ui.px(5)
        return Rect(
            window.x0 + pad, window.y0 + self.ui.px(16) + pad, window.x1 - pad, window.y1 - pad
        )

    def _random_dialog(self) -> Rect:
        ui, rng = self.ui, self.rng
        width, height = ui.px(rng.randint(96, 132)), ui.px(rng.randint(86, 108))
        x = rng.randint(ui.px(2), ui.width - width - ui.px(2))
        y = rng.randint(ui.px(2), ui.height - height - ui.px(2))
        return Rect(x, y, x + width, y + height)

    def _draw_popup(self) -> None:
        self.popup_box = self._random_dialog()
        self.popup_has = self.rng.choice(("ok", "close", "both"))

    def _popup_dialog(self) -> Layer:
        def close() -> None:
            self.popups -= 1
            if self.popups:
                self._draw_popup()

        icon = Picture("info", ink=self.ui.theme.muted)
        return self._dialog(
            "popup",
            self.popup_box,
            icon,
            on_ok=close if self.popup_has != "close" else None,
            on_close=close if self.popup_has != "ok" else None,
        )

    def _confirm_dialog(self, what: str) -> Layer:
        def dismiss() -> None:
            self.pending = None

        chips = [Fill(COLOURS[colour], radius=3) for colour in what.split("+")]
        return self._dialog(
            "confirm",
            self.confirm_box,
            chips[0] if len(chips) == 1 else row(*chips, gap=0, align="fill", grow=chips),
            on_ok=lambda: self.commit(what),
            on_close=dismiss,
        )

    def _dialog(
        self,
        name: str,
        box: Rect,
        sign: Widget,
        *,
        on_ok: EventHandler | None,
        on_close: EventHandler | None,
    ) -> Layer:
        ui, theme = self.ui, self.ui.theme
        inner = Rect(box.x0 + 1, box.y0 + ui.px(26), box.x1 - 1, box.y1 - 1)
        left, top = inner.x0 + ui.px(8), inner.y0 + ui.px(7)
        placed: Placed = [(sign, Rect(left, top, left + ui.px(14), top + ui.px(14)))]
        for i, length in enumerate((0.55, 0.4)):
            x, y = left + ui.px(20), top + ui.px(2 + 8 * i)
            placed.append(
                (Fill(theme.muted), Rect(x, y, x + round(inner.width * length), y + ui.px(3)))
            )
        if on_ok is not None:
            width, height = ui.px(50), ui.px(27)
            x, y = inner.x0 + (inner.width - width) // 2, inner.y1 - height - ui.px(5)
            button = IconButton(f"{name}.ok", "check", on_ok, text="OK")
            placed.append((button, Rect(x, y, x + width, y + height)))
        window = Window(
            Free(placed), name=name, on_close=on_close, title_units=26, fill=theme.panel
        )
        return Layer(window, box, modal=True, dims=True)


def top_of(box: Rect, height: int) -> tuple[Rect, Rect]:
    """Return a strip of that height at the top of `box`, and the rest."""
    return Rect(box.x0, box.y0, box.x1, box.y0 + height), Rect(
        box.x0, box.y0 + height, box.x1, box.y1
    )


def bottom_of(box: Rect, height: int) -> tuple[Rect, Rect]:
    """Return a strip of that height at the bottom of `box`, and the rest."""
    return Rect(box.x0, box.y1 - height, box.x1, box.y1), Rect(
        box.x0, box.y0, box.x1, box.y1 - height
    )


class ClickScene(MiniScene):
    """The target is in sight among other buttons."""

    def set_up(self) -> None:
        self.spots = self.spread(self.body, [self.target, *self.others(1, 4)])

    def content(self) -> Placed:
        return self.buttons(self.spots)

    def route(self, app: App) -> str:
        return f"{self.target}.button"

    def wander(self, rng: Random) -> None:
        if self.confirms:
            self.pending = rng.choice([colour for colour, _ in self.spots])


MOST_BEFORE = 4
"""The largest number of pages before the one with the button."""


class RecallScene(Scene):
    """A button is shown once; `lag` clicks later it is to be clicked among its copies.

    Any click turns a page. The last page has buttons of the same colour at four places, so that the place
    of the button must be remembered.
    """

    ends_at_goal = True
    phrase = "click the {colour} button"

    def __init__(self, rng: Random, ui: Ui, *, lag: int) -> None:
        super().__init__(rng, ui)
        self.colour = rng.choice(list(COLOURS))
        self.instruction = self.phrase.format(colour=self.colour)
        self.at = rng.randint(0, MOST_BEFORE)  # the page that shows the button
        self.last = self.at + lag
        self.page = 0
        self.place_clicked: int | None = None
        self.places = self._four_places()
        self.place = rng.randrange(len(self.places))
        self.pictures = [(rng.choice(SHAPES), self._somewhere()) for _ in range(self.last)]

    def evaluate(self) -> Verdict:
        if self.place_clicked is None:
            return NOT_YET
        if self.place_clicked == self.place:
            return REACHED
        return Verdict("fail", "another place was clicked than where the button was shown")

    def solve(self, app: App) -> Action:
        return click(app, f"button.{self.place}" if self.page == self.last else "page")

    def layers(self) -> list[Layer]:
        screen = Rect(0, 0, self.ui.width, self.ui.height)
        content: list[tuple[Widget, Rect]] = []
        if self.page == self.at:
            content.append((self._button(self.place, self._turn), self.places[self.place]))
        elif self.page < self.last:
            shape, box = self.pictures[self.page]
            content.append((Picture(shape, ink=self.ui.theme.muted), box))
        else:
            content += [
                (self._button(place, partial(self._choose, place)), box)
                for place, box in enumerate(self.places)
            ]
        if self.page < self.last:
            content.append((Clickable("page", self._turn), screen))  # over the pictures
        return [Layer(Panel(Free(content), fill=self.ui.theme.panel), screen)]

    def _button(self, place: int, press: EventHandler) -> ColourButton:
        return ColourButton(f"button.{place}", self.colour, press)

    def _four_places(self) -> list[Rect]:
        """Return four places, one in each quarter of the screen."""
        ui, rng = self.ui, self.rng
        width, height = ui.px(rng.randint(36, 48)), ui.px(rng.randint(30, 40))
        middle_x, middle_y = ui.width // 2, ui.height // 2
        return [
            Rect(x, y, x + width, y + height)
            for left, top in ((0, 0), (middle_x, 0), (0, middle_y), (middle_x, middle_y))
            for x in (left + rng.randint(ui.px(4), middle_x - width - ui.px(4)),)
            for y in (top + rng.randint(ui.px(4), middle_y - height - ui.px(4)),)
        ]

    def _somewhere(self) -> Rect:
        side = self.ui.px(self.rng.randint(24, 44))
        x, y = self.rng.randint(0, self.ui.width - side), self.rng.randint(0, self.ui.height - side)
        return Rect(x, y, x + side, y + side)

    def _turn(self) -> None:
        self.page += 1

    def _choose(self, place: int) -> None:
        self.place_clicked = place
        self.over = True
