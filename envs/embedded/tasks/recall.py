"""Scenes of suite `recall`: a slide show, and at its end a question about one of its pictures."""
# ruff: noqa: D102 - overrides keep the contract that the base class documents

from __future__ import annotations

from functools import partial
from random import Random

from envs.actions import Action
from envs.base import Verdict
from envs.embedded.app import App, Layer
from envs.embedded.draw import Rect
from envs.embedded.marks import ColourButton
from envs.embedded.scene import NOT_YET, REACHED, Scene, click
from envs.embedded.tasks.mini import SHAPES
from envs.embedded.theme import COLOURS
from envs.embedded.widgets import Clickable, EventHandler, Free, Panel, Picture, Ui, Widget

MOST_BEFORE = 4
"""Most pictures before the button's."""


class RecallScene(Scene):
    """A button of the colour is shown once; `lag` clicks later it is to be clicked among its copies.

    Any click turns a page. Where the button was shown cannot be told from the last page, whose buttons
    are all of its colour: it must be remembered.
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
        self.chosen: int | None = None
        self.places = self._four_places()
        self.place = rng.randrange(len(self.places))
        self.pictures = [(rng.choice(SHAPES), self._somewhere()) for _ in range(self.last)]

    def judge(self) -> Verdict:
        if self.chosen is None:
            return NOT_YET
        if self.chosen == self.place:
            return REACHED
        return Verdict("fail", "another place was clicked than where the button was shown")

    def solve(self, app: App) -> Action:
        return click(app, f"button.{self.place}" if self.page == self.last else "page")

    def layers(self) -> list[Layer]:
        screen = Rect(0, 0, self.ui.width, self.ui.height)
        shown: list[tuple[Widget, Rect]] = []
        if self.page == self.at:
            shown.append((self._button(self.place, self._turn), self.places[self.place]))
        elif self.page < self.last:
            shape, box = self.pictures[self.page]
            shown.append((Picture(shape, ink=self.ui.theme.muted), box))
        else:
            shown += [
                (self._button(place, partial(self._choose, place)), box)
                for place, box in enumerate(self.places)
            ]
        if self.page < self.last:
            shown.append((Clickable("page", self._turn), screen))  # over the pictures
        return [Layer(Panel(Free(shown), fill=self.ui.theme.panel), screen)]

    def _button(self, place: int, press: EventHandler) -> ColourButton:
        return ColourButton(f"button.{place}", self.colour, press)

    def _four_places(self) -> list[Rect]:
        """One in each quarter of the screen."""
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
        self.chosen = place
        self.over = True
