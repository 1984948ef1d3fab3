"""A tiny model with finer cells than the one that ships, and without any grounding: where both arms begin.

    python benchmarks/learning/pointer_base.py --seed 0 --seconds 40 --out FOLDER

Cells of 14 pixels, 12 by 12 on a screen of 168. It is trained for `--seconds` of CPU on what pre-training
gives to real models, the words for what is in sight: each cell's word, and questions that a word answers. It
never sees a coordinate, nor learns where an instruction points.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dart_cli.policy.forward import encoder_outputs, image_features
from dart_cli.policy.loader import LoadedPolicy, load_policy
from scripts import tiny_model as tiny
from scripts.build_tiny_base import (
    HELDOUT,
    NAMING_SCALE,
    PackedSheets,
    Packer,
    learning_rate,
    sheet,
)

SIZES = tiny.TinySizes(patch=14, merge=1)
BATCH, RATE, WORDS = 16, 2e-3, 3


def words_loss(model: Any, packed: PackedSheets) -> tuple[torch.Tensor, float]:
    """Cross entropy of words that answer questions, and of each cell's word; the share of cells named right."""
    features = image_features(model, packed.images)
    hidden = model.model(
        input_ids=packed.input_ids,
        attention_mask=packed.mask,
        position_ids=packed.position_ids,
        mm_encoder_outputs=encoder_outputs(features, range(len(packed.images))),
        use_cache=False,
    ).last_hidden_state.flatten(0, 1)
    weight = model.lm_head.weight
    answers = F.cross_entropy(hidden[packed.tokens[:, 0]] @ weight.T, packed.tokens[:, 1])
    seen = F.normalize(torch.cat(features.embeds), dim=-1) @ F.normalize(weight, dim=-1).T
    names = F.cross_entropy(NAMING_SCALE * seen, packed.names, reduction="none")
    blank = packed.names == packed.names.mode().values
    right = (seen.argmax(dim=1) == packed.names)[~blank].float().mean().item()
    return answers + torch.where(blank, 0.1 * names, names).mean(), right


def train(policy: LoadedPolicy, seed: int, seconds: float) -> dict[str, float]:
    """Train in place for so many CPU seconds; the last updates' loss and share of cells named right."""
    model: Any = policy.model.train()
    packer = Packer(policy.tokenizer, policy.image_token_id, policy.images.merge)
    rng = Random(f"pointer-base/{seed}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.99), weight_decay=0.01)
    started, step, loss, named = time.process_time(), 0, 0.0, 0.0
    while (spent := time.process_time() - started) < seconds:
        for group in optimizer.param_groups:
            group["lr"] = RATE * learning_rate(step, spent / seconds)
        sheets = [
            sheet(policy.images, rng.randrange(HELDOUT), rng, clicks=0, extras=WORDS)
            for _ in range(BATCH)
        ]
        value, right = words_loss(model, packer.pack(sheets, rng))
        optimizer.zero_grad(set_to_none=True)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        share = max(0.05, 1 / step)
        loss, named = (1 - share) * loss + share * value.item(), (1 - share) * named + share * right
    return {"updates": step, "loss": round(loss, 3), "cells_named": round(named, 3)}


def main() -> None:
    """Build one base; its last line is JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=40.0, help="CPU seconds")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    draft = arguments.out.with_name(f".{arguments.out.name}.draft")
    model, tokenizer, processor = tiny.build_tiny(arguments.seed, SIZES)
    tiny.save(draft, model, tokenizer, processor, {})
    policy = load_policy(draft)
    told = {
        "script": "benchmarks/learning/pointer_base.py",
        "seed": arguments.seed,
        "cpu_seconds": arguments.seconds,
        **train(policy, arguments.seed, arguments.seconds),
    }
    tiny.save(draft, policy.model.eval(), policy.tokenizer, processor, told)  # type: ignore[arg-type]
    draft.rename(arguments.out)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
