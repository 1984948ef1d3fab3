"""A rank's part of a batch to tensors.

    check            an error for a batch that does not fit the model, which names the sample
    Pack             one forward pass, and where its samples' completion tokens are predicted
    PackMaker        makes the packs of a rank's part
    batch_shares     what each token of a batch weighs in its loss
    tokens_of        a chain as the plan reads it: each image is a token of its own
    cut_chain        a chain up to its last sample that is trained on

A pack is trees of tokens (plan.py): what a group shares stands once, and each branch sees its path
alone, with the positions that it has there. So a sample's numbers are those that it has alone:
tests/train/test_packs.py compares them.

Axes: `[L]` tokens of a pack or a chain; `[N]` completion tokens of a pack's samples, one sample after
another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np
import torch
from numpy.typing import NDArray

from bus.errors import ProtocolError
from bus.messages import Batch, Chain, Sample
from bus.packed import IntArray
from bus.ranks import PackedBatch
from dart_cli.algo.objective import LossShares, Normalise, loss_shares
from dart_cli.policy.forward import ImageFeatures
from dart_cli.policy.images import PreparedImage
from dart_cli.policy.model import LoadedPolicy
from dart_cli.policy.packed import PackedInputs, PackLayout
from dart_cli.train.packs.plan import IMAGE, Tokens
from dart_cli.train.packs.pointers import (
    PointerRows,
    drawn_tokens,
    pointer_fault,
    pointer_rows,
)

_NONE = np.zeros(0)

Grid = tuple[int, int, int]
"""Time, rows and columns of an image, in patches."""


@dataclass(frozen=True)
class Pack:
    """One forward pass, and its samples' completion tokens."""

    inputs: PackedInputs
    features: ImageFeatures | None  # of `inputs.images`; None where the tower is in the pass
    rows: torch.Tensor  # [N], int64, the token of the pack after which each is predicted
    token_ids: torch.Tensor  # [N], int64
    behaviour_logprobs: torch.Tensor  # [N], float64, nats; 0 where unknown
    unknown: torch.Tensor  # [N], bool: of a demonstration, whose behaviour policy is unknown
    advantages: torch.Tensor  # [N], float64
    weights: torch.Tensor
    """[N], float64, what each weighs in the loss, before the division; 0 where it was not drawn."""
    versions: torch.Tensor
    """[N], int64, the version that sampled a token; -1 where it is unknown, or the token was sampled
    after a weight swap, on keys and values of the old weights."""
    samples: tuple[Sample, ...]  # whose tokens these are, in order
    pointers: PointerRows | None = None  # None where none of them points

    @property
    def drawn(self) -> torch.Tensor:
        """[N], bool: False of the tokens that a pointer forces without drawing a patch."""
        if self.pointers is None:
            return torch.ones_like(self.token_ids, dtype=torch.bool)
        return self.pointers.drawn

    @property
    def lengths(self) -> list[int]:
        """Completion tokens of each sample."""
        return [len(sample) for sample in self.samples]


# --- what is refused ----------------------------------------------------------------------------


def check(batch: Batch, policy: LoadedPolicy) -> None:
    """Refuse a batch that cannot be trained on. Raises ProtocolError naming sample and cause."""
    vocabulary = int(policy.model.get_input_embeddings().weight.shape[0])
    never = np.zeros(vocabulary, dtype=bool)
    never[list(policy.absent_token_ids)] = True
    sizes = image_sizes(batch, policy)
    chains = [_chain_fault(chain, vocabulary, policy, sizes) for chain in batch.chains]
    for sample in batch.samples:
        cause = _fault(sample, batch, policy) or chains[sample.chain]
        if not cause and never[ids(batch.completion(sample))].any():
            cause = "its completion holds a token that is never sampled"
        cause = cause or _image_fault(sample, batch, policy, sizes)
        if cause or (cause := pointer_fault(batch, sample, policy, sizes)):
            raise ProtocolError(
                f"batch {batch.batch_id}, {sample.trajectory_id} step {sample.step}: {cause}; "
                "was it sampled with this model?"
            )


