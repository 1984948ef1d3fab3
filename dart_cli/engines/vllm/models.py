"""The model classes of vLLM that can be served: their tensors, their screens and their attention.

    register_models   registers the classes
    PreparedImages    replaces a model's image processor, and only reports sizes
    PixelScaling      replaces vLLM's normalisation, and scales bytes to the trainer's values
    PaddedAttention   attends with heads of sizes that vLLM's CPU kernels lack

**Imports.** vLLM's modules import `smart_resize` from the part of transformers' image processor that needs
torchvision, for which the CPU build has no matching version. The part for PIL images has the same function,
and replaces the other one if torchvision is not installed.

**Tensors.** The tensors of a pointer head are left out: vLLM does not point (docs/pointing.md), and its
loader refuses folders and weight sets with tensors that its classes do not have.

**Screens.** vLLM would call the model's own image processor, which needs torchvision and may expand and scale
images differently from the trainer. Our requests come with prepared images and all placeholders (prompts.py),
so that only sizes are left to report. Screens are sent as bytes, an eighth of what the vision tower reads.
vLLM's own normalisation on the device would differ in the last bit.

**Attention.** Heads of a size that the CPU's kernels lack are padded with zeros. These add nothing to the
product of a query and a key, and are cut off the output, so the larger heads with the scale of the smaller
ones give the same attention. The heads of the tiny model are 24 wide.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.nn.functional as F

if importlib.util.find_spec("torchvision") is None:
    from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl

    sys.modules.setdefault(
        "transformers.models.qwen2_vl.image_processing_qwen2_vl", image_processing_pil_qwen2_vl
    )

from vllm.config import get_current_vllm_config
from vllm.inputs.engine import MultiModalInput, mm_input
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from vllm.model_executor.models.qwen2_vl import Qwen2VLForConditionalGeneration
from vllm.model_executor.models.qwen3_5 import Qwen3_5ForConditionalGeneration
from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration
from vllm.model_executor.models.registry import ModelRegistry
from vllm.model_executor.models.utils import WeightsMapper
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

from dart_cli.config.architecture import PREFIXES
from dart_cli.engines.vllm import SECTION
from dart_cli.policy.images import PixelTable

IMAGE = "image"

MODELS = (
    Qwen2VLForConditionalGeneration,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
    Qwen3_5ForConditionalGeneration,
)
"""The classes; their names are the `architectures` in the config.json of model folders."""


_LEFT_OUT = WeightsMapper(orig_to_new_prefix=dict.fromkeys(PREFIXES))
"""Maps the names of tensors that are not loaded to None."""


def register_models() -> None:
    """Register MODELS directly; vLLM would first import each class in another process."""
    with without_warnings("vllm.model_executor.models.registry"):
        for model in MODELS:
            model.hf_to_vllm_mapper = model.hf_to_vllm_mapper | _LEFT_OUT
            ModelRegistry.register_model(model.__name__, model)


@contextlib.contextmanager
def without_warnings(logger: str) -> Iterator[None]:
    """Suppress the warnings of `logger` in the block; vLLM warns if a class is registered a second time."""
    log = logging.getLogger(logger)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


# --- screens ------------------------------------------------------------------------------------


def image_item(pixels: torch.Tensor, grid: tuple[int, int, int]) -> MultiModalKwargsItem:
    """Return vLLM's item for pixels [N, values], uint8, of a screen and its grid (time, rows, columns)."""
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
    """The largest screen of a model, which the rollout worker passes in `mm_processor_kwargs`."""

    rows: int  # image tokens
    columns: int  # image tokens
    merge: int  # patches per image token, in either direction
    values: int  # bytes per patch

    @property
    def tokens(self) -> int:
        """The number of placeholders that it takes."""
        return self.rows * self.columns


class ImageSizes(BaseProcessingInfo):
    """Tells vLLM that there are only images, each of at most `largest` tokens."""

    @property
    def largest(self) -> Largest:
        """The largest screen, as the rollout worker configured it."""
        configured: Any = (self.ctx.get_mm_config().mm_processor_kwargs or {})[SECTION]
        return Largest(**configured)

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """Return the limits of a prompt: any number of images, and no video or audio."""
        return {IMAGE: None}

    def get_mm_max_tokens_per_item(
        self,
        seq_len: int,  # noqa: ARG002 (vLLM's signature)
        mm_counts: Mapping[str, int],  # noqa: ARG002
    ) -> Mapping[str, int]:
        """Return the tokens of the largest screen."""
        return {IMAGE: self.largest.tokens}


