"""Suite `explored:FOLDER`: the tasks of an exploration, each a screen to reach.

ExploredEnv     the environment of the explored suite, with a screen as the goal
ExploredSuite   the tasks of a folder
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bus.errors import ActionCausedError, EnvError, TaskError
from envs.contract.actions import Action
from envs.contract.base import GuiEnv, Observation, ObservedKind, Task, Verdict, task_of
from envs.contract.elements import Element, Explorable, ScreenState, as_explorable, performing
from envs.contract.registry import (
    check_observe,
    check_options,
    check_parts,
    load_suite,
    longest_reset_s,
    make_env,
)
from envs.suites.explored.tasks import ExploredTask, PathStep, read_file


class ExploredEnv:
    """Plays suite `explored`. See envs.contract.base.GuiEnv for the contract.

    The evaluator compares the environment's `state()` with the goal: an episode passes, and ends, on the
    screen to reach. The rules and the verdict of the explored suite's task do not count, but an episode
    that it ends is over.
    """

    def __init__(
        self,
        tasks: Mapping[str, ExploredTask],
        bases: Mapping[str, Task],
        make: Callable[[], GuiEnv],
        observe: Collection[str] = (),
    ) -> None:
        """Prepare to play `tasks`; the first reset makes the explored suite's environment by `make`.

        `bases` are the tasks of the explored suite by id. `observe` are the kinds of text that are requested;
        the environment may read others for its elements.
        """
        self._tasks = tasks
        self._bases = bases
        self._make = make
        self._observe = observe
        self._env: GuiEnv | None = None
        self._explorable: Explorable | None = None
        self._task: ExploredTask | None = None
        self._over = True
        self._rest: list[Action] = []  # the remaining actions of the present step of the path

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start `options["task"]`, a Task of this suite or its id, on one of the task's seeds."""
        task = task_of(options, self._tasks, "explored")
        if self._env is None:
            self._env, self._explorable = as_explorable(self._make())
        self._task, self._over, self._rest = task, False, []
        base = task.seeds[(seed or 0) % len(task.seeds)]
        screen, info = self._env.reset(
            seed=base, options={"task": self._bases[task.base], "free": True}
        )
        if (screen_id := self.state().id) != task.start:
            self._over = True
            raise EnvError(
                f"{task.id}: {task.base} with seed {base} starts on another screen ({screen_id[:8]}) than when "
                "it was explored; make the tasks again"
            )
        return self._with_requested_texts(screen), dict(info) | {
            "instruction": task.instruction,
            "max_steps": task.max_steps,
        }

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Perform an action. The episode ends with a reward of 1.0 on the screen to reach."""
        env, task = self._playing()
        screen, _, terminated, cut, info = env.step(action)
        self._over = terminated or cut
        reached = not self._over and self.state().id in task.targets
        return self._with_requested_texts(screen), float(reached), terminated or reached, cut, info

    def evaluate(self) -> Verdict:
        """Return pass if the screen to reach is shown."""
        if self._task is None:
            raise EnvError("no episode is being played; call reset first")
        if self._over:
            return Verdict("fail", "the episode ended on the way")
        try:
            state = self.state()
        except ActionCausedError:
            raise
        except EnvError as error:
            return Verdict("invalid", f"the screen cannot be told: {error}")
        if state.id in self._task.targets:
            return Verdict("pass", "the screen is reached")
        where = f" ({state.route})" if state.route else ""
        return Verdict("fail", f"another screen is shown{where}")

    def close(self) -> None:
        """Close the environment; may be called twice."""
        env, self._env, self._explorable, self._task = self._env, None, None, None
        if env is not None:
            env.close()

    # --- Solvable ------------------------------------------------------------------------------

    def oracle_action(self) -> Action:
        """Return the next action of the task's path. Raises EnvError on a screen that is not on the path."""
        if not self._rest:
            step, element = self._next()
            self._rest = performing(element, step.action, step.text)
        return self._rest.pop(0)

    def oracle_hint(self) -> str:
        """Return the next step of the task's path in words.

        The text is empty on a screen that is not on the path, and between the actions of one step.
        """
        try:
            return "" if self._rest else self._next()[0].words
        except EnvError:
            return ""

    def _next(self) -> tuple[PathStep, Element]:
        """Return the step of the path that starts on the present screen, and the element that it acts on.

        Raises EnvError if there is no such step or element.
        """
        _, task = self._playing()
        here = self.state().id
        for step in reversed(task.path):
            if step.screen == here:
                for element in self.elements():
                    if element.place != step.place or step.action not in element.actions:
                        continue
                    if step.name not in ("", element.name):
                        raise EnvError(
                            f"{task.id}: {step.words}: it is called {element.name!r} here"
                        )
                    return step, element
                raise EnvError(
                    f"{task.id}: {step.words or step.action}: nothing is at {step.place}"
                )
        raise EnvError(f"{task.id}: no way is known from this screen ({here[:8]})")

    # --- Explorable ----------------------------------------------------------------------------

    def elements(self) -> list[Element]:
        """Return the elements of the explored suite's environment."""
        return self._explored().elements()

    def state(self) -> ScreenState:
        """Return the state of the explored suite's environment."""
        return self._explored().state()

    def _explored(self) -> Explorable:
        if self._explorable is None:
            raise EnvError("no episode is being played; call reset first")
        return self._explorable

    def _with_requested_texts(self, screen: Observation) -> Observation:
        """Return the observation without the texts that were not requested."""
        texts = {kind: text for kind, text in screen.texts.items() if kind in self._observe}
        return replace(screen, texts=texts)

    def _playing(self) -> tuple[GuiEnv, ExploredTask]:
        if self._env is None or self._task is None or self._over:
            raise EnvError("no episode is being played; call reset first")
        return self._env, self._task


