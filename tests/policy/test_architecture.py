"""What is known of a model without torch is what transformers makes of the same folder."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen2VLImageProcessorPil

from bus.errors import ModelError
from dart_cli.config.adapters import TARGETS
from dart_cli.config.architecture import FULL, LINEAR, NEWER, canonical, shape_of
from dart_cli.config.model_folder import BUILTIN, screens, weight_files
from dart_cli.config.published import OTHER_SIZES, PUBLISHED
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
    "qwen3_vl_moe": {
        "text_config": {"num_hidden_layers": 1},
        "vision_config": {"depth": 1, "out_hidden_size": 2048, "deepstack_visual_indexes": [0]},
    },
    "qwen3_5": {
        "text_config": {"num_hidden_layers": 2, "full_attention_interval": 2},
        "vision_config": {"depth": 1, "out_hidden_size": 4096},
    },
    "qwen3_5_moe": {
        "text_config": {"num_hidden_layers": 2, "full_attention_interval": 2},
        "vision_config": {"depth": 1, "out_hidden_size": 2048},
    },
}
"""All other sizes at the defaults of the model type."""

HUB_TOTALS = {
    "Qwen3.5-0.8B": 873_438_784,
    "Qwen3.5-2B": 2_274_069_824,
    "Qwen3.5-4B": 4_659_865_088,
    "Qwen3.5-9B": 9_653_104_368,
    "Qwen3.5-27B": 27_781_427_952,
    "Qwen3.5-35B-A3B": 35_951_822_704,
    "Qwen3-VL-30B-A3B-Instruct": 31_070_754_032,
}
"""Numbers in published folders, by the model hub's own count of their safetensors."""


def assert_counted(config: dict[str, Any], folder: Path) -> None:
    """The counts of `shape_of` are those of transformers' model."""
    (folder / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))
    counts = {canonical(name): each.numel() for name, each in model.named_parameters()}

    def of(prefix: str) -> int:
        return sum(count for name, count in counts.items() if name.startswith(prefix))

    shape = shape_of(config)
    kinds = [LINEAR if hasattr(each, "linear_attn") else FULL for each in _layers(model)]
    assert kinds.count(LINEAR) == (shape.delta.layers if shape.delta else 0)
    for index, kind in enumerate(kinds):
        size = shape.delta.layer if shape.delta and kind == LINEAR else shape.layer
        assert size == of(f"language_model.layers.{index}.")
    assert shape.vision_block == of("visual.blocks.0.")
    assert shape.vision == of("visual.")
    assert shape.parameters == sum(counts.values())
    adapted = [
        each
        for name, each in model.model.language_model.layers.named_modules()
        if name.endswith(TARGETS)
    ]
    assert shape.adapters(3) == 3 * sum(sum(each.weight.shape) for each in adapted)


def _layers(model: Any) -> Any:
    return model.model.language_model.layers


@pytest.mark.parametrize("kind", list(FAMILIES))
def test_the_counts_are_those_of_the_models_parameters(kind: str, tmp_path: Path) -> None:
    for more in ({"tie_word_embeddings": True}, {"tie_word_embeddings": False}):
        assert_counted({**FAMILIES[kind].config, "model_type": kind, **more}, tmp_path)
    assert_counted({"model_type": kind, **SMALL[kind]}, tmp_path)


@pytest.mark.parametrize("kind", NEWER)
def test_biases_of_attention_are_counted_where_the_config_says_so(
    kind: str, tmp_path: Path
) -> None:
    family = FAMILIES[kind]
    text = {**family.config["text_config"], "attention_bias": True}
    if kind == "qwen3_vl":
        text["num_key_value_heads"] = None
    assert_counted({**family.config, "model_type": kind, "text_config": text}, tmp_path)


# --- layers of two kinds (qwen3_5)


def hybrid(**text: Any) -> dict[str, Any]:
    """The config.json of the small model, with changes to its language model; None removes a key."""
    tree = copy.deepcopy({**FAMILIES["qwen3_5"].config, "model_type": "qwen3_5"})
    tree["text_config"] = {
        key: value
        for key, value in (tree["text_config"] | text).items()
        if value is not None or key == "layer_types"
    }
    return tree


@pytest.mark.parametrize("checkpoint", list(HUB_TOTALS))
def test_a_published_model_has_as_many_numbers_as_its_folder(
    checkpoint: str, tmp_path: Path
) -> None:
    [tree] = [
        {**each.tree, "model_type": each.model_type}
        for each in (*PUBLISHED.values(), *OTHER_SIZES)
        if each.checkpoint == checkpoint
    ]
    assert_counted(tree, tmp_path)
    shape = shape_of(tree)
    # The tensors that transformers does not load: a layer with attention, what joins its two inputs, three norms.
    prediction = shape.layer + 2 * shape.width**2 + 3 * shape.width if shape.delta else 0
    assert shape.parameters + prediction == HUB_TOTALS[checkpoint]


