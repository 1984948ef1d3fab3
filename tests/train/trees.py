"""Batches of random tokens that share, extend and repeat one another in every way a run does; their packs."""

from __future__ import annotations

import random
from collections.abc import Sequence

from bus.messages import Batch, Hint, VersionSpan
from bus.packed import float64s, int32s
from dart_cli.data.loading import chained
from dart_cli.data.store.steps import BatchStep
from dart_cli.doctor.logprob_check import draw
from dart_cli.policy.loader import LoadedPolicy
from dart_cli.train.packs.batch_tokens import pad_of
from dart_cli.train.packs.pack import Pack, PackFeed
from dart_cli.train.packs.rank_shares import packed_batches
from dart_cli.train.trained_policy import TrainModel
from envs.contract.blobs import content_hash

SIZES = ((448, 224), (224, 224), (224, 448))


class Author:
    """Writes prompts of random text and screens for one model."""

    def __init__(self, policy: LoadedPolicy, seed: int) -> None:
        self.dice = random.Random(seed)
        self.images: dict[str, bytes] = {}
        self._policy = policy
        self._sizes: dict[str, int] = {}
        special = {*policy.tokenizer.all_special_ids, *policy.forbidden_token_ids}
        self._plain = [token for token in range(200) if token not in special]
        self._fence = [
            policy.tokenizer.convert_tokens_to_ids(name)
            for name in ("<|vision_start|>", "<|vision_end|>")
        ]

    def text(self, length: int) -> list[int]:
        return self.dice.choices(self._plain, k=length)

    def completion_ids(self, images: list[str]) -> tuple[list[int], list[int]]:
        """Return a completion and its patches, with any number of pointers if the policy points."""
        if self._policy.pointing == "text" or not images:
            return self.text(self.dice.randint(1, 7)), []
        assert self._policy.pointer is not None
        triple, tokens, patches = self._policy.pointer.triple, self.text(2), [-1, -1]
        for _ in range(self.dice.choice([0, 1, 1, 2])):
            tokens += [*triple, *self.text(1)]
            patches += [-1, -1, self.dice.randrange(self._sizes[images[-1]]), -1]
        cut = self.dice.choice([0, 0, 1, 2])
        tokens, patches = [*tokens, *triple[:cut]], [*patches, *[-1] * cut]
        return tokens, patches if max(patches) >= 0 else []

    def screen(self) -> str:
        """A new screen's content hash."""
        blob = draw(self.dice, *self.dice.choice(SIZES))
        key = content_hash(blob)
        self.images[key] = blob
        self._sizes[key] = self._policy.images.token_count(blob, key)
        return key

    def shown(self, key: str) -> list[int]:
        start, end = self._fence
        return [start, *[self._policy.image_token_id] * self._sizes[key], end]

    def step(
        self,
        trajectory: str,
        step: int,
        prompt: list[int],
        completion: list[int],
        images: list[str],
        patches: Sequence[int] = (),
    ) -> BatchStep:
        known = self.dice.random() < 0.85
        length = len(completion)
        cut = self.dice.randint(0, length)
        spans = [(0, 0, cut), (1, cut, length)]
        pad = pad_of(self._policy)
        return BatchStep(
            group_id=trajectory.partition("-")[0],
            trajectory_id=trajectory,
            step=step,
            prompt_token_ids=int32s(prompt),
            token_ids=int32s(completion),
            image_hashes=list(images),
            behaviour_logprobs=float64s(
                [0.0 if token == pad else -self.dice.uniform(4, 9) for token in completion]
                if known
                else []
            ),
            version_spans=[
                VersionSpan(version=v, start=start, end=end)
                for v, start, end in spans
                if known and end > start
            ],
            advantage=self.dice.uniform(-1.5, 1.5),
            weight=self.dice.choice([1.0, 1.0, 0.5, 0.0]),
            patches=list(patches),
        )


def tree_batch(policy: LoadedPolicy, seed: int = 0, groups: int = 2) -> Batch:
    """Return groups that share a first screen, chains that extend and break, duplicates, and text."""
    author = Author(policy, seed)
    steps: list[BatchStep] = []
    for group in range(groups):
        first = author.screen()
        opening = [*author.text(20), *author.shown(first), *author.text(5)]
        for number in range(3):
            name, prompt, images = f"g{group}-{number}", list(opening), [first]
            for step in range(4):
                completion, patches = author.completion_ids(images)
                steps.append(author.step(name, step, prompt, completion, images, patches))
                if step == 2:  # history drops all but a new screen
                    images = [author.screen()]
                    prompt = [*prompt[:20], *author.shown(images[0]), *author.text(4)]
                else:
                    prompt = [*prompt, *completion, *author.text(3)]
                    for _ in range(author.dice.randint(0, 2)):
                        images = [*images, author.screen()]
                        prompt += [*author.shown(images[-1]), *author.text(2)]
        again = steps[-4]  # the same words again, of another trajectory
        steps.append(
            author.step(
                f"g{group}-again",
                0,
                list(again.prompt_token_ids),
                list(again.token_ids),
                again.image_hashes,
                again.patches,
            )
        )
    steps += [
        author.step(f"text-{number}", 0, author.text(30), author.text(5), []) for number in range(2)
    ]
    author.dice.shuffle(steps)
    chains, samples = chained(steps)
    return Batch(
        batch_id=1,
        group_ids=[],
        temperature=0.8,
        chains=chains,
        samples=samples,
        images=author.images,
    )


def packs_of(model: TrainModel, batch: Batch, pack_tokens: int = 100_000) -> list[Pack]:
    """The packs of a batch on one rank; a token weighs as its sample does."""
    [part] = packed_batches(batch, model.policy, pack_tokens=pack_tokens)
    weights = [sample.weight for sample in part.batch.samples]
    with PackFeed(part, weights, model.policy) as packs:
        return list(packs)


def with_hints(batch: Batch, policy: LoadedPolicy, most: int = 2**20) -> Batch:
    """Return the batch with a hint of some tokens, in another place, for two of three samples, `most` in all."""
    samples = []
    special = {*policy.tokenizer.all_special_ids, *policy.forbidden_token_ids}
    for number, sample in enumerate(batch.samples):
        prompt = batch.prompt(sample).tolist()
        text = [at for at, token in enumerate(prompt) if token not in special] or [0]
        start = text[number % len(text)]
        hint = Hint(
            start=start, end=start + number % 2, token_ids=int32s(prompt[start : start + 1] * 3)
        )
        samples.append(
            sample
            if number % 3 == 2 or number >= most or prompt[start] in special
            else sample.model_copy(update={"hint": hint})
        )
    return batch.model_copy(update={"samples": samples})
