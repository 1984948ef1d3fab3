"""The model classes of vLLM that can be served, imported so that nothing else need be installed.

vLLM's modules import `smart_resize` from the half of transformers' image processor that needs
torchvision; on a CPU there is none that fits. The other half, which works on PIL images, has the
same function, and takes its place where torchvision is not installed.
"""

from __future__ import annotations

import importlib.util
import sys

if importlib.util.find_spec("torchvision") is None:
    from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl

    sys.modules.setdefault(
        "transformers.models.qwen2_vl.image_processing_qwen2_vl", image_processing_pil_qwen2_vl
    )

from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from vllm.model_executor.models.qwen2_vl import Qwen2VLForConditionalGeneration
from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration
from vllm.model_executor.models.registry import ModelRegistry

MODELS = (
    Qwen2VLForConditionalGeneration,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
)
"""By the names that stand as `architectures` in their folders."""


def register_models() -> None:
    """Let vLLM take these classes as they are; it would import each in another process first."""
    for model in MODELS:
        ModelRegistry.models.pop(model.__name__, None)  # vLLM warns of what is overwritten
        ModelRegistry.register_model(model.__name__, model)
