"""OsworldEnv: plays OSWorld's task files in a guest behind OSWorld's server.

A guest runs in a container that is made for each episode, or runs already. If the guest or the evaluator
breaks, the episode is invalid, and the next reset replaces the container.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bus.errors import EnvError, NoOracleError
from envs.contract.actions import Action, Answer, Done, Fail, Move, Wait
from envs.contract.base import Observation, ObservedKind, Verdict, task_of
from envs.contract.elements import Element, ScreenState
from envs.contract.options import ImageEncoding
from envs.contract.screenshots import observe
from envs.suites.osworld.accessibility import outline_of, widgets_of
from envs.suites.osworld.actions import RELEASE, GuestWriter
from envs.suites.osworld.downloads import Downloads
from envs.suites.osworld.evaluate import evaluate, fetch_references, foreign, refuse_solved
from envs.suites.osworld.evaluator_process import EvaluatorProcess
from envs.suites.osworld.guest import DisplayFullError, Guest, UnreachableError
from envs.suites.osworld.provider import Provider
from envs.suites.osworld.setup import STEPS, EpisodeContext, prepare
from envs.tools.atspi_tree import elements_from, state_from
from envs.tools.taskfile import TaskFile

ACTION_DEADLINE_S = 130.0
"""Seconds that a command of an action may take; the server itself gives up after 120 s."""

READY_S = 30.0
"""Seconds until the first screenshot of a guest that runs already."""

RESTARTED_S = 120.0
"""Seconds until the first screenshot of a guest that was restarted."""

_READERS: Mapping[ObservedKind, Callable[[Guest], str]] = {
    "accessibility": lambda guest: outline_of(guest.accessibility()),
    "terminal": Guest.terminal,
}


class OsworldEnv:
    """An environment that plays one folder of task files. See envs.contract.base.GuiEnv for the contract."""

    # `postconfig` may act before an evaluation. Reset itself checks whether a task is solved already.
    evaluate_acts = True

    def __init__(
        self,
        suite: str,
        files: Mapping[str, TaskFile],
        provider: Provider,
        evaluator: EvaluatorProcess,
        *,
        pause_s: float,
        encoding: ImageEncoding,
        deadline_s: float,
        password: str,
        downloads: Downloads,
        observe: Sequence[ObservedKind] = (),
    ) -> None:
        """Prepare to play `files`. `observe` names the guest's texts that observations have."""
        self._suite = suite
        self._files = files
        self._provider = provider
        self._evaluator = evaluator
        self._pause_s = pause_s
        self._encoding: ImageEncoding = encoding
        self._text_kinds = observe
        self._deadline_s = deadline_s
        self._password = password
        self._downloads = downloads
        self._guest: Guest | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._context: EpisodeContext | None = None
        self._file: TaskFile | None = None
        self._last: Action | None = None
        self._steps = 0
        self._verdict: Verdict | None = None  # on the present state, once it was evaluated
        self._screen: Observation | None = None  # the present screen
        self._reported: list[dict[str, Any]] | None = None  # its widgets, once they were read
        self._over = True
        self._writer = GuestWriter()
        self._holds = True  # whether keys or buttons may be down, perhaps from an earlier process

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start `options["task"]`, a Task of this suite or its id. A task file has no seeds."""
        del seed
        file = task_of(options, self._files, self._suite)
        self._drop()
        if needs_osworld_package(file):
            self._evaluator.start()  # it imports its libraries while the guest boots
        try:
            # Each episode has its own folder: files of evaluators must not reach the next one.
            self._folder = tempfile.TemporaryDirectory(
                prefix="dart-osworld-", ignore_cleanup_errors=True
            )
            fetch_references(file.evaluator, self._downloads, Path(self._folder.name))
            guest = self._guest = Guest(self._provider.fresh(), deadline_s=self._deadline_s)
            self._wait_ready(guest)
            self._release(guest)
            size = guest.screen_size()
            # The pointer is in the screenshot: put it where a guest that has just booted has it.
            if self._provider.keeps_state:
                centre = Move(x=size[0] // 2, y=size[1] // 2)
                for command in self._writer.commands_of(centre, size):
                    _perform(guest, command, "the pointer's return")
            self._context = EpisodeContext(
                folder=Path(self._folder.name),
                downloads=self._downloads,
                screen=size,
                password=self._password,
                evaluator=self._evaluator,
            )
            prepare(file.config, guest, self._context)
            time.sleep(self._pause_s)
            refuse_solved(file, guest, self._context)
            observation = self._look(guest)
        except BaseException:
            self._drop()
            raise
        self._file, self._over = file, False
        return observation, {"instruction": file.instruction, "max_steps": file.max_steps}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Perform the action and give the guest `pause_s` to react. Raises EnvError."""
        guest, context = self._playing()
        if self._over:
            raise EnvError("the episode is over; call reset before the next step")
        self._last, self._verdict = action, None
        self._steps += 1
        try:
            commands = self._writer.commands_of(action, context.screen)
            self._holds = self._holds or self._writer.holds
            for command in commands:
                _perform(guest, command, action.kind)
            self._over = isinstance(action, Done | Fail | Answer)
            if not self._over:
                time.sleep(action.seconds if isinstance(action, Wait) else self._pause_s)
            observation = self._look(guest, with_texts=not self._over)
        except EnvError:
            self._drop()
            raise
        reward = (self.evaluate().reward or 0.0) if self._over else 0.0
        return observation, reward, self._over, False, {}

    def evaluate(self) -> Verdict:
        """Run the task file's evaluator, only once for each state, since it may change the state."""
        if self._guest is None or self._context is None or self._file is None:
            return Verdict("invalid", "no episode is being played, or its guest broke")
        if self._verdict is None:
            try:
                self._release(self._guest)  # the evaluator may press keys
                self._verdict = evaluate(self._file, self._last, self._guest, self._context)
            except EnvError as error:
                self._verdict = Verdict("invalid", str(error))
        return self._verdict

    def elements(self) -> list[Element]:
        """Return the elements that can be seen and reached (envs.contract.elements.Explorable).

        Raises EnvError.
        """
        return elements_from(*self._widgets_and_screen())

    def state(self) -> ScreenState:
        """Return the state of the screen: its windows and their skeletons. Raises EnvError."""
        return state_from(*self._widgets_and_screen())

    def oracle_action(self) -> Action:
        """Return the next action of the task file's solution. Raises NoOracleError if it has none."""
        self._playing()
        solution = self._file.solution if self._file is not None else ()
        if not solution:
            raise NoOracleError("this task file has no solution")
        return solution[min(self._steps, len(solution) - 1)]

    def close(self) -> None:
        """Disconnect from the guest, remove its container, end the evaluator process; may be called twice."""
        self._drop()
        self._provider.close()
        self._evaluator.close()

    def _look(self, guest: Guest, *, with_texts: bool = True) -> Observation:
        """Return the screen with the texts that `observe` names. Raises EnvError."""
        screen = observe(guest.screenshot(), self._encoding)
        self._screen, self._reported = screen, None
        if not with_texts:  # no policy sees the last screen
            return screen
        texts = {kind: _READERS[kind](guest) for kind in self._text_kinds}
        return replace(screen, texts=texts) if texts else screen

    def _widgets_and_screen(self) -> tuple[list[dict[str, Any]], Observation]:
        """Return the widgets, read once for each screen, and the screen that they are on. Raises EnvError."""
        guest, _ = self._playing()
        if self._reported is None:
            self._reported = widgets_of(guest.accessibility())
        assert self._screen is not None, "an episode begins with a screen"
        return self._reported, self._screen

    def _playing(self) -> tuple[Guest, EpisodeContext]:
        if self._guest is None or self._context is None or self._file is None:
            raise EnvError("no episode is being played; call reset first")
        return self._guest, self._context

    def _wait_ready(self, guest: Guest) -> None:
        """Wait until the guest shows its screen; restart it if it has no server or its display is full."""
        try:
            guest.wait_ready(READY_S)
        except (DisplayFullError, UnreachableError):
            if not self._provider.restart():
                raise
            self._holds = True
            guest.wait_ready(RESTARTED_S, restarting=True)

    def _release(self, guest: Guest) -> None:
        """Release the keys and buttons that are down."""
        if self._holds:
            _perform(guest, RELEASE, "release")
            self._holds = False
        self._writer = GuestWriter()

    def _drop(self) -> None:
        """Drop the episode and the connection to its guest."""
        guest, self._guest = self._guest, None
        folder, self._folder = self._folder, None
        self._context = self._file = self._last = self._verdict = None
        self._steps, self._over = 0, True
        if guest is not None:
            guest.close()
        if folder is not None:
            folder.cleanup()


def _perform(guest: Guest, command: list[str], what: str) -> None:
    result = guest.execute(command, deadline_s=ACTION_DEADLINE_S)
    if result.returncode != 0:
        guest.raise_if_full(result.error)
        last_line = result.error.strip().rpartition("\n")[2]
        raise EnvError(f"the guest cannot perform {what}: {last_line[:300]}")


def needs_osworld_package(file: TaskFile) -> bool:
    """Return True if a task's evaluator or set-up needs OSWorld's package."""
    steps = (*file.config, *file.evaluator.postconfig)
    return foreign(file.evaluator) or any(step.type not in STEPS for step in steps)
