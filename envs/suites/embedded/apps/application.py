"""The base class of the applications of suite `apps`: pages with a way back, a menu bar, questions, facts.

An application is a scene. It shows one `Page` at a time; links open other pages, and Back returns. The
evaluator compares all `facts` of the application with the goal, so that an additional change fails.
"""
# ruff: noqa: D102 - overrides keep the contract that the base class documents

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

from bus.errors import EnvError
from envs.contract.actions import Action
from envs.contract.base import Verdict
from envs.suites.embedded.app import App, Layer
from envs.suites.embedded.controls import Button, ListRow, ScrollView
from envs.suites.embedded.menus import Entry, MenuTitle, dialog
from envs.suites.embedded.tasks.desk import DeskScene, compare, finish, reach
from envs.suites.embedded.widgets import EventHandler, Gap, Label, Panel, Widget, column, row

LINE = 62  # characters of a paragraph's line


class Page(NamedTuple):
    """A page: its kind, and its subject."""

    kind: str
    subject: str = ""


@dataclass(frozen=True)
class Question:
    """A dialog that asks before something is done."""

    title: str
    text: str  # may hold {subject}
    yes: str  # label of the button that does it
    on_yes: EventHandler


@dataclass(frozen=True)
class Way:
    """The last step of the way to a page: the page before it, and the widget to press there.

    `menu` is the title of the menu if that widget is an entry of one.
    """

    parent: Page
    press: str
    menu: str = ""


class AppScene(DeskScene):
    """An application with a task, which a subclass plans and solves."""

    units = (436, 324)
    name: ClassVar[str] = ""
    first: ClassVar[Page]
    telling: ClassVar[frozenset[str]] = frozenset()
    """Kinds of pages whose subject is the same for every seed, so that it is part of the route."""

    def set_up(self) -> None:
        self.page = self.first
        self.trail: list[Page] = []
        self.asking = ""  # the key of the open question; empty if none is open
        self.note = ""  # the note in the status line
        self.begin()
        self.goal: dict[str, Any] = copy.deepcopy(self.facts())
        self.plan()

    # --- for subclasses ---------------------------------------------------------------------------

    @abstractmethod
    def begin(self) -> None:
        """Draw the content of the application from the seeded generator."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return the whole content of the application, as plain values by name."""

    @abstractmethod
    def plan(self) -> None:
        """Change `goal` to the goal of the task, and set the instruction."""

    @abstractmethod
    def contents(self) -> Mapping[str, Callable[[str], Widget]]:
        """Return a function for each kind of page, which makes the content from the subject."""

    @abstractmethod
    def way(self, page: Page) -> Way:
        """Return the way to a page other than the first."""

    @abstractmethod
    def move(self, app: App) -> Action | None:
        """Return the oracle's next action; None if it finds none."""

    def menus(self) -> Mapping[str, Sequence[Entry]]:
        """Return the menu bar of the first page: titles with their entries."""
        return {}

    def questions(self) -> Mapping[str, Question]:
        """Return the questions by key."""
        return {}

    # --- the screen -----------------------------------------------------------------------------

    @property
    def screen_route(self) -> str:
        page = self.page
        where = f"{page.kind}/{page.subject}" if page.kind in self.telling else page.kind
        over = "".join(f" + {part}" for part in (self.asking, self.ui.opened) if part)
        return f"{self.name}/{where}{over}"

    def body(self) -> Widget:
        theme = self.ui.theme
        gap = Gap()
        bar = self.menus() if self.page == self.first else {}
        menus = [MenuTitle(f"menu.{title}", title, entries) for title, entries in bar.items()]
        back = [Button("back", "Back", self.back, pad=7)] if self.trail else []
        heading = Label(self.heading(), size=1.15)
        top = Panel(row(*back, heading, gap, *menus, gap=6, grow=[gap]), fill=theme.panel, pad=5)
        inside = self.contents()[self.page.kind](self.page.subject)
        view = ScrollView("content", inside, fill=theme.window)
        status = Panel(Label(self.note or " ", muted=True), fill=theme.panel, pad=3)
        main = column(top, view, status, gap=0, grow=[view])
        side = self.side()
        return main if side is None else row(side, main, gap=0, align="fill", grow=[main])

    def side(self) -> Widget | None:
        """Return a side bar, if there is one."""
        return None

    def heading(self) -> str:
        return self.page.subject or self.page.kind.capitalize()

    def above(self) -> list[Layer]:
        question = self.questions().get(self.asking)
        if question is None:
            return []
        do: EventHandler = partial(self._do, question)
        buttons = [("no", "Keep", self.dismiss), ("yes", question.yes, do)]
        text = Label(question.text.format(subject=self.page.subject))
        layer = dialog(
            self.ui, "ask", question.title, text, buttons, on_close=self.dismiss, over=self.window
        )
        return [layer]

    # --- handlers ---------------------------------------------------------------------------------

    def go(self, page: Page) -> None:
        """Open a page, with a way back to the present one."""
        if page != self.page:
            self.trail.append(self.page)
        self.show(page)

    def show(self, page: Page) -> None:
        """Show a page without a way back to the present one."""
        self.page, self.note = page, ""
        self.ui.offsets.pop("content", None)

    def home(self, page: Page) -> None:
        """Show a page of the side bar: there is no way back from it."""
        self.trail.clear()
        self.show(page)

    def back(self) -> None:
        self.show(self.trail.pop())

    def ask(self, key: str) -> None:
        self.asking = key

    def dismiss(self) -> None:
        self.asking = ""

    def _do(self, question: Question) -> None:
        self.asking = ""
        question.on_yes()

    # --- parts of pages -----------------------------------------------------------------------------

    def link(self, name: str, label: str, page: Page, *, note: str = "", icon: str = "") -> ListRow:
        """Return a row that opens a page."""
        return ListRow(name, label, partial(self.go, page), note=note, icon=icon)

    # --- evaluator and oracle -------------------------------------------------------------------------

    def evaluate(self) -> Verdict:
        return compare(self.facts(), self.goal)

    def solve(self, app: App) -> Action:
        if self.facts() == self.goal:
            return finish(app)
        action = self.move(app)
        if action is None:
            raise EnvError(f"{type(self).__name__}: the oracle knows no way to {self.goal}")
        return action

    def to(self, app: App, page: Page) -> Action | None:
        """Return the next action towards a page; None if it is shown."""
        if self.page == page:
            return None
        chain = [page]
        while chain[-1] != self.first:
            chain.append(self.way(chain[-1]).parent)
        if self.page not in chain:
            if self.trail:
                return reach(app, "back")
            return reach(app, self.way(chain[-2:][0]).press)  # another page of the side bar
        way = self.way(chain[chain.index(self.page) - 1])
        return self.choose(app, way.menu, way.press) if way.menu else reach(app, way.press)

    def choose(self, app: App, menu: str, entry: str) -> Action:
        """Return the next action towards an entry of the menu bar."""
        return reach(app, entry if app.ui.opened == f"menu.{menu}" else f"menu.{menu}")

    def confirm(self, app: App, key: str, press: str) -> Action:
        """Return the next action towards answering Yes to the question that the widget `press` opens."""
        return reach(app, "ask.yes" if self.asking == key else press)


def paragraph(text: str) -> Widget:
    """Return a text on as many lines as it needs."""
    lines = [""]
    for word in text.split():
        joined = f"{lines[-1]} {word}".strip()
        if len(joined) > LINE:
            lines.append(word)
        else:
            lines[-1] = joined
    return column(*(Label(line) for line in lines), gap=3)
