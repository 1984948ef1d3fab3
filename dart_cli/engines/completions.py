"""A completion under construction, and conversions to and from messages.

DrawnToken         one token with its log-probability, its entropy and perhaps a patch
CompletionBuilder  collects the tokens of a partial, if there is one, and the tokens sampled since
unsampled_tokens   makes SampledTokens of tokens that no policy sampled
version_spans      makes spans of equal version from the version of each token
generate_request   makes the engine's request from an ActRequest and its prompt
hint_between       returns what a prompt with privileged text has in place of a part of another prompt
completion         makes the reply to the environment from the engine's generation
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from bus.errors import EngineError
from bus.messages import ActRequest, Completion, Hint, PointerMap, SampledTokens, VersionSpan
from bus.packed import int32s
from dart_cli.engines.base import CompletionStop, GenerateRequest, Generation


@dataclass(frozen=True)
class DrawnToken:
    """One token that was drawn, or that the token before it forces."""

    token: int
    logprob: float = 0.0  # nats, in the distribution sampled from; of the patch, if there is one
    entropy: float = 0.0  # nats, of the same distribution
    patch: int = -1  # -1 if there is none
    pointed: PointerMap | None = None  # the map that the patch was drawn from


class CompletionBuilder:
    """A completion so far: its tokens with log-probabilities, entropies, versions and patches."""

    def __init__(
        self, partial: SampledTokens | None = None, pointed: Sequence[PointerMap] = ()
    ) -> None:
        """Continue after `partial`, whose pointers have the maps `pointed`.

        Raises EngineError if the lists of `partial` differ in length.
        """
        self.token_ids: list[int] = []  # [A]
        self.logprobs: list[float] = []  # [A], nats
        self.entropies: list[float] = []  # [A], nats
        self.versions: list[int] = []  # [A]
        self.patches: list[int] = []  # [A], -1 for a token without one
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

    def add(self, drawn_token: DrawnToken, version: int) -> None:
        """Append one token, which the weights of `version` produced."""
        self.token_ids.append(drawn_token.token)
        self.logprobs.append(drawn_token.logprob)
        self.entropies.append(drawn_token.entropy)
        self.versions.append(version)
        self.patches.append(drawn_token.patch)
        if drawn_token.pointed is not None:
            self.pointed.append(drawn_token.pointed)

    def extend(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        entropies: Sequence[float],
        versions: Sequence[int],
        patches: Sequence[int] = (),
    ) -> None:
        """Append several tokens. All lists are [N]; `patches` may be empty.

        Raises EngineError if the lengths differ.
        """
        lengths = {len(token_ids), len(logprobs), len(entropies), len(versions)}
        if len(lengths) != 1 or len(patches) not in (0, len(token_ids)):
            patches_text = f", {len(patches)} patches" if patches else ""
            raise EngineError(
                f"a partial completion of {len(token_ids)} tokens comes with {len(logprobs)} "
                f"log-probabilities, {len(entropies)} entropies{patches_text} and {len(versions)} versions"
            )
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.entropies += entropies
        self.versions += versions
        self.patches += patches or [-1] * len(token_ids)

    def finished(self, ends: Container[int], max_tokens: int) -> Literal["end", "length"] | None:
        """Return why the completion is over, or None if it is not. `ends` are the end tokens."""
        if self.token_ids and self.token_ids[-1] in ends:
            return "end"
        return "length" if len(self) >= max_tokens else None

    def generation(
        self, stop: CompletionStop, queue_s: float, engine_s: float, routing: bytes = b""
    ) -> Generation:
        """Return the completion so far, as the engine's result."""
        return Generation(
            SampledTokens(
                token_ids=self.token_ids,
                behaviour_logprobs=self.logprobs,
                entropies=self.entropies,
                version_spans=version_spans(self.versions),
                patches=self.patches if max(self.patches, default=-1) >= 0 else [],
                routing=routing,
            ),
            stop=stop,
            queue_s=queue_s,
            engine_s=engine_s,
            pointed=self.pointed,
        )


def unsampled_tokens(token_ids: list[int], patches: list[int] | None = None) -> SampledTokens:
    """Return tokens [A] that no policy sampled, so that their log-probabilities are unknown."""
    return SampledTokens(
        token_ids=token_ids,
        behaviour_logprobs=[],
        entropies=[],
        version_spans=[],
        patches=patches or [],
    )


def version_spans(versions: Sequence[int]) -> list[VersionSpan]:
    """Return the spans [start, end) of equal version, from the version of each token [A]."""
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
    """Return the engine's request for an ActRequest with its prompt [P] and images [I]."""
    return GenerateRequest(
        request_id=f"{request.trajectory_id}/{request.step}",
        prompt_token_ids=prompt_token_ids,
        images=images,
        sampling=request.sampling,
        image_hashes=request.image_hashes,
        partial=request.partial,
        pointed=request.pointed,
    )


def hint_between(plain: Sequence[int], hinted: Sequence[int]) -> Hint:
    """Return the tokens of `hinted` [Q] that are not those of the prompt `plain` [P], and their place.

    What both begin and end with is not repeated, so images are mostly outside of it. The hint of an equal
    prompt is empty.
    """
    shortest = min(len(plain), len(hinted))
    start = next((i for i in range(shortest) if plain[i] != hinted[i]), shortest)
    most = shortest - start
    after = next((i for i in range(most) if plain[-1 - i] != hinted[-1 - i]), most)
    tokens = int32s(hinted[start : len(hinted) - after])
    return Hint(start=start, end=len(plain) - after, token_ids=tokens)


def completion(
    prompt_token_ids: list[int], generation: Generation, text: str, hint: Hint | None = None
) -> Completion:
    """Return the reply to the environment process; `text` is the decoded generation."""
    return Completion(
        prompt_token_ids=int32s(prompt_token_ids),
        sampled=generation.sampled,
        text=text,
        stop=generation.stop,
        queue_s=generation.queue_s,
        engine_s=generation.engine_s,
        pointed=generation.pointed,
        hint=hint,
    )
