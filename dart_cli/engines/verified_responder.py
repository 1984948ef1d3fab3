"""A responder whose greedy completions click where a verifier finds the target (`policy.verifier`).

The candidates of a pointer come from the map that the policy returned with the completion: the centres of its
regions, then single cells. The verifier (dart_cli/policy/verifier.py) scores them in this order. The
first one whose score reaches the threshold is clicked, or the best one if none does.

Only the place in the text changes. Tokens, patches and log-probabilities stay those of the policy. For this
reason sampled completions, which may be trained on, are returned unchanged. The prompts of other programs
(`ActRequest.messages`) have no instruction that the verifier could check a place against, so their
completions are returned unchanged as well.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from bus.messages import ActRequest, Completion, PointerCandidate, PointerMap
from dart_cli.algo.regions import ranked_places
from dart_cli.engines.responder import PolicyPromptEncoder, PolicyResponder
from dart_cli.language.pointer_text import split_text
from dart_cli.policy.images import PreparedImage
from dart_cli.policy.verifier import Verifier, first_good, open_screenshot

if TYPE_CHECKING:
    from PIL import Image

CANDIDATES = 20
"""The most places that are verified for one pointer, as in GUI-Actor's released code."""


class VerifiedResponder:
    """A Responder that moves the greedy clicks of another one to the places that a verifier accepts."""

    def __init__(self, responder: PolicyResponder, verifier: Verifier, threshold: float) -> None:
        """Click the first candidate whose score is at least `threshold`, or the best one if none is."""
        self._responder = responder
        self._verifier = verifier
        self._threshold = threshold
        self._one_at_a_time = threading.Lock()  # the verifier's model is not thread-safe

    @property
    def prompt_encoder(self) -> PolicyPromptEncoder:
        """The policy's prompt encoder."""
        return self._responder.prompt_encoder

    async def preload_images(self, request: ActRequest) -> list[PreparedImage]:
        """Prepare the images of a request; see Responder."""
        return await self._responder.preload_images(request)

    async def answer(self, request: ActRequest) -> Completion:
        """Sample a completion and verify where it clicks; see Responder.

        Raises EngineError if the policy or the verifier fails.
        """
        completion = await self._responder.answer(request)
        is_verified = request.sampling.temperature == 0 and not request.messages
        if not is_verified or not completion.pointed or completion.stop == "suspended":
            return completion
        return await asyncio.to_thread(self._verify, request, completion)

    def _verify(self, request: ActRequest, completion: Completion) -> Completion:
        """Return the completion with each place replaced by the candidate that the verifier accepts."""
        points = self.prompt_encoder.points
        assert points is not None
        texts, text_points = split_text(points.action_parser, completion.text)
        # A text that is no action has no points, although the policy pointed in it.
        if len(text_points) != len(completion.pointed):
            return completion
        screenshot = open_screenshot(request.screenshot)
        maps, text = [], texts[0]
        for pointer_map, following in zip(completion.pointed, texts[1:], strict=True):
            best = self._choose(request, screenshot, pointer_map)
            [numbers] = self.prompt_encoder.numbers(request, [best])
            others = [
                candidate
                for candidate in pointer_map.candidates
                if (candidate.x, candidate.y) != (best.x, best.y)
            ]
            maps.append(pointer_map.model_copy(update={"candidates": [best, *others]}))
            text += points.action_parser.write_point(*numbers) + following
        return completion.model_copy(update={"text": text, "pointed": maps})

    def _choose(
        self, request: ActRequest, screenshot: Image.Image, pointer_map: PointerMap
    ) -> PointerCandidate:
        """Return the candidate of a pointer's map that the verifier accepts."""
        heat = np.frombuffer(pointer_map.heat, dtype=np.uint8)
        heat = heat.reshape(pointer_map.rows, pointer_map.columns)
        candidates = [
            PointerCandidate(x=x, y=y, score=score)
            for x, y, score in ranked_places(heat / 255, CANDIDATES)
        ]
        pixels = self.prompt_encoder.clicks(request, candidates)

        def scores(pixels: Sequence[tuple[int, int]]) -> Iterator[float]:
            for x, y in pixels:
                yield self._verifier.score(screenshot, request.instruction, x, y)

        with self._one_at_a_time:
            index, _ = first_good(scores(pixels), self._threshold)
        return candidates[index]
