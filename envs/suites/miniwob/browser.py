"""A browser that the environments of a process share, and the pages in it.

BrowserHost   the shared browser; it keeps pages loaded for tasks that will be played again
TaskPage      a page in its own browser context: it loads a task, starts an episode, acts, takes a screenshot
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

from bus.errors import EnvError
from envs.contract.actions import Action
from envs.contract.options import ImageEncoding
from envs.contract.screenshots import SCREEN_JPEG_QUALITY
from envs.tools.browser.cdp import Call, Chromium, DocumentLeftError
from envs.tools.browser.inputs import PageInput
from envs.tools.browser.process import PAGE_FILES
from envs.tools.browser.shared import SharedBrowser

WIDTH, HEIGHT = 160, 210  # CSS pixels of every task
SETTLE_MS = 500  # of the page's time, at the beginning of an episode
POLL_S = 0.002

SPARE_PAGES = 2
"""Pages kept loaded for each environment, beside the one in which it plays."""

PAGE_EPISODES = 500
"""Episodes after which a page is replaced, so that nothing accumulates in it."""


class BrowserHost(SharedBrowser):
    """One browser for all environments of a process that have the same options.

    Unused pages stay loaded with their tasks, at most `SPARE_PAGES` for each environment, since loading a
    page takes as long as some twenty steps. Beyond that number, the page that was unused for longest is
    used for another task.
    """

    def __init__(
        self,
        find_binary: Callable[[], Path],
        find_pages: Callable[[], Path],
        scale: float,
        encoding: ImageEncoding,
        deadline_s: float,
        size: tuple[int, int] = (WIDTH, HEIGHT),
    ) -> None:
        """Make a host; it looks for browser and pages only when a page is taken.

        `size` is a page's, in CSS pixels.
        """
        super().__init__(find_binary, scale=scale, deadline_s=deadline_s, flags=PAGE_FILES)
        self._find_pages = find_pages
        self._scale = scale
        self._encoding: ImageEncoding = encoding
        self._size = size
        self._spare: list[TaskPage] = []  # the one that was unused for longest comes first

    def take(self, name: str) -> TaskPage:
        """Return a page in the live browser: a spare one with task `name` loaded, if there is one.

        Raises EnvError, and MissingPartError if browser or pages are not installed.
        """
        folder = self._find_pages()
        browser = self.browser()
        with self._lock:
            broken = [page for page in self._spare if page.worn]
            self._spare = [page for page in self._spare if not page.worn]
            loaded = [page for page in self._spare if page.loaded == name]
            page = None
            if loaded or len(self._spare) > SPARE_PAGES * self._users:
                page = loaded[-1] if loaded else self._spare[0]
                self._spare.remove(page)
        for worn in broken:
            worn.close()
        return page or TaskPage(
            browser,
            folder,
            scale=self._scale,
            encoding=self._encoding,
            deadline_s=self._deadline_s,
            size=self._size,
        )

    def give_back(self, page: TaskPage) -> None:
        """Keep an intact page loaded for the next episode of its task."""
        with self._lock:
            if page.browser is self._browser:
                self._spare.append(page)

    def _end(self) -> None:
        self._spare.clear()
        super()._end()


class TaskPage:
    """A page that plays one task at a time. Its methods raise EnvError if it is broken."""

    def __init__(
        self,
        browser: Chromium,
        folder: Path,
        scale: float,
        encoding: ImageEncoding,
        deadline_s: float,
        size: tuple[int, int],
    ) -> None:
        self.browser = browser
        self.loaded = ""  # the name of the task that is loaded
        self._input = PageInput(scale, _turn_wheel)
        self._rests = True  # whether mouse and keyboard are still unused in this episode
        self._episodes = 0
        self._folder = folder
        self._shot: dict[str, Any] = {"format": encoding, "optimizeForSpeed": True}
        if encoding == "jpeg":
            self._shot["quality"] = SCREEN_JPEG_QUALITY
        self._deadline_s = deadline_s
        self._context = browser.call("Target.createBrowserContext")["browserContextId"]
        try:
            self._session = browser.open(self._context, *size)
            self._set_up()
        except EnvError:
            self.close()
            raise

    @property
    def worn(self) -> bool:
        """Whether the page must be replaced, since it ended or played many episodes."""
        return not self._session.lives or self._episodes >= PAGE_EPISODES

    def load(self, name: str) -> None:
        """Load the page of task `name`, even if it is loaded already."""
        self.loaded = ""
        address = (self._folder / f"{name}.html").as_uri()
        reply = self._session.call("Page.navigate", url=address)
        if error := reply.get("errorText"):
            raise EnvError(f"{address} cannot be loaded: {error}")
        until = time.monotonic() + self._deadline_s
        while not self._session.evaluate(
            f"location.href === {json.dumps(address)} && dart.ready()"
        ):
            if time.monotonic() > until:
                raise EnvError(f"{address} was not ready in {self._deadline_s:g} s")
            time.sleep(POLL_S)
        self._session.evaluate("dart.preload()")
        self.loaded = name

    def start(self, seed: int, mode: str, settle_ms: float = SETTLE_MS) -> dict[str, Any]:
        """Begin an episode of the loaded task; return its `instruction` and the fields of `pass_time`.

        The seed is passed as a number, as in Farama's `reset(seed=n)`: seedrandom draws differently from "7".
        """
        expression = f"dart.start({seed}, {json.dumps(mode)}, {settle_ms:g})"
        self._episodes += 1
        return self._as_object(self._session.evaluate(expression))

    def act(self, action: Action) -> None:
        """Perform an action."""
        if commands := self._input.commands_of(action):
            self._rests = False
            self._session.send(commands)

    def rest(self) -> None:
        """Release buttons and keys, and move the pointer to where it is at the beginning of an episode."""
        if not self._rests:
            self._session.send(self._input.rest())
            self._rests = True

    def pass_time(self, ms: float) -> dict[str, Any]:
        """Advance the page's time by `ms`; return its state: `playing`, `done`, `reward`.

        If a link or a form leads to another document meanwhile, that document answers, and is not `playing`.
        """
        until = time.monotonic() + self._deadline_s
        while True:
            try:
                return self._as_object(self._session.evaluate(f"dart.pass({ms:g})"))
            except DocumentLeftError:
                if time.monotonic() > until:
                    raise

    def evaluate(self, expression: str) -> Any:
        """Return a value from the page. Raises EnvError if the expression throws."""
        return self._session.evaluate(expression)

    def look(self) -> bytes:
        """Return a screenshot of the present state.

        One frame is drawn for it. In a browser that draws by its own clock, Page.captureScreenshot would
        wait for that clock or, with an unlimited frame rate, begin some two hundred frames for each
        screenshot.
        """
        drew_s = 0.0  # without the time in which other pages drew
        while drew_s < self._deadline_s:
            with self.browser.drawing():
                began = time.monotonic()
                frame = self._session.call("HeadlessExperimental.beginFrame", screenshot=self._shot)
                drew_s += time.monotonic() - began
            if "screenshotData" in frame:
                return base64.b64decode(frame["screenshotData"])
            time.sleep(POLL_S)  # another page is loading and has nothing to draw yet
            drew_s += POLL_S
        raise EnvError(f"the browser drew no frame in {self._deadline_s:g} s")

    def close(self) -> None:
        """Close the page and its browser context."""
        with suppress(EnvError):  # closed already, with its browser
            self.browser.call("Target.disposeBrowserContext", browserContextId=self._context)

    def _set_up(self) -> None:
        script = files("envs.suites.miniwob").joinpath("page.js").read_text(encoding="utf-8")
        self._session.send(
            [
                Call("Page.enable", {}),
                Call("Page.addScriptToEvaluateOnNewDocument", {"source": script}),
                Call("Emulation.setFocusEmulationEnabled", {"enabled": True}),
            ]
        )

    def _as_object(self, value: object) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise EnvError(f"the page of {self.loaded} answers {value!r}")
        return value


def _turn_wheel(x: float, y: float, dx: int, dy: int) -> Call:
    """Return the command with which page.js performs the wheel."""
    return Call("Runtime.evaluate", {"expression": f"dart.wheel({x:g}, {y:g}, {dx}, {dy})"})
