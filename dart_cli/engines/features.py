"""Cache of the vision tower's output for recent screens: a repeated screen is not encoded again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch

from dart_cli.policy.forward import ImageFeatures, ModelInputs, image_features
from dart_cli.policy.images import PreparedImage
from dart_cli.policy.model import LoadedPolicy


class FeatureCache:
    """Vision features of recent screens under the present weights, bounded in bytes; evicts the oldest.

    Used by one thread alone.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._cached_bytes = 0
        self._entries: OrderedDict[str, tuple[torch.Tensor, ...]] = OrderedDict()

    def clear(self) -> None:
        """Forget everything: the weights have changed."""
        self._entries.clear()
        self._cached_bytes = 0

    def of(self, policy: LoadedPolicy, inputs: ModelInputs) -> ImageFeatures | None:
        """Features of `inputs.images`; None where there are none."""
        return self.of_images(policy, inputs.images) if inputs.images else None

    def of_images(self, policy: LoadedPolicy, images: Sequence[PreparedImage]) -> ImageFeatures:
        """Features of images [I >= 1], computed in one batch for those not in the cache."""
        new = [image for image in images if image.key not in self._entries]
        fresh: dict[str, tuple[torch.Tensor, ...]] = {}
        if new:
            computed = image_features(policy.model, new)
            for index, image in enumerate(new):
                fresh[image.key] = (
                    computed.embeds[index].clone(),
                    *(level[index].clone() for level in computed.deepstack),
                )
        rows = [
            fresh[image.key] if image.key in fresh else self._entries[image.key] for image in images
        ]
        for image, row in zip(images, rows, strict=True):
            if image.key not in self._entries:
                self._entries[image.key] = row
                self._cached_bytes += _nbytes(row)
            self._entries.move_to_end(image.key)
        while self._cached_bytes > self._limit_bytes and self._entries:
            self._cached_bytes -= _nbytes(self._entries.popitem(last=False)[1])
        levels = len(rows[0]) - 1
        return ImageFeatures(
            embeds=tuple(row[0] for row in rows),
            deepstack=tuple(tuple(row[level + 1] for row in rows) for level in range(levels)),
        )


def _nbytes(tensors: tuple[torch.Tensor, ...]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
