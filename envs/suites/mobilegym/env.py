"""MobilegymEnv: plays MobileGym's tasks on its phone, in the browser of dart.

Each episode has the phone in a new browser profile. MobileGym's own code, in an interpreter of its own, sets the
task up through the page and judges its state at the end; the gestures are those of the phone's own input.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bus.errors import EnvError
from envs.contract.actions import Action, Answer, Done, Fail, Wait
from envs.contract.base import Observation, Task, Verdict, task_of
from envs.contract.elements import Element, ScreenState, elements_of, state_of
from envs.suites.mobilegym.gestures import GestureWriter
from envs.tools.browser.accessibility import read_page
from envs.tools.browser.gui import BrowserGui
from envs.tools.child_program import ChildProgram
from envs.tools.shared_servers import SharedServers

HOST = "127.0.0.1"
SERVER = "MobileGym"
GESTURE_MS = 100.0  # of the page's time between two looks whether a gesture is over
MOST_GESTURE_MS = 20_000.0
CLEAN_SHARE = 0.8
"""The reward of a task that is done with side effects, as in MobileGym's training (mobilegym-rl, its evaluator)."""
ROUTE = "JSON.stringify(window.__OS__?.getAppRoute?.() ?? null)"


@dataclass(frozen=True)
class Limits:
    """The longest times, in seconds."""

    setup_s: float  # until the phone has loaded and a task is set up
    judge_s: float


