"""WebEnv: plays tasks on a web application of the user's own, and the suite `web:FILE.toml`.

An episode has a browser context and a session of its own: storage, cookies, downloads and clipboard begin
empty. The page reaches the hosts of the file only. If page, browser or server breaks or hangs, EnvError is
raised with what broke, and the episode is invalid; the next reset begins with a new browser, and a server
that has ended is started again.
"""

from __future__ import annotations

import logging
import secrets
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from bus.errors import EnvError, MissingPartError, TaskError
from envs.contract.actions import Action, Answer, Done, Fail
from envs.contract.base import Observation, Task, Verdict, task_of
from envs.contract.elements import Element, ScreenState, elements_of, state_of
from envs.contract.options import ImageEncoding, Pause, Seconds, checked
from envs.suites.web.checking import (
    Scene,
    WebEpisode,
    make_instance,
    verdict_of,
)
from envs.suites.web.file import WebFile, read_file
from envs.suites.web.schema import SetupStep, WebTask, host_of
from envs.suites.web.solution import Solution
from envs.tools.app_server import AppServer
from envs.tools.browser.accessibility import read_page, route_of
from envs.tools.browser.gui import BrowserGui, GuiOptions
from envs.tools.browser.process import find_chromium

logger = logging.getLogger(__name__)

ENDING_S = 0.5  # for which the end of the server is waited for once something has failed


class WebEnv:
    """Plays the tasks of one file. See envs.contract.base.GuiEnv for the contract."""

    def __init__(
        self, file: WebFile, tasks: Mapping[str, WebTask], options: GuiOptions, chromium: str = ""
    ) -> None:
        """Prepare to play `tasks`, by their ids in the suite; nothing starts before the first reset."""
        self._file = file
        self._tasks = tasks
        self._options = options
        self._gui = BrowserGui(partial(find_chromium, chromium), file.application.names, options)
        self._server: AppServer | None = None
        if file.application.start:
            self._server = AppServer(
                file.application.start, file.folder, start_s=file.application.start_s
            )
        self._scene: Scene | None = None
        self._solution: Solution | None = None
        self._max_steps = 0
        self._free = False  # whether no limit ends the episode
        self._steps = 0
        self._last: Action | None = None
        self._over = True
        self._verdict: Verdict | None = None
        self._closed = False

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start `options["task"]`, a Task of this suite or its id."""
        if self._closed:
            raise EnvError("the environment is closed")
        task = task_of(options, self._tasks, "web")
        self._scene, self._over, self._verdict = None, True, None
        self._free = bool((options or {}).get("free"))
        self._gui.leave()
        try:
            self._start_server()
            scene = self._begin(task, 0 if seed is None else seed)
            observation = self._gui.look()
        except EnvError as error:
            raise self._explained(error) from error
        self._scene, self._steps, self._last, self._over = scene, 0, None, False
        self._max_steps = task.max_steps or self._file.application.max_steps
        self._solution = Solution(scene.instance, self._gui.ask, self._options.scale)
        instruction = scene.instance.text(task.instruction)
        return observation, {"instruction": instruction, "app_log": self._gui.take_log()}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Perform the action and wait until the page is still. Raises EnvError."""
        scene = self._playing()
        if self._over:
            raise EnvError("the episode is over; call reset before the next step")
        if isinstance(action, Answer):
            scene.episode.answer = action.text
        try:
            observation = self._gui.perform(action)
        except EnvError as error:
            self._scene = None
            raise self._explained(error) from error
        assert self._solution is not None, "an episode begins with one"
        self._solution.follow(action)
        self._last = action
        self._steps += 1
        over = isinstance(action, Done | Fail | Answer)
        if not (over or self._free) and self._file.application.ends == "goal":
            over = self.evaluate().outcome == "pass"
        truncated = not (over or self._free) and self._steps >= self._max_steps
        self._over = over or truncated
        reward = (self.evaluate().reward or 0.0) if self._over else 0.0
        return observation, reward, over, truncated, {"app_log": self._gui.take_log()}

    def evaluate(self) -> Verdict:
        """Return the verdict on the application's present state.

        A task that cannot be done passes only by the action `fail`, which fails every other task.
        """
        if self._scene is None:
            return Verdict("invalid", "no episode is being played, or its page broke")
        if self._verdict is not None:
            return self._verdict
        try:
            verdict = self._evaluate(self._scene)
        except (EnvError, TaskError) as error:
            verdict = Verdict("invalid", f"the verdict is not known: {self._explained(error)}")
        if self._over:
            self._verdict = verdict
        return verdict

    def oracle_action(self) -> Action:
        """Return the next action of the task's solution.

        Raises NoOracleError if there is none, EnvError if other actions have been played.
        """
        self._playing()
        assert self._solution is not None, "an episode begins with one"
        return self._solution.action()

    def elements(self) -> list[Element]:
        """Return the elements that can be seen and reached (envs.contract.elements.Explorable)."""
        self._playing()
        return elements_of([read_page(self._gui.tab)])

    def state(self) -> ScreenState:
        """Return the state of the screen: the page's address without its query, and the skeleton."""
        self._playing()
        return state_of(route_of(self._gui.tab), [read_page(self._gui.tab)])

    @property
    def gui(self) -> BrowserGui:
        """The browser of the environment, for tools that look into the page."""
        return self._gui

    def close(self) -> None:
        """End the browser and the server; may be called twice."""
        if self._closed:
            return
        self._closed = True
        self._scene = None
        self._gui.close()
        if self._server is not None:
            self._server.close()

    def _start_server(self) -> None:
        """Start the server if none runs, or if each episode has its own."""
        server = self._server
        if server is None or (server.running and not self._file.application.fresh):
            return
        if server.starts and not self._file.application.fresh:
            logger.warning("%s; it is started again", server.why_down() or "the server was ended")
        server.start(self._file.application.url)

    def _begin(self, task: WebTask, seed: int) -> Scene:
        """Set a task up, open its page, and return its scene."""
        file, server = self._file, self._server
        application = file.application
        names: dict[str, Any] = {"session": secrets.token_hex(8), "port": "", "folder": ""}
        if server is not None:
            names |= {"port": str(server.port), "folder": str(server.folder)}
        instance = make_instance(file, task, seed, names)
        address = instance.address(application.url)
        visit = self._gui.begin(
            [host_of(address), *application.hosts],
            seed=seed,
            began_s=application.clock.timestamp() if application.clock else 0.0,
            accepts_dialogs=application.dialogs == "accept",
            uploads=[str(file.folder / instance.text(name)) for name in task.uploads],
        )
        episode = WebEpisode(
            instance.values, address, visit.downloads, deadline_s=self._options.deadline_s
        )
        scene = Scene(file, instance, episode, self._gui.ask, self._options.deadline_s)
        opened = False
        for number, step in enumerate(task.setup):
            if step.script is not None and not opened:
                self._gui.open(address, application.ready or "")
                opened = True
            self._set_up(scene, step, f"{task.id}: setup[{number}]")
        if not opened:
            self._gui.open(address, application.ready or "")
        else:
            self._gui.settle(application.ready or "")
        if task.unchanged:
            scene.before = scene.renewed().state()
        return scene

    def _set_up(self, scene: Scene, step: SetupStep, where: str) -> None:
        try:
            scene.read(step)
        except EnvError as error:
            raise EnvError(f"{where}: {error}") from error

    def _evaluate(self, scene: Scene) -> Verdict:
        if not scene.instance.task.feasible:
            if isinstance(self._last, Fail):
                return Verdict("pass", "the task cannot be done, and the policy said so")
            return Verdict("fail", "the task cannot be done, and the policy did not say so")
        if isinstance(self._last, Fail):
            return Verdict("fail", "the policy said that the task cannot be done")
        return verdict_of(scene.renewed())

    def _explained(self, error: Exception) -> EnvError:
        """Return an error together with how the server ended, if it did."""
        why = self._server.why_down(ENDING_S) if self._server is not None else ""
        return EnvError(f"{error} ({why})" if why else str(error))

    def _playing(self) -> Scene:
        if self._scene is None:
            raise EnvError("no episode is being played, or its page broke; call reset first")
        return self._scene


