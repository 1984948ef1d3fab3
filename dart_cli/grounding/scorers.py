"""Models that answer the items of a grounding set: an item in, candidates out.

Scorer            the interface of all of them
TextScorer        a model that writes coordinates, asked through a Responder of this process
PointerScorer     a model that points: one forward pass gives all candidates
VerifiedScorer    another scorer, among whose candidates a verifier chooses
candidates_of     the candidates in a pointer's map, best first
make_scorer       the scorer of a loaded model
answer_all        answers many items at once
verifier_config   the configuration of a verifier's prompts
verifier_scoring  returns the function by which a loaded verifier scores places
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

from bus.errors import ActionError, EngineError, EngineGoneError, UserError
from bus.messages import ActRequest, PointerMap, Sampling
from dart_cli.algo.regions import ranked_places
from dart_cli.config.schema import Config
from dart_cli.grounding.formats import (
    AnswerFormat,
    AnswerReading,
    format_of,
    opening_of,
    prompt_config,
)
from dart_cli.grounding.items import Answer, Item, Point
from dart_cli.language.coordinates import CoordinateMap, make_coordinate_map
from dart_cli.runtime.waits import OpenWaits
from envs.contract.blobs import content_hash

if TYPE_CHECKING:
    from dart_cli.engines.base import Model, Responder
    from dart_cli.engines.responder import PolicyResponder
    from dart_cli.policy.verifier import Verifier, VerifierSpec

ANSWER_S = 1800.0
"""Seconds in which a model must answer an item; otherwise the item has no answer."""


class Scorer(Protocol):
    """Points at what an instruction names on a screenshot."""

    async def answer(self, item: Item) -> Answer:
        """Return candidates, best first.

        Raises EngineError if the model gives none, e.g. for a screenshot that is too large for it.
        """
        ...


class TextScorer:
    """Asks a model that writes coordinates.

    The first candidate is its greedy answer. With `candidates` above 1, the others are sampled at
    `rollout.temperature`; they are in the order of sampling.
    """

    def __init__(
        self,
        responder: Responder,
        answers: AnswerFormat,
        coordinate_map_of: Callable[[int, int], CoordinateMap],
        config: Config,
        candidates: int = 1,
    ) -> None:
        self._responder = responder
        self._answers = answers
        self._coordinate_map_of = coordinate_map_of
        self._config = config
        self._candidates = candidates

    async def answer(self, item: Item) -> Answer:
        """Return the greedy candidate, then the sampled ones. Raises EngineError if there is no answer."""
        screenshot = await asyncio.to_thread(item.image.read_bytes)
        try:
            coordinates = self._coordinate_map_of(*item.size)
        except ActionError as error:
            raise EngineError(str(error)) from None
        requests = [self._request(item, screenshot, nth) for nth in range(self._candidates)]
        prepared = await self._responder.preload_images(requests[0])
        completions = await asyncio.gather(
            *(self._responder.answer(request) for request in requests)
        )
        del prepared  # the images had to stay until the engine has taken them
        readings = [self._answers.read(completion.text, coordinates) for completion in completions]
        cut = "; it was cut off at rollout.max_tokens" if completions[0].stop == "length" else ""
        first = readings[0]
        return Answer(
            id=item.id,
            points=[reading.point for reading in readings],
            texts=[completion.text for completion in completions],
            refused=first.refused,
            problem=f"{first.problem}{cut}" if first.point is None else "",
        )

    def _request(self, item: Item, screenshot: bytes, nth: int) -> ActRequest:
        """Return the request for the `nth` candidate: 0 is greedy, later ones are sampled."""
        seed = int(content_hash(f"{item.id}/{nth}".encode())[:8], 16)
        sampling = Sampling(
            temperature=self._config.rollout.temperature if nth else 0.0,
            max_tokens=self._config.rollout.max_tokens,
            seed=(self._config.run.seed + 1) * 2**40 + seed,
        )
        return _request(item, screenshot, nth, sampling)


class PointerScorer:
    """Asks a model that points: a forward pass over prompt and opening of the answer gives all candidates.

    The model cannot choose its answer, which begins with `opening`, as in training, and then points.
    Therefore a head on a frozen model can be scored, too, and nothing can be refused.
    """

    def __init__(self, responder: PolicyResponder, opening: str, candidates: int) -> None:
        self._responder = responder
        self._opening = responder.prompt_encoder.opening(opening)
        self._candidates = candidates

    async def answer(self, item: Item) -> Answer:
        """Return the candidates of the pointer, best first. Raises EngineError if there is no answer."""
        pointer_map, click = await self.point_at(item)
        points, scores = candidates_of(pointer_map, item.size, self._candidates)
        return Answer(id=item.id, points=[click, *points[1:]], scores=scores)

    async def point_at(self, item: Item) -> tuple[PointerMap, Point]:
        """Return the map of the pointer, and the pixel at which the model would click. Raises EngineError."""
        screenshot = await asyncio.to_thread(item.image.read_bytes)
        greedy = Sampling(temperature=0.0, max_tokens=len(self._opening) + 1, seed=0)
        request = _request(item, screenshot, 0, greedy).model_copy(
            update={"partial": self._opening}
        )
        prepared = await self._responder.preload_images(request)
        completion = await self._responder.answer(request)
        del prepared  # the images had to stay until the engine has taken them
        [pointer_map] = completion.pointed
        [click] = self._responder.prompt_encoder.clicks(request, pointer_map.candidates[:1])
        return pointer_map, click


def _request(item: Item, screenshot: bytes, nth: int, sampling: Sampling) -> ActRequest:
    """Return the request for one answer to an item."""
    width, height = item.size
    return ActRequest(
        trajectory_id=f"{item.id}/{nth}",
        step=0,
        instruction=item.instruction,
        turns=[],
        screenshot=screenshot,
        width=width,
        height=height,
        sampling=sampling,
    )


def candidates_of(
    pointer_map: PointerMap, size: tuple[int, int], most: int
) -> tuple[list[Point | None], list[float]]:
    """Return the candidates in a pointer's map, as pixels of the screenshot, best first, and their scores.

    A score is relative to the largest probability of a cell: a region's mean probability, or a single cell's.
    """
    values = np.frombuffer(pointer_map.heat, dtype=np.uint8)
    heat = values.reshape(pointer_map.rows, pointer_map.columns) / 255
    places = ranked_places(heat, most)
    wide, high = size
    return (
        [(min(int(x * wide), wide - 1), min(int(y * high), high - 1)) for x, y, _ in places],
        [round(score, 4) for *_, score in places],
    )


def make_scorer(model: Model, config: Config, answers: AnswerFormat, candidates: int) -> Scorer:
    """Return the scorer of a loaded model."""
    policy = config.policy
    if policy.pointing == "pointer":
        responder = cast("PolicyResponder", model.responder)
        return PointerScorer(responder, opening_of(answers), candidates)

    resize = cast("PolicyResponder", model.responder).policy.images.screens

    def coordinate_map_of(width: int, height: int) -> CoordinateMap:
        return make_coordinate_map(policy.coordinates, width, height, resize)

    return TextScorer(model.responder, answers, coordinate_map_of, config, candidates)


async def answer_all(
    scorer: Scorer,
    items: Sequence[Item],
    at_once: int,
    keep: Callable[[Answer], None],
    waits: OpenWaits | None = None,
) -> dict[str, str]:
    """Answer all items, `at_once` of them at a time, and call `keep` with each answer.

    Returns the reason for each item without an answer, by id. Raises EngineGoneError if the engine has ended.
    """
    waiting = deque(items)
    unanswered: dict[str, str] = {}
    reports = waits or OpenWaits()

    async def work() -> None:
        while waiting:
            item = waiting.popleft()
            try:
                with reports.waiting(f"the model to answer item {item.id}", ANSWER_S):
                    async with asyncio.timeout(ANSWER_S):
                        answer = await scorer.answer(item)
            except EngineGoneError:  # it cannot answer any other item either
                raise
            except EngineError as error:
                unanswered[item.id] = str(error)
            except TimeoutError:
                unanswered[item.id] = f"no answer within {ANSWER_S:.0f} s"
            except OSError as error:
                unanswered[item.id] = f"{item.image}: {error.strerror}"
            else:
                keep(answer)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(at_once, len(items))):
                group.create_task(work())
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None
    return unanswered


# --- a verifier chooses among the candidates ---------------------------------------------------


def verifier_config(
    model: str, spec: VerifierSpec, overrides: list[str]
) -> tuple[Config, AnswerFormat]:
    """Return the configuration of a verifier's prompts: the picture, then the question.

    Raises ConfigError.
    """
    try:
        action_parser = format_of("", model).action_parser
    except UserError:  # not a tiny model; any other language will do, since it writes no action
        action_parser = "uitars"
    answers = AnswerFormat(
        "verifier", _never_read, _never_written, template=spec.prompt, action_parser=action_parser
    )
    return prompt_config(model, answers, overrides), answers


class VerifiedScorer:
    """Another scorer's answers, with the candidate that a verifier chooses put first.

    The verifier takes the first candidate with a score of at least `threshold`, or else the best one.
    """

    def __init__(
        self,
        scorer: Scorer,
        verify: Callable[[bytes, str, list[Point]], Iterator[float]],
        threshold: float,
    ) -> None:
        """Make a scorer. `verify` yields the scores of places on an encoded screenshot, one by one."""
        self._scorer = scorer
        self._verify = verify
        self._threshold = threshold
        self._lock = asyncio.Lock()  # one thread at a time may use the verifier

    async def answer(self, item: Item) -> Answer:
        """Return the other scorer's answer with the verifier's choice first. Raises EngineError."""
        answer = await self._scorer.answer(item)
        points = [point for point in answer.points if point is not None]
        if len(points) < 2 or len(points) < len(answer.points):
            return answer
        screenshot = await asyncio.to_thread(item.image.read_bytes)
        async with self._lock:
            picked, verifier_scores = await asyncio.to_thread(
                self._choose, screenshot, item.instruction, points
            )
        ranked: list[Point | None] = [points[picked], *points[:picked], *points[picked + 1 :]]
        return answer.model_copy(
            update={"points": ranked, "verifier_scores": verifier_scores, "picked": picked}
        )

    def _choose(
        self, screenshot: bytes, instruction: str, points: list[Point]
    ) -> tuple[int, list[float]]:
        """Return the index of the verifier's choice, and the scores that it computed for it."""
        from dart_cli.policy.verifier import first_good

        return first_good(self._verify(screenshot, instruction, points), self._threshold)


def verifier_scoring(verifier: Verifier) -> Callable[[bytes, str, list[Point]], Iterator[float]]:
    """Return a function that yields the verifier's scores of places on a screenshot."""
    from dart_cli.policy.verifier import open_screenshot  # late: loads torch

    def verify(screenshot: bytes, instruction: str, points: list[Point]) -> Iterator[float]:
        opened = open_screenshot(screenshot)
        for x, y in points:
            yield verifier.score(opened, instruction, x, y)

    return verify


def _never_read(*_: object) -> AnswerReading:
    raise AssertionError("a verifier's answer is a probability")


def _never_written(*_: object) -> str:
    raise AssertionError("a verifier's answer names no place")
