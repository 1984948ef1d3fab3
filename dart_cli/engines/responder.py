"""Answers an ActRequest: renders the prompt, samples the completion, and decodes its text.

PolicyResponder       the Responder of a policy and an engine; the rollout worker and `dart eval` use it
PolicyPromptEncoder   the PromptEncoder of a loaded policy, which needs no weights
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

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
from dart_cli.engines.completions import (
    completion,
    generate_request,
    hint_between,
    unsampled_tokens,
)
from dart_cli.language.coordinates import (
    CoordinateConvention,
    CoordinateMap,
    make_coordinate_map,
)
from dart_cli.language.pointer_text import Cells, Numbers, PointerText, jitter
from dart_cli.policy.images import PreparedImage, with_hashes
from dart_cli.policy.loader import LoadedPolicy
from dart_cli.policy.prompt import PromptRenderer, RenderedPrompt


class PolicyPromptEncoder:
    """Encodes the prompts and completions of one policy, and decodes its completions."""

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
        """Return the prompt [P] of a request; see PromptEncoder."""
        return self.render(request).token_ids

    def closed_thought(self, thought: str = "") -> str:
        """Return the thought with which completions begin; see PromptEncoder."""
        return self._renderer.closed_thought(thought)

    def encode_completion(self, text: str, request: ActRequest) -> SampledTokens:
        """Return `text` as a completion; see PromptEncoder."""
        if self.points is None:
            sampled = unsampled_tokens(self._policy.encode_completion(text))
            decoded = self._policy.decode(sampled.token_ids)
        else:
            sampled, points = self._encode_points(self.points, text, request)
            decoded = self.points.write(sampled, points)
        if decoded != text:
            raise EngineError(f"the policy's tokenizer cannot encode {text[:60]!r}")
        return sampled

    def opening(self, text: str) -> SampledTokens:
        """Return the beginning of a completion: `text`, special tokens included, and an unfinished pointer.

        If prompts end within a thought, the completion first closes it. Passed as a partial to a policy that
        points, it yields the pointer's map after one forward pass. Its log-probabilities and entropies are 0.
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
        """Return the numbers that the model would write for each candidate."""
        coordinates, cells = self._coordinate_map(request), self._cells(request)
        return [cells.numbers_at(candidate.x, candidate.y, coordinates) for candidate in candidates]

    def clicks(
        self, request: ActRequest, candidates: Sequence[PointerCandidate]
    ) -> list[tuple[int, int]]:
        """Return the pixel (x, y) at which a click at each candidate acts."""
        coordinates = self._coordinate_map(request)
        return [coordinates.to_screen(x, y) for x, y in self.numbers(request, candidates)]

    def decode(self, request: ActRequest, generation: Generation) -> str:
        """Return the text of a completion of `request`, with a point in place of each pointer.

        The point is drawn uniformly from the patch. At temperature 0 it is the centre of the best region.
        """
        sampled = generation.sampled
        if self.points is None or not sampled.patches:
            return self._policy.decode(sampled.token_ids)
        coordinates, cells = self._coordinate_map(request), self._cells(request)
        maps = {pointed.position: pointed for pointed in generation.pointed}
        points = {
            position: _point(request, position, patch, maps.get(position), cells, coordinates)
            for position, patch in enumerate(sampled.patches)
            if patch >= 0
        }
        return self.points.write(sampled, points)

    def _encode_points(
        self, pointer_text: PointerText, text: str, request: ActRequest
    ) -> tuple[SampledTokens, dict[int, Numbers]]:
        """Return a text as tokens with pointers, and the point of each pointer by its position."""
        pointed = pointer_text.read(text)
        token_ids = [*pointed.token_ids, self._policy.encode_completion("")[-1]]
        patches = [-1] * len(token_ids)
        coordinates, cells = self._coordinate_map(request), self._cells(request)
        try:
            for position, point in pointed.points.items():
                patches[position] = cells.holding(point, coordinates)
        except ActionError as error:
            raise EngineError(f"{text[:60]!r} points at nothing: {error}") from None
        return unsampled_tokens(token_ids, patches if pointed.points else []), pointed.points

    def _coordinate_map(self, request: ActRequest) -> CoordinateMap:
        resize = self._policy.images.screens
        return make_coordinate_map(self._coordinates, request.width, request.height, resize)

    def _cells(self, request: ActRequest) -> Cells:
        """Return the cells of the request's screenshot."""
        images = self._policy.images
        width, height = images.resized(request.width, request.height)
        return Cells(height // images.factor, width // images.factor)


def _point(
    request: ActRequest,
    position: int,
    patch: int,
    pointed: PointerMap | None,
    cells: Cells,
    coordinates: CoordinateMap,
) -> Numbers:
    """Return the numbers of the place where a pointer clicks."""
    if request.sampling.temperature == 0 and pointed is not None and pointed.candidates:
        best = pointed.candidates[0]
        return cells.numbers_at(best.x, best.y, coordinates)
    return cells.numbers(patch, *jitter(request.sampling.seed, position), coordinates)


class PolicyResponder:
    """A Responder that answers screens with the policy's completions, through one engine."""

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
        """Prepare the images in another thread; `answer` then finds those that the caller still holds.

        Raises EngineError for a broken image.
        """
        screens = [turn.screenshot for turn in request.turns if turn.screenshot is not None]
        screens += [*request.images, request.screenshot]
        keyed = with_hashes(screens, request.image_hashes)
        prepare = self.policy.images.prepare
        return await asyncio.to_thread(lambda: [prepare(encoded, key) for encoded, key in keyed])

    async def answer(self, request: ActRequest) -> Completion:
        """Sample the policy's completion for `request`.

        Raises EngineError if the prompt cannot be built or served.
        """
        prompt = self.prompt_encoder.render(request)
        generation = await self._engine.generate(
            generate_request(request, prompt.token_ids, prompt.images)
        )
        text = self.prompt_encoder.decode(request, generation)
        hint = None
        if request.hinted_instruction:
            hinted = request.model_copy(update={"instruction": request.hinted_instruction})
            hint = hint_between(prompt.token_ids, self.prompt_encoder.encode_prompt(hinted))
        return completion(prompt.token_ids, generation, text, hint)
