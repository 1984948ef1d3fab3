"""What is trained on, as passes whose costs add up to the loss of an update.

TrainingSet   what the stages need of it
Recorded      one row as an engine is asked it, and its answer
ExampleSet    prompts with their answers, some in each forward pass
StepSet       steps of trajectories, packed as the trainer packs them
LearnedRows   a training set without the rows that are held out
Order         which examples an update sees; the same for the same seed, wherever a start begins
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Protocol

from dart_cli.config.schema import TrainConfig
from dart_cli.policy.loader import LoadedPolicy
from dart_cli.train.packs.batch_tokens import completion_tokens, pad_of
from dart_cli.train.packs.pack import PackFeed
from dart_cli.train.packs.rank_shares import packed_batches
from dart_cli.train.trained_policy import TrainModel
from dart_cli.tune.examples import Example
from dart_cli.tune.loss import Costs, LossSettings, batch_loss, collate_batch, counts_of
from dart_cli.tune.trajectories import Trajectories


@dataclass(frozen=True)
class Recorded:
    """A prompt, and what shall be answered."""

    prompt_token_ids: list[int]  # [P]
    images: list[bytes]  # [I]
    answer: list[int]  # [A], token ids
    patches: list[int]  # [A], as in SampledTokens; [] where nothing points


class TrainingSet(Protocol):
    """Examples by number."""

    @property
    def together(self) -> Sequence[str]:
        """[N]: examples of one name stand together in an epoch."""
        ...

    def passes(self, rows: Sequence[int], losses: LossSettings) -> Iterator[Costs]:
        """Return the loss of some examples, by number, in as many forward passes as it takes."""
        ...

    def recorded(self, index: int) -> Recorded:
        """One example, to be asked without training."""
        ...


class Answered(Protocol):
    """Prompts with their answers, by number."""

    @property
    def pictures(self) -> list[str]:
        """What stands together: a screenshot's items, a demonstration's steps."""
        ...

    def of(self, index: int) -> Example:
        """One of them."""
        ...


class ExampleSet:
    """Prompts with their answers, some in each forward pass."""

    def __init__(self, policy: LoadedPolicy, examples: Answered, micro_batch: int) -> None:
        self._policy = policy
        self._examples = examples
        self._micro_batch = micro_batch

    @property
    def together(self) -> Sequence[str]:
        """See TrainingSet."""
        return self._examples.pictures

    def passes(self, rows: Sequence[int], losses: LossSettings) -> Iterator[Costs]:
        """See TrainingSet."""
        drawn = [self._examples.of(row) for row in rows]
        counts = counts_of(drawn, self._policy)
        size = self._micro_batch or len(drawn)
        for first in range(0, len(drawn), size):
            batch = collate_batch(self._policy, drawn[first : first + size], losses)
            yield batch_loss(self._policy, batch, losses, counts)

    def recorded(self, index: int) -> Recorded:
        """See TrainingSet."""
        example = self._examples.of(index)
        return Recorded(example.prompt.token_ids, example.prompt.images, example.answer, [])


class StepSet:
    """Steps of trajectories: those of one stand together, and share the tokens that they share."""

    def __init__(
        self, policy: LoadedPolicy, trajectories: Trajectories, train: TrainConfig
    ) -> None:
        self._policy = policy
        self._model = TrainModel.of(policy)
        self._trajectories = trajectories
        self._train = train

    @property
    def together(self) -> Sequence[str]:
        """See TrainingSet."""
        return self._trajectories.names

    def passes(self, rows: Sequence[int], losses: LossSettings) -> Iterator[Costs]:  # noqa: ARG002 - of items
        """See TrainingSet. The mean over all tokens that the policy drew, a patch as its pointer's end."""
        batch = self._trajectories.batch(rows)
        count = completion_tokens(batch, pad_of(self._policy))
        [part] = packed_batches(batch, self._policy, pack_tokens=self._train.pack_tokens)
        weights = [1.0] * len(part.batch.samples)
        with PackFeed(part, weights, self._policy) as packs:
            for pack in packs:
                scores = self._model.score(pack, 1.0)
                drawn = pack.is_drawn.to(scores.logprobs.device)
                nll = -(scores.logprobs * drawn).sum() / count
                entropy = (scores.entropies * drawn).sum() / count
                costs = Costs(nll)
                costs.add(lm=nll.item(), entropy=entropy.item(), loss=nll.item())
                yield costs

    def recorded(self, index: int) -> Recorded:
        """See TrainingSet."""
        step, images = self._trajectories.step(index)
        return Recorded(
            step.prompt_token_ids.tolist(), images, step.token_ids.tolist(), list(step.patches)
        )


class LearnedRows:
    """A TrainingSet of some rows of another."""

    def __init__(self, whole: TrainingSet, rows: Sequence[int]) -> None:
        self._whole = whole
        self._rows = rows

    @property
    def together(self) -> Sequence[str]:
        """See TrainingSet."""
        names = self._whole.together
        return [names[row] for row in self._rows]

    def passes(self, rows: Sequence[int], losses: LossSettings) -> Iterator[Costs]:
        """See TrainingSet."""
        return self._whole.passes([self._rows[row] for row in rows], losses)

    def recorded(self, index: int) -> Recorded:
        """See TrainingSet."""
        return self._whole.recorded(self._rows[index])


class Order:
    """Batches of `batch` examples. `pictures` [N] tells the screenshot of each example.

    Screenshots are shuffled anew in each epoch, and the examples of each one; they stand together, so that
    a batch has few distinct screenshots and the vision tower sees each once. A batch may reach into the
    next epoch.
    """

    def __init__(self, pictures: Sequence[str], batch: int, seed: str) -> None:
        self.batch = batch
        self.count = len(pictures)
        self._seed = seed
        self._of: dict[str, list[int]] = {}
        for index, picture in enumerate(pictures):
            self._of.setdefault(picture, []).append(index)
        self._epoch = lru_cache(maxsize=2)(self._shuffled)

    def updates(self, epochs: float) -> int:
        """How many updates so many epochs take; the last batch may see some examples once more."""
        return max(1, -(-round(epochs * self.count) // self.batch))

    def of(self, update: int) -> list[int]:
        """Return the example at each place in the batch of an update, from 0 on."""
        first = update * self.batch
        return [
            self._epoch(place // self.count)[place % self.count]
            for place in range(first, first + self.batch)
        ]

    def _shuffled(self, epoch: int) -> list[int]:
        rng = Random(f"{self._seed}/{epoch}")  # noqa: S311 - repeatable on purpose
        pictures = list(self._of)
        rng.shuffle(pictures)
        order = []
        for picture in pictures:
            order += rng.sample(self._of[picture], len(self._of[picture]))
        return order
