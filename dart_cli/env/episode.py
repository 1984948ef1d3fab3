"""One episode: reset -> (ask the policy -> read its text -> perform its actions) ... -> verdict.

    Policy              the protocol of a policy, which answers a screen with a completion: a router, or an
                        engine of this process
    TrajectorySink      the protocol of a sink, which keeps the steps and the end: the data service, or a
                        list in memory
    Episode             the control flow of an episode; `phase` is what it does now
    play_episode        plays an episode in one call
    slot_timer          makes the timer of a slot, which the slot's episodes update
    already_true        returns why an episode cannot begin
    stop_reason_after   returns why an action ended an episode
    admitted            returns the verdict that counts
    hinted              returns an instruction that names the next step of the environment's solution
    BROKE               stop reasons after which the environment is renewed

`dart env` (training) and `dart eval` (evaluation) both use this module, so that they play the same way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Literal, Protocol

from bus.errors import (
    ActionCausedError,
    ActionError,
    BusError,
    ConfigError,
    DartError,
    EngineError,
    EnvError,
    NotSolvableError,
)
from bus.messages import (
    Ack,
    ActRequest,
    Completion,
    Lease,
    StepRecord,
    StopReason,
    TrajectoryEnd,
)
from dart_cli.env.async_env import QUEUEING, AsyncEnv
from dart_cli.env.calls import StepResult, sendable
from dart_cli.env.step_prompts import ActionSpec, StepPrompts
from dart_cli.runtime.waits import PhaseTimer
from envs.contract.actions import Action, Answer, Done, Fail, action_to_dict
from envs.contract.base import Observation, Task, Verdict

Phase = Literal["reset", "model", "env", "submit", "over"]
_COUNTS_AS: dict[Phase, str] = {
    "reset": "resetting",
    "model": "waiting",
    "env": "playing",
    "submit": "idle",
    "over": "idle",
}


BROKE: frozenset[StopReason] = frozenset({"broken", "environment"})
"""Stop reasons after which the environment is renewed."""


class Policy(Protocol):
    """A policy, which answers a screen with a completion."""

    async def act(self, request: ActRequest) -> Completion:
        """Return the policy's completion for one screen. Raises BusError, EngineError."""
        ...


class TrajectorySink(Protocol):
    """Something that keeps a trajectory. An Ack that is not accepted means that the lease was taken back."""

    async def step(self, record: StepRecord) -> Ack:
        """Keep one step."""
        ...

    async def end(self, end: TrajectoryEnd) -> Ack:
        """Keep the end. All steps have been acknowledged before this call."""
        ...


def slot_timer() -> PhaseTimer:
    """Return a timer that counts each second of a slot in one of these phases.

    idle       the slot has no lease, or submits a step or an end: it waits for the data service or a rollout
               worker
    resetting  the environment is reset to the start of a task
    queueing   the environment waits for what environments share, e.g. until others have booted
    waiting    the slot waits for a completion
    playing    the environment acts or evaluates
    dead       the slot pauses after a failure, until it leases again
    """
    return PhaseTimer(("idle", "resetting", QUEUEING, "waiting", "playing", "dead"), "idle")


class _AbandonedError(DartError):
    """The error that ends an episode whose environment works: no answer of the policy, or a lost lease."""


class _LeaseLostError(_AbandonedError):
    """The error after the data service took the lease back: it expired, or the trajectory is not needed."""


def already_true(task: Task, verdict: Verdict | None) -> str | None:
    """Return a message if the task is solved at reset, so that no episode can begin; else None."""
    if verdict is None or verdict.outcome != "pass" or not task.feasible:
        return None
    return f"{task.id} is true at reset: {verdict.reason}"


def stop_reason_after(action: Action, stepped: StepResult) -> StopReason | None:
    """Return why an action ended the episode; None if the episode goes on."""
    if isinstance(action, Fail):
        return "gave_up"
    if stepped.terminated or isinstance(action, Done | Answer):
        return "done"
    return "step_limit" if stepped.truncated else None


def admitted(task: Task, stop_reason: StopReason, verdict: Verdict) -> Verdict:
    """Return the verdict that counts.

    An infeasible task is passed only by the action `fail`, not by doing nothing.
    """
    if task.feasible or verdict.outcome != "pass" or stop_reason == "gave_up":
        return verdict
    reason = "the task cannot be done, and the policy did not say so"
    return Verdict("fail", reason, judgement=verdict.judgement)


async def play_episode(
    env: AsyncEnv,
    lease: Lease,
    task: Task,
    policy: Policy,
    sink: TrajectorySink,
    action_spec: ActionSpec,
) -> TrajectoryEnd:
    """Play one lease to its end and submit its steps and its end. Raises what the sink raises."""
    return await Episode(env, lease, task, policy, sink, action_spec).play()


