"""Suite `explored:FOLDER`: tasks that `dart explore tasks` made, each a screen to be reached.

ExploredEnv     another suite's environment, with that goal
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

    The evaluator is the environment's own `state()`: an episode passes, and ends, on the screen to be
    reached. The rules and the verdict of the suite's own task do not count, but where it ends an episode,
    the episode is over.
    """

    def __init__(
        self,
        tasks: Mapping[str, ExploredTask],
        bases: Mapping[str, Task],
        make: Callable[[], GuiEnv],
        observe: Collection[str] = (),
    ) -> None:
        """`bases` are the tasks of the explored suite by id; `make` makes its environment.

        `observe` are the texts that are asked for: the environment may read others to tell its elements.
        """
        self._tasks = tasks
        self._bases = bases
        self._make = make
        self._observe = observe
        self._env: GuiEnv | None = None
        self._explorable: Explorable | None = None
        self._task: ExploredTask | None = None
        self._over = True
        self._rest: list[Action] = []  # of the step of the path that has begun

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start `options["task"]`, a Task of this suite or its id, on one of the seeds that are known."""
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
        return self._with_asked_texts(screen), dict(info) | {
            "instruction": task.instruction,
            "max_steps": task.max_steps,
        }

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Perform an action; the episode ends with a reward of 1.0 on the screen to be reached."""
        env, task = self._playing()
        screen, _, terminated, cut, info = env.step(action)
        self._over = terminated or cut
        reached = not self._over and self.state().id in task.targets
        return self._with_asked_texts(screen), float(reached), terminated or reached, cut, info

    def evaluate(self) -> Verdict:
        """Pass on the screen to be reached."""
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
        """Return the next action of the known path. Raises EnvError on a screen that it does not pass."""
        if not self._rest:
            step, element = self._next()
            self._rest = performing(element, step.action, step.text)
        return self._rest.pop(0)

    def oracle_hint(self) -> str:
        """Return the next step of the known path in words; empty beside it, and within a step."""
        try:
            return "" if self._rest else self._next()[0].told
        except EnvError:
            return ""

    def _next(self) -> tuple[PathStep, Element]:
        """Return the step of the path that goes on from the present screen, and what it acts on."""
        _, task = self._playing()
        here = self.state().id
        for step in reversed(task.path):
            if step.screen == here:
                for element in self.elements():
                    if element.place != step.place or step.action not in element.actions:
                        continue
                    if step.name not in ("", element.name):
                        raise EnvError(
                            f"{task.id}: {step.told}: it is called {element.name!r} here"
                        )
                    return step, element
                raise EnvError(f"{task.id}: {step.told or step.action}: nothing is at {step.place}")
        raise EnvError(f"{task.id}: no way is known from this screen ({here[:8]})")

    # --- Explorable ----------------------------------------------------------------------------

    def elements(self) -> list[Element]:
        """Those of the explored suite's environment."""
        return self._explored().elements()

    def state(self) -> ScreenState:
        """Return that of the explored suite's environment."""
        return self._explored().state()

    def _explored(self) -> Explorable:
        if self._explorable is None:
            raise EnvError("no episode is being played; call reset first")
        return self._explorable

    def _with_asked_texts(self, screen: Observation) -> Observation:
        texts = {kind: text for kind, text in screen.texts.items() if kind in self._observe}
        return replace(screen, texts=texts)

    def _playing(self) -> tuple[GuiEnv, ExploredTask]:
        if self._env is None or self._task is None or self._over:
            raise EnvError("no episode is being played; call reset first")
        return self._env, self._task


class ExploredSuite:
    """Tasks of a folder; its environments are those of the suite that was explored.

    Raises TaskError for a folder without tasks.
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
        """Of its screens, where the options or the explored suite name one."""
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
        """Return an environment of the explored suite, with the options of the exploration but for these."""
        merged = self.file.options | options
        check_options(self.file.suite, merged)
        check_observe(self.file.suite, observe)
        return ExploredEnv(
            {task.id: task for task in self.file.tasks},
            self._bases,
            lambda: make_env(self.file.suite, observe=self._read(observe), **merged),
            observe,
        )

    def check_parts(self, *, observe: Sequence[str] = (), **options: Any) -> None:
        """Raise MissingPartError where the explored suite lacks something."""
        merged = self.file.options | options
        check_parts(self.file.suite, merged, list(self._bases), self._read(observe))

    def longest_reset_s(self, **options: Any) -> float:
        """Return what the explored suite gives a reset."""
        return longest_reset_s(self.file.suite, self.file.options | options)

    def _read(self, observe: Sequence[str]) -> list[str]:
        """Texts that the explored suite has to read: where it has a tree of accessibility, elements need it."""
        for_elements = [kind for kind in self.observes if kind == "accessibility"]
        return list(dict.fromkeys([*observe, *for_elements]))
