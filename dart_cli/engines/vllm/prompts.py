"""Conversion of a request to vLLM's types, and of its outputs to ours.

sent_items       images -> what its process is sent of each
engine_input     prompt and images -> the input of AsyncLLM, each image with its content hash
sampling_params  a Sampling and the tokens drawn so far -> SamplingParams
OutputCollector  the tokens of vLLM's outputs, with their numbers
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
    """Return the prompt [P] with its images [I], whose placeholders are in it in their order.

    `items` [I] are theirs (`sent_items`). `salt` separates the prefix cache.
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
    """Return what vLLM's process is sent of each image [I]: None for one that it has.

    The images are bit for bit those that the trainer sees, as bytes. One image is settled before the
    next is looked up: room for it may have cost another its place.
    """
    items: list[MultiModalKwargsItem | None] = []
    for image in images:
        cache = processor.renderer.mm_processor_cache
        if cache is not None and cache.is_cached_item(image.key):
            item = image_item(
                torch.empty(0, 1, dtype=torch.uint8), image.grid
            )  # the hash is enough
        else:
            item = image_item(image.pixels, image.grid)
        held = {IMAGE: [item]}
        processor.inject_into_mm_cache({IMAGE: [image.key]}, held)
        items += held[IMAGE]
    return items


def placeholders(
    token_ids: Sequence[int], images: Sequence[PreparedImage], image_token: int
) -> list[PlaceholderRange]:
    """Return the range of each image. The prompt has as many placeholders as the images need."""
    ranges, position = [], 0
    for image in images:
        position = token_ids.index(image_token, position)
        ranges.append(PlaceholderRange(offset=position, length=image.tokens))
        position += image.tokens
    return ranges


def sampling_params(sampling: Sampling, drawn: int, ends: Sequence[int]) -> SamplingParams:
    """Parameters to continue after `drawn` tokens of the completion."""
    return SamplingParams(
        temperature=sampling.temperature,
        max_tokens=sampling.max_tokens - drawn,
        logprobs=COLUMNS - 1,  # besides the drawn token's
        flat_logprobs=True,
        stop_token_ids=list(ends),
        ignore_eos=True,  # `ends` contains it if it is an end token
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args={SECTION: {"seed": sampling.seed, "first": drawn}},
    )


class OutputCollector:
    """Collects outputs of vLLM for one request: tokens [N] and their numbers."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []  # nats
        self.entropies: list[float] = []  # nats
        self.finish = ""  # vLLM's reason, at the end

    def add(self, output: CompletionOutput) -> None:
        """Add one output."""
        self.token_ids += output.token_ids
        numbers: Any = output.logprobs
        if numbers is not None:
            self.logprobs += numbers.logprobs[0::COLUMNS]
            self.entropies += [-value for value in numbers.logprobs[1::COLUMNS]]
        if output.finish_reason is not None:
            self.finish = output.finish_reason
