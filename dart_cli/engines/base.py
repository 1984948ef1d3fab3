"""The interfaces of inference, and the types that they exchange.

Engine          takes prompts of token ids and images, and returns exact samples
PromptEncoder   encodes prompts and completions as tokens, without an engine
Responder       answers an ActRequest with a Completion, by a prompt encoder and an engine
Model           an engine and its responder; a user's own engine is made by an EngineMaker
LoadMeter       measures seconds by phase and how full the batch is, for the heartbeat
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from bus.messages import ActRequest, Completion, PointerMap, SampledTokens, Sampling
from dart_cli.config.devices import make_own
from dart_cli.config.schema import Config
from dart_cli.policy.weight_set import WeightSet
from dart_cli.runtime.waits import PhaseTimer, as_gauges

CLOSED = "the engine is closed; start another rollout worker"

CompletionStop = Literal["end", "length", "suspended"]

UPDATE_DEADLINE_S = 600.0
"""Seconds after which a weight set that is still not in place is an error; no forward pass takes so long."""


PHASES = ("starting", "idle", "busy", "syncing")


@dataclass(frozen=True)
class GenerateRequest:
    """One completion to sample."""

    request_id: str
    prompt_token_ids: list[int]  # [P], image placeholders expanded
    images: list[bytes]  # [I], encoded, in prompt order
    sampling: Sampling
    partial: SampledTokens | None = None  # to be continued; its tokens count towards max_tokens
    image_hashes: list[str] = field(default_factory=list)  # [I], content hashes; [] if unknown
    pointed: list[PointerMap] = field(default_factory=list)  # maps of the partial's pointers


@dataclass(frozen=True)
class Generation:
    """One completion, the partial's tokens included, and the time it took."""

    sampled: SampledTokens
    stop: CompletionStop
    queue_s: float  # until the engine started it
    engine_s: float  # from then on
    pointed: list[PointerMap] = field(default_factory=list)  # maps, the partial's included


@dataclass(frozen=True)
class UpdateTiming:
    """Seconds of a weight update by phase."""

    transfer_s: float  # reading and checking the set; requests are served meanwhile
    pause_s: float  # from the halt of the engine until it serves again


class Engine(Protocol):
    """Serves completions from one set of weights, which can be replaced while it serves."""

    @property
    def policy_version(self) -> int:
        """The version of the weights that serve now."""
        ...

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one completion. Raises EngineError. Cancelling the awaiting task frees the slot."""
        ...

    async def update_weights(self, source: WeightSet, policy_version: int) -> UpdateTiming:
        """Load a weight set without losing a request.

        Raises WeightsError, before anything has changed, if the set is incomplete or does not fit the model.
        The old weights then continue to serve.
        """
        ...

    def interrupt(self) -> None:
        """End every running or waiting request now; each returns its tokens so far, as `suspended`.

        Such a completion can be passed as a partial to any engine. Under the same weights it then continues
        token for token as it would have.
        """
        ...

    def gauges(self) -> dict[str, float]:
        """Return the load for the heartbeat: in_flight, waiting, tokens, and the gauges of a LoadMeter.

        An engine with a prefix cache adds prompt_tokens, prefilled_tokens and cached_tokens; the first is the
        sum of the others.
        """
        ...

    async def close(self) -> None:
        """Cancel the requests in flight and free the engine."""
        ...


class PromptEncoder(Protocol):
    """Encodes tokens as a rollout would, e.g. for a solution that no policy sampled."""

    def encode_prompt(self, request: ActRequest) -> list[int]:
        """Return the prompt [P] that a rollout would use for `request`. Raises EngineError."""
        ...

    def closed_thought(self, thought: str = "") -> str:
        """Return the thought and its closing tag if prompts end within a thought, else ""."""
        ...

    def encode_completion(self, text: str, request: ActRequest) -> SampledTokens:
        """Return `text` as a completion of `request`, with its end token; its log-probabilities are unknown.

        If prompts end within a thought, `text` begins with `closed_thought`. If the policy points, each point of the text becomes a pointer with its patch. Raises EngineError if
        the text has no such tokens.
        """
        ...


class Responder(Protocol):
    """Answers a screen with a completion: PolicyResponder, VerifiedResponder or ScriptedResponder."""

    @property
    def prompt_encoder(self) -> PromptEncoder:
        """The encoder of the responder's prompts and completions."""
        ...

    async def preload_images(self, request: ActRequest) -> object:
        """Prepare the images of `request`.

        The caller keeps the result until the answer. Raises EngineError.
        """
        ...

    async def answer(self, request: ActRequest) -> Completion:
        """Sample the policy's completion of `request`. Raises EngineError."""
        ...


@dataclass(frozen=True)
class Model:
    """The parts of a rollout worker that answer requests."""

    engine: Engine
    responder: Responder


class EngineMaker(Protocol):
    """Makes a user's engine: what `rollout.engine = "my_package.my_module:MyEngine"` names.

    It is a function, or a class whose constructor takes no arguments.
    """

    def __call__(self, config: Config) -> Model:
        """Return the loaded parts.

        The engine's version is -1 until it takes its first weights. Raises UserError.
        """
        ...


def load_own_engine(config: Config) -> Model:
    """Return the user's engine that `rollout.engine` names. Raises ConfigError."""
    return make_own("rollout.engine", config.rollout.engine, config, Model)


class LoadMeter:
    """Counts the seconds of an engine by phase; the engine reports each change.

    `starting` is the time before the first weights, `syncing` are the later halts for weights, `busy` is the
    time with at least one running request, and `idle` is the rest. Not thread-safe: the engine holds a lock.
    """

    def __init__(
        self, max_batch: int, *, serves: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin in phase `idle` if the engine `serves` already, else in `starting`."""
        self._timer = PhaseTimer(PHASES, "idle" if serves else "starting", clock)
        self._clock = clock
        self._max_batch = max_batch
        self._serves = serves
        self._halted = False
        self._running = 0
        self._load_s = 0.0
        self._since = clock()

    def run(self, running: int) -> None:
        """Note that `running` requests are running from now on."""
        if running != self._running:
            self._settle()
            self._running = running
            self._enter()

    def halt(self) -> None:
        """Note that the engine halts for new weights."""
        self._settle()
        self._halted = True
        self._enter()

    def go(self) -> None:
        """Note that the engine serves with new weights."""
        self._settle()
        self._halted, self._serves = False, True
        self._enter()

    def gauges(self) -> dict[str, float]:
        """Return `seconds.PHASE`, and `load_s`: the integral over `busy` of running requests / max_batch."""
        self._settle()
        return as_gauges([self._timer]) | {"load_s": self._load_s}

    def _settle(self) -> None:
        """Add the time since the last change to `load_s`, if the engine was busy."""
        now = self._clock()
        if self._timer.phase == "busy":
            self._load_s += (now - self._since) * self._running / self._max_batch
        self._since = now

    def _enter(self) -> None:
        """Enter the phase that follows from the state of the engine."""
        phase = "busy" if self._running else "idle"
        if not self._serves:
            phase = "starting"
        elif self._halted:
            phase = "syncing"
        if phase != self._timer.phase:
            self._timer.enter(phase)
