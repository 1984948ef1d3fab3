"""The arm `osworld` of `benchmarks/interop/interop.py`: tasks of a checkout of OSWorld, on a guest that runs.

Our adapter, and OSWorld's own DesktopEnv (own_osworld.py) in the interpreter of its packages, play the
same tasks on the same guest: a click, a key, then done or fail. Before the end a command in the guest writes the
state that the task asks for (even rounds) or leaves it (odd ones). Both wait PAUSE_S after an action.

    DART_OSWORLD_CHECKOUT   a checkout of OSWorld
    DART_OSWORLD_PYTHON     an interpreter that has its packages (docs/environments/osworld.md)
    DART_OSWORLD_URL        a guest that may be written to; its server runs as a user with ~/Desktop
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.interop.parts import Asked, NotInstalledError, Played, Result, compared
from bus.errors import EnvError
from envs.contract.actions import Action, Click, Done, Fail, KeyPress
from envs.contract.base import GuiEnv
from envs.suites.osworld.guest import Guest, read_address
from envs.suites.osworld.suite import OsworldSuite
from envs.tools.child_program import ChildProgram

PAUSE_S = 0.2
DEADLINE_S = 300.0
_CODE = "/home/user/.config/Code/User"
_NOT = "printf '{}' > "
_KEYS = '[{"key": "ctrl+j", "command": "workbench.action.focusActiveEditorGroup", "when": "terminalFocus"}]'

TASKS: dict[str, tuple[str, str]] = {
    "f9be0997": ("gsettings set org.gnome.desktop.notifications show-banners false", "true"),
    "a4d98375": ("gsettings set org.gnome.desktop.screensaver lock-enabled true", "true"),
    "bedcedc4": ("gsettings set org.gnome.desktop.session idle-delay 0", "true"),
    "e0df059f": (
        "mv ~/Desktop/todo_list_Jan_1 ~/Desktop/todo_list_Jan_2",
        "rm -rf ~/Desktop/todo_list_Jan_*",
    ),
    "f8369178": (
        "gsettings set org.gnome.desktop.interface gtk-theme Orchis",
        "gsettings reset org.gnome.desktop.interface gtk-theme",
    ),
    "276cc624": (
        f"""printf '{{"editor.wordWrapColumn": 50}}' > {_CODE}/settings.json""",
        f"{_NOT}{_CODE}/settings.json",
    ),
    "9439a27b": (
        f"""printf '{{"debug.focusEditorOnBreak": false}}' > {_CODE}/settings.json""",
        f"{_NOT}{_CODE}/settings.json",
    ),
    "930fdb3b": (
        f"printf '{_KEYS}' > {_CODE}/keybindings.json",
        f"printf '[]' > {_CODE}/keybindings.json",
    ),
    "9d425400": (
        f"""printf '{{"workbench.editor.wrapTabs": true}}' > {_CODE}/settings.json""",
        f"{_NOT}{_CODE}/settings.json",
    ),
    "b3d4a89c": ("true", "true"),  # cannot be done: `fail` passes
}
"""Start of a task's id -> what solves it in the guest, and what undoes that before an episode."""

IMPOSSIBLE = frozenset({"b3d4a89c"})


@dataclass
class Plan:
    """What both sides play, episode by episode."""

    files: dict[str, Path]  # by the start of an id
    guest: Guest

    def name(self, index: int) -> str:
        """Return the task of an episode."""
        return list(TASKS)[index % len(TASKS)]

    def solves(self, index: int) -> bool:
        """Whether an episode reaches the goal."""
        return index // len(TASKS) % 2 == 0

    def shell(self, index: int, command: str) -> None:
        """Run a command in the guest."""
        done = self.guest.execute(command, shell=True, deadline_s=DEADLINE_S)
        if done.returncode:
            raise EnvError(f"{self.name(index)}: {command}: {done.error}")

    def undo(self, index: int) -> None:
        """As it was before."""
        self.shell(index, TASKS[self.name(index)][1])

    def actions(self, index: int) -> list[Action]:
        """Return the actions of an episode; the last one ends it, after `solve`."""
        gives_up = self.name(index) in IMPOSSIBLE and self.solves(index)
        return [Click(x=400, y=300), KeyPress(keys=["escape"]), Fail() if gives_up else Done()]

    def solve(self, index: int) -> None:
        """Bring about the state that the task asks for, if the episode is one that reaches the goal."""
        if self.solves(index):
            self.shell(index, TASKS[self.name(index)][0])


