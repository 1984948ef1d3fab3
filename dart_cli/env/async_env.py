"""An environment that is called from an event loop; each call has a deadline.

AsyncEnv        an environment, whose calls a thread or a process carries
JudgedEnv       an AsyncEnv whose episodes a second model judges: beside the evaluator, or in place of one if
                the task has none
Deadlines       how long each kind of call may take
Carrier         the protocol of ThreadedEnv and IsolatedEnv, which carry a call (carriers.py)
make_async_env  makes the environment that a configuration asks for
CallReport      reports what a pending call waits for, to a WaitReporter and to the slot's timer
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Protocol, Self

from bus.errors import UserError, first_line
from bus.heartbeat import WaitReporter
from bus.messages import Judgement
from dart_cli.config.schema import EnvConfig, observed_kinds
from dart_cli.env.app_log import AppLog
from dart_cli.env.calls import Looked, StepResult
from dart_cli.env.carriers import MOST_HUNG, IsolatedEnv, ThreadedEnv
from dart_cli.judge.evidence import Evidence
from dart_cli.judge.judge import Judge, Purpose, judge_of
from dart_cli.runtime.waits import PhaseTimer
from envs.contract.actions import Action, Answer, Done, Fail, action_to_dict
from envs.contract.base import Observation, Task, Verdict
from envs.contract.queueing import OnQueue, SharedWait, ignore_queue
from envs.contract.registry import make_env

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Deadlines:
    """The longest time of each kind of call, seconds."""

    reset_s: float
    step_s: float
    evaluate_s: float

    def of_step(self, action: Action, *, last: bool) -> float:
        """Return the seconds for a step. One that ends the episode also evaluates (GuiEnv.step)."""
        ends = last or isinstance(action, Done | Fail | Answer)
        return self.step_s + (self.evaluate_s if ends else 0.0)


class Carrier(Protocol):
    """A carrier of calls to one environment, which is made at the first call."""

    name: str  # in errors

    @property
    def hung(self) -> int:
        """The number of environments that overran a deadline and still run."""
        ...

    async def call(
        self,
        what: str,
        payload: Mapping[str, Any],
        deadline_s: float,
        on_queue: OnQueue = ignore_queue,
    ) -> Any:
        """Return the answer to a call; calls.ANSWERS has its type. Raises EnvError for every failure.

        The deadline stands still while the environment is in a queue. `on_queue` is called with what the
        environment waits for there, and with None at the end of the queue.
        """
        ...

    async def renew(self) -> None:
        """Close the environment; the next call makes a fresh one."""
        ...


class AsyncEnv:
    """An environment behind a carrier. All its errors, and an unexpected exit, become EnvErrors."""

    def __init__(
        self,
        carrier: Carrier,
        deadlines: Deadlines,
        waits: WaitReporter | None = None,
        timer: PhaseTimer | None = None,
    ) -> None:
        """Report each pending call to `waits`, e.g. "env-0/2 to reset mini/popup".

        While the call is in a queue, `timer` is in the phase QUEUEING.
        """
        self.carrier = carrier
        self.queued_s = 0.0  # time that the newest call spent in queues
        self.episode = ""  # a name of the episode for `waits`, e.g. "seed 3"; may stay empty
        self.screen: Observation | None = None  # the newest one; None before the first reset
        self._deadlines = deadlines
        self._waits = waits
        self._timer = timer
        self._task_id = "no task"  # of the newest reset
        self.app_log = AppLog()  # what the application has reported since the newest reset began
        self._steps = 0  # of the policy, since the newest reset
        self._actions_left = 0  # until the task's limit; an environment counts actions

    @property
    def hung(self) -> int:
        """The number of environments that overran a deadline and still run."""
        return self.carrier.hung

    @property
    def is_stuck(self) -> bool:
        """Whether so many environments hang that the carrier makes no more."""
        return self.hung >= MOST_HUNG

    async def reset(self, task: Task, seed: int, *, free: bool = False) -> tuple[Observation, str]:
        """Start the task and return (first observation, instruction).

        With `free`, neither a limit nor the goal ends the episode (GuiEnv.reset).
        """
        self._task_id, self._steps, self._actions_left = task.id, 0, task.max_steps
        self.app_log = AppLog()
        payload = {"task": task, "seed": seed, "free": free}
        began = await self._call("reset", self._deadlines.reset_s, payload)
        self.screen = began.observation
        self.app_log.add("reset", began.app_log)
        return began.observation, began.instruction

    async def evaluate_start(self) -> Verdict | None:
        """Return the verdict on the state right after `reset`; None if that state cannot be evaluated."""
        verdict: Verdict | None = await self._call(
            "evaluate", self._deadlines.evaluate_s, {"at_start": True}
        )
        return verdict

    async def step(self, action: Action, *, continues: bool = False) -> StepResult:
        """Perform one action. With `continues` it is of the same completion as the one before.

        To the environment the actions of a completion are single steps; to JudgedEnv they are one.
        """
        self._steps += not continues
        self._actions_left -= 1
        deadline_s = self._deadlines.of_step(action, last=self._actions_left <= 0)
        stepped: StepResult = await self._call("step", deadline_s, {"action": action})
        self.screen = stepped.observation
        self.app_log.add(f"step {self._steps - 1}", stepped.app_log)
        return stepped

    async def evaluate(self) -> Verdict:
        """Return the verdict on the present state."""
        verdict: Verdict = await self._call(
            "evaluate", self._deadlines.evaluate_s, {"at_start": False}
        )
        return verdict

    async def solve(self) -> tuple[Action, str]:
        """Return (action, hint): the next action of the environment's own solution. Raises NoOracleError."""
        solution: tuple[Action, str] = await self._call("solve", self._deadlines.step_s)
        return solution

    async def look(self) -> Looked | None:
        """Return the state and the elements of the present screen; None if it is not Explorable."""
        looked: Looked | None = await self._call("look", self._deadlines.step_s)
        return looked

    async def renew(self) -> None:
        """Close the environment; the next call makes a fresh one."""
        await self.carrier.renew()

    async def close(self) -> None:
        """Free everything; may be called twice."""
        await self.renew()

    async def _call(
        self, what: str, deadline_s: float, payload: Mapping[str, Any] | None = None
    ) -> Any:
        episode = f", {self.episode}" if self.episode else ""
        waits_for = f"{self.carrier.name} to {what} {self._task_id}{episode}"
        with self._reporting(waits_for, deadline_s) as report:
            return await self.carrier.call(what, payload or {}, deadline_s, report.queued)

    @contextlib.contextmanager
    def _reporting(self, what: str, deadline_s: float) -> Iterator[CallReport]:
        report = CallReport(what, deadline_s, self._waits, self._timer)
        try:
            with report:
                yield report
        finally:
            self.queued_s = report.queued_s


