"""Small applications: a tool box, menus, an editor to close, a calculator, lists, contacts, chores."""

# ruff: noqa: D102 - overrides keep the contract that the base class documents
from __future__ import annotations

from functools import partial
from random import Random
from typing import ClassVar

from envs.contract.actions import Action
from envs.contract.base import Verdict
from envs.suites.embedded.app import App, Layer
from envs.suites.embedded.controls import Button, CheckBox, Key, ListRow, ScrollView
from envs.suites.embedded.menus import Entry, MenuTitle, dialog
from envs.suites.embedded.tasks import words
from envs.suites.embedded.tasks.desk import DeskScene, compare, fill, finish, reach, verdict_if
from envs.suites.embedded.textfield import TextField
from envs.suites.embedded.widgets import (
    EventHandler,
    Fill,
    Gap,
    Label,
    Line,
    Panel,
    Sized,
    Ui,
    Widget,
    column,
    row,
)


class PressScene(DeskScene):
    """Press one of several buttons; any other button only shows that it was pressed."""

    title = "Tools"
    units = (240, 160)
    ends_at_goal = True

    def set_up(self) -> None:
        self.columns = self.rng.choice((2, 3))
        labels = self.rng.sample(words.COMMANDS, self.columns * self.rng.randint(2, 3))
        self.labels, self.goal = labels, self.rng.choice(labels)
        self.pressed = ""
        self.instruction = f"Click the {self.goal} button."

    def body(self) -> Widget:
        buttons = [
            Sized(Button(label, label, partial(self._press, label)), 86) for label in self.labels
        ]
        lines = [
            row(*buttons[i : i + self.columns], gap=8) for i in range(0, len(buttons), self.columns)
        ]
        space = Gap()
        status = Label(f"Last: {self.pressed}" if self.pressed else "Ready", muted=True)
        return column(*lines, space, status, gap=9, pad=14, grow=[space])

    def evaluate(self) -> Verdict:
        return verdict_if(self.pressed == self.goal)

    def solve(self, app: App) -> Action:
        return reach(app, self.goal)

    def _press(self, label: str) -> None:
        self.pressed = label


class DeskMenuScene(DeskScene):
    """Choose a command from the menu bar."""

    title = "Writer"
    units = (380, 240)
    ends_at_goal = True
    menus: ClassVar[dict[str, tuple[str, ...]]] = {
        "File": ("New", "Open", "Save", "Print", "Quit"),
        "Edit": ("Undo", "Redo", "Cut", "Copy", "Paste"),
        "View": ("Zoom in", "Zoom out", "Full screen", "Ruler"),
        "Insert": ("Picture", "Table", "Link", "Comment"),
        "Help": ("Manual", "Shortcuts", "About"),
    }

    def set_up(self) -> None:
        names = self.rng.sample(list(self.menus), 4)
        self.entries_by_menu = {
            name: self.rng.sample(self.menus[name], self.rng.randint(3, len(self.menus[name])))
            for name in names
        }
        self.menu = self.rng.choice(names)
        self.goal = self.rng.choice(self.entries_by_menu[self.menu])
        self.last = ""
        self.lines = [self.rng.uniform(0.5, 0.95) for _ in range(7)]
        self.instruction = f"Choose {self.goal} in the {self.menu} menu."

    def body(self) -> Widget:
        titles = [
            MenuTitle(
                name, name, [Entry(f"{name}.{e}", e, partial(self._choose, e)) for e in entries]
            )
            for name, entries in self.entries_by_menu.items()
        ]
        bar = Panel(row(*titles, gap=0), fill=self.ui.theme.panel, pad=1)
        page = Panel(
            column(*paragraph(self.ui, self.lines), gap=10, pad=16), fill=self.ui.theme.field
        )
        status = Panel(Label(self.last or "Ready", muted=True), fill=self.ui.theme.panel, pad=4)
        return column(bar, page, status, gap=0, grow=[page])

    def evaluate(self) -> Verdict:
        return verdict_if(self.last == self.goal)

    def solve(self, app: App) -> Action:
        return reach(app, f"{self.menu}.{self.goal}" if app.ui.opened == self.menu else self.menu)

    def _choose(self, entry: str) -> None:
        self.last = entry


def paragraph(ui: Ui, lengths: list[float]) -> list[Widget]:
    """Return lines that look like text; lengths are shares of 300 design units."""
    return [
        Line([Sized(Fill(ui.theme.edge), 300 * length, 4)], down=False, align="start")
        for length in lengths
    ]


