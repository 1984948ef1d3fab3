"""One instance of a task: its state, the layers that show it, its judge and its solution."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from random import Random
from typing import ClassVar

from bus.errors import EnvError
from envs.actions import Action, Click
from envs.base import Verdict
from envs.embedded.app import App, Layer
from envs.embedded.widgets import Ui

NOT_YET = Verdict("fail", "the goal is not reached")
REACHED = Verdict("pass", "the goal is reached")


class Scene(ABC):
    """What one episode is about. Made from a seeded generator, so the same seed is the same scene.

    `over` ends the episode at once: something was done that cannot be taken back.
    """

    ends_at_goal: ClassVar[bool] = False
    """Whether reaching the goal ends the episode; otherwise the policy has to say it is done."""

    def __init__(self, rng: Random, ui: Ui) -> None:
        self.rng = rng
        self.ui = ui
        self.instruction = ""
        self.over = False

    @abstractmethod
    def layers(self) -> list[Layer]:
        """What the state looks like, bottom to top."""

    @abstractmethod
    def judge(self) -> Verdict:
        """Whether the state is what was asked for."""

    @abstractmethod
    def solve(self, app: App) -> Action:
        """The next action of a shortest solution, from whatever state it is in."""


SceneFactory = Callable[[Random, Ui], Scene]


def click(app: App, name: str) -> Click:
    """A click on the middle of the widget of that name. Raises EnvError if it is out of reach."""
    info = app.see(name)
    if info is None:
        seen = ", ".join(widget.name for widget in app.widgets())
        raise EnvError(f"the oracle wants to click {name!r}, which is not within reach of: {seen}")
    x, y = info.centre
    return Click(x=x, y=y)
