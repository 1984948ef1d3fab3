"""OsworldEnv: plays OSWorld's task files in a guest behind OSWorld's server.

A guest comes from a container that is made anew for each episode, or runs already. Where guest or
evaluator broke the episode is invalid; a container is then replaced by the next reset.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bus.errors import EnvError, NoOracleError, TaskError
from envs.actions import Action, Answer, Done, Fail, Wait
from envs.base import Observation, Task, Verdict
from envs.osworld.actions import commands_of
from envs.osworld.evaluate import foreign, judge, refuse_solved
from envs.osworld.evaluator_process import EvaluatorProcess
from envs.osworld.guest import Guest
from envs.osworld.provider import Provider
from envs.osworld.setup import STEPS, Workplace, prepare
from envs.screenshots import ImageEncoding, observe
from envs.taskfile import TaskFile

ACTION_DEADLINE_S = 130.0
"""Of one command that performs an action; the server itself gives up after 120 s."""

READY_S = 30.0
"""How long a guest that runs already may take for its first screenshot."""


class OsworldEnv:
    """Plays one folder of task files. See envs.base.GuiEnv for the contract."""

    evaluate_acts = True  # by `postconfig`; whether a task is true already, reset has looked itself

    def __init__(
        self,
        suite: str,
        files: Mapping[str, TaskFile],
        provider: Provider,
        judge: EvaluatorProcess,
        *,
        pause_s: float,
        encoding: ImageEncoding,
        deadline_s: float,
        password: str,
        downloads: Path,
    ) -> None:
        self._suite = suite
        self._files = files
        self._provider = provider
        self._judge = judge
        self._pause_s = pause_s
        self._encoding: ImageEncoding = encoding
        self._deadline_s = deadline_s
        self._password = password
        self._downloads = downloads
        self._guest: Guest | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._place: Workplace | None = None
        self._file: TaskFile | None = None
        self._last: Action | None = None
        self._steps = 0
        self._verdict: Verdict | None = None  # on the present state, once it was asked for
        self._over = True

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start `options["task"]`, a Task of this suite or its id. A task file has no seeds."""
        del seed
        file = self._wanted((options or {}).get("task"))
        self._drop()
        if asks_judge(file):
            self._judge.start()  # it imports while the guest boots
        try:
            guest = self._guest = Guest(self._provider.fresh(), deadline_s=self._deadline_s)
            guest.wait_ready(READY_S)
            # Of its own: what evaluators keep there must not reach the next episode.
            self._folder = tempfile.TemporaryDirectory(
                prefix="dart-osworld-", ignore_cleanup_errors=True
            )
            self._place = Workplace(
                Path(self._folder.name),
                self._downloads,
                guest.screen_size(),
                self._password,
                self._judge,
            )
            prepare(file.config, guest, self._place)
            time.sleep(self._pause_s)
            refuse_solved(file, guest, self._place)
            observation = observe(guest.screenshot(), self._encoding)
        except BaseException:
            self._drop()
            raise
        self._file, self._over = file, False
        return observation, {"instruction": file.instruction, "max_steps": file.max_steps}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Perform the action and give the guest `pause_s` to react. Raises EnvError."""
        guest, place = self._playing()
        if self._over:
            raise EnvError("the episode is over; call reset before the next step")
        self._last, self._verdict = action, None
        self._steps += 1
        try:
            for command in commands_of(action, place.screen):
                done = guest.execute(command, deadline_s=ACTION_DEADLINE_S)
                if done.returncode != 0:
                    told = done.error.strip().rpartition("\n")[2]
                    raise EnvError(f"the guest cannot perform {action.kind}: {told[:300]}")
            self._over = isinstance(action, Done | Fail | Answer)
            if not self._over:
                time.sleep(action.seconds if isinstance(action, Wait) else self._pause_s)
            observation = observe(guest.screenshot(), self._encoding)
        except EnvError:
            self._drop()
            raise
        reward = (self.evaluate().reward or 0.0) if self._over else 0.0
        return observation, reward, self._over, False, {}

    def evaluate(self) -> Verdict:
        """Ask the task file's evaluator, once for each state: it may change what it looks at."""
        if self._guest is None or self._place is None or self._file is None:
            return Verdict("invalid", "no episode is being played, or its guest broke")
        if self._verdict is None:
            try:
                self._verdict = judge(self._file, self._last, self._guest, self._place)
            except EnvError as error:
                self._verdict = Verdict("invalid", str(error))
        return self._verdict

    def oracle_action(self) -> Action:
        """The next action of the task file's own solution. Raises NoOracleError where it has none."""
        self._playing()
        solution = self._file.solution if self._file is not None else ()
        if not solution:
            raise NoOracleError("this task file has no solution")
        return solution[min(self._steps, len(solution) - 1)]

    def oracle_hint(self) -> str:
        """Empty: task files hold no words for single steps."""
        return ""

    def close(self) -> None:
        """Leave the guest, remove its container, end the judge; may be called twice."""
        self._drop()
        self._provider.close()
        self._judge.close()

    def _wanted(self, wanted: object) -> TaskFile:
        task_id = wanted.id if isinstance(wanted, Task) else wanted
        if not isinstance(task_id, str) or task_id not in self._files:
            raise TaskError(f"suite {self._suite} has no task {wanted!r}")
        return self._files[task_id]

    def _playing(self) -> tuple[Guest, Workplace]:
        if self._guest is None or self._place is None or self._file is None:
            raise EnvError("no episode is being played; call reset first")
        return self._guest, self._place

    def _drop(self) -> None:
        """Forget the episode; its guest is not touched any more."""
        guest, self._guest = self._guest, None
        folder, self._folder = self._folder, None
        self._place = self._file = self._last = self._verdict = None
        self._steps, self._over = 0, True
        if guest is not None:
            guest.close()
        if folder is not None:
            folder.cleanup()


def asks_judge(file: TaskFile) -> bool:
    """Whether evaluator or set-up of a task need OSWorld's package."""
    steps = (*file.config, *file.evaluator.postconfig)
    return foreign(file.evaluator) or any(step.type not in STEPS for step in steps)
