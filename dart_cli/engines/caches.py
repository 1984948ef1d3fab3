"""The caches of the transformers engine: keys and values of requests, and features of screens.

    BatchKVCache         the keys and values of the running batch, which grow by one token per row and pass
    PrefixCache          the keys and values of earlier prompts, by digest
    BlockKeys            the digests of one sequence
    kv_bytes_per_token   the size of one token's keys and values
    state_bytes_per_row  the size of one sequence's states in recurrent layers
    empty_cache          a cache without tokens, with the layers that a model has
    FeatureCache         the vision tower's output for recent screens
    vision_digest        a digest of the vision tower in a weight set; features stay valid while it is equal

**The batch.** All layers have the same layout of rows and columns, and every row ends in the same column:

    column      0  1  2  3  4  5  6  7  8
    row 0       .  .  a  b  c  d  e  .  .      length 5
    row 1       .  .  .  .  p  q  r  .  .      length 3
                      ^ start        ^ end

A pass writes one token of each row into column `end` and reads the columns [start, end]. Nothing is copied,
whereas transformers' own cache copies everything for each token. A row that joins is written with its last
token in the last column, and a row that is removed is overwritten by the last row. If there are too few rows
or columns, everything is copied once into a layout with spare columns.

Rows end together, as with padding on the left, because masks by index require it (a sliding window counts
columns). The caller passes the positions that rotate the keys, one per row. Recurrent layers have one state
per row and no columns.

**Earlier prompts.** A block is BLOCK tokens of one sequence. Its digest covers all tokens up to its end and
the content hashes of the screens among them, so a block matches only a sequence that is equal from its first
token on. Sequences that begin alike share blocks, such as the turns of a trajectory, or the first prompt of a
group. This follows vLLM's prefix cache (arXiv 2309.06180, 4.3), except that blocks are copied out instead of
being referred to. Block b is tokens [b * BLOCK, (b + 1) * BLOCK) of one tensor for keys and one for values in
each layer. Block 0 holds zeros, for padding.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from dart_cli.engines.states import StateSnapshots
from dart_cli.policy.delta_net import StateCache
from dart_cli.policy.forward import ImageFeatures, ModelInputs, image_features
from dart_cli.policy.images import PreparedImage
from dart_cli.policy.loader import LoadedPolicy
from dart_cli.policy.state_plan import StateShape
from dart_cli.policy.weight_set import WeightSet, directory_of

SPARE_COLUMNS = 32
"""Spare columns after a copy; an eighth of the columns in use if that is more."""
BLOCK = 16
"""Tokens of a block, as in vLLM. Tokens of a sequence after its last whole block are computed again."""
MANIFEST = "manifest.json"
"""The file with the digests of a weight set (dart_cli/weights/manifest.py)."""
NO_VISION = ""
"""The digest of a set without tensors of the vision tower, such as adapters of the text model."""


# --- the running batch --------------------------------------------------------------------------


class KVShape(NamedTuple):
    """The shape of one token's keys, and of its values, over all layers that have them."""

    layers: int
    heads: int
    width: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> KVShape:
        """Return the shape for `model`."""
        text: Any = model.config.get_text_config(decoder=True)
        queries = int(text.num_attention_heads)
        heads = int(getattr(text, "num_key_value_heads", None) or queries)
        width = int(getattr(text, "head_dim", None) or text.hidden_size // queries)
        recurrent = StateShape.of(model)
        layers = int(text.num_hidden_layers) - len(recurrent.layers if recurrent else ())
        return cls(layers, heads, width)


def kv_bytes_per_token(model: PreTrainedModel) -> int:
    """Return the bytes of one token's keys and values over all layers of `model`."""
    element: int = model.get_input_embeddings().weight.element_size()
    return 2 * math.prod(KVShape.of(model)) * element


def state_bytes_per_row(model: PreTrainedModel) -> int:
    """Return the bytes of one sequence's states in the recurrent layers of `model`; 0 if it has none."""
    shape = StateShape.of(model)
    element: int = model.get_input_embeddings().weight.element_size()
    return shape.nbytes(element) if shape else 0


def empty_cache(model: PreTrainedModel) -> Cache:
    """Return a cache without tokens for `dart_cli.policy.forward.last_hidden`."""
    shape = StateShape.of(model)
    recurrent = shape.layers if shape else ()
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    layers = [StateCache() if index in recurrent else DynamicLayer() for index in range(count)]
    return Cache(layers=layers)


class _CacheLayer(DynamicLayer):  # type: ignore[misc]  # transformers' caches are untyped
    """One layer's keys and values [rows, heads, columns, width]; `owner` has the rows and columns in use."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, owner: BatchKVCache, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values
        self._owner = owner

    def join(self, fresh: DynamicLayer, rows: slice, columns: slice) -> None:
        """Write the keys and values of a prefill into some rows and columns."""
        self.keys[rows, :, columns] = fresh.keys
        self.values[rows, :, columns] = fresh.values

    def copy_rows(self, holes: Sequence[int], moved: Sequence[int], columns: slice) -> None:
        """Copy some columns of the rows `moved` into the rows `holes`."""
        self.keys[holes, :, columns] = self.keys[moved, :, columns]
        self.values[holes, :, columns] = self.values[moved, :, columns]

    def lay_out(self, rows: int, columns: int, used: slice, into: slice) -> None:
        """Copy the columns `used` to the columns `into` of a layout of `rows` and `columns`."""
        before = len(self._owner.lengths)
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros((rows, old.shape[1], columns, old.shape[3]))
            new[:before, :, into] = old[:before, :, used]
            setattr(self, name, new)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one token [rows, heads, 1, width] of each row, and return all columns in use."""
        rows, start, end = len(self._owner.lengths), self._owner.start, self._owner.end
        self.keys[:rows, :, end : end + 1] = key_states
        self.values[:rows, :, end : end + 1] = value_states
        return self.keys[:rows, :, start : end + 1], self.values[:rows, :, start : end + 1]

    def get_seq_length(self) -> int:
        """Return the number of columns in use, from which transformers makes its masks."""
        return self._owner.end - self._owner.start


class BatchKVCache(Cache):  # type: ignore[misc]
    """The keys and values of the running batch; the module's docstring has the layout.

    Rows join and are removed between two passes. A pass is `begin_pass`, the forward pass, `end_pass`. After
    a failure in any of these calls the content is undefined, and `clear` must be called.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.lengths: list[int] = []  # [rows], tokens of each
        self.end = 0
        self._rows = 0  # of the layout, as are the columns
        self._columns = 0

    @property
    def start(self) -> int:
        """The first column in use."""
        return self.end - max(self.lengths, default=0)

    def join(self, fresh: Cache, lengths: Sequence[int]) -> None:
        """Add the rows of a prefill, which are padded on the left and have `lengths` [rows] tokens."""
        before, rows = len(self.lengths), len(self.lengths) + len(lengths)
        longest = max(lengths)
        if not self.layers:
            self._lay_out_like(fresh, rows, longest)
        elif rows > self._rows or longest > self.end:
            self._lay_out(rows, max(longest, *self.lengths))
        columns = slice(self.end - longest, self.end)
        for layer, new in zip(self.layers, fresh.layers, strict=True):
            if isinstance(layer, StateCache):
                layer.join(new.content)
            else:
                layer.join(new, slice(before, rows), columns)
        self.lengths += lengths

    def remove(self, rows: Collection[int]) -> list[int]:
        """Remove `rows`, and return the former index of each remaining row."""
        remaining = len(self.lengths) - len(rows)
        order = list(range(remaining))
        holes = [row for row in sorted(rows) if row < remaining]
        moved = [row for row in range(remaining, len(self.lengths)) if row not in rows]
        for hole, row in zip(holes, moved, strict=True):
            order[hole] = row
        if not remaining:
            self.clear()
            return order
        for layer in self.layers:
            if isinstance(layer, StateCache):
                layer.batch_select_indices(torch.tensor(order).to(layer.device))
            elif holes:
                layer.copy_rows(holes, moved, slice(self.start, self.end))
        self.lengths = [self.lengths[row] for row in order]
        return order

    def clear(self) -> None:
        """Remove all rows and free the memory.

        The sizes of a layout can change the last bits of the results. Because of this call they depend only
        on the present rows and on the rows that shared a batch with them, never on earlier requests.
        """
        self.layers.clear()
        self.lengths.clear()
        self.end = 0

    def begin_pass(self) -> torch.Tensor:
        """Make room for one token of each row, and return the mask [rows, columns in use + 1]."""
        if self.end == self._columns:
            self._lay_out(len(self.lengths), max(self.lengths))
        columns = torch.arange(self.end - self.start + 1)
        padding = max(self.lengths) - torch.tensor(self.lengths)
        return (columns >= padding[:, None]).long()

    def end_pass(self) -> None:
        """End a pass that has written one token of each row."""
        self.end += 1
        self.lengths = [length + 1 for length in self.lengths]

    def _lay_out_like(self, fresh: Cache, rows: int, columns: int) -> None:
        """Make an empty layout with the layers of `fresh`."""
        self._rows, self._columns, self.end = rows, _with_spare(columns), columns
        for new in fresh.layers:
            if isinstance(new, StateCache):
                self.layers.append(StateCache())
                continue
            shape = (rows, new.keys.shape[1], self._columns, new.keys.shape[3])
            # Zeros, not uninitialised memory: a masked column adds 0 times its value.
            self.layers.append(
                _CacheLayer(self, new.keys.new_zeros(shape), new.values.new_zeros(shape))
            )

    def _lay_out(self, rows: int, columns: int) -> None:
        """Copy the columns in use to the end of `columns` columns, with spare columns after them."""
        used = slice(self.start, self.end)
        into = slice(columns - (self.end - self.start), columns)
        self._rows, self._columns, self.end = rows, _with_spare(columns), columns
        for layer in self.layers:
            if not isinstance(layer, StateCache):
                layer.lay_out(rows, self._columns, used, into)


def _with_spare(columns: int) -> int:
    return columns + max(SPARE_COLUMNS, columns // 8)


# --- earlier prompts ----------------------------------------------------------------------------


class BlockKeys:
    """The digests of one growing sequence; `images` are its screens, in the order of their placeholders."""

    def __init__(self, images: Sequence[PreparedImage], image_token: int) -> None:
        self._images = list(images)
        self._image_token = image_token
        self._hash = hashlib.blake2b(digest_size=16)
        self._placeholders = 0  # in the blocks that are digested
        self._digested_images = 0  # images whose first placeholder is in these blocks
        # [I + 1], the number of placeholders before each image
        self._starts = np.cumsum([0, *(image.tokens for image in images)])
        self._keys: list[bytes] = []

    def of(self, token_ids: Sequence[int]) -> Sequence[bytes]:
        """Return the keys of the whole blocks of `token_ids` [L], which extend those of the last call."""
        start = len(self._keys) * BLOCK
        fresh = np.asarray(token_ids[start : len(token_ids) // BLOCK * BLOCK], dtype=np.int64)
        for block in fresh.reshape(-1, BLOCK):
            self._hash.update(block.tobytes())
            self._placeholders += int(np.count_nonzero(block == self._image_token))
            while self._digested_images < len(self._images) and (
                self._starts[self._digested_images] < self._placeholders
            ):
                key = self._images[self._digested_images].key.encode()
                self._hash.update(len(key).to_bytes(8, "little") + key)
                self._digested_images += 1
            self._keys.append(self._hash.digest())
        return self._keys[: len(token_ids) // BLOCK]


@dataclass(frozen=True)
class CachedPrefix:
    """The first tokens of a sequence, and the blocks that hold them."""

    blocks: Sequence[int]  # from the first token on
    tokens: int  # at most BLOCK for each block
    key: bytes | None = None  # of the snapshot at its end, for recurrent layers


@dataclass(frozen=True)
class CachedRow:
    """The place of a sequence's keys and values in a cache of rows and columns."""

    row: int
    start: int  # column of its first token
    keys: Sequence[bytes]  # digests of its whole blocks, all of which are in the row
    routing: bytes = b""  # of its tokens, as in SampledTokens; empty if it is not recorded


class PrefixCache:
    """The blocks of sequences served under the present weights, at most `limit_bytes`. For one thread.

    A block never outlives the one before it in a sequence. Of a model with recurrent layers, half of the bytes
    are for snapshots of their states. In Qwen3.5 that is a snapshot for about 2,000 tokens of keys and values;
    an agent needs one for its whole prompt (benchmarks/speed/prefix_cache.py). The memory is allocated at the
    start; on a CPU it is used only as blocks are filled. Raises torch.OutOfMemoryError.

    With `routing_bytes`, which a token has, a block also has the experts that its tokens passed, in main memory.
    """

    def __init__(self, model: PreTrainedModel, limit_bytes: int, routing_bytes: int = 0) -> None:
        recurrent = StateShape.of(model)
        if recurrent is not None:
            limit_bytes //= 2
        self.snapshots = StateSnapshots(model, recurrent, limit_bytes) if recurrent else None
        token_bytes = kv_bytes_per_token(model) + routing_bytes
        self._capacity = max(0, limit_bytes // (token_bytes * BLOCK) - 1)
        self._routing = np.zeros((self._capacity + 1, BLOCK * routing_bytes), dtype=np.uint8)
        self._blocks: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []  # keys, values
        self._model = model
        if not self._capacity:
            return
        layers, heads, width = KVShape.of(model)
        weight: Any = model.get_input_embeddings().weight
        shape = ((self._capacity + 1) * BLOCK, heads, width)
        for _ in range(layers):
            keys = torch.empty(shape, dtype=weight.dtype, device=weight.device)
            values = torch.empty_like(keys)
            keys[:BLOCK] = values[:BLOCK] = 0
            self._layers.append((keys, values))

    def __len__(self) -> int:
        return len(self._blocks)

    def clear(self) -> None:
        """Drop all blocks and snapshots, as when the weights have changed."""
        self._blocks.clear()
        if self.snapshots is not None:
            self.snapshots.clear()

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Return the cached blocks of a sequence, from the first one up to the first that is missing."""
        blocks: list[int] = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            blocks.append(block)
        self._touch(keys[: len(blocks)])
        return blocks

    def read(self, rows: Sequence[CachedPrefix], columns: int) -> Cache:
        """Return the first tokens of each row in a cache of `columns` columns; they end in the last one.

        The columns before them are 0. Recurrent layers have the states at the end of these tokens.
        """
        cache = empty_cache(self._model)
        if not columns:
            return cache
        if self.snapshots is not None:
            self.snapshots.read(cache, [row.key for row in rows])
        places = np.broadcast_to(np.arange(columns) % BLOCK, (len(rows), columns)).copy()
        for place, row in zip(places, rows, strict=True):
            tokens = np.arange(row.tokens)
            blocks = np.array(row.blocks, dtype=np.int64)
            place[columns - row.tokens :] = blocks[tokens // BLOCK] * BLOCK + tokens % BLOCK
        index = torch.from_numpy(places.ravel()).to(self._layers[0][0].device)
        attentions = [layer for layer in cache.layers if not isinstance(layer, StateCache)]
        for attention, stored in zip(attentions, self._layers, strict=True):
            keys, values = (
                part[index].view(*places.shape, *part.shape[1:]).transpose(1, 2) for part in stored
            )  # [rows, heads, columns, width]
            attention.update(keys, values)
        return cache

    def routing_of(self, blocks: Sequence[int], tokens: int) -> bytes:
        """Return the experts of the first `tokens` tokens in `blocks`, as in SampledTokens."""
        each = self._routing.shape[1] // BLOCK
        return self._routing[list(blocks)].tobytes()[: tokens * each]

    def store(self, cache: Any, rows: Sequence[CachedRow]) -> None:
        """Copy the blocks of `rows` that are not stored yet from `cache`, which has keys and values."""
        copies: dict[int, tuple[int, int]] = {}  # block -> row and column
        for row in rows:
            keys = row.keys[: self._capacity]
            present = len(self.match(keys))
            for index, key in enumerate(keys[present:], start=present):
                block = self._free_block()
                self._blocks[key] = block
                copies[block] = (row.row, row.start + index * BLOCK)
                size = self._routing.shape[1]
                if size:
                    own = row.routing[index * size : (index + 1) * size]
                    self._routing[block] = np.frombuffer(own, dtype=np.uint8)
            self._touch(keys)
        if not copies:
            return
        try:
            self._copy(cache, copies)
        except BaseException:
            self.clear()  # some blocks may not hold the tokens of their keys
            raise

    def _copy(self, cache: Any, copies: dict[int, tuple[int, int]]) -> None:
        """Copy BLOCK tokens of `cache`, from the (row, column) of each block in `copies`, into that block."""
        device = self._layers[0][0].device
        within = np.arange(BLOCK)
        blocks = np.fromiter(copies, dtype=np.int64)
        places = np.array(list(copies.values()), dtype=np.int64)  # [blocks, 2]
        into = torch.from_numpy((blocks[:, None] * BLOCK + within).ravel()).to(device)
        row = torch.from_numpy(places[:, 0].repeat(BLOCK)).to(device)
        column = torch.from_numpy((places[:, 1:] + within).ravel()).to(device)
        attentions = [layer for layer in cache.layers if not isinstance(layer, StateCache)]
        for (keys, values), layer in zip(self._layers, attentions, strict=True):
            keys[into] = layer.keys[row, :, column]  # [tokens, heads, width]
            values[into] = layer.values[row, :, column]

    def _free_block(self) -> int:
        """Return a block to write to: one that was never used, else the least recently used one."""
        if len(self._blocks) < self._capacity:
            return len(self._blocks) + 1  # the ones in use are 1 .. len
        return self._blocks.popitem(last=False)[1]

    def _touch(self, keys: Sequence[bytes]) -> None:
        """Note that these blocks were used now. The last of them will be evicted first."""
        for key in reversed(keys):
            self._blocks.move_to_end(key)


# --- features of screens ------------------------------------------------------------------------


class FeatureCache:
    """The vision features of recent screens under the present weights, at most `limit_bytes`. For one thread.

    The least recently used features are evicted first.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._cached_bytes = 0
        self._entries: OrderedDict[str, tuple[torch.Tensor, ...]] = OrderedDict()

    def clear(self) -> None:
        """Drop all features, as when the weights have changed."""
        self._entries.clear()
        self._cached_bytes = 0

    def of(self, policy: LoadedPolicy, inputs: ModelInputs) -> ImageFeatures | None:
        """Return the features of `inputs.images`, or None if there are no images."""
        return self.of_images(policy, inputs.images) if inputs.images else None

    def of_images(self, policy: LoadedPolicy, images: Sequence[PreparedImage]) -> ImageFeatures:
        """Return the features of images [I >= 1]; all that are not cached are computed in one batch."""
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


def vision_digest(source: WeightSet) -> str | None:
    """Return one digest of the vision tower's tensors in a checked set; None if its manifest has no digests.

    Two sets with equal digests have equal vision towers, so that features of screens are the same under both.
    """
    try:
        text = (directory_of(source) / MANIFEST).read_text(encoding="utf-8")
        tensors = json.loads(text)["tensors"]
        digests = sorted(
            (name, str(tensors[name]["digest"])) for name in tensors if "visual." in name
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return hashlib.blake2b(repr(digests).encode()).hexdigest() if digests else NO_VISION
