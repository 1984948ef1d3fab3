"""Answers an ActRequest: renders the prompt, samples the completion, decodes its text.

PolicyResponder       the Responder of a policy and an engine; used by the rollout worker for the
                      bus and by `dart eval` in its own process
PolicyPromptEncoder   the PromptEncoder of a loaded policy, which needs no weights
VerifiedResponder     a PolicyResponder whose greedy pointers click the candidate that a verifier takes
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bus.errors import ActionError, EngineError
from bus.messages import (
    ActRequest,
    Completion,
    PointerCandidate,
    PointerMap,
    SampledTokens,
    VersionSpan,
)
from dart_cli.engines.base import Engine, Generation
from dart_cli.engines.completions import completion, generate_request, unsampled
from dart_cli.language.coordinates import (
    CoordinateConvention,
    CoordinateMap,
    make_coordinate_map,
)
from dart_cli.language.pointer_text import Cells, Numbers, PointerText, jitter
from dart_cli.policy.images import PreparedImage, with_hashes
from dart_cli.policy.loader import LoadedPolicy
from dart_cli.policy.prompt import PromptRenderer, RenderedPrompt

if TYPE_CHECKING:
    pass

CANDIDATES = 20
"""Most places that a verifier judges for one pointer, as GUI-Actor's released code does."""


