"""A headless Chromium that opens the viewer's pages: for the tests of tests/view.

    browsing   a browser with one page, for as long as the block lasts
    Browser    opens addresses, takes the time, and returns the scripts that ran and the DOM
    LoadedPage     one page as the browser has it

The scripts that run in each page are injected from here over the DevTools protocol: this does not
weaken the viewer's policy, which allows no script of its own.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bus.errors import EnvError
from envs.tools.browser.cdp import Call, Chromium, PageSession
from envs.tools.browser.process import PAGE_FILES, find_chromium, resolving

WIDTH, HEIGHT = 1280, 900
DEADLINE_S = 30.0
_POLL_S = 0.002
_FLAGS = (*PAGE_FILES, resolving(["127.0.0.1"]))

_RECORDER = """
window.__ran = [];
for (const name of ['alert', 'confirm', 'prompt', 'open', 'print', 'fetch'])
  window[name] = () => { window.__ran.push(name); };
document.addEventListener('securitypolicyviolation',
  event => window.__ran.push('refused ' + event.violatedDirective));
"""
"""Runs before the page: dialogs, windows and requests are recorded instead of shown."""

_ELEMENTS = """
[...document.querySelectorAll('*')].map(
  each => [each.tagName, each.getAttributeNames().join(' ')].join(' '))
"""


@dataclass(frozen=True)
class LoadedPage:
    """One page, loaded with its images and laid out."""

    address: str
    seconds: float  # from the command to go there until its layout is known
    title: str
    ran: list[str]  # dialogs, windows and requests that scripts asked for, and what was refused
    bones: list[str]  # every element in order: its name and its attributes' names


class Browser:
    """One page of a browser; an address is opened in the place of the one before."""

    def __init__(self, page: PageSession) -> None:
        self._page = page
        page.send([Call("Page.enable", {}), Call("Network.enable", {})])
        page.call("Network.setCacheDisabled", cacheDisabled=True)
        page.call("Page.addScriptToEvaluateOnNewDocument", source=_RECORDER)

    def open(self, address: str) -> LoadedPage:
        """Load a page. Raises EnvError where it cannot be loaded, or not in time."""
        self.evaluate("window.__left = true")  # until the new document is there
        began = time.perf_counter()
        reply = self._page.call("Page.navigate", url=address)
        if error := reply.get("errorText"):
            raise EnvError(f"{address} cannot be loaded: {error}")
        is_there = "!window.__left && document.readyState === 'complete'"
        while not self.evaluate(is_there):
            if time.perf_counter() - began > DEADLINE_S:
                raise EnvError(f"{address} was not loaded in {DEADLINE_S:g} s")
            time.sleep(_POLL_S)
        self.evaluate("document.documentElement.getBoundingClientRect().height")
        seconds = time.perf_counter() - began
        return LoadedPage(
            address=address,
            seconds=seconds,
            title=self.evaluate("document.title"),
            ran=self.evaluate("window.__ran"),
            bones=self.evaluate(_ELEMENTS),
        )

    def box(self, selector: str) -> tuple[float, float, float, float]:
        """Left, top, width and height of the first element that matches, in CSS pixels."""
        found = self.evaluate(
            f"(r => [r.left, r.top, r.width, r.height])"
            f"(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
        )
        left, top, width, height = found
        return left, top, width, height

    def resize(self, width: int) -> None:
        """Make the page so wide, in CSS pixels, as a phone's is; below a window's least width, too."""
        self._page.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=HEIGHT,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def point(self, x: float, y: float) -> None:
        """Bring the pointer there by a click, in CSS pixels of the part of the page that is seen.

        A move alone would wait for a frame, and none begins by itself.
        """
        place = {"x": x, "y": y, "button": "left", "clickCount": 1}
        kinds = ("mousePressed", "mouseReleased")
        self._page.send(
            [Call("Input.dispatchMouseEvent", {"type": kind, **place}) for kind in kinds]
        )

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page. Raises EnvError where it throws."""
        return self._page.evaluate(expression)


@contextlib.contextmanager
def browsing() -> Iterator[Browser]:
    """Yield a browser. Raises MissingPartError where there is none."""
    chromium = Chromium(find_chromium(), 1.0, DEADLINE_S, _FLAGS)
    try:
        context = chromium.call("Target.createBrowserContext")["browserContextId"]
        yield Browser(chromium.open(context, WIDTH, HEIGHT))
    finally:
        chromium.close()
