"""What an environment plays in: a browser of its own, and a visit to the application for each episode.

BrowserGui   begins visits, performs actions, waits until the page is still, takes screenshots
GuiOptions   how large the page is, and how long it is waited for
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bus.errors import EnvError
from envs.contract.actions import Action, Goto, Wait
from envs.contract.base import Observation
from envs.contract.options import ImageEncoding
from envs.contract.screenshots import MEDIA_TYPES
from envs.tools.browser.activity import PageEvent
from envs.tools.browser.shared import SharedBrowser
from envs.tools.browser.tab import Tab, TabRules
from envs.tools.browser.visit import Visit, flags_for

VISITS = 300  # episodes after which the browser is replaced, so that nothing accumulates in it
READY_POLL_MS = 100.0  # of the page's time between two looks whether it is ready


@dataclass(frozen=True)
class GuiOptions:
    """How large the page is, and how long it is waited for."""

    size: tuple[int, int] = (1280, 720)  # CSS pixels
    scale: float = 1.0  # pixels of the screenshot per CSS pixel
    encoding: ImageEncoding = "png"
    step_ms: float = 500.0  # of the page's time that each step takes at least
    still_ms: float = (
        2000.0  # of the page's time, after which a page that moves on is not waited for
    )
    patience_s: float = 5.0  # seconds after which a request stays open, and is not waited for
    deadline_s: float = 20.0  # the longest answer of the page or the browser
    phone: str = ""  # as in TabRules


class BrowserGui:
    """A browser of one environment. Not thread-safe: one slot owns it. Its methods raise EnvError.

    Whatever breaks ends the browser with all its processes; the next visit has a new one.
    """

    def __init__(
        self, find_binary: Callable[[], Path], names: Sequence[str], options: GuiOptions
    ) -> None:
        """Prepare for pages of the hosts `names`, by name or address; nothing starts before a visit."""
        self.options = options
        self._shared = SharedBrowser(
            find_binary,
            scale=options.scale,
            deadline_s=options.deadline_s,
            flags=flags_for(names),
        )
        self._shared.join()
        self._visit: Visit | None = None
        self._visits = 0
        self._closed = False

    def begin(
        self,
        hosts: Sequence[str],
        *,
        seed: int = 0,
        began_s: float = 0.0,
        accepts_dialogs: bool = True,
        uploads: Sequence[str] = (),
    ) -> Visit:
        """Return a new visit with an empty page, whose pages reach `hosts` only ("name" or "name:port").

        The other arguments are those of TabRules.
        """
        if self._closed:
            raise EnvError("the environment is closed")
        self.leave()
        if self._visits >= VISITS:
            self._end_browser()
        options = self.options
        rules = TabRules(
            options.size,
            options.scale,
            options.encoding,
            options.deadline_s,
            options.patience_s,
            began_s=began_s,
            seed=seed,
            accepts_dialogs=accepts_dialogs,
            uploads=tuple(uploads),
            phone=options.phone,
        )
        self._visits += 1
        try:
            self._visit = Visit(self._shared.browser(), rules, hosts)
        except BaseException:
            self._end_browser()
            raise
        return self._visit

    def open(self, address: str, ready: str = "") -> None:
        """Go to an address, and wait as `settle` does."""
        visit = self.visit
        try:
            visit.open(address)
        except BaseException:
            self._end_browser()
            raise
        self.settle(ready)

    def settle(self, ready: str = "") -> None:
        """Wait until the page is still, as after an action, and the expression `ready` is true in it."""
        visit, until = self.visit, time.monotonic() + self.options.deadline_s
        try:
            self._settle(visit, self.options.step_ms)
            while ready and not visit.tab.evaluate(f"Boolean({ready})"):
                if time.monotonic() > until:
                    raise EnvError(
                        f"the page is not ready in {self.options.deadline_s:g} s: {ready} is not true"
                    )
                self._settle(visit, READY_POLL_MS)
        except BaseException:
            self._end_browser()
            raise

    def perform(self, action: Action) -> Observation:
        """Perform an action, wait until the page is still, and return the screen."""
        visit = self.visit
        try:
            if isinstance(action, Goto):
                with suppress(EnvError):  # an address that cannot be opened does nothing
                    visit.open(action.url)
            else:
                visit.act(action)
            least_ms = action.seconds * 1000 if isinstance(action, Wait) else self.options.step_ms
            self._settle(visit, least_ms)
            return self._observe(visit)
        except BaseException:
            self._end_browser()
            raise

    def look(self) -> Observation:
        """Return the present screen."""
        visit = self.visit
        try:
            return self._observe(visit)
        except BaseException:
            self._end_browser()
            raise

    def ask(self, expression: str) -> object:
        """Return the value of a JavaScript expression in the page that is shown. Raises EnvError if it throws."""
        return self.visit.tab.evaluate(expression)

    @property
    def visit(self) -> Visit:
        """The visit of the present episode. Raises EnvError if there is none."""
        if self._visit is None:
            raise EnvError("no episode is being played, or its page broke; call reset first")
        return self._visit

    @property
    def tab(self) -> Tab:
        """The page that is shown. Raises EnvError if no episode is being played."""
        return self.visit.tab

    def take_events(self) -> list[PageEvent]:
        """Return what the pages did beside their screens since the last call."""
        return [] if self._visit is None else self._visit.take_events()

    def take_log(self) -> list[str]:
        """Return the events since the last call as lines, for `info["app_log"]`."""
        return [event.line for event in self.take_events()]

    def leave(self) -> None:
        """End the present visit with its storage, if there is one."""
        visit, self._visit = self._visit, None
        if visit is not None:
            visit.close()

    def close(self) -> None:
        """End the browser; may be called twice."""
        if not self._closed:
            self._closed = True
            self.leave()
            self._shared.leave()

    def _settle(self, visit: Visit, least_ms: float) -> None:
        most_ms = max(least_ms, self.options.still_ms)
        visit.settle(least_ms, most_ms)

    def _observe(self, visit: Visit) -> Observation:
        (width, height), scale = self.options.size, self.options.scale
        return Observation(
            visit.look(),
            MEDIA_TYPES[self.options.encoding],
            round(width * scale),
            round(height * scale),
        )

    def _end_browser(self) -> None:
        visit, self._visit = self._visit, None
        self._visits = 0
        self._shared.end()
        if visit is not None:
            visit.close()