class MobilegymEnv:
    """Plays suite `mobilegym`. See envs.contract.base.GuiEnv for the contract."""

    def __init__(
        self,
        name: str,
        find_tasks: Callable[[], Mapping[str, Task]],
        gui: BrowserGui,
        servers: SharedServers,
        *,
        program: Callable[[], ChildProgram],
        limits: Limits,
    ) -> None:
        """Prepare to play suite `name`; the first reset starts the server, the browser and MobileGym's code."""
        self._name = name
        self._find_tasks = find_tasks
        self._gui = gui
        self._servers = servers
        self._servers.join()
        self._make_program = program
        self._program: ChildProgram | None = None
        self._limits = limits
        self._writer = GestureWriter((0, 0), 1.0)
        self._task: Task | None = None
        self._verdict: Verdict | None = None  # on the present state, once it was judged
        self._answer: str | None = None
        self._has_server = False
        self._over = True
        self._closed = False

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start `options["task"]`, a Task of this suite or its id; the seed chooses its parameters."""
        if self._closed:
            raise EnvError("the environment is closed")
        task = task_of(options, self._find_tasks(), self._name)
        self._leave()
        server = self._servers.take(SERVER)
        self._has_server = True
        host, until = f"{HOST}:{server.port}", time.monotonic() + self._limits.setup_s
        self._gui.begin([host], seed=seed or 0)
        self._gui.open(f"http://{host}/")
        width, height = self._gui.options.size
        scale = self._gui.options.scale
        self._writer = GestureWriter((round(width * scale), round(height * scale)), scale)
        request = {
            "do": "reset",
            "task": task.params["name"],
            "seed": seed or 0,
            "url": f"http://{host}/",
            "size": [width, height],
            "scale": scale,
        }
        answer = self._converse(request, until - time.monotonic(), f"set up {task.id}")
        self._gui.settle()
        observation = self._gui.look()
        self._task, self._over, self._answer, self._verdict = task, False, None, None
        return observation, {"instruction": answer["instruction"], "app_log": self._gui.take_log()}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Perform the action. MobileGym judges after the step that ends the episode."""
        if self._over:
            raise EnvError("the episode is over; call reset before the next step")
        self._verdict = None
        if isinstance(action, Answer):
            self._answer = action.text
        for expression in self._writer.expressions_of(action):
            self._gesture(expression)
        pause = (
            action if isinstance(action, Wait) else Wait(seconds=self._gui.options.step_ms / 1000)
        )
        observation = self._gui.perform(pause)
        if isinstance(action, Fail):
            self._verdict = Verdict("fail", "the policy said that the task cannot be done")
        self._over = isinstance(action, Done | Fail | Answer)
        reward = (self.evaluate().reward or 0.0) if self._over else 0.0
        return observation, reward, self._over, False, {"app_log": self._gui.take_log()}

    def evaluate(self) -> Verdict:
        """Return MobileGym's judgement of the present state as a verdict; invalid if its judge failed."""
        if self._task is None:
            return Verdict("invalid", "no episode is being played, or its page broke")
        if self._verdict is None:
            request = {"do": "judge", "answer": self._answer}
            answer = self._converse(request, self._limits.judge_s, f"judge {self._task.id}")
            self._verdict = verdict_of(answer)
        return self._verdict

    def elements(self) -> list[Element]:
        """Return the elements that can be seen and reached. Raises EnvError."""
        return elements_of([read_page(self._gui.tab)])

    def state(self) -> ScreenState:
        """Return the state of the screen: the phone's application and page, and its skeleton. Raises EnvError."""
        return state_of(str(self._gui.ask(ROUTE)), [read_page(self._gui.tab)])

    @property
    def gui(self) -> BrowserGui:
        """The browser of the environment, for tools that look into the page."""
        return self._gui

    @property
    def pids(self) -> list[int]:
        """The process ids of what the environment runs beside its browser: the server, MobileGym's code."""
        own = None if self._program is None else self._program.pid
        return [*self._servers.pids(), *([] if own is None else [own])]

    def close(self) -> None:
        """End the browser and MobileGym's code; the last environment ends the server. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._leave()
        self._gui.close()
        self._end_program()
        self._servers.leave()

    def _gesture(self, expression: str) -> None:
        """Perform a gesture, which may take a part of the page's time."""
        self._gui.ask(
            f"void (window.__dartGesture = 1, (async () => {expression})()"
            ".finally(() => { window.__dartGesture = 0; }))"
        )
        passed = 0.0
        while self._gui.ask("window.__dartGesture === 1"):
            if passed > MOST_GESTURE_MS:
                raise EnvError(f"the phone did not end {expression[:80]} in {MOST_GESTURE_MS:g} ms")
            self._pass(GESTURE_MS)
            passed += GESTURE_MS

    def _pass(self, ms: float) -> None:
        """Let the page's time pass, without waiting until it is still."""
        self._gui.visit.settle(ms, ms)

    def _converse(self, request: Mapping[str, Any], deadline_s: float, what: str) -> dict[str, Any]:
        """Return the answer to a request, and do meanwhile what MobileGym's code asks of the page."""
        if self._program is None:
            self._program = self._make_program()
        try:
            until = time.monotonic() + deadline_s
            answer, _ = self._program.ask(request, deadline_s, what)
            while "page" in answer:
                reply = self._reply_to(answer)
                answer, _ = self._program.ask(reply, max(0.0, until - time.monotonic()), what)
        except BaseException:
            self._end_program()  # it may wait for an answer of the page
            raise
        return answer

    def _reply_to(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Do what MobileGym's code asks of the page, and return the reply."""
        try:
            match call["page"]:
                case "evaluate":
                    return {"value": self._gui.ask(call["expression"])}
                case "goto":
                    self._gui.open(call["address"])
                case _:
                    self._pass(1000 * call["seconds"])
        except EnvError as error:
            self._gui.visit  # noqa: B018 - raises if the page itself is gone
            return {"fault": str(error)}
        return {"value": None}

    def _leave(self) -> None:
        """End the episode with the profile that it had."""
        self._task, self._over, self._verdict = None, True, None
        self._gui.leave()
        if self._has_server:
            self._has_server = False
            self._servers.give_back([SERVER])

    def _end_program(self) -> None:
        program, self._program = self._program, None
        if program is not None:
            program.close()


def verdict_of(judgement: Mapping[str, Any]) -> Verdict:
    """Return the verdict of a judgement: pass without side effects, else a share of the goal as the reward."""
    if judgement["judge_error"]:
        return Verdict("invalid", f"MobileGym's judge failed: {judgement['judge_error']}")
    if judgement["passed"]:
        return Verdict("pass", "the goal is reached without side effects")
    if judgement["success"]:
        changes = "; ".join(judgement["warnings"])
        return Verdict(
            "fail", f"the goal is reached with side effects: {changes}"[:800], CLEAN_SHARE
        )
    progress = min(max(judgement["progress"], 0.0), CLEAN_SHARE)
    issues = "; ".join(judgement["issues"])
    return Verdict("fail", f"progress {progress:g}: {issues}"[:800], progress)
