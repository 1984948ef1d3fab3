"""A rank's part of a batch to tensors: packs, one after another, their screens prepared ahead.

    Pack        one forward pass, and where its samples' completion tokens are predicted
    PackMaker   makes the packs of a rank's part
    PackFeed    iterates over them; prepares screens in threads, features of a frozen tower once

A pack is trees of tokens (plan.py): what a group shares stands once, and each branch sees its path
alone, with the positions that it has there. So a sample's numbers are those that it has alone:
tests/train/test_packs.py compares them.

A full-HD screen takes 0.1 s to prepare and 6 MiB, and its features 19 MB (bfloat16). While one pack is in
the model, threads prepare what the next one shows. Where the vision tower is frozen, a screen goes
through it once in an update, however many packs and models show it: its features are held in main memory
until the last pack that does, since those of 1,440 screens would take 28 GB of a GPU. A trained tower is
part of each pack's own pass.

Axes: `[L]` tokens of a pack or a chain; `[N]` completion tokens of a pack's samples, one sample after
another; `[M]` patches that pointers drew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from bus.messages import Batch, Sample
from bus.packed import IntArray
from bus.ranks import PackedBatch
from dart_cli.policy.forward import ImageFeatures, image_features, rope_positions
from dart_cli.policy.images import PreparedImage
from dart_cli.policy.loader import LoadedPolicy
from dart_cli.policy.packed import PackedInputs, PackLayout
from dart_cli.train.packs.share import ids, image_sizes, pad_of

MOST_PATCHES = 1 << 17
"""Patches of screens that go through a frozen tower at once: a dozen of full HD."""

WORKERS = 4
"""Threads of each rank that prepare screens ahead of the model."""


@dataclass(frozen=True)
class PointerRows:
    """Of the pack's completion tokens [N] those of pointers; `[M]` patches."""

    drawn: torch.Tensor  # [N], bool: False for pads
    ends: torch.Tensor  # [M], int64, index into the N tokens
    patches: torch.Tensor  # [M], int64, the cell that was drawn
    screens: torch.Tensor  # [M], int64, which of the pack's distinct images it is a cell of


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
        """Return a pack. `images` are those of `shown`, in its order, as are `features` where given."""
        table = self._tables[number]
        starts = np.cumsum([0, *(end - begin for _, _, begin, end in table)])
        chains = {chain for _, chain, _, _ in table}
        ends = {chain: max(end for _, c, _, end in table if c == chain) for chain in chains}
        tokens = {chain: self._tokens(chain)[: ends[chain]] for chain in chains}
        positions = {
            chain: rope_positions(
                tokens[chain].tolist(),
                [images[name].grid for _, name in self._images_of(chain, ends[chain])],
                self._policy.image_token_id,
                self._policy.images.merge,
            )[0]
            for chain in chains
        }
        place = {name: index for index, name in enumerate(images)}
        inputs = PackedInputs(
            input_ids=_tensor(
                np.concatenate([tokens[chain][begin:end] for _, chain, begin, end in table])
            ),
            position_ids=torch.cat([positions[chain][:, b:e] for _, chain, b, e in table], dim=1),
            layout=PackLayout(tuple(starts.tolist()), tuple(parent for parent, *_ in table)),
            images=tuple(images.values()),
            image_order=tuple(place[name] for name in self._shown_in_order(number)),
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
        """Return the pack with its samples' tokens; `place` is the index of an image by its content hash."""
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
        pointers = _pointer_rows(self._batch, samples, self._policy, place)
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
    """Return the version that alone gave each completion token its log-probability, [A]; -1 where none did.

    Tokens after a swap in flight are sampled by the new weights on the cache that the old ones
    left, which no single version reproduces; tokens of no span belong to no version.
    """
    versions = np.full(len(sample), -1, dtype=np.int64)
    if sample.version_spans and sample.version_spans[0].start == 0:
        versions[: sample.version_spans[0].end] = sample.version_spans[0].version
    return versions


def _pointer_rows(
    batch: Batch, samples: Sequence[Sample], policy: LoadedPolicy, place: Mapping[str, int]
) -> PointerRows | None:
    """Return the pointers of `samples`, one after another; `place` is the pack's index of an image by its hash."""
    pad = pad_of(policy)
    if pad is None:
        return None
    drawn: list[bool] = []
    ends, patches, screens = [], [], []
    for sample in samples:
        begin = len(drawn)
        drawn += [token != pad for token in batch.completion(sample)]
        for at, patch in enumerate(sample.patches):
            if patch >= 0:
                ends.append(begin + at)
                patches.append(patch)
                screens.append(place[batch.image_hashes(sample)[-1]])
    if all(drawn):
        return None
    return PointerRows(
        torch.tensor(drawn, dtype=torch.bool),
        *(torch.tensor(values, dtype=torch.int64) for values in (ends, patches, screens)),
    )


# --- one after another ---------------------------------------------------------------------------


class PackFeed:
    """Packs with their screens. A context manager: its threads end with it."""

    def __init__(
        self,
        part: PackedBatch,
        token_weights: Sequence[float],
        policy: LoadedPolicy,
    ) -> None:
        self._policy = policy
        self._images = part.batch.images
        self._maker = PackMaker(part, token_weights, policy)
        self._shown = [self._maker.shown(number) for number in range(len(self._maker))]
        inner: Any = policy.model.model
        self._is_frozen = not any(each.requires_grad for each in inner.visual.parameters())
        self._left = Counter(name for names in self._shown for name in names)
        self._features: dict[str, _Features] = {}
        self._waiting: dict[str, Future[PreparedImage]] = {}
        self._pool = ThreadPoolExecutor(WORKERS, "screens")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def __iter__(self) -> Iterator[Pack]:
        """One pass over the packs. Raises EngineError for a screen that does not decode."""
        for number in range(len(self._maker)):
            self._request(number)
            self._request(number + 1)
            yield self._pack(number)

    def _request(self, number: int) -> None:
        """Have the screens of a pack prepared that are not."""
        for name in self._shown[number] if number < len(self._shown) else []:
            if name not in self._features and name not in self._waiting:
                self._waiting[name] = self._pool.submit(
                    self._policy.images.prepare, self._images[name], name
                )

    def _pack(self, number: int) -> Pack:
        names = self._shown[number]
        new = [name for name in names if name not in self._features]
        prepared = {name: self._waiting[name].result() for name in new}
        if not self._is_frozen:
            self._let_go(number)
            return self._maker.make(number, prepared)
        self._see(prepared)
        held = {name: self._features[name] for name in names}
        self._let_go(number)
        levels = max((len(each.deepstack) for each in held.values()), default=0)
        device = self._policy.device
        features = ImageFeatures(
            embeds=tuple(each.embeds.to(device) for each in held.values()),
            deepstack=tuple(
                tuple(each.deepstack[level].to(device) for each in held.values())
                for level in range(levels)
            ),
        )
        return self._maker.make(number, {name: each.image for name, each in held.items()}, features)

    def _let_go(self, number: int) -> None:
        """Forget the screens that no later pack shows, and prepared ones that the next does not."""
        following = self._shown[number + 1] if number + 1 < len(self._shown) else []
        self._left.subtract(self._shown[number])
        for name in self._shown[number]:
            if self._is_frozen or name not in following:
                self._waiting.pop(name, None)
            if not self._left[name]:
                self._features.pop(name, None)

    @torch.no_grad()
    def _see(self, prepared: dict[str, PreparedImage]) -> None:
        """Screens through the frozen tower, some at a time."""
        part: list[PreparedImage] = []
        patches = 0
        for image in [*prepared.values(), None]:
            if part and (image is None or patches + len(image.pixels) > MOST_PATCHES):
                found = image_features(self._policy.model, part)
                for index, each in enumerate(part):
                    self._features[each.key] = _Features(each, found, index)
                part, patches = [], 0
            if image is not None:
                part.append(image)
                patches += len(image.pixels)


class _Features:
    """What a frozen tower makes of one screen, in main memory."""

    def __init__(self, image: PreparedImage, found: ImageFeatures, index: int) -> None:
        # Copies: a view would hold the features of all screens that went through together.
        self.image = replace(image, pixels=image.pixels.new_empty((0, *image.pixels.shape[1:])))
        self.embeds = found.embeds[index].to("cpu", copy=True)
        self.deepstack = tuple(level[index].to("cpu", copy=True) for level in found.deepstack)
