"""What is trained on, as passes whose costs add up to the loss of an update.

TrainingSet   what the stages need of it
Recorded      one row as an engine is asked it, and its answer
ExampleSet    prompts with their answers, some in each forward pass
StepSet       steps of trajectories, packed as the trainer packs them
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from dart_cli.config.schema import TrainConfig
from dart_cli.policy.model import LoadedPolicy
from dart_cli.train.model import TrainModel
from dart_cli.train.packs.feed import PackFeed
from dart_cli.train.packs.pack import completion_tokens
from dart_cli.train.packs.pointers import pad_of
from dart_cli.train.packs.share import packed_batches
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

    def passes(self, places: Sequence[tuple[int, int]], losses: LossSettings) -> Iterator[Costs]:
        """The loss of some examples, (epoch, number) each, in as many forward passes as it takes."""
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

    def of(self, index: int, rng: Random) -> Example:
        """One of them; what its answer draws comes from `rng`."""
        ...


class ExampleSet:
    """Prompts with their answers, some in each forward pass."""

    def __init__(
        self, policy: LoadedPolicy, examples: Answered, micro_batch: int, seed: int
    ) -> None:
        self._policy = policy
        self._examples = examples
        self._micro_batch = micro_batch
        self._seed = seed

    @property
    def together(self) -> Sequence[str]:
        """See TrainingSet."""
        return self._examples.pictures

    def passes(self, places: Sequence[tuple[int, int]], losses: LossSettings) -> Iterator[Costs]:
        """See TrainingSet."""
        drawn = [
            self._examples.of(index, Random(f"{self._seed}/{epoch}/{index}"))  # noqa: S311 - repeatable
            for epoch, index in places
        ]
        counts = counts_of(drawn, self._policy)
        size = self._micro_batch or len(drawn)
        for first in range(0, len(drawn), size):
            batch = collate_batch(self._policy, drawn[first : first + size], losses)
            yield batch_loss(self._policy, batch, losses, counts)

    def recorded(self, index: int) -> Recorded:
        """See TrainingSet."""
        example = self._examples.of(index, Random(f"{self._seed}/0/{index}"))  # noqa: S311 - repeatable
        return Recorded(example.prompt.token_ids, example.prompt.images, example.answer, [])


class StepSet:
    """Steps of trajectories: those of one stand together, and share the tokens that they share."""

    def __init__(
        self, policy: LoadedPolicy, trajectories: Trajectories, train: TrainConfig
    ) -> None:
        self._policy = policy
        self._model = TrainModel.of(policy, chunk_tokens=train.chunk_tokens)
        self._trajectories = trajectories
        self._train = train

    @property
    def together(self) -> Sequence[str]:
        """See TrainingSet."""
        return self._trajectories.names

    def passes(self, places: Sequence[tuple[int, int]], losses: LossSettings) -> Iterator[Costs]:
        """See TrainingSet. The mean over all tokens that the policy drew, a patch as its pointer's end."""
        batch = self._trajectories.batch([index for _, index in places])
        count = completion_tokens(batch, pad_of(self._policy))
        [part] = packed_batches(batch, self._policy, pack_tokens=self._train.pack_tokens)
        weights = [1.0] * len(part.batch.samples)
        workers = self._train.image_workers
        with PackFeed(part, weights, self._policy, workers=workers) as packs:
            for pack in packs:
                scores = self._model.score(pack, 1.0)
                drawn = pack.drawn.to(scores.logprobs.device)
                nll = -(scores.logprobs * drawn).sum() / count
                entropy = (scores.entropies * drawn).sum() / count
                costs = Costs(losses.lm * nll)
                costs.add(lm=nll.item(), entropy=entropy.item(), loss=losses.lm * nll.item())
                yield costs

    def recorded(self, index: int) -> Recorded:
        """See TrainingSet."""
        step, images = self._trajectories.step(index)
        return Recorded(
            step.prompt_token_ids.tolist(), images, step.token_ids.tolist(), list(step.patches)
        )