class Episode:
    """A lease that is being played. Its attributes may be read at any time from the same event loop."""

    def __init__(
        self,
        env: AsyncEnv,
        lease: Lease,
        task: Task,
        policy: Policy,
        sink: TrajectorySink,
        action_spec: ActionSpec,
        timer: PhaseTimer | None = None,
        *,
        hints: bool = False,
    ) -> None:
        """Prepare to play `task` for `lease`. `timer` is the slot's timer (`slot_timer`).

        With `hints` each step is submitted with the next step of the environment's solution, for a teacher.
        """
        self.lease = lease
        self.phase: Phase = "reset"
        self.steps = 0  # number of submitted steps
        self.lease_lost = False  # the data service took the lease back: the end counts for nothing
        self.reset_s = 0.0
        self._timer = timer or slot_timer()
        self._env = env
        self._task = task
        self._policy = policy
        self._sink = sink
        self._prompts = StepPrompts(action_spec)
        self._action_spec = action_spec
        self._hints = hints
        self._screen: Observation | None = None
        self._ack: asyncio.Task[Ack] | None = None  # the submission of the newest step, if pending
        self._began = time.monotonic()

    async def play(self) -> TrajectoryEnd:
        """Play to the end, submit the end and return it.

        The outcome is `invalid` if the environment, the evaluator or the policy broke, and `fail` if an
        action of the policy broke the environment. Raises what the sink raises. If this call is cancelled,
        the steps that were submitted stay with the sink; the caller submits the end (`cancelled`).
        """
        try:
            try:
                stop_reason, verdict = await self._play()
            except EnvError as error:
                stop_reason, verdict = "environment", Verdict("invalid", str(error))
            self._enter("submit")
            await self._settle()
        except _AbandonedError as error:
            self.lease_lost = isinstance(error, _LeaseLostError)
            stop_reason = "cancelled" if self.lease_lost else "unanswered"
            verdict = Verdict("invalid", str(error))
        finally:
            self._enter("submit")
            if self._ack is not None:
                self._ack.cancel()
        end = self._end(stop_reason, verdict)
        ack = await self._sink.end(end)
        self.lease_lost |= not ack.accepted
        self._enter("over")
        return end

    def cancelled(self, reason: str) -> TrajectoryEnd:
        """Return the end to submit for an episode whose `play` was cancelled."""
        return self._end("cancelled", Verdict("invalid", reason))

    def _enter(self, phase: Phase) -> None:
        """Enter a phase of the episode, and the phase of the slot's timer that counts it."""
        self.phase = phase
        self._timer.enter(_COUNTS_AS[phase])

    async def _play(self) -> tuple[StopReason, Verdict]:
        """Play to the end, which is not submitted here; return why the episode ended, and the verdict."""
        self._enter("reset")
        began = time.monotonic()
        screen, instruction = await self._env.reset(self._task, self.lease.task_seed)
        self._screen = screen
        self.reset_s = time.monotonic() - began - self._env.queued_s
        if (reason := already_true(self._task, await self._env.evaluate_start())) is not None:
            return "environment", Verdict("invalid", reason)
        for step in range(self.lease.max_steps):
            request = self._request(step, instruction, screen)
            if self._hints:
                request = await self._with_hint(request)
            completion, model_s = await self._ask(request)
            actions, error = self._prompts.read(completion.text, screen)
            if not actions:
                await self._submit(record_of(request, screen, completion, [], error, model_s, 0.0))
                return "malformed", Verdict("fail", error)
            try:
                stop = await self._act(request, screen, completion, actions, model_s)
            except ActionCausedError as caused:
                return "broken", Verdict("fail", str(caused))
            if stop is not None:
                return await self._evaluate(stop)
            self._prompts.remember(completion, screen)
            screen = self._screen
        return await self._evaluate("step_limit")

    async def _evaluate(self, stop_reason: StopReason) -> tuple[StopReason, Verdict]:
        self._enter("env")
        try:
            return stop_reason, admitted(self._task, stop_reason, await self._env.evaluate())
        except ActionCausedError as caused:
            return "broken", Verdict("fail", str(caused))

    def _request(self, step: int, instruction: str, screen: Observation) -> ActRequest:
        lease, sampling = self.lease, self.lease.sampling
        own = sampling.model_copy(update={"seed": sampling.seed + step})
        return self._prompts.request(lease.trajectory_id, step, instruction, screen, own)

    async def _with_hint(self, request: ActRequest) -> ActRequest:
        """Return the request with the instruction that a teacher reads; unchanged if no step leads on.

        Raises ConfigError if the environment has no oracle.
        """
        self._enter("env")
        try:
            instruction = await hinted(self._env, request, self._action_spec)
        except NotSolvableError as error:
            raise ConfigError(
                f"teacher.hints: suite {self.lease.suite} names no next step: {error}; leave it out, and set "
                "teacher.model to a model folder, or give the suite an oracle_action"
            ) from error
        except EnvError:  # the policy left every way to the goal, or this task has no solution
            return request
        return request.model_copy(update={"hinted_instruction": instruction})

    async def _ask(self, request: ActRequest) -> tuple[Completion, float]:
        """Return (completion, seconds). Raises _AbandonedError if the policy does not answer."""
        self._enter("model")
        began = time.monotonic()
        try:
            completion = await self._policy.act(request)
        except (BusError, EngineError) as error:
            raise _AbandonedError(f"no completion for step {request.step}: {error}") from error
        return completion, time.monotonic() - began

    async def _act(
        self,
        request: ActRequest,
        screen: Observation,
        completion: Completion,
        actions: Sequence[Action],
        model_s: float,
    ) -> StopReason | None:
        """Perform the actions, submit the step, and return why the episode is over; None if it goes on.

        Actions after one that ends the episode are not performed. If the environment breaks on an action, the
        step is submitted before the EnvError is raised.
        """
        self._enter("env")
        began = time.monotonic()
        broken: EnvError | None = None
        stop, reward = None, None
        performed: list[Action] = []
        for action in actions:
            performed.append(action)
            try:
                stepped = await self._env.step(action, continues=len(performed) > 1)
            except EnvError as error:
                broken = error
                break
            self._screen = stepped.observation
            self._prompts.move_pointer(action)
            if stepped.reward is not None:
                reward = stepped.reward if reward is None else reward + stepped.reward
            if (stop := stop_reason_after(action, stepped)) is not None:
                break
        seconds = time.monotonic() - began
        record = record_of(request, screen, completion, performed, "", model_s, seconds, reward)
        await self._submit(record)
        if broken is not None:
            raise broken
        return stop

    async def _submit(self, record: StepRecord) -> None:
        """Begin to submit the step; the episode goes on meanwhile. Steps are sent one at a time, in order."""
        self._enter("submit")
        await self._settle()
        self._ack = asyncio.create_task(self._sink.step(record))
        self.steps += 1

    async def _settle(self) -> None:
        """Wait until the newest step is acknowledged."""
        if self._ack is None:
            return
        ack = await self._ack
        self._ack = None
        if not ack.accepted:
            raise _LeaseLostError(f"the lease was taken back: {ack.note}")

    def _end(self, stop_reason: StopReason, verdict: Verdict) -> TrajectoryEnd:
        return TrajectoryEnd(
            trajectory_id=self.lease.trajectory_id,
            steps=self.steps,
            outcome=verdict.outcome,
            reason=sendable(verdict.reason),
            stop_reason=stop_reason,
            screenshot=self._screen.screenshot if self._screen else None,
            reset_s=self.reset_s,
            wall_s=time.monotonic() - self._began,
            reward=verdict.reward,
            judgement=verdict.judgement,
            app_log=self._env.app_log.lines if self._screen else [],
        )


