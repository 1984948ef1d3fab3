"""The formulas of a trainer rank's memory give what torch counts for the same update without data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from benchmarks.exactness.memory import (
    SEVEN_B,
    SMALL,
    SMALL_HYBRID,
    SMALL_HYBRID_MIXTURE,
    SMALL_MIXTURE,
    counted,
    predicted,
    tree_of,
)
from dart_cli.config.architecture import shape_of
from dart_cli.config.published import PUBLISHED
from dart_cli.doctor.trainer_memory import (
    CONTEXT,
    TrainerSetup,
    block_activations,
    layer_activations,
    recurrence_activations,
    trainer_memory,
)
from tests.doctor.seven_b import CONFIG

ERROR = 0.03
"""Largest relative error of a formula, of the cases below."""

SETUP = TrainerSetup(tokens=2048, predicted=128, ranks=8)
WIDE_MLP = {**SMALL, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 4096}
LARGE_VOCABULARY = {**SMALL, "vocab_size": 65536}

CASES: dict[str, tuple[str, dict[str, Any], int, TrainerSetup]] = {
    "two layers": ("qwen2_5_vl", SMALL, 2, SETUP),
    "four layers": ("qwen2_5_vl", SMALL, 4, SETUP),
    "two layers, recompute": ("qwen2_5_vl", SMALL, 2, replace(SETUP, recompute=True)),
    "four layers, recompute": ("qwen2_5_vl", SMALL, 4, replace(SETUP, recompute=True)),
    "other widths": ("qwen2_vl", WIDE_MLP, 2, replace(SETUP, ranks=2)),
    "a large vocabulary": (
        "qwen2_5_vl",
        LARGE_VOCABULARY,
        2,
        replace(SETUP, predicted=2047, recompute=True),
    ),
    "the end decides": (
        "qwen2_5_vl",
        LARGE_VOCABULARY,
        2,
        replace(SETUP, tokens=256, recompute=True),
    ),
    "normed heads": ("qwen3_vl", SMALL, 2, replace(SETUP, recompute=True)),
    "one rank": ("qwen2_5_vl", SMALL, 2, replace(SETUP, ranks=1, tokens=4096, recompute=True)),
    "float32": ("qwen2_5_vl", SMALL, 2, replace(SETUP, dtype="float32")),
    "recurrent layers": ("qwen3_5", SMALL_HYBRID, 4, SETUP),
    "recurrent layers, recompute": ("qwen3_5", SMALL_HYBRID, 4, replace(SETUP, recompute=True)),
    "recurrent layers alone": ("qwen3_5", SMALL_HYBRID, 3, replace(SETUP, recompute=True)),
    "recurrent layers in float32": (
        "qwen3_5",
        SMALL_HYBRID,
        4,
        replace(SETUP, dtype="float32", recompute=True),
    ),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, of parts that are private or a preview
@pytest.mark.parametrize("case", CASES)
def test_the_formula_is_what_torch_counts(case: str) -> None:
    kind, text, layers, setup = CASES[case]
    tree = tree_of(kind, text, layers)
    assert predicted(tree, setup).peak == pytest.approx(counted(kind, tree, setup), rel=ERROR)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_tied_head_is_counted_once() -> None:
    tree = tree_of("qwen2_5_vl", LARGE_VOCABULARY, 2) | {"tie_word_embeddings": True}
    for setup in (SETUP, replace(SETUP, tokens=256, recompute=True)):
        assert predicted(tree, setup).peak == pytest.approx(
            counted("qwen2_5_vl", tree, setup), rel=ERROR
        )


@pytest.mark.parametrize(("width", "mlp"), [(256, 1024), (512, 1024), (256, 2048)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_a_vision_block_keeps_what_the_formula_says(
    kind: str, dtype: str, width: int, mlp: int
) -> None:
    tree = tree_of(kind, SMALL_HYBRID if kind == "qwen3_5" else SMALL, 1)
    sizes = {"embed_dim": width, "mlp_ratio": mlp // width}
    if kind != "qwen2_vl":
        sizes = {"hidden_size": width, "intermediate_size": mlp}
    tree["vision_config"] |= {**sizes, "num_heads": 4}
    given = {key: value for key, value in tree.items() if key != "model_type"}
    config = AutoConfig.for_model(kind, **given)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config, dtype=getattr(torch, dtype))
    block = model.model.visual.blocks[0].to_empty(device="cpu")
    kept = _kept_of_a_patch(block, width)
    places = 4 * 2 * width // 4  # cosines and sines, which all blocks share
    assert kept - places == pytest.approx(block_activations(shape_of(tree), dtype), rel=0.01)


def _kept_of_a_patch(block: torch.nn.Module, width: int, patches: int = 256) -> float:
    """Bytes of a patch that the block's backward pass keeps."""
    kept: dict[int, torch.Tensor] = {}
    own = {each.untyped_storage().data_ptr() for each in block.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor  # held: no address twice
        return tensor

    dtype = next(block.parameters()).dtype
    visible = torch.zeros(patches, width, dtype=dtype, requires_grad=True) * 1
    places = torch.zeros(patches, width // 4), torch.zeros(patches, width // 4)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(visible, cu_seqlens=torch.tensor([0, patches]), position_embeddings=places)
    return sum(each.untyped_storage().nbytes() for each in kept.values()) / patches


def test_a_teacher_is_counted_with_its_own_size_in_shards_of_all_ranks() -> None:
    """Adapters of the policy do not make the teacher whole on each rank."""
    shape = shape_of(CONFIG)
    for adapters in (0, 10**6):
        setup = replace(SETUP, ranks=6, adapters=adapters)
        alone, taught = (
            trainer_memory(shape, replace(setup, teacher=teacher)) for teacher in (None, shape)
        )
        assert alone.permanent["teacher"] == 0
        assert taught.permanent["teacher"] == 2 * -(-shape.parameters // 6)
        assert taught.fixed - alone.fixed == taught.permanent["teacher"]
        assert taught.peak >= alone.peak + taught.permanent["teacher"]


def test_a_policy_that_is_compared_with_a_teacher_keeps_its_states_and_its_head() -> None:
    """Hints without a teacher's folder take the reference, which adapters are themselves."""
    shape = shape_of(CONFIG)
    for adapters in (0, 10**6):
        setup = replace(SETUP, adapters=adapters, predicted=1000)
        alone, taught = (
            trainer_memory(shape, replace(setup, is_taught=hints, reference=hints))
            for hints in (False, True)
        )
        reference = 0 if adapters else 2 * -(-shape.parameters // setup.ranks)
        assert taught.fixed - alone.fixed == reference
        head = 0 if adapters else 2 * shape.embedding
        assert taught.passing["taught"] >= 2 * 1000 * shape.width + head
        assert taught.peak - alone.peak >= reference + 2 * 1000 * shape.width + head


@pytest.mark.parametrize("recompute", [False, True])
def test_a_trained_tower_takes_more(recompute: bool) -> None:
    shape = shape_of(CONFIG)
    setup = replace(SETUP, tokens=9500, recompute=recompute)
    frozen, trained = (
        trainer_memory(shape, replace(setup, freeze_vision=frozen)) for frozen in (True, False)
    )
    assert trained.permanent["masters"] == -(-4 * shape.parameters // 8)
    assert trained.permanent["frozen"] == 0
    patches = 4 * 9500
    each = 2 * 1280 if recompute else block_activations(shape, "bfloat16")
    assert trained.peak - frozen.peak > 0.9 * 32 * patches * each


def test_what_is_held_is_shared_over_the_ranks() -> None:
    shape = shape_of(tree_of("qwen2_5_vl", SEVEN_B, 28))
    one, four = (trainer_memory(shape, replace(SETUP, ranks=ranks)).permanent for ranks in (1, 4))
    assert one["masters"] == 4 * shape.text
    assert one["gradients"] == 4 * shape.text
    assert one["moments"] == 8 * shape.text
    assert one["frozen"] == four["frozen"] == 2 * shape.vision
    assert sum(four.values()) - four["frozen"] == pytest.approx(16 * shape.text / 4)


def test_offload_moves_what_is_held_to_main_memory() -> None:
    shape = shape_of(tree_of("qwen2_5_vl", SEVEN_B, 28))
    here, there = (
        trainer_memory(shape, replace(SETUP, ranks=2, offload=offload)) for offload in (False, True)
    )
    assert here.host == 0
    assert there.host == 8 * shape.text
    assert here.fixed - there.fixed == there.host
    assert there.passing == here.passing


def test_adapters_train_little_and_keep_the_base_whole() -> None:
    shape = shape_of(tree_of("qwen2_5_vl", SEVEN_B, 28))
    adapters = shape.adapters(32)
    assert 0.005 < adapters / shape.text < 0.02
    result = trainer_memory(shape, replace(SETUP, adapters=adapters, reference=True))
    assert result.permanent["frozen"] == 2 * shape.parameters
    assert result.permanent["reference"] == 0  # the base itself
    assert result.permanent["moments"] == 8 * adapters / SETUP.ranks


def test_seven_billion_parameters_keep_225_kilobytes_a_token_and_layer() -> None:
    shape = shape_of(tree_of("qwen2_5_vl", SEVEN_B, 28))
    assert layer_activations(shape, "bfloat16") == pytest.approx(225_000, rel=0.002)


def test_a_recurrent_layer_of_nine_billion_parameters_keeps_316_kilobytes_a_token() -> None:
    shape = shape_of({**PUBLISHED["qwen3_5"].tree, "model_type": "qwen3_5"})
    assert recurrence_activations(shape, "bfloat16") == pytest.approx(316_300, rel=0.002)
    assert layer_activations(shape, "bfloat16") == pytest.approx(258_100, rel=0.002)


def test_small_models_keep_gradients_whole() -> None:
    shape = shape_of(tree_of("qwen2_5_vl", SMALL, 2))
    result = trainer_memory(shape, SETUP)
    assert result.permanent["gradients"] == 4 * shape.text
    assert result.total > result.peak + CONTEXT


def test_a_pointer_head_is_counted_and_trained_where_the_policy_points() -> None:
    keys = {
        f"pointer_{name}_token_id": 151665 + i for i, name in enumerate(("start", "pad", "end"))
    }
    plain, shape = shape_of(CONFIG), shape_of({**CONFIG, **keys})
    head = 8 * 3584**2 + 10 * 3584
    assert (plain.pointer, shape.pointer) == (0, head)
    assert shape.parameters == plain.parameters + head
    assert replace(shape, pointer=0) == plain
    without = trainer_memory(plain, SETUP).permanent
    points = trainer_memory(shape, replace(SETUP, points=True))
    writes = trainer_memory(shape, SETUP)
    assert {
        part: size - without[part] for part, size in writes.permanent.items() if part != "frozen"
    } == (dict.fromkeys(without.keys() - {"frozen"}, 0))
    assert writes.permanent["frozen"] == without["frozen"] + 2 * head
    assert points.permanent["frozen"] == without["frozen"]
    for part, each in (("masters", 4), ("gradients", 4), ("moments", 8)):
        assert points.permanent[part] - without[part] == pytest.approx(each * head / 8, abs=8)
    assert sum(points.passing.values()) - sum(writes.passing.values()) == 4 * head


MIXTURES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "experts": ("qwen3_vl_moe", SMALL_MIXTURE, False),
    "experts, recompute": ("qwen3_vl_moe", {**SMALL_MIXTURE, "num_experts": 64}, True),
    "experts behind recurrent layers": ("qwen3_5_moe", SMALL_HYBRID_MIXTURE, True),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", MIXTURES)
def test_a_mixtures_formula_is_near_what_torch_counts_and_not_below_with_adapters(
    case: str,
) -> None:
    kind, text, recompute = MIXTURES[case]
    tree = tree_of(kind, text, 4)
    setup = replace(SETUP, recompute=recompute)
    assert predicted(tree, setup).peak == pytest.approx(counted(kind, tree, setup), rel=0.05)
    setup = replace(setup, adapters=shape_of(tree).adapters(8))
    count = counted(kind, tree, setup)
    assert count <= predicted(tree, setup).peak <= 1.2 * count


@pytest.mark.parametrize("kind", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_experts_under_adapters_are_shared_over_the_ranks(kind: str) -> None:
    shape = shape_of({**PUBLISHED[kind].tree, "model_type": kind})
    assert shape.experts is not None
    setup = replace(SETUP, adapters=shape.adapters(32), recompute=True)
    one, eight = (trainer_memory(shape, replace(setup, ranks=ranks)) for ranks in (1, 8))
    stacked = 2 * shape.layers * shape.experts.stacked
    assert one.permanent["frozen"] == 2 * shape.parameters
    assert one.permanent["frozen"] - eight.permanent["frozen"] == stacked * 7 // 8
    assert stacked > 0.9 * one.permanent["frozen"]
    assert eight.total < 30e9 < one.total
