"""Promises of a model over several processes: read in parts, trained as one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bus.errors import ModelError
from dart_cli.config.architecture import MIXTURES
from dart_cli.policy.loader import load_policy
from dart_cli.policy.model_files import PolicyFiles, fill
from scripts.small_models import build
from tests.train import sharded_cases as cases
from tests.train.world import run_world

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_vl_moe", "qwen3_5_moe")


RANKS = 3
"""By which hardly any tensor can be divided evenly."""
BFLOAT16 = 2**-8
"""What rounding to eight bits may change, where sums are taken in another order. Processors differ in it."""


@pytest.fixture(scope="module")
def loaded(pointer_folder: Callable[[str], Path]) -> dict[str, list[dict[str, Any]]]:
    """Return what each rank holds of a model of each class, with a pointer head."""
    result = run_world(RANKS, cases.all_loaded, {kind: pointer_folder(kind) for kind in FAMILIES})
    return {kind: [one[kind] for one in result] for kind in FAMILIES}


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_rank_reads_and_holds_its_own_shards_and_frozen_parameters_alone(
    pointer_folder: Callable[[str], Path], loaded: dict[str, list[dict[str, Any]]], kind: str
) -> None:
    folder, size, result = pointer_folder(kind), RANKS, loaded[kind]
    whole = dict(load_policy(folder).model.named_parameters())
    assert "pointer_head.qkv.weight" in whole
    for rank, one in enumerate(result):
        assert one["equal"], f"rank {rank} holds other values than the folder"
        for name, shard_size in one["held"].items():
            if ".visual." in name:  # frozen: whole, in the model's type
                assert shard_size == whole[name].numel() * torch.bfloat16.itemsize, name
            else:  # a float32 shard: no more than its share of the rows
                rows = -(-len(whole[name]) // size)
                assert shard_size <= rows * whole[name][0].numel() * torch.float32.itemsize, name
    frozen = sum(each.nbytes for name, each in whole.items() if ".visual." in name)
    trained = sum(each.nbytes for name, each in whole.items() if ".visual." not in name)
    assert sum(one["read"] for one in result) == trained + size * frozen
    assert max(one["read"] for one in result) < frozen + trained / size * 1.1
    expected = {name: each.numpy() for name, each in load_policy(folder).model.named_buffers()}
    for one in result:
        assert one["buffers"].keys() == expected.keys()
        assert all(np.array_equal(one["buffers"][name], expected[name]) for name in expected)


@pytest.fixture(scope="module")
def curves(pointer_folder: Callable[[str], Path]) -> dict[str, dict[str, Any]]:
    """The same two updates of a model that points, done in several ways on 2 ranks, and on 1."""
    folder = pointer_folder("qwen2_5_vl")
    ways: dict[str, dict[str, Any]] = {
        "shards": {},
        "summed each time": {"once": False},
        "offloaded": {"offload": True},
        # One update: the first step of Adam moves every number by its gradient's sign, the last bit included.
        "bfloat16": {"compute": torch.bfloat16, "updates": 1},
    }
    two = run_world(2, cases.all_of, {name: (folder, way) for name, way in ways.items()})
    ways = {"plain": {"plain": True}, "bfloat16": ways["bfloat16"]}
    [one] = run_world(1, cases.all_of, {name: (folder, way) for name, way in ways.items()})
    shard_size = two[1]["shards"]["published"].values()
    assert not any(each.size for each in shard_size)  # rank 0 alone has what is published
    return two[0] | {f"{name}, 1 rank": result for name, result in one.items()}


@pytest.mark.parametrize(
    ("way", "expected", "tolerance"),
    [
        ("shards", "plain, 1 rank", 1e-5),
        ("summed each time", "shards", 1e-5),
        ("offloaded", "shards", 1e-6),
        ("bfloat16", "bfloat16, 1 rank", BFLOAT16),
    ],
)
def test_however_the_work_is_spread_loss_norm_and_gradients_are_the_same(
    curves: dict[str, dict[str, Any]], way: str, expected: str, tolerance: float
) -> None:
    actual, reference = curves[way], curves[expected]
    assert np.allclose(actual["curve"], reference["curve"], rtol=tolerance)
    assert actual["gradients"].keys() == reference["gradients"].keys() > {"pointer_head.norm.bias"}
    for name, gradient in reference["gradients"].items():
        if name == "pointer_head.key_out.bias":  # the same in all patches: it moves no probability
            assert np.abs(gradient).max() < 1e-3
            continue
        difference = np.abs(actual["gradients"][name] - gradient).max()
        assert difference <= tolerance * np.abs(gradient).max(), name


def test_what_is_published_is_the_whole_model_in_its_own_type(
    pointer_folder: Callable[[str], Path],
) -> None:
    folder = pointer_folder("qwen3_5")
    [result, _] = run_world(2, cases.published, folder)
    model = load_policy(folder, "bfloat16").model
    expected = {name: each.detach() for name, each in model.named_parameters()}
    assert result.keys() == expected.keys()
    for name, each in expected.items():
        assert np.array_equal(result[name], each.view(torch.int16).numpy()), name


def test_experts_under_adapters_are_shared_over_the_ranks(family: Callable[[str], Path]) -> None:
    """Two ranks hold half of the experts each, and their adapters get the gradients of one process."""
    folders = {kind: family(kind) for kind in MIXTURES}
    ranks = run_world(2, cases.all_adapted, folders)
    for kind, folder in folders.items():
        plain = cases.adapted(0, 1, folder, plain=True)
        for result in (rank[kind, recompute] for rank in ranks for recompute in (False, True)):
            assert result["experts"] == result["whole"] / 2 == plain["experts"] / 2
            assert result["loss"] == pytest.approx(plain["loss"], rel=1e-6)
            assert result["gradients"].keys() == plain["gradients"].keys()
            for name, gradient in plain["gradients"].items():
                gap = np.abs(result["gradients"][name] - gradient).max()
                assert gap <= 1e-5 * np.abs(gradient).max() + 1e-9, name


def test_an_incomplete_folder_is_refused_by_the_name_of_the_tensor(tmp_path: Path) -> None:
    folder = build("qwen2_vl", tmp_path / "model")
    model = load_policy(folder, weights=False).model
    model.lm_head.weight = torch.nn.Parameter(torch.empty(3, 3, device="meta"))
    with PolicyFiles(folder) as files, pytest.raises(ModelError, match=r"lm_head\.weight"):
        fill(model, files, lambda _: torch.device("cpu"))


def test_files_that_are_no_safetensors_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x" * 20)
    with pytest.raises(ModelError, match="copy them again"):
        PolicyFiles(tmp_path)