@dataclass
class Ours:
    """Our adapter."""

    env: GuiEnv
    suite: OsworldSuite
    plan: Plan

    def play(self, index: int) -> Played:
        """See Side."""
        played, name = Played("invalid"), self.plan.name(index)
        [task] = [each for key, each in self.suite.tasks.items() if f"/{name}" in key]
        try:
            self.plan.undo(index)
            began = time.perf_counter()
            self.env.reset(seed=0, options={"task": task})
            played.reset_s = time.perf_counter() - began
            *actions, last = self.plan.actions(index)
            for action in actions:
                began = time.perf_counter()
                self.env.step(action)
                played.step_s.append(time.perf_counter() - began)
            self.plan.solve(index)
            self.env.step(last)
            verdict = self.env.evaluate()
        except EnvError as error:
            played.reason = str(error)
            return played
        played.outcome, played.reason = verdict.outcome, verdict.reason
        return played


class Own:
    """OSWorld's own environment."""

    def __init__(self, python: str, checkout: Path, plan: Plan) -> None:
        source = Path(__file__).with_name("own_osworld.py").read_text(encoding="utf-8")
        address = plan.guest.address
        ports = (address.server_port, address.chromium_port, address.vlc_port)
        arguments = [str(checkout), address.host, *map(str, ports)]
        self._program = ChildProgram(python, source, arguments=arguments, folder=checkout)
        self._plan = plan

    def play(self, index: int) -> Played:
        """See Side."""
        played, plan = Played("invalid"), self._plan
        try:
            plan.undo(index)
            task = json.loads(plan.files[plan.name(index)].read_text(encoding="utf-8"))
            began = time.perf_counter()
            self._ask({"do": "reset", "task": task})
            played.reset_s = time.perf_counter() - began
            *actions, last = plan.actions(index)
            for action in actions:
                began = time.perf_counter()
                self._ask({"do": "step", "action": command_of(action), "pause_s": PAUSE_S})
                played.step_s.append(time.perf_counter() - began)
            plan.solve(index)
            self._ask({"do": "step", "action": command_of(last), "pause_s": PAUSE_S})
            score = self._ask({"do": "evaluate"})["score"]
        except EnvError as error:
            played.reason = str(error)
            return played
        played.outcome = "pass" if score >= 1 else "fail"
        return played

    def close(self) -> None:
        """End it."""
        self._program.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        return self._program.ask(request, DEADLINE_S, f"OSWorld's {request['do']}")[0]


def command_of(action: Action) -> str:
    """Return the action as OSWorld's agents write it."""
    if isinstance(action, Click):
        return f"pyautogui.click({action.x}, {action.y})"
    if isinstance(action, KeyPress):
        return f"pyautogui.press({action.keys[0]!r})"
    return "FAIL" if isinstance(action, Fail) else "DONE"


def named(variable: str) -> str:
    """Return a variable that the arm needs. Raises NotInstalledError."""
    if value := os.environ.get(variable, ""):
        return value
    raise NotInstalledError(
        f"no {variable}: the arm needs a checkout of OSWorld, an interpreter with its packages and a guest "
        "(benchmarks/interop/with_osworld.py)"
    )


def play(asked: Asked) -> Result:
    """Both sides."""
    checkout = Path(named("DART_OSWORLD_CHECKOUT")).resolve()
    python, url = named("DART_OSWORLD_PYTHON"), named("DART_OSWORLD_URL")
    examples = checkout / "evaluation_examples" / "examples"
    files = {name: next(examples.glob(f"*/{name}*.json")) for name in TASKS}
    suite = OsworldSuite(examples, name="osworld369", only=[each.stem for each in files.values()])
    env = suite.make_env(url=url, pause_s=PAUSE_S, evaluator_python=python, checkout=str(checkout))
    plan = Plan(files, Guest(read_address(url)))
    own = Own(python, checkout, plan)
    try:
        return {"tasks": len(TASKS), **compared(Ours(env, suite, plan), own, asked)}
    finally:
        own.close()
        env.close()
        plan.guest.close()
