"""An engine without a model: a function answers, with declared latency. For tests and timing.

    ScriptedEngine     an Engine that asks a function
    ScriptedResponder  answers screens through it; a token is a byte of UTF-8
    BytePromptEncoder         the tokens of its prompts and completions
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
from random import Random
from typing import Literal

from bus.errors import EngineError, WeightsError
from bus.messages import ActRequest, Completion
from dart_cli.engines.base import (
    Engine,
    GenerateRequest,
    Generation,
    UpdateTiming,
    WeightSet,
    directory_of,
)
from dart_cli.engines.completions import Draft, completion, generate_request
from dart_cli.engines.load_meter import LoadMeter
from dart_cli.policy.codec import make_codec
from dart_cli.policy.coordinates import THOUSAND, CoordinateMap
from envs.actions import Click


@dataclass(frozen=True)
class Script:
    """What the engine says to one prompt."""

    token_ids: Sequence[int]  # [A], the end-of-turn token included
    logprob: float = 0.0  # nats, of each token; 0 says that nothing else could be drawn
    entropy: float = 0.0  # nats


ScriptSource = Callable[[GenerateRequest], Script]


def say(text: str, logprob: float = 0.0, entropy: float = 0.0) -> Script:
    """The script that a ScriptedResponder reads as `text`."""
    return Script(list(text.encode("utf-8")), logprob, entropy)


def random_clicks(codec: str) -> ScriptSource:
    """Clicks anywhere in the action language `codec`, drawn from the request's seed."""
    language = make_codec(codec)
    frame = CoordinateMap(THOUSAND, THOUSAND, THOUSAND, THOUSAND)  # a screen as fine as the numbers

    def answer(request: GenerateRequest) -> Script:
        rng = Random(request.sampling.seed)  # noqa: S311 - repeatable on purpose
        where = Click(x=rng.randrange(THOUSAND), y=rng.randrange(THOUSAND))
        return say(language.format(where, frame))

    return answer


@dataclass(eq=False)
class _ScriptedRequest:
    """One request: what it has so far, and whether it is to end there."""

    request: GenerateRequest
    draft: Draft
    arrived: float
    began: float | None = None
    is_suspended: bool = False

    def generation(self, stop: Literal["end", "length", "suspended"]) -> Generation:
        now = time.monotonic()
        began = now if self.began is None else self.began
        return self.draft.generation(stop, began - self.arrived, now - began)


class ScriptedEngine:
    """Answers each request with what `answer` says. See engines.base.Engine for the contract."""

    def __init__(
        self,
        answer: ScriptSource,
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
        self._asks: dict[asyncio.Task[Generation], _ScriptedRequest] = {}
        self._meter = LoadMeter(max_batch, serves=policy_version >= 0)
        self._running = 0
        self._tokens = 0
        self._closed = False

    @property
    def policy_version(self) -> int:
        """Version of the weight set taken last."""
        return self._version

    async def generate(self, request: GenerateRequest) -> Generation:
        """The scripted completion, at most `sampling.max_tokens` of it. Raises EngineError."""
        if self._closed:
            raise EngineError(f"{request.request_id}: the scripted engine is closed")
        ask = _ScriptedRequest(request, Draft(request.partial), time.monotonic())
        task = asyncio.create_task(self._generate(ask))
        self._asks[task] = ask
        task.add_done_callback(self._asks.pop)
        await self._ended(task)
        if not task.cancelled():
            return task.result()
        if ask.is_suspended:
            return ask.generation("suspended")
        raise EngineError(f"{request.request_id}: the scripted engine closed")

    async def update_weights(self, source: WeightSet, policy_version: int) -> UpdateTiming:
        """Take any set with a readable manifest.json. Raises WeightsError."""
        directory = directory_of(source)
        try:
            json.loads((directory / "manifest.json").read_bytes())
        except (OSError, ValueError) as error:
            raise WeightsError(f"{directory}: no readable manifest.json: {error}") from None
        await asyncio.sleep(self._update_s)
        self._version = policy_version
        self._meter.go()
        return UpdateTiming(transfer_s=self._update_s, pause_s=0.0, finish_s=0.0)

    def interrupt(self) -> None:
        """End every request now, with the tokens it has, as `suspended`."""
        for task, ask in self._asks.items():
            ask.is_suspended = not task.done()
            task.cancel()

    def gauges(self) -> dict[str, float]:
        """Load for the heartbeat: in_flight, waiting, tokens, and LoadMeter's."""
        return {
            "in_flight": float(self._running),
            "waiting": float(len(self._asks) - self._running),
            "tokens": float(self._tokens),
            **self._meter.gauges(),
        }

    async def close(self) -> None:
        """Cancel what is in flight; those who wait get an EngineError."""
        self._closed = True
        tasks = list(self._asks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ended(self, task: asyncio.Task[Generation]) -> None:
        """Wait for `task`, however it ends; cancel it if whoever waits is cancelled."""
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.cancel()
            raise

    async def _generate(self, ask: _ScriptedRequest) -> Generation:
        async with self._places:
            ask.began = time.monotonic()
            self._count(+1)
            try:
                script, draft = self._answer(ask.request), ask.draft
                token_ids = list(script.token_ids)[: ask.request.sampling.max_tokens]
                for token in token_ids[len(draft) :]:
                    version = self._version
                    await asyncio.sleep(self._token_s)
                    draft.add(token, script.logprob, script.entropy, version)
                    self._tokens += 1
            finally:
                self._count(-1)
        return ask.generation("end" if len(token_ids) == len(script.token_ids) else "length")

    def _count(self, change: int) -> None:
        self._running += change
        self._meter.run(self._running)


class BytePromptEncoder:
    """A token is a byte of UTF-8; the prompt is the instruction. See engines.responder.Scribe."""

    def prompt(self, request: ActRequest) -> list[int]:
        """The instruction."""
        return list(request.instruction.encode("utf-8"))

    def write(self, text: str) -> list[int]:
        """The text; nothing marks its end."""
        return list(text.encode("utf-8"))


class ScriptedResponder:
    """Answers screens through an engine whose tokens are bytes of UTF-8; it looks at no pixel."""

    def __init__(self, engine: Engine) -> None:
        self.prompt_encoder = BytePromptEncoder()
        self._engine = engine

    async def preload_images(self, _request: ActRequest) -> None:
        """There is nothing to see."""

    async def answer(self, request: ActRequest) -> Completion:
        """What the engine says; the prompt is the instruction. Raises EngineError."""
        prompt = self.prompt_encoder.prompt(request)
        generation = await self._engine.generate(
            generate_request(request, prompt, [request.screenshot])
        )
        return completion(
            prompt, generation, bytes(generation.sampled.token_ids).decode("utf-8", "replace")
        )
