"""A miniature has the parts of its model, and writes actions of the configured language."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch

from dart_cli.config.architecture import FULL, LINEAR, MIXTURES, shape_of, text_sizes
from dart_cli.config.model_folder import Screens
from dart_cli.config.published import PUBLISHED
from dart_cli.config.schema import Config, ModelConfig
from dart_cli.language.coordinates import make_coordinate_map, resize_of
from dart_cli.language.parsers import make_action_parser
from dart_cli.policy.loader import load_policy
from dart_cli.smoke_test.miniature_model import cut_config, write_clicking_model, write_miniature
from dart_cli.smoke_test.published_model_files import write_published_files

SCREEN = (224, 168)


def config_of(kind: str, pointing: str = "text") -> Config:
    family, action_parser = {
        "qwen2_vl": ("ui-tars", "uitars"),
        "qwen2_5_vl": ("ui-tars-1.5", "uitars"),
        "qwen3_vl": ("qwen3-vl", "toolcall"),
        "qwen3_vl_moe": ("qwen3-vl", "toolcall"),
        "qwen3_5": ("qwen3.5", "toolcall-xml"),
        "qwen3_5_moe": ("qwen3.5", "toolcall-xml"),
    }[kind]
    path = "models/absent-A3B" if kind in MIXTURES else "models/absent"
    policy = {
        "family": family,
        "action_parser": action_parser,
        "coordinates": "thousand",
        "pointing": pointing,
    }
    return Config.model_validate({"model": {"path": path}, "policy": policy})


@pytest.mark.parametrize("kind", PUBLISHED)
def test_the_parts_of_a_published_shape_are_kept(kind: str) -> None:
    given = {**PUBLISHED[kind].tree, "model_type": kind}
    small = cut_config(given)
    whole, cut = shape_of(given), shape_of(small)
    assert (
        5e-5
        < (cut.parameters - 2 * cut.embedding) / (whole.parameters - 2 * whole.embedding)
        < 1e-3
    )
    for key in ("num_attention_heads", "num_key_value_heads", "vocab_size"):
        assert text_sizes(small)[key] == text_sizes(given)[key]
    assert (cut.merge, cut.patch_values, cut.tied) == (whole.merge, whole.patch_values, whole.tied)
    assert cut.deepstack == whole.deepstack <= cut.layers
    assert (cut.vision_whole < cut.vision_blocks) == (whole.vision_whole < whole.vision_blocks)
    text = small.get("text_config", small)
    rope = text.get("rope_scaling") or text["rope_parameters"]
    section = rope["mrope_section"]
    assert sum(section) == int(cut.head * rope.get("partial_rotary_factor", 1)) // 2
    assert min(section) >= 1


@pytest.mark.parametrize(
    ("pattern", "kept"),
    [
        (None, [LINEAR, LINEAR, LINEAR, FULL]),
        ([LINEAR, FULL] * 4, [LINEAR, FULL]),
        ([FULL, FULL, LINEAR, FULL], [FULL, FULL, LINEAR]),
        ([LINEAR] * 3, [LINEAR, LINEAR]),
    ],
)
def test_a_model_with_recurrent_layers_keeps_their_pattern_up_to_both_kinds(
    pattern: list[str] | None, kept: list[str]
) -> None:
    given = copy.deepcopy({**PUBLISHED["qwen3_5"].tree, "model_type": "qwen3_5"})
    given["text_config"]["layer_types"] = pattern
    if pattern:
        given["text_config"]["num_hidden_layers"] = len(pattern)
    small = cut_config(given)
    assert text_sizes(small).layer_kinds() == kept
    whole, cut = shape_of(given).delta, shape_of(small).delta
    assert whole is not None
    assert cut is not None
    assert (cut.heads, cut.kernel) == (whole.heads, whole.kernel)
    assert cut.keys // cut.key_head == whole.keys // whole.key_head


@pytest.mark.parametrize(
    ("kind", "pointing", "tied"),
    [
        ("qwen2_vl", "text", True),
        ("qwen2_5_vl", "text", False),
        ("qwen3_vl", "text", False),
        ("qwen3_5", "text", False),
        ("qwen3_vl_moe", "text", False),
        ("qwen3_5_moe", "text", False),
        ("qwen2_5_vl", "pointer", False),
    ],
)
def test_it_writes_actions_whatever_the_prompt(
    tmp_path: Path, kind: str, pointing: str, tied: bool
) -> None:
    config = config_of(kind, pointing)
    write_published_files(config, tmp_path / "source")
    path = tmp_path / "source" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": tied}))
    writing = write_miniature(tmp_path / "source", tmp_path / "model", config, SCREEN)
    assert writing is not None
    assert "click" in kinds_written(tmp_path / "model", config, writing.start)


def test_its_clicks_are_on_a_screen_that_is_smaller_than_the_plan_takes_it_for(
    tmp_path: Path,
) -> None:
    """OSWorld's guests have other screen sizes; coordinates must stay within them."""
    config = config_of("qwen2_5_vl")
    config = config.model_copy(
        update={"policy": config.policy.model_copy(update={"coordinates": "resized"})}
    )
    write_published_files(config, tmp_path / "source")
    writing = write_miniature(tmp_path / "source", tmp_path / "model", config, (1920, 1080))
    assert writing is not None
    policy = load_policy(tmp_path / "model")
    action_parser = make_action_parser(config.policy.action_parser)
    size_of = resize_of(
        config.model_copy(update={"model": ModelConfig(path=str(tmp_path / "model"))})
    )
    smaller = make_coordinate_map("resized", 800, 600, size_of)
    texts = list(writing.texts(lambda token: policy.decode([token]), 40))
    kinds = {action_parser.parse(text, smaller).kind for text in texts}
    assert kinds == {"click", "done"}


