"""Batches to tensors.

    check           an error for a batch that does not fit the model, which names the sample
    micro_batches   a batch in micro-batches of bounded size with little padding, ready for a forward pass
    batch_shares    what each of its tokens weighs in the loss

The cost of a forward pass is in padding, prompts and screens, and in a group these repeat: all its
trajectories begin with the same screen, and a click on nothing does not change it. Therefore

- samples with the same prompt share a row, `prompt | completion | completion ...`, in which each
  completion sees the prompt and itself (a mask, and positions that begin again after the prompt);
- rows are ordered by length in buckets, then by the screens they show, so that a part is nearly
  rectangular and most screens go through the vision tower once.

Both are exact: tests/train/test_learner.py compares with each sample alone.
Axis `[N]`: the completion tokens of a part's samples, one sample after another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from bus.errors import ProtocolError
from bus.messages import Batch, Sample
from dart_cli.algo.normalise import Normalise, Shares, loss_shares
from dart_cli.policy.forward import ModelInputs
from dart_cli.policy.model import LoadedPolicy

LENGTH_BUCKET = 16  # tokens; lengths that differ by less count as equal


@dataclass(frozen=True)
class MicroBatch:
    """Some samples of a batch, padded, and where their completion tokens are predicted."""

    inputs: ModelInputs
    last: int  # how many of the last positions' logits are needed
    rows: torch.Tensor  # [N], int64, index into the batch axis of the logits [B, last, V]
    columns: torch.Tensor  # [N], int64, index into their position axis
    token_ids: torch.Tensor  # [N], int64
    behaviour_logprobs: torch.Tensor  # [N], nats; 0 where unknown
    unknown: torch.Tensor  # [N], bool: of a demonstration, whose behaviour policy is unknown
    advantages: torch.Tensor  # [N]
    weights: torch.Tensor  # [N], each sample's weight
    versions: torch.Tensor
    """[N], int64, the version that sampled a token; -1 where it is unknown, or the token was sampled
    after a weight swap, on keys and values of the old weights."""
    samples: tuple[Sample, ...]  # whose tokens these are, in order


def check(batch: Batch, policy: LoadedPolicy) -> None:
    """Refuse a batch that cannot be trained on. Raises ProtocolError naming sample and cause."""
    vocabulary = int(policy.model.get_input_embeddings().weight.shape[0])
    forbidden = frozenset(policy.forbidden_token_ids)
    for sample in batch.samples:
        if cause := _fault(sample, batch, vocabulary, forbidden, policy.max_positions):
            raise ProtocolError(
                f"batch {batch.batch_id}, {sample.trajectory_id} step {sample.step}: {cause}; "
                "was it sampled with this model?"
            )


def _fault(
    sample: Sample, batch: Batch, vocabulary: int, forbidden: frozenset[int], longest: int
) -> str:
    """What is wrong with a sample; empty if nothing is."""
    if not sample.chain < len(batch.chains):
        return f"chain {sample.chain} is missing"
    chain = batch.chains[sample.chain]
    if not 0 < sample.start < sample.end:
        return "its prompt or completion is empty"
    if sample.end > len(chain.token_ids) or sample.images > len(chain.image_hashes):
        return "its chain ends before it"
    missing = [key for key in batch.image_hashes(sample) if key not in batch.images]
    if len(sample.behaviour_logprobs) not in (0, len(sample)):
        return f"{len(sample)} tokens, {len(sample.behaviour_logprobs)} log-probabilities"
    if sample.end > longest:
        return f"{sample.end} tokens, the model has {longest} positions"
    token_ids = chain.token_ids[: sample.end]
    if not 0 <= min(token_ids) <= max(token_ids) < vocabulary:
        return "a token id is not in the vocabulary"
    if not forbidden.isdisjoint(batch.completion(sample)):
        return "its completion holds a token that is never sampled"
    numbers = [*sample.behaviour_logprobs, sample.advantage, sample.weight]
    if not all(map(math.isfinite, numbers)):
        return "a log-probability, advantage or weight is not finite"
    return f"image {missing[0]} is missing" if missing else ""


def micro_batches(batch: Batch, policy: LoadedPolicy, size: int) -> Iterator[MicroBatch]:
    """The batch in parts of at most `size` samples, each sample once.

    Samples of weight 0 are left out. Raises ProtocolError where a prompt's placeholders do not
    agree with its images, EngineError for an image that does not decode.
    """
    part: list[PromptRow] = []
    for row in arrange(batch, [each for each in batch.samples if each.weight != 0], size):
        if part and sum(len(held.samples) for held in part) + len(row.samples) > size:
            yield _collate(part, batch, policy)
            part = []
        part.append(row)
    if part:
        yield _collate(part, batch, policy)


@dataclass(frozen=True)
class PromptRow:
    """Samples with one prompt, and where each one's completion begins behind it."""

    samples: tuple[Sample, ...]
    starts: tuple[int, ...]  # per sample; equal completions share their place
    token_ids: tuple[int, ...]  # the prompt and the distinct completions
    images: tuple[str, ...]

    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""
        return self.samples[0].start


def arrange(batch: Batch, samples: Sequence[Sample], size: int) -> list[PromptRow]:
    """Rows of at most `size` samples, in the order in which they are cut into parts."""
    by_prompt: dict[tuple[tuple[int, ...], tuple[str, ...]], list[Sample]] = {}
    for sample in sorted(samples, key=lambda each: (each.trajectory_id, each.step)):
        prompt = tuple(batch.prompt(sample)), tuple(batch.image_hashes(sample))
        by_prompt.setdefault(prompt, []).append(sample)
    rows = [row for sharing in by_prompt.values() for row in _rows(batch, sharing, size)]

    def key(row: PromptRow) -> tuple[int, tuple[str, ...], str, int]:
        first = row.samples[0]
        bucket = len(row.token_ids) // LENGTH_BUCKET
        return bucket, row.images, first.trajectory_id, first.step

    return sorted(rows, key=key)