def image_sizes(batch: Batch, policy: LoadedPolicy) -> dict[str, int]:
    """Tokens of each image, by content hash. Raises EngineError for one that does not decode."""
    shown = {name for chain in batch.chains for name in chain.image_hashes}
    return {
        name: policy.images.token_count(batch.images[name], name)
        for name in shown
        if name in batch.images
    }


def _fault(sample: Sample, batch: Batch, policy: LoadedPolicy) -> str:
    """What is wrong with a sample but for its tokens; empty if nothing is."""
    if not sample.chain < len(batch.chains):
        return f"chain {sample.chain} is missing"
    chain = batch.chains[sample.chain]
    if not 0 < sample.start < sample.end:
        return "its prompt or completion is empty"
    if sample.end > len(chain.token_ids) or sample.images > len(chain.image_hashes):
        return "its chain ends before it"
    if len(sample.behaviour_logprobs) not in (0, len(sample)):
        return f"{len(sample)} tokens, {len(sample.behaviour_logprobs)} log-probabilities"
    if sample.end > policy.max_positions:
        return f"{sample.end} tokens, the model has {policy.max_positions} positions"
    numbers = np.frombuffer(sample.behaviour_logprobs) if sample.behaviour_logprobs else _NONE
    if not (np.isfinite(numbers).all() and isfinite(sample.advantage) and isfinite(sample.weight)):
        return "a log-probability, advantage or weight is not finite"
    return ""


def _chain_fault(
    chain: Chain, vocabulary: int, policy: LoadedPolicy, sizes: Mapping[str, int]
) -> str:
    """What is wrong with the tokens and images of a chain."""
    missing = [name for name in chain.image_hashes if name not in sizes]
    if missing:
        return f"image {missing[0]} is missing"
    token_ids = ids(chain.token_ids)
    if len(token_ids) and not 0 <= token_ids.min() <= token_ids.max() < vocabulary:
        return "a token id is not in the vocabulary"
    places = np.flatnonzero(token_ids == policy.image_token_id)
    needed = sum(sizes[name] for name in chain.image_hashes)
    if len(places) != needed:
        return f"{len(places)} image placeholders, its images need {needed}"
    firsts = _firsts(places, [sizes[name] for name in chain.image_hashes])
    for first, name in zip(firsts, chain.image_hashes, strict=True):
        if (token_ids[first : first + sizes[name]] != policy.image_token_id).any():
            return f"the {sizes[name]} placeholders of an image are not adjacent"
    return ""


def _image_fault(
    sample: Sample, batch: Batch, policy: LoadedPolicy, sizes: Mapping[str, int]
) -> str:
    """Whether the prompt shows as many images as it says, whole."""
    prompt = ids(batch.chains[sample.chain].token_ids)[: sample.start]
    shown = int((prompt == policy.image_token_id).sum())
    needed = sum(sizes[name] for name in batch.image_hashes(sample))
    return "" if shown == needed else f"{shown} image placeholders, its images need {needed}"


# --- chains -------------------------------------------------------------------------------------


def ids(values: IntArray) -> NDArray[np.int32]:
    """The numbers of a packed array, not copied."""
    return np.frombuffer(values, dtype=np.int32)


def cut_chain(chain: Chain, length: int, image_token: int, sizes: Mapping[str, int]) -> Chain:
    """The first `length` tokens, with the images that they show; `sizes` in tokens by content hash."""
    if length == len(chain.token_ids):
        return chain
    token_ids = chain.token_ids[:length]
    left, names = int((ids(token_ids) == image_token).sum()), []
    for name in chain.image_hashes:
        if left > 0:
            names.append(name)
            left -= sizes[name]
    return chain.model_copy(update={"token_ids": token_ids, "image_hashes": names})


def tokens_of(
    chain: Chain, image_token: int, numbers: Mapping[str, int], sizes: Mapping[str, int]
) -> Tokens:
    """The chain as the plan reads it: each image by its number.

    `numbers` and `sizes` are those of images by content hash: any number, and tokens.
    """
    token_ids = ids(chain.token_ids)
    read = token_ids.astype(np.uint32)
    counts = [sizes[name] for name in chain.image_hashes]
    images = np.array([IMAGE + numbers[name] for name in chain.image_hashes], dtype=np.uint32)
    read[token_ids == image_token] = images.repeat(counts)
    return read


