"""DesktopEnv: plays task files on real applications, each episode on a fresh desktop.

The evaluator looks at files, settings and the clipboard, never at the screen. If something broke,
an application crashed or a deadline passed, EnvError is raised and the episode is invalid; the next
reset starts a new desktop, after a pause that grows while desktops fail to start.
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
from envs.suites.desktop.draws import draw, fill
from envs.suites.desktop.getters import evaluate
from envs.suites.desktop.host_resources import DesktopNumber, find_programs
from envs.suites.desktop.screen import encode
from envs.suites.desktop.session import PROGRAMS, DesktopSession, check_step
from envs.tools.atspi_tree import elements_from, state_from
from envs.tools.taskfile import Check, Evaluator, Getter, NearMiss, SetupStep, TaskFile, claimed

logger = logging.getLogger(__name__)

BACK_OFF_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds before the start of a desktop, by how many in a row before it broke."""


class DesktopEnv:
    """Plays the tasks of one suite. See envs.contract.base.GuiEnv for the contract."""

    evaluate_acts = True  # by `postconfig`; reset itself checks whether a task is solved already

    def __init__(
        self,
        tasks: Mapping[str, TaskFile],
        settings: Settings,
        *,
        encoding: ImageEncoding,
        settle_s: float,
        observe: Sequence[ObservedKind] = (),
    ) -> None:
        """`observe`: with `accessibility`, observations have the widgets as text."""
        self._tasks = tasks  # by the id of envs.contract.base.Task
        self._settings = settings
        self._encoding: ImageEncoding = encoding
        self._settle_s = settle_s
        self._shows_widgets = "accessibility" in observe
        self._desktop_number = DesktopNumber()
        self._session: DesktopSession | None = None
        self._task: TaskFile | None = None
        self._steps = 0
        self._free = False  # no limit ends the episode
        self._script: int | None = (
            0  # actions of the solution followed so far; None: departed from it
        )
        self._last: Action | None = None
        self._reported: list[dict[str, Any]] | None = None  # the widgets of the present screen
        self._screen: Observation | None = None  # the present one
        self._over = False
        self._verdict: Verdict | None = None
        self._breaks = 0  # in a row
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
            self._breaks -= 1  # of the file, not of the desktop
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
        """Judge files and settings as they are.

        A task that cannot be done passes by the action `fail` alone. If a task has steps to perform
        before it is judged (`postconfig`), the episode is over afterwards.
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

        Raises NoOracleError if it has none, EnvError if other actions have been played.
        """
        _, task = self._playing()
        if not task.solution:
            raise NoOracleError(f"{task.id} has no scripted solution")
        if self._script is None or self._script >= len(task.solution):
            raise EnvError(f"{task.id}: its scripted solution does not apply after other actions")
        return task.solution[self._script]

    def elements(self) -> list[Element]:
        """Return what can be seen and reached (envs.contract.elements.Explorable): widgets, or the cells of a grid.

        Raises EnvError; one made without `observe=("accessibility",)` cannot tell.
        """
        return elements_from(*self._told())

    def state(self) -> ScreenState:
        """Which screen is shown: the windows and their skeletons. Raises EnvError as `elements`."""
        return state_from(*self._told())

    @property
    def task(self) -> TaskFile:
        """The instance in play. Raises EnvError."""
        return self._playing()[1]

    @property
    def desktop(self) -> Desktop:
        """The desktop it is played on. Raises EnvError."""
        return self._playing()[0].desktop

    def close(self) -> None:
        """End the desktop; may be called twice."""
        self._closed = True
        self._drop()
        self._desktop_number.leave()

    def _begin(self, file: TaskFile, seed: int) -> tuple[Observation, str]:
        """Set the task up; the first screen and the instruction."""
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
            session.release()  # its own keys come next
        session.look()
        session.arrange(task.evaluator.postconfig)
        said = self._last.text if isinstance(self._last, Answer) else None
        return evaluate(task.evaluator, session.scene(said))

    def _refuse_solved(self, session: DesktopSession, task: TaskFile) -> None:
        """Refuse a task that is solved at reset: it would reward doing nothing."""
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
        """Return what applications report, read once for each screen. Raises EnvError."""
        self._playing()
        if not self._shows_widgets:
            raise EnvError("the desktop tells no elements without observe = accessibility")
        if self._reported is None:
            self._reported = read_widgets(self.desktop)
        return self._reported

    def _told(self) -> tuple[list[dict[str, Any]], Observation]:
        """Return what applications report, and the screen that it is of. Raises EnvError."""
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
    """Return the instance of a task that a seed draws. Raises TaskError."""
    values = draw(task.draw, task.id, seed)

    def steps(given: tuple[SetupStep, ...]) -> tuple[SetupStep, ...]:
        return tuple(SetupStep(each.type, fill(each.parameters, values)) for each in given)

    def getter(given: Getter | None) -> Getter | None:
        return None if given is None else Getter(given.type, fill(given.parameters, values))

    def actions(given: tuple[Action, ...]) -> tuple[Action, ...]:
        return tuple(
            each.model_copy(update={"text": str(fill(each.text, values))})
            if isinstance(each, Type | Answer)
            else each
            for each in given
        )

    checks = tuple(
        Check(
            each.func,
            getter(each.result),
            getter(each.expected),
            fill(each.options, values),
        )
        for each in task.evaluator.checks
    )
    return replace(
        task,
        instruction=str(fill(task.instruction, values)),
        config=steps(task.config),
        evaluator=Evaluator(checks, task.evaluator.conj, steps(task.evaluator.postconfig)),
        solution=actions(task.solution),
        near_misses=tuple(NearMiss(each.why, actions(each.actions)) for each in task.near_misses),
    )
