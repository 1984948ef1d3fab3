"""Published checkpoints of the classes that dart loads, for a model whose folder is not on this host.

    Published      the content of the small files of one checkpoint
    PUBLISHED      one checkpoint for each class
    OTHER_SIZES    further checkpoints of these classes
    published_of   the checkpoint of the same class as the model that a configuration names
    small_files    what the small files of a model's folder say, or of the published checkpoint in its place

`dart doctor` plans with these sizes, and a smoke test (`--smoke-test`) plays with a miniature of them. They are
copied from the config.json of the checkpoints. Those of Qwen3.5 were read in other projects that quote them;
with the tensors that transformers does not load (`mtp.*`), the parameters are the counts that the model hub
gives for the five folders (tests/policy/test_architecture.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bus.errors import ModelError
from dart_cli.config.architecture import FULL, LINEAR, MIXTURES
from dart_cli.config.families import FAMILIES, Family
from dart_cli.config.model_folder import (
    CLASSES_CURE,
    Screens,
    model_config,
    model_folder,
    resolve,
    screens,
    screens_from,
)
from dart_cli.config.schema import Config

_ACTIVE = re.compile(r"(?<![a-z\d])a\d+(?:\.\d+)?b(?![a-z\d])", re.IGNORECASE)
"""Matches the active parameters in the name of a mixture of experts, e.g. A3B."""
_BILLIONS = re.compile(r"(?<![\d.a-z])(\d+(?:\.\d+)?)b(?![a-z\d])", re.IGNORECASE)


class Published(NamedTuple):
    """The content of the small files of one checkpoint."""

    model_type: str
    checkpoint: str  # its name
    tree: dict[str, Any]  # its config.json
    preprocessor: dict[str, Any]
    system: str  # the system message of its chat template

    def is_size_of(self, path: str) -> bool:
        """Return False if a model's path names another number of parameters than this checkpoint has."""
        in_path = _BILLIONS.search(Path(path).name)
        own = _BILLIONS.search(self.checkpoint)
        return in_path is None or own is None or float(in_path[1]) == float(own[1])


_CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_OLDER: dict[str, Any] = {
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "rope_theta": 1e6,
    "use_sliding_window": False,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
_PATCHES = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
_NEWER_VISION: dict[str, Any] = {
    **_PATCHES,
    "patch_size": 16,
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "hidden_act": "gelu_pytorch_tanh",
    "in_channels": 3,
}
_NEWER_PREPROCESSOR: dict[str, Any] = {
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "patch_size": 16,
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
}


def _deep(checkpoint: str, kind: str, architecture: str, **text: Any) -> Published:
    """Return a checkpoint of the class `kind`, qwen3_vl or its mixture, with the sizes of its language model."""
    tree = {
        "architectures": [architecture],
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": f"{kind}_text",
            "attention_bias": False,
            "head_dim": 128,
            "hidden_act": "silu",
            "num_attention_heads": 32,
            "vocab_size": 151936,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-6,
            "rope_theta": 5e6,
            "rope_scaling": {
                "mrope_interleaved": True,
                "mrope_section": [24, 20, 20],
                "rope_type": "default",
            },
            **text,
        },
        "vision_config": {
            **_NEWER_VISION,
            "model_type": kind,
            "out_hidden_size": text["hidden_size"],
            "deepstack_visual_indexes": [8, 16, 24],
        },
    }
    return Published(kind, checkpoint, tree, _NEWER_PREPROCESSOR, "")


def _hybrid(
    checkpoint: str, tower: Mapping[str, int], *, tied: bool = False, **text: int
) -> Published:
    """Return a checkpoint of the class qwen3_5 or its mixture, with the sizes in which the checkpoints differ."""
    is_mixture = "num_experts" in text
    kind = "qwen3_5_moe" if is_mixture else "qwen3_5"
    name = "Qwen3_5Moe" if is_mixture else "Qwen3_5"
    interval, layers = 4, text["num_hidden_layers"]
    kinds = [FULL if place % interval == 0 else LINEAR for place in range(1, layers + 1)]
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    tree = {
        "architectures": [f"{name}ForConditionalGeneration"],
        "tie_word_embeddings": tied,
        "text_config": {
            "model_type": f"{kind}_text",
            "attention_bias": False,
            "attn_output_gate": True,
            "full_attention_interval": interval,
            "head_dim": 256,
            "hidden_act": "silu",
            "layer_types": kinds,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_value_head_dim": 128,
            "mamba_ssm_dtype": "float32",
            "max_position_embeddings": 262144,
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "partial_rotary_factor": 0.25,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                **rope,
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
            },
            "tie_word_embeddings": tied,
            "vocab_size": 248320,
            **text,
        },
        "vision_config": {
            **_NEWER_VISION,
            "model_type": kind,
            "deepstack_visual_indexes": [],
            "out_hidden_size": text["hidden_size"],
            **tower,
        },
    }
    return Published(kind, checkpoint, tree, _NEWER_PREPROCESSOR, "")