def _rows(batch: Batch, sharing: Sequence[Sample], size: int) -> Iterator[PromptRow]:
    """Rows of samples with one prompt; a row at most doubles the prompt's length."""
    prompt = batch.prompt(sharing[0])
    images = tuple(batch.image_hashes(sharing[0]))
    held: list[Sample] = []
    starts: dict[tuple[int, ...], int] = {}
    tokens = list(prompt)

    def row() -> PromptRow:
        places = [starts[tuple(batch.completion(sample))] for sample in held]
        return PromptRow(tuple(held), tuple(places), tuple(tokens), images)

    for sample in sharing:
        completion = tuple(batch.completion(sample))
        is_long = completion not in starts and len(tokens) + len(completion) > 2 * len(prompt)
        if held and (is_long or len(held) == size):
            yield row()
            held, starts, tokens = [], {}, list(prompt)
        if completion not in starts:
            starts[completion] = len(tokens) - len(prompt)
            tokens += completion
        held.append(sample)
    yield row()


def trajectory_of(sample: Sample) -> tuple[str, str]:
    """Which trajectory of the batch a sample is of: its group's id, and its own."""
    return sample.group_id, sample.trajectory_id


def batch_shares(batch: Batch, normalise: Normalise, constant_tokens: float = 0.0) -> Shares:
    """The weight of each token in the batch's loss; samples of weight 0 count nowhere."""
    return loss_shares(
        ((trajectory_of(sample), len(sample)) for sample in batch.samples if sample.weight != 0),
        normalise,
        constant_tokens,
    )


def completion_tokens(batch: Batch) -> int:
    """How many tokens the batch's loss is over."""
    return sum(len(sample) for sample in batch.samples if sample.weight != 0)


def _collate(part: Sequence[PromptRow], batch: Batch, policy: LoadedPolicy) -> MicroBatch:
    try:
        inputs = policy.inputs_of(
            [row.token_ids for row in part],
            [[policy.images.prepare(batch.images[key], key) for key in row.images] for row in part],
        )
    except ValueError as error:
        raise ProtocolError(f"batch {batch.batch_id}: {error}; one model must serve both") from None
    behind = max(len(row.token_ids) - row.prompt for row in part)  # tokens behind a prompt
    samples = [sample for row in part for sample in row.samples]
    rows: list[int] = []
    columns: list[int] = []
    for index, row in enumerate(part):
        # Rows end together, so of the last `behind + 1` positions the prompt's last one is:
        end_of_prompt = behind - (len(row.token_ids) - row.prompt)
        for sample, start in zip(row.samples, row.starts, strict=True):
            rows += [index] * len(sample)
            # The end of the prompt predicts each completion's first token.
            first = end_of_prompt + start + 1
            columns += [end_of_prompt, *range(first, first + len(sample) - 1)]
    lengths = torch.tensor([len(sample) for sample in samples])

    def spread(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32).repeat_interleave(lengths)

    return MicroBatch(
        inputs=_branched(inputs, part),
        last=behind + 1,
        rows=torch.tensor(rows),
        columns=torch.tensor(columns),
        token_ids=torch.tensor([token for sample in samples for token in batch.completion(sample)]),
        behaviour_logprobs=torch.tensor(
            [
                value
                for sample in samples
                for value in sample.behaviour_logprobs or [0.0] * len(sample)
            ],
            dtype=torch.float32,
        ),
        unknown=torch.tensor(
            [not sample.behaviour_logprobs for sample in samples]
        ).repeat_interleave(lengths),
        advantages=spread([sample.advantage for sample in samples]),
        weights=spread([sample.weight for sample in samples]),
        versions=torch.tensor([version for each in samples for version in _versions(each)]),
        samples=tuple(samples),
    )


def _versions(sample: Sample) -> list[int]:
    """The version that alone gave each completion token its log-probability, [A]; -1 where none did.

    Tokens after a swap in flight are sampled by the new weights on the cache that the old ones
    left, which no single version reproduces; tokens of no span belong to no version.
    """
    versions = [-1] * len(sample)
    if sample.version_spans and sample.version_spans[0].start == 0:
        first = sample.version_spans[0]
        end = min(first.end, len(versions))
        versions[:end] = [first.version] * end
    return versions


def _branched(inputs: ModelInputs, part: Sequence[PromptRow]) -> ModelInputs:
    """The inputs with completions that do not see each other, where a row holds several."""
    if all(len(set(row.starts)) == 1 for row in part):
        return inputs
    count, length = inputs.input_ids.shape
    branch = torch.full((count, length), -1)  # -1 padding, 0 prompt, 1, 2, ... completions
    position_ids = inputs.position_ids.clone()
    for index, row in enumerate(part):
        begin = length - len(row.token_ids)
        branch[index, begin : begin + row.prompt] = 0
        bounds = [*sorted(set(row.starts)), len(row.token_ids) - row.prompt]
        for number, (start, end) in enumerate(pairwise(bounds), start=1):
            here = slice(begin + row.prompt + start, begin + row.prompt + end)
            branch[index, here] = number
            position_ids[:, index, here] -= start  # text: one position a token on every axis
    query, key = branch[:, :, None], branch[:, None, :]
    seen = (key == 0) | ((key == query) & (key > 0))
    order = torch.arange(length)
    seen &= order[:, None] >= order[None, :]
    seen |= torch.eye(length, dtype=torch.bool)  # padding sees itself: a row of nothing is nan
    return replace(inputs, attention_mask=seen[:, None], position_ids=position_ids)
