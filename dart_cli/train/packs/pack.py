"""A rank's part of a batch as tensors: packs, one after another, their screens prepared ahead.

    Pack        the input of one forward pass, and where its samples' completion tokens are predicted
    PackMaker   makes the packs of a rank's part
    PackFeed    iterates over packs; prepares screens in threads, and features of a frozen tower once

A pack is a set of trees of tokens (plan.py): a prefix that several chains share is computed once. Each
branch attends only to its own path, and has the positions that it has there. So the log-probabilities of a
sample are the same as when it is computed alone; tests/train/test_packs.py compares them.

A full-HD screen takes 0.1 s to prepare and 6 MiB, and its features take 19 MB (bfloat16). While one pack is
in the model, threads prepare the screens of the next one. If the vision tower is frozen, a screen goes
through it once in an update, however many packs and models show it: its features stay in main memory until
the last pack that shows it, since the features of 1,440 screens would take 28 GB of a GPU. A trained tower is
part of each pack's own pass.

Axes: `[L]` tokens of a pack or a chain; `[N]` completion tokens of a pack's samples, one sample after
another; `[M]` patches that pointers selected.
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
from dart_cli.policy.experts import Choices, Replay, RoutingShape, routing_array
from dart_cli.policy.forward import ImageFeatures, image_features, rope_positions
from dart_cli.policy.images import PreparedImage
from dart_cli.policy.loader import LoadedPolicy
from dart_cli.policy.packed import PackedInputs, PackLayout
from dart_cli.train.packs.batch_tokens import image_sizes, int32_array, pad_of

MOST_PATCHES = 1 << 17
"""Most patches that go through a frozen tower at once: a dozen screens of full HD."""

WORKERS = 4
"""Threads of each rank that prepare screens ahead of the model."""


@dataclass(frozen=True)
class PointerRows:
    """The pointers among a pack's completion tokens [N], and the patches [M] that they selected."""

    is_drawn: torch.Tensor  # [N], bool: False for pads
    ends: torch.Tensor  # [M], int64, index into the N tokens
    patches: torch.Tensor  # [M], int64, the cell that was drawn
    screens: torch.Tensor  # [M], int64, index of the cell's image among the pack's distinct images


@dataclass(frozen=True)
class Pack:
    """The input of one forward pass, and the completion tokens of its samples."""

    inputs: PackedInputs
    features: ImageFeatures | None  # of `inputs.images`; None if the tower is part of the pass
    rows: torch.Tensor  # [N], int64, index of the token of the pack that predicts it
    token_ids: torch.Tensor  # [N], int64
    behaviour_logprobs: torch.Tensor  # [N], float64, nats; 0 if unknown
    unknown: torch.Tensor  # [N], bool: True for a demonstration, whose behaviour policy is unknown
    advantages: torch.Tensor  # [N], float64
    weights: torch.Tensor
    """[N], float64, weight in the loss before the division by its divisor; 0 for tokens that were not
    drawn."""
    versions: torch.Tensor
    """[N], int64, the version that sampled a token. -1 if it is unknown, or if the token was sampled
    after a weight swap, on keys and values of the old weights."""
    samples: tuple[Sample, ...]  # in the order of their tokens
    pointers: PointerRows | None = None  # None if no sample points

    @property
    def is_drawn(self) -> torch.Tensor:
        """[N], bool: False for the tokens that a pointer forces."""
        if self.pointers is None:
            return torch.ones_like(self.token_ids, dtype=torch.bool)
        return self.pointers.is_drawn

    @property
    def lengths(self) -> list[int]:
        """The number of completion tokens of each sample."""
        return [len(sample) for sample in self.samples]


# --- packs --------------------------------------------------------------------------------------


