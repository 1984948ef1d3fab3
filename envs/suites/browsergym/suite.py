"""BrowsergymSuite: every task that BrowserGym registers, and a check of what it needs."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

from bus.errors import EnvError, MissingPartError
from envs.contract.base import ObservedKind, Task, task_of
from envs.contract.options import Pause, Seconds, Size, checked
from envs.suites.browsergym.env import BrowsergymEnv, GoalImages, Settings
from envs.suites.browsergym.tasks import (
    INSTALL_STEP,
    benchmark_of,
    find_interpreter,
    known_tasks,
    lacking,
    make_tasks,
    need_interpreter,
    registered_tasks,
)
from envs.tools.browser.process import find_chromium
from envs.tools.miniwob_pages import find_pages

logger = logging.getLogger(__name__)


class BrowsergymSuite:
    """The tasks that BrowserGym registers in its interpreter; without one, the tasks of release 0.14.3."""

    name = "browsergym"
    observes: tuple[ObservedKind, ...] = ("accessibility",)

    @cached_property
    def tasks(self) -> Mapping[str, Task]:
        """The tasks by id: `browsergym/` and BrowserGym's own name, e.g. browsergym/miniwob.click-test."""
        try:
            python = find_interpreter()
            if python:
                registered = registered_tasks(python)
                return make_tasks(registered.tasks, registered.infeasible)
        except MissingPartError:
            pass  # check_parts reports it
        except EnvError as error:
            logger.warning("%s; taking the tasks of BrowserGym 0.14.3", error)
        return known_tasks()

    @cached_property
    def elsewhere(self) -> Mapping[str, str]:
        """Task of BrowserGym 0.14.3 whose package the interpreter lacks -> how to install it there."""
        return {
            task_id: "its package is not installed in BrowserGym's interpreter: "
            f"scripts/setup-browsergym {benchmark_of(task.params['name']).package}"
            for task_id, task in known_tasks().items()
            if task_id not in self.tasks
        }

    @checked
    def make_env(
        self,
        *,
        python: str = "",
        chromium: str = "",
        size: Size | None = None,
        pause_s: Pause | None = None,
        deadline_s: Seconds = 25.0,
        reset_s: Seconds = 55.0,
        goal_images: GoalImages = "below",
        task_options: Mapping[str, Any] | None = None,
        observe: Sequence[ObservedKind] = (),
    ) -> BrowsergymEnv:
        """Return an environment with its own process and browser, which the first reset starts.

        `python` is the interpreter that has BrowserGym, `chromium` the browser's binary if it is not
        Debian's. `size` is the size of the viewport (None: the task's), `pause_s` the time that a page gets
        to react to an action (None: the benchmark's). `deadline_s` is the longest time of a step, `reset_s`
        of a reset. Images in a goal are shown "below" the first screenshot, or raise an error ("refuse"),
        as `goal_images` says. `task_options` go to the class of the task, e.g. {"with_na_hint": true} in
        WebArena. Raises TaskError.
        """
        settings = Settings(
            python=python,
            chromium=chromium,
            pages=_pages(),
            pause_s=pause_s,
            size=size,
            deadline_s=deadline_s,
            reset_s=reset_s,
            goal_images=goal_images,
            task_options=dict(task_options or {}),
            observe=tuple(observe),
        )
        return BrowsergymEnv(self._task, settings)

    @checked
    def longest_reset_s(self, *, reset_s: Seconds = 55.0, **_: object) -> float:
        """Return the seconds after which a reset that hangs is killed with its process and browser."""
        return reset_s

    def _task(self, options: Mapping[str, Any] | None) -> Task:
        """Return the task that a reset names. The interpreter's list of tasks is read only now."""
        return task_of(options, self.tasks, self.name, self.elsewhere)

    def check_parts(
        self,
        *,
        python: str = "",
        chromium: str = "",
        tasks: Collection[str] | None = None,
        **_: object,
    ) -> None:
        """Raise MissingPartError if the browser, the interpreter, a package or a backend is missing.

        Packages and backends are checked for `tasks` only.
        """
        find_chromium(chromium)
        interpreter = need_interpreter(python)
        try:
            registered = registered_tasks(interpreter)
        except EnvError as error:
            raise MissingPartError(
                f"{interpreter} cannot load BrowserGym: {error}; {INSTALL_STEP}"
            ) from None
        names = sorted({task_id.partition("/")[2] for task_id in tasks or ()})
        if missing := lacking(registered, names):
            raise MissingPartError(missing)
        if any(name.startswith("miniwob.") for name in names) and not _pages():
            find_pages()  # raises MissingPartError with the install step


def _pages() -> str:
    """Return the address of MiniWoB's pages in the package miniwob; empty if that is not installed."""
    try:
        return f"{find_pages().as_uri()}/"
    except MissingPartError:
        return ""
