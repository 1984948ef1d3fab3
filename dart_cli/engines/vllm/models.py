"""The model classes of vLLM that can be served, imported without further dependencies.

vLLM's modules import `smart_resize` from the half of transformers' image processor that needs
torchvision; the CPU build has no matching one. The other half, which works on PIL images, has the
same function, and replaces it where torchvision is not installed.

The tensors of a pointer head are left out: vLLM does not point (docs/pointing.md), and its loader refuses a folder
or a weight set with tensors that its classes do not have.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import sys
from collections.abc import Iterator

if importlib.util.find_spec("torchvision") is None:
    from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl

    sys.modules.setdefault(
        "transformers.models.qwen2_vl.image_processing_qwen2_vl", image_processing_pil_qwen2_vl
    )

from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from vllm.model_executor.models.qwen2_vl import Qwen2VLForConditionalGeneration
from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration
from vllm.model_executor.models.registry import ModelRegistry
from vllm.model_executor.models.utils import WeightsMapper

from dart_cli.config.architecture import PREFIXES

MODELS = (
    Qwen2VLForConditionalGeneration,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
)
"""Their names are the `architectures` in the folders' config.json."""


_LEFT_OUT = WeightsMapper(orig_to_new_prefix=dict.fromkeys(PREFIXES))
"""Tensors that are not loaded."""


def register_models() -> None:
    """Register these classes directly; vLLM would first import each in another process."""
    with without_warnings("vllm.model_executor.models.registry"):
        for model in MODELS:
            model.hf_to_vllm_mapper = model.hf_to_vllm_mapper | _LEFT_OUT
            ModelRegistry.register_model(model.__name__, model)


@contextlib.contextmanager
def without_warnings(logger: str) -> Iterator[None]:
    """No warnings of `logger`: vLLM gives one when what it has registered itself is registered again."""
    log = logging.getLogger(logger)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