def test_the_deepest_model_writes_them_too_in_its_own_type(tmp_path: Path) -> None:
    """It has as many layers as a 7B, in bfloat16. A GPU check plays it at the 7B's width."""
    config = config_of("qwen2_5_vl")
    write_published_files(config, tmp_path / "source")
    writing = write_miniature(tmp_path / "source", tmp_path / "model", config, SCREEN)
    assert writing is not None
    path = tmp_path / "model" / "config.json"
    tree = json.loads(path.read_text())
    path.write_text(json.dumps(tree | {"num_hidden_layers": 28}))
    write_clicking_model(tmp_path / "model", writing, "bfloat16", "cpu")
    assert "click" in kinds_written(tmp_path / "model", config, writing.start, "bfloat16")


def kinds_written(folder: Path, config: Config, start: int, dtype: str = "float32") -> set[str]:
    """The kinds of the actions that a model writes; noise stands before the last token of all prompts."""
    pointing = config.policy.pointing
    policy = load_policy(folder, dtype, pointing=pointing)
    action_parser, generator = (
        make_action_parser(config.policy.action_parser),
        torch.Generator().manual_seed(0),
    )
    coordinates = make_coordinate_map("thousand", *SCREEN, Screens(28, 3136, 2116800))
    kinds = set[str]()
    for length in (64, 128, 256, 512):
        noise = torch.randint(0, 200, (length,), generator=generator).tolist()
        tokens = [*noise, start]
        drawn: list[int] = []
        while not drawn or drawn[-1] not in policy.end_token_ids:
            if policy.pointer is not None and pointing == "pointer":
                after = dict(zip(policy.pointer.triple, policy.pointer.triple[1:], strict=False))
                if drawn and drawn[-1] in after:
                    drawn.append(after[drawn[-1]])
                    continue
            with torch.no_grad():
                logits = policy.model(input_ids=torch.tensor([tokens + drawn])).logits
            weights = logits[0, -1].float().softmax(-1)
            drawn.append(int(torch.multinomial(weights, 1, generator=generator)))
            assert len(drawn) < 60
        text = policy.decode(drawn)
        if policy.pointer is not None and policy.pointer.triple[0] in drawn:
            assert set(policy.pointer.triple) <= set(drawn)
            kinds.add("click")
            continue
        kinds.add(action_parser.parse(text, coordinates).kind)
    assert kinds <= {"click", "done"}
    return kinds