def record_of(
    request: ActRequest,
    screen: Observation,
    completion: Completion,
    actions: Sequence[Action],
    error: str,
    model_s: float,
    env_s: float,
    reward: float | None = None,
) -> StepRecord:
    """Return a step as the data service stores it; `actions` are those that were performed."""
    performed = [action_to_dict(action) for action in actions]
    return StepRecord(
        trajectory_id=request.trajectory_id,
        step=request.step,
        screenshot=screen.screenshot,
        media_type=screen.media_type,
        image_hashes=request.image_hashes,
        prompt_token_ids=completion.prompt_token_ids,
        sampled=completion.sampled,
        worker=completion.worker,
        text=completion.text,
        action=performed[0] if performed else None,
        error=error,
        model_s=model_s,
        env_s=env_s,
        instruction=request.instruction if request.step == 0 else "",
        observed_text=request.observed_text,
        reward=reward,
        pointed=completion.pointed,
        hint=completion.hint,
        more_actions=performed[1:],
    )


async def hinted(env: AsyncEnv, request: ActRequest, action_spec: ActionSpec) -> str:
    """Return the instruction with the next step: the environment's hint, else the text of the action.

    `action_spec` is that of the model that reads it. Return "" if its language has no text for the action.
    Raises EnvError.
    """
    action, hint = await env.solve()
    if hint:
        return hint
    coordinates = action_spec.coordinate_map_of(request.width, request.height)
    try:
        text = action_spec.action_parser.format(action, coordinates)
    except ActionError:
        return ""
    return f"{request.instruction}\nNext: {text}"
