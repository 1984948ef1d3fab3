"""Turns encoded screenshots into model input, with exactly the values of the Hugging Face image processor.

    ImagePreparer.prepare      decodes a screenshot into pixels in the order of patches, and caches the result
    ImagePreparer.token_count  counts the placeholder tokens of a screenshot, from its header alone
    PixelTable                 turns pixels into patches, on any device

The processor scales and normalises each byte independently, so a table of 256 values per channel replaces it.
The processor itself computes the table, which makes this faster way exact. Screenshots are kept and sent as
bytes: their patches are float32 and hold each frame twice, which is eight times as much.
"""

from __future__ import annotations

import contextlib
import io
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from transformers import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from bus.errors import PromptError
from dart_cli.config.model_folder import Screens
from envs.contract.blobs import content_hash
from envs.contract.screenshots import BROKEN, as_seen, seen_size


@dataclass(frozen=True, eq=False)
class PixelTable:
    """The image processor's output for each value of a pixel."""

    values: torch.Tensor  # [channels, 256], float32, for each value of a byte
    frames: int  # temporal slots of a patch; a screen fills all of them

    def patches(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return patches [N, channels * frames * patch²], float32, of pixels [N, channels * patch²], uint8.

        They are bit for bit those of the processor, and on the device of `pixels`.
        """
        channels = len(self.values)
        values = self.values.to(pixels.device)
        ordered = pixels.reshape(len(pixels), channels, -1)  # [N, channels, patch * patch]
        patches = values.new_empty(len(pixels), channels, self.frames, ordered.shape[2])
        for channel in range(channels):
            index = ordered[:, channel].int()
            scaled = values[channel].index_select(0, index.flatten()).view_as(index)
            patches[:, channel] = scaled[:, None]
        return patches.flatten(1)


@dataclass(frozen=True, eq=False)
class PreparedImage:
    """One screenshot, cut into patches in the order in which the vision tower reads them."""

    key: str  # content hash of the encoded bytes
    pixels: torch.Tensor  # [patches, channels * patch * patch], uint8
    grid: tuple[int, int, int]  # time, rows, columns, in patches
    tokens: int  # placeholders that it takes in a prompt
    table: PixelTable  # of the model's image processor

    @property
    def patches(self) -> torch.Tensor:
        """The input of the vision tower [patches, channels * frames * patch²], float32, computed anew."""
        return self.table.patches(self.pixels)


def patches_of(images: Sequence[PreparedImage], device: torch.device) -> torch.Tensor:
    """Return the patches of images [I >= 1] of one model, one image after another, computed on `device`."""
    return images[0].table.patches(torch.cat([image.pixels for image in images]).to(device))


def with_hashes(images: Sequence[bytes], hashes: Sequence[str]) -> list[tuple[bytes, str]]:
    """Return each image [I] with its content hash [I], or with "" if `hashes` is empty.

    Raises PromptError if there are hashes, but not one for each image.
    """
    if hashes and len(hashes) != len(images):
        raise PromptError(f"{len(images)} screenshots come with {len(hashes)} content hashes")
    return list(zip(images, hashes or [""] * len(images), strict=True))


class ImagePreparer:
    """Turns encoded screenshots into pixels by patch. Thread-safe.

    A prepared image is found again by its content hash as long as any caller holds it. Beside that, a cache
    of at most `cache_bytes` keeps the recent ones alive. Preparing a 1280x720 screenshot takes some 40 ms and
    2.7 MiB, a 1920x1080 one 95 ms and 6.0 MiB.
    """

    def __init__(self, processor: Qwen2VLImageProcessorPil, cache_bytes: int = 256 * 2**20) -> None:
        self.processor = processor
        self.cache_bytes = cache_bytes
        self.patch = int(processor.patch_size)
        self.merge = int(processor.merge_size)
        self.temporal = int(processor.temporal_patch_size)
        self.factor = self.patch * self.merge  # pixels; a screen's sides are multiples of it
        self.bounds = _pixel_bounds(processor)
        self.table = PixelTable(torch.from_numpy(_byte_table(processor)), self.temporal)
        self._alive: WeakValueDictionary[str, PreparedImage] = WeakValueDictionary()
        self._cache: OrderedDict[str, PreparedImage] = OrderedDict()  # least recently used first
        self._cached_bytes = 0
        self._lock = threading.Lock()

    @property
    def screens(self) -> Screens:
        """The bounds and the factor with which screenshots are resized."""
        return Screens(self.factor, *self.bounds)

    def prepares_as(self, other: ImagePreparer) -> bool:
        """Return True if both turn each screenshot into the same patches."""
        sizes = [(each.patch, each.merge, each.temporal, each.bounds) for each in (self, other)]
        ways = [
            (int(each.processor.resample), each.table.values.tolist()) for each in (self, other)
        ]
        return sizes[0] == sizes[1] and ways[0] == ways[1]

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height in pixels to which a `width` x `height` screenshot is resized."""
        rows, columns = smart_resize(
            height,
            width,
            factor=self.factor,
            min_pixels=self.bounds[0],
            max_pixels=self.bounds[1],
        )
        return columns, rows

    def token_count(self, encoded: bytes, key: str = "") -> int:
        """Return the number of placeholder tokens of a screenshot.

        `key` is the screenshot's content hash, computed if empty. Raises PromptError if `encoded` is not an
        image.
        """
        with self._lock:
            prepared = self._alive.get(key or content_hash(encoded))
        if prepared is not None:
            return prepared.tokens
        with _open(encoded) as image, _as_prompt_error(encoded):
            width, height = self.resized(*seen_size(image))
        return (width // self.patch // self.merge) * (height // self.patch // self.merge)

    def prepare(self, encoded: bytes, key: str = "") -> PreparedImage:
        """Return a screenshot's pixels by patch, from the cache if it was prepared before.

        `key` is its content hash. It is computed if empty, and checked if the screenshot is new. Raises
        PromptError if `encoded` is not an image, or has another hash than `key`.
        """
        computed = "" if key else content_hash(encoded)
        key = key or computed
        with self._lock:
            prepared = self._alive.get(key)
        if prepared is None:
            if key != (computed or content_hash(encoded)):
                raise PromptError(
                    f"a screenshot of {len(encoded)} bytes has another content hash than {key}"
                )
            prepared = self._prepare(key, encoded)
        with self._lock:
            if key not in self._cache:
                self._alive[key] = self._cache[key] = prepared
                self._cached_bytes += _size(prepared)
            self._cache.move_to_end(key)
            while self._cached_bytes > self.cache_bytes and len(self._cache) > 1:
                self._cached_bytes -= _size(self._cache.popitem(last=False)[1])
        return prepared

    def _prepare(self, key: str, encoded: bytes) -> PreparedImage:
        with _open(encoded) as opened, _as_prompt_error(encoded):
            return self.of_image(key, as_seen(opened))

    def of_image(self, key: str, image: Image.Image) -> PreparedImage:
        """Return the pixels by patch of a decoded image that `as_seen` has returned; `key` names its content.

        Raises ValueError for a strip that the processor refuses.
        """
        image = image.convert("RGB")
        size = self.resized(*image.size)
        if size != image.size:
            image = image.resize(size, resample=Image.Resampling(int(self.processor.resample)))
        pixels = np.asarray(image)  # [height, width, 3], bytes
        rows, columns = size[1] // self.patch, size[0] // self.patch
        merge, patch = self.merge, self.patch
        blocks = pixels.reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
        ordered = blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, -1)
        return PreparedImage(
            key=key,
            pixels=torch.from_numpy(ordered),
            grid=(1, rows, columns),
            tokens=(rows // merge) * (columns // merge),
            table=self.table,
        )


def _pixel_bounds(processor: Qwen2VLImageProcessorPil) -> tuple[int, int]:
    """Return the fewest and the most pixels of a resized screenshot, under either pair of names in use.

    Raises ValueError if the preprocessor has neither pair.
    """
    size = processor.size
    fewest, most = size.shortest_edge or size.min_pixels, size.longest_edge or size.max_pixels
    if not fewest or not most:
        raise ValueError(
            "size names neither shortest_edge and longest_edge nor min_ and max_pixels"
        )
    return int(fewest), int(most)


def _byte_table(processor: Qwen2VLImageProcessorPil) -> NDArray[np.float32]:
    """Return the processor's output for each channel and value of a byte, [3, 256]."""
    ramp = np.repeat(np.arange(256, dtype=np.uint8)[None, :], 3, axis=0)[:, None, :]  # [3, 1, 256]
    values = ramp
    if processor.do_rescale:
        values = processor.rescale(values, processor.rescale_factor)
    if processor.do_normalize:
        values = processor.normalize(values, processor.image_mean, processor.image_std)
    return np.asarray(values, dtype=np.float32).reshape(3, 256)


def _open(encoded: bytes) -> Image.Image:
    """Return an image that is open but not decoded. Raises PromptError if the bytes are no image."""
    try:
        with _as_prompt_error(encoded):
            return Image.open(io.BytesIO(encoded))
    except UnidentifiedImageError:
        raise PromptError(
            f"a screenshot of {len(encoded)} bytes is no PNG, JPEG or WebP image; "
            "the environment must send encoded images"
        ) from None


@contextlib.contextmanager
def _as_prompt_error(encoded: bytes) -> Iterator[None]:
    """Raise the errors of a broken image as PromptError, except UnidentifiedImageError (see `_open`)."""
    try:
        yield
    except UnidentifiedImageError:
        raise
    except BROKEN as error:  # among them the ValueError of smart_resize, e.g. for 1x300
        raise PromptError(
            f"a screenshot of {len(encoded)} bytes is cut off, broken or of impossible size "
            f"({error}); the environment must send whole images"
        ) from None


def _size(image: PreparedImage) -> int:
    return image.pixels.numel()