class PolicyPromptEncoder:
    """Prompts and completions of one policy."""

    def __init__(
        self,
        policy: LoadedPolicy,
        renderer: PromptRenderer | None = None,
        coordinates: CoordinateConvention = "thousandths",
    ) -> None:
        self._policy = policy
        self._renderer = renderer or PromptRenderer(policy)
        self.points = self._renderer.points
        self._coordinates = coordinates

    def render(self, request: ActRequest) -> RenderedPrompt:
        """Return the prompt with its images. Raises EngineError if it cannot be built."""
        if request.messages:
            images = [*request.images, request.screenshot]
            return self._renderer.render_messages(request.messages, images, request.image_hashes)
        return self._renderer.render(
            request.instruction,
            request.turns,
            request.screenshot,
            request.image_hashes,
            request.observed_text,
            request.previous,
        )

    def encode_prompt(self, request: ActRequest) -> list[int]:
        """See base.PromptEncoder."""
        return self.render(request).token_ids

    def encode_completion(self, text: str, request: ActRequest) -> SampledTokens:
        """See base.PromptEncoder. Where the prompt ends within a thought, the completion ends it first."""
        text = self._renderer.closed_thought() + text
        if self.points is None:
            sampled = unsampled(self._policy.encode_completion(text))
            written = self._policy.decode(sampled.token_ids)
        else:
            sampled, points = self._pointed(self.points, text, request)
            written = self.points.write(sampled, points)
        if written != text:
            raise EngineError(f"the policy's tokenizer cannot encode {text[:60]!r}")
        return sampled

    def opening(self, text: str) -> SampledTokens:
        """Return a completion that begins with `text`, special tokens included, and points next; its numbers are 0.

        Where prompts end within a thought, it ends the thought first.
        Given as a partial to a policy that points, it takes one forward pass to the pointer's map.
        """
        assert self._policy.pointer is not None
        text = self._renderer.closed_thought() + text
        token_ids = [*self._policy.encode(text), *self._policy.pointer.triple[:2]]
        zeros = [0.0] * len(token_ids)
        return SampledTokens(
            token_ids=token_ids,
            behaviour_logprobs=zeros,
            entropies=zeros,
            version_spans=[VersionSpan(version=-1, start=0, end=len(token_ids))],
        )

    def numbers(self, request: ActRequest, candidates: Sequence[PointerCandidate]) -> list[Numbers]:
        """Return what the model would write for candidates."""
        coordinates, cells = self._coordinate_map(request), self._cells(request)
        return [cells.numbers_at(each.x, each.y, coordinates) for each in candidates]

    def clicks(
        self, request: ActRequest, candidates: Sequence[PointerCandidate]
    ) -> list[tuple[int, int]]:
        """Return the pixels that actions at candidates name."""
        coordinates = self._coordinate_map(request)
        return [coordinates.to_screen(*each) for each in self.numbers(request, candidates)]

    def decode(self, request: ActRequest, generation: Generation) -> str:
        """Return the text of a completion to `request`; where the policy pointed it has a point.

        It is uniform in the patch that was drawn; at temperature 0 it is the centre of the best region.
        """
        sampled = generation.sampled
        if self.points is None or not sampled.patches:
            return self._policy.decode(sampled.token_ids)
        coordinates, cells = self._coordinate_map(request), self._cells(request)
        maps = {pointed.position: pointed for pointed in generation.pointed}
        points = {
            position: _clicked(request, position, patch, maps.get(position), cells, coordinates)
            for position, patch in enumerate(sampled.patches)
            if patch >= 0
        }
        return self.points.write(sampled, points)

    def _pointed(
        self, text_points: PointerText, text: str, request: ActRequest
    ) -> tuple[SampledTokens, dict[int, Numbers]]:
        """Return a text as tokens with pointers, and their points."""
        read = text_points.read(text)
        token_ids = [*read.token_ids, self._policy.encode_completion("")[-1]]
        patches = [-1] * len(token_ids)
        coordinates, cells = self._coordinate_map(request), self._cells(request)
        try:
            for position, point in read.points.items():
                patches[position] = cells.holding(point, coordinates)
        except ActionError as error:
            raise EngineError(f"{text[:60]!r} points at nothing: {error}") from None
        return unsampled(token_ids, patches if read.points else []), read.points

    def _coordinate_map(self, request: ActRequest) -> CoordinateMap:
        resize = self._policy.images.screens
        return make_coordinate_map(self._coordinates, request.width, request.height, resize)

    def _cells(self, request: ActRequest) -> Cells:
        """Those of the present screenshot."""
        images = self._policy.images
        width, height = images.resized(request.width, request.height)
        return Cells(height // images.factor, width // images.factor)


def _clicked(
    request: ActRequest,
    position: int,
    patch: int,
    pointed: PointerMap | None,
    cells: Cells,
    coordinates: CoordinateMap,
) -> Numbers:
    """Where a pointer clicks."""
    if request.sampling.temperature == 0 and pointed is not None and pointed.candidates:
        best = pointed.candidates[0]
        return cells.numbers_at(best.x, best.y, coordinates)
    return cells.numbers(patch, *jitter(request.sampling.seed, position), coordinates)


class PolicyResponder:
    """Answers screens with completions through one engine."""

    def __init__(
        self,
        policy: LoadedPolicy,
        engine: Engine,
        renderer: PromptRenderer | None = None,
        coordinates: CoordinateConvention = "thousandths",
    ) -> None:
        self.prompt_encoder = PolicyPromptEncoder(policy, renderer, coordinates)
        self.policy = policy
        self._engine = engine

    async def preload_images(self, request: ActRequest) -> list[PreparedImage]:
        """Prepare the images in another thread: `answer` finds those that the caller holds.

        Raises EngineError for a broken one.
        """
        screens = [turn.screenshot for turn in request.turns if turn.screenshot is not None]
        screens += [*request.images, request.screenshot]
        keyed = with_hashes(screens, request.image_hashes)
        prepare = self.policy.images.prepare
        return await asyncio.to_thread(lambda: [prepare(*each) for each in keyed])

    async def answer(self, request: ActRequest) -> Completion:
        """Sample the policy's completion for `request`.

        Raises EngineError if the prompt cannot be built or served.
        """
        prompt = self.prompt_encoder.render(request)
        generation = await self._engine.generate(
            generate_request(request, prompt.token_ids, prompt.images)
        )
        return completion(
            prompt.token_ids, generation, self.prompt_encoder.decode(request, generation)
        )