class JudgedEnv(AsyncEnv):
    """An AsyncEnv that collects evidence of the episode and asks the judge about it when it is evaluated."""

    def __init__(
        self,
        carrier: Carrier,
        deadlines: Deadlines,
        waits: WaitReporter | None = None,
        timer: PhaseTimer | None = None,
        *,
        judge: Judge,
        checks: bool,
    ) -> None:
        """Let `judge` judge tasks without an evaluator.

        With `checks` it is also asked about tasks with an evaluator, whose verdict then counts.
        """
        super().__init__(carrier, deadlines, waits, timer)
        self._judge, self._checks = judge, checks
        self._task: Task | None = None
        self._evidence: Evidence | None = None
        self._actions: list[dict[str, Any]] = []  # of the newest completion
        self._in_use = False

    async def reset(self, task: Task, seed: int, *, free: bool = False) -> tuple[Observation, str]:
        """See AsyncEnv."""
        self._task, self._evidence, self._actions = task, None, []
        screen, instruction = await super().reset(task, seed, free=free)
        if not free and (self._checks or not task.evaluated):
            self._evidence = self._judge.evidence(instruction, screen.screenshot)
        return screen, instruction

    async def evaluate_start(self) -> Verdict | None:
        """Return the evaluator's verdict right after `reset`; None if the task has no evaluator."""
        if self._task is not None and not self._task.evaluated:
            return None
        return await super().evaluate_start()

    async def step(self, action: Action, *, continues: bool = False) -> StepResult:
        """See AsyncEnv."""
        if not continues:
            self._note_actions()
        stepped = await super().step(action)
        self._actions.append(action_to_dict(action))
        return stepped

    async def evaluate(self) -> Verdict:
        """Return the evaluator's verdict with the judge's opinion; without an evaluator, the judge's verdict.

        Raises UserError if the judge's verdict is needed and another request would fail as well.
        """
        task, evidence = self._task, self._evidence
        if task is None or evidence is None:
            return await super().evaluate()
        self._note_actions()
        if not task.evaluated:
            return verdict_of(await self._ask_judge(evidence, "missing"))
        verdict = await super().evaluate()
        try:
            opinion = await self._ask_judge(evidence, "check")
        except UserError as error:  # an opinion alone must not end the run
            logger.warning("no opinion of judge %s: %s", self._judge.name, error)
            opinion = Judgement(
                judge=self._judge.name, use="check", outcome="invalid", reason=first_line(error)
            )
        return replace(verdict, judgement=opinion)

    async def renew(self) -> None:
        """See AsyncEnv."""
        self._evidence = None
        await super().renew()

    async def close(self) -> None:
        """See AsyncEnv. The last environment of a process that closes frees the judge's model."""
        try:
            await super().close()
        finally:
            if self._in_use:
                self._in_use = False
                await self._judge.__aexit__(None, None, None)

    def _note_actions(self) -> None:
        """Add the newest completion's actions, and the screen after them, to the evidence."""
        if self._evidence is not None and self._actions and self.screen is not None:
            self._evidence.add(self._actions, self.screen.screenshot)
        self._actions = []

    async def _ask_judge(self, evidence: Evidence, use: Purpose) -> Judgement:
        if not self._in_use:
            self._in_use = True
            await self._judge.__aenter__()
        what = f"the judge {self._judge.name} of {self.carrier.name}"
        with self._reporting(what, self._judge.limits.deadline_s) as report:
            return await self._judge.judge(evidence, use, report.queued)


