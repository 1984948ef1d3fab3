"""Suite `android`: task files played on devices over adb. Experimental.

AndroidEnv     plays task files on one device
AndroidSuite   the suite of a folder; the one that ships, tasks/, has a few tasks that any recent Android can
               play

Set-up steps and evaluators are commands of the device's shell (`settings`, `dumpsys`, `am`). A device is not
a virtual machine: unless `snapshot` names a snapshot of an emulator, changes that an episode makes stay,
except those that the next task's set-up undoes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bus.errors import EnvError, TaskError
from envs.contract.actions import Action, Answer, Done, Fail, Type, Wait
from envs.contract.base import Observation, Task, Verdict, task_of
from envs.contract.elements import Element, Node, ScreenState, elements_of, state_of
from envs.contract.options import ImageEncoding, Pause, Seconds, checked
from envs.contract.screenshots import observe
from envs.suites.android.actions import Finger, finger_after, lift, scripts_of, unwritten
from envs.suites.android.adb import AdbTransport, find_adb, focus_of, nodes_of, read_views
from envs.tools.resource_pools import ResourcePool, SharedPools
from envs.tools.taskfile import (
    METRICS,
    Check,
    Evaluator,
    Getter,
    SetupStep,
    TaskFile,
    claimed,
    graded,
    joined,
    load_tasks,
)

logger = logging.getLogger(__name__)

READY_S = 60.0
LONGEST_SLEEP_S = 60.0
WAKE = "input keyevent 224; wm dismiss-keyguard; input keyevent 3"
KEYBOARD = "settings get secure default_input_method"
ADB_KEYBOARD = "com.android.adbkeyboard"


class AndroidEnv:
    """An environment that plays task files on one device. See envs.contract.base.GuiEnv for the contract."""

    # `postconfig` may act before an evaluation. Reset itself checks whether a task is solved already.
    evaluate_acts = True

    def __init__(
        self,
        suite: str,
        files: Mapping[str, TaskFile],
        adb: str,
        serials: ResourcePool[str],
        *,
        snapshot: str,
        pause_s: float,
        encoding: ImageEncoding,
        deadline_s: float,
    ) -> None:
        self._suite = suite
        self._files = files
        self._adb = adb
        self._serials = serials
        self._serial: str | None = None
        self._snapshot = snapshot
        self._pause_s = pause_s
        self._encoding: ImageEncoding = encoding
        self._deadline_s = deadline_s
        self._device: AdbTransport | None = None
        self._file: TaskFile | None = None
        self._size = (0, 0)  # of the last screenshot
        self._adb_keyboard = False
        self._finger: Finger = None
        self._last: Action | None = None
        self._verdict: Verdict | None = None  # on the present state, once it was evaluated
        self._views: tuple[str, list[Node]] | None = None  # of the present screen, once it was read
        self._over = True

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start `options["task"]`, a Task of this suite or its id. A task file has no seeds."""
        del seed
        file = task_of(options, self._files, self._suite)
        self._file, self._over = None, True
        self._last = self._verdict = None
        if self._serial is None:
            self._serial = self._serials.take()
        device = self._device = AdbTransport(
            find_adb(self._adb), self._serial, deadline_s=self._deadline_s
        )
        if self._snapshot:
            device.run(["emu", "avd", "snapshot", "load", self._snapshot], READY_S)
        device.wait_ready(READY_S)
        if self._finger is not None:
            device.shell(lift(self._finger))
            self._finger = None
        device.shell(WAKE)
        _prepare(file.config, device)
        self._adb_keyboard = device.shell(KEYBOARD).startswith(ADB_KEYBOARD)
        time.sleep(self._pause_s)
        evaluator = file.evaluator
        if (
            not (evaluator.infeasible or evaluator.missing or evaluator.postconfig)
            and _score_all(evaluator, device) >= 1
        ):
            raise EnvError("the task is already done at reset; its set-up must undo it")
        observation = self._observe(device)
        self._file, self._over = file, False
        return observation, {"instruction": file.instruction, "max_steps": file.max_steps}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Perform the action and give the device `pause_s` to react. Raises EnvError.

        `info["unwritten"]` has the characters of a text that have no key on the device.
        """
        device, _ = self._playing()
        if self._over:
            raise EnvError("the episode is over; call reset before the next step")
        lacking, self._verdict = "", None
        if isinstance(action, Type) and not self._adb_keyboard:
            lacking = unwritten(action.text)
            if lacking:
                logger.warning(
                    "%s: %d characters were not written; install %s and make it the input method",
                    device.name,
                    len(lacking),
                    ADB_KEYBOARD,
                )
        try:
            scripts = scripts_of(action, self._size, self._finger, adb_keyboard=self._adb_keyboard)
            for script in scripts:
                device.shell(script)
            self._finger = finger_after(action, self._size, self._finger)
            self._last = action
            self._over = isinstance(action, Done | Fail | Answer)
            if not self._over:
                time.sleep(action.seconds if isinstance(action, Wait) else self._pause_s)
            observation = self._observe(device)
        except EnvError:
            self._file = None
            raise
        reward = (self.evaluate().reward or 0.0) if self._over else 0.0
        return observation, reward, self._over, False, {"unwritten": lacking}

    def evaluate(self) -> Verdict:
        """Run the task file's evaluator, only once for each state, since it may change the state."""
        if self._device is None or self._file is None:
            return Verdict("invalid", "no episode is being played, or its device broke")
        if self._verdict is None:
            self._verdict = self._evaluate(self._device, self._file.evaluator)
        return self._verdict

    def elements(self) -> list[Element]:
        """Return the views that can be seen and reached (envs.contract.elements.Explorable).

        Raises EnvError.
        """
        return elements_of(self._read()[1])

    def state(self) -> ScreenState:
        """Return the state of the screen: the activity and the skeleton of its views. Raises EnvError."""
        return state_of(*self._read())

    def close(self) -> None:
        """Release the device; may be called twice."""
        self._device, self._file = None, None
        serial, self._serial = self._serial, None
        if serial is not None:
            self._serials.give_back(serial)

    def _evaluate(self, device: AdbTransport, evaluator: Evaluator) -> Verdict:
        verdict = claimed(evaluator, self._last)
        if verdict is not None:
            return verdict
        try:
            _prepare(evaluator.postconfig, device)
            score = _score_all(evaluator, device)
        except EnvError as error:
            return Verdict("invalid", str(error))
        names = ", ".join(check.func for check in evaluator.checks)
        return graded(score, f"{names}: {score:g}")

    def _playing(self) -> tuple[AdbTransport, TaskFile]:
        if self._device is None or self._file is None:
            raise EnvError("no episode is being played; call reset first")
        return self._device, self._file

    def _read(self) -> tuple[str, list[Node]]:
        """Return (route, views), read once for each screen. Raises EnvError."""
        device, _ = self._playing()
        if self._views is None:
            views = read_views(device)
            self._views = focus_of(device, views), nodes_of(views, *self._size)
        return self._views

    def _observe(self, device: AdbTransport) -> Observation:
        observation = observe(device.screenshot(), self._encoding)
        self._views = None
        # The size changes when the device is rotated.
        self._size = (observation.width, observation.height)
        return observation


