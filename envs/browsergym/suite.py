"""BrowsergymSuite: every task that BrowserGym registers, and what it needs."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, get_args

from bus.errors import EnvError, MissingPartError, TaskError
from envs.base import ObservedKind, Task, task_of
from envs.browsergym.env import BrowsergymEnv, GoalImages, Settings
from envs.browsergym.interpreter import CURE, find_interpreter, need_interpreter
from envs.browsergym.tasks import benchmark_of, known_tasks, lacking, make_tasks, registered_tasks
from envs.miniwob.env import find_pages
from envs.miniwob.process import find_chromium

logger = logging.getLogger(__name__)

_SIZE = re.compile(r"([0-9]{2,4})x([0-9]{2,4})")


class BrowsergymSuite:
    """The tasks that BrowserGym registers in its interpreter; without one those of its release 0.14.3."""

    name = "browsergym"
    observes: tuple[ObservedKind, ...] = ("accessibility",)

    @cached_property
    def tasks(self) -> Mapping[str, Task]:
        """By id, `browsergym/` and BrowserGym's own name, e.g. browsergym/miniwob.click-test."""
        try:
            python = find_interpreter()
            if python:
                registered = registered_tasks(python)
                return make_tasks(registered.tasks, registered.infeasible)
        except MissingPartError:
            pass  # check_parts says it
        except EnvError as error:
            logger.warning("%s; taking the tasks of BrowserGym 0.14.3", error)
        return known_tasks()

    @cached_property
    def elsewhere(self) -> Mapping[str, str]:
        """Tasks of BrowserGym 0.14.3 whose package the interpreter has not, and how it is installed there."""
        return {
            task_id: "its package is not installed in BrowserGym's interpreter: "
            f"scripts/setup-browsergym {benchmark_of(task.params['name']).package}"
            for task_id, task in known_tasks().items()
            if task_id not in self.tasks
        }

    def make_env(
        self,
        *,
        python: str = "",
        chromium: str = "",
        size: str = "",
        pause_s: float | None = None,
        deadline_s: float = 25.0,
        reset_s: float = 55.0,
        goal_images: GoalImages = "below",
        task_options: Mapping[str, Any] | None = None,
        observe: Sequence[ObservedKind] = (),
    ) -> BrowsergymEnv:
        """An environment with a process and a browser of its own, which the first reset starts.

        `python` is the interpreter that has BrowserGym, `chromium` the browser's binary if it is not
        Debian's. `size` is that of the viewport (the task's own if empty), `pause_s` the time that a page
        gets to react to an action (its benchmark's if None). `deadline_s` is the longest time of a step, `reset_s`
        of a reset. `goal_images` says what becomes of images in a goal: "below" the first screenshot, or
        "refuse". `task_options` are given to the class of the task, e.g. {"with_na_hint": true} in
        WebArena. Raises TaskError.
        """
        for name, value, least in (("deadline_s", deadline_s, 1), ("reset_s", reset_s, 1)):
            _number(name, value, least)
        if pause_s is not None:
            _number("pause_s", pause_s, 0)
        if goal_images not in get_args(GoalImages):
            raise TaskError(f"goal_images must be below or refuse, got {goal_images!r}")
        if not isinstance(task_options or {}, Mapping):
            raise TaskError(f"task_options must be a table, got {task_options!r}")
        settings = Settings(
            python=python,
            chromium=chromium,
            pages=_pages(),
            pause_s=pause_s,
            size=_size(size),
            deadline_s=deadline_s,
            reset_s=reset_s,
            goal_images=goal_images,
            task_options=dict(task_options or {}),
            observe=tuple(observe),
        )
        return BrowsergymEnv(self._task, settings)

    def _task(self, options: Mapping[str, Any] | None) -> Task:
        """What a reset is asked for; the interpreter is not asked for its tasks before."""
        return task_of(options, self.tasks, self.name, self.elsewhere)

    def check_parts(
        self,
        *,
        python: str = "",
        chromium: str = "",
        tasks: Collection[str] | None = None,
        **_: object,
    ) -> None:
        """Raise MissingPartError if browser, interpreter, package or backend are missing.

        Packages and backends are those of `tasks`; without them they are not looked for.
        """
        find_chromium(chromium)
        found = need_interpreter(python)
        try:
            registered = registered_tasks(found)
        except EnvError as error:
            raise MissingPartError(f"{found} cannot load BrowserGym: {error}; {CURE}") from None
        names = sorted({each.partition("/")[2] for each in tasks or ()})
        if missing := lacking(registered, names):
            raise MissingPartError(missing)
        if any(name.startswith("miniwob.") for name in names) and not _pages():
            find_pages()  # says how it is installed


def _pages() -> str:
    """The address of MiniWoB's pages: those of the package miniwob; empty where it is not installed."""
    try:
        return f"{find_pages().as_uri()}/"
    except MissingPartError:
        return ""


def _number(name: str, value: object, least: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < least:
        raise TaskError(f"{name} must be a number of at least {least}, got {value!r}")


def _size(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    found = _SIZE.fullmatch(text)
    if found is None:
        raise TaskError(f"size must be WIDTHxHEIGHT, e.g. 1280x720, got {text!r}")
    return int(found[1]), int(found[2])