def rope_positions(
    token_ids: NDArray[np.int32], grids: Sequence[Grid], image_token: int, merge: int
) -> NDArray[np.int64]:
    """Positions [3, L] of a chain in Qwen's multi-modal RoPE (arXiv 2409.12191, 2.1).

    The same as policy.forward.rope_positions, without a loop over tokens.
    """
    positions = np.empty((3, len(token_ids)), dtype=np.int64)
    places = np.flatnonzero(token_ids == image_token)
    counts = [rows * columns // merge**2 for _, rows, columns in grids]
    at = position = 0
    for first, count, (_, rows, columns) in zip(
        _firsts(places, counts), counts, grids, strict=True
    ):
        positions[:, at:first] = np.arange(position, position + first - at)
        position += first - at
        rows, columns = rows // merge, columns // merge
        positions[0, first : first + count] = position
        positions[1, first : first + count] = position + np.arange(rows).repeat(columns)
        positions[2, first : first + count] = position + np.tile(np.arange(columns), rows)
        position += max(rows, columns)
        at = first + count
    positions[:, at:] = np.arange(position, position + len(token_ids) - at)
    return positions


def _firsts(places: NDArray[np.intp], counts: Sequence[int]) -> list[int]:
    """Where each image begins, of the places of all placeholders."""
    return [int(places[index]) for index in np.cumsum([0, *counts])[: len(counts)]]


# --- packs --------------------------------------------------------------------------------------


class PackMaker:
    """Makes the packs of a rank's part; `token_weights` [S] are of its samples."""

    def __init__(
        self, part: PackedBatch, token_weights: Sequence[float], policy: LoadedPolicy
    ) -> None:
        self._batch = part.batch
        self._tables = [_table(nodes.nodes, 4) for nodes in part.packs]
        self._ends = [{row[0]: row[1] for row in _table(nodes.ends, 2)} for nodes in part.packs]
        self._weights = token_weights
        self._policy = policy
        self._sizes = image_sizes(part.batch, policy)
        self._of_chain: dict[int, list[int]] = {}  # samples
        for index, sample in enumerate(part.batch.samples):
            self._of_chain.setdefault(sample.chain, []).append(index)

    def __len__(self) -> int:
        return len(self._tables)

    def shown(self, number: int) -> list[str]:
        """Content hashes of the distinct images of a pack."""
        return list(dict.fromkeys(self._shown_in_order(number)))

    def make(
        self,
        number: int,
        images: Mapping[str, PreparedImage],
        features: ImageFeatures | None = None,
    ) -> Pack:
        """A pack. `images` are those of `shown`, in its order, as are `features` where given."""
        table = self._tables[number]
        starts = np.cumsum([0, *(end - begin for _, _, begin, end in table)])
        chains = {chain for _, chain, _, _ in table}
        ends = {chain: max(end for _, c, _, end in table if c == chain) for chain in chains}
        tokens = {chain: self._tokens(chain)[: ends[chain]] for chain in chains}
        positions = {
            chain: rope_positions(
                tokens[chain],
                [images[name].grid for _, name in self._images_of(chain, ends[chain])],
                self._policy.image_token_id,
                self._policy.images.merge,
            )
            for chain in chains
        }
        place = {name: index for index, name in enumerate(images)}
        inputs = PackedInputs(
            input_ids=_tensor(
                np.concatenate([tokens[chain][begin:end] for _, chain, begin, end in table])
            ),
            position_ids=_tensor(
                np.concatenate([positions[chain][:, b:e] for _, chain, b, e in table], axis=1)
            ),
            layout=PackLayout(tuple(starts.tolist()), tuple(parent for parent, *_ in table)),
            images=tuple(images.values()),
            shown=tuple(place[name] for name in self._shown_in_order(number)),
        )
        return self._scored(inputs, features, number, starts, place)

    def _scored(
        self,
        inputs: PackedInputs,
        features: ImageFeatures | None,
        number: int,
        starts: NDArray[np.intp],
        place: Mapping[str, int],
    ) -> Pack:
        """The pack with its samples' tokens; `place` is the index of an image by its content hash."""
        chosen = sorted(
            index for chain in self._ends[number] for index in self._of_chain.get(chain, [])
        )
        samples = [self._batch.samples[index] for index in chosen]
        lengths = [len(sample) for sample in samples]
        places = {chain: self._places(number, chain, starts) for chain in self._ends[number]}

        def spread(values: Sequence[float]) -> torch.Tensor:
            return torch.from_numpy(np.repeat(np.array(values, dtype=np.float64), lengths))

        def joined(parts: Sequence[NDArray[np.signedinteger]]) -> torch.Tensor:
            return _tensor(np.concatenate(parts) if parts else np.zeros(0))

        known = [
            np.frombuffer(sample.behaviour_logprobs) if sample.behaviour_logprobs
            else np.zeros(len(sample))
            for sample in samples
        ]  # fmt: skip
        weights = spread([self._weights[index] for index in chosen])
        pointers = pointer_rows(self._batch, samples, self._policy, place)
        if pointers is not None:
            weights = weights.where(pointers.drawn, 0.0)
        return Pack(
            inputs=inputs,
            features=features,
            rows=joined([places[s.chain][s.start - 1 : s.end - 1] for s in samples]),
            token_ids=joined([self._tokens(s.chain)[s.start : s.end] for s in samples]),
            behaviour_logprobs=torch.from_numpy(np.concatenate([np.zeros(0), *known])),
            unknown=spread([not sample.behaviour_logprobs for sample in samples]).bool(),
            advantages=spread([sample.advantage for sample in samples]),
            weights=weights,
            versions=joined([_versions(sample) for sample in samples]),
            samples=tuple(samples),
            pointers=pointers,
        )

    def _tokens(self, chain: int) -> NDArray[np.int32]:
        return ids(self._batch.chains[chain].token_ids)

    def _places(self, number: int, chain: int, starts: NDArray[np.intp]) -> NDArray[np.int64]:
        """Where in the pack each token of a chain is, along its path."""
        table, node = self._tables[number], self._ends[number][chain]
        found = np.empty(table[node][3], dtype=np.int64)
        while node >= 0:
            parent, _, begin, end = table[node]
            found[begin:end] = np.arange(starts[node], starts[node] + end - begin)
            node = parent
        return found

    def _images_of(self, chain: int, length: int) -> list[tuple[int, str]]:
        """(first placeholder, content hash) of the images in the first tokens of a chain."""
        places = np.flatnonzero(self._tokens(chain)[:length] == self._policy.image_token_id)
        found, at = [], 0
        for name in self._batch.chains[chain].image_hashes:
            if at < len(places):
                found.append((int(places[at]), name))
                at += self._sizes[name]
        return found

    def _shown_in_order(self, number: int) -> list[str]:
        return [
            name
            for _, chain, begin, end in self._tables[number]
            for first, name in self._images_of(chain, end)
            if first >= begin
        ]


def _table(values: IntArray, columns: int) -> list[list[int]]:
    rows: list[list[int]] = ids(values).reshape(-1, columns).tolist()
    return rows


def _tensor(values: NDArray[np.generic]) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64))


