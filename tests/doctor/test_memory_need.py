"""What a model will take is named before it is loaded, and judged against what there is."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from dart_cli.config.architecture import text_sizes
from dart_cli.config.schema import Config
from dart_cli.doctor import run
from dart_cli.doctor.memory_need import GIB, Need, _layer, judge_needs, needs
from dart_cli.policy.families import FAMILIES
from tests.config.model_parts import write_json, write_model
from tests.doctor.parts import worst

TOKENS = 128


def config_of(folder: Path, **sections: Any) -> Config:
    return Config.model_validate({"model": {"path": str(folder)}, **sections})


def kept_bytes(model: torch.nn.Module, width: int) -> int:
    """Bytes that the backward pass of a language model keeps of `TOKENS` tokens."""
    storages: dict[int, tuple[int, torch.Tensor]] = {}
    own = {each.untyped_storage().data_ptr() for each in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = (storage.nbytes(), tensor)  # held: no address twice
        return tensor

    dtype = next(model.parameters()).dtype
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(inputs_embeds=torch.zeros(1, TOKENS, width, dtype=dtype, requires_grad=True))
    return sum(size for size, _ in storages.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", list(FAMILIES))
def test_the_estimate_of_activations_is_near_what_torch_keeps(
    kind: str, dtype: str, tmp_path: Path
) -> None:
    tree = copy.deepcopy({**FAMILIES[kind].config, "model_type": kind})
    text = tree.get("text_config", tree)
    text.update(hidden_size=128, intermediate_size=512, num_attention_heads=4)
    tree["vision_config"]["hidden_size" if kind == "qwen2_vl" else "out_hidden_size"] = 128
    found = []
    for layers in (1, 3):
        text["num_hidden_layers"] = layers
        write_json(tmp_path, "config.json", tree)
        loaded = AutoConfig.from_pretrained(tmp_path)
        loaded._attn_implementation = "sdpa"
        model = AutoModelForImageTextToText.from_config(loaded, dtype=getattr(torch, dtype))
        found.append(kept_bytes(model.model.language_model, 128))
    measured = (found[1] - found[0]) / 2 / TOKENS
    assert 0.7 < _layer(text_sizes(tree), dtype) / measured < 1.4


def test_weights_and_optimizer_are_counted_exactly(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    plain, worker = needs(config_of(folder))
    count = plain.fixed // 16
    assert plain.fixed == 16 * count  # 4 weights, 4 gradient, 8 moments
    half, _ = needs(config_of(folder, model={"path": str(folder), "dtype": "bfloat16"}))
    assert half.fixed == 18 * count
    referenced, _ = needs(config_of(folder, train={"kl_beta": 0.1}))
    assert referenced.fixed == 20 * count
    assert worker.fixed == 4 * count + (4096 + 1024) * 2**20
    sampled = needs(config_of(folder, rollout={"engine": "scripted"}))
    assert [need.process for need in sampled] == ["train"]


def test_more_screens_and_samples_take_more(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    policy = {"history_images": 3, "history_turns": 2}
    few, many, larger = (
        needs(config_of(folder, **sections))[0].estimated
        for sections in (
            {"train": {"micro_batch": 1}},
            {"train": {"micro_batch": 4}},
            {"train": {"micro_batch": 4}, "policy": policy},
        )
    )
    assert many == 4 * few
    assert larger > 2 * many


@pytest.mark.parametrize(
    ("room", "level", "words"),
    [(200, "ok", "go: train"), (100, "warning", "likely no-go"), (60, "error", "no-go: train")],
)
def test_a_process_is_judged_against_its_gpu(room: int, level: str, words: str) -> None:
    need = Need("train", 80 * GIB, 70 * GIB, "weights and so on")
    first, verdict = judge_needs([need], 1, [room * GIB], None, on_cpu=False)
    assert first.text == "train: about 150.0 GiB (weights and so on), an estimate"
    assert verdict.level == level
    assert verdict.text.startswith(words)


def test_on_a_cpu_all_processes_share_the_host() -> None:
    found = [Need("train", 4 * GIB, 0, ""), Need("rollout", 2 * GIB, 0, "")]
    for rollouts, level in ((1, "ok"), (3, "error")):
        *_, verdict = judge_needs(found, rollouts, [], 8 * GIB, on_cpu=True)
        assert verdict.level == level
    assert len(list(judge_needs(found, 1, [], 8 * GIB, on_cpu=False))) == 2  # its GPU is elsewhere


def test_a_model_that_is_too_large_is_a_no_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path)
    monkeypatch.setattr(run, "gpu_memory", lambda: [2**20])
    found = worst(list(run.memory_need(config_of(folder))))
    assert (found.level, found.subject) == ("error", "memory need")
    assert "no-go" in found.text
    assert not list(run.memory_need(Config()))
