"""The training set: examples as forward passes, whose costs add up to the loss of an update.

TrainingSet      the interface that stages use
RecordedAnswer   a prompt and its recorded answer, to compare the model's answer with
ExampleSet       prompts with their answers, some in each forward pass
StepSet          steps of trajectories, packed as the trainer packs them
LearnedRows      a training set without the held-out rows
Order            which examples an update sees; the same seed gives the same order, wherever a start begins
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
class RecordedAnswer:
    """A prompt and its recorded answer."""

    prompt_token_ids: list[int]  # [P]
    images: list[bytes]  # [I]
    answer: list[int]  # [A], token ids
    patches: list[int]  # [A], as in SampledTokens; [] where nothing points


class TrainingSet(Protocol):
    """Examples, by number."""

    @property
    def group_names(self) -> Sequence[str]:
        """The group of each example [N]; the examples of a group stay together in an epoch."""
        ...

    def passes(self, rows: Sequence[int], losses: LossSettings) -> Iterator[Costs]:
        """Yield the costs of some examples, one forward pass after the other; they add up to the loss."""
        ...

    def recorded(self, index: int) -> RecordedAnswer:
        """Return one example, to ask the model without training it."""
        ...


class ExampleSource(Protocol):
    """Prompts with their answers, by number."""

    @property
    def group_names(self) -> list[str]:
        """The group of each example [N]: its screenshot, or its demonstration."""
        ...

    def of(self, index: int) -> Example:
        """Return one example."""
        ...


class ExampleSet:
    """Prompts with their answers, some in each forward pass."""

    def __init__(self, policy: LoadedPolicy, examples: ExampleSource, micro_batch: int) -> None:
        self._policy = policy
        self._examples = examples
        self._micro_batch = micro_batch

    @property
    def group_names(self) -> Sequence[str]:
        """The group of each example [N]: its screenshot, or its demonstration."""
        return self._examples.group_names

    def passes(self, rows: Sequence[int], losses: LossSettings) -> Iterator[Costs]:
        """Yield the costs of some examples, `micro_batch` of them in a forward pass; 0 means all."""
        examples = [self._examples.of(row) for row in rows]
        counts = counts_of(examples, self._policy)
        size = self._micro_batch or len(examples)
        for first in range(0, len(examples), size):
            batch = collate_batch(self._policy, examples[first : first + size], losses)
            yield batch_loss(self._policy, batch, losses, counts)

    def recorded(self, index: int) -> RecordedAnswer:
        """Return one prompt with its answer, to ask the model without training it."""
        example = self._examples.of(index)
        return RecordedAnswer(example.prompt.token_ids, example.prompt.images, example.answer, [])


class StepSet:
    """Steps of trajectories.

    The steps of one trajectory are packed, so that common tokens are computed once.
    """

    def __init__(
        self, policy: LoadedPolicy, trajectories: Trajectories, train: TrainConfig
    ) -> None:
        self._policy = policy
        self._model = TrainModel.of(policy)
        self._trajectories = trajectories
        self._train = train

    @property
    def group_names(self) -> Sequence[str]:
        """The trajectory of each step [N]."""
        return self._trajectories.names

    def passes(self, rows: Sequence[int], losses: LossSettings) -> Iterator[Costs]:  # noqa: ARG002 - of items
        """Yield the costs of some steps: means over all sampled tokens; a patch counts as one token."""
        batch = self._trajectories.batch(rows)
        count = completion_tokens(batch, pad_of(self._policy))
        [part] = packed_batches(batch, self._policy, pack_tokens=self._train.pack_tokens)
        weights = [1.0] * len(part.batch.samples)
        with PackFeed(part, weights, self._policy) as packs:
            for pack in packs:
                scores = self._model.score(pack, 1.0)
                is_sampled = pack.is_drawn.to(scores.logprobs.device)
                nll = -(scores.logprobs * is_sampled).sum() / count
                entropy = (scores.entropies * is_sampled).sum() / count
                costs = Costs(nll)
                costs.add(lm=nll.item(), entropy=entropy.item(), loss=nll.item())
                yield costs

    def recorded(self, index: int) -> RecordedAnswer:
        """Return the prompt of one step with its completion, to ask the model without training it."""
        step, images = self._trajectories.step(index)
        return RecordedAnswer(
            step.prompt_token_ids.tolist(), images, step.token_ids.tolist(), list(step.patches)
        )


class LearnedRows:
    """A training set of some rows of another one."""

    def __init__(self, whole: TrainingSet, rows: Sequence[int]) -> None:
        self._whole = whole
        self._rows = rows

    @property
    def group_names(self) -> Sequence[str]:
        """The group of each learned row [N]."""
        names = self._whole.group_names
        return [names[row] for row in self._rows]

    def passes(self, rows: Sequence[int], losses: LossSettings) -> Iterator[Costs]:
        """Yield the costs of some rows, which are counted within the learned ones."""
        return self._whole.passes([self._rows[row] for row in rows], losses)

    def recorded(self, index: int) -> RecordedAnswer:
        """Return one row, counted within the learned ones, to ask the model without training it."""
        return self._whole.recorded(self._rows[index])


class Order:
    """The order of examples in batches of `batch`; `group_names` [N] has the group of each example.

    Groups are shuffled anew in each epoch, and so are the examples of each group. The examples of a group
    stay together, so that a batch has few different screenshots and the vision tower sees each of them once.
    A batch may reach into the next epoch.
    """

    def __init__(self, group_names: Sequence[str], batch: int, seed: str) -> None:
        self.batch = batch
        self.count = len(group_names)
        self._seed = seed
        self._members: dict[str, list[int]] = {}
        for index, name in enumerate(group_names):
            self._members.setdefault(name, []).append(index)
        self._epoch = lru_cache(maxsize=2)(self._shuffled)

    def updates(self, epochs: float) -> int:
        """Return the number of updates of so many epochs. The last batch may see some examples once more."""
        return max(1, -(-round(epochs * self.count) // self.batch))

    def of(self, update: int) -> list[int]:
        """Return the examples in the batch of an update; updates count from 0."""
        first = update * self.batch
        return [
            self._epoch(place // self.count)[place % self.count]
            for place in range(first, first + self.batch)
        ]

    def _shuffled(self, epoch: int) -> list[int]:
        """Return all examples in the order of an epoch, group by group."""
        rng = Random(f"{self._seed}/{epoch}")  # noqa: S311 - repeatable on purpose
        names = list(self._members)
        rng.shuffle(names)
        order = []
        for name in names:
            order += rng.sample(self._members[name], len(self._members[name]))
        return order