def verdict_of(opinion: Judgement) -> Verdict:
    """Return a judge's opinion as a verdict, whose reason names the judge."""
    if opinion.score is None:
        reason = f"no verdict of judge {opinion.judge}: {opinion.reason}"
        return Verdict("invalid", reason, judgement=opinion)
    why = f": {opinion.reason}" if opinion.reason else ""
    reason = f"judged by {opinion.judge}, score {opinion.score:g}{why}"
    return Verdict(opinion.outcome, reason, opinion.score, judgement=opinion)


def make_async_env(
    config: EnvConfig,
    name: str,
    waits: WaitReporter | None = None,
    timer: PhaseTimer | None = None,
) -> AsyncEnv:
    """Return an environment of the run's suite, in a thread or a process (`env.isolation`).

    Errors and waits use its `name`.
    """
    observe = observed_kinds(config)
    screens = config.screenshots
    carrier: Carrier
    if config.isolation == "process":
        carrier = IsolatedEnv(config.suite, config.options, name, screens, observe)
    else:
        carrier = ThreadedEnv(
            lambda: make_env(config.suite, observe=observe, **config.options), name, screens
        )
    deadlines = Deadlines(
        config.reset_deadline_s, config.step_deadline_s, config.evaluate_deadline_s
    )
    if config.judge is None:
        return AsyncEnv(carrier, deadlines, waits, timer)
    checks = config.judge.use == "check"
    judge = judge_of(config.judge)
    return JudgedEnv(carrier, deadlines, waits, timer, judge=judge, checks=checks)


QUEUEING = "queueing"
"""Phase of a slot whose environment is in a queue."""


class CallReport:
    """A context that reports what a pending call waits for: the environment, or its place in a queue."""

    def __init__(
        self,
        what: str,
        deadline_s: float,
        waits: WaitReporter | None,
        timer: PhaseTimer | None = None,
    ) -> None:
        self.queued_s = 0.0  # time spent in queues that are over
        self._what, self._deadline_s = what, deadline_s
        self._waits, self._timer = waits, timer
        self._began = self._queued_at = time.monotonic()
        self._phase = ""  # phase of the timer before the queue
        self._reported = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._report_call()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._reported.close()

    def queued(self, shared_wait: SharedWait | None) -> None:
        """Report what the environment is in a queue for; None means that the queue is over."""
        now = time.monotonic()
        self._reported.close()
        if shared_wait is None:
            self.queued_s += now - self._queued_at
            self._report_call()
        else:
            self._queued_at = now
            bound = f"at most {shared_wait.patience_s:g} s in which none moves on"
            self._report(f"{shared_wait.what} ({bound})", on="queue")
        if self._timer is not None and shared_wait is None:
            self._timer.enter(self._phase)
        elif self._timer is not None:
            self._phase = self._timer.phase
            self._timer.enter(QUEUEING)

    def _report_call(self) -> None:
        since = self._began + self.queued_s
        self._report(self._what, self._deadline_s, since=since, on="environment")

    def _report(
        self, what: str, deadline_s: float | None = None, *, since: float | None = None, on: str
    ) -> None:
        if self._waits is not None:
            waiting = self._waits.waiting(what, deadline_s, since=since, on=on)
            self._reported.enter_context(waiting)
