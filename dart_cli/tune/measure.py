"""A model on rows that it does not learn: their loss, and how many it answers right.

Meter    measures, before the training and after it
Pointed  items whose places shall be hit

A place counts where the greedy answer hits its box, as `dart eval grounding` counts it; everything else where the
greedy answer is the recorded one, token for token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from bus.errors import EngineError
from bus.messages import Sampling
from dart_cli.config.schema import Config
from dart_cli.engines.base import GenerateRequest, Model
from dart_cli.engines.responder import PolicyResponder
from dart_cli.engines.transformers_engine import TransformersEngine
from dart_cli.evaluation.grounding.formats import AnswerFormat
from dart_cli.evaluation.grounding.items import Answer, Item
from dart_cli.evaluation.grounding.scorers import answer_all, make_scorer
from dart_cli.evaluation.grounding.scores import is_hit
from dart_cli.policy.coordinates import resize_of
from dart_cli.policy.model import LoadedPolicy
from dart_cli.policy.prompt import make_renderer
from dart_cli.tune.held_out import Measured
from dart_cli.tune.loss import LossSettings
from dart_cli.tune.training_set import TrainingSet

AT_ONCE = 32
"""Rows that the engine answers together."""


@dataclass(frozen=True)
class Pointed:
    """Items whose places shall be hit, by number as in the training set."""

    items: Sequence[Item]
    answers: AnswerFormat


class Meter:
    """Measures one model on the rows `held` of a training set, `batch` in a forward pass."""

    def __init__(
        self,
        config: Config,
        policy: LoadedPolicy,
        training_set: TrainingSet,
        held: Sequence[int],
        batch: int,
        pointed: Pointed | None,
    ) -> None:
        self._config = config
        self._policy = policy
        self._training_set = training_set
        self._held = held
        self._batch = batch
        self._pointed = pointed

    def measure(self) -> Measured:
        """The model as it is now; neither its weights nor the generators' states change."""
        state = torch.get_rng_state()
        self._policy.model.eval()
        try:
            return Measured(loss=self._loss(), right=asyncio.run(self._right()))
        finally:
            torch.set_rng_state(state)

    @torch.no_grad()
    def _loss(self) -> float:
        tune, total = self._config.tune, 0.0
        losses = LossSettings(
            tune.lm_weight, tune.pointer_weight, tune.target, tune.gaussian_width, tune.suppress
        )
        for first in range(0, len(self._held), self._batch):
            rows = self._held[first : first + self._batch]
            costs = self._training_set.passes([(0, row) for row in rows], losses)
            total += len(rows) * sum(each.sums["loss"] for each in costs)
        return total / len(self._held)

    async def _right(self) -> int:
        engine = TransformersEngine(self._policy, max_batch=AT_ONCE)
        try:
            if self._pointed is not None:
                return await self._hits(engine, self._pointed)
            limit = asyncio.Semaphore(2 * AT_ONCE)
            return sum(
                await asyncio.gather(*(self._is_right(engine, row, limit) for row in self._held))
            )
        finally:
            await engine.close()

    async def _hits(self, engine: TransformersEngine, pointed: Pointed) -> int:
        policy = self._config.policy
        rollout = self._config.rollout.model_copy(update={"max_tokens": pointed.answers.max_tokens})
        responder = PolicyResponder(
            self._policy,
            engine,
            make_renderer(self._policy, policy),
            policy.coordinates,
            resize_of(policy),
        )
        config = self._config.model_copy(update={"rollout": rollout})
        scorer = make_scorer(Model(engine, responder), config, pointed.answers, 1)
        # Items of several sets may have one id.
        items = [replace(pointed.items[row], id=str(row)) for row in self._held]
        found: list[Answer] = []
        await answer_all(scorer, items, AT_ONCE, found.append)
        asked = {item.id: item for item in items}
        return sum(is_hit(asked[answer.id], answer) for answer in found)

    async def _is_right(
        self, engine: TransformersEngine, row: int, limit: asyncio.Semaphore
    ) -> bool:
        async with limit:
            recorded = self._training_set.recorded(row)
            request = GenerateRequest(
                request_id=str(row),
                prompt_token_ids=recorded.prompt_token_ids,
                images=recorded.images,
                sampling=Sampling(temperature=0.0, max_tokens=len(recorded.answer), seed=0),
            )
            try:
                sampled = (await engine.generate(request)).sampled
            except EngineError:
                return False
            return (
                sampled.token_ids == recorded.answer and list(sampled.patches) == recorded.patches
            )
