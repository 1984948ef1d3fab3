"""The choice of experts in mixtures: engines record it, and the trainer replays it.

    RoutingShape    the numbers that say which experts the layers of a model chose for one token
    use_routing     lets the routers of a model record their choice, or take it from a replay
    Recording       the choice of all layers in one forward pass of an engine
    Replay          the choice that a pack's tokens had in the rollout, in place of the routers' own
    routing_array   the bytes of a message -> an array

A router scores all experts of its layer for a token, and the token passes some of the best of them. Where two
experts score alike, rounding decides, and the next experts see another input. So engine and trainer would
compute different functions of the same weights; training without the rollout's choice has collapsed
(Megatron-LM#4168). A replay gives each router the experts that the token had. Their weights are still the
router's own probabilities, divided by their sum, so that the gradient reaches the router.

**The form of a choice.** It is [layers, chosen] indices of a token in one byte each, or in two bytes
(little-endian) of models with more than 256 experts. A router never chooses an expert twice. So a token whose
indices in a layer are all the same has no recorded choice there, and the router chooses itself.
"""

from __future__ import annotations

from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from transformers import PreTrainedModel

from dart_cli.config.architecture import MIXTURES

_BYTE = 256

Choices = NDArray[np.uint8] | NDArray[np.uint16]
"""[tokens, layers, chosen], indices of experts."""


