"""The trainer's forward pass over a pack: trees of token sequences in one row, with each token once.

    PackPlans         the index tables of a pack, for all of its layers
    PackedInputs      the token ids, positions, layout and distinct images of a pack
    packed_hidden     computes the hidden states that the output embedding reads
    use_packed        lets the language layers of a model take packs as well as padded batches
    check_packed      raises an error for a model whose layers do not take packs
    packed_attention  computes the attention of a pack, without an L x L mask
    use_recompute     lets layers keep their input alone and compute the rest again in the backward pass

The steps of one trajectory extend one another, and the trajectories of a group share their first screen. A
pack holds each shared token once. A token sees its path from the root (pack_plan.py), so up to rounding its
hidden state is the one that `forward.logits` computes for this path alone.

Attention runs in one of two kernels, by the form of the plan: the kernel of a GPU
(dart_cli/hardware/accelerator.py) in bfloat16 and float16, elsewhere `scaled_dot_product_attention`, once for
each bucket of sequences of similar length.

Recomputing is activation checkpointing (arXiv 1604.06174) through transformers' own switch. The switch has no
effect in evaluation mode, so the model is put into training mode. This changes no number if nothing is
dropped at random; every dropout must therefore be 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer

from bus.errors import ModelError
from dart_cli.hardware import accelerator
from dart_cli.policy.pack_plan import PackLayout, PackPlan, plan_pack
from dart_cli.policy.pointer_head import head_of
from dart_cli.policy.state_plan import StatePlan, StateShape, plan_layout

# Imported late: scripts/gpu-check times attention with torch and transformers alone.
if TYPE_CHECKING:
    from dart_cli.policy.experts import Replay
    from dart_cli.policy.forward import ImageFeatures
    from dart_cli.policy.images import PreparedImage

PACKED = "dart_packed"
"""The name of our language attention in transformers. It attends like `sdpa` where no plan is passed."""


class PackPlans:
    """The plans of one pack, each made when a layer first needs it."""

    def __init__(self, layout: PackLayout) -> None:
        self._layout = layout
        self._plans: dict[tuple[torch.device, torch.dtype, int], PackPlan] = {}
        self._states: dict[tuple[torch.device, int], StatePlan] = {}

    def plan(self, device: torch.device, dtype: torch.dtype, window: int) -> PackPlan:
        """Return the plan for queries of `dtype` on `device`; layers with equal arguments share one."""
        key = device, dtype, window
        if key not in self._plans:
            self._plans[key] = plan_pack(self._layout, device, dtype, window=window)
        return self._plans[key]

    def states(self, device: torch.device, columns: int) -> StatePlan:
        """Return the plan of recurrent layers on `device`; see `plan_layout`."""
        key = device, columns
        if key not in self._states:
            self._states[key] = plan_layout(self._layout, columns, device)
        return self._states[key]


class _Gathered(torch.autograd.Function):
    """Gathers rows [K, ...] of a tensor [L, ...], some of them several times.

    The gradient of a row is the sum over all sequences that see it, in float32 or better.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.shape = rows.shape
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (index,) = ctx.saved_tensors
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        total = torch.zeros(ctx.shape, dtype=dtype, device=gradient.device)
        total.index_add_(0, index, gradient.to(dtype))
        return total.to(gradient.dtype), None


class _Padded(torch.autograd.Function):
    """Gathers rows [Q, ...] of a tensor [L, ...], each once except for padding.

    `places` [L] inverts `index`.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, index: torch.Tensor, places: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(places)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient.index_select(0, ctx.saved_tensors[0]), None, None


class _Unpadded(torch.autograd.Function):
    """Inverts _Padded: gathers the rows [L, ...] of a padded tensor [Q, ...]."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        ctx.shape = rows.shape
        return rows.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        padded = gradient.new_zeros(ctx.shape)
        return padded.index_copy_(0, ctx.saved_tensors[0], gradient), None


def packed_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: PackPlan, scale: float | None
) -> torch.Tensor:
    """Return a pack's attention [L, heads, D], from query [L, heads, D], key and value [L, kv_heads, D]."""
    if plan.keys is not None:
        key, value = gather_rows(key, plan.keys), gather_rows(value, plan.keys)
    if plan.buckets:
        return _bucketed(query, key, value, plan, scale)
    assert plan.query_ends is not None
    assert plan.key_ends is not None
    return accelerator.packed_attention(
        query, key, value, plan.query_ends, plan.key_ends, plan.longest, plan.window, scale
    )