class NoDummies(BaseDummyInputsBuilder[ImageSizes]):
    """Builds nothing: PreparedImages makes the dummy inputs."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> NoReturn:
        """Raise NotImplementedError: PreparedImages makes the inputs that vLLM measures memory with."""
        raise NotImplementedError

    def get_dummy_mm_data(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any
    ) -> NoReturn:
        """Raise NotImplementedError; see `get_dummy_text`."""
        raise NotImplementedError


class PreparedImages(BaseMultiModalProcessor[ImageSizes]):
    """The processor in place of a model's own: images come prepared, so vLLM asks it for sizes alone."""

    requires_tokenizer = False

    def get_dummy_mm_inputs(
        self,
        mm_counts: Mapping[str, int],
        *,
        cache: Any = None,  # noqa: ARG002 (vLLM's signature)
        scheduler_config: Any = None,  # noqa: ARG002
    ) -> MultiModalInput:
        """Return black screens of the largest size, with which vLLM measures memory."""
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

    # vLLM would call these for images that are not prepared, which dart never sends.

    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Any) -> NoReturn:
        raise NotImplementedError

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any
    ) -> NoReturn:
        raise NotImplementedError


class PixelScaling(torch.nn.Module):
    """The first layer of a vision tower of vLLM: it turns pixels into the patches that the trainer sees."""

    input_dtype = torch.uint8  # vLLM reads it for the inputs of its CUDA graphs

    def __init__(self, table: PixelTable) -> None:
        super().__init__()
        self.table = PixelTable(table.values.to(torch.get_default_device()), table.frames)

    def forward(self, pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return patches [N, channels * frames * patch * patch] of `dtype` for pixels [N, values], uint8."""
        return self.table.patches(pixels).to(dtype)


def pixel_scaling(model_config: Any) -> PixelScaling:  # noqa: ARG001 (vLLM's signature)
    """Return the layer for a model that is being built, with the rollout worker's table (start.py)."""
    config: Any = get_current_vllm_config().additional_config
    table = config[SECTION]
    return PixelScaling(PixelTable(torch.tensor(table["pixels"]), table["frames"]))


def scale_pixels() -> None:
    """Let models of MODELS be built with PixelScaling, in this process."""
    for model in MODELS:
        sys.modules[model.__module__].build_mm_input_norm = pixel_scaling  # type: ignore[attr-defined]


def replace_processors() -> None:
    """Register PreparedImages for MODELS, in this process."""
    register = MULTIMODAL_REGISTRY.register_processor(
        PreparedImages, info=ImageSizes, dummy_inputs=NoDummies
    )
    with without_warnings("vllm.multimodal.registry"):
        for model in MODELS:
            register(model)


# --- attention on a CPU -------------------------------------------------------------------------


def kernel_size(head_size: int) -> int:
    """Return the smallest head size >= `head_size` of vLLM's CPU kernels, or `head_size` if there is none."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend  # of CPU builds

    sizes = [size for size in CPUAttentionBackend.get_supported_head_sizes() if size >= head_size]
    return min(sizes, default=head_size)


class PaddedAttention(Attention):
    """Attention over heads of any size, in place of vLLM's own in its decoders."""

    def __init__(self, num_heads: int, head_size: int, scale: float, **options: Any) -> None:
        super().__init__(num_heads, kernel_size(head_size), scale, **options)
        self._model_size = head_size  # `head_size` is the padded one from here on

    def forward(
        self,
        query: torch.Tensor,  # [T, heads * head_size]
        key: torch.Tensor,  # [T, kv_heads * head_size]
        value: torch.Tensor,
        *rest: Any,
        **options: Any,
    ) -> torch.Tensor:
        """Return the attention [T, heads * head_size]."""
        width, padded_width = self._model_size, self.head_size
        if width == padded_width:
            attended: torch.Tensor = super().forward(query, key, value, *rest, **options)
            return attended
        query, key, value = (pad_heads(part, width, padded_width) for part in (query, key, value))
        padded: torch.Tensor = super().forward(query, key, value)
        return padded.view(len(padded), -1, padded_width)[..., :width].flatten(1)


def pad_heads(heads: torch.Tensor, width: int, padded_width: int) -> torch.Tensor:
    """Return heads [T, heads * width] padded with zeros, as [T, heads * padded_width]."""
    return F.pad(heads.reshape(len(heads), -1, width), (0, padded_width - width)).flatten(1)
