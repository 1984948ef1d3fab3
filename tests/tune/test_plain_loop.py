"""A training is that of a plain loop over transformers' model, with peft's own adapters where there are some.

The loop shares rows and order with `dart tune` and nothing else: images, positions, forward pass, loss,
adapters, optimizer, clipping and learning rate are transformers', peft's and torch's own, one row at a time.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer, Qwen2VLImageProcessorPil

from dart_cli.config.load import default_config
from dart_cli.config.model_folder import BUILTIN
from dart_cli.config.schema import Config
from dart_cli.grounding.formats import grounding_config
from dart_cli.grounding.reader import read_set
from dart_cli.policy.loader import load_policy
from dart_cli.tune.examples import Examples, TextAnswers
from dart_cli.tune.training_set import Order
from dart_cli.tune.trajectories import read_trajectories

Tune = Callable[..., Any]
TINY = BUILTIN["builtin:tiny"]
UPDATES, BATCH, LR = 20, 3, 1e-3
LORA = {"model.lora.rank": 4, "model.lora.alpha": 8.0}


@dataclass(frozen=True)
class Row:
    """What a plain loop reads."""

    prompt: list[int]
    answer: list[int]
    images: list[bytes]


def items(grounding_set: Path) -> tuple[list[Row], list[str]]:
    """Rows of a grounding set with numbers as answers, and the screenshot of each."""
    config, answers = grounding_config("builtin:tiny", "", [], refusals=False)
    policy = load_policy("builtin:tiny")
    told = read_set(grounding_set / "train").items
    examples = Examples(policy, config, told, TextAnswers(policy, config, answers))
    found = [examples.of(index) for index in range(len(told))]
    rows = [Row(e.prompt.token_ids, e.answer, list(e.prompt.images)) for e in found]
    return rows, examples.group_names


def steps(files: Path) -> tuple[list[Row], list[str]]:
    """Steps of trajectories, and the trajectory of each."""
    read = read_trajectories([files], Config.model_validate({"tune": {"data": [str(files)]}}))
    batch = read.batch(range(len(read)))
    rows = [
        Row(
            batch.prompt(sample).tolist(),
            batch.completion(sample).tolist(),
            [batch.images[name] for name in batch.image_hashes(sample)],
        )
        for sample in batch.samples
    ]
    return rows, read.names


def forbidden() -> list[int]:
    """Tokens that are never sampled, as the policy has them."""
    return list(load_policy("builtin:tiny").forbidden_token_ids)


def rate(update: int) -> float:
    """The learning rate in the middle of an update: 3 % of warm-up, then half a cosine."""
    share, warm = (update + 0.5) / UPDATES, 0.03
    if share < warm:
        return LR * share / warm
    return LR * 0.5 * (1 + math.cos(math.pi * (share - warm) / (1 - warm)))


def plain_curve(rows: Sequence[Row], group_names: Sequence[str], *, lora: bool) -> list[float]:
    """The loss of each update."""
    model: Any = AutoModelForImageTextToText.from_pretrained(TINY, dtype=torch.float32)
    processor = Qwen2VLImageProcessorPil.from_pretrained(TINY)
    assert AutoTokenizer.from_pretrained(TINY).vocab_size <= model.config.text_config.vocab_size
    if lora:
        ours = load_policy("builtin:tiny", lora=default_config(overrides(LORA)).model.lora)
        begin = {n: p for n, p in ours.model.named_parameters() if ".lora_" in n}
        layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=layers, lora_dropout=0.0)
        )
        named = dict(model.named_parameters())
        with torch.no_grad():
            for name, value in begin.items():
                named[f"base_model.model.{name}"].copy_(value)
        assert sum(".lora_" in name for name in named) == len(begin)
    model.eval()
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, betas=(0.9, 0.99), weight_decay=0.0)
    never, order, curve = forbidden(), Order(group_names, BATCH, "0/all"), []
    for update in range(UPDATES):
        chosen = [rows[index] for index in order.of(update)]
        count = sum(len(row.answer) for row in chosen)
        loss = torch.zeros(())
        for row in chosen:
            ids = torch.tensor([[*row.prompt, *row.answer]])
            pictures = [Image.open(io.BytesIO(each)).convert("RGB") for each in row.images]
            seen = processor(images=pictures, return_tensors="pt")
            output = model(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                mm_token_type_ids=(ids == 6).int(),
                pixel_values=seen["pixel_values"],
                image_grid_thw=seen["image_grid_thw"],
            )
            logits = output.logits[0, len(row.prompt) - 1 : -1].clone()
            logits[:, never] = -math.inf
            loss = loss + torch.nn.functional.cross_entropy(
                logits, ids[0, len(row.prompt) :], reduction="sum"
            )
        loss = loss / count
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate(update)
        optimizer.step()
        curve.append(loss.item())
    return curve


def overrides(keys: dict[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in keys.items()]


@pytest.mark.parametrize(
    ("rows", "lora"), [("items", False), ("items", True), ("steps", False), ("steps", True)]
)
def test_the_curve_is_that_of_a_plain_loop(
    tune: Tune, grounding_set: Path, solutions: Path, tmp_path: Path, rows: str, lora: bool
) -> None:
    found, group_names = items(grounding_set) if rows == "items" else steps(solutions)
    expected = plain_curve(found, group_names, lora=lora)
    data = grounding_set / "train" if rows == "items" else solutions
    keys = {"tune.data": [str(data)], "tune.out": tmp_path / "out", "tune.batch": BATCH}
    keys |= {"tune.epochs": UPDATES * BATCH / len(found), "tune.lr": LR}
    result = tune(keys | (LORA if lora else {}))
    curve = [point["loss"] for point in result.curve]
    assert len(curve) == UPDATES
    # Sums in another order differ in the last bit, and Adam's first steps move every weight by its gradient's sign.
    assert curve == pytest.approx(expected, abs=1e-4)
    assert expected[-1] < expected[0] - 0.05
