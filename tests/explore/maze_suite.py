"""An application of pages with links, for explorers: it can break, end, and kill its process."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any

from PIL import Image

from bus.errors import ActionCausedError, EnvError
from envs.contract.actions import Action, Click, Type
from envs.contract.base import Observation, Task, Verdict
from envs.contract.blobs import content_hash
from envs.contract.elements import Element, ScreenState

SUITE = f"{__name__}:MazeSuite" if "." in __name__ else f"{__file__}:MazeSuite"

PAGES: Mapping[str, tuple[tuple[str, str | None], ...]] = {
    "home": (("Open list", "list"), ("Help", "help"), ("Logo", None), ("Delete all", "gone")),
    "list": (("Home", "home"), ("Item", "item"), ("Search", None)),
    "item": (("Back", "list"), ("Edit", "edit"), ("Crash", "!")),
    "edit": (("Save", "saved"), ("Cancel", "item")),
    "saved": (("Done", "#"), ("Home", "home")),
    "help": (("Home", "home"),),
    "gone": (("Back", "home"),),
    "#": (),
}
"""Page -> what is on it, and where it leads; None: nowhere, !: an error, #: the end of the episode."""

PAUSE_AT = "MAZE_PAUSE_AT"
"""Variable: the step of a process in which it tells so, and waits."""
KILL_AT = "MAZE_KILL_AT"
"""Variable: steps of a process, within the last of which it is killed."""


class Maze:
    """See envs.contract.base.GuiEnv and envs.contract.elements.Explorable."""

    steps = 0  # of all mazes of the process

    def __init__(self, broken_resets: int = 0) -> None:
        self.page, self.typed, self._broken = "", "", broken_resets

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        if self._broken:
            self._broken -= 1
            raise EnvError("no display")
        self.page = "home"
        return self._observe(), {"instruction": "look around"}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        Maze.steps += 1
        if Maze.steps == int(os.environ.get(KILL_AT, "0")):
            os.kill(os.getpid(), signal.SIGKILL)
        if Maze.steps == int(os.environ.get(PAUSE_AT, "0")):
            sys.stderr.write("the maze pauses\n")
            sys.stderr.flush()
            threading.Event().wait(60)  # until the process is interrupted
        if isinstance(action, Type):
            self.typed = action.text
        if isinstance(action, Click):
            [target] = [to for at, (_, to) in enumerate(PAGES[self.page]) if at == action.y // 10]
            if target == "!":
                raise ActionCausedError("the application crashed")
            self.page = target or self.page
        return self._observe(), 0.0, self.page == "#", False, {}

    def elements(self) -> list[Element]:
        return [
            Element(
                "field" if name == "Search" else "button",
                name,
                (0, 10 * at, 64, 10 * at + 10),
                ("type",) if name == "Search" else ("click",),
                f"0.{at}",
            )
            for at, (name, _) in enumerate(PAGES[self.page])
        ]

    def state(self) -> ScreenState:
        return ScreenState(content_hash(self.page.encode()), f"/{self.page}", "the same page")

    def evaluate(self) -> Verdict:
        return Verdict("fail", "there is no goal")

    def close(self) -> None:
        pass

    def _observe(self) -> Observation:
        key = content_hash(f"{self.page} {self.typed}".encode())
        into = io.BytesIO()
        Image.new("RGB", (64, 64), f"#{key[:6]}").save(into, "PNG")
        return Observation(into.getvalue(), "image/png", 64, 64)


class MazeSuite:
    """One application."""

    name = "maze"
    tasks: Mapping[str, Task] = {"maze/home": Task("maze/home", "maze", "look around", 9)}

    def make_env(self, *, broken_resets: int = 0) -> Maze:
        return Maze(broken_resets)
