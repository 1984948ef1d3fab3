"""Scenes of suite `mini` whose target is not in sight, or that need several actions.

The target is behind a menu, on another page or tab, in a folder, or further down a list; or it is a check
box of a form, a choice of a list, or a file to delete.
"""

# ruff: noqa: ARG002, D102 - overrides keep the contract that the base class documents
from __future__ import annotations

from functools import partial
from random import Random
from typing import ClassVar

from envs.contract.base import Verdict
from envs.suites.embedded.app import App, Layer
from envs.suites.embedded.draw import Rect
from envs.suites.embedded.marks import (
    ColourBox,
    ColourButton,
    ColourCombo,
    Glyph,
    ShapeTab,
    Swatch,
    Wheel,
)
from envs.suites.embedded.scene import NOT_YET, REACHED
from envs.suites.embedded.tasks.mini import SHAPES, MiniScene, Placed, bottom_of, grid, top_of
from envs.suites.embedded.theme import COLOURS
from envs.suites.embedded.widgets import Fill, Free, Panel, Picture


class MenuScene(MiniScene):
    """The target is an entry of the menu that an icon opens."""

    def set_up(self) -> None:
        ui, rng = self.ui, self.rng
        bar, rest = top_of(self.body, ui.px(32))
        side, height = ui.px(34), ui.px(28)
        x = rng.choice((bar.x0, bar.x1 - side))
        self.icon_box = Rect(x, bar.y0, x + side, bar.y0 + height)
        others = self.others(3, 6)
        inside = rng.randint(1, 2)
        entries = [self.target, *others[:inside]]
        rng.shuffle(entries)
        self.spots = self.spread(rest, others[inside:][:3])
        self.entries = entries
        width, step = ui.px(rng.randint(64, 84)), ui.px(30)
        left = x if x == bar.x0 else bar.x1 - width
        top = bar.y0 + height + 1
        self.menu_box = Rect(left, top, left + width, top + step * len(entries) + ui.px(4))
        self.menu_open = False

    def content(self) -> Placed:
        return [
            (self.control("menu", "menu", self._toggle), self.icon_box),
            *self.buttons(self.spots),
        ]

    def overlay(self) -> Layer | None:
        if not self.menu_open:
            return None
        ui, theme, box = self.ui, self.ui.theme, self.menu_box
        placed: Placed = []
        for i, colour in enumerate(self.entries):
            y = box.y0 + ui.px(4) + i * ui.px(30)
            entry = Rect(box.x0 + ui.px(4), y, box.x1 - ui.px(4), y + ui.px(26))
            placed.append(
                (
                    ColourButton(
                        f"{colour}.button",
                        colour,
                        partial(self._choose, colour),
                        radius=3,
                    ),
                    entry,
                )
            )
        panel = Panel(Free(placed), fill=theme.panel, edge=True)
        return Layer(panel, box, modal=True, on_outside=self._toggle)

    def route(self, app: App) -> str:
        return f"{self.target}.button" if self.menu_open else "menu"

    def wander(self, rng: Random) -> None:
        self.menu_open = rng.random() < 0.6

    def _toggle(self) -> None:
        self.menu_open = not self.menu_open

    def _choose(self, colour: str) -> None:
        self.menu_open = False
        self.act(colour)


