"""The packs of a rank's part, one after another, their screens prepared ahead.

    PackFeed   iterates over packs; prepares screens in threads, features of a frozen tower once

A full-HD screen takes 0.1 s to prepare and 6 MiB, and its features 19 MB (bfloat16). While one pack is in
the model, threads prepare what the next one shows. Where the vision tower is frozen, a screen goes
through it once in an update, however many packs and models show it: its features are held in main memory
until the last pack that does, since those of 1,440 screens would take 28 GB of a GPU. A trained tower is
part of each pack's own pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import torch

from bus.ranks import PackedBatch
from dart_cli.policy.forward import ImageFeatures, image_features
from dart_cli.policy.images import PreparedImage
from dart_cli.policy.model import LoadedPolicy
from dart_cli.train.packs.pack import Pack, PackMaker

MOST_PATCHES = 1 << 17
"""Patches of screens that go through a frozen tower at once: a dozen of full HD."""


WORKERS = 4
"""Threads of each rank that prepare screens ahead of the model: full HD takes 0.1 s a screen."""


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
        inner: Any = self._policy.model.model
        device = next(inner.visual.parameters()).device
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