class PackMaker:
    """A maker of the packs of a rank's part; `token_weights` [S] are the weights of its samples' tokens."""

    def __init__(
        self, part: PackedBatch, token_weights: Sequence[float], policy: LoadedPolicy
    ) -> None:
        self._batch = part.batch
        self._tables = [_table(nodes.nodes, 4) for nodes in part.packs]
        self._ends = [{row[0]: row[1] for row in _table(nodes.ends, 2)} for nodes in part.packs]
        self._weights = token_weights
        self._policy = policy
        self._routing = RoutingShape.of(policy.model)
        self._sizes = image_sizes(part.batch, policy)
        self._samples_of_chain: dict[int, list[int]] = {}
        for index, sample in enumerate(part.batch.samples):
            self._samples_of_chain.setdefault(sample.chain, []).append(index)

    def __len__(self) -> int:
        return len(self._tables)

    def image_names(self, number: int) -> list[str]:
        """Return the content hashes of the distinct images of the pack `number`."""
        return list(dict.fromkeys(self._images_in_order(number)))

    def make(
        self,
        number: int,
        images: Mapping[str, PreparedImage],
        features: ImageFeatures | None = None,
    ) -> Pack:
        """Return the pack `number`.

        `images`, and `features` if given, are of the pack's `image_names`, in the same order.
        """
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
        choices = {chain: self._choices(chain) for chain in chains}
        replay = None
        if self._routing is not None and any(each.any() for each in choices.values()):
            replay = Replay(
                np.concatenate([choices[chain][begin:end] for _, chain, begin, end in table])
            )
        inputs = PackedInputs(
            input_ids=_tensor(
                np.concatenate([tokens[chain][begin:end] for _, chain, begin, end in table])
            ),
            position_ids=torch.cat([positions[chain][:, b:e] for _, chain, b, e in table], dim=1),
            layout=PackLayout(tuple(starts.tolist()), tuple(parent for parent, *_ in table)),
            images=tuple(images.values()),
            image_order=tuple(place[name] for name in self._images_in_order(number)),
            replay=replay,
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
        indices = sorted(
            index for chain in self._ends[number] for index in self._samples_of_chain.get(chain, [])
        )
        samples = [self._batch.samples[index] for index in indices]
        lengths = [len(sample) for sample in samples]
        places = {chain: self._places(number, chain, starts) for chain in self._ends[number]}

        def spread(values: Sequence[float]) -> torch.Tensor:
            return torch.from_numpy(np.repeat(np.array(values, dtype=np.float64), lengths))

        def joined(parts: Sequence[NDArray[np.signedinteger]]) -> torch.Tensor:
            return _tensor(np.concatenate(parts) if parts else np.zeros(0))

        behaviour = [
            np.frombuffer(sample.behaviour_logprobs) if sample.behaviour_logprobs
            else np.zeros(len(sample))
            for sample in samples
        ]  # fmt: skip
        weights = spread([self._weights[index] for index in indices])
        pointers = _pointer_rows(self._batch, samples, self._policy, place)
        if pointers is not None:
            weights = weights.where(pointers.is_drawn, 0.0)
        return Pack(
            inputs=inputs,
            features=features,
            rows=joined([places[s.chain][s.start - 1 : s.end - 1] for s in samples]),
            token_ids=joined([self._tokens(s.chain)[s.start : s.end] for s in samples]),
            behaviour_logprobs=torch.from_numpy(np.concatenate([np.zeros(0), *behaviour])),
            unknown=spread([not sample.behaviour_logprobs for sample in samples]).bool(),
            advantages=spread([sample.advantage for sample in samples]),
            weights=weights,
            versions=joined([_versions(sample) for sample in samples]),
            samples=tuple(samples),
            pointers=pointers,
        )

    def _choices(self, chain: int) -> Choices:
        """Return the experts [L, layers, chosen] that the tokens of a chain had; zeros without a record."""
        shape, own = self._routing, self._batch.chains[chain]
        if shape is None:
            return np.zeros((0, 0, 0), dtype=np.uint8)
        if not own.routing:
            sizes = (len(own.token_ids), shape.layers, shape.per_token)
            return np.zeros(sizes, dtype=shape.dtype)
        return routing_array(own.routing, shape)

    def _tokens(self, chain: int) -> NDArray[np.int32]:
        return int32_array(self._batch.chains[chain].token_ids)

    def _places(self, number: int, chain: int, starts: NDArray[np.intp]) -> NDArray[np.int64]:
        """Return the place in the pack of each token of a chain, along its path."""
        table, node = self._tables[number], self._ends[number][chain]
        places = np.empty(table[node][3], dtype=np.int64)
        while node >= 0:
            parent, _, begin, end = table[node]
            places[begin:end] = np.arange(starts[node], starts[node] + end - begin)
            node = parent
        return places

    def _images_of(self, chain: int, length: int) -> list[tuple[int, str]]:
        """Return (first placeholder, content hash) of the images in the first `length` tokens of a chain."""
        places = np.flatnonzero(self._tokens(chain)[:length] == self._policy.image_token_id)
        images, at = [], 0
        for name in self._batch.chains[chain].image_hashes:
            if at < len(places):
                images.append((int(places[at]), name))
                at += self._sizes[name]
        return images

    def _images_in_order(self, number: int) -> list[str]:
        """Return the content hash of each image of a pack, in the order of their tokens."""
        return [
            name
            for _, chain, begin, end in self._tables[number]
            for first, name in self._images_of(chain, end)
            if first >= begin
        ]


def _table(values: IntArray, columns: int) -> list[list[int]]:
    rows: list[list[int]] = int32_array(values).reshape(-1, columns).tolist()
    return rows


def _tensor(values: NDArray[np.generic]) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64))


def _versions(sample: Sample) -> NDArray[np.int64]:
    """Return for each completion token [A] the version that reproduces its log-probability; -1 if none does.

    Tokens after a swap of weights in mid-completion were sampled by the new weights on the cache of the old
    ones, which no single version reproduces. Tokens outside of all spans belong to no version.
    """
    versions = np.full(len(sample), -1, dtype=np.int64)
    if sample.version_spans and sample.version_spans[0].start == 0:
        versions[: sample.version_spans[0].end] = sample.version_spans[0].version
    return versions