class ExploredSuite:
    """The tasks of a folder, played in environments of the explored suite.

    Raises TaskError if it has no tasks.
    """

    name = "explored"

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        self.file = read_file(folder)
        explored = load_suite(self.file.suite)
        for task in self.file.tasks:
            if task.base not in explored.tasks:
                raise TaskError(
                    f"{folder}: {task.id} starts from {task.base}, which suite {self.file.suite} has not; "
                    "make the tasks again"
                )
        self._bases = {task.base: explored.tasks[task.base] for task in self.file.tasks}
        self.size = self.file.options.get("size", getattr(explored, "size", None))
        """Size of the screens, if the options or the explored suite name one."""
        self.observes: tuple[ObservedKind, ...] = tuple(getattr(explored, "observes", ()))
        self.tasks: Mapping[str, Task] = {
            task.id: Task(
                task.id,
                self.name,
                task.instruction,
                max_steps=task.max_steps,
                tier=len(task.path),
                split=task.split,
                params={"application": task.application, "file": task.digest},
            )
            for task in self.file.tasks
        }

    def make_env(self, *, observe: Sequence[ObservedKind] = (), **options: Any) -> ExploredEnv:
        """Return an environment with the options of the exploration, overridden by `options`."""
        all_options = self.file.options | options
        check_options(self.file.suite, all_options)
        check_observe(self.file.suite, observe)
        return ExploredEnv(
            {task.id: task for task in self.file.tasks},
            self._bases,
            lambda: make_env(self.file.suite, observe=self._read(observe), **all_options),
            observe,
        )

    def check_parts(self, *, observe: Sequence[str] = (), **options: Any) -> None:
        """Raise MissingPartError if a part is missing that the explored suite needs."""
        all_options = self.file.options | options
        check_parts(self.file.suite, all_options, list(self._bases), self._read(observe))

    def longest_reset_s(self, **options: Any) -> float:
        """Return the seconds that the explored suite allows for a reset."""
        return longest_reset_s(self.file.suite, self.file.options | options)

    def _read(self, observe: Sequence[str]) -> list[str]:
        """Return the kinds of text that the explored suite must read, with the tree that has its elements."""
        kinds = [kind for kind in self.observes if kind == "accessibility"]
        return list(dict.fromkeys([*observe, *kinds]))
