"""What is known of a model without torch is what transformers makes of the same folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen2VLImageProcessorPil

from bus.errors import ModelError
from dart_cli.config.architecture import canonical, shape_of
from dart_cli.config.model_folder import BUILTIN, screens, weight_files
from dart_cli.policy.images import ImagePreparer
from dart_cli.policy.loader import check_weights, load_policy
from scripts.small_models import FAMILIES, build

SMALL: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"num_hidden_layers": 1, "vision_config": {"depth": 1, "hidden_size": 8192}},
    "qwen2_5_vl": {
        "num_hidden_layers": 1,
        "vision_config": {"depth": 1, "out_hidden_size": 8192, "fullatt_block_indexes": [0]},
    },
    "qwen3_vl": {
        "text_config": {"num_hidden_layers": 1},
        "vision_config": {"depth": 1, "out_hidden_size": 4096, "deepstack_visual_indexes": [0]},
    },
}
"""All other sizes at the defaults of the model type."""


def assert_counted(config: dict[str, Any], folder: Path) -> None:
    """The counts of `shape_of` are those of transformers' model."""
    (folder / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))
    counts = {canonical(name): each.numel() for name, each in model.named_parameters()}

    def of(prefix: str) -> int:
        return sum(count for name, count in counts.items() if name.startswith(prefix))

    shape = shape_of(config)
    assert shape.layer == of("language_model.layers.0.")
    assert shape.vision_block == of("visual.blocks.0.")
    assert shape.vision == of("visual.")
    assert shape.parameters == sum(counts.values())
    linear = [each for each in model.modules() if isinstance(each, torch.nn.Linear)]
    inner = [each for each in model.model.language_model.layers.modules() if each in linear]
    assert shape.adapters(3) == 3 * sum(sum(each.weight.shape) for each in inner)


@pytest.mark.parametrize("kind", list(FAMILIES))
def test_the_counts_are_those_of_the_models_parameters(kind: str, tmp_path: Path) -> None:
    for more in ({"tie_word_embeddings": True}, {"tie_word_embeddings": False}):
        assert_counted({**FAMILIES[kind].config, "model_type": kind, **more}, tmp_path)
    assert_counted({"model_type": kind, **SMALL[kind]}, tmp_path)


def test_biases_of_attention_are_counted_where_the_config_says_so(tmp_path: Path) -> None:
    family = FAMILIES["qwen3_vl"]
    text = {**family.config["text_config"], "attention_bias": True, "num_key_value_heads": None}
    assert_counted({**family.config, "model_type": "qwen3_vl", "text_config": text}, tmp_path)


@pytest.mark.parametrize("kind", list(FAMILIES))
@pytest.mark.parametrize("changes", [{}, {"size": None, "min_pixels": None, "max_pixels": None}])
def test_a_screen_is_resized_as_the_preparer_does(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    tree = {**FAMILIES[kind].preprocessor, **changes}
    tree = {key: value for key, value in tree.items() if value is not None}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(tree))
    preparer = ImagePreparer(Qwen2VLImageProcessorPil.from_dict(tree))
    assert screens(tmp_path) == preparer.screens


@pytest.mark.parametrize("kind", list(FAMILIES))
def test_a_folder_in_shards_is_whole(kind: str, tmp_path: Path) -> None:
    check_weights(build(kind, tmp_path, max_shard_size="50KB"))
    assert len(weight_files(tmp_path)) > 1


@pytest.mark.parametrize("kind", list(FAMILIES))
@pytest.mark.parametrize("whole", [None, False, True])
def test_a_head_that_the_loader_misses_is_missed_by_the_check_and_the_counts(
    kind: str, whole: bool | None, tmp_path: Path
) -> None:
    build(kind, tmp_path, tied=True)
    tree = json.loads((tmp_path / "config.json").read_text())
    inner = tree.get("text_config", {key: tree[key] for key in tree if key != "vision_config"})
    tree["text_config"] = {**inner, "tie_word_embeddings": True}
    tree["tie_word_embeddings"] = whole
    if whole is None:
        del tree["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(tree))
    if whole or kind != "qwen3_vl":
        assert shape_of(tree).tied
        check_weights(tmp_path)
        load_policy(tmp_path)
    else:
        assert not shape_of(tree).tied
        for load in (check_weights, load_policy):
            with pytest.raises(ModelError, match=r"of another shape, the first is lm_head\.weight"):
                load(tmp_path)


@pytest.mark.parametrize("name", list(BUILTIN))
def test_the_shipped_models_are_whole(name: str) -> None:
    check_weights(BUILTIN[name])
