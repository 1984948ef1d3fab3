"""Scenes of suite `mini` that ask for several things before the target: forms, lists, deletion."""
# ruff: noqa: ARG002, D102 - overrides keep the contract that the base class documents

from __future__ import annotations

from functools import partial
from random import Random

from envs.base import Verdict
from envs.embedded.app import App, Layer
from envs.embedded.draw import Rect
from envs.embedded.marks import (
    ColourBox,
    ColourCombo,
    Glyph,
    Swatch,
)
from envs.embedded.scene import NOT_YET, REACHED
from envs.embedded.tasks.mini import MiniScene, Placed, bottom_of, grid, top_of
from envs.embedded.theme import COLOURS
from envs.embedded.widgets import Fill, Free, Panel


class FormScene(MiniScene):
    """The target is a check box; the form is then sent with the check-mark button."""

    phrase = "check the {colour} box"

    def set_up(self) -> None:
        ui, rng = self.ui, self.rng
        self.footer, rest = bottom_of(self.body, ui.px(34))
        colours = [self.target, *self.others(1, 4)]
        cells = grid(rng, ui, rest, len(colours), (38, 36))
        side = ui.px(rng.randint(26, 30))
        self.spots = [(c, cell.centred(side, side)) for c, cell in zip(colours, cells, strict=True)]
        self.ticked: set[str] = set()
        self.submit_at = rng.random()

    def content(self) -> Placed:
        ui, foot = self.ui, self.footer
        placed: Placed = [
            (
                ColourBox(
                    f"{colour}.box",
                    colour,
                    colour in self.ticked,
                    partial(self._tick, colour),
                ),
                box,
            )
            for colour, box in self.spots
        ]
        width = ui.px(54)
        x = foot.x0 + round((foot.width - width) * self.submit_at)
        submit = self.control("submit", "check", self._submit)
        placed.append((submit, Rect(x, foot.y1 - ui.px(28), x + width, foot.y1)))
        return placed

    def route(self, app: App) -> str:
        wrong = sorted(self.ticked ^ {self.target})
        return f"{wrong[0]}.box" if wrong else "submit"

    def wander(self, rng: Random) -> None:
        colours = [colour for colour, _ in self.spots]
        self.ticked = set(rng.sample(colours, rng.randint(0, min(2, len(colours)))))

    def _tick(self, colour: str) -> None:
        self.ticked ^= {colour}

    def _submit(self) -> None:
        if self.ticked:
            self.act("+".join(sorted(self.ticked)))


class DropdownScene(MiniScene):
    """The target is a choice of a drop-down list."""

    phrase = "pick {colour}"

    def set_up(self) -> None:
        ui, rng = self.ui, self.rng
        count = rng.randint(3, 4)
        colours = self.palette[:count]
        rng.shuffle(colours)
        self.choices = colours
        self.value = rng.choice([colour for colour in colours if colour != self.target])
        width = ui.px(rng.randint(76, 110))
        height, step = ui.px(28), ui.px(26)
        list_height = step * count + ui.px(2)
        x = rng.randint(self.body.x0, self.body.x1 - width)
        y = rng.randint(self.body.y0, max(self.body.y0, self.body.y1 - height - list_height))
        self.combo_box = Rect(x, y, x + width, y + height)
        self.list_box = Rect(x, y + height - 1, x + width, y + height + list_height)
        self.lines = [(rng.uniform(0.3, 0.9), rng.random()) for _ in range(6)]
        self.open = False

    def content(self) -> Placed:
        ui, theme = self.ui, self.ui.theme
        placed: Placed = []
        for i, (length, shown) in enumerate(self.lines):
            y = self.body.y0 + ui.px(6 + 21 * i)
            line = Rect(
                self.body.x0, y, self.body.x0 + round(self.body.width * length), y + ui.px(3)
            )
            if shown < 0.7 and not line.inset(-ui.px(4)).overlaps(self.combo_box):
                placed.append((Fill(theme.edge), line))
        combo = ColourCombo("list", COLOURS[self.value], self._toggle)
        return [*placed, (combo, self.combo_box)]

    def overlay(self) -> Layer | None:
        if not self.open:
            return None
        ui, theme, box = self.ui, self.ui.theme, self.list_box
        placed: Placed = []
        for i, colour in enumerate(self.choices):
            y = box.y0 + ui.px(2) + i * ui.px(26)
            entry = Rect(box.x0 + ui.px(4), y, box.x1 - ui.px(4), y + ui.px(24))
            swatch = Swatch(
                f"{colour}.swatch",
                colour,
                partial(self._choose, colour),
                radius=0,
            )
            placed.append((swatch, entry))
        panel = Panel(Free(placed), fill=theme.field, edge=True)
        return Layer(panel, box, modal=True, on_outside=self._toggle)

    def judge(self) -> Verdict:
        chosen = self.committed if self.confirms else self.value
        return REACHED if chosen == self.target else NOT_YET

    def route(self, app: App) -> str:
        return f"{self.target}.swatch" if self.open else "list"

    def wander(self, rng: Random) -> None:
        self.open = rng.random() < 0.6
        self.value = rng.choice(self.choices)

    def _toggle(self) -> None:
        self.open = not self.open

    def _choose(self, colour: str) -> None:
        self.open = False
        if self.confirms:
            self.pending = colour
        else:
            self.value = colour

    def commit(self, what: str) -> None:
        self.pending = None
        self.value = self.committed = what  # another choice can still be made


class DeleteScene(MiniScene):
    """The target is a file, to be selected and then put into the trash."""

    phrase = "delete the {colour} file"

    def set_up(self) -> None:
        ui, rng = self.ui, self.rng
        self.at_top = rng.random() < 0.5
        self.bar, rest = (top_of if self.at_top else bottom_of)(self.body, ui.px(36))
        colours = [self.target, *self.others(1, 4)]
        cells = grid(rng, ui, rest, len(colours), (40, 42))
        width, height = ui.px(34), ui.px(38)
        self.spots = [
            (colour, cell.centred(width, height))
            for colour, cell in zip(colours, cells, strict=True)
        ]
        self.trash_at = rng.choice((0.0, 1.0))
        self.selected: str | None = None

    def content(self) -> Placed:
        ui, bar = self.ui, self.bar
        placed: Placed = []
        for colour, box in self.spots:
            file = Glyph(
                f"{colour}.file",
                "file",
                partial(self._select, colour),
                ink=COLOURS[colour],
                colour=colour,
                selected=colour == self.selected,
            )
            placed.append((file, box))
        width, height = ui.px(40), ui.px(32)
        x = bar.x0 + round((bar.width - width) * self.trash_at)
        y = bar.y0 if self.at_top else bar.y1 - height
        trash = self.control("trash", "trash", self._delete)
        placed.append((trash, Rect(x, y, x + width, y + height)))
        return placed

    def route(self, app: App) -> str:
        return "trash" if self.selected == self.target else f"{self.target}.file"

    def wander(self, rng: Random) -> None:
        self.selected = rng.choice([None, *(colour for colour, _ in self.spots)])

    def _select(self, colour: str) -> None:
        self.selected = colour

    def _delete(self) -> None:
        if self.selected is not None:
            self.act(self.selected)
