"""Rows that a training does not learn from, and measurements of the model on them.

split_rows            splits rows into learned and held-out ones (Split), by whole episodes or screenshots
Measurement           the loss and the number of right answers of a model on the held-out rows
HeldOutMeter          makes such measurements
PlaceItems            the items, where the model learns to name places
Outcome               what a training changed, and whether anything was learned
first_and_last_loss   the loss of the learned rows at the beginning and at the end of a stage
"""

from __future__ import annotations

import asyncio
from collections import Counter
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
"""Least number of episodes or screenshots of which some are held out; with fewer, a measurement would say
little."""
MOST_ROWS = 256
"""Largest number of held-out rows; more would only cost time."""
MARGIN = 0.05
"""The model has learned if its loss is lower by this share, or if there are more right answers by this share
of the rows."""

BY_HEART = 0.5
"""If only the loss of the learned rows fell, and fell to this share, they were learned by heart."""
QUARTER = 4
"""The loss at the beginning and end of a stage is the mean over its first and last quarter: single updates
vary."""


@dataclass(frozen=True)
class Split:
    """Which rows are learned and which are held out, by number."""

    learned_rows: list[int]
    heldout_rows: list[int]
    heldout_groups: int


def split_rows(group_names: Sequence[str], share: float, seed: int) -> Split:
    """Hold out a share of the groups, with all of their rows; `group_names` [N] has the group of each row.

    The same seed gives the same split.
    """
    names = sorted(set(group_names))
    count = round(share * len(names))
    if len(names) < LEAST_GROUPS or not count:
        return Split(list(range(len(group_names))), [], 0)
    counts = Counter(group_names)
    heldout: set[str] = set()
    rows = 0
    for name in Random(f"{seed}/held out").sample(names, count):  # noqa: S311 - repeatable on purpose
        if heldout and rows + counts[name] > MOST_ROWS:
            break
        heldout.add(name)
        rows += counts[name]
    return Split(
        learned_rows=[row for row, name in enumerate(group_names) if name not in heldout],
        heldout_rows=[row for row, name in enumerate(group_names) if name in heldout],
        heldout_groups=len(heldout),
    )


class Measurement(StoredModel):
    """A measurement of a model on the held-out rows."""

    loss: float
    right: int  # rows whose place is hit, or whose greedy answer equals the recorded one


@dataclass(frozen=True)
class Outcome:
    """What a training changed, and whether anything was learned."""

    rows: int  # held out; with 0, the loss of the learned rows decides
    groups: int  # held out
    names_places: bool  # `right` counts hit places; otherwise answers that equal the recorded ones
    before: Measurement | None
    after: Measurement | None
    first_loss: float  # of the learned rows, in the stage with the largest fall
    last_loss: float

    @property
    def fell(self) -> bool:
        """Whether the loss of the learned rows fell by MARGIN."""
        return self.last_loss < (1 - MARGIN) * self.first_loss

    @property
    def learned(self) -> bool:
        """Whether the model became better on held-out rows, or on the learned rows if none are held out."""
        if self.before is None or self.after is None:
            return self.fell
        is_lower = self.after.loss < (1 - MARGIN) * self.before.loss
        more = self.after.right - self.before.right
        # A single answer may be a tie that rounding decided.
        return is_lower or more >= max(2, MARGIN * self.rows)

    def summary(self) -> dict[str, Any]:
        """Return the outcome for `--json` and tune.json."""
        summary: dict[str, Any] = {"learned": self.learned, "held_out": None}
        if self.before is not None and self.after is not None:
            summary["held_out"] = {
                "rows": self.rows,
                "groups": self.groups,
                "measure": "hits" if self.names_places else "answers",
                "loss_before": round(self.before.loss, 6),
                "loss_after": round(self.after.loss, 6),
                "right_before": round(self.before.right / self.rows, 4),
                "right_after": round(self.after.right / self.rows, 4),
            }
        return summary

    def lines(self, lr: float, updates: int) -> list[str]:
        """Return the outcome in words, with a fix where nothing was learned."""
        lines = []
        if self.before is None or self.after is None:
            lines.append(
                f"loss of the rows that were learned: {self.first_loss:.3f} -> {self.last_loss:.3f}; none were "
                f"held out (tune.held_out, and {LEAST_GROUPS} episodes or screenshots)"
            )
        else:
            what = "places hit" if self.names_places else "greedy answers as recorded"
            lines.append(
                f"on {self.rows} held-out rows: loss {self.before.loss:.3f} -> {self.after.loss:.3f}, {what} "
                f"{self.before.right} -> {self.after.right} of {self.rows}"
            )
        if not self.learned:
            lines.append(f"NOTHING WAS LEARNED: {self._fix(lr, updates)}")
        return lines

    def _fix(self, lr: float, updates: int) -> str:
        """Return why probably nothing was learned, and what to do about it."""
        if self.before is not None and self.before.right >= 0.95 * self.rows:
            return "the model could do this before; give it rows that it cannot, or go on to the next step"
        if self.fell:
            by_heart = self.last_loss < BY_HEART * self.first_loss
            return (
                f"the loss fell only on the learned rows{', which were learned by heart' if by_heart else ''}: "
                "collect more of them, or lower tune.epochs"
            )
        return (
            f"the loss did not fall by {MARGIN:.0%} in {updates} updates at tune.lr = {lr:g}: try tune.lr = "
            f"{10 * lr:g}, or more tune.epochs (if unset, both get values that fit); if that changes "
            "nothing, look at the rows: is the answer on the screen, and the same for the same screen?"
        )


