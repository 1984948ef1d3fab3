"""A folder with the two small files of UI-TARS-1.5-7B that a plan needs, and no weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.config.model_parts import write_json

CONFIG: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
}
PREPROCESSOR = {"patch_size": 14, "merge_size": 2, "min_pixels": 3136, "max_pixels": 2116800}


def write_seven_b(folder: Path) -> Path:
    """Write both into `folder`, made if need be; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder, "config.json", CONFIG)
    write_json(folder, "preprocessor_config.json", PREPROCESSOR)
    return folder
