"""A completion under construction, and conversions to and from messages.

DrawnToken         one token with its numbers
CompletionBuilder  the tokens of a partial, if any, and those sampled since
unsampled          tokens that no policy sampled
version_spans      which tokens which weights produced, from the version of each
generate_request   ActRequest and prompt -> the engine's request
completion         the engine's generation -> the reply to the environment
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from bus.errors import EngineError
from bus.messages import ActRequest, Completion, PointerMap, SampledTokens, VersionSpan
from bus.packed import int32s
from dart_cli.engines.base import CompletionStop, GenerateRequest, Generation


@dataclass(frozen=True)
class DrawnToken:
    """One token that was drawn, or forced by the one before."""

    token: int
    logprob: float = 0.0  # nats, of the distribution sampled from; of the patch, if there is one
    entropy: float = 0.0  # nats, of the same distribution
    patch: int = -1
    pointed: PointerMap | None = None  # where there is a patch


class CompletionBuilder:
    """A completion so far; every token with its numbers."""

    def __init__(
        self, partial: SampledTokens | None = None, pointed: Sequence[PointerMap] = ()
    ) -> None:
        """Continue after `partial`, of whose pointers `pointed` are the maps.

        Raises EngineError if its lists differ in length.
        """
        self.token_ids: list[int] = []  # [A]
        self.logprobs: list[float] = []  # [A], nats
        self.entropies: list[float] = []  # [A], nats
        self.versions: list[int] = []  # [A]
        self.patches: list[int] = []  # [A], -1 of a token without one
        self.pointed = list(pointed)
        if partial is not None:
            self.extend(
                partial.token_ids,
                partial.behaviour_logprobs,
                partial.entropies,
                _versions(partial.version_spans),
                partial.patches,
            )

    def __len__(self) -> int:
        return len(self.token_ids)

    def add(self, drawn: DrawnToken, version: int) -> None:
        """Append one token, with the patch that was drawn with it."""
        self.token_ids.append(drawn.token)
        self.logprobs.append(drawn.logprob)
        self.entropies.append(drawn.entropy)
        self.versions.append(version)
        self.patches.append(drawn.patch)
        if drawn.pointed is not None:
            self.pointed.append(drawn.pointed)

    def extend(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        entropies: Sequence[float],
        versions: Sequence[int],
        patches: Sequence[int] = (),
    ) -> None:
        """Append several tokens, all lists [N], `patches` perhaps empty.

        Raises EngineError if the lengths differ.
        """
        lengths = {len(token_ids), len(logprobs), len(entropies), len(versions)}
        if len(lengths) != 1 or len(patches) not in (0, len(token_ids)):
            pointed = f", {len(patches)} patches" if patches else ""
            raise EngineError(
                f"a partial completion of {len(token_ids)} tokens comes with {len(logprobs)} "
                f"log-probabilities, {len(entropies)} entropies{pointed} and {len(versions)} versions"
            )
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.entropies += entropies
        self.versions += versions
        self.patches += patches or [-1] * len(token_ids)

    def finished(self, ends: Container[int], max_tokens: int) -> Literal["end", "length"] | None:
        """Why the completion is over; None if it is not. `ends` are the end tokens."""
        if self.token_ids and self.token_ids[-1] in ends:
            return "end"
        return "length" if len(self) >= max_tokens else None

    def generation(self, stop: CompletionStop, queue_s: float, engine_s: float) -> Generation:
        """Return the completion so far, as the engine's result."""
        return Generation(
            SampledTokens(
                token_ids=self.token_ids,
                behaviour_logprobs=self.logprobs,
                entropies=self.entropies,
                version_spans=version_spans(self.versions),
                patches=self.patches if max(self.patches, default=-1) >= 0 else [],
            ),
            stop=stop,
            queue_s=queue_s,
            engine_s=engine_s,
            pointed=self.pointed,
        )


def unsampled(token_ids: list[int], patches: list[int] | None = None) -> SampledTokens:
    """Tokens [A] that no policy sampled: their log-probabilities are unknown."""
    return SampledTokens(
        token_ids=token_ids,
        behaviour_logprobs=[],
        entropies=[],
        version_spans=[],
        patches=patches or [],
    )


def version_spans(versions: Sequence[int]) -> list[VersionSpan]:
    """Spans [start, end) of equal version, from the version of each token [A]."""
    spans: list[VersionSpan] = []
    for version, run in groupby(versions):
        start = spans[-1].end if spans else 0
        spans.append(VersionSpan(version=version, start=start, end=start + len(list(run))))
    return spans


def _versions(spans: Sequence[VersionSpan]) -> list[int]:
    """Return the version of each token [A]. Raises EngineError for spans with gaps."""
    versions: list[int] = []
    for span in spans:
        if span.start != len(versions):
            raise EngineError(f"a partial completion has no version for token {len(versions)}")
        versions += [span.version] * (span.end - span.start)
    return versions


def generate_request(
    request: ActRequest, prompt_token_ids: list[int], images: list[bytes]
) -> GenerateRequest:
    """Return the engine's request for `request`, with its prompt [P], images [I] and their hashes."""
    return GenerateRequest(
        request_id=f"{request.trajectory_id}/{request.step}",
        prompt_token_ids=prompt_token_ids,
        images=images,
        sampling=request.sampling,
        image_hashes=request.image_hashes,
        partial=request.partial,
        pointed=request.pointed,
    )


def completion(prompt_token_ids: list[int], generation: Generation, text: str) -> Completion:
    """Return the reply to the environment; `text` is the decoded generation."""
    return Completion(
        prompt_token_ids=int32s(prompt_token_ids),
        sampled=generation.sampled,
        text=text,
        stop=generation.stop,
        queue_s=generation.queue_s,
        engine_s=generation.engine_s,
        pointed=generation.pointed,
    )
