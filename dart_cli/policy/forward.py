"""The policy's forward pass over a padded batch, which engine and trainer share, and its optimisations.

    ModelInputs          a left-padded batch with its distinct images
    collate              makes ModelInputs of token ids and prepared screenshots
    device_of            returns the device that a model computes on
    image_features       runs each distinct image through the vision tower once
    last_hidden          computes the hidden states of the last positions, over a KV cache if there is one
    logits               computes the logits of the last positions
    masked_logprobs      turns logits into log-probabilities of the distribution that is sampled from
    use_batched_vision   lets images and windows of one size attend in one call, not one by one

Screens repeat: the trajectories of a group share the first screen, and a click without effect leaves the
screen as it was. Each distinct image goes through the vision tower once. Its features are scattered to all
placeholders of that image, and gradients add up over them.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, Cache, PreTrainedModel

from dart_cli.policy.experts import Routing
from dart_cli.policy.images import PreparedImage, patches_of
from dart_cli.policy.state_plan import StatePlan, StateShape, plan_rows

BATCHED_VISION = "dart_flash_equal_lengths"
"""The name of our vision attention in transformers, which makes a packed call for names that contain
`flash`."""


@dataclass(frozen=True)
class ModelInputs:
    """A left-padded batch of sequences, and the distinct images that they contain."""

    input_ids: torch.Tensor  # [B, L], int64
    attention_mask: torch.Tensor  # [B, L], int64, 0 on padding
    position_ids: torch.Tensor  # [3, B, L], int64: time, row, column
    next_position: torch.Tensor  # [B], the position of the first token after each sequence
    images: tuple[PreparedImage, ...]  # distinct, in order of first appearance
    # index into `images` of each image of the prompts, in the order in which they are read
    image_order: tuple[int, ...]


@dataclass(frozen=True)
class ImageFeatures:
    """The vision tower's output for each distinct image."""

    embeds: tuple[torch.Tensor, ...]  # per image [tokens, hidden]
    deepstack: tuple[tuple[torch.Tensor, ...], ...]  # per level, per image [tokens, hidden]


def rope_positions(
    token_ids: Sequence[int], grids: Sequence[tuple[int, int, int]], image_token: int, merge: int
) -> tuple[torch.Tensor, int]:
    """Return the positions [3, L] of one sequence in Qwen's multi-modal RoPE, and the next free position.

    Text advances all three axes together. The tokens of an image share their time and spread over rows and
    columns, and text continues after the larger side (arXiv 2409.12191, 2.1). Raises ValueError if
    placeholders and `grids` do not agree.
    """
    parts: list[torch.Tensor] = []
    position, index, waiting = 0, 0, list(grids)
    length = len(token_ids)
    while index < length:
        if token_ids[index] == image_token:
            if not waiting:
                raise ValueError("the prompt has placeholders for more images than were passed")
            _, rows, columns = waiting.pop(0)
            rows, columns = rows // merge, columns // merge
            row = torch.arange(rows).repeat_interleave(columns)
            column = torch.arange(columns).repeat(rows)
            parts.append(torch.stack([torch.zeros_like(row), row, column]) + position)
            position += max(rows, columns)
            index += rows * columns
        else:
            end = index
            while end < length and token_ids[end] != image_token:
                end += 1
            parts.append((torch.arange(end - index) + position).expand(3, -1))
            position += end - index
            index = end
    if waiting:
        raise ValueError(f"the prompt has no placeholders for {len(waiting)} of its images")
    return torch.cat(parts, dim=1), position