# --- set-up steps and evaluators: commands of the device's shell ------------------------------


def check_file(file: TaskFile) -> None:
    """Raise TaskError for steps and functions that are not supported on a device."""
    evaluator = file.evaluator
    for step in (*file.config, *evaluator.postconfig):
        fields = {"adb_shell": "command", "sleep": "seconds", "launch_app": "package"}
        if fields.get(step.type) not in step.parameters:
            kinds = ", ".join(f"{kind} ({field})" for kind, field in fields.items())
            raise TaskError(f"{file.path}: set-up step {step.type!r} must be one of {kinds}")
    if evaluator.infeasible:
        return
    for check in evaluator.checks:
        if check.func not in METRICS or check.options:
            names = ", ".join(METRICS)
            raise TaskError(f"{file.path}: evaluator.func {check.func!r} must be one of {names}")
        for getter, kind, key in (
            (check.result, "adb_shell", "command"),
            (check.expected, "rule", "rules"),
        ):
            if getter is None or getter.type != kind or key not in getter.parameters:
                raise TaskError(f"{file.path}: {check.func} needs a {kind} with {key!r}")


def _prepare(steps: tuple[SetupStep, ...], device: AdbTransport) -> None:
    """Perform set-up steps in turn. Raises EnvError that names the step that failed."""
    for number, step in enumerate(steps):
        try:
            match step.type:
                case "adb_shell":
                    device.shell(step.parameters["command"])
                case "sleep":
                    time.sleep(min(max(float(step.parameters["seconds"]), 0.0), LONGEST_SLEEP_S))
                case _:
                    package = str(step.parameters["package"])
                    launcher = ["-c", "android.intent.category.LAUNCHER", "1"]
                    device.shell(["monkey", "-p", package, *launcher])
        except (EnvError, TypeError, ValueError) as error:
            raise EnvError(f"set-up step {number} ({step.type}): {error}") from error