@pytest.mark.parametrize(
    "text",
    [
        {"layer_types": None, "num_hidden_layers": 7, "full_attention_interval": 3},
        {"layer_types": None, "num_hidden_layers": 9, "full_attention_interval": None},
        {"layer_types": ["full_attention", "linear_attention"], "num_hidden_layers": 2},
        {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2},
        {"layer_types": ["linear_attention"] * 3, "num_hidden_layers": 3},
        {"linear_num_value_heads": 6, "linear_value_head_dim": 24, "linear_conv_kernel_dim": 3},
    ],
)
def test_the_kinds_of_layers_are_those_that_transformers_makes(
    text: dict[str, Any], tmp_path: Path
) -> None:
    assert_counted(hybrid(**text), tmp_path)


def test_a_sequence_keeps_states_and_columns_beside_keys_and_values(
    family: Callable[[str], Path],
) -> None:
    """What transformers' own cache holds after a prompt is what the counts say."""
    model = AutoModelForImageTextToText.from_pretrained(family("qwen3_5"), dtype=torch.bfloat16)
    shape = shape_of(json.loads((family("qwen3_5") / "config.json").read_text()))
    tokens = torch.arange(30, 41)[None]
    with torch.no_grad():
        layers = model(input_ids=tokens, use_cache=True).past_key_values.layers
    assert shape.delta is not None
    states = [each.recurrent_states[0] for each in layers if hasattr(each, "recurrent_states")]
    columns = [each.conv_states[0] for each in layers if hasattr(each, "conv_states")]
    assert {each.dtype for each in states} == {torch.float32}
    assert sum(each.numel() for each in states) == shape.delta.state
    kept = [each[..., -(shape.delta.kernel - 1) :] for each in columns]  # the last ones are read
    assert sum(each.numel() for each in kept) == shape.delta.columns
    assert shape.state_bytes(2) == 4 * shape.delta.state + 2 * shape.delta.columns
    pairs = [each for each in layers if getattr(each, "keys", None) is not None]
    assert len(pairs) == shape.attending == 1
    held = sum(each.keys.numel() + each.values.numel() for each in pairs)
    assert held == shape.cached * tokens.numel()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"layer_types": "linear_attention"}, "layer_types must be a list of linear_attention and"),
        ({"layer_types": ["mamba"] * 4}, "layer_types must be a list of linear_attention and"),
        ({"layer_types": [["full_attention"]] * 4}, "layer_types must be a list of"),
        ({"num_hidden_layers": 5}, "layer_types has 4 layers, num_hidden_layers is 5"),
        (
            {"layer_types": None, "full_attention_interval": 0},
            "full_attention_interval must be a whole number",
        ),
        ({"linear_num_value_heads": 5}, "linear_num_value_heads must be a multiple of"),
        ({"linear_conv_kernel_dim": True}, "linear_conv_kernel_dim must be a whole number"),
        ({"linear_key_head_dim": "16"}, "linear_key_head_dim must be a whole number"),
        ({"head_dim": -1}, "head_dim must be a whole number"),
    ],
)
def test_unfit_sizes_of_a_recurrence_are_one_line(text: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as refused:
        shape_of(hybrid(**text))
    assert "\n" not in str(refused.value)


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
    if whole or kind not in NEWER:
        assert shape_of(tree).tied
        check_weights(tmp_path)
        load_policy(tmp_path)
    else:
        assert not shape_of(tree).tied
        for load in (check_weights, load_policy):
            with pytest.raises(ModelError, match=r"of another shape, the first is lm_head\.weight"):
                load(tmp_path)


@pytest.mark.parametrize(
    ("published", "ours"),
    [
        (
            "model.language_model.layers.3.self_attn.q_proj.weight",
            "language_model.layers.3.self_attn.q_proj.weight",
        ),
        (
            "model.language_model.layers.0.linear_attn.A_log",
            "language_model.layers.0.linear_attn.A_log",
        ),
        ("model.visual.blocks.1.mlp.linear_fc1.bias", "visual.blocks.1.mlp.linear_fc1.bias"),
        ("model.language_model.embed_tokens.weight", "language_model.embed_tokens.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("mtp.layers.0.self_attn.q_proj.weight", "mtp.layers.0.self_attn.q_proj.weight"),
        ("mtp.norm.weight", "mtp.norm.weight"),
    ],
)
def test_tensors_of_a_published_folder_have_one_name(published: str, ours: str) -> None:
    """A layer that drafts is no layer of the language model."""
    assert canonical(published) == ours


@pytest.mark.parametrize("name", list(BUILTIN))
def test_the_shipped_models_are_whole(name: str) -> None:
    check_weights(BUILTIN[name])
