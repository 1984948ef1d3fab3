"""The protocols of inference.

Engine          prompts of token ids and images in, exact samples out
PromptEncoder   the tokens of prompts and completions, without asking any engine
Responder       an ActRequest in, a Completion out: prompt encoder and engine together
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from bus.messages import ActRequest, Completion, SampledTokens, Sampling

if TYPE_CHECKING:
    import torch


UPDATE_DEADLINE_S = 600.0
"""A weight set that is not in place after this long is an error: no pass takes so long."""


@dataclass(frozen=True)
class GenerateRequest:
    """One completion to draw."""

    request_id: str
    prompt_token_ids: list[int]  # [P], image placeholders expanded
    images: list[bytes]  # [I], encoded, in prompt order
    sampling: Sampling
    partial: SampledTokens | None = None  # go on after these tokens, which count towards max_tokens
    image_hashes: list[str] = field(default_factory=list)  # [I], content hashes; [] if unknown


@dataclass(frozen=True)
class Generation:
    """One completion, the partial's tokens included, and what it took."""

    sampled: SampledTokens
    stop: Literal["end", "length", "suspended"]
    queue_s: float
    engine_s: float


@dataclass(frozen=True)
class UpdateTiming:
    """Where a weight update's time went, seconds."""

    transfer_s: float  # reading and checking the set; requests are served meanwhile
    pause_s: float  # from the halt of the engine until the new tensors are in place
    finish_s: float  # post-processing in the pause: caches cleared, weights re-packed
    resume_s: float = 0.0  # from there until the engine serves again


class CheckedSet(Protocol):
    """A weight set that was checked byte for byte when it came in (dart_cli/weights/mirror.py).

    It changes with the next one: an engine copies what it takes.
    """

    @property
    def directory(self) -> Path:
        """It as files: manifest.json beside model.safetensors."""
        ...

    def load(self, expected: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Its tensors, once they fit the model's `expected` and are finite. Raises WeightsError."""
        ...


WeightSet = Path | CheckedSet
"""A published directory, still to be checked, or a set that was received over any channel."""


def directory_of(source: WeightSet) -> Path:
    """The files of a set: manifest.json beside its *.safetensors."""
    return source if isinstance(source, Path) else source.directory


class Engine(Protocol):
    """Serves completions from one set of weights, which can be replaced while it serves."""

    @property
    def policy_version(self) -> int:
        """Version of the weights that serve now."""
        ...

    async def generate(self, request: GenerateRequest) -> Generation:
        """Draw one completion. Raises EngineError; cancelling the task frees its place."""
        ...

    async def update_weights(self, source: WeightSet, policy_version: int) -> UpdateTiming:
        """Take a weight set; no request is lost.

        Raises WeightsError before anything is touched if the set is incomplete or does not fit;
        the old weights then go on serving.
        """
        ...

    def interrupt(self) -> None:
        """End every request now, in work or waiting: each returns what it has, as `suspended`.

        Given back as a partial, to any engine, a completion goes on token for token as it would
        have under the same weights.
        """
        ...

    def gauges(self) -> dict[str, float]:
        """Load for the heartbeat: in_flight, waiting, tokens, and what LoadMeter tells."""
        ...

    async def close(self) -> None:
        """Cancel what is in flight and free the engine."""
        ...


class PromptEncoder(Protocol):
    """Writes a policy's tokens as a rollout would, e.g. for a solution that no policy sampled."""

    def prompt(self, request: ActRequest) -> list[int]:
        """The prompt [P] that a rollout would have asked with. Raises EngineError."""
        ...

    def write(self, text: str) -> list[int]:
        """The completion [A] that says `text`, with its end. Raises EngineError if none does."""
        ...


class Responder(Protocol):
    """Turns screens into completions: engines.responder.PolicyResponder, scripted.ScriptedResponder."""

    @property
    def prompt_encoder(self) -> PromptEncoder:
        """Writes the tokens of its prompts and completions."""
        ...

    async def preload_images(self, request: ActRequest) -> object:
        """Read its screens. What is returned is held until it is answered. Raises EngineError."""
        ...

    async def answer(self, request: ActRequest) -> Completion:
        """Draw what the policy says. Raises EngineError."""
        ...