def _versions(sample: Sample) -> NDArray[np.int64]:
    """The version that alone gave each completion token its log-probability, [A]; -1 where none did.

    Tokens after a swap in flight are sampled by the new weights on the cache that the old ones
    left, which no single version reproduces; tokens of no span belong to no version.
    """
    versions = np.full(len(sample), -1, dtype=np.int64)
    if sample.version_spans and sample.version_spans[0].start == 0:
        versions[: sample.version_spans[0].end] = sample.version_spans[0].version
    return versions


# --- what a token weighs ------------------------------------------------------------------------


def trajectory_of(sample: Sample) -> tuple[str, str]:
    """Which trajectory of the batch a sample is of: its group's id, and its own."""
    return sample.group_id, sample.trajectory_id


def batch_shares(batch: Batch, normalise: Normalise, pad: int | None = None) -> LossShares:
    """The weight of each token in the batch's loss; samples of weight 0 count nowhere, nor does `pad`."""
    return loss_shares(
        (
            (trajectory_of(sample), drawn_tokens(batch, sample, pad))
            for sample in batch.samples
            if sample.weight != 0
        ),
        normalise,
    )


def completion_tokens(batch: Batch, pad: int | None = None) -> int:
    """How many tokens the batch's loss is over."""
    return sum(drawn_tokens(batch, each, pad) for each in batch.samples if each.weight != 0)
