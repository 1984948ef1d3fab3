"""Keys and values of prompts served before: a request that begins like one of them prefills the rest.

    BlockKeys     the digest of a sequence up to the end of each whole block
    PrefixCache   digest -> the block's keys and values, bounded, least recently used out

A block is BLOCK tokens of one sequence. Its digest covers all tokens up to its end and the content
hashes of the screens among them, so a block is found only by a sequence that is the same from its
first token on. Sequences that begin alike share blocks: the turns of a trajectory, a group's first
prompt. As in vLLM's prefix cache (arXiv 2309.06180, 4.3), but blocks are copied out, not referred to.

All layers have the same layout: block b is tokens [b * BLOCK, (b + 1) * BLOCK) of one tensor for keys
and one for values. Block 0 holds zeros, for padding.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from dart_cli.policy.images import PreparedImage

BLOCK = 16
"""Tokens of a block, as in vLLM. What a sequence has beyond its last whole block is computed again."""


class BlockKeys:
    """Digests of one growing sequence; `images` are its screens, in the order of their placeholders."""

    def __init__(self, images: Sequence[PreparedImage], image_token: int) -> None:
        self._images = list(images)
        self._image_token = image_token
        self._hash = hashlib.blake2b(digest_size=16)
        self._placeholders = 0  # of blocks that are digested
        self._begun = 0  # images whose first placeholder is among them
        self._starts = np.cumsum([0, *(image.tokens for image in images)])  # in placeholders
        self._keys: list[bytes] = []

    def of(self, token_ids: Sequence[int]) -> Sequence[bytes]:
        """Keys of the whole blocks of `token_ids` [L], which extends what was given before."""
        start = len(self._keys) * BLOCK
        fresh = np.asarray(token_ids[start : len(token_ids) // BLOCK * BLOCK], dtype=np.int64)
        for block in fresh.reshape(-1, BLOCK):
            self._hash.update(block.tobytes())
            self._placeholders += int(np.count_nonzero(block == self._image_token))
            while self._begun < len(self._images) and (
                self._starts[self._begun] < self._placeholders
            ):
                key = self._images[self._begun].key.encode()
                self._hash.update(len(key).to_bytes(8, "little") + key)
                self._begun += 1
            self._keys.append(self._hash.digest())
        return self._keys[: len(token_ids) // BLOCK]


@dataclass(frozen=True)
class CachedPrefix:
    """The first tokens of a sequence, and where they are."""

    blocks: Sequence[int]  # from the first token on
    tokens: int  # at most BLOCK for each block


@dataclass(frozen=True)
class CachedRow:
    """Where a sequence's keys and values are in a cache of rows and columns."""

    row: int
    start: int  # column of its first token
    keys: Sequence[bytes]  # of its whole blocks, all of which are in the row


class PrefixCache:
    """Blocks of sequences served under the present weights, at most `limit_bytes`.

    A block never outlives the one before it in a sequence. Used by one thread alone. Its memory is
    taken at the start, on a CPU as it is filled. Raises torch.OutOfMemoryError.
    """

    def __init__(self, model: PreTrainedModel, limit_bytes: int, bytes_per_token: int) -> None:
        self._capacity = max(0, limit_bytes // (bytes_per_token * BLOCK) - 1)
        self._blocks: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []  # keys, values
        if not self._capacity:
            return
        text: Any = model.config.get_text_config(decoder=True)
        weight: Any = model.get_input_embeddings().weight
        heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
        layers = int(text.num_hidden_layers)
        width = bytes_per_token // (2 * layers * heads * weight.element_size())
        shape = ((self._capacity + 1) * BLOCK, heads, width)
        for _ in range(layers):
            both = [torch.empty(shape, dtype=weight.dtype, device=weight.device) for _ in range(2)]
            for each in both:
                each[:BLOCK] = 0
            self._layers.append((both[0], both[1]))

    def __len__(self) -> int:
        return len(self._blocks)

    def clear(self) -> None:
        """Forget everything: the weights have changed."""
        self._blocks.clear()

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of a sequence that are here, from its first one on."""
        found: list[int] = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
        self._touch(keys[: len(found)])
        return found

    def read(self, rows: Sequence[CachedPrefix], columns: int) -> DynamicCache:
        """The first tokens of each row, which end in the last of `columns`; 0 before them."""
        cache = DynamicCache()
        if not columns:
            return cache
        places = np.broadcast_to(np.arange(columns) % BLOCK, (len(rows), columns)).copy()
        for place, row in zip(places, rows, strict=True):
            tokens = np.arange(row.tokens)
            blocks = np.array(row.blocks, dtype=np.int64)
            place[columns - row.tokens :] = blocks[tokens // BLOCK] * BLOCK + tokens % BLOCK
        index = torch.from_numpy(places.ravel()).to(self._layers[0][0].device)
        for number, layer in enumerate(self._layers):
            keys, values = (
                part[index].view(*places.shape, *part.shape[1:]).transpose(1, 2) for part in layer
            )  # [rows, heads, columns, width]
            cache.update(keys, values, number)
        return cache

    def store(self, cache: Any, rows: Sequence[CachedRow]) -> None:
        """Copy the blocks that are not here yet from `cache`, whose layers have keys and values."""
        copies: dict[int, tuple[int, int]] = {}  # block -> row and column
        for row in rows:
            keys = row.keys[: self._capacity]
            known = len(self.match(keys))
            for index, key in enumerate(keys[known:], start=known):
                block = self._free_block()
                self._blocks[key] = block
                copies[block] = (row.row, row.start + index * BLOCK)
            self._touch(keys)
        if not copies:
            return
        try:
            self._copy(cache, copies)
        except BaseException:
            self.clear()  # some blocks hold other tokens than their keys say
            raise

    def _copy(self, cache: Any, copies: dict[int, tuple[int, int]]) -> None:
        device = self._layers[0][0].device
        within = np.arange(BLOCK)
        blocks = np.fromiter(copies, dtype=np.int64)
        places = np.array(list(copies.values()), dtype=np.int64)  # [blocks, 2]
        into = torch.from_numpy((blocks[:, None] * BLOCK + within).ravel()).to(device)
        row = torch.from_numpy(places[:, 0].repeat(BLOCK)).to(device)
        column = torch.from_numpy((places[:, 1:] + within).ravel()).to(device)
        for (keys, values), layer in zip(self._layers, cache.layers, strict=True):
            keys[into] = layer.keys[row, :, column]  # [tokens, heads, width]
            values[into] = layer.values[row, :, column]

    def _free_block(self) -> int:
        if len(self._blocks) < self._capacity:
            return len(self._blocks) + 1  # the ones in use are 1 .. len
        return self._blocks.popitem(last=False)[1]

    def _touch(self, keys: Sequence[bytes]) -> None:
        """These were used now; the last of them is to go first."""
        for key in reversed(keys):
            self._blocks.move_to_end(key)