def first_and_last_loss(curve: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Return the first and last loss of the stage with the largest fall; stages train different parts."""
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
"""Number of rows that the engine answers together."""


@dataclass(frozen=True)
class PlaceItems:
    """Items whose places the model should hit, in the order of the training set."""

    items: Sequence[Item]
    answers: AnswerFormat


class HeldOutMeter:
    """Measures a model on the held-out rows of a training set."""

    def __init__(
        self,
        config: Config,
        policy: LoadedPolicy,
        training_set: TrainingSet,
        rows: Sequence[int],
        *,
        batch: int,
        places: PlaceItems | None,
    ) -> None:
        """Make a meter for the held-out `rows`, `batch` of them in a forward pass.

        With `places`, hits are counted; without, answers that equal the recorded ones.
        """
        self._config = config
        self._policy = policy
        self._training_set = training_set
        self._rows = rows
        self._batch = batch
        self._places = places

    def measure(self) -> Measurement:
        """Measure the model as it is now. Its weights, its mode and the random generators do not change."""
        state, modules = torch.get_rng_state(), list(self._policy.model.modules())
        modes = [module.training for module in modules]
        self._policy.model.eval()
        try:
            return Measurement(loss=self._loss(), right=asyncio.run(self._right()))
        finally:
            torch.set_rng_state(state)
            for module, is_training in zip(modules, modes, strict=True):
                module.training = is_training

    @torch.no_grad()
    def _loss(self) -> float:
        """Return the mean loss over the held-out rows."""
        total = 0.0
        losses = LossSettings(target=self._config.tune.target)
        for first in range(0, len(self._rows), self._batch):
            rows = self._rows[first : first + self._batch]
            costs = self._training_set.passes(rows, losses)
            total += len(rows) * sum(cost.sums["loss"] for cost in costs)
        return total / len(self._rows)

    async def _right(self) -> int:
        """Return how many of the held-out rows the model answers rightly."""
        engine = TransformersEngine(self._policy, max_batch=AT_ONCE)
        try:
            if self._places is not None:
                return await self._hits(engine, self._places)
            limit = asyncio.Semaphore(2 * AT_ONCE)
            return sum(
                await asyncio.gather(*(self._is_right(engine, row, limit) for row in self._rows))
            )
        finally:
            await engine.close()

    async def _hits(self, engine: TransformersEngine, places: PlaceItems) -> int:
        """Return how many places of the held-out items the model hits."""
        policy = self._config.policy
        rollout = self._config.rollout.model_copy(update={"max_tokens": places.answers.max_tokens})
        responder = PolicyResponder(
            self._policy,
            engine,
            make_renderer(self._policy, policy),
            policy.coordinates,
        )
        config = self._config.model_copy(update={"rollout": rollout})
        scorer = make_scorer(Model(engine, responder), config, places.answers, 1)
        # Items of several sets may have one id.
        items = [replace(places.items[row], id=str(row)) for row in self._rows]
        answers: list[Answer] = []
        await answer_all(scorer, items, AT_ONCE, answers.append)
        by_id = {item.id: item for item in items}
        return sum(is_hit(by_id[answer.id], answer) for answer in answers)

    async def _is_right(
        self, engine: TransformersEngine, row: int, limit: asyncio.Semaphore
    ) -> bool:
        """Return True if the greedy answer to a row equals the recorded one."""
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
