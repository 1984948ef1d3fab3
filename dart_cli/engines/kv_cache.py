"""The KV cache of the running batch: rows join and leave between two forward passes.

    BatchKVCache         the cache that the model reads and extends, one token per row and pass
    kv_bytes_per_token   its size for one token of one row

All layers have the same layout, rows by columns, and every row ends in the same column:

    column      0  1  2  3  4  5  6  7  8
    row 0       .  .  a  b  c  d  e  .  .      length 5
    row 1       .  .  .  .  p  q  r  .  .      length 3
                      ^ start        ^ end

A pass writes one token of each row into column `end` and reads [start, end]. So nothing is copied;
transformers' own cache copies everything for each token. A row that joins is written with its last
token in the last column; a row that leaves is overwritten by the last row. If there are too few rows
or columns, everything is copied once into a layout with spare columns.

Rows end together, as with padding on the left, because masks by index require it (a sliding window
counts columns). The positions that rotate the keys are given from outside, one per row.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

SPARE_COLUMNS = 32
"""Columns to spare after a copy, or an eighth of those in use, if that is more."""


def kv_bytes_per_token(model: PreTrainedModel) -> int:
    """Bytes of one token's keys and values over all layers of `model`."""
    text: Any = model.config.get_text_config(decoder=True)
    heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    width = int(
        getattr(text, "head_dim", None) or text.hidden_size // int(text.num_attention_heads)
    )
    element: int = model.get_input_embeddings().weight.element_size()
    return 2 * int(text.num_hidden_layers) * heads * width * element


class _CacheLayer(DynamicLayer):  # type: ignore[misc]  # transformers' caches are untyped
    """One layer's keys and values, [rows, heads, columns, width]; `owner` knows which are in use."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, owner: BatchKVCache, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values
        self._owner = owner

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one token [rows, heads, 1, width] of each row; return all columns in use."""
        rows, start, end = len(self._owner.lengths), self._owner.start, self._owner.end
        self.keys[:rows, :, end : end + 1] = key_states
        self.values[:rows, :, end : end + 1] = value_states
        return self.keys[:rows, :, start : end + 1], self.values[:rows, :, start : end + 1]

    def get_seq_length(self) -> int:
        """Columns in use, from which transformers makes its masks."""
        return self._owner.end - self._owner.start


class BatchKVCache(Cache):  # type: ignore[misc]
    """See the module. Between two passes: `join`, `leave`. For a pass: `begin_pass`, forward, `end_pass`.

    After a failure in any of these its content is undefined; `clear` it.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.lengths: list[int] = []  # [rows], tokens of each
        self.end = 0

    @property
    def start(self) -> int:
        """The first column in use."""
        return self.end - max(self.lengths, default=0)

    def join(self, fresh: DynamicCache, lengths: Sequence[int]) -> None:
        """Add the rows of a prefill, padded on the left, with `lengths` [rows] tokens."""
        before, rows = len(self.lengths), len(self.lengths) + len(lengths)
        longest = max(lengths)
        if not self.layers:
            self._lay_out_like(fresh, rows, longest)
        elif rows > self.layers[0].keys.shape[0] or longest > self.end:
            self._lay_out(rows, max(longest, *self.lengths))
        for layer, new in zip(self.layers, fresh.layers, strict=True):
            layer.keys[before:rows, :, self.end - longest : self.end] = new.keys
            layer.values[before:rows, :, self.end - longest : self.end] = new.values
        self.lengths += lengths

    def leave(self, gone: Collection[int]) -> list[int]:
        """Remove the rows `gone`. Returns the former index of each remaining row."""
        remaining = len(self.lengths) - len(gone)
        order = list(range(remaining))
        holes = [row for row in sorted(gone) if row < remaining]
        moved = [row for row in range(remaining, len(self.lengths)) if row not in gone]
        for hole, row in zip(holes, moved, strict=True):
            order[hole] = row
        if not remaining:
            self.clear()
            return order
        if holes:
            columns = slice(self.start, self.end)
            for layer in self.layers:
                layer.keys[holes, :, columns] = layer.keys[moved, :, columns]
                layer.values[holes, :, columns] = layer.values[moved, :, columns]
        self.lengths = [self.lengths[row] for row in order]
        return order

    def clear(self) -> None:
        """Remove all rows and free the memory.

        The sizes of a layout can change the last bits of the results. So they depend only on the
        present rows and those they shared the batch with, never on earlier requests.
        """
        self.layers.clear()
        self.lengths.clear()
        self.end = 0

    def begin_pass(self) -> torch.Tensor:
        """Make room for one token of each row. Returns the mask [rows, columns in use + 1]."""
        if self.end == self.layers[0].keys.shape[2]:
            self._lay_out(len(self.lengths), max(self.lengths))
        columns = torch.arange(self.end - self.start + 1)
        padding = max(self.lengths) - torch.tensor(self.lengths)
        return (columns >= padding[:, None]).long()

    def end_pass(self) -> None:
        """The pass has written one token of each row."""
        self.end += 1
        self.lengths = [length + 1 for length in self.lengths]

    def _lay_out_like(self, fresh: DynamicCache, rows: int, columns: int) -> None:
        """An empty layout for the layers of `fresh`."""
        for new in fresh.layers:
            shape = (rows, new.keys.shape[1], _with_spare(columns), new.keys.shape[3])
            # Zeros, not uninitialised memory: a masked column adds 0 times its value.
            self.layers.append(
                _CacheLayer(self, new.keys.new_zeros(shape), new.values.new_zeros(shape))
            )
        self.end = columns

    def _lay_out(self, rows: int, columns: int) -> None:
        """Copy the columns in use to the end of `columns` columns, with spare columns after them."""
        before, used = len(self.lengths), slice(self.start, self.end)
        into = slice(columns - (self.end - self.start), columns)
        for layer in self.layers:
            for name in ("keys", "values"):
                old = getattr(layer, name)
                new = old.new_zeros((rows, old.shape[1], _with_spare(columns), old.shape[3]))
                new[:before, :, into] = old[:before, :, used]
                setattr(layer, name, new)
        self.end = columns


def _with_spare(columns: int) -> int:
    return columns + max(SPARE_COLUMNS, columns // 8)
