"""Screens for vLLM: how many tokens the largest takes, and bytes that the model's process scales.

vLLM would ask the model's own image processor, which needs torchvision and may expand and scale
images differently from the trainer. Our requests come with their images prepared and their
placeholders in place (prompts.py), so only the sizes are left; `PreparedImages` replaces the processor of
each supported model class. Screens travel as bytes, an eighth of what the vision tower reads;
`PixelScaling` takes the place of vLLM's own normalisation on the device, whose numbers differ in the last bit.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from vllm.config import get_current_vllm_config
from vllm.inputs.engine import MultiModalInput, mm_input
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
)

from dart_cli.engines.vllm import SECTION
from dart_cli.engines.vllm.models import MODELS, without_warnings
from dart_cli.policy.images import PixelTable

IMAGE = "image"


def image_item(pixels: torch.Tensor, grid: tuple[int, int, int]) -> MultiModalKwargsItem:
    """One prepared screen: pixels [N, values], uint8, and its grid (time, rows, columns)."""
    return MultiModalKwargsItem(
        {
            "pixel_values": MultiModalFieldElem(
                data=pixels, field=MultiModalFlatField(slices=[slice(len(pixels))])
            ),
            "image_grid_thw": MultiModalFieldElem(
                data=torch.tensor(grid), field=MultiModalBatchedField(keep_on_cpu=True)
            ),
        }
    )


@dataclass(frozen=True)
class Largest:
    """The largest screen of a model, as given in `mm_processor_kwargs`."""

    rows: int  # image tokens
    columns: int  # image tokens
    merge: int  # patches per image token, each way
    values: int  # bytes per patch

    @property
    def tokens(self) -> int:
        """Placeholders it takes."""
        return self.rows * self.columns


class ImageSizes(BaseProcessingInfo):
    """Images only, each of at most `largest` tokens."""

    @property
    def largest(self) -> Largest:
        """The largest screen, as the rollout worker configured it."""
        configured: Any = (self.ctx.get_mm_config().mm_processor_kwargs or {})[SECTION]
        return Largest(**configured)

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """Any number of images; no video and no audio."""
        return {IMAGE: None}

    def get_mm_max_tokens_per_item(
        self,
        seq_len: int,  # noqa: ARG002 (vLLM's signature)
        mm_counts: Mapping[str, int],  # noqa: ARG002
    ) -> Mapping[str, int]:
        """The tokens of the largest screen."""
        return {IMAGE: self.largest.tokens}


class NoDummies(BaseDummyInputsBuilder[ImageSizes]):
    """Builds nothing: PreparedImages makes the dummy inputs."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> NoReturn:
        """Never called: PreparedImages builds the inputs that vLLM measures memory with."""
        raise NotImplementedError

    def get_dummy_mm_data(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any
    ) -> NoReturn:
        """Never called either."""
        raise NotImplementedError


class PreparedImages(BaseMultiModalProcessor[ImageSizes]):
    """Replaces the model's processor: images come prepared, so vLLM asks it for sizes only."""

    requires_tokenizer = False

    def get_dummy_mm_inputs(
        self,
        mm_counts: Mapping[str, int],
        *,
        cache: Any = None,  # noqa: ARG002 (vLLM's signature)
        scheduler_config: Any = None,  # noqa: ARG002
    ) -> MultiModalInput:
        """The largest screen, black, to measure memory with."""
        largest = self.info.largest
        grid = (1, largest.rows * largest.merge, largest.columns * largest.merge)
        pixels = torch.zeros(grid[1] * grid[2], largest.values, dtype=torch.uint8)
        item = image_item(pixels, grid)
        count = mm_counts.get(IMAGE, 0)
        return mm_input(
            prompt_token_ids=[0] * (count * largest.tokens),
            mm_kwargs=MultiModalKwargsItems({IMAGE: [item] * count}),
            mm_hashes={IMAGE: [f"{SECTION}-largest-{i}" for i in range(count)]},
            mm_placeholders={
                IMAGE: [
                    PlaceholderRange(offset=i * largest.tokens, length=largest.tokens)
                    for i in range(count)
                ]
            },
        )

    # vLLM calls these for images that are not prepared; it never gets one.

    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Any) -> NoReturn:
        raise NotImplementedError

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any
    ) -> NoReturn:
        raise NotImplementedError


class PixelScaling(torch.nn.Module):
    """What a vision tower of vLLM does first: pixels [N, values], uint8 -> patches, as the trainer's."""

    input_dtype = torch.uint8  # vLLM's name, for the inputs of its CUDA graphs

    def __init__(self, table: PixelTable) -> None:
        super().__init__()
        self.table = PixelTable(table.values.to(torch.get_default_device()), table.frames)

    def forward(self, pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Patches [N, channels * frames * patch * patch] of `dtype`."""
        return self.table.patches(pixels).to(dtype)


def pixel_scaling(model_config: Any) -> PixelScaling:  # noqa: ARG001 (vLLM's signature)
    """For a model that is being built, from the table that the rollout worker sent (start.py)."""
    sent: Any = get_current_vllm_config().additional_config
    return PixelScaling(PixelTable(torch.tensor(sent[SECTION]["pixels"]), sent[SECTION]["frames"]))


def scale_pixels() -> None:
    """Build the supported models with PixelScaling, in this process."""
    for model in MODELS:
        sys.modules[model.__module__].build_mm_input_norm = pixel_scaling  # type: ignore[attr-defined]


def replace_processors() -> None:
    """Register PreparedImages for the supported model classes, in this process."""
    register = MULTIMODAL_REGISTRY.register_processor(
        PreparedImages, info=ImageSizes, dummy_inputs=NoDummies
    )
    with without_warnings("vllm.multimodal.registry"):
        for model in MODELS:
            register(model)
