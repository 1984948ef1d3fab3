"""DesktopEnv: plays task files on real applications, each episode on a fresh desktop.

The evaluator reads files, settings and the clipboard, never the screen. If an application crashes, a deadline
passes or anything else breaks, EnvError is raised and the episode is invalid. The next reset starts a new
desktop, after a pause that grows while desktops fail to start.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bus.errors import EnvError, NoOracleError, TaskError
from envs.contract.actions import Action, Answer, Done, Fail, Type
from envs.contract.base import Observation, ObservedKind, Verdict, task_of
from envs.contract.elements import Element, ScreenState
from envs.contract.options import ImageEncoding
from envs.suites.desktop.accessibility import outline_of, read_widgets
from envs.suites.desktop.desktop import Desktop, Settings
from envs.suites.desktop.getters import evaluate
from envs.suites.desktop.host_resources import DesktopNumber, find_programs
from envs.suites.desktop.screen import encode
from envs.suites.desktop.session import PROGRAMS, DesktopSession, check_step
from envs.tools.atspi_tree import elements_from, state_from
from envs.tools.draws import draw, fill
from envs.tools.taskfile import Check, Evaluator, Getter, NearMiss, SetupStep, TaskFile, claimed

logger = logging.getLogger(__name__)

BACK_OFF_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds before the start of a desktop, after 0, 1, 2, ... desktops in a row that broke."""


class DesktopEnv:
    """An environment that plays the tasks of one suite. See envs.contract.base.GuiEnv for the contract."""

    # `postconfig` may act before an evaluation. Reset itself checks whether a task is solved already.
    evaluate_acts = True

    def __init__(
        self,
        tasks: Mapping[str, TaskFile],
        settings: Settings,
        *,
        encoding: ImageEncoding,
        settle_s: float,
        observe: Sequence[ObservedKind] = (),
    ) -> None:
        """Prepare to play `tasks`.

        If `observe` has `accessibility`, observations have the widgets as text.
        """
        self._tasks = tasks  # by the id of envs.contract.base.Task
        self._settings = settings
        self._encoding: ImageEncoding = encoding
        self._settle_s = settle_s
        self._shows_widgets = "accessibility" in observe
        self._desktop_number = DesktopNumber()
        self._session: DesktopSession | None = None
        self._task: TaskFile | None = None
        self._steps = 0
        self._free = False  # whether no limit ends the episode
        # Number of actions that followed the solution; None after another action.
        self._script: int | None = 0
        self._last: Action | None = None
        self._reported: list[dict[str, Any]] | None = None  # the widgets of the present screen
        self._screen: Observation | None = None  # the present screen
        self._over = False
        self._verdict: Verdict | None = None
        self._breaks = 0  # desktops in a row that broke
        self._closed = False

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start `options["task"]`, a Task of this suite or its id."""
        if self._closed:
            raise EnvError("the environment is closed")
        self._drop()
        task = task_of(options, self._tasks, "desktop")
        find_programs(PROGRAMS)
        self._free = bool((options or {}).get("free"))
        time.sleep(BACK_OFF_S[min(self._breaks, len(BACK_OFF_S) - 1)])
        self._breaks += 1  # until it has started
        try:
            observation, instruction = self._begin(task, 0 if seed is None else seed)
        except TaskError as error:
            self._drop()
            self._breaks -= 1  # the file is wrong, the desktop did not break
            raise TaskError(f"{task.path}: {error}") from error
        except BaseException:
            self._drop()
            raise
        self._breaks = 0
        return observation, {"instruction": instruction}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Perform the action and wait until the screen has settled. Raises EnvError."""
        session, task = self._playing()
        if self._over:
            raise EnvError("the episode is over; call reset before the next step")
        try:
            pixels = session.act(action)
        except BaseException:
            self._break()
            raise
        self._follow(task, action)
        self._last = action
        self._steps += 1
        over = isinstance(action, Done | Fail | Answer)
        truncated = not (over or self._free) and self._steps >= task.max_steps
        self._over = over or truncated
        reward = (self.evaluate().reward or 0.0) if over or truncated else 0.0
        return self._observe(pixels), reward, over, truncated, {}

    def evaluate(self) -> Verdict:
        """Return the verdict on the present files and settings.

        A task that cannot be done passes only by the action `fail`. If a task has steps to perform before its
        evaluation (`postconfig`), the episode is over afterwards.
        """
        if self._session is None or self._task is None:
            return Verdict("invalid", "no episode is being played, or its desktop broke")
        if self._verdict is not None:
            return self._verdict
        try:
            verdict = self._evaluate(self._session, self._task)
        except (EnvError, TaskError) as error:
            verdict = Verdict("invalid", f"the evaluator broke: {error}")
        except Exception as error:
            logger.exception("the evaluator of %s broke", self._task.id)
            verdict = Verdict("invalid", f"the evaluator broke: {type(error).__name__}: {error}")
        self._over = self._over or bool(self._task.evaluator.postconfig)
        if self._over:
            self._verdict = verdict
        return verdict

    def oracle_action(self) -> Action:
        """Return the next action of the task's scripted solution.

        Raises NoOracleError if there is none, EnvError if other actions have been played.
        """
        _, task = self._playing()
        if not task.solution:
            raise NoOracleError(f"{task.id} has no scripted solution")
        if self._script is None or self._script >= len(task.solution):
            raise EnvError(f"{task.id}: its scripted solution does not apply after other actions")
        return task.solution[self._script]

    def elements(self) -> list[Element]:
        """Return the widgets that can be seen and reached (envs.contract.elements.Explorable).

        Raises EnvError, also if the environment was made without `observe=("accessibility",)`.
        """
        return elements_from(*self._widgets_and_screen())

    def state(self) -> ScreenState:
        """Return the state of the screen: its windows and their skeletons. Raises EnvError as `elements`."""
        return state_from(*self._widgets_and_screen())

    @property
    def task(self) -> TaskFile:
        """The task in play, filled in for its seed. Raises EnvError."""
        return self._playing()[1]

    @property
    def desktop(self) -> Desktop:
        """The desktop of the episode. Raises EnvError."""
        return self._playing()[0].desktop

    def close(self) -> None:
        """End the desktop; may be called twice."""
        self._closed = True
        self._drop()
        self._desktop_number.leave()

    def _begin(self, file: TaskFile, seed: int) -> tuple[Observation, str]:
        """Set the task up and return (first screen, instruction)."""
        task = filled(file, seed)
        for step in (*task.config, *task.evaluator.postconfig):
            check_step(step)
        session = DesktopSession(
            self._settings,
            task.config,
            self._desktop_number,
            settle_s=self._settle_s,
            accessible=self._shows_widgets or task.reads("accessibility_tree"),
        )
        self._session, self._task = session, task
        self._steps, self._script, self._last = 0, 0, None
        self._over, self._verdict = False, None
        self._refuse_solved(session, task)
        return self._observe(session.look(0.0)), task.instruction  # set-up has settled

    def _evaluate(self, session: DesktopSession, task: TaskFile) -> Verdict:
        verdict = claimed(task.evaluator, self._last)
        if verdict is not None:
            return verdict
        if task.evaluator.postconfig:
            session.release()  # `postconfig` may press keys
        session.look()
        session.arrange(task.evaluator.postconfig)
        answer = self._last.text if isinstance(self._last, Answer) else None
        return evaluate(task.evaluator, session.scene(answer))

    def _refuse_solved(self, session: DesktopSession, task: TaskFile) -> None:
        """Raise EnvError if the task is solved at reset, since doing nothing would be rewarded."""
        if not (task.evaluator.infeasible or task.evaluator.missing):
            verdict = evaluate(task.evaluator, session.scene(None))
            if verdict.outcome == "pass":
                raise EnvError(f"{task.id} is solved before it begins: {verdict.reason}")

    def _follow(self, task: TaskFile, action: Action) -> None:
        at = self._script
        if at is not None:
            follows = at < len(task.solution) and task.solution[at] == action
            self._script = at + 1 if follows else None

    def _observe(self, pixels: bytes) -> Observation:
        width, height = self._settings.width, self._settings.height
        picture = encode(pixels, width, height, self._encoding)
        screen = Observation(picture, f"image/{self._encoding}", width, height)
        self._screen, self._reported = screen, None
        if not self._shows_widgets or self._over:  # no policy sees the last screen
            return screen
        return replace(screen, texts={"accessibility": outline_of(self._widgets())})

    def _widgets(self) -> list[dict[str, Any]]:
        """Return the widgets that applications report, read once for each screen. Raises EnvError."""
        self._playing()
        if not self._shows_widgets:
            raise EnvError("the desktop has no elements without observe = accessibility")
        if self._reported is None:
            self._reported = read_widgets(self.desktop)
        return self._reported

    def _widgets_and_screen(self) -> tuple[list[dict[str, Any]], Observation]:
        """Return the widgets and the screen that they are on. Raises EnvError."""
        widgets = self._widgets()
        assert self._screen is not None, "an episode begins with a screen"
        return widgets, self._screen

    def _playing(self) -> tuple[DesktopSession, TaskFile]:
        if self._session is None or self._task is None:
            raise EnvError("no episode is being played; call reset first")
        return self._session, self._task

    def _break(self) -> None:
        self._drop()
        self._breaks += 1

    def _drop(self) -> None:
        session, self._session, self._task = self._session, None, None
        if session is not None:
            session.close()