class PageScene(MiniScene):
    """The target is on the second or third page."""

    def set_up(self) -> None:
        count = self.rng.choice((2, 2, 3))
        self.goal_page = self.rng.randint(1, count - 1)
        self.page = 0
        self.footer, rest = bottom_of(self.body, self.ui.px(32))
        others = self.others(5, 7)
        self.pages = []
        for page in range(count):
            colours = others[page * 2 : page * 2 + 2][: self.rng.randint(1, 2)]
            if page == self.goal_page:
                colours = [self.target, *colours]
            self.pages.append(self.spread(rest, colours))

    def content(self) -> Placed:
        ui, foot = self.ui, self.footer
        width, top = ui.px(40), foot.y1 - ui.px(28)
        placed = self.buttons(self.pages[self.page])
        if self.page > 0:
            back = self.control("back", "left", lambda: self._turn(-1))
            placed.append((back, Rect(foot.x0, top, foot.x0 + width, foot.y1)))
        if self.page < len(self.pages) - 1:
            forth = self.control("next", "right", lambda: self._turn(1))
            placed.append((forth, Rect(foot.x1 - width, top, foot.x1, foot.y1)))
        middle, side = foot.centre[0], ui.px(6)
        for i in range(len(self.pages)):
            x = middle + ui.px(10) * i - ui.px(5) * len(self.pages)
            ink = ui.theme.ink if i == self.page else ui.theme.edge
            dot = Picture("circle", ink=ink)
            placed.append((dot, Rect(x, top + ui.px(11), x + side, top + ui.px(11) + side)))
        return placed

    def route(self, app: App) -> str:
        if self.page == self.goal_page:
            return f"{self.target}.button"
        return "next" if self.page < self.goal_page else "back"

    def wander(self, rng: Random) -> None:
        self.page = rng.randrange(len(self.pages))

    def _turn(self, step: int) -> None:
        self.page += step


class TabsScene(MiniScene):
    """The target is on another tab; tabs are told apart by shapes."""

    def set_up(self) -> None:
        ui, rng = self.ui, self.rng
        count = rng.choice((2, 3, 3))
        self.shapes = rng.sample(SHAPES, count)
        self.tab = rng.randrange(count)
        self.goal_tab = rng.choice([i for i in range(count) if i != self.tab])
        self.strip, rest = top_of(self.body, ui.px(32))
        others = self.others(5, 7)
        self.tabs = []
        for tab in range(count):
            colours = others[tab * 2 : tab * 2 + 2][: rng.randint(1, 2)]
            if tab == self.goal_tab:
                colours = [self.target, *colours]
            self.tabs.append(self.spread(rest.inset(ui.px(1), ui.px(3)), colours))

    def content(self) -> Placed:
        ui, theme, strip = self.ui, self.ui.theme, self.strip
        full = Rect(self.window.x0 + 1, strip.y0 - ui.px(5), self.window.x1 - 1, strip.y1)
        placed: Placed = [(Fill(theme.panel), full)]
        width = ui.px(40)
        for i, shape in enumerate(self.shapes):
            x = strip.x0 + i * (width + ui.px(3))
            tab = ShapeTab(shape, partial(self._go, i), active=i == self.tab)
            placed.append((tab, Rect(x, strip.y0, x + width, strip.y1)))
        return [*placed, *self.buttons(self.tabs[self.tab])]

    def route(self, app: App) -> str:
        if self.tab == self.goal_tab:
            return f"{self.target}.button"
        return f"{self.shapes[self.goal_tab]}.tab"

    def wander(self, rng: Random) -> None:
        self.tab = rng.randrange(len(self.tabs))

    def _go(self, tab: int) -> None:
        self.tab = tab


