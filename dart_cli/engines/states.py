"""The states of recurrent layers that the transformers engine keeps for later requests.

    StateSnapshots   states in the middle of earlier sequences, by digest

Keys and values can be cut at any token, but a state belongs to one. So a request can only continue an earlier
one where a snapshot of the states was taken: at the end of each prompt, where two prompts part, such as the
end of a screen that many requests share, and at the last block of each completion. Each snapshot is taken at
the end of a block of the prefix cache (caches.py) and has the digest of that block, which covers all tokens
and screens up to it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from dart_cli.policy.delta_net import LayerStates
from dart_cli.policy.state_plan import StateShape


class StateSnapshots:
    """States of sequences served under the present weights, at most `limit_bytes`. For one thread.

    The least recently used are overwritten first. The memory is allocated at the start; on a CPU it is used
    only as snapshots are taken. Raises torch.OutOfMemoryError.
    """

    def __init__(self, model: PreTrainedModel, shape: StateShape, limit_bytes: int) -> None:
        weight: Any = model.get_input_embeddings().weight
        # Slot 0 holds zeros, for sequences without a snapshot.
        self.capacity = max(0, limit_bytes // shape.nbytes(weight.element_size()) - 1)
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._free = list(range(self.capacity, 0, -1))
        self._indices = shape.layers
        self._layers: list[LayerStates] = []
        if not self.capacity:
            return
        precise = torch.promote_types(weight.dtype, torch.float32)
        for _ in shape.layers:
            inputs = weight.new_empty((self.capacity + 1, shape.columns, shape.channels)).detach()
            sizes = (self.capacity + 1, shape.heads, shape.key, shape.value)
            states = torch.empty(sizes, dtype=precise, device=weight.device)
            inputs[0], states[0] = 0, 0
            self._layers.append(LayerStates(inputs, states))

    def __len__(self) -> int:
        return len(self._slots)

    def clear(self) -> None:
        """Drop all snapshots, as when the weights have changed."""
        self._slots.clear()
        self._free = list(range(self.capacity, 0, -1))

    def longest(self, keys: Sequence[bytes]) -> int:
        """Return how many of the blocks with `keys` lie before the last snapshot among them."""
        for count in range(len(keys), 0, -1):
            if keys[count - 1] in self._slots:
                self._slots.move_to_end(keys[count - 1])
                return count
        return 0

    def read(self, cache: Cache, keys: Sequence[bytes | None]) -> None:
        """Let the recurrent layers of an empty `cache` begin from snapshots; rows without a key from nothing."""
        if not any(keys):
            return
        slots = torch.tensor([self._slots[key] if key else 0 for key in keys])
        rows = slots.to(self._layers[0].states.device)
        for index, layer in zip(self._indices, self._layers, strict=True):
            cache.layers[index].kept = layer.select(rows)

    def select(self, cache: Cache, rows: Sequence[int]) -> list[LayerStates]:
        """Return the states of some sequences [R] in `cache`, of each recurrent layer."""
        layers = [cache.layers[index] for index in self._indices]
        return [layer.kept.select(torch.tensor(rows).to(layer.device)) for layer in layers]

    def store(
        self, keys: Sequence[bytes], states: Sequence[LayerStates], former: Iterable[bytes] = ()
    ) -> None:
        """Take snapshots of S sequences; `states` are those of each recurrent layer, `keys` [S] the digests.

        Snapshots with the keys `former` are dropped before.
        """
        # 1. Find a slot for each new key; one call never overwrites its own snapshots.
        for key in former:
            if key in self._slots:
                self._free.append(self._slots.pop(key))
        copies: dict[int, int] = {}  # slot -> sequence
        for sequence, key in enumerate(keys[: self.capacity]):
            if key in self._slots:
                self._slots.move_to_end(key)
                continue
            slot = self._free.pop() if self._free else self._slots.popitem(last=False)[1]
            self._slots[key] = slot
            copies[slot] = sequence
        if not copies:
            return
        # 2. Copy the states.
        device = self._layers[0].states.device
        into = torch.tensor(list(copies)).to(device)
        rows = torch.tensor(list(copies.values())).to(device)
        try:
            for layer, fresh in zip(self._layers, states, strict=True):
                layer.inputs[into] = fresh.inputs[rows]
                layer.states[into] = fresh.states[rows]
        except BaseException:
            self.clear()  # some slots may not hold the states of their keys
            raise
