"""Mixtures of experts: sizes that are refused, and engines that do not serve them."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bus.errors import ModelError
from dart_cli.config.architecture import MIXTURES, shape_of
from dart_cli.config.load import config_of_model
from dart_cli.config.model_folder import model_problem
from dart_cli.config.published import PUBLISHED
from dart_cli.config.rules.check import find_mistakes
from scripts.small_models import FAMILIES
from tests.config.model_parts import change_json


def tree_of(kind: str, **text: Any) -> dict[str, Any]:
    tree = copy.deepcopy({**FAMILIES[kind].config, "model_type": kind})
    tree["text_config"] |= text
    return tree


@pytest.mark.parametrize("kind", MIXTURES)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ({"num_experts": 1}, "a token needs two experts or more"),
        ({"num_experts_per_tok": 1}, "a token needs two experts or more"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9 of num_experts = 8"),
        ({"num_experts": 2**16 + 1}, "at most 65536"),
        ({"mlp_only_layers": [0]}, "some layers have no experts, which dart does not load"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        ({"moe_intermediate_size": "many"}, "moe_intermediate_size must be a whole number"),
    ],
)
def test_unfit_sizes_are_refused(kind: str, text: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError) as caught:
        shape_of(tree_of(kind, **text))
    assert words in str(caught.value)


@pytest.mark.parametrize("neurons", [32, 64])
def test_square_stacks_are_refused_where_folders_have_two_orders(neurons: int) -> None:
    with pytest.raises(ModelError, match="axes cannot be told apart"):
        shape_of(tree_of("qwen3_vl_moe", moe_intermediate_size=neurons))
    assert shape_of(tree_of("qwen3_5_moe", moe_intermediate_size=neurons)).experts is not None


def test_unfit_sizes_of_a_folder_are_refused_before_anything_starts(
    family: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(family("qwen3_vl_moe"), folder)
    assert model_problem(str(folder)) == ""
    change_json(
        folder, "config.json", text_config=tree_of("qwen3_vl_moe", num_experts=1)["text_config"]
    )
    problem = model_problem(str(folder))
    assert "config.json: num_experts_per_tok = 2 of num_experts = 1" in problem


def test_a_choice_has_few_bytes_and_a_token_passes_few_parameters() -> None:
    shapes = [shape_of({**PUBLISHED[kind].tree, "model_type": kind}) for kind in MIXTURES]
    assert [shape.routing_bytes for shape in shapes] == [48 * 8, 40 * 8]
    assert [round(shape.token_operations / 2e9, 1) for shape in shapes] == [2.7, 2.5]
    large = shape_of(tree_of("qwen3_5_moe", num_experts=257))
    assert large.routing_bytes == 4 * 2 * 2


@pytest.mark.parametrize("kind", MIXTURES)
def test_vllm_does_not_serve_them(kind: str, family: Callable[[str], Path]) -> None:
    config = config_of_model(family(kind), ["rollout.engine=vllm"])
    texts = [str(each.text) for each in find_mistakes(config, "rollout")]
    assert any("does not say which experts it chose" in text for text in texts)
    config = config_of_model(family(kind), [])
    assert not any("experts" in str(each) for each in find_mistakes(config, "rollout"))
