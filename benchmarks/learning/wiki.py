"""Suite `benchmarks.learning.wiki:WikiSuite`: TiddlyWiki (wiki_pages.py) to be explored, in headless Chromium.

    WikiEnv     one notebook, drawn by the seed; it has no goal of its own
    WikiSuite   its one task

The browser, its clock and its tree are those of suite `miniwob`. Tasks with a goal are made by
`dart explore tasks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from benchmarks.learning.wiki_pages import INSTRUCTION, fetched, instance
from bus.errors import EnvError
from envs.contract.actions import Action, Answer, Done, Fail
from envs.contract.base import Observation, Task, Verdict, task_of
from envs.contract.elements import Element, ScreenState, elements_of, state_of
from envs.contract.options import checked
from envs.suites.miniwob.browser import SETTLE_MS, BrowserHost, TaskPage
from envs.suites.miniwob.oracle import read_page
from envs.tools.chromium import find_chromium

SIZE = (448, 336)
"""CSS pixels, which are those of the screenshot: as suite `apps`."""
STEP_MS = 500.0
DEADLINE_S = 30.0

TASKS: Mapping[str, Task] = {
    "wiki/look": Task(
        "wiki/look", "wiki", INSTRUCTION, max_steps=40, params={"application": "wiki"}
    )
}


class WikiEnv:
    """See envs.contract.base.GuiEnv and envs.contract.elements.Explorable."""

    def __init__(self, host: BrowserHost, cache: Path) -> None:
        self._host = host
        self._cache = cache
        self._page: TaskPage | None = None
        self._is_playing = False
        self._closed = False
        host.join()

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Load the notebook of the seed anew."""
        task_of(options, TASKS, "wiki")
        if self._closed:
            raise EnvError("the environment is closed")
        name = instance(self._cache, seed or 0)
        self._is_playing = False
        if self._page is not None and self._page.worn:
            self._drop()
        page = self._page = self._page or self._host.take(name)
        try:
            page.load(name)
            page.rest()
            page.start(seed or 0, "train", SETTLE_MS)
            self._is_playing = True
            return self._observe(page), {"instruction": INSTRUCTION}
        except EnvError:
            self._drop()
            raise

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Perform the action and advance the page's time. Raises EnvError."""
        page = self._playing()
        try:
            page.act(action)
            told = page.pass_time(STEP_MS)
            seen = self._observe(page)
        except EnvError:
            self._drop()
            raise
        over = not told["playing"] or isinstance(action, Done | Fail | Answer)
        return seen, 0.0, over, False, {}

    def evaluate(self) -> Verdict:
        """Nothing is asked for, so nothing passes."""
        self._playing()
        return Verdict("fail", "the notebook is there to be explored and has no goal")

    def elements(self) -> list[Element]:
        """Return what can be seen and reached. Raises EnvError."""
        return elements_of([read_page(self._playing(), 1.0)])

    def state(self) -> ScreenState:
        """Which screen is shown, by the skeleton alone: the address never changes. Raises EnvError."""
        return state_of("", [read_page(self._playing(), 1.0)])

    def close(self) -> None:
        """Close the page; the last environment of the process closes the browser."""
        if not self._closed:
            self._closed = True
            self._drop()
            self._host.leave()

    def _drop(self) -> None:
        page, self._page, self._is_playing = self._page, None, False
        if page is not None:
            page.close()

    def _playing(self) -> TaskPage:
        if self._page is None or not self._is_playing:
            raise EnvError("no episode is being played; call reset first")
        return self._page

    def _observe(self, page: TaskPage) -> Observation:
        return Observation(page.look(), "image/png", *SIZE)


class WikiSuite:
    """The notebook; one browser in a process for each folder of pages."""

    name = "wiki"
    tasks: Mapping[str, Task] = TASKS

    def __init__(self) -> None:
        self._hosts: dict[Path, BrowserHost] = {}

    @checked
    def make_env(self, *, pages: Annotated[str, Field(min_length=1)]) -> WikiEnv:
        """Return an environment whose pages are kept in the folder `pages`."""
        cache = Path(pages).absolute()
        host = self._hosts.setdefault(
            cache,
            BrowserHost(partial(find_chromium, ""), lambda: cache, 1.0, "png", DEADLINE_S, SIZE),
        )
        return WikiEnv(host, cache)

    def check_parts(self, *, pages: str, **_: object) -> None:
        """Raise MissingPartError if Chromium, or node for a page that is not built yet, is not installed."""
        find_chromium("")
        fetched(Path(pages))