class CloseScene(DeskScene):
    """Close a document that has changes: save them, or not."""

    title = "Untitled*"
    units = (340, 220)
    ends_at_goal = True

    def set_up(self) -> None:
        self.saves = self.rng.random() < 0.5
        self.asking = False
        self.closed = ""
        self.lines = [self.rng.uniform(0.4, 0.95) for _ in range(6)]
        self.instruction = (
            "Close the document and save it."
            if self.saves
            else "Close the document without saving."
        )

    def on_close(self) -> EventHandler | None:
        return partial(self._ask, True)

    def body(self) -> Widget:
        page = column(*paragraph(self.ui, self.lines), gap=11, pad=18)
        return Panel(page, fill=self.ui.theme.field)

    def above(self) -> list[Layer]:
        if not self.asking:
            return []
        buttons = [
            ("cancel", "Cancel", partial(self._ask, False)),
            ("drop", "Don't save", partial(self._close, "dropped")),
            ("save", "Save", partial(self._close, "saved")),
        ]
        text = Label("Save the changes before closing?")
        close = partial(self._ask, False)
        return [dialog(self.ui, "ask", "Close", text, buttons, on_close=close, over=self.window)]

    def evaluate(self) -> Verdict:
        return verdict_if(self.closed == ("saved" if self.saves else "dropped"))

    def solve(self, app: App) -> Action:
        if not self.asking:
            return reach(app, "window.close")
        return reach(app, "ask.save" if self.saves else "ask.drop")

    def _ask(self, asking: bool) -> None:
        self.asking = asking

    def _close(self, how: str) -> None:
        self.closed = how
        self.asking = False
        self.over = True


class CalculatorScene(DeskScene):
    """Compute something on a calculator with keys."""

    title = "Calculator"
    units = (0, 0)
    keys: ClassVar[tuple[str, ...]] = (
        "7", "8", "9", "/", "4", "5", "6", "*", "1", "2", "3", "-", "C", "0", "=", "+",
    )  # fmt: skip

    def set_up(self) -> None:
        rng = self.rng
        sign = rng.choice("+-*")
        a, b = rng.randint(2, 60), rng.randint(2, 9)
        a = max(a, b + 1)
        self.sum = f"{a}{sign}{b}"
        self.goal = str({"+": a + b, "-": a - b, "*": a * b}[sign])
        self.typed = ""
        self.has_computed = False  # whether "=" was the last key
        self.instruction = f"Compute {a} {sign} {b} on the calculator."

    def body(self) -> Widget:
        number = Label(f" {self.typed or '0'}", size=1.5)
        display = Panel(number, fill=self.ui.theme.field, pad=5, edge=True)
        keys = [Key(key, key, partial(self._press, key)) for key in self.keys]
        lines = [row(*keys[i : i + 4], grow=keys[i : i + 4]) for i in range(0, len(keys), 4)]
        return column(display, *lines, gap=7, pad=10)

    def evaluate(self) -> Verdict:
        values = {"display": self.typed, "computed": self.has_computed}
        return compare(values, {"display": self.goal, "computed": True})

    def solve(self, app: App) -> Action:
        if self.evaluate().outcome == "pass":
            return finish(app)
        if self.has_computed or not self.sum.startswith(self.typed):
            return reach(app, "C")
        left = self.sum[len(self.typed) :]
        return reach(app, left[0] if left else "=")

    def _press(self, key: str) -> None:
        if key == "C":
            self.typed = ""
        elif key == "=":
            self.typed = compute(self.typed)
        elif len(self.typed) < 12:
            self.typed = ("" if self.has_computed and key.isdigit() else self.typed) + key
        self.has_computed = key == "="


