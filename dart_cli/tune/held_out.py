"""Rows that a training does not learn from, and what they tell of it.

Split, split_rows   which rows are learned, and which are held out: whole episodes, demonstrations or screenshots
Measured            loss and right answers on the held-out rows
Outcome             what a training changed, and whether anything was learned
fallen              the loss of the learned rows at a stage's beginning and end
Meter               measures a model on the held-out rows; Pointed: items whose places shall be hit
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch

from bus.errors import EngineError
from bus.messages import Sampling
from dart_cli.config.schema import Config
from dart_cli.engines.base import GenerateRequest, Model
from dart_cli.engines.responder import PolicyResponder
from dart_cli.engines.transformers_engine import TransformersEngine
from dart_cli.grounding.formats import AnswerFormat
from dart_cli.grounding.items import Answer, Item
from dart_cli.grounding.scorers import answer_all, make_scorer
from dart_cli.grounding.scores import is_hit
from dart_cli.policy.loader import LoadedPolicy
from dart_cli.policy.prompt import make_renderer
from dart_cli.runtime.work_folder import StoredModel
from dart_cli.tune.loss import LossSettings
from dart_cli.tune.training_set import TrainingSet

LEAST_GROUPS = 24
"""With fewer episodes or screenshots all are learned: too few would be left to tell anything."""
MOST_ROWS = 256
"""Rows that are held out of a large set; more would only cost time."""
MARGIN = 0.05
"""A loss that is not lower by this share, and right answers that are not more by this share of the rows, show no
learning."""

BY_HEART = 0.5
"""Learned rows whose loss fell to this share, while that of others did not, are known by heart."""
QUARTER = 4
"""A stage's beginning and end are the means of its first and last quarter: single updates vary."""


@dataclass(frozen=True)
class Split:
    """Rows by number."""

    learned: list[int]
    held: list[int]
    groups: int  # that are held out


def split_rows(together: Sequence[str], share: float, seed: int) -> Split:
    """Hold out a share of the names in `together` [N], with all of their rows; the same for the same seed."""
    names = sorted(set(together))
    wanted = round(share * len(names))
    if len(names) < LEAST_GROUPS or not wanted:
        return Split(list(range(len(together))), [], 0)
    counts = dict.fromkeys(names, 0)
    for name in together:
        counts[name] += 1
    held: set[str] = set()
    rows = 0
    for name in Random(f"{seed}/held out").sample(names, wanted):  # noqa: S311 - repeatable on purpose
        if held and rows + counts[name] > MOST_ROWS:
            break
        held.add(name)
        rows += counts[name]
    learned = [index for index, name in enumerate(together) if name not in held]
    return Split(learned, [i for i, name in enumerate(together) if name in held], len(held))


class Measured(StoredModel):
    """A model on the held-out rows."""

    loss: float
    right: int  # rows whose place is hit, or whose greedy answer is the recorded one


@dataclass(frozen=True)
class Outcome:
    """What a training changed."""

    rows: int  # held out; 0: the loss is that of the rows that were learned
    groups: int
    pointed: bool  # `right` counts hits of places, else answers that equal the recorded ones
    before: Measured | None
    after: Measured | None
    first_loss: float  # of what was learned, in the stage that fell most
    last_loss: float

    @property
    def fell(self) -> bool:
        """Whether the loss of the learned rows fell by MARGIN."""
        return self.last_loss < (1 - MARGIN) * self.first_loss

    @property
    def learned(self) -> bool:
        """Whether the model is better than before on rows that it has not seen; else, where none are, on its own."""
        if self.before is None or self.after is None:
            return self.fell
        is_lower = self.after.loss < (1 - MARGIN) * self.before.loss
        more = self.after.right - self.before.right
        return is_lower or more >= max(
            2, MARGIN * self.rows
        )  # one may be a tie that rounding turned

    def summary(self) -> dict[str, Any]:
        """For `--json` and tune.json."""
        told: dict[str, Any] = {"learned": self.learned, "held_out": None}
        if self.before is not None and self.after is not None:
            told["held_out"] = {
                "rows": self.rows,
                "groups": self.groups,
                "measure": "hits" if self.pointed else "answers",
                "loss_before": round(self.before.loss, 6),
                "loss_after": round(self.after.loss, 6),
                "right_before": round(self.before.right / self.rows, 4),
                "right_after": round(self.after.right / self.rows, 4),
            }
        return told

    def lines(self, lr: float, updates: int) -> list[str]:
        """Return the outcome in words, with a cure where nothing was learned."""
        lines = []
        if self.before is None or self.after is None:
            lines.append(
                f"loss of the rows that were learned: {self.first_loss:.3f} -> {self.last_loss:.3f}; none were "
                f"held out (tune.held_out, and {LEAST_GROUPS} episodes or screenshots)"
            )
        else:
            what = "places hit" if self.pointed else "greedy answers as recorded"
            lines.append(
                f"on {self.rows} held-out rows: loss {self.before.loss:.3f} -> {self.after.loss:.3f}, {what} "
                f"{self.before.right} -> {self.after.right} of {self.rows}"
            )
        if not self.learned:
            lines.append(f"NOTHING WAS LEARNED: {self._cure(lr, updates)}")
        return lines

    def _cure(self, lr: float, updates: int) -> str:
        if self.before is not None and self.before.right >= 0.95 * self.rows:
            return "the model could do this before; give it rows that it cannot, or go on to the next step"
        if self.fell:
            by_heart = self.last_loss < BY_HEART * self.first_loss
            return (
                f"the loss fell on the learned rows alone{', which are known by heart' if by_heart else ''}: "
                "collect more of them, or lower tune.epochs"
            )
        return (
            f"the loss did not fall by {MARGIN:.0%} in {updates} updates at tune.lr = {lr:g}: try tune.lr = "
            f"{10 * lr:g}, or more tune.epochs (both have fitting values where they are unset); if that changes "
            "nothing, look at the rows: is the answer on the screen, is it the same for the same screen?"
        )


def fallen(curve: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Return the first and last loss of a curve's stage: of the one that fell most, for each trains something else."""
    stages: dict[int, list[float]] = {}
    for point in curve:
        stages.setdefault(point["stage"], []).append(point["loss"])
    ends = []
    for losses in stages.values():
        few = -(-len(losses) // QUARTER)
        ends.append((sum(losses[:few]) / few, sum(losses[-few:]) / few))
    return min(ends, key=lambda pair: pair[1] / pair[0] if pair[0] else 1.0, default=(0.0, 0.0))


# --- measuring --------------------------------------------------------------------------------

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
        """Measure the model as it is now; its weights, its mode and the generators' states do not change."""
        state, modules = torch.get_rng_state(), list(self._policy.model.modules())
        modes = [module.training for module in modules]
        self._policy.model.eval()
        try:
            return Measured(loss=self._loss(), right=asyncio.run(self._right()))
        finally:
            torch.set_rng_state(state)
            for module, is_training in zip(modules, modes, strict=True):
                module.training = is_training

    @torch.no_grad()
    def _loss(self) -> float:
        total = 0.0
        losses = LossSettings(target=self._config.tune.target)
        for first in range(0, len(self._held), self._batch):
            rows = self._held[first : first + self._batch]
            costs = self._training_set.passes(rows, losses)
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
