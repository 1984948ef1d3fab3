"""What is known of a model without torch is what transformers makes of the same folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen2VLImageProcessorPil

from bus.errors import ModelError
from dart_cli.config.architecture import canonical, expected_tensors
from dart_cli.config.model_files import screens
from dart_cli.config.model_tensors import read_tensors
from dart_cli.config.models import BUILTIN, check_model
from dart_cli.policy.images import ImagePreparer
from dart_cli.policy.model import load_policy
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


def of_transformers(config: dict[str, Any], folder: Path) -> dict[str, tuple[int, ...]]:
    (folder / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))
    return {canonical(name): tuple(each.shape) for name, each in model.named_parameters()}


@pytest.mark.parametrize("kind", list(FAMILIES))
def test_the_expected_tensors_are_the_model_s_parameters(kind: str, tmp_path: Path) -> None:
    for more in ({"tie_word_embeddings": True}, {"tie_word_embeddings": False}):
        given = {**FAMILIES[kind].config, "model_type": kind, **more}
        assert expected_tensors(given) == of_transformers(given, tmp_path)
    by_default = {"model_type": kind, **SMALL[kind]}
    assert expected_tensors(by_default) == of_transformers(by_default, tmp_path)


def test_biases_of_attention_are_expected_where_the_config_says_so(tmp_path: Path) -> None:
    family = FAMILIES["qwen3_vl"]
    text = {**family.config["text_config"], "attention_bias": True, "num_key_value_heads": None}
    given = {**family.config, "model_type": "qwen3_vl", "text_config": text}
    assert expected_tensors(given) == of_transformers(given, tmp_path)


@pytest.mark.parametrize("kind", list(FAMILIES))
@pytest.mark.parametrize("changes", [{}, {"size": None, "min_pixels": None, "max_pixels": None}])
def test_a_screen_is_resized_as_the_preparer_does(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    tree = {**FAMILIES[kind].preprocessor, **changes}
    tree = {key: value for key, value in tree.items() if value is not None}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(tree))
    preparer = ImagePreparer(Qwen2VLImageProcessorPil.from_dict(tree))
    assert screens(tmp_path) == (preparer.factor, *preparer.bounds)


@pytest.mark.parametrize("kind", list(FAMILIES))
def test_a_saved_folder_is_whole_by_every_name_that_its_files_use(
    kind: str, tmp_path: Path
) -> None:
    check_model(build(kind, tmp_path, max_shard_size="50KB"))
    assert len({tensor.file for tensor in read_tensors(tmp_path).values()}) > 1


@pytest.mark.parametrize("kind", list(FAMILIES))
@pytest.mark.parametrize("whole", [None, False, True])
def test_a_head_that_the_loader_misses_is_missed_before(
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
        check_model(tmp_path)
        load_policy(str(tmp_path))
    else:
        with pytest.raises(ModelError, match=r"asks for are missing, the first is lm_head\.weight"):
            check_model(tmp_path)


@pytest.mark.parametrize("name", list(BUILTIN))
def test_the_shipped_models_are_whole(name: str) -> None:
    check_model(BUILTIN[name])


def test_the_loader_refuses_another_shape_in_words_of_its_own(tmp_path: Path) -> None:
    build("qwen2_5_vl", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 128}))
    with pytest.raises(ModelError, match=r"has the shape \[96, 64\], config\.json asks for") as no:
        load_policy(tmp_path)
    assert "ignore_mismatched_sizes" not in str(no.value)
