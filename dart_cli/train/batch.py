"""Batches to tensors.

    check           refuses a batch that does not fit the model, naming the sample
    describe        staleness and size of a batch, as metrics
    micro_batches   a batch in parts of bounded size that waste little, ready for a forward pass

Padding and images decide what a forward pass costs. Samples are ordered by length in buckets, and
within a bucket by the images they show, so that a part is nearly rectangular and screens that
samples share (the first of a group, a click that changed nothing) go through the vision tower once.
Axis `[N]`: the completion tokens of a part's samples, one sample after another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from bus.errors import ProtocolError
from bus.messages import Batch, Sample, VersionSpan
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
    behaviour_logprobs: torch.Tensor  # [N], nats
    advantages: torch.Tensor  # [N]
    weights: torch.Tensor  # [N], each sample's weight


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
    length = len(sample.prompt_token_ids) + len(sample.token_ids)
    missing = [key for key in sample.image_hashes if key not in batch.images]
    if not sample.token_ids or not sample.prompt_token_ids:
        return "its prompt or completion is empty"
    if len(sample.behaviour_logprobs) != len(sample.token_ids):
        return f"{len(sample.token_ids)} tokens, {len(sample.behaviour_logprobs)} log-probabilities"
    if length > longest:
        return f"{length} tokens, the model has {longest} positions"
    if not all(0 <= token < vocabulary for token in sample.prompt_token_ids + sample.token_ids):
        return "a token id is not in the vocabulary"
    if not forbidden.isdisjoint(sample.token_ids):
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
    samples = arrange([sample for sample in batch.samples if sample.weight != 0])
    for start in range(0, len(samples), size):
        yield _collate(samples[start : start + size], batch, policy)


def arrange(samples: Sequence[Sample]) -> list[Sample]:
    """Samples in the order in which they are cut into parts; see the module's docstring."""

    def key(sample: Sample) -> tuple[int, list[str], str, int]:
        length = len(sample.prompt_token_ids) + len(sample.token_ids)
        return length // LENGTH_BUCKET, sample.image_hashes, sample.trajectory_id, sample.step

    return sorted(samples, key=key)


def completion_tokens(batch: Batch) -> int:
    """How many tokens the batch's loss is a mean over."""
    return sum(len(sample.token_ids) for sample in batch.samples if sample.weight != 0)


def describe(batch: Batch, policy_version: int) -> dict[str, float]:
    """Metrics of a batch by itself: staleness in versions over its tokens, size of advantages."""
    behind = {
        version: sum(span.end - span.start for span in spans)
        for version, spans in _by_version(batch).items()
    }
    tokens = max(1, sum(behind.values()))
    return {
        "staleness_mean": sum((policy_version - v) * count for v, count in behind.items()) / tokens,
        "staleness_max": float(max((policy_version - v for v in behind), default=0)),
        "advantage_abs_mean": sum(abs(sample.advantage) for sample in batch.samples)
        / max(1, len(batch.samples)),
        "groups": float(len(batch.group_ids)),
    }


def _by_version(batch: Batch) -> dict[int, list[VersionSpan]]:
    spans: dict[int, list[VersionSpan]] = {}
    for sample in batch.samples:
        for span in sample.version_spans:
            spans.setdefault(span.version, []).append(span)
    return spans


def _collate(samples: Sequence[Sample], batch: Batch, policy: LoadedPolicy) -> MicroBatch:
    try:
        inputs = policy.inputs(
            [sample.prompt_token_ids + sample.token_ids for sample in samples],
            [[batch.images[key] for key in sample.image_hashes] for sample in samples],
        )
    except ValueError as error:
        raise ProtocolError(f"batch {batch.batch_id}: {error}; one model must serve both") from None
    longest = max(len(sample.token_ids) for sample in samples)
    rows: list[int] = []
    columns: list[int] = []
    for row, sample in enumerate(samples):
        # Sequences end together; the position before a token predicts it, so of the last
        # `longest + 1` positions the very last predicts nothing that is there.
        rows += [row] * len(sample.token_ids)
        columns += range(longest - len(sample.token_ids), longest)
    lengths = torch.tensor([len(sample.token_ids) for sample in samples])

    def spread(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32).repeat_interleave(lengths)

    return MicroBatch(
        inputs=inputs,
        last=longest + 1,
        rows=torch.tensor(rows),
        columns=torch.tensor(columns),
        token_ids=torch.tensor([token for sample in samples for token in sample.token_ids]),
        behaviour_logprobs=torch.tensor(
            [value for sample in samples for value in sample.behaviour_logprobs],
            dtype=torch.float32,
        ),
        advantages=spread([sample.advantage for sample in samples]),
        weights=spread([sample.weight for sample in samples]),
    )
