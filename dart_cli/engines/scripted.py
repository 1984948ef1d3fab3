"""An engine without a model, in which a function answers. It is for trying the processes of a run.

    ScriptedEngine      an Engine that calls a function
    ScriptedResponder   answers screens through such an engine; a token is a byte of UTF-8
    BytePromptEncoder   encodes prompts and completions as bytes
    random_clicks       a function for a ScriptedEngine, which clicks anywhere

The same request always gets the same sample. Weight sets are accepted at once and change only the version, so
that tests can tell the tokens before and after a set apart.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from bus.errors import WeightsError
from bus.messages import ActRequest, Completion, SampledTokens
from dart_cli.engines.base import (
    CompletionStop,
    Engine,
    GenerateRequest,
    Generation,
    LoadMeter,
    UpdateTiming,
)
from dart_cli.engines.completions import (
    CompletionBuilder,
    DrawnToken,
    completion,
    generate_request,
    unsampled_tokens,
)
from dart_cli.language.coordinates import THOUSAND, CoordinateMap
from dart_cli.language.parsers import make_action_parser
from dart_cli.policy.weight_set import WeightSet, directory_of
from envs.contract.actions import Click


@dataclass(frozen=True)
class Script:
    """The answer to one prompt."""

    token_ids: Sequence[int]  # [A], the end token included
    logprob: float = 0.0  # nats, of each token; 0 if no other token could be drawn
    entropy: float = 0.0  # nats


ScriptSource = Callable[[GenerateRequest], Script]


def say(text: str, logprob: float = 0.0, entropy: float = 0.0) -> Script:
    """Return the script that a ScriptedResponder reads as `text`."""
    return Script(list(text.encode("utf-8")), logprob, entropy)


def random_clicks(action_parser: str) -> ScriptSource:
    """Return a function that clicks anywhere by the request's seed, in the language of `action_parser`."""
    parser = make_action_parser(action_parser)
    # A screen with a pixel for each number that the model can write.
    coordinates = CoordinateMap(THOUSAND, THOUSAND, THOUSAND, THOUSAND)

    def answer(request: GenerateRequest) -> Script:
        rng = Random(request.sampling.seed)  # noqa: S311 - repeatable on purpose
        click = Click(x=rng.randrange(THOUSAND), y=rng.randrange(THOUSAND))
        return say(parser.format(click, coordinates))

    return answer


class ScriptedEngine:
    """An Engine that answers each request at once with the script that `answer` returns for it."""

    def __init__(self, answer: ScriptSource, *, policy_version: int = 0) -> None:
        self.policy_version = policy_version
        self._answer = answer
        self._meter = LoadMeter(1, serves=policy_version >= 0)
        self._tokens = 0

    async def generate(self, request: GenerateRequest) -> Generation:
        """Return the scripted completion, at most `sampling.max_tokens` of it."""
        script, builder = self._answer(request), CompletionBuilder(request.partial)
        tokens = list(script.token_ids)[: request.sampling.max_tokens]
        for token in tokens[len(builder) :]:
            builder.add(DrawnToken(token, script.logprob, script.entropy), self.policy_version)
            self._tokens += 1
        stop: CompletionStop = "end" if len(tokens) == len(script.token_ids) else "length"
        return builder.generation(stop, 0.0, 0.0)

    async def update_weights(self, source: WeightSet, policy_version: int) -> UpdateTiming:
        """Accept any set with a readable manifest.json, and change the version. Raises WeightsError."""
        directory = directory_of(source)
        try:
            json.loads((directory / "manifest.json").read_bytes())
        except (OSError, ValueError) as error:
            raise WeightsError(f"{directory}: no readable manifest.json: {error}") from None
        self.policy_version = policy_version
        self._meter.go()
        return UpdateTiming(transfer_s=0.0, pause_s=0.0)

    def interrupt(self) -> None:
        """Do nothing, since no request is in flight."""

    def gauges(self) -> dict[str, float]:
        """Return the load for the heartbeat: nothing in flight or waiting, tokens, and LoadMeter's gauges."""
        counts = {"in_flight": 0.0, "waiting": 0.0, "tokens": float(self._tokens)}
        return counts | self._meter.gauges()

    async def close(self) -> None:
        """Do nothing, since no request is in flight."""


class BytePromptEncoder:
    """A PromptEncoder whose tokens are bytes of UTF-8 and whose prompt is the instruction."""

    def encode_prompt(self, request: ActRequest) -> list[int]:
        """Return the bytes of the request's messages, or of its instruction if there are none."""
        texts = [part.text for message in request.messages for part in message.parts]
        return list(("\n".join(texts) or request.instruction).encode("utf-8"))

    def closed_thought(self, _thought: str = "") -> str:
        """Return "": prompts do not end within a thought."""
        return ""

    def encode_completion(self, text: str, _request: ActRequest) -> SampledTokens:
        """Return the bytes of the text, without an end token."""
        return unsampled_tokens(list(text.encode("utf-8")))


class ScriptedResponder:
    """A Responder through an engine whose tokens are bytes of UTF-8; it reads no image."""

    def __init__(self, engine: Engine) -> None:
        self.prompt_encoder = BytePromptEncoder()
        self._engine = engine

    async def preload_images(self, _request: ActRequest) -> None:
        """Do nothing, since no image is read."""

    async def answer(self, request: ActRequest) -> Completion:
        """Return the engine's answer; the prompt is the instruction. Raises EngineError."""
        prompt = self.prompt_encoder.encode_prompt(request)
        generation = await self._engine.generate(
            generate_request(request, prompt, [request.screenshot])
        )
        return completion(
            prompt, generation, bytes(generation.sampled.token_ids).decode("utf-8", "replace")
        )
