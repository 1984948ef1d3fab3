"""MiniwobEnv: plays MiniWoB++ tasks (PyPI `miniwob`) in headless Chromium.

A task evaluates itself: its page ends the episode with a raw reward of -1 to 1. A reward that reaches the
task's threshold is a pass; by the published metric, a reward above 0 is. If page or browser break, EnvError
is raised, the episode is invalid, and the next reset begins with a new page, in a new browser if needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from bus.errors import EnvError
from bus.messages import Outcome
from envs.contract.actions import Action, Answer, Done, Fail, Wait
from envs.contract.base import Observation, Task, Verdict, task_of
from envs.contract.elements import Element, ScreenState, elements_of, state_of
from envs.contract.options import ImageEncoding, Seconds, checked
from envs.contract.screenshots import MEDIA_TYPES
from envs.suites.miniwob.browser import HEIGHT, SETTLE_MS, WIDTH, BrowserHost, TaskPage
from envs.suites.miniwob.oracle import Oracle, PageWidget, read_page, route_of
from envs.suites.miniwob.tasks import FIRST_TEST_SEED, LEFT_OUT, TASKS, Pace
from envs.tools.browser.process import find_chromium
from envs.tools.miniwob_pages import find_pages

Metric = Literal["threshold", "published"]

_LEFT_OUT = {f"miniwob/{page}": reason for page, reason in LEFT_OUT.items()}


class MiniwobEnv:
    """Plays suite `miniwob`. See envs.contract.base.GuiEnv for the contract.

    `metric` decides which rewards pass in `evaluate`; it may be changed at any time.
    """

    def __init__(
        self,
        host: BrowserHost,
        *,
        scale: float,
        encoding: ImageEncoding,
        step_ms: float,
        metric: Metric = "threshold",
    ) -> None:
        self._host = host
        self._scale = scale
        self._encoding: ImageEncoding = encoding
        self._step_ms = step_ms
        self.metric = metric
        self._page: TaskPage | None = None
        self._task: Task | None = None
        self._oracle: Oracle | None = None
        self._page_state: dict[str, Any] = {}
        self._over = True
        self._closed = False
        host.join()

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start `options["task"]`, a Task of this suite or its id."""
        task = task_of(options, TASKS, "miniwob", _LEFT_OUT)
        seed = 0 if seed is None else seed
        self._task, self._over = None, True
        name = task.params["page"]
        page = self._page_for(name)
        try:
            if page.loaded != name or task.params["reload"]:
                page.load(name)
            page.rest()
            mode = "test" if seed >= FIRST_TEST_SEED else "train"
            pace: Pace | None = task.params["pace"]
            self._page_state = page.start(seed, mode, pace.settle_ms if pace else SETTLE_MS)
            self._task, self._over = task, False
            self._oracle = Oracle(page, task, self._scale)
            observation = self._observe(page)
        except EnvError:
            self._drop_page()
            raise
        return observation, {"instruction": self._page_state["instruction"]}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Perform the action and advance the page's time by `step_ms`, or by the page's own pace.

        Raises EnvError.
        """
        page = self._playing()
        if self._over:
            raise EnvError("the episode is over; call reset before the next step")
        try:
            page.act(action)
            self._page_state = page.pass_time(self._duration_ms(action))
            if not self._page_state["playing"]:
                page.loaded = ""  # it holds another document, in which no episode can begin
            observation = self._observe(page)
            has_ended = self._page_state["done"] or not self._page_state["playing"]
            self._over = has_ended or isinstance(action, Done | Fail | Answer)
            if self._over:
                page.rest()  # now, not at the start of the next episode
        except EnvError:
            self._drop_page()
            raise
        reward = (self.evaluate().reward or 0.0) if self._over else 0.0
        return observation, reward, self._over, False, {"raw_reward": self._page_state["reward"]}

    def evaluate(self) -> Verdict:
        """Return pass if the task has ended with a raw reward that passes by the metric."""
        if self._task is None:
            return Verdict("invalid", "no episode is being played, or its page broke")
        reward, threshold = self._page_state["reward"], self._task.params["threshold"]
        if not self._page_state["playing"]:
            return Verdict("fail", "the task's page was left")
        if not self._page_state["done"]:
            return Verdict("fail", "the task has not ended")
        is_published = self.metric == "published"
        outcome: Outcome = (
            "pass" if (reward > 0 if is_published else reward >= threshold) else "fail"
        )
        needs = "more than 0" if is_published else f"{threshold:g}"
        why = f" ({self._page_state['reason']})" if self._page_state["reason"] else ""
        clamped = min(max(reward, 0.0), 1.0)
        return Verdict(outcome, f"raw reward {reward:g}, needs {needs}{why}", clamped)

    @property
    def page_state(self) -> Mapping[str, Any]:
        """The page's last report: whether it is `playing` and `done`, its raw `reward`, a `reason`."""
        return self._page_state

    def ask(self, expression: str) -> Any:
        """Return the value of an expression in the page, for tools that examine it.

        Raises EnvError if it throws.
        """
        return self._playing().evaluate(expression)

    def widgets(self) -> list[PageWidget]:
        """Return the widgets that can be pressed and are not covered, for grounding data. Raises EnvError."""
        self._playing()
        if self._oracle is None:
            raise EnvError("no episode is being played; call reset first")
        return self._oracle.widgets()

    def elements(self) -> list[Element]:
        """Return the elements that can be seen and reached (envs.contract.elements.Explorable).

        Raises EnvError.
        """
        return elements_of([read_page(self._playing(), self._scale)])

    def state(self) -> ScreenState:
        """Return the state of the screen: the page, the address within it, the skeleton. Raises EnvError."""
        page = self._playing()
        return state_of(route_of(page), [read_page(page, self._scale)])

    def oracle_action(self) -> Action:
        """Return the next action of a solution, read from the page's DOM. Raises EnvError."""
        self._playing()
        if self._oracle is None:
            raise EnvError("no episode is being played; call reset first")
        return self._oracle.action()

    def close(self) -> None:
        """Close the page; the last environment of the process closes the browser."""
        if self._closed:
            return
        self._closed = True
        self._drop_page()
        self._host.leave()

    def _page_for(self, name: str) -> TaskPage:
        """Return a page for task `name`: the one in use if it has the task loaded, else one of the host's."""
        if self._closed:
            raise EnvError("the environment is closed")
        page = self._page
        if page is not None and (page.worn or not page.loaded):
            self._drop_page()
        elif page is not None and page.loaded == name:
            return page
        elif page is not None:
            self._host.give_back(page)
        self._page = None
        self._page = self._host.take(name)
        return self._page

    def _drop_page(self) -> None:
        page, self._page, self._task = self._page, None, None
        if page is not None:
            page.close()

    def _playing(self) -> TaskPage:
        if self._page is None or self._task is None:
            raise EnvError("no episode is being played; call reset first")
        return self._page

    def _duration_ms(self, action: Action) -> float:
        """Return how far the page's clock advances after `action`, ms."""
        pace: Pace | None = None if self._task is None else self._task.params["pace"]
        if pace is not None:
            return pace.step_ms
        return action.seconds * 1000 if isinstance(action, Wait) else self._step_ms

    def _observe(self, page: TaskPage) -> Observation:
        width, height = round(WIDTH * self._scale), round(HEIGHT * self._scale)
        return Observation(page.look(), MEDIA_TYPES[self._encoding], width, height)