class ScrollScene(MiniScene):
    """The target is further down a list, out of sight."""

    VISIBLE: ClassVar[int] = 3

    def set_up(self) -> None:
        ui, rng = self.ui, self.rng
        rows = rng.randint(5, 7)
        goal = rng.randint(self.VISIBLE, rows - 1)
        colours = rng.sample(self.palette[1:], rows - 1)
        self.rows = [*colours[:goal], self.target, *colours[goal:]]
        self.first = 0
        self.step = ui.px(rng.randint(33, 36))
        rail = ui.px(30)
        height = self.step * self.VISIBLE
        top = self.body.y0 + rng.randint(0, max(0, self.body.height - height - ui.px(2)))
        self.list_box = Rect(self.body.x0, top, self.body.x1, top + height + ui.px(2))
        self.rail = Rect(self.body.x1 - rail, top, self.body.x1, top + height + ui.px(2))

    def content(self) -> Placed:
        ui, theme = self.ui, self.ui.theme
        rail, side = self.rail, self.rail.width
        bars: Placed = []
        for i, colour in enumerate(self.rows[self.first : self.first + self.VISIBLE]):
            y = self.list_box.y0 + ui.px(2) + i * self.step
            bar = Rect(self.list_box.x0 + ui.px(3), y, rail.x0 - ui.px(4), y + self.step - ui.px(4))
            press = partial(self.act, colour)
            bars.append((ColourButton(f"{colour}.button", colour, press, radius=2), bar))
        wheel = Wheel(Panel(Free(bars), fill=theme.field), self._scroll)
        placed: Placed = [(wheel, self.list_box), (Fill(theme.panel), rail)]
        last = len(self.rows) - self.VISIBLE
        track = Rect(rail.x0 + ui.px(10), rail.y0 + side, rail.x1 - ui.px(10), rail.y1 - side)
        thumb = max(ui.px(6), track.height * self.VISIBLE // len(self.rows))
        y = track.y0 + (track.height - thumb) * self.first // last
        placed.append((Fill(theme.muted), Rect(track.x0, y, track.x1, y + thumb)))
        up = self.control("up", "up", lambda: self._scroll(-2), enabled=self.first > 0)
        down = self.control("down", "down", lambda: self._scroll(2), enabled=self.first < last)
        placed.append((up, Rect(rail.x0, rail.y0, rail.x1, rail.y0 + side)))
        placed.append((down, Rect(rail.x0, rail.y1 - side, rail.x1, rail.y1)))
        return placed

    def route(self, app: App) -> str:
        at = self.rows.index(self.target) - self.first
        if at < 0:
            return "up"
        return "down" if at >= self.VISIBLE else f"{self.target}.button"

    def wander(self, rng: Random) -> None:
        self.first = rng.randint(0, len(self.rows) - self.VISIBLE)

    def _scroll(self, rows: int) -> None:
        self.first = min(max(0, self.first + rows), len(self.rows) - self.VISIBLE)


class FolderScene(MiniScene):
    """The target is in a folder."""

    def set_up(self) -> None:
        ui, rng = self.ui, self.rng
        self.bar, rest = top_of(self.body, ui.px(32))
        others = self.others(4, 6)
        outside = others[: rng.randint(1, 2)]
        cells = grid(rng, ui, self.body, len(outside) + 1, (46, 40))
        width, height = (ui.px(side) for side in self.button_size)
        side = ui.px(38)
        self.folder_box = cells[0].centred(side, side)
        self.spots = [
            (colour, cell.centred(width, height))
            for colour, cell in zip(outside, cells[1:], strict=True)
        ]
        inside = others[len(outside) :][: rng.randint(1, 3)]
        self.inside = self.spread(rest, [self.target, *inside])
        self.open = False

    def content(self) -> Placed:
        if self.open:
            bar, ui = self.bar, self.ui
            back = self.control("back", "left", self._toggle)
            box = Rect(bar.x0, bar.y0, bar.x0 + ui.px(40), bar.y0 + ui.px(28))
            return [(back, box), *self.buttons(self.inside)]
        theme = self.ui.theme
        folder = Glyph("folder", "folder", self._toggle, ink=theme.control)
        return [(folder, self.folder_box), *self.buttons(self.spots)]

    def route(self, app: App) -> str:
        return f"{self.target}.button" if self.open else "folder"

    def wander(self, rng: Random) -> None:
        self.open = rng.random() < 0.5

    def _toggle(self) -> None:
        self.open = not self.open


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
        for i, (length, share) in enumerate(self.lines):
            y = self.body.y0 + ui.px(6 + 21 * i)
            line = Rect(
                self.body.x0, y, self.body.x0 + round(self.body.width * length), y + ui.px(3)
            )
            if share < 0.7 and not line.inset(-ui.px(4)).overlaps(self.combo_box):
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

    def evaluate(self) -> Verdict:
        choice = self.committed if self.confirms else self.value
        return REACHED if choice == self.target else NOT_YET

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
