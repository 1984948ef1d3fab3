"""Adapters: what is trained beside them, what is kept of them, and both forms of the folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from bus.errors import UserError
from dart_cli.config.model_folder import BUILTIN
from dart_cli.config.schema import LoraConfig
from dart_cli.policy.loader import load_policy, weight_tensors
from dart_cli.policy.lora import is_adapter, peft_names
from tests.tune.stopping import run_and_stop

Keys = dict[str, Any]
Tune = Callable[..., Any]
TENSORS = "model.safetensors"
LORA = {"model.lora.rank": 3, "model.lora.alpha": 6.0}


@pytest.fixture
def keys(grounding_set: Path, tmp_path: Path) -> Keys:
    """Three updates of adapters."""
    own = {
        "tune.data": [str(grounding_set / "train")],
        "tune.out": tmp_path / "out",
        "tune.batch": 3,
    }
    return {**own, **LORA, "tune.epochs": 1.0, "tune.lr": 1e-2}


def test_a_folder_of_adapters_is_what_peft_makes_the_merged_one_of(
    tune: Tune, keys: Keys, tmp_path: Path
) -> None:
    tune(keys)
    tune(keys | {"tune.out": tmp_path / "alone", "tune.write": "adapters"})
    plain = AutoModelForImageTextToText.from_pretrained(BUILTIN["builtin:tiny"])
    by_peft = peft.PeftModel.from_pretrained(plain, tmp_path / "alone").merge_and_unload()
    expected = dict(by_peft.named_parameters())
    before = dict(load_policy("builtin:tiny").model.named_parameters())
    held = dict(load_policy(tmp_path / "out").model.named_parameters())
    changed = {name for name in before if not torch.equal(before[name], held[name])}
    assert {name.rsplit(".", 2)[1] for name in changed} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    for name, value in held.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6)
    told = json.loads((tmp_path / "alone" / "adapter_config.json").read_text())
    assert (told["r"], told["base_model_name_or_path"]) == (3, "builtin:tiny")


def test_adapters_of_a_folder_are_swapped_and_trained_further(
    tune: Tune, keys: Keys, tmp_path: Path
) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    for seed, out in enumerate(folders):
        tune(keys | {"tune.out": out, "tune.write": "adapters", "run.seed": seed})
    lora = LoraConfig(rank=3, alpha=6.0)
    for folder in folders:
        policy = load_policy("builtin:tiny", lora=lora, adapters=str(folder))
        held = load_file(folder / "adapter_model.safetensors")
        assert peft_names(weight_tensors(policy.model)).keys() == held.keys()
        for name, tensor in peft_names(weight_tensors(policy.model)).items():
            assert torch.equal(tensor, held[name])
    on = {**keys, "tune.write": "adapters", "tune.out": tmp_path / "on"}
    further = tune(on | {"model.adapters": str(folders[0]), "run.seed": 1})
    whole = tune({**keys, "tune.out": tmp_path / "again", "run.seed": 1})
    assert further.curve[0]["lm"] < whole.curve[0]["lm"] - 0.01  # it begins where the first ended


REFUSED: list[tuple[Keys, str]] = [
    ({"model.lora.rank": 4}, "set model.lora.rank = 3"),
    ({"model.lora.alpha": 5.0}, "set model.lora.alpha = 6"),
    ({"model.adapters": "nowhere"}, "is no folder of adapters"),
]


def test_adapters_of_other_settings_are_refused(tune: Tune, keys: Keys, tmp_path: Path) -> None:
    out = tmp_path / "adapters"
    tune(keys | {"tune.out": out, "tune.write": "adapters"})
    for changes, said in REFUSED:
        with pytest.raises(UserError, match=f"model.adapters.*{said}"):
            tune(keys | {"model.adapters": str(out)} | changes)


def test_a_pointer_trains_its_head_and_tokens_beside_the_adapters_and_goes_on(
    tune: Tune,
    keys: Keys,
    pointer_folder: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = pointer_folder("builtin:tiny")
    keys |= {"model.path": str(base), "policy.pointing": "pointer", "tune.epochs": 2.0}
    whole = tune(keys | {"tune.out": tmp_path / "whole"})
    assert [point["name"] for point in whole.curve] == ["head"] * 3 + ["all"] * 3
    run_and_stop(tune, keys, 5, monkeypatch)  # within the second stage
    [state] = (tmp_path / "out.part").glob("state-*")
    names = {name.partition("/")[0] for name in load_file(state)} - {"rng"}
    assert all(is_adapter(n) or "pointer" in n for n in names)  # the base is not kept
    tune(keys)
    after, other = load_file(tmp_path / "out" / TENSORS), load_file(tmp_path / "whole" / TENSORS)
    assert all(torch.equal(after[name], other[name]) for name in other)
    before = load_file(base / TENSORS)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name for name in before if "pointer_head" in name} <= changed
    [embedding] = [name for name in changed if "embed" in name]
    rows = (before[embedding] != after[embedding]).any(dim=1).nonzero().flatten().tolist()
    pointer = load_policy(base, weights=False, pointing="pointer").pointer
    assert pointer is not None
    assert set(rows) <= set(pointer.triple)
    assert load_policy(tmp_path / "out", pointing="pointer").pointer_head is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tune.write": "adapters", "policy.pointing": "pointer"}, "tune.write .* pointer head"),
    ],
)
def test_what_adapters_cannot_do_is_told_first(
    tune: Tune,
    keys: Keys,
    pointer_folder: Callable[[str], Path],
    change: Keys,
    message: str,
) -> None:
    if "policy.pointing" in change:
        change |= {"model.path": str(pointer_folder("builtin:tiny"))}
    with pytest.raises(UserError, match=message):
        tune(keys | change)


def test_adapters_alone_need_adapters(tune: Tune, keys: Keys) -> None:
    plain = {key: value for key, value in keys.items() if "lora" not in key}
    with pytest.raises(UserError, match=r"tune\.write .* model\.lora"):
        tune(plain | {"tune.write": "adapters"})
