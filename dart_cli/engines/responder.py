"""Answers an ActRequest: renders the prompt, samples the completion, decodes its text.

PolicyResponder       the Responder of a policy and an engine; used by the rollout worker for the
                      bus and by `dart eval` in its own process
PolicyPromptEncoder   the PromptEncoder of a loaded policy, which needs no weights
VerifiedResponder     a PolicyResponder whose greedy pointers click the candidate that a verifier takes
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from bus.errors import ActionError, EngineError
from bus.messages import (
    ActRequest,
    Completion,
    PointerCandidate,
    PointerMap,
    SampledTokens,
    VersionSpan,
)
from dart_cli.algo.regions import ranked_places
from dart_cli.engines.base import Engine, Generation
from dart_cli.engines.completions import completion, generate_request, unsampled
from dart_cli.language.coordinates import (
    CoordinateConvention,
    CoordinateMap,
    make_coordinate_map,
)
from dart_cli.language.pointer_text import Cells, Numbers, PointerText, jitter, split_text
from dart_cli.policy.images import PreparedImage, with_hashes
from dart_cli.policy.loader import LoadedPolicy
from dart_cli.policy.prompt import PromptRenderer, RenderedPrompt
from dart_cli.policy.verifier import Verifier, first_good, open_screenshot

if TYPE_CHECKING:
    from PIL import Image

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


class VerifiedResponder:
    """Answers as `responder` does, and clicks where the verifier says (`policy.verifier`); see Responder.

    A pointer's candidates are the centres of its regions, then single cells, from the map that came with the
    completion. Tokens, patches and log-probabilities stay the policy's own: the place in the text alone changes. So
    sampled completions, which are trained on, are left as they are.

    The verifier is asked with the task's instruction, for one pointer at a time. Prompts of other programs
    (ActRequest.messages) tell no instruction: their completions are left as they are.
    """

    def __init__(self, responder: PolicyResponder, verifier: Verifier, threshold: float) -> None:
        """Take the first candidate with a score of at least `threshold`, else the best."""
        self._responder = responder
        self._verifier = verifier
        self._threshold = threshold
        self._one = threading.Lock()  # a verifier's model is asked by one thread at a time

    @property
    def prompt_encoder(self) -> PolicyPromptEncoder:
        """That of the policy."""
        return self._responder.prompt_encoder

    async def preload_images(self, request: ActRequest) -> list[PreparedImage]:
        """See Responder."""
        return await self._responder.preload_images(request)

    async def answer(self, request: ActRequest) -> Completion:
        """See Responder. Raises EngineError where policy or verifier cannot be asked."""
        completion = await self._responder.answer(request)
        is_judged = request.sampling.temperature == 0 and not request.messages
        if not is_judged or not completion.pointed or completion.stop == "suspended":
            return completion
        return await asyncio.to_thread(self._chosen, request, completion)

    def _chosen(self, request: ActRequest, completion: Completion) -> Completion:
        """Return the completion with the places that the verifier takes."""
        points = self.prompt_encoder.points
        assert points is not None
        texts, written = split_text(points.action_parser, completion.text)
        if len(written) != len(completion.pointed):  # no action: its points are none either
            return completion
        screenshot = open_screenshot(request.screenshot)
        maps, text = [], texts[0]
        for pointed, following in zip(completion.pointed, texts[1:], strict=True):
            chosen = self._choose(request, screenshot, pointed)
            [numbers] = self.prompt_encoder.numbers(request, [chosen])
            others = [
                each for each in pointed.candidates if (each.x, each.y) != (chosen.x, chosen.y)
            ]
            maps.append(pointed.model_copy(update={"candidates": [chosen, *others]}))
            text += points.action_parser.write_point(*numbers) + following
        return completion.model_copy(update={"text": text, "pointed": maps})

    def _choose(
        self, request: ActRequest, screenshot: Image.Image, pointed: PointerMap
    ) -> PointerCandidate:
        """Return the candidate of a map that the verifier takes."""
        heat = np.frombuffer(pointed.heat, dtype=np.uint8).reshape(pointed.rows, pointed.columns)
        places = [
            PointerCandidate(x=x, y=y, score=score)
            for x, y, score in ranked_places(heat / 255, CANDIDATES)
        ]
        at = self.prompt_encoder.clicks(request, places)

        def scores(places: Sequence[tuple[int, int]]) -> Iterator[float]:
            for x, y in places:
                yield self._verifier.score(screenshot, request.instruction, x, y)

        with self._one:
            picked, _ = first_good(scores(at), self._threshold)
        return places[picked]
