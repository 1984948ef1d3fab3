"""Asks a judge about episodes and returns its opinion.

Judge         a configured model, which several slots share
judge_of      returns the judge of a configuration; all callers in a process with the same configuration share
              it
name_of       returns the name of a judge in the store: the model, and a digest of how it is asked and what
              its folder holds
JudgeBackend  the protocol of ChatBackend and ModelBackend, which ask the model
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, Self
from weakref import WeakKeyDictionary

from bus.errors import DartError, ModelError, UserError, first_line
from bus.messages import Judgement
from dart_cli.chat.asking import answer, ask_again
from dart_cli.chat.server import ChatReply, ChatServer, Messages, Sampled, SettingNames, chat_server
from dart_cli.config.model_folder import resolve
from dart_cli.config.schema import JudgeConfig
from dart_cli.judge.evidence import (
    IMAGE_SIZE,
    PROMPT,
    Answer,
    AnswerError,
    Evidence,
    complaint,
    messages,
    parse_answer,
)
from dart_cli.runtime.background import in_daemon_thread
from dart_cli.weights.folder import folder_digest
from envs.contract.queueing import OnQueue, SharedWait, ignore_queue

logger = logging.getLogger(__name__)

Purpose = Literal["missing", "check", "later"]

MOST_QUESTIONS = 2
"""Most times that a judge is asked about an episode if it writes texts that are not answers."""
MOST_TOKENS = 1024
"""Most tokens of an answer, thoughts included."""


@dataclass(frozen=True)
class JudgeLimits:
    """The limits of a judge: seconds, requests without an answer, and episodes that are judged at once."""

    answer_s: float = 60.0  # longest time of a request to a server
    attempts: int = 4  # requests without an answer, after which the episode is invalid
    # Pause after the first request without an answer; it doubles after each further one.
    back_off_s: float = 1.0
    deadline_s: float = 300.0  # for an episode, all requests and pauses included
    concurrent: int = 8  # episodes of one process; other slots wait


class JudgeBackend(Protocol):
    """A model that answers questions with images."""

    attempts: int

    async def ask(self, messages: Messages, max_tokens: int) -> ChatReply:
        """Return the answer.

        Raises UserError if another request would fail as well, EngineError if there was no answer.
        """
        ...

    async def close(self) -> None:
        """Free the model; a later question loads it again."""
        ...


@dataclass
class _Costs:
    """The requests and tokens that one judgement has cost so far."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    began: float = field(default_factory=time.monotonic)


