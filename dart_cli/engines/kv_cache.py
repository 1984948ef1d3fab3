"""Keys and values of the rows that are decoded together, as rows come and go.

    RowCache      what the model's forward pass reads and adds to, one token per row and pass
    token_bytes   what one token of one row takes

All layers are laid out alike, rows by columns, and every row ends in the same column:

    column      0  1  2  3  4  5  6  7  8
    row 0       .  .  a  b  c  d  e  .  .      length 5
    row 1       .  .  .  .  p  q  r  .  .      length 3
                      ^ start        ^ end

A pass writes one token of each row into column `end` and reads [start, end]; so nothing is copied,
where transformers' own cache copies all of it for each token. A row that joins is written with its
last token in the last column, one that leaves is overwritten by the last row. Where rows or columns
do not suffice, everything is copied once into a layout with columns to spare.

Rows end together, as with padding on the left, because that is what masks by index mean (a sliding
window counts columns); the positions that rotate keys come from outside, one per row.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

SPARE_COLUMNS = 32
"""Columns to spare after a copy, or an eighth of those in use, if that is more."""


def token_bytes(model: PreTrainedModel) -> int:
    """Bytes of one token's keys and values over all layers of `model`."""
    text: Any = model.config.get_text_config(decoder=True)
    heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    width = int(
        getattr(text, "head_dim", None) or text.hidden_size // int(text.num_attention_heads)
    )
    element: int = model.get_input_embeddings().weight.element_size()
    return 2 * int(text.num_hidden_layers) * heads * width * element


class _CacheLayer(DynamicLayer):  # type: ignore[misc]  # transformers' caches are untyped
    """One layer's keys and values, [rows, heads, columns, width]; `owner` knows what is in use."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, owner: RowCache, keys: torch.Tensor, values: torch.Tensor) -> None:
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


class RowCache(Cache):  # type: ignore[misc]
    """See the module. Between two passes: `join`, `leave`; for a pass: `begin`, forward, `done`.

    After a failure of any of these its content is not defined; `clear` it.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.lengths: list[int] = []  # [rows], tokens held of each
        self.end = 0

    @property
    def start(self) -> int:
        """The first column in use."""
        return self.end - max(self.lengths, default=0)

    def join(self, fresh: DynamicCache, lengths: Sequence[int]) -> None:
        """Add the rows of a prefill, padded on the left, of which so many tokens count."""
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
        """Give up these rows. Returns for each row that stays which one it was before."""
        stay = len(self.lengths) - len(gone)
        order = list(range(stay))
        holes = [row for row in sorted(gone) if row < stay]
        moved = [row for row in range(stay, len(self.lengths)) if row not in gone]
        for hole, row in zip(holes, moved, strict=True):
            order[hole] = row
        if not stay:
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
        """Give up all rows and the memory.

        A layout's sizes may change the last bits of what is computed on it; so they stem from the
        present rows and those that they met, and never from what was served before.
        """
        self.layers.clear()
        self.lengths.clear()
        self.end = 0

    def begin(self) -> torch.Tensor:
        """Make room for one token of each row. Returns the mask [rows, columns in use + 1]."""
        if self.end == self.layers[0].keys.shape[2]:
            self._lay_out(len(self.lengths), max(self.lengths))
        columns = torch.arange(self.end - self.start + 1)
        padding = max(self.lengths) - torch.tensor(self.lengths)
        return (columns >= padding[:, None]).long()

    def done(self) -> None:
        """The pass has written one token of each row."""
        self.end += 1
        self.lengths = [length + 1 for length in self.lengths]

    def _lay_out_like(self, fresh: DynamicCache, rows: int, columns: int) -> None:
        """An empty layout for the layers of `fresh`."""
        for new in fresh.layers:
            shape = (rows, new.keys.shape[1], _with_spare(columns), new.keys.shape[3])
            # Zeros, not whatever memory holds: a masked column counts 0 times its value.
            self.layers.append(
                _CacheLayer(self, new.keys.new_zeros(shape), new.values.new_zeros(shape))
            )
        self.end = columns

    def _lay_out(self, rows: int, columns: int) -> None:
        """Copy what is in use to the end of `columns` columns, with others to spare after them."""
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