def _pointer_rows(
    batch: Batch, samples: Sequence[Sample], policy: LoadedPolicy, place: Mapping[str, int]
) -> PointerRows | None:
    """Return the pointers of `samples`, in order; None if there are none.

    `place` maps the content hash of an image to its index in the pack.
    """
    pad = pad_of(policy)
    if pad is None:
        return None
    is_drawn: list[bool] = []
    ends, patches, screens = [], [], []
    for sample in samples:
        begin = len(is_drawn)
        is_drawn += [token != pad for token in batch.completion(sample)]
        for at, patch in enumerate(sample.patches):
            if patch >= 0:
                ends.append(begin + at)
                patches.append(patch)
                screens.append(place[batch.image_hashes(sample)[-1]])
    if all(is_drawn):
        return None
    return PointerRows(
        is_drawn=torch.tensor(is_drawn, dtype=torch.bool),
        ends=torch.tensor(ends, dtype=torch.int64),
        patches=torch.tensor(patches, dtype=torch.int64),
        screens=torch.tensor(screens, dtype=torch.int64),
    )


# --- one after another ---------------------------------------------------------------------------


class PackFeed:
    """An iterable of the packs of a rank's part. It is a context manager, which ends its threads."""

    def __init__(
        self,
        part: PackedBatch,
        token_weights: Sequence[float],
        policy: LoadedPolicy,
        *,
        keeps_pixels: bool = False,
    ) -> None:
        """With `keeps_pixels` packs have the pixels of their screens beside features of a frozen tower."""
        self._policy = policy
        self._keeps_pixels = keeps_pixels
        self._images = part.batch.images
        self._maker = PackMaker(part, token_weights, policy)
        self._names = [self._maker.image_names(number) for number in range(len(self._maker))]
        inner: Any = policy.model.model
        self._is_frozen = not any(weight.requires_grad for weight in inner.visual.parameters())
        # By image: the number of packs to come that show it.
        self._uses_left = Counter(name for names in self._names for name in names)
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
        """Yield the packs, one after another. Raises EngineError for a screen that does not decode."""
        for number in range(len(self._maker)):
            self._request(number)
            self._request(number + 1)
            yield self._pack(number)

    def _request(self, number: int) -> None:
        """Have threads prepare the screens of a pack that are not prepared yet."""
        for name in self._names[number] if number < len(self._names) else []:
            if name not in self._features and name not in self._waiting:
                self._waiting[name] = self._pool.submit(
                    self._policy.images.prepare, self._images[name], name
                )

    def _pack(self, number: int) -> Pack:
        """Return a pack with its screens, which threads have prepared; free what no later pack needs."""
        names = self._names[number]
        new = [name for name in names if name not in self._features]
        prepared = {name: self._waiting[name].result() for name in new}
        if not self._is_frozen:
            self._free_screens(number)
            return self._maker.make(number, prepared)
        self._compute_features(prepared)
        of_pack = {name: self._features[name] for name in names}
        self._free_screens(number)
        levels = max((len(screen.deepstack) for screen in of_pack.values()), default=0)
        device = self._policy.device
        features = ImageFeatures(
            embeds=tuple(screen.embeds.to(device) for screen in of_pack.values()),
            deepstack=tuple(
                tuple(screen.deepstack[level].to(device) for screen in of_pack.values())
                for level in range(levels)
            ),
        )
        images = {name: screen.image for name, screen in of_pack.items()}
        return self._maker.make(number, images, features)

    def _free_screens(self, number: int) -> None:
        """Free features that no later pack needs, and prepared screens that the next pack does not show."""
        following = self._names[number + 1] if number + 1 < len(self._names) else []
        self._uses_left.subtract(self._names[number])
        for name in self._names[number]:
            if self._is_frozen or name not in following:
                self._waiting.pop(name, None)
            if not self._uses_left[name]:
                self._features.pop(name, None)

    @torch.no_grad()
    def _compute_features(self, prepared: dict[str, PreparedImage]) -> None:
        """Compute features of screens by the frozen tower, up to MOST_PATCHES patches at a time."""
        part: list[PreparedImage] = []
        patches = 0
        for image in [*prepared.values(), None]:
            if part and (image is None or patches + len(image.pixels) > MOST_PATCHES):
                features = image_features(self._policy.model, part)
                for index, screen in enumerate(part):
                    pixels = screen.pixels
                    if not self._keeps_pixels:
                        pixels = pixels.new_empty((0, *pixels.shape[1:]))
                    own = replace(screen, pixels=pixels)
                    self._features[screen.key] = _Features(own, features, index)
                part, patches = [], 0
            if image is not None:
                part.append(image)
                patches += len(image.pixels)


class _Features:
    """The features of one screen from a frozen tower, in main memory."""

    def __init__(self, image: PreparedImage, features: ImageFeatures, index: int) -> None:
        # Copied, since a view would keep the features of all screens that went through together.
        self.image = image
        self.embeds = features.embeds[index].to("cpu", copy=True)
        self.deepstack = tuple(level[index].to("cpu", copy=True) for level in features.deepstack)
