"""One episode that another program plays: its requests become steps, its verdict the trajectory's end.

Terms      what a session is about, fixed when it is opened
SessionContext   what all sessions of a process share
Session    the control flow

    request  ->  the step before is handed to data; prompt -> rollout worker -> completion
    end      ->  the last step and the verdict are handed to data

A step is submitted when the next request shows that its action was done, so that `env_s` is the time between.
What a prompt says of earlier completions is found by their text: the prompt then has their very tokens.
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
from dart_cli.env.episode import ActionSpec, Policy, record_of
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
"""Of a first message, kept as the instruction of a task that has none of its own."""

State = Literal["open", "asking", "ending", "ended"]


@dataclass(frozen=True)
class Terms:
    """What a session is about, fixed when it is opened."""

    id: str
    trajectory_id: str
    task_id: str  # empty: none of the suite
    task_seed: int
    instruction: str
    max_steps: int
    sampling: Sampling  # its seed is the episode's; step i adds i
    lease: Lease | None  # None: nothing is filed


@dataclass(frozen=True)
class SessionContext:
    """What all sessions of a process share."""

    data: DataClient | None  # None of a model that is served alone: no session has a lease
    action_spec: ActionSpec
    screens: StoredEncoding
    ignores_sampling: bool
    patience_s: float  # for data to take a step or an end
    idle_s: float
    waits: WaitReporter | None = None


@dataclass(frozen=True)
class Answer:
    """One completion, as it is answered."""

    completion: Completion
    step: int
    created: int  # unix seconds


class Session:
    """An episode. Not thread-safe: one event loop owns it."""

    def __init__(
        self,
        terms: Terms,
        slot: int,
        policy: Policy,
        context: SessionContext,
        timer: PhaseTimer,
        ended: Callable[[Session, str], None],
    ) -> None:
        """Tell `ended` once, with the reason, when the session takes no more requests."""
        self.terms = terms
        self.slot = slot
        self.state: State = "open"
        self.steps = 0  # completions given
        self.verdict: Verdict | None = None  # that was submitted
        self.touched_at = time.monotonic()  # of the newest request, or its answer
        self._policy = policy
        self._context = context
        self._timer = timer
        self._ended = ended
        self._opened_at = time.monotonic()
        self._reset_s: float | None = None  # from the opening to the first request
        self._answered_at = 0.0  # monotonic seconds of the newest completion
        self._said: defaultdict[str, list[list[int]]] = defaultdict(list)  # text -> sampled tokens
        self._pointer: tuple[int, int] | None = None
        self._held: StepRecord | None = None  # the newest step, not submitted yet
        self._ack: asyncio.Task[Ack] | None = None  # of the step before, while it is on its way
        self._asked: asyncio.Task[Answer] | None = None
        self._digest = b""  # of the newest request's body
        self._finishing: asyncio.Task[Ack] | None = None
        self._shown: dict[bytes, Observation] = {}  # of the newest prompt, as they came
        self._kept: set[str] = set()  # content hashes of images that were submitted
        self._waiting: AbstractContextManager[None] = nullcontext()
        self._await_agent()

    # --- requests -----------------------------------------------------------------------

    async def ask(self, request: ChatRequest, *, is_repeat: bool) -> Answer:
        """Return the completion of a prompt. Raises ApiError, and what the policy raises.

        A client that repeats a request, since its connection was lost, gets the answer of the first.
        """
        before = self._asked if is_repeat and request.digest == self._digest else None
        if before is None or (before.done() and (before.cancelled() or before.exception())):
            self._refuse_unless_open()
            self.state, self._digest = "asking", request.digest
            self._waiting.__exit__(None, None, None)
            self._asked = asyncio.create_task(self._answer(request))
            self._asked.add_done_callback(self._answered)
        asked = self._asked
        assert asked is not None
        await asyncio.wait([asked])
        if asked.cancelled():
            raise self._over()
        return asked.result()

    def _over(self) -> ApiError:
        return ApiError(HTTPStatus.GONE, "session_over", f"session {self.terms.id} is over")

    def _refuse_unless_open(self) -> None:
        if self.state == "asking":
            raise ApiError(
                HTTPStatus.CONFLICT,
                "session_busy",
                f"session {self.terms.id} is still being answered: one request at a time; open another "
                "session for another episode",
            )
        if self.state != "open":
            raise self._over()
        if self.steps >= self.terms.max_steps:
            raise invalid(
                f"session {self.terms.id} has had its {self.terms.max_steps} steps: submit the verdict, "
                f"POST /v1/sessions/{self.terms.id}/end",
                code="step_limit",
            )

    def _answered(self, task: asyncio.Task[Answer]) -> None:
        self.touched_at = time.monotonic()
        if not task.cancelled():
            task.exception()  # it is told to whoever waits; perhaps no client does any more
        if self.state == "asking":
            self.state = "open"
            self._await_agent()

    def _await_agent(self) -> None:
        """Report the wait for the other program, until its next request."""
        waits = self._context.waits
        if waits is not None:
            idle_s = self._context.idle_s
            self._waiting = waits.waiting("the next request of an agent", idle_s, on="agent")
        self._waiting.__enter__()
        self._timer.enter("playing")

    async def _answer(self, request: ChatRequest) -> Answer:
        terms, asked_at = self.terms, time.monotonic()
        self.touched_at = asked_at
        sampling = settle(
            request.fields,
            terms.sampling,
            is_trained=terms.lease is not None,
            ignores=self._context.ignores_sampling,
        )
        shown = await self._as_shown(request.images)
        await self._settle()
        if self._reset_s is None:
            self._reset_s = asked_at - self._opened_at
        self._hand_in_held(asked_at - self._answered_at)
        act = self._act_request(request, shown, sampling)
        self._timer.enter("waiting")
        began = time.monotonic()
        completion = await self._policy.act(act)
        self._answered_at = time.monotonic()
        self._said[completion.text].append(list(completion.sampled.token_ids))
        if terms.lease is not None:
            self._hold(act, shown, completion, self._answered_at - began, request)
        answer = Answer(completion, self.steps, int(time.time()))
        self.steps += 1
        return answer

    async def _as_shown(self, images: Sequence[bytes]) -> list[Observation]:
        """Return the images [I] of a prompt as the policy sees them; those of the prompt before are known."""
        known = self._shown
        try:
            made = await asyncio.to_thread(_observed, images, known, self._context.screens)
        except EnvError as error:
            raise invalid(f"an image of the messages: {error}", "messages", "bad_image") from None
        self._shown = dict(zip(map(_key, images), made, strict=True))
        return made

    def _act_request(
        self, request: ChatRequest, shown: list[Observation], sampling: Sampling
    ) -> ActRequest:
        newest = shown[-1]
        seed = sampling.seed + (self.steps if sampling.seed == self.terms.sampling.seed else 0)
        return ActRequest(
            trajectory_id=self.terms.trajectory_id,
            step=self.steps,
            instruction="",
            turns=[],
            screenshot=newest.screenshot,
            image_hashes=[content_hash(each.screenshot) for each in shown],
            width=newest.width,
            height=newest.height,
            sampling=sampling.model_copy(update={"seed": seed}),
            messages=self._with_tokens(request.messages),
            images=[each.screenshot for each in shown[:-1]],
        )

    def _with_tokens(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """Return the messages; the newest of one text has the tokens of the newest completion of that text."""
        uses: Counter[str] = Counter()
        found = []
        for message in reversed(messages):
            text = _text(message)
            said = self._said.get(text, [])
            if message.role == "assistant" and uses[text] < len(said):
                uses[text] += 1
                message = message.model_copy(update={"token_ids": said[-uses[text]]})
            found.append(message)
        return found[::-1]

    def _hold(
        self,
        act: ActRequest,
        shown: list[Observation],
        completion: Completion,
        model_s: float,
        request: ChatRequest,
    ) -> None:
        """Keep the step until its action is known to be done."""
        newest = shown[-1]
        # None where the agent has an action language of its own.
        action, _ = self._context.action_spec.read(completion.text, newest, self._pointer)
        if action is not None:
            self._pointer = pointer_after(action, self._pointer)
        brought = {
            key: each.screenshot
            for key, each in zip(act.image_hashes, shown, strict=True)
            if key not in self._kept and key != act.image_hashes[-1]
        }
        self._kept |= set(act.image_hashes)
        record = record_of(act, newest, completion, action, "", model_s, 0.0)
        instruction = self._instruction(request) if act.step == 0 else ""
        self._held = record.model_copy(
            update={"instruction": instruction, "images": list(brought.values())}
        )

    def _instruction(self, request: ChatRequest) -> str:
        """Return the task's own, if the prompt shows it word for word; else the first text of the user."""
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
        """Hand the verdict in; asked again, the answer is the first's. Raises ApiError."""
        if self._finishing is None:
            if self.state == "asking":
                self._refuse_unless_open()
            if self.state == "ended":
                raise self._over()
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
        if self.terms.lease is None:
            return Ack()
        for env_s in (
            None,
            time.monotonic() - self._answered_at,
        ):  # the step before, then the newest
            if env_s is not None:
                self._hand_in_held(env_s)
            if (ack := await self._acknowledged()) is not None and not ack.accepted:
                return ack
        return await self._data.end(self._end(verdict, reason, screenshot))

    def _finished(self, task: asyncio.Task[Ack]) -> None:
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            self.close(f"its end could not be submitted: {error}")
        else:
            note = task.result().note
            self.close(f"submitted{f'; {note}' if note else ''}")

    async def give_back(self, reason: str) -> None:
        """Return the lease: nothing of the episode is trained on."""
        lease, is_over = self.terms.lease, self.state in ("ending", "ended")
        for task in (self._asked, self._ack):
            if task is not None:
                task.cancel()
        self.close(reason)
        if lease is not None and not is_over:
            self._held = None
            end = self._end(Verdict("invalid", reason), "cancelled", None)
            await self._data.give_back(end)

    def close(self, reason: str) -> None:
        """Take no more requests."""
        if self.state == "ended":
            return
        if self.state == "open":
            self._waiting.__exit__(None, None, None)
        self.state = "ended"
        self._shown.clear()
        self._said.clear()
        self._timer.enter("idle")
        self._ended(self, reason)

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
        if verdict.outcome == "invalid":
            return "environment"
        at_limit = self.steps >= self.terms.max_steps
        return "step_limit" if at_limit and verdict.outcome == "fail" else "done"

    # --- data ---------------------------------------------------------------------------

    @property
    def _data(self) -> DataClient:
        """Return the connection to the data service, which leased the task of this session."""
        data = self._context.data
        assert data is not None, "a session with a lease is one of a run"
        return data

    def _hand_in_held(self, env_s: float) -> None:
        """Send the newest step, whose action took so long."""
        if self._held is None:
            return
        record = self._held.model_copy(update={"env_s": max(0.0, env_s)})
        self._held = None
        self._ack = asyncio.create_task(self._data.step(record))

    async def _acknowledged(self) -> Ack | None:
        """Return what data says of the step that is on its way, however long it takes; None without one."""
        on_its_way, self._ack = self._ack, None
        return None if on_its_way is None else await on_its_way

    async def _settle(self) -> None:
        """Wait until data has the step before. Raises ApiError where it takes the lease back, or is away."""
        if self._ack is None:
            return
        try:
            ack = await self._in_time(self._ack)
        except DartError:
            if (
                self._ack.done()
            ):  # data has refused the step: it is missing, and will be told at the end
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
        """Return what data says, if it does so in time; the task goes on either way."""
        await asyncio.wait([task], timeout=self._context.patience_s)
        if not task.done():
            raise unavailable(
                f"session {self.terms.id}: dart data has not taken its step for "
                f"{self._context.patience_s:g} s; it is kept, ask again"
            )
        return task.result()


def _observed(
    images: Sequence[bytes], known: dict[bytes, Observation], screens: StoredEncoding
) -> list[Observation]:
    """Images as observations, each new one decoded whole. Raises EnvError."""
    made = []
    for image in images:
        seen = known.get(_key(image))
        if seen is None:
            width, height = pixels_of(image).size
            kind = image_type(image) or "application/octet-stream"
            seen = stored_as(Observation(image, kind, width, height), screens)
        made.append(seen)
    return made


def _key(image: bytes) -> bytes:
    return content_hash(image).encode()


def _text(message: ChatMessage) -> str:
    return "".join(part.text for part in message.parts)