PUBLISHED: Mapping[str, Published] = {
    "qwen2_vl": Published(
        "qwen2_vl",
        "Qwen2-VL-7B-Instruct",
        {
            **_OLDER,
            "architectures": ["Qwen2VLForConditionalGeneration"],
            "vision_config": {
                **_PATCHES,
                "depth": 32,
                "embed_dim": 1280,
                "hidden_size": 3584,
                "mlp_ratio": 4,
                "num_heads": 16,
                "in_chans": 3,
            },
        },
        {**_CLIP, "min_pixels": 3136, "max_pixels": 12845056},
        "You are a helpful assistant.",
    ),
    "qwen2_5_vl": Published(
        "qwen2_5_vl",
        "UI-TARS-1.5-7B",
        {
            **_OLDER,
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "max_position_embeddings": 128000,
            "vision_config": {
                **_PATCHES,
                "depth": 32,
                "hidden_size": 1280,
                "intermediate_size": 3420,
                "out_hidden_size": 3584,
                "num_heads": 16,
                "window_size": 112,
                "in_chans": 3,
                "fullatt_block_indexes": [7, 15, 23, 31],
                "tokens_per_second": 2,
            },
        },
        {**_CLIP, "min_pixels": 3136, "max_pixels": 2116800},
        "You are a helpful assistant.",
    ),
    "qwen3_vl": _deep(
        "Qwen3-VL-8B-Instruct",
        "qwen3_vl",
        "Qwen3VLForConditionalGeneration",
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_key_value_heads=8,
    ),
    "qwen3_vl_moe": _deep(
        "Qwen3-VL-30B-A3B-Instruct",
        "qwen3_vl_moe",
        "Qwen3VLMoeForConditionalGeneration",
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=48,
        num_key_value_heads=4,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
    ),
    "qwen3_5": _hybrid(
        "Qwen3.5-9B",
        {},
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=32,
        num_attention_heads=16,
        num_key_value_heads=4,
        linear_num_value_heads=32,
    ),
    "qwen3_5_moe": _hybrid(
        "Qwen3.5-35B-A3B",
        {},
        hidden_size=2048,
        num_hidden_layers=40,
        num_attention_heads=16,
        num_key_value_heads=2,
        linear_num_value_heads=32,
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    ),
}
"""A checkpoint of each class, by `model_type`."""

_MIDDLE_TOWER = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096}
OTHER_SIZES = (
    _hybrid(
        "Qwen3.5-0.8B",
        {"depth": 12, "hidden_size": 768, "intermediate_size": 3072, "num_heads": 12},
        tied=True,
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=2,
        linear_num_value_heads=16,
    ),
    _hybrid(
        "Qwen3.5-2B",
        _MIDDLE_TOWER,
        tied=True,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=2,
        linear_num_value_heads=16,
    ),
    _hybrid(
        "Qwen3.5-4B",
        _MIDDLE_TOWER,
        tied=True,
        hidden_size=2560,
        intermediate_size=9216,
        num_hidden_layers=32,
        num_attention_heads=16,
        num_key_value_heads=4,
        linear_num_value_heads=32,
    ),
    _hybrid(
        "Qwen3.5-27B",
        {},
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=64,
        num_attention_heads=24,
        num_key_value_heads=4,
        linear_num_value_heads=48,
    ),
)
"""Further checkpoints, for a model whose name says one of these numbers of parameters."""


def published_of(config: Config) -> Published:
    """Return the published checkpoint of the same class as the model that `config` names.

    The class follows from `policy.family`, or from the name of the model's folder; the size is the one in that
    name, if a checkpoint of the class has it. Raises ModelError where neither shows a class, and where dart does
    not load it.
    """
    path = config.model.path
    is_mixture = _ACTIVE.search(Path(path).name) is not None
    name = config.policy.family
    families = {name: FAMILIES[name]} if name in FAMILIES else _families_by_name(Path(path).name)
    for family in families.values():
        for kind in family.model_types:
            if kind in PUBLISHED and (kind in MIXTURES) == is_mixture:
                checkpoints = [each for each in OTHER_SIZES if each.model_type == kind]
                fitting = [each for each in checkpoints if each.is_size_of(path)]
                usual = PUBLISHED[kind]
                return usual if usual.is_size_of(path) or not fitting else fitting[0]
    if families:
        name, family = next(iter(families.items()))
        if is_mixture:
            raise ModelError(
                f"model.path = {path} is no folder, its name is that of a mixture of experts, and the family {name} has "
                f"none that dart loads; {small_files_cure(path)}"
            )
        raise ModelError(
            f"model.path = {path} is of the family {name}, whose class {' or '.join(family.model_types)} dart does not "
            f"load; {CLASSES_CURE}"
        )
    raise ModelError(
        f"model.path = {path} is no folder, and its name shows no family whose shape is published; {small_files_cure(path)}"
    )


def small_files(config: Config) -> tuple[dict[str, Any], Screens, str]:
    """Return (config.json, sizes of the preprocessor, name of a published checkpoint) of the model.

    If the model's folder is here, the files are read from it, and the name is empty. Otherwise a published
    checkpoint of its class stands for it. Raises ModelError.
    """
    path = config.model.path
    if path.startswith("builtin:") or model_folder(path).is_dir():
        folder = resolve(path)
        return model_config(folder), screens(folder), ""
    published = published_of(config)
    if not published.is_size_of(path):
        raise ModelError(
            f"model.path = {path} is no folder, and the published shape of its class, {published.checkpoint}, has "
            f"another size; {small_files_cure(path)}"
        )
    tree = {**published.tree, "model_type": published.model_type}
    return tree, screens_from(published.preprocessor, model_folder(path)), published.checkpoint


def small_files_cure(path: str) -> str:
    """Return the fix that fetches the small files of a model, which a plan and a smoke test read."""
    return (
        "fetch its small files: `hf download REPO config.json tokenizer.json tokenizer_config.json chat_template.json "
        f"preprocessor_config.json --local-dir {path}`"
    )


def _families_by_name(folder: str) -> dict[str, Family]:
    """Return the families whose checkpoints have names like the name of the folder."""
    return {
        name: family
        for name, family in FAMILIES.items()
        if family.name_pattern and re.search(family.name_pattern, folder, re.IGNORECASE)
    }