def gather_rows(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return rows [K, ...] of a tensor [L, ...]; gradients add up in float32 or better."""
    gathered: torch.Tensor = _Gathered.apply(rows, index)  # type: ignore[no-untyped-call]
    return gathered


def _bucketed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: PackPlan, scale: float | None
) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    if plan.queries is not None:
        query = _Padded.apply(query, plan.queries, plan.places)  # type: ignore[no-untyped-call]
    parts: list[torch.Tensor] = []
    queries = torch.split(query, [bucket.count * bucket.queries for bucket in plan.buckets])
    sizes = [bucket.count * bucket.keys for bucket in plan.buckets]
    keys, values = torch.split(key, sizes), torch.split(value, sizes)
    for bucket, q, k, v in zip(plan.buckets, queries, keys, values, strict=True):
        out = F.scaled_dot_product_attention(
            _sequences(q, bucket.count),
            _sequences(_repeated(k, groups), bucket.count),
            _sequences(_repeated(v, groups), bucket.count),
            attn_mask=bucket.bias,
            is_causal=bucket.bias is None,
            scale=scale,
        )
        parts.append(out.transpose(1, 2).flatten(0, 1))
    result = parts[0] if len(parts) == 1 else torch.cat(parts)
    if plan.queries is not None:
        result = _Unpadded.apply(result, plan.places)  # type: ignore[no-untyped-call]
    return result


def _sequences(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Return rows [count * K, heads, D] of padded sequences as [count, heads, K, D]."""
    return rows.reshape(count, -1, *rows.shape[1:]).transpose(1, 2)


def _repeated(rows: torch.Tensor, groups: int) -> torch.Tensor:
    """Return keys or values [K, kv_heads, D] once for each query head: [K, kv_heads * groups, D]."""
    return rows if groups == 1 else rows.repeat_interleave(groups, dim=1)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [B, heads, L, D]
    key: torch.Tensor,  # [B, kv_heads, L, D]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    pack_plans: PackPlans | None = None,
    **extra: Any,
) -> tuple[torch.Tensor, None]:
    """Attend over a pack if `pack_plans` are passed, else as `sdpa`; transformers calls it for each layer."""
    if pack_plans is None:
        result: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            sliding_window=sliding_window,
            **extra,
        )
        return result
    if dropout:
        raise ModelError(f"packs are not for models with attention dropout {dropout}; set it to 0")
    query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
    plan = pack_plans.plan(query.device, query.dtype, sliding_window or 0)
    return packed_attention(query, key, value, plan, scaling)[None], None


def use_packed(model: PreTrainedModel) -> None:
    """Let the language layers of `model` take packs; padded batches still attend as with `sdpa`.

    Also keeps this process from using cuDNN's attention (`accelerator.use_any_length`).
    """
    inner: Any = model.model
    inner.language_model.config._attn_implementation = PACKED  # noqa: SLF001 (no public setter)
    accelerator.use_any_length()


def check_packed(model: PreTrainedModel) -> None:
    """Raise ModelError if `use_packed` or `use_states` was not called for `model`.

    Its layers would ignore the layout, and recurrent ones would pass states from one sequence to another.
    """
    inner: Any = model.model
    name = inner.language_model.config._attn_implementation  # noqa: SLF001
    if name != PACKED:
        raise ModelError(f"the model's attention is {name}, which cannot take packs")
    shape = StateShape.of(model)
    layers = [inner.language_model.layers[index] for index in shape.layers] if shape else []
    if not all("forward" in vars(layer.linear_attn) for layer in layers):
        raise ModelError(
            "the model's recurrent layers are transformers' own, which cannot take packs"
        )


AttentionInterface.register(PACKED, _attention)
AttentionMaskInterface.register(PACKED, sdpa_mask)


__all__ = ["PackLayout", "PackedInputs", "packed_hidden"]


