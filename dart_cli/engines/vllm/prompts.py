"""Conversion of a request to vLLM's types, and of vLLM's outputs to ours.

sent_items       returns the part of each image that has to be sent to vLLM's process
engine_input     makes the input of AsyncLLM from a prompt and its images
sampling_params  makes SamplingParams from a Sampling and the number of tokens drawn so far
OutputCollector  collects tokens, log-probabilities and entropies from vLLM's outputs
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm import SamplingParams
from vllm.inputs.engine import mm_input, tokens_input
from vllm.multimodal.inputs import (
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)
from vllm.sampling_params import RequestOutputKind

from bus.messages import Sampling
from dart_cli.engines.vllm import SECTION
from dart_cli.engines.vllm.models import IMAGE, image_item
from dart_cli.engines.vllm.sampler import COLUMNS
from dart_cli.policy.images import PreparedImage

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput


def engine_input(
    token_ids: list[int],
    images: Sequence[PreparedImage],
    items: Sequence[MultiModalKwargsItem | None],
    image_token: int,
    salt: str,
) -> Any:
    """Return the input of AsyncLLM for a prompt [P] whose placeholders are those of `images` [I], in order.

    `items` [I] come from `sent_items`. Prefixes are shared only between inputs of equal `salt`.
    """
    if not images:
        return tokens_input(token_ids, cache_salt=salt)
    return mm_input(
        prompt_token_ids=token_ids,
        mm_kwargs=MultiModalKwargsItems({IMAGE: items}),
        mm_hashes={IMAGE: [image.key for image in images]},
        mm_placeholders={IMAGE: placeholders(token_ids, images, image_token)},
        cache_salt=salt,
    )


def sent_items(
    processor: Any, images: Sequence[PreparedImage]
) -> list[MultiModalKwargsItem | None]:
    """Return the item to send to vLLM's process for each image [I], None for an image that it has.

    The pixels are bit for bit those that the trainer sees. Each image is put into the cache before the next
    one is looked up, because this may evict another image.
    """
    items: list[MultiModalKwargsItem | None] = []
    for image in images:
        cache = processor.renderer.mm_processor_cache
        if cache is not None and cache.is_cached_item(image.key):
            # The hash is enough, so the item has no pixels.
            item = image_item(torch.empty(0, 1, dtype=torch.uint8), image.grid)
        else:
            item = image_item(image.pixels, image.grid)
        by_kind = {IMAGE: [item]}
        processor.inject_into_mm_cache({IMAGE: [image.key]}, by_kind)
        items += by_kind[IMAGE]
    return items


def placeholders(
    token_ids: Sequence[int], images: Sequence[PreparedImage], image_token: int
) -> list[PlaceholderRange]:
    """Return the range of each image in a prompt that has as many placeholders as the images need."""
    ranges, position = [], 0
    for image in images:
        position = token_ids.index(image_token, position)
        ranges.append(PlaceholderRange(offset=position, length=image.tokens))
        position += image.tokens
    return ranges


def sampling_params(sampling: Sampling, first: int, ends: Sequence[int]) -> SamplingParams:
    """Return vLLM's parameters to continue a completion that has `first` tokens."""
    return SamplingParams(
        temperature=sampling.temperature,
        max_tokens=sampling.max_tokens - first,
        logprobs=COLUMNS - 1,  # beside the one of the drawn token
        flat_logprobs=True,
        stop_token_ids=list(ends),
        ignore_eos=True,  # if it is an end token, it is in `ends`
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args={SECTION: {"seed": sampling.seed, "first": first}},
    )


class OutputCollector:
    """Collects the outputs of vLLM for one request: tokens [N], log-probabilities and entropies."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []  # nats
        self.entropies: list[float] = []  # nats
        self.finish = ""  # vLLM's reason for the end; "" before

    def add(self, output: CompletionOutput) -> None:
        """Add one output of vLLM."""
        self.token_ids += output.token_ids
        numbers: Any = output.logprobs
        if numbers is not None:
            self.logprobs += numbers.logprobs[0::COLUMNS]
            self.entropies += [-value for value in numbers.logprobs[1::COLUMNS]]
        if output.finish_reason is not None:
            self.finish = output.finish_reason