def compute(text: str) -> str:
    """Return the value of "12+3", "12-3", "12*3" or "12/3" (rounded down); any other text unchanged."""
    for sign in "+-*/":
        left, operator, right = text.partition(sign)
        if operator and left.isdigit() and right.isdigit():
            a, b = int(left), int(right)
            if sign == "/":
                return str(a // b) if b else "error"
            return str(a + b if sign == "+" else a - b if sign == "-" else a * b)
    return text


class ListScene(DeskScene):
    """Select a line of a list that is longer than its window."""

    title = "People"
    units = (240, 230)

    def set_up(self) -> None:
        rng = self.rng
        firsts = rng.sample(words.FIRST_NAMES, 20)
        self.people = sorted(f"{first} {rng.choice(words.LAST_NAMES)}" for first in firsts)
        self.goal = rng.choice(self.people)
        self.selected = ""
        self.instruction = f"Select {self.goal} in the list."

    def body(self) -> Widget:
        rows = [
            ListRow(name, name, partial(self._select, name), selected=name == self.selected)
            for name in self.people
        ]
        view = ScrollView("people", column(*rows, gap=0), fill=self.ui.theme.field)
        return column(Label("Select a person"), view, pad=10, grow=[view])

    def evaluate(self) -> Verdict:
        return compare({"selected": self.selected}, {"selected": self.goal})

    def solve(self, app: App) -> Action:
        return finish(app) if self.selected == self.goal else reach(app, self.goal)

    def _select(self, name: str) -> None:
        self.selected = name


class ContactsScene(ListScene):
    """Find a contact, by search or by scrolling, and call them or write to them."""

    title = "Contacts"
    units = (380, 260)
    ends_at_goal = True

    def set_up(self) -> None:
        super().set_up()
        self.query = ""
        self.verb = self.rng.choice(("Call", "Message", "Invite"))
        self.contacted: tuple[str, str] | None = None
        self.instruction = f"{self.verb} {self.goal}."

    def body(self) -> Widget:
        theme = self.ui.theme
        rows = [
            ListRow(name, name, partial(self._select, name), selected=name == self.selected)
            for name in self.people
            if self.query.lower() in name.lower()
        ]
        view = ScrollView("people", column(*rows, gap=0), width=170, fill=theme.field)
        search = TextField("search", self.query, self._search, hint="Search", width=170)
        left = Panel(column(search, view, pad=8, grow=[view]), fill=theme.panel)
        card: list[Widget] = [Label(self.selected or "Nobody selected", size=1.2)]
        if self.selected:
            card += [
                Button(verb, verb, partial(self._do, verb), primary=verb == "Call")
                for verb in ("Call", "Message", "Invite")
            ]
        right = column(*card, gap=9, pad=12)
        return row(left, right, gap=0, align="fill", grow=[right])

    def evaluate(self) -> Verdict:
        if self.contacted is not None and self.contacted != (self.verb, self.goal):
            return Verdict("fail", f"did {self.contacted[0]} {self.contacted[1]}")
        return verdict_if(self.contacted is not None)

    def solve(self, app: App) -> Action:
        if self.selected == self.goal:
            return reach(app, self.verb)
        in_sight = app.see(self.goal) is not None
        if in_sight or self.query == self.goal:
            return reach(app, self.goal)
        return fill(app, "search", self.goal) or reach(app, self.goal)

    def _search(self, text: str) -> None:
        self.query = text

    def _do(self, verb: str) -> None:
        self.contacted = (verb, self.selected)
        self.over = True


class ChoresScene(DeskScene):
    """Add a line to a list, and tick another."""

    title = "To do"
    units = (280, 260)

    def __init__(self, rng: Random, ui: Ui) -> None:
        self.draft = ""
        super().__init__(rng, ui)

    def set_up(self) -> None:
        chores = self.rng.sample(words.CHORES, 6)
        self.chores = dict.fromkeys(chores[:5], False)
        for chore in chores[1:3]:
            self.chores[chore] = self.rng.random() < 0.3
        new, tick = chores[5], chores[0]
        order = self.rng.sample(list(self.chores), 5)
        self.chores = {chore: self.chores[chore] for chore in order}
        self.goal = {**self.chores, tick: True, new: False}
        self.new, self.tick = new, tick
        self.instruction = f'Add "{new}" to the list and tick "{tick}".'

    def body(self) -> Widget:
        field = TextField("new", self.draft, self._write, hint="New entry", on_enter=self._add)
        entry = row(field, Button("add", "Add", self._add), grow=[field])
        lines = [
            CheckBox(c, c, is_ticked, partial(self._tick, c))
            for c, is_ticked in self.chores.items()
        ]
        view = ScrollView("chores", column(*lines, gap=5))
        return column(entry, view, gap=9, pad=12, grow=[view])

    def evaluate(self) -> Verdict:
        return compare(self.chores, self.goal)

    def solve(self, app: App) -> Action:
        if self.new not in self.chores:
            return fill(app, "new", self.new) or reach(app, "add")
        wrong = [
            c for c, is_ticked in self.chores.items() if is_ticked != self.goal.get(c, is_ticked)
        ]
        return reach(app, wrong[0]) if wrong else finish(app)

    def _write(self, text: str) -> None:
        self.draft = text

    def _add(self) -> None:
        if self.draft and self.draft not in self.chores:
            self.chores[self.draft] = False
            self.draft = ""

    def _tick(self, chore: str) -> None:
        self.chores[chore] = not self.chores[chore]
