"""The form of real checkpoints of the supported classes, at the smallest useful sizes.

    FAMILIES   the classes by `model_type`
    Family     configuration, preprocessor, and what its template does

random_models.py builds folders from them. What differs between real checkpoints differs here too:
flat and nested configurations, patches of 14 and 16 pixels, windowed vision attention, deepstack
features, interleaved positions, bounds on a screen's pixels under two names, templates in two files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

HIDDEN, LAYERS, HEADS, HEAD, MLP = 64, 2, 2, 32, 96  # of the language model
VISION, VISION_HEADS = 32, 2

EMBEDDING_ROWS = 320
"""Rows of the embedding; those beyond the vocabulary belong to no token, as in real checkpoints."""

_CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}

_TEXT: dict[str, Any] = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": MLP,
    "max_position_embeddings": 4096,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "use_cache": True,
    "vocab_size": EMBEDDING_ROWS,
}
_FLAT = {
    **_TEXT,
    "max_window_layers": LAYERS,
    "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
    "rope_theta": 1e6,
    "sliding_window": 4096,
    "use_sliding_window": False,
}
_PATCHES = {
    "spatial_merge_size": 2,
    "spatial_patch_size": 14,
    "patch_size": 14,
    "temporal_patch_size": 2,
}


@dataclass(frozen=True)
class Family:
    """One class of checkpoints."""

    architecture: str
    config: Mapping[str, Any]  # config.json but for token ids, dtype and tying
    preprocessor: Mapping[str, Any]
    tied: bool  # as in its smaller checkpoints
    system: str = ""  # its template's default system message
    template_file: str = "tokenizer_config.json"


FAMILIES: Mapping[str, Family] = {
    "qwen2_vl": Family(
        "Qwen2VLForConditionalGeneration",
        {
            **_FLAT,
            "vision_config": {
                **_PATCHES,
                "depth": 2,
                "embed_dim": VISION,
                "hidden_size": HIDDEN,
                "in_chans": 3,
                "mlp_ratio": 2,
                "num_heads": VISION_HEADS,
            },
        },
        {
            **_CLIP,
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2VLProcessor",
            "min_pixels": 56 * 56,
            "max_pixels": 14 * 14 * 4 * 1280,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
        },
        tied=True,
        system="You are a helpful assistant.",
    ),
    "qwen2_5_vl": Family(
        "Qwen2_5_VLForConditionalGeneration",
        {
            **_FLAT,
            "vision_config": {
                **_PATCHES,
                "depth": 3,
                "fullatt_block_indexes": [1],
                "hidden_act": "silu",
                "hidden_size": VISION,
                "in_chans": 3,
                "intermediate_size": 64,
                "num_heads": VISION_HEADS,
                "out_hidden_size": HIDDEN,
                "tokens_per_second": 2,
                "window_size": 112,
            },
        },
        {
            **_CLIP,  # as in UI-TARS-1.5: the bounds are in `size` too
            "do_convert_rgb": True,
            "do_normalize": True,
            "do_rescale": True,
            "do_resize": True,
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2_5_VLProcessor",
            "max_pixels": 2116800,
            "merge_size": 2,
            "min_pixels": 3136,
            "patch_size": 14,
            "resample": 3,
            "rescale_factor": 1 / 255,
            "size": {"max_pixels": 2116800, "min_pixels": 3136},
            "temporal_patch_size": 2,
        },
        tied=False,
        system="You are a helpful assistant.",
    ),
    "qwen3_vl": Family(
        "Qwen3VLForConditionalGeneration",
        {
            "text_config": {
                **_TEXT,
                "attention_bias": False,
                "head_dim": HEAD,
                "model_type": "qwen3_vl_text",
                "rope_scaling": {
                    "mrope_interleaved": True,
                    "mrope_section": [6, 5, 5],
                    "rope_type": "default",
                },
                "rope_theta": 5e6,
            },
            "vision_config": {
                "deepstack_visual_indexes": [0, 1],
                "depth": 3,
                "hidden_act": "gelu_pytorch_tanh",
                "hidden_size": VISION,
                "in_channels": 3,
                "initializer_range": 0.02,
                "intermediate_size": 64,
                "model_type": "qwen3_vl",
                "num_heads": VISION_HEADS,
                "num_position_embeddings": 16 * 16,
                "out_hidden_size": HIDDEN,
                "patch_size": 16,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
            },
        },
        {
            **_HALF,
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "processor_class": "Qwen3VLProcessor",
            "size": {"longest_edge": 16777216, "shortest_edge": 65536},
            "patch_size": 16,
            "temporal_patch_size": 2,
            "merge_size": 2,
        },
        tied=True,
        template_file="chat_template.json",
    ),
}