class MiniwobSuite:
    """The suite `miniwob`: the tasks of PyPI `miniwob` that can be passed, without its airline pages."""

    name = "miniwob"

    def __init__(self) -> None:
        self.tasks: Mapping[str, Task] = TASKS
        self.left_out: Mapping[str, str] = _LEFT_OUT
        self._hosts: dict[tuple[object, ...], BrowserHost] = {}  # by options and number
        self._numbers = itertools.count()  # of environments; several threads may make them

    @checked
    def make_env(
        self,
        *,
        scale: Annotated[float, Field(ge=1, le=8)] = 1.0,
        encoding: ImageEncoding = "png",
        step_ms: Annotated[float, Field(ge=0, le=60_000)] = 500.0,
        metric: Metric = "threshold",
        browsers: Annotated[int, Field(ge=1, le=64)] = 2,
        chromium: str = "",
        deadline_s: Seconds = 20.0,
    ) -> MiniwobEnv:
        """Return an environment whose screenshots are 160x210 pixels times `scale`.

        `step_ms` is how far a page's clock advances at each step (pages in `PACES` have their own).
        `metric` decides which raw reward passes: with "threshold" one that reaches the task's threshold,
        with "published" one above 0, as in BrowserGym. `browsers` is the number of browsers that the
        environments of a process share (a browser draws one frame at a time), `deadline_s` the longest time
        of one browser command, and `chromium` the browser's binary if it is not Debian's. Raises TaskError.
        """
        key = (chromium, scale, encoding, deadline_s, next(self._numbers) % browsers)
        host = self._hosts.setdefault(
            key,
            BrowserHost(partial(find_chromium, chromium), find_pages, scale, encoding, deadline_s),
        )
        return MiniwobEnv(host, scale=scale, encoding=encoding, step_ms=step_ms, metric=metric)

    def check_parts(self, *, chromium: str = "", **_: object) -> None:
        """Raise MissingPartError if Chromium or the package is not installed."""
        find_pages()
        find_chromium(chromium)