class WebSuite:
    """The suite `web:FILE.toml`. Raises TaskError for a mistake in the file."""

    name = "web"

    def __init__(self, path: str | Path) -> None:
        self._file = read_file(Path(path))
        stem = Path(path).stem
        self._tasks = {f"{stem}/{task.id}": task for task in self._file.application.tasks}
        self.tasks: Mapping[str, Task] = {
            task_id: Task(
                task_id,
                self.name,
                task.instruction,
                max_steps=task.max_steps or self._file.application.max_steps,
                tier=max(1, len(task.solution)),
                split=task.split,
                params={"file": self._file.digest(task)},
                feasible=task.feasible,
            )
            for task_id, task in self._tasks.items()
        }

    @checked
    def make_env(
        self,
        *,
        encoding: ImageEncoding = "png",
        scale: Annotated[float, Field(ge=0.25, le=4)] = 1.0,
        step_ms: Pause = 500.0,
        still_ms: Pause = 2000.0,
        patience_s: Seconds = 5.0,
        deadline_s: Seconds = 20.0,
        chromium: str = "",
    ) -> WebEnv:
        """Return an environment with a browser of its own, and a server if the file says how one starts.

        `scale` is pixels of the screenshot per CSS pixel. Each step takes `step_ms` of the page's time, and
        up to `still_ms` while the page changes. A request is waited for, but not one that stays open for
        longer than `patience_s`. An answer of page, browser or server that takes longer than `deadline_s`
        breaks the episode. `chromium` is the browser's binary if it is not Debian's. Raises TaskError.
        """
        options = GuiOptions(
            self._file.application.size, scale, encoding, step_ms, still_ms, patience_s, deadline_s
        )
        return WebEnv(self._file, self._tasks, options, chromium)

    def check_parts(self, *, chromium: str = "", **_: object) -> None:
        """Raise MissingPartError if Chromium or the command that starts the server is not there."""
        find_chromium(chromium)
        check_command(self._file)

    def longest_reset_s(self, *, deadline_s: float = 20.0) -> float:
        """Return the seconds that a reset may take: the start of the server, and the page's first answer."""
        return deadline_s + (
            self._file.application.start_s if self._file.application.start else 0.0
        )


def check_command(file: WebFile) -> None:
    """Raise MissingPartError if the command that starts the server is not there."""
    if not file.application.start:
        return
    command = file.application.start[0]
    if "/" in command:
        present = (file.folder / command).is_file()
    else:
        present = shutil.which(command) is not None
    if not present:
        raise MissingPartError(
            f"{file.path}: start: there is no program {command!r}; install it or name its path"
        )