class RoutingShape(NamedTuple):
    """The numbers that say which experts all layers of a model chose for one token."""

    layers: int
    per_token: int  # experts of a token in one layer
    experts: int  # of one layer

    @classmethod
    def of(cls, model: PreTrainedModel) -> RoutingShape | None:
        """Return the shape for `model`; None if it has no experts."""
        if model.config.model_type not in MIXTURES:
            return None
        text: Any = model.config.get_text_config(decoder=True)
        return cls(text.num_hidden_layers, text.num_experts_per_tok, text.num_experts)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of an index in messages and files."""
        return np.dtype("u1" if self.experts <= _BYTE else "<u2")

    @property
    def nbytes(self) -> int:
        """Bytes of one token."""
        return self.layers * self.per_token * self.dtype.itemsize


def routing_array(routing: bytes, shape: RoutingShape) -> Choices:
    """Return the choices [tokens, layers, chosen] in `routing`.

    Whether the indices are those of experts, `check_batch` of the trainer has checked.
    """
    return np.frombuffer(routing, dtype=shape.dtype).reshape(-1, shape.layers, shape.per_token)


class Recording:
    """The experts that each layer chose in one forward pass, of all its tokens."""

    def __init__(self, shape: RoutingShape) -> None:
        self._shape = shape
        self._layers: list[torch.Tensor | None] = [None] * shape.layers

    def route(self, layer: int, probabilities: torch.Tensor) -> torch.Tensor:
        """Return the indices [T, chosen] of the best experts of a layer, and note them."""
        indices = probabilities.topk(self._shape.per_token, dim=-1).indices
        self._layers[layer] = indices
        return indices

    def choices(self, rows: int) -> Choices:
        """Return the choices [rows, T / rows, layers, chosen] of a pass over a batch of `rows` rows."""
        layers = [layer for layer in self._layers if layer is not None]
        if len(layers) != self._shape.layers:
            raise ValueError("the forward pass has not reached all routers")
        stacked = torch.stack(layers, dim=1)  # [T, layers, chosen]
        # Through int32: few devices convert to unsigned integers of two bytes.
        small = stacked.to(torch.uint8 if self._shape.dtype.itemsize == 1 else torch.int32).cpu()
        array = small.numpy().astype(self._shape.dtype, copy=False)
        return array.reshape(rows, -1, self._shape.layers, self._shape.per_token)


class Replay:
    """The experts that the tokens of a pack had in the rollout; [T, layers, chosen].

    After a forward pass, `counts` tells how many choices the routers would have made otherwise.
    """

    def __init__(self, choices: Choices) -> None:
        wide = choices if choices.dtype == np.uint8 else choices.astype(np.int32)
        self._choices = torch.from_numpy(np.ascontiguousarray(wide))
        # By layer: [T], whether the router would have chosen otherwise, and whether there is a record.
        self._differs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __len__(self) -> int:
        return len(self._choices)

    def route(self, layer: int, probabilities: torch.Tensor) -> torch.Tensor:
        """Return the indices [T, chosen] of the experts of a layer; its own choice where none is recorded.

        A layer that is computed again for the backward pass notes the same differences again.
        """
        self._choices = self._choices.to(probabilities.device)  # once for all layers
        replayed = self._choices[:, layer].to(torch.int64)
        with torch.no_grad():
            own = probabilities.topk(replayed.shape[-1], dim=-1).indices
            is_recorded = (replayed != replayed[:, :1]).any(dim=-1)
            is_chosen = (own[:, :, None] == replayed[:, None, :]).any(dim=-1).all(dim=-1)
            self._differs[layer] = is_recorded & ~is_chosen, is_recorded
        return torch.where(is_recorded[:, None], replayed, own)

    def counts(self, rows: torch.Tensor | None = None) -> tuple[int, int]:
        """Return how many choices the routers would have made otherwise, and how many were replayed.

        A choice is that of one layer for one token; `rows` [N] limits them to some tokens of the pack.
        """
        differing = recorded = 0
        for differs, is_recorded in self._differs.values():
            index = slice(None) if rows is None else rows.to(differs.device)
            differing += int(differs[index].sum())
            recorded += int(is_recorded[index].sum())
        return differing, recorded


Routing = Recording | Replay


def use_routing(model: PreTrainedModel) -> None:
    """Let the layers of `model`, if they have experts, take the argument `routing` of a forward pass.

    Without it the routers choose as transformers' do.
    """
    if RoutingShape.of(model) is None:
        return
    inner: Any = model.model
    for index, layer in enumerate(inner.language_model.layers):
        router = layer.mlp.gate
        router.place, router.routing = index, None
        router.forward = MethodType(_routed, router)
        layer.forward = MethodType(_layer_forward, layer)
        layer.mlp.experts.forward = MethodType(_experts_forward, layer.mlp.experts)


def _layer_forward(
    layer: Any, *arguments: Any, routing: Routing | None = None, **options: Any
) -> torch.Tensor:
    """Compute a layer with its router under `routing`. Computing it again for a backward pass does the same."""
    router = layer.mlp.gate
    router.routing = routing
    try:
        out: torch.Tensor = type(layer).forward(layer, *arguments, **options)
    finally:
        router.routing = None
    return out


def _experts_forward(experts: Any, hidden: torch.Tensor, *arguments: torch.Tensor) -> torch.Tensor:
    """Compute a layer's experts in torch's grouped product, or one after another in float64, which it lacks."""
    forward = type(experts).forward
    if hidden.dtype == torch.float64:
        forward = forward.__wrapped__
    out: torch.Tensor = forward(experts, hidden, *arguments)
    return out


def _routed(
    router: Any, hidden_states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a router's logits [T, E], the weights [T, k] of the chosen experts, and their indices [T, k].

    The weights are the probabilities of the chosen experts, divided by their sum, in float32 or better.
    """
    hidden = hidden_states.reshape(-1, router.hidden_dim)
    logits = F.linear(hidden, router.weight)
    precise = torch.promote_types(logits.dtype, torch.float32)
    probabilities = logits.softmax(dim=-1, dtype=precise)
    routing: Routing | None = router.routing
    if routing is None:
        indices = probabilities.topk(router.top_k, dim=-1).indices
    else:
        indices = routing.route(router.place, probabilities)
    weights = probabilities.gather(-1, indices)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    return logits, weights.to(logits.dtype), indices