class Judge:
    """A model that judges episodes, as `[env.judge]` configures it, for one event loop."""

    def __init__(self, config: JudgeConfig, limits: JudgeLimits = JudgeLimits()) -> None:
        self.config = config
        self.limits = limits
        self.name = name_of(config)  # of a model folder: without its contents until `read_folder`
        self._gate = asyncio.Semaphore(limits.concurrent)
        self._backend: JudgeBackend | None = None
        self._users = 0
        self._reading = asyncio.Lock()
        self._is_read = bool(config.url)

    def read_folder(self) -> None:
        """Add a digest of the model folder to the name.

        The first call reads every byte. Raises ModelError.
        """
        if not self._is_read:
            self.name = name_of(self.config, folder_digest(resolve(self.config.model)))
            self._is_read = True

    def evidence(self, instruction: str, first: bytes) -> Evidence:
        """Return empty evidence for a new episode."""
        return Evidence(instruction, first, self.config.images)

    async def __aenter__(self) -> Self:
        """Count one more user."""
        self._users += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        """Count one user less; the last one frees the model."""
        self._users -= 1
        backend = self._backend
        if self._users <= 0 and backend is not None:
            self._backend = None
            await backend.close()

    async def judge(
        self,
        evidence: Evidence,
        use: Purpose,
        on_queue: OnQueue = ignore_queue,
    ) -> Judgement:
        """Return the model's opinion; its outcome is `invalid` if there is no answer within the deadline.

        Before that, this call waits without a deadline until fewer than `limits.concurrent` episodes are
        judged, each of which has a deadline. `on_queue` gets this wait, and None when it is over. Raises
        UserError if another request would fail as well: a wrong key, address or model, or a folder that is
        not read within the deadline.
        """
        await self._read_folder_once()
        costs = _Costs()
        async with self._place(on_queue):
            self._backend = backend = self._backend or _backend(self.config, self.limits)
            costs.began = time.monotonic()
            try:
                async with asyncio.timeout(self.limits.deadline_s):
                    answer = await self._answer(backend, evidence, costs)
            except TimeoutError:
                return self._judgement(use, costs, f"no answer in {self.limits.deadline_s:g} s")
            except UserError:
                raise
            except DartError as error:
                return self._judgement(use, costs, first_line(error))
        return self._judgement(use, costs, answer)

    async def _read_folder_once(self) -> None:
        """Read the folder in another thread, once for all slots. Raises ModelError."""
        try:
            async with self._reading, asyncio.timeout(self.limits.deadline_s):
                if not self._is_read:
                    await in_daemon_thread(self.read_folder)
        except TimeoutError:
            raise ModelError(
                f"env.judge.model: {self.config.model} was not read in {self.limits.deadline_s:g} s; copy it to a "
                "disk of this host"
            ) from None

    @contextlib.asynccontextmanager
    async def _place(self, on_queue: OnQueue) -> AsyncIterator[None]:
        """Hold one of `limits.concurrent` places while a block runs. Places are given in order of arrival."""
        is_full = self._gate.locked()
        if is_full:
            on_queue(SharedWait(f"a place at the judge {self.name}", self.limits.deadline_s))
        try:
            await self._gate.acquire()
        finally:
            if is_full:
                on_queue(None)
        try:
            yield
        finally:
            self._gate.release()

    async def _answer(self, backend: JudgeBackend, evidence: Evidence, costs: _Costs) -> Answer:
        """Ask until a text is an answer, at most MOST_QUESTIONS times. Raises EngineError, UserError."""
        config = self.config
        prompt = await asyncio.to_thread(messages, evidence, config.answer)
        for turn in range(MOST_QUESTIONS):
            text = await self._reply(backend, prompt, costs)
            try:
                return parse_answer(text, config.answer)
            except AnswerError as problem:
                if turn + 1 == MOST_QUESTIONS:
                    raise AnswerError(
                        f"asked {MOST_QUESTIONS} times, no answer that can be read: {problem}"
                    ) from None
                prompt = [*prompt, *complaint(text, str(problem), config.answer)]
        raise AssertionError

    async def _reply(self, backend: JudgeBackend, prompt: Messages, costs: _Costs) -> str:
        """Return the text of an answer; after a failure, pause and ask again."""

        async def ask() -> ChatReply:
            costs.calls += 1
            return await backend.ask(prompt, MOST_TOKENS)

        reply = await ask_again(
            ask,
            attempts=backend.attempts,
            back_off_s=self.limits.back_off_s,
            name=f"judge {self.name}",
        )
        costs.prompt_tokens += reply.prompt_tokens
        costs.completion_tokens += reply.completion_tokens
        return reply.text

    def _judgement(self, use: Purpose, costs: _Costs, answer: Answer | str) -> Judgement:
        """Return an answer, or the reason why there is none, as a Judgement."""
        score, reason = (None, answer) if isinstance(answer, str) else (answer.score, answer.reason)
        return Judgement(
            judge=self.name,
            use=use,
            outcome="invalid" if score is None else "pass" if score >= 1.0 else "fail",
            score=score,
            reason=reason.encode(errors="replace").decode(),
            calls=costs.calls,
            prompt_tokens=costs.prompt_tokens,
            completion_tokens=costs.completion_tokens,
            seconds=time.monotonic() - costs.began,
        )


_JUDGES: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Judge]] = WeakKeyDictionary()


def judge_of(config: JudgeConfig) -> Judge:
    """Return the judge of a configuration: one per event loop, so that all slots share its limits."""
    judges = _JUDGES.setdefault(asyncio.get_running_loop(), {})
    return judges.setdefault(config.model_dump_json(), Judge(config))


def name_of(config: JudgeConfig, folder: str = "") -> str:
    """Return the judge's name, `MODEL#1a2b3c`, whose digest changes with the way in which the model is asked.

    `folder` is a digest of a model folder's contents. The address of a server is left out, since the same
    model at another port is the same judge.
    """
    parts: list[object] = [PROMPT, config.answer, config.images, IMAGE_SIZE, MOST_TOKENS]
    if folder:
        parts.append(folder)
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=3).hexdigest()
    model = config.model if config.url else Path(config.model).name
    return f"{model}#{digest}"


def _backend(config: JudgeConfig, limits: JudgeLimits) -> JudgeBackend:
    if config.url:
        server = chat_server(
            config.url,
            config.model,
            key_variable=config.key_env,
            answer_s=limits.answer_s,
            names=SettingNames("env.judge.url", "env.judge.model", "env.judge.key_env"),
        )
        return ChatBackend(server, limits.attempts)
    from dart_cli.judge.folder_judge import ModelBackend  # late: torch

    return ModelBackend(config.model, limits.concurrent)


class ChatBackend:
    """A backend that asks a server."""

    def __init__(self, server: ChatServer, attempts: int) -> None:
        self._server = server
        self.attempts = attempts  # requests, if none is answered

    async def ask(self, messages: Messages, max_tokens: int) -> ChatReply:
        """See JudgeBackend."""
        return await answer(self._server, messages, Sampled(max_tokens))

    async def close(self) -> None:
        """Do nothing: there is nothing to free."""
