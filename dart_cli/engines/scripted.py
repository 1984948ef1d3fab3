"""An engine without a model: a function answers, with declared latency. For tests and timing.

    ScriptedEngine     an Engine that asks a function
    ScriptedResponder  answers screens through it; a token is a byte of UTF-8
    random_clicks      a function that clicks anywhere, to try the plumbing of a run

The same request always gets the same sample. Weight sets are taken at once and change nothing but
the version, so that tests see which tokens came before and after.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from random import Random

from bus.errors import EngineError, WeightsError
from bus.messages import ActRequest, Completion, VersionSpan
from dart_cli.engines.base import Engine, GenerateRequest, Generation, UpdateTiming
from dart_cli.policy.codec import make_codec
from dart_cli.policy.frames import THOUSAND, Frame
from envs.actions import Click


@dataclass(frozen=True)
class Script:
    """What the engine says to one prompt."""

    token_ids: Sequence[int]  # [A], the end-of-turn token included
    logprob: float = 0.0  # nats, of each token; 0 says that nothing else could be drawn
    entropy: float = 0.0  # nats


Answer = Callable[[GenerateRequest], Script]


def say(text: str, logprob: float = 0.0, entropy: float = 0.0) -> Script:
    """The script that a ScriptedResponder reads as `text`."""
    return Script(list(text.encode("utf-8")), logprob, entropy)


def random_clicks(codec: str) -> Answer:
    """Clicks anywhere in the action language `codec`, drawn from the request's seed."""
    language = make_codec(codec)
    frame = Frame(THOUSAND, THOUSAND, THOUSAND, THOUSAND)  # a screen as fine as the numbers

    def answer(request: GenerateRequest) -> Script:
        rng = Random(request.sampling.seed)  # noqa: S311 - repeatable on purpose
        where = Click(x=rng.randrange(THOUSAND), y=rng.randrange(THOUSAND))
        return say(language.format(where, frame))

    return answer


class ScriptedEngine:
    """Answers each request with what `answer` says. See engines.base.Engine for the contract."""

    def __init__(
        self,
        answer: Answer,
        *,
        policy_version: int = 0,
        token_s: float = 0.0,
        update_s: float = 0.0,
        max_batch: int = 1024,
    ) -> None:
        """`max_batch` requests are answered at once, the others wait.

        `token_s` is the latency of each token, `update_s` of a weight update, seconds.
        """
        self._answer = answer
        self._version = policy_version
        self._token_s = token_s
        self._update_s = update_s
        self._places = asyncio.Semaphore(max_batch)
        self._requests: set[asyncio.Task[Generation]] = set()
        self._running = 0
        self._busy_s = 0.0
        self._tokens = 0
        self._began = time.monotonic()
        self._changed_at = self._began  # when the engine last became busy or idle
        self._closed = False

    @property
    def policy_version(self) -> int:
        """Version of the weight set taken last."""
        return self._version

    async def generate(self, request: GenerateRequest) -> Generation:
        """The scripted completion, at most `sampling.max_tokens` of it. Raises EngineError."""
        if self._closed:
            raise EngineError(f"{request.request_id}: the scripted engine is closed")
        task = asyncio.create_task(self._generate(request))
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)
        try:
            return await task
        except asyncio.CancelledError:
            task.cancel()
            if self._closed:
                raise EngineError(f"{request.request_id}: the scripted engine closed") from None
            raise

    async def update_weights(self, directory: Path, policy_version: int) -> UpdateTiming:
        """Take any directory with a readable manifest.json. Raises WeightsError."""
        try:
            json.loads((directory / "manifest.json").read_bytes())
        except (OSError, ValueError) as error:
            raise WeightsError(f"{directory}: no readable manifest.json: {error}") from None
        await asyncio.sleep(self._update_s)
        self._version = policy_version
        return UpdateTiming(pause_s=0.0, transfer_s=self._update_s, finish_s=0.0)

    def gauges(self) -> dict[str, float]:
        """Load for the heartbeat: in_flight, waiting, busy_s, idle_s, tokens."""
        now = time.monotonic()
        busy_s = self._busy_s + (now - self._changed_at if self._running else 0.0)
        return {
            "in_flight": float(len(self._requests)),
            "waiting": float(len(self._requests) - self._running),
            "busy_s": busy_s,
            "idle_s": now - self._began - busy_s,
            "tokens": float(self._tokens),
        }

    async def close(self) -> None:
        """Cancel what is in flight; those who wait get an EngineError."""
        self._closed = True
        for task in self._requests:
            task.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)

    async def _generate(self, request: GenerateRequest) -> Generation:
        arrived = time.monotonic()
        async with self._places:
            began = time.monotonic()
            self._count(+1)
            try:
                script = self._answer(request)
                token_ids = list(script.token_ids)[: request.sampling.max_tokens]
                versions: list[int] = []
                for _ in token_ids:
                    versions.append(self._version)
                    await asyncio.sleep(self._token_s)
                    self._tokens += 1
            finally:
                self._count(-1)
        return Generation(
            token_ids=token_ids,
            behaviour_logprobs=[script.logprob] * len(token_ids),
            entropies=[script.entropy] * len(token_ids),
            version_spans=version_spans(versions),
            stop="end" if len(token_ids) == len(script.token_ids) else "length",
            queue_s=began - arrived,
            engine_s=time.monotonic() - began,
        )

    def _count(self, change: int) -> None:
        now = time.monotonic()
        if self._running:
            self._busy_s += now - self._changed_at
        self._changed_at = now
        self._running += change


class ScriptedResponder:
    """Answers screens through an engine whose tokens are bytes of UTF-8; it looks at no pixel."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def answer(self, request: ActRequest) -> Completion:
        """What the engine says; the prompt is the instruction. Raises EngineError."""
        prompt = list(request.instruction.encode("utf-8"))
        generation = await self._engine.generate(
            GenerateRequest(
                request_id=f"{request.trajectory_id}/{request.step}",
                prompt_token_ids=prompt,
                images=[request.screenshot],
                sampling=request.sampling,
            )
        )
        return Completion(
            prompt_token_ids=prompt,
            token_ids=generation.token_ids,
            behaviour_logprobs=generation.behaviour_logprobs,
            entropies=generation.entropies,
            version_spans=generation.version_spans,
            text=bytes(generation.token_ids).decode("utf-8", "replace"),
            stop=generation.stop,
            queue_s=generation.queue_s,
            engine_s=generation.engine_s,
        )


def version_spans(versions: Sequence[int]) -> list[VersionSpan]:
    """Spans [start, end) of equal version, from the version of each token [A]."""
    spans: list[VersionSpan] = []
    for version, run in groupby(versions):
        start = spans[-1].end if spans else 0
        spans.append(VersionSpan(version=version, start=start, end=start + len(list(run))))
    return spans
