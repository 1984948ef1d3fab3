"""One instance of a task: its state, the layers that show it, its evaluator and its solution.

Scene     the base class
click     the action that clicks a widget, for solutions
phrases   the instructions of one step that a click on a widget fulfils, for suite `mini`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from random import Random
from typing import ClassVar

from bus.errors import EnvError
from envs.contract.actions import Action, Click
from envs.contract.base import Verdict
from envs.suites.embedded.app import App, Layer
from envs.suites.embedded.widgets import Ui

NOT_YET = Verdict("fail", "the goal is not reached")
REACHED = Verdict("pass", "the goal is reached")


class Scene(ABC):
    """The task instance of one episode.

    It is made from a seeded generator, so that a seed always gives the same scene.

    `over` ends the episode at once, after an action that cannot be undone.
    """

    ends_at_goal: ClassVar[bool] = False
    """Whether reaching the goal ends the episode; otherwise the policy must perform `done`."""

    def __init__(self, rng: Random, ui: Ui) -> None:
        self.rng = rng
        self.ui = ui
        self.instruction = ""
        self.over = False

    @property
    def screen_route(self) -> str:
        """The place in the application, the same for every seed; empty for the titles of its windows."""
        return ""

    @abstractmethod
    def layers(self) -> list[Layer]:
        """Return the layers that show the state, bottom to top."""

    @abstractmethod
    def evaluate(self) -> Verdict:
        """Return the verdict on the present state."""

    @abstractmethod
    def solve(self, app: App) -> Action:
        """Return the next action of a shortest solution from the present state."""


SceneFactory = Callable[[Random, Ui], Scene]


def click(app: App, name: str) -> Click:
    """Return a click on the middle of the widget of that name. Raises EnvError if it is out of reach."""
    info = app.see(name)
    if info is None:
        names = ", ".join(widget.name for widget in app.widgets())
        raise EnvError(f"the oracle wants to click {name!r}, which is not within reach of: {names}")
    x, y = info.centre
    return Click(x=x, y=y)


ICON_PHRASES = {
    "ok": "click ok",
    "close": "click close",
    "next": "click next",
    "back": "click back",
    "menu": "click menu",
    "submit": "click submit",
    "trash": "click trash",
    "up": "click up",
    "down": "click down",
    "folder": "click folder",
    "list": "click list",
}
COLOUR_PHRASES = {
    "button": ("click the {} button",),
    "box": ("check the {} box",),
    "swatch": ("pick {}",),
    "file": ("click the {} file", "delete the {} file"),
}
TAB_PHRASE = "click the {} tab"


def phrases(role: str, name: str, colour: str) -> tuple[str, ...]:
    """Return the instructions of one step that a click on such a widget fulfils."""
    if role in COLOUR_PHRASES:
        return tuple(phrase.format(colour) for phrase in COLOUR_PHRASES[role])
    if role == "tab":
        return (TAB_PHRASE.format(name.removesuffix(".tab")),)
    short = name.rpartition(".")[2]
    return (ICON_PHRASES[short],) if role and short in ICON_PHRASES else ()