def filled(task: TaskFile, seed: int) -> TaskFile:
    """Return the task with the random values of `seed` filled in. Raises TaskError."""
    values = draw(task.draw, task.id, seed)

    def fill_steps(steps: tuple[SetupStep, ...]) -> tuple[SetupStep, ...]:
        return tuple(SetupStep(step.type, fill(step.parameters, values)) for step in steps)

    def fill_getter(getter: Getter | None) -> Getter | None:
        return None if getter is None else Getter(getter.type, fill(getter.parameters, values))

    def fill_actions(actions: tuple[Action, ...]) -> tuple[Action, ...]:
        return tuple(
            action.model_copy(update={"text": str(fill(action.text, values))})
            if isinstance(action, Type | Answer)
            else action
            for action in actions
        )

    checks = tuple(
        Check(
            check.func,
            fill_getter(check.result),
            fill_getter(check.expected),
            fill(check.options, values),
        )
        for check in task.evaluator.checks
    )
    postconfig = fill_steps(task.evaluator.postconfig)
    return replace(
        task,
        instruction=str(fill(task.instruction, values)),
        config=fill_steps(task.config),
        evaluator=Evaluator(checks, task.evaluator.conj, postconfig),
        solution=fill_actions(task.solution),
        near_misses=tuple(
            NearMiss(miss.why, fill_actions(miss.actions)) for miss in task.near_misses
        ),
    )
