"""Parts of the GPU checks: a model folder of a 7B's widths, and trajectories to train it on.

    Size            which model, screens and trajectories: SEVEN_B, or TINY for a check of the checks
    write_shards    random weights, a safetensors file for each layer, made on the device
    folder_of       a model folder of the first so many layers, by links to these files
    trajectories    multi-turn trajectories whose completions are random tokens, as a Batch

Nothing is downloaded: widths are those of Qwen2.5-VL-7B's config.json, weights are drawn, tokenizer and
preprocessor those of scripts/small_models.py.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from bus.messages import Batch, Turn, VersionSpan
from bus.packed import float64s, int32s
from dart_cli.data.loading import chained
from dart_cli.data.store.steps import BatchStep
from dart_cli.doctor.logprob_check import draw
from dart_cli.language.history import History
from dart_cli.policy.loader import LoadedPolicy
from dart_cli.policy.prompt import PromptRenderer
from envs.contract.blobs import content_hash
from scripts.small_models import build

KIND = "qwen2_5_vl"
SCALE = 0.02  # standard deviation of the drawn weights


@dataclass(frozen=True)
class Size:
    """One model and its work."""

    text: dict[str, Any]
    vision: dict[str, Any]
    layers: int  # of the whole model
    screen: tuple[int, int]  # width and height, pixels
    widest: tuple[int, int]  # of the screens that engine and trainer are compared on
    trajectories: int
    steps: int  # of each
    completion: int  # tokens of each step
    history: History
    pack_tokens: int


SEVEN_B = Size(
    text={
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "max_position_embeddings": 128000,
        "max_window_layers": 28,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "sliding_window": 32768,
    },
    vision={
        "depth": 32,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
    },
    layers=28,
    screen=(1280, 720),
    widest=(1920, 1080),
    trajectories=2,
    steps=15,
    completion=100,
    history=History(images=3, turns=35, images_most=7),
    pack_tokens=16_384,
)
TINY = replace(
    SEVEN_B,
    text={},
    vision={},
    layers=2,
    screen=(168, 112),
    widest=(224, 168),
    steps=4,
    completion=6,
    history=History(images=1, turns=3, images_most=3),
    pack_tokens=512,
)


def write_shards(folder: Path, size: Size, layers: int, device: str, dtype: torch.dtype) -> Path:
    """Write the weights of `layers` layers and all else that a folder needs; return `folder`."""
    build(KIND, folder, dtype=dtype)
    tree = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tree |= size.text | {"num_hidden_layers": layers}
    tree["vision_config"] |= size.vision
    (folder / "config.json").write_text(json.dumps(tree, indent=2), encoding="utf-8")
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))
    shards: dict[str, dict[str, torch.Size]] = {}
    for name, tensor in model.state_dict().items():
        shards.setdefault(_shard_of(name), {})[name] = tensor.shape
    (folder / "model.safetensors").unlink()
    torch.manual_seed(0)
    for shard, shapes in shards.items():
        tensors = {name: _draw_weight(shape, device, dtype) for name, shape in shapes.items()}
        save_file(tensors, folder / shard, metadata={"format": "pt"})
    _write_index(folder, {name: shard for shard, names in shards.items() for name in names})
    return folder


def _shard_of(name: str) -> str:
    parts = name.split(".")
    if "visual" in parts:
        return "visual.safetensors"
    if "layers" in parts:
        return f"layer-{int(parts[parts.index('layers') + 1]):02}.safetensors"
    return "rest.safetensors"


def _draw_weight(shape: torch.Size, device: str, dtype: torch.dtype) -> torch.Tensor:
    """Return a matrix of small numbers; a vector, which scales or shifts, near 1: no part is without effect."""
    noise = torch.randn(shape, device=device, dtype=dtype).mul_(SCALE)
    return (noise if len(shape) >= 2 else noise.add_(1.0)).cpu()


def _write_index(folder: Path, placed: dict[str, str]) -> None:
    index = {"metadata": {}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def folder_of(shards: Path, folder: Path, layers: int) -> Path:
    """Return a model folder of the first `layers` layers in `shards`; its weights are links to them."""
    folder.mkdir(exist_ok=True)
    for path in shards.iterdir():
        if path.suffix == ".safetensors":
            (folder / path.name).unlink(missing_ok=True)
            os.link(path, folder / path.name)
        else:
            (folder / path.name).write_bytes(path.read_bytes())
    tree = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tree["num_hidden_layers"] = layers
    (folder / "config.json").write_text(json.dumps(tree), encoding="utf-8")
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    _write_index(
        folder,
        {
            name: shard
            for name, shard in index["weight_map"].items()
            if not shard.startswith("layer-") or int(shard[6:8]) < layers
        },
    )
    return folder


def trajectories(policy: LoadedPolicy, size: Size, *, seed: int = 0) -> Batch:
    """Return a batch of `size.trajectories`, whose prompts show what `size.history` keeps."""
    rng = random.Random(seed)
    renderer = PromptRenderer(policy, part_order="instruction_first")
    words = [token for token in range(20, 200) if token not in policy.forbidden_token_ids]
    end = policy.encode_completion("")[-1]  # the one that the chat template writes, too
    images: dict[str, bytes] = {}
    steps: list[BatchStep] = []
    for number in range(size.trajectories):
        turns: list[Turn] = []
        for step in range(size.steps):
            screen = draw(rng, *size.screen)
            visible = size.history.visible(turns)
            prompt = renderer.render(f"save file {number} as report", visible, screen)
            completion = [*rng.choices(words, k=size.completion - 1), end]
            hashes = [content_hash(image) for image in prompt.images]
            images |= dict(zip(hashes, prompt.images, strict=True))
            steps.append(
                BatchStep(
                    group_id="g",
                    trajectory_id=str(number),
                    step=step,
                    prompt_token_ids=int32s(prompt.token_ids),
                    token_ids=int32s(completion),
                    image_hashes=hashes,
                    behaviour_logprobs=float64s([-5.0] * len(completion)),
                    version_spans=[VersionSpan(version=0, start=0, end=len(completion))],
                    advantage=rng.choice([-1.0, 1.0]),
                    weight=1.0,
                )
            )
            turns = [*visible, Turn(text="", screenshot=screen, token_ids=completion)]
    chains, samples = chained(steps)
    return Batch(
        batch_id=1,
        group_ids=["g"],
        temperature=1.0,
        chains=chains,
        samples=samples,
        images=images,
    )