def _score_all(evaluator: Evaluator, device: AdbTransport) -> float:
    return joined((_score(check, device) for check in evaluator.checks), evaluator.conj)


def _score(check: Check, device: AdbTransport) -> float:
    """Return the score of one check, 0.0 to 1.0. Raises EnvError."""
    assert check.result is not None
    assert check.expected is not None
    try:
        output = _output_of(check.result, device)
        return METRICS[check.func](output, check.expected.parameters["rules"])
    except (AttributeError, KeyError, TypeError) as error:
        raise EnvError(f"evaluator {check.func}: {type(error).__name__}: {error}") from error


def _output_of(getter: Getter, device: AdbTransport) -> str:
    """Return the output of a getter's command, without surrounding white space."""
    return device.shell(getter.parameters["command"]).strip()


class AndroidSuite:
    """The task files of one folder, which are played on devices."""

    def __init__(self, folder: str | Path = "", *, name: str = "android") -> None:
        self.name = name
        loaded = load_tasks(Path(folder) if folder else Path(__file__).parent / "tasks")
        errors = list(loaded.errors)
        self._files = {}
        for file in loaded.tasks.values():
            try:
                check_file(file)
                self._files[f"{name}/{file.id}"] = file
            except TaskError as error:
                errors.append(error)
        for problem in errors:
            logger.error("left out: %s", problem)
        self.tasks: Mapping[str, Task] = {
            task_id: file.task(name) for task_id, file in self._files.items()
        }
        self._serials = SharedPools[str]("serial", str)

    @checked
    def make_env(
        self,
        *,
        serial: str | list[str] = "",
        adb: str = "",
        snapshot: str = "",
        pause_s: Pause = 1.0,
        encoding: ImageEncoding = "png",
        deadline_s: Seconds = 30.0,
    ) -> AndroidEnv:
        """Return an environment with its own device, to which the first reset connects. Raises TaskError.

        `serial` names the device as `adb devices` does (a list: one for each slot; empty: the only device),
        `adb` the program, `snapshot` the emulator's snapshot that each reset restores. A device has `pause_s`
        to react to an action, and a command may take `deadline_s`.
        """
        return AndroidEnv(
            self.name,
            self._files,
            adb,
            self._serials.of(serial),
            snapshot=snapshot,
            pause_s=pause_s,
            encoding=encoding,
            deadline_s=deadline_s,
        )

    def check_parts(self, *, adb: str = "", **_: object) -> None:
        """Raise MissingPartError if adb is not installed."""
        find_adb(adb)