def collate(
    sequences: Sequence[Sequence[int]],
    images: Sequence[Sequence[PreparedImage]],
    *,
    pad_token: int,
    image_token: int,
    merge: int,
) -> ModelInputs:
    """Pad sequences (token ids [L_b]) on the left and gather their distinct images [I_b].

    Raises ValueError if the placeholders of a sequence do not fit its images.
    """
    longest = max(len(sequence) for sequence in sequences)
    input_ids = torch.full((len(sequences), longest), pad_token, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    position_ids = torch.zeros((3, len(sequences), longest), dtype=torch.long)
    next_position = torch.zeros(len(sequences), dtype=torch.long)
    index_of: dict[str, int] = {}  # by an image's key
    distinct: list[PreparedImage] = []
    image_order: list[int] = []
    for row, (sequence, sequence_images) in enumerate(zip(sequences, images, strict=True)):
        placeholders = sum(token == image_token for token in sequence)
        expected = sum(image.tokens for image in sequence_images)
        if placeholders != expected:
            raise ValueError(
                f"sequence {row} has {placeholders} image placeholders, its images need {expected}"
            )
        start = longest - len(sequence)
        input_ids[row, start:] = torch.tensor(sequence, dtype=torch.long)
        attention_mask[row, start:] = 1
        positions, following = rope_positions(
            sequence, [image.grid for image in sequence_images], image_token, merge
        )
        position_ids[:, row, start:] = positions
        next_position[row] = following
        for image in sequence_images:
            if image.key not in index_of:
                index_of[image.key] = len(distinct)
                distinct.append(image)
            image_order.append(index_of[image.key])
    return ModelInputs(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        next_position=next_position,
        images=tuple(distinct),
        image_order=tuple(image_order),
    )


def device_of(model: PreTrainedModel) -> torch.device:
    """Return the device that a model computes on, where its buffers are; weights may wait in main memory."""
    device: torch.device = next(model.buffers()).device
    return device


def image_features(model: PreTrainedModel, images: Sequence[PreparedImage]) -> ImageFeatures:
    """Return the features of each image [I], differentiable with respect to the vision tower."""
    device = device_of(model)
    patches = patches_of(images, device)
    grids = torch.tensor([image.grid for image in images], dtype=torch.long, device=device)
    inner: Any = model.model
    output = inner.get_image_features(patches, grids, return_dict=True)
    embeds = tuple(output.pooler_output)
    levels = getattr(output, "deepstack_features", None) or []
    # Before transformers 5.18 a level is one tensor for all images.
    if levels and isinstance(levels[0], torch.Tensor):
        levels = [level.split([len(embed) for embed in embeds]) for level in levels]
    return ImageFeatures(embeds=embeds, deepstack=tuple(tuple(level) for level in levels))


def encoder_outputs(features: ImageFeatures, image_order: Sequence[int]) -> dict[str, Any]:
    """Return the features of the images in `image_order`, as the model takes them in place of pixels."""
    return {
        "image": SimpleNamespace(
            pooler_output=[features.embeds[index] for index in image_order],
            deepstack_features=[
                [level[index] for index in image_order] for level in features.deepstack
            ],
        )
    }


def image_arguments(
    model: PreTrainedModel,
    images: Sequence[PreparedImage],
    image_order: Sequence[int],
    features: ImageFeatures | None,
) -> dict[str, Any]:
    """Return a forward pass's arguments for `images` in `image_order`; `features` are computed if absent."""
    if not images:
        return {}
    if features is None:
        features = image_features(model, images)
    return {"mm_encoder_outputs": encoder_outputs(features, image_order)}


def last_hidden(
    model: PreTrainedModel,
    inputs: ModelInputs,
    *,
    last: int,
    features: ImageFeatures | None = None,
    cache: Cache | None = None,
    cuts: Sequence[Sequence[int]] = (),
    routing: Routing | None = None,
) -> torch.Tensor:
    """Return the hidden states [B, last, H] of the last positions, after the final norm.

    `features` belong to `inputs.images` and are computed here if absent. `cache` is read and extended if
    passed. Recurrent layers leave their states before the columns `cuts` [B][C] of each row there, too. The
    routers of a mixture record their choice in `routing`, or take it from there.
    """
    device = device_of(model)
    inner: Any = model.model
    output = inner(
        input_ids=inputs.input_ids.to(device),
        attention_mask=inputs.attention_mask.to(device),
        position_ids=inputs.position_ids.to(device),
        past_key_values=cache,
        use_cache=cache is not None,
        **({} if routing is None else {"routing": routing}),
        **_state_arguments(model, inputs, cache, cuts),
        **image_arguments(model, inputs.images, inputs.image_order, features),
    )
    hidden: torch.Tensor = output.last_hidden_state[:, -last:]
    return hidden


def _state_arguments(
    model: PreTrainedModel,
    inputs: ModelInputs,
    cache: Cache | None,
    cuts: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """Return the arguments of a forward pass for the recurrent layers of `model`, if it has any."""
    shape = StateShape.of(model)
    if shape is None:
        return {}
    device = device_of(model)
    rows, length = inputs.input_ids.shape
    continues = cache is not None and cache.layers[shape.layers[0]].begin() is not None
    if continues and length == 1:
        return {"state_plan": _decoding_plan(rows, shape.columns, device)}
    mask = inputs.attention_mask[:, -length:]
    plan = plan_rows(mask, shape.columns, device, cuts=cuts, continues=continues)
    return {"state_plan": plan}


@lru_cache(maxsize=256)
def _decoding_plan(rows: int, columns: int, device: torch.device) -> StatePlan:
    """Return the plan of a pass over one token of each of `rows` sequences."""
    mask = torch.ones((rows, 1), dtype=torch.long)
    return plan_rows(mask, columns, device, continues=True)


def logits(
    model: PreTrainedModel,
    inputs: ModelInputs,
    *,
    last: int,
    features: ImageFeatures | None = None,
    cache: Cache | None = None,
) -> torch.Tensor:
    """Return the logits [B, last, V] of the last positions, in float32 or better; see `last_hidden`."""
    hidden = last_hidden(model, inputs, last=last, features=features, cache=cache)
    return vocabulary_logits(model, hidden)


def vocabulary_logits(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """Return the logits [..., V] of hidden states [..., H], in float32 or better."""
    head: Any = model.get_output_embeddings()
    return _precise(head(hidden))


def masked_logprobs(
    values: torch.Tensor, forbidden: torch.Tensor, temperature: torch.Tensor | float
) -> torch.Tensor:
    """Return the log-probabilities [..., V], natural log, of the distribution that is sampled from.

    `values` are logits [..., V]. The `forbidden` token ids [K] get probability 0, and `temperature` (a
    number, or [..., 1]) divides the logits. The engine samples from this distribution and the trainer scores
    with it. The result is float32, or float64 if `values` are.
    """
    masked = _precise(values).index_fill(-1, forbidden, float("-inf"))
    return F.log_softmax(masked / temperature, dim=-1)


def _precise(values: torch.Tensor) -> torch.Tensor:
    """Return `values` in float32, or in float64 if they are float64."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def use_batched_vision(model: PreTrainedModel) -> None:
    """Let images and windows of one size attend in one call, and embed patches by a matrix product.

    transformers splits the packed images and attends to them one after another (a 1280x720 screen has 84
    windows in 28 of Qwen2.5-VL's layers), and embeds patches through a Conv3d whose kernel is the whole
    patch. Both cost more than their arithmetic. The results are the same up to rounding
    (tests/policy/test_loader.py).
    """
    inner: Any = model.model
    visual = inner.visual
    for block in visual.blocks:
        block.attn.config._attn_implementation = BATCHED_VISION  # noqa: SLF001 (no public setter)
    _take_encoded_images(inner)
    projection = visual.patch_embed.proj

    def embed(patches: torch.Tensor) -> torch.Tensor:
        weight = projection.weight.flatten(1)
        return F.linear(
            patches.reshape(-1, weight.shape[1]).to(weight.dtype), weight, projection.bias
        )

    visual.patch_embed.forward = embed


def _take_encoded_images(inner: Any) -> None:
    """Let a model of transformers before 5.18 take `encoder_outputs`, which it would otherwise ignore."""
    if "mm_encoder_outputs" in inspect.signature(type(inner).forward).parameters:
        return
    plain = inner.forward

    def forward(
        *arguments: Any, mm_encoder_outputs: dict[str, Any] | None = None, **options: Any
    ) -> Any:
        if mm_encoder_outputs is None:
            return plain(*arguments, **options)
        features = mm_encoder_outputs["image"]
        features.deepstack_features = [torch.cat(level) for level in features.deepstack_features]
        inner.get_image_features = lambda *_arguments, **_options: features
        try:
            # The model only checks that there are pixels; any tensor will do.
            return plain(*arguments, **options | {"pixel_values": features.pooler_output[0]})
        finally:
            del inner.get_image_features

    inner.forward = forward


def _equal_length_attention(
    module: torch.nn.Module,  # noqa: ARG001 (the signature is transformers')
    query: torch.Tensor,  # [1, heads, patches, width]
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001
    scaling: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,  # [images + 1], where each image starts
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend fully within each image or window, and return [1, patches, heads, width]."""
    if cu_seq_lens_q is None:
        raise ValueError("packed vision attention needs cu_seq_lens_q")
    order, groups = _by_length(cu_seq_lens_q.tolist())
    if order is not None:
        order = order.to(query.device)
        query, key, value = (part.index_select(2, order) for part in (query, key, value))
    heads, width = query.shape[1], query.shape[3]
    parts, begin = [], 0
    for count, length in groups:
        q, k, v = (
            part[0, :, begin : begin + count * length]
            .reshape(heads, count, length, width)
            .transpose(0, 1)
            for part in (query, key, value)
        )
        out = F.scaled_dot_product_attention(q, k, v, scale=scaling)  # [count, heads, L, width]
        parts.append(out.transpose(1, 2).reshape(1, -1, heads, width))
        begin += count * length
    result = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
    return result if order is None else result.index_select(1, order.argsort()), None


def _by_length(starts: list[int]) -> tuple[torch.Tensor | None, list[tuple[int, int]]]:
    """Return an order of rows with sequences of one length side by side, and the (count, length) of each.

    The order is None if the rows are in it already. Sequence n has the rows [starts[n], starts[n + 1]).
    """
    lengths = [end - start for start, end in pairwise(starts)]
    counts = Counter(lengths)
    groups = [(count, length) for length, count in counts.items()]
    if lengths == [length for count, length in groups for _ in range(count)]:
        return None, groups
    first = torch.tensor(starts[:-1])
    every = torch.tensor(lengths)
    rows = [(first[every == length, None] + torch.arange(length)).flatten() for _, length in groups]
    return torch.cat(rows), groups


AttentionInterface.register(BATCHED_VISION, _equal_length_attention)
