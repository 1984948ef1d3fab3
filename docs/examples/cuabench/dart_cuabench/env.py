"""CuabenchEnv: plays tasks of cua-bench on one HTTP worker.

A worker's /reset ends the episode that it plays, so that each environment needs its own worker. The worker
evaluates only after a DoneAction, which the last step sends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bus.errors import EnvError
from dart_cuabench.actions import DONE, Payload, payloads_of
from dart_cuabench.http import JsonClient, RefusedError
from dart_cuabench.tasks import WorkerTask
from dart_cuabench.workers import ExclusiveWorkers
from envs.contract.actions import Action, Answer, Done, Fail, Wait
from envs.contract.base import Observation, Verdict, task_of
from envs.tools.remote.images import from_text
from envs.tools.remote.servers import Access, Address, Retry, UnreachableError

KEEP_S = 7 * 24 * 3600
"""Seconds after which the worker may end an idle episode: so many that it never does. A worker that ends one
takes a lock that it holds already, and does not answer any more."""

CLOSE_S = 2.0
"""Seconds that a request to end the episode may take. Without it the next reset ends the episode."""


@dataclass(frozen=True)
class Limits:
    """The longest times and the largest answers of one environment's calls."""

    reset_s: float
    step_s: float
    evaluate_s: float
    connect_s: float  # how long to wait for a worker that is down or full
    reply_mb: float


class CuabenchEnv:
    """An environment that plays the tasks of one file. See envs.contract.base.GuiEnv for the contract."""

    evaluate_acts = True  # an evaluation ends the episode

    def __init__(
        self,
        tasks: Mapping[str, WorkerTask],
        servers: ExclusiveWorkers,
        access: Access,
        limits: Limits,
    ) -> None:
        """Prepare to play `tasks`. The first reset takes a worker."""
        self._tasks = tasks
        self._servers = servers
        self._access = access
        self._limits = limits
        self._address: Address | None = None
        self._client: JsonClient | None = None
        self._env_id: int | None = None  # the worker's id of the episode; None if there is none
        self._screen: Observation | None = None
        self._verdict: Verdict | None = None  # once the worker has evaluated

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start `options["task"]`, a Task of this suite or its id. Workers take no seed."""
        del seed
        task = task_of(options, self._tasks, "cuabench")
        self._env_id = self._screen = self._verdict = None
        body = {
            "env_path": task.env_path,
            "task_index": task.task_index,
            "split": task.split,
            "timeout": KEEP_S,
        }
        try:
            answer = self._begin(body)
            screen = from_text(answer.get("screenshot"), "/reset: screenshot")
            env_id, instruction = answer.get("env_id"), answer.get("instruction")
            if type(env_id) is not int or not isinstance(instruction, str):
                raise EnvError("/reset: the worker gave no env_id or instruction")
        except EnvError:
            self._leave(worked=False)
            raise
        self._env_id, self._screen = env_id, screen
        return screen, {"instruction": instruction}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Perform the action. Raises EnvError."""
        screen = self._playing()
        ends = isinstance(action, Done | Fail | Answer)
        for payload in payloads_of(action, (screen.width, screen.height)):
            screen = self._send(payload, self._seconds_of(action))
        over = ends or self._verdict is not None
        reward = self._verdict.reward if over and self._verdict is not None else None
        return screen, reward or 0.0, over, False, {}

    def evaluate(self) -> Verdict:
        """Return the verdict by the worker's reward. This ends the episode."""
        if self._verdict is None:
            if self._env_id is None:
                return Verdict("invalid", "no episode is being played, or its worker broke")
            try:
                self._send(DONE, self._limits.evaluate_s)
            except EnvError as error:
                return Verdict("invalid", str(error))
        return self._verdict or Verdict("invalid", "the worker did not evaluate")

    def close(self) -> None:
        """Release the worker; may be called twice."""
        self._leave()

    def _begin(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the worker's answer to /reset; wait for a worker that is down or full. Raises EnvError."""
        retry = Retry(self._limits.connect_s)
        while True:
            try:
                client = self._connect()
                return client.call("POST", "/reset", body, deadline_s=self._limits.reset_s)
            except UnreachableError as error:
                self._leave(worked=False)  # another worker may be up
                last: EnvError = error
            except RefusedError as error:
                if error.status != 503:
                    raise EnvError(f"{error}{_fix(error)}") from error
                last = error
            if not retry.again():
                waited = f"after {self._limits.connect_s:g} s (env.options.connect_s)"
                raise EnvError(f"{last}, {waited}; start the worker, or correct env.options.url")

    def _seconds_of(self, action: Action) -> float:
        """Return the longest time that an action may take at the worker."""
        if isinstance(action, Done | Fail | Answer):
            return self._limits.evaluate_s
        return self._limits.step_s + (action.seconds if isinstance(action, Wait) else 0.0)

    def _send(self, payload: Payload, deadline_s: float) -> Observation:
        """Send one action to the worker and return the screen after it. Raises EnvError."""
        try:
            answer = self._connect().call(
                "POST",
                "/step",
                {"action": payload, "env_id": self._env_id},
                deadline_s=deadline_s,
            )
            screen = from_text(answer.get("screenshot"), "/step: screenshot")
            reward, is_done = answer.get("reward"), answer.get("done")
            reward = float(reward) if type(reward) is int else reward
            if type(is_done) is not bool or type(reward) is not float:
                raise EnvError("/step: the worker gave no reward or done")
        except EnvError as error:
            self._leave(worked=False)
            fix = _fix(error) if isinstance(error, RefusedError) else ""
            raise EnvError(f"{error}{fix}") from error
        self._screen = screen
        if is_done:
            self._env_id = None
            self._verdict = _verdict_of(reward)
        return screen

    def _connect(self) -> JsonClient:
        """Return the client of the environment's worker; take a worker first if there is none."""
        if self._client is None:
            self._address = self._servers.take()
            self._client = JsonClient(
                self._address, self._access, what="worker", reply_mb=self._limits.reply_mb
            )
        return self._client

    def _leave(self, *, worked: bool = True) -> None:
        """End the episode and release the worker. One that has not `worked` is tried last from now on."""
        client, self._client = self._client, None
        address, self._address = self._address, None
        env_id, self._env_id = self._env_id, None
        self._screen = self._verdict = None
        if client is not None:
            if env_id is not None and worked:
                with contextlib.suppress(EnvError):
                    client.call("POST", "/shutdown", {"env_id": env_id}, deadline_s=CLOSE_S)
            client.close()
        if address is not None:
            self._servers.give_back(address, worked=worked)

    def _playing(self) -> Observation:
        if self._screen is None or self._env_id is None:
            raise EnvError("no episode is being played; call reset first")
        return self._screen


def _verdict_of(reward: float) -> Verdict:
    if not 0 <= reward <= 1:  # NaN is in no range
        return Verdict("invalid", f"the evaluator gave the reward {reward:g}; want one in [0, 1]")
    return Verdict.scored(reward, f"the evaluator gave {reward:g}")


def _fix(error: RefusedError) -> str:
    """Return the fix for an answer with a known cause, else ""."""
    if error.status == 404 and "not found" in error.detail.lower():
        return "; the worker restarted, or another client reset it: each slot needs its own worker"
    if error.status == 403 or "access denied" in error.detail.lower():
        return "; start the worker with this machine's address in OSGYM_ALLOWED_IPS"
    return ""