@dataclass(frozen=True)
class PackedInputs:
    """A pack of L tokens, and the distinct images that they contain."""

    input_ids: torch.Tensor  # [L], int64
    position_ids: torch.Tensor  # [3, L], int64: time, row, column, each from its path's beginning
    layout: PackLayout
    images: tuple[PreparedImage, ...]  # distinct
    image_order: tuple[int, ...]  # index into `images` of each image, in the pack's token order
    replay: Replay | None = None  # the experts that the tokens had in the rollout

    def __post_init__(self) -> None:
        if self.input_ids.shape != (self.layout.length,):
            raise ValueError(f"{len(self.input_ids)} tokens in a pack of {self.layout.length}")
        if self.position_ids.shape != (3, self.layout.length):
            raise ValueError("a pack has three positions a token")
        if self.replay is not None and len(self.replay) != self.layout.length:
            raise ValueError(f"routing of {len(self.replay)} tokens of {self.layout.length}")


def packed_hidden(
    model: PreTrainedModel, inputs: PackedInputs, *, features: ImageFeatures | None = None
) -> torch.Tensor:
    """Return the hidden states [L, H] after the final norm, which the output embedding turns into logits.

    `features` belong to `inputs.images` and are computed here if absent. Raises ModelError for a model whose
    layers do not take packs (`use_packed`).
    """
    from dart_cli.policy.forward import device_of, image_arguments

    check_packed(model)
    inner: Any = model.model
    device = device_of(model)
    output = inner(
        input_ids=inputs.input_ids.to(device)[None],
        # transformers uses a mask of four axes as it is instead of building one; our layers ignore it.
        attention_mask=torch.empty(1, 1, 1, 1, device=device),
        position_ids=inputs.position_ids.to(device)[:, None],
        use_cache=False,
        pack_plans=PackPlans(inputs.layout),
        **({} if inputs.replay is None else {"routing": inputs.replay}),
        **image_arguments(model, inputs.images, inputs.image_order, features),
    )
    hidden: torch.Tensor = output.last_hidden_state[0]
    return hidden


def use_recompute(model: PreTrainedModel) -> None:
    """Recompute each language layer in the backward pass, and each vision block if it is trained.

    Gradients stay bit-equal. Call this after parameters were frozen. The model cannot be used with a KV cache
    afterwards, because transformers then drops the cache. Raises ModelError if the model drops values at
    random, or has a layer that cannot be recomputed.
    """
    if dropping := _dropping(model):
        name, value = dropping
        raise ModelError(
            f'train.recompute = "layer" needs a model without dropout, {name} is {value}; '
            "set it to 0 in the model's config.json, or train.recompute to none"
        )
    # The state of the random generator need not be saved, since nothing is drawn.
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    model.train()
    inner: Any = model.model
    if not any(parameter.requires_grad for parameter in inner.visual.parameters()):
        inner.visual.eval()
    if (head := head_of(model)) is not None:
        head.eval()  # in training mode it would drop values at random, unlike in engines
    if off := [name for name, layer in _layers(inner) if not _recomputes(layer)]:
        raise ModelError(
            f"{off[0]} of {type(model).__name__} cannot be recomputed; set train.recompute to none"
        )


def _layers(inner: Any) -> list[tuple[str, nn.Module]]:
    """Return the layers that the backward pass runs through, with names for messages."""
    layers = [(f"layer {index}", layer) for index, layer in enumerate(inner.language_model.layers)]
    if inner.visual.training:
        layers += [(f"vision block {i}", block) for i, block in enumerate(inner.visual.blocks)]
    return layers


def _recomputes(layer: nn.Module) -> bool:
    """Return True if the backward pass computes this layer again."""
    return (
        isinstance(layer, GradientCheckpointingLayer)
        and layer.gradient_checkpointing
        and layer.training
    )


def _dropping(model: nn.Module) -> tuple[str, float] | None:
    """Return (name, probability) of the first setting that drops values at random; None if there is none."""
    for path, module in model.named_modules():
        is_dropout = "Drop" in type(module).__name__  # torch's classes call their probability `p`
        for name, value in vars(module).items():
            is_rate = "drop" in name or (is_dropout and name == "p")
            if is_rate and isinstance(value, int | float) and float(value) != 0:
                return f"{path}.{name}", float(value)
    return None
