"""The states of recurrent layers in the transformers engine.

    BatchStates      one layer's states of the rows of the running batch
    StateSnapshots   states in the middle of earlier sequences, by digest

Keys and values can be cut at any token, but a state belongs to one. So a request can only continue an earlier
one where a snapshot of the states was taken: at the end of each prompt, and where two prompts part, such as
the end of a screen that many requests share. Each snapshot is taken at the end of a block of the prefix cache
(caches.py) and has the digest of that block, which covers all tokens and screens up to it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from dart_cli.policy.delta_net import LayerStates, StateCache
from dart_cli.policy.state_plan import StateShape


class BatchStates(StateCache):
    """One layer's states of the rows of a running batch, with room for more rows."""

    def __init__(self, like: LayerStates, rows: int) -> None:
        super().__init__(_zeros(like, rows))
        self.rows = 0  # in use

    def begin(self) -> LayerStates:
        """Return the states of all rows."""
        return LayerStates(self.all.inputs[: self.rows], self.all.states[: self.rows])

    def end(self, after: LayerStates) -> None:
        """Take the states after a pass over all rows."""
        self.all.inputs[: self.rows] = after.inputs
        self.all.states[: self.rows] = after.states

    @property
    def all(self) -> LayerStates:
        """The states of the rows in use and of those that are free."""
        assert self.kept is not None
        return self.kept

    def grow(self, rows: int) -> None:
        """Make room for `rows` rows in all."""
        before, self.kept = self.begin(), _zeros(self.all, rows)
        self.end(before)

    def join(self, fresh: LayerStates) -> None:
        """Add the rows of a prefill; there must be room for them."""
        end = self.rows + len(fresh.states)
        self.all.inputs[self.rows : end] = fresh.inputs
        self.all.states[self.rows : end] = fresh.states
        self.rows = end

    def remove(self, holes: Sequence[int], moved: Sequence[int], remaining: int) -> None:
        """Keep `remaining` rows, after the rows `moved` were copied to the rows `holes`."""
        if holes:
            self.all.inputs[holes] = self.all.inputs[moved]
            self.all.states[holes] = self.all.states[moved]
        self.rows = remaining


def _zeros(like: LayerStates, rows: int) -> LayerStates:
    """Return states of `rows` sequences that have no tokens yet."""
    return LayerStates(
        like.inputs.new_zeros((rows, *like.inputs.shape[1:])),
        like.states.new_zeros((rows, *like.states.shape[1:])),
    )


class StateSnapshots:
    """States of sequences served under the present weights, at most `limit_bytes`. For one thread.

    The least recently used are overwritten first. The memory is allocated at the start; on a CPU it is used
    only as snapshots are taken. Raises torch.OutOfMemoryError.
    """

    def __init__(self, model: PreTrainedModel, shape: StateShape, limit_bytes: int) -> None:
        weight: Any = model.get_input_embeddings().weight
        self._shape = shape
        self._capacity = limit_bytes // shape.nbytes(weight.element_size())
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        slots = self._capacity + 1  # the first holds zeros, for sequences without a snapshot
        precise = torch.promote_types(weight.dtype, torch.float32)
        self._layers: list[LayerStates] = []
        for _ in shape.layers:
            inputs = weight.new_empty((slots, shape.columns, shape.channels))
            sizes = (slots, shape.heads, shape.key, shape.value)
            states = torch.empty(sizes, dtype=precise, device=weight.device)
            inputs[0], states[0] = 0, 0
            self._layers.append(LayerStates(inputs.detach(), states))

    def __len__(self) -> int:
        return len(self._slots)

    def clear(self) -> None:
        """Drop all snapshots, as when the weights have changed."""
        self._slots.clear()

    def longest(self, keys: Sequence[bytes]) -> int:
        """Return how many of the blocks with `keys` lie before the last snapshot among them."""
        for count in range(len(keys), 0, -1):
            if keys[count - 1] in self._slots:
                self._slots.move_to_end(keys[count - 1])
                return count
        return 0

    def read(self, keys: Sequence[bytes | None]) -> dict[int, StateCache]:
        """Return the states with which rows begin, by layer; a row without a key begins from nothing."""
        slots = torch.tensor([self._slots[key] if key else 0 for key in keys])
        if not slots.any():
            return {layer: StateCache() for layer in self._shape.layers}
        rows = slots.to(self._layers[0].states.device)
        kept = zip(self._shape.layers, self._layers, strict=True)
        return {layer: StateCache(states.select(rows)) for layer, states in kept}

    def store(self, cache: Cache, nodes: Sequence[tuple[bytes, int]]) -> None:
        """Take a snapshot for each (key, node) of a pass, which has left the states of its nodes in `cache`."""
        copies: dict[int, int] = {}  # slot -> node
        for key, node in nodes[: self._capacity]:
            if key in self._slots:
                self._slots.move_to_end(key)
                continue
            slot = self._free_slot()
            self._slots[key] = slot
            copies[slot] = node
        if not copies:
            return
        device = self._layers[0].states.device
        into = torch.tensor(list(copies)).to(device)
        rows = torch.tensor(list(copies.values())).to(device)
        try:
            for layer, kept in zip(self._shape.layers, self._layers, strict=True):
                left: LayerStates = cache.layers[layer].kept
                kept.inputs[into] = left.inputs[rows]
                kept.states[into] = left.states[rows]
        except BaseException:
            self.clear()  # some slots may not hold the states of their keys
            raise

    def _free_slot(self) -> int:
        """Return a slot to write to: one that was never used, else the least recently used one."""
        if len(self._slots) < self._capacity:
            return len(self._slots) + 1
        return self._slots.popitem(last=False)[1]
