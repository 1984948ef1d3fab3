"""The interfaces of inference, and the types they exchange.

Engine          prompts of token ids and images in, exact samples out
PromptEncoder   the tokens of prompts and completions, without an engine
Responder       an ActRequest in, a Completion out: prompt encoder and engine together
Model           an engine and its responder; EngineMaker makes a user's own
LoadMeter       seconds by phase and how full the batch is, for the heartbeat
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
"""A weight set that is not in place after this long is an error: no pass takes so long."""


PHASES = ("starting", "idle", "busy", "syncing")


@dataclass(frozen=True)
class GenerateRequest:
    """One completion to sample."""

    request_id: str
    prompt_token_ids: list[int]  # [P], image placeholders expanded
    images: list[bytes]  # [I], encoded, in prompt order
    sampling: Sampling
    partial: SampledTokens | None = None  # continue after these; they count towards max_tokens
    image_hashes: list[str] = field(default_factory=list)  # [I], content hashes; [] if unknown
    pointed: list[PointerMap] = field(default_factory=list)  # of the partial's pointers


@dataclass(frozen=True)
class Generation:
    """One completion, the partial's tokens included, and the time it took."""

    sampled: SampledTokens
    stop: CompletionStop
    queue_s: float  # before the engine started it
    engine_s: float
    pointed: list[PointerMap] = field(default_factory=list)  # the partial's included


@dataclass(frozen=True)
class UpdateTiming:
    """Seconds of a weight update by phase."""

    transfer_s: float  # reading and checking the set; requests are served meanwhile
    pause_s: float  # from the halt of the engine until it serves again


class Engine(Protocol):
    """Serves completions from one set of weights, which can be replaced while it serves."""

    @property
    def policy_version(self) -> int:
        """Version of the weights that serve now."""
        ...

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one completion. Raises EngineError; cancelling the task frees its slot."""
        ...

    async def update_weights(self, source: WeightSet, policy_version: int) -> UpdateTiming:
        """Load a weight set; no request is lost.

        Raises WeightsError before any change if the set is incomplete or does not fit; the old
        weights then continue to serve.
        """
        ...

    def interrupt(self) -> None:
        """End every request now, running or waiting: each returns its tokens, as `suspended`.

        Passed as a partial to any engine, a completion continues token for token as it would have
        under the same weights.
        """
        ...

    def gauges(self) -> dict[str, float]:
        """Load for the heartbeat: in_flight, waiting, tokens, and LoadMeter's gauges.

        An engine with a prefix cache adds prompt_tokens = prefilled_tokens + cached_tokens.
        """
        ...

    async def close(self) -> None:
        """Cancel the requests in flight and free the engine."""
        ...


class PromptEncoder(Protocol):
    """Encodes a policy's tokens as a rollout would, e.g. for a solution that no policy sampled."""

    def encode_prompt(self, request: ActRequest) -> list[int]:
        """Return the prompt [P] that a rollout would have used. Raises EngineError."""
        ...

    def encode_completion(self, text: str, request: ActRequest) -> SampledTokens:
        """Return the completion of `text` to `request` with its end token; its log-probabilities are unknown.

        Of a policy that points it has a pointer, with its patch, for each point. Raises EngineError if
        there is none.
        """
        ...


class Responder(Protocol):
    """Turns screens into completions: engines.responder.PolicyResponder, scripted.ScriptedResponder."""

    @property
    def prompt_encoder(self) -> PromptEncoder:
        """The encoder of its prompts and completions."""
        ...

    async def preload_images(self, request: ActRequest) -> object:
        """Prepare its images; the caller holds the result until the answer. Raises EngineError."""
        ...

    async def answer(self, request: ActRequest) -> Completion:
        """Sample the policy's completion. Raises EngineError."""
        ...


@dataclass(frozen=True)
class Model:
    """The parts that answer a worker's requests."""

    engine: Engine
    responder: Responder


class EngineMaker(Protocol):
    """What `rollout.engine = "my_package.my_module:MyEngine"` names: a function, or a class made without arguments."""

    def __call__(self, config: Config) -> Model:
        """Return the loaded parts, before the first weights: the engine's version is -1. Raises UserError."""
        ...


def load_own_engine(config: Config) -> Model:
    """Return the engine of a user's own that `rollout.engine` names. Raises ConfigError."""
    return make_own("rollout.engine", config.rollout.engine, config, Model)


class LoadMeter:
    """Assigns every second of an engine to one phase; the engine reports each change.

    `starting` is the time before the first weights, `syncing` the later halts for weights, `busy`
    the time with at least one running request. Not thread-safe: the engine holds a lock.
    """

    def __init__(
        self, max_batch: int, *, serves: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Take as `serves` whether the engine has weights already."""
        self._timer = PhaseTimer(PHASES, "idle" if serves else "starting", clock)
        self._clock = clock
        self._max_batch = max_batch
        self._serves = serves
        self._halted = False
        self._running = 0
        self._load_s = 0.0
        self._since = clock()

    def run(self, running: int) -> None:
        """From now on `running` requests are running."""
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
        """`seconds.PHASE`, and `load_s`: the integral of running requests / max_batch over `busy`."""
        self._settle()
        return as_gauges([self._timer]) | {"load_s": self._load_s}

    def _settle(self) -> None:
        now = self._clock()
        if self._timer.phase == "busy":
            self._load_s += (now - self._since) * self._running / self._max_batch
        self._since = now

    def _enter(self) -> None:
        phase = "busy" if self._running else "idle"
        if not self._serves:
            phase = "starting"
        elif self._halted:
            phase = "syncing"
        if phase != self._timer.phase:
            self._timer.enter(phase)
