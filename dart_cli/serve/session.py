"""One episode that another program plays: its requests become steps, its verdict the trajectory's end.

Terms            the task, limits and sampling of a session, fixed when it is opened
SessionContext   the parts and settings that all sessions of a process share
Session          the control flow of an episode

    request  ->  the previous step is submitted to the data service; prompt -> rollout worker -> completion
    end      ->  the last step and the verdict are submitted to the data service

A step is submitted when the next request shows that its action was done, so that `env_s` is the time between
the two. If a prompt repeats the text of an earlier completion, that text gets the tokens that were sampled
for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from http import HTTPStatus
from typing import Literal

from bus.errors import DartError, EnvError
from bus.heartbeat import WaitReporter
from bus.messages import (
    Ack,
    ActRequest,
    ChatMessage,
    Completion,
    Lease,
    Sampling,
    StepRecord,
    StopReason,
    TrajectoryEnd,
)
from dart_cli.env.calls import sendable
from dart_cli.env.data_client import DataClient
from dart_cli.env.episode import Policy, record_of
from dart_cli.env.step_prompts import ActionSpec
from dart_cli.language.coordinates import pointer_after
from dart_cli.runtime.waits import PhaseTimer
from dart_cli.serve.errors import ApiError, invalid, unavailable
from dart_cli.serve.requests import ChatRequest
from dart_cli.serve.sampling import settle
from envs.contract.base import Observation, Verdict
from envs.contract.blobs import content_hash, image_type
from envs.contract.screenshots import StoredEncoding, pixels_of, stored_as

logger = logging.getLogger(__name__)

_INSTRUCTION_CHARS = 20_000
"""Most characters of a first message that become the instruction, if the task has none."""

State = Literal["open", "asking", "ending", "ended"]


@dataclass(frozen=True)
class Terms:
    """The task, limits and sampling of a session, fixed when it is opened."""

    id: str
    trajectory_id: str
    task_id: str  # empty: no task of the suite
    task_seed: int
    instruction: str
    max_steps: int
    sampling: Sampling  # its seed is the episode's; step i adds i to it
    lease: Lease | None  # None: nothing is stored


@dataclass(frozen=True)
class SessionContext:
    """The parts and settings that all sessions of a process share."""

    data_service: DataClient | None  # None without a run: no session has a lease then
    action_spec: ActionSpec
    screens: StoredEncoding
    ignores_sampling: bool
    patience_s: float  # seconds that the data service may take to accept a step or an end
    idle_s: float
    waits: WaitReporter | None = None


@dataclass(frozen=True)
class Answer:
    """A completion with its place in the session."""

    completion: Completion
    step: int
    created: int  # unix seconds


class Session:
    """An episode that another program plays. Not thread-safe: one event loop owns it."""

    def __init__(
        self,
        terms: Terms,
        slot: int,
        policy: Policy,
        context: SessionContext,
        timer: PhaseTimer,
        on_end: Callable[[Session, str], None],
    ) -> None:
        """Open the session. `on_end(session, reason)` is called once, when it takes no more requests."""
        self.terms = terms
        self.slot = slot
        self.state: State = "open"
        self.steps = 0  # number of completions
        self.verdict: Verdict | None = None  # once it is submitted
        self.touched_at = time.monotonic()  # time of the newest request or answer
        self._policy = policy
        self._context = context
        self._timer = timer
        self._on_end = on_end
        self._opened_at = time.monotonic()
        self._reset_s: float | None = None  # from the opening to the first request
        self._answered_at = 0.0  # monotonic seconds of the newest completion
        # text of a completion -> the tokens of each completion of that text, oldest first
        self._sampled_tokens: defaultdict[str, list[list[int]]] = defaultdict(list)
        self._pointer: tuple[int, int] | None = None
        self._unsent: StepRecord | None = None  # the newest step, until its action is done
        # the submission of the previous step, if pending
        self._ack: asyncio.Task[Ack] | None = None
        self._answering: asyncio.Task[Answer] | None = None  # of the newest request
        self._digest = b""  # of the newest request's body
        self._finishing: asyncio.Task[Ack] | None = None
        # screens of the newest prompt, by the key of the image that was sent
        self._screens: dict[bytes, Observation] = {}
        self._submitted: set[str] = set()  # content hashes of images in submitted steps
        self._waiting: AbstractContextManager[None] = nullcontext()
        self._await_agent()

    # --- requests -----------------------------------------------------------------------

    async def ask(self, request: ChatRequest, *, is_repeat: bool) -> Answer:
        """Return the completion of a prompt. Raises ApiError, and what the policy raises.

        A client that repeats a request because its connection was lost gets the answer to the first one.
        """
        before = self._answering if is_repeat and request.digest == self._digest else None
        if before is None or (before.done() and (before.cancelled() or before.exception())):
            self._refuse_unless_open()
            self.state, self._digest = "asking", request.digest
            self._waiting.__exit__(None, None, None)
            self._answering = asyncio.create_task(self._answer(request))
            self._answering.add_done_callback(self._note_answer)
        answering = self._answering
        assert answering is not None
        await asyncio.wait([answering])
        if answering.cancelled():
            raise self._over_error()
        return answering.result()

    def _over_error(self) -> ApiError:
        return ApiError(HTTPStatus.GONE, "session_over", f"session {self.terms.id} is over")

    def _refuse_unless_open(self) -> None:
        """Raise ApiError unless the session can take a request now."""
        if self.state == "asking":
            raise ApiError(
                HTTPStatus.CONFLICT,
                "session_busy",
                f"session {self.terms.id} is still being answered: one request at a time; open another "
                "session for another episode",
            )
        if self.state != "open":
            raise self._over_error()
        if self.steps >= self.terms.max_steps:
            raise invalid(
                f"session {self.terms.id} has had its {self.terms.max_steps} steps: submit the verdict, "
                f"POST /v1/sessions/{self.terms.id}/end",
                code="step_limit",
            )

    def _note_answer(self, task: asyncio.Task[Answer]) -> None:
        """Open the session for the next request, after an answer or an error."""
        self.touched_at = time.monotonic()
        if not task.cancelled():
            task.exception()  # retrieve it: perhaps no client waits for the answer any more
        if self.state == "asking":
            self.state = "open"
            self._await_agent()

    def _await_agent(self) -> None:
        """Report the wait for the agent, until its next request."""
        waits = self._context.waits
        if waits is not None:
            idle_s = self._context.idle_s
            self._waiting = waits.waiting("the next request of an agent", idle_s, on="agent")
        self._waiting.__enter__()
        self._timer.enter("playing")

    async def _answer(self, request: ChatRequest) -> Answer:
        """Submit the previous step, ask the policy, and keep the new step; return the answer."""
        terms, asked_at = self.terms, time.monotonic()
        self.touched_at = asked_at
        sampling = settle(
            request.fields,
            terms.sampling,
            is_trained=terms.lease is not None,
            ignores=self._context.ignores_sampling,
        )
        screens = await self._screens_of(request.images)
        # The request shows that the previous action is done: submit its step.
        await self._settle()
        if self._reset_s is None:
            self._reset_s = asked_at - self._opened_at
        self._submit_step(asked_at - self._answered_at)
        act = self._act_request(request, screens, sampling)
        self._timer.enter("waiting")
        began = time.monotonic()
        completion = await self._policy.act(act)
        self._answered_at = time.monotonic()
        self._sampled_tokens[completion.text].append(list(completion.sampled.token_ids))
        if terms.lease is not None:
            self._keep_step(act, screens, completion, self._answered_at - began, request)
        answer = Answer(completion, self.steps, int(time.time()))
        self.steps += 1
        return answer

    async def _screens_of(self, images: Sequence[bytes]) -> list[Observation]:
        """Return the images [I] of a prompt as observations; decode only those that are new."""
        cache, encoding = self._screens, self._context.screens
        try:
            screens = await asyncio.to_thread(_observations, images, cache, encoding)
        except EnvError as error:
            raise invalid(f"an image of the messages: {error}", "messages", "bad_image") from None
        self._screens = dict(zip(map(_key, images), screens, strict=True))
        return screens

    def _act_request(
        self, request: ChatRequest, screens: list[Observation], sampling: Sampling
    ) -> ActRequest:
        newest = screens[-1]
        seed = sampling.seed + (self.steps if sampling.seed == self.terms.sampling.seed else 0)
        return ActRequest(
            trajectory_id=self.terms.trajectory_id,
            step=self.steps,
            instruction="",
            turns=[],
            screenshot=newest.screenshot,
            image_hashes=[content_hash(screen.screenshot) for screen in screens],
            width=newest.width,
            height=newest.height,
            sampling=sampling.model_copy(update={"seed": seed}),
            messages=self._with_tokens(request.messages),
            images=[screen.screenshot for screen in screens[:-1]],
        )

    def _with_tokens(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """Return the messages, the assistant's with the tokens that were sampled for their text.

        If several completions had the same text, the newest message of it gets the newest completion's
        tokens.
        """
        uses: Counter[str] = Counter()
        with_tokens = []
        for message in reversed(messages):
            text = _text(message)
            tokens = self._sampled_tokens.get(text, [])
            if message.role == "assistant" and uses[text] < len(tokens):
                uses[text] += 1
                message = message.model_copy(update={"token_ids": tokens[-uses[text]]})
            with_tokens.append(message)
        return with_tokens[::-1]

    def _keep_step(
        self,
        act: ActRequest,
        screens: list[Observation],
        completion: Completion,
        model_s: float,
        request: ChatRequest,
    ) -> None:
        """Keep the step until the next request or the end shows that its action is done."""
        newest = screens[-1]
        # There are no actions if the agent uses another action language than the run.
        actions, _ = self._context.action_spec.read(completion.text, newest, self._pointer)
        for action in actions:
            self._pointer = pointer_after(action, self._pointer)
        new_images = {
            key: screen.screenshot
            for key, screen in zip(act.image_hashes, screens, strict=True)
            if key not in self._submitted and key != act.image_hashes[-1]
        }
        self._submitted |= set(act.image_hashes)
        record = record_of(act, newest, completion, actions, "", model_s, 0.0)
        instruction = self._instruction(request) if act.step == 0 else ""
        self._unsent = record.model_copy(
            update={"instruction": instruction, "images": list(new_images.values())}
        )

    def _instruction(self, request: ChatRequest) -> str:
        """Return the task's instruction if the prompt shows it word for word, else the user's first text."""
        texts = [_text(message) for message in request.messages if message.role == "user"]
        own = self.terms.instruction
        if own and any(own in text for text in texts):
            return own
        first = next((text for text in texts if text.strip()), "")
        return first[:_INSTRUCTION_CHARS]

    # --- the end ------------------------------------------------------------------------

    async def end(
        self, verdict: Verdict, stop_reason: StopReason | None, screenshot: bytes | None = None
    ) -> Ack:
        """Submit the verdict and return the acknowledgement; a repeated call returns the same one.

        Raises ApiError if the session is over, is still being answered, has no step that a verdict could be
        on, or if the data service does not answer in time.
        """
        if self._finishing is None:
            if self.state == "asking":
                self._refuse_unless_open()
            if self.state == "ended":
                raise self._over_error()
            if not self.steps and verdict.outcome != "invalid":
                raise invalid(
                    f"session {self.terms.id} has no step that a verdict could be on: ask for a completion, "
                    "submit the outcome invalid, or DELETE it",
                )
            self.state, self.verdict = "ending", verdict
            self._waiting.__exit__(None, None, None)
            self._timer.enter("idle")
            reason = stop_reason or self._stop_reason(verdict)
            self._finishing = asyncio.create_task(self._finish(verdict, reason, screenshot))
            self._finishing.add_done_callback(self._finished)
        return await self._in_time(self._finishing)

    async def _finish(self, verdict: Verdict, reason: StopReason, screenshot: bytes | None) -> Ack:
        """Submit the newest step and the end, and return the acknowledgement that counts."""
        if self.terms.lease is None:
            return Ack()
        env_s = time.monotonic() - self._answered_at
        # 1. Wait for the acknowledgement of the previous step, if it is pending.
        if (ack := await self._acknowledged()) is not None and not ack.accepted:
            return ack
        # 2. Submit the newest step.
        self._submit_step(env_s)
        if (ack := await self._acknowledged()) is not None and not ack.accepted:
            return ack
        # 3. Submit the end.
        return await self._data_service.end(self._end(verdict, reason, screenshot))

    def _finished(self, task: asyncio.Task[Ack]) -> None:
        """Close the session after its end was submitted, or could not be."""
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            self.close(f"its end could not be submitted: {error}")
        else:
            note = task.result().note
            self.close(f"submitted{f'; {note}' if note else ''}")

    async def give_back(self, reason: str) -> None:
        """Return the lease, so that nothing of the episode is trained on."""
        lease, is_over = self.terms.lease, self.state in ("ending", "ended")
        for task in (self._answering, self._ack):
            if task is not None:
                task.cancel()
        self.close(reason)
        if lease is not None and not is_over:
            self._unsent = None
            end = self._end(Verdict("invalid", reason), "cancelled", None)
            await self._data_service.give_back(end)

    def close(self, reason: str) -> None:
        """Take no more requests, for `reason`; nothing is submitted."""
        if self.state == "ended":
            return
        if self.state == "open":
            self._waiting.__exit__(None, None, None)
        self.state = "ended"
        self._screens.clear()
        self._sampled_tokens.clear()
        self._timer.enter("idle")
        self._on_end(self, reason)

    def _end(self, verdict: Verdict, reason: StopReason, screenshot: bytes | None) -> TrajectoryEnd:
        now = time.monotonic()
        reset_s = now - self._opened_at if self._reset_s is None else self._reset_s
        return TrajectoryEnd(
            trajectory_id=self.terms.trajectory_id,
            steps=self.steps,
            outcome=verdict.outcome,
            reason=sendable(verdict.reason),
            stop_reason=reason,
            screenshot=screenshot,
            reset_s=reset_s,
            wall_s=now - self._opened_at,
            reward=verdict.reward,
        )

    def _stop_reason(self, verdict: Verdict) -> StopReason:
        """Return the stop reason that follows from a verdict, for an agent that names none."""
        if verdict.outcome == "invalid":
            return "environment"
        at_limit = self.steps >= self.terms.max_steps
        return "step_limit" if at_limit and verdict.outcome == "fail" else "done"

    # --- the data service -----------------------------------------------------------------

    @property
    def _data_service(self) -> DataClient:
        """The client of the data service, which leased the task of this session."""
        data_service = self._context.data_service
        assert data_service is not None, "a session with a lease belongs to a run"
        return data_service

    def _submit_step(self, env_s: float) -> None:
        """Begin to submit the newest step, if there is one; its action took `env_s` seconds."""
        if self._unsent is None:
            return
        record = self._unsent.model_copy(update={"env_s": max(0.0, env_s)})
        self._unsent = None
        self._ack = asyncio.create_task(self._data_service.step(record))

    async def _acknowledged(self) -> Ack | None:
        """Return the acknowledgement of the pending step, without a deadline; None if no step is pending."""
        pending, self._ack = self._ack, None
        return None if pending is None else await pending

    async def _settle(self) -> None:
        """Wait until the data service has the previous step.

        Raises ApiError if the data service takes the lease back, or does not answer in time.
        """
        if self._ack is None:
            return
        try:
            ack = await self._in_time(self._ack)
        except DartError:
            # The data service has refused the step: it is missing, which the end will show.
            if self._ack.done():
                self._ack = None
            raise
        self._ack = None
        if not ack.accepted:
            self.close(f"its lease was taken back: {ack.note}")
            raise ApiError(
                HTTPStatus.GONE,
                "session_over",
                f"session {self.terms.id}: its lease was taken back: {ack.note}; open another",
            )

    async def _in_time(self, task: asyncio.Task[Ack]) -> Ack:
        """Return the acknowledgement. Raises ApiError after `patience_s`; the task goes on."""
        await asyncio.wait([task], timeout=self._context.patience_s)
        if not task.done():
            raise unavailable(
                f"session {self.terms.id}: dart data has not taken its step for "
                f"{self._context.patience_s:g} s; it is kept, ask again"
            )
        return task.result()


def _observations(
    images: Sequence[bytes], cache: dict[bytes, Observation], encoding: StoredEncoding
) -> list[Observation]:
    """Return images as observations; those that are not in `cache` are decoded whole. Raises EnvError."""
    screens = []
    for image in images:
        screen = cache.get(_key(image))
        if screen is None:
            width, height = pixels_of(image).size
            kind = image_type(image) or "application/octet-stream"
            screen = stored_as(Observation(image, kind, width, height), encoding)
        screens.append(screen)
    return screens


def _key(image: bytes) -> bytes:
    return content_hash(image).encode()


def _text(message: ChatMessage) -> str:
    return "".join(part.text for part in message.parts)
