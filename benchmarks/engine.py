"""Completions per second of the transformers engine, against plain `model.generate`.

    python benchmarks/engine.py [--completions 128] [--out benchmarks/results/engine.json]

Both draw 8 tokens at temperature 1 for the same prompts of suite `mini`, one thread, CPU seconds
counted (so that other load on the machine does not). The engine also returns exact
log-probabilities and entropies and masks forbidden tokens; `generate` does not. The physical limit
is the prefill alone: one forward pass over prompt and screenshot, without decoding a token. Each
screen is new, so the engine's memory of screens it has seen does not help. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import AutoModelForImageTextToText

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # envs.py beside us hides the package
sys.path.remove(str(Path(__file__).resolve().parent))

from bus.messages import Sampling
from dart_cli.engines.base import GenerateRequest
from dart_cli.engines.transformers_engine import TransformersEngine
from dart_cli.policy.forward import ModelInputs, logits
from dart_cli.policy.model import LoadedPolicy, load_policy
from dart_cli.policy.prompt import PromptRenderer
from dart_cli.weights.file import load
from envs.registry import load_suite, make_env

BATCHES = (1, 8, 32, 64)
TOKENS = 8
Work = list[list[GenerateRequest]]


def main() -> None:
    """Measure each batch size and print one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--completions", type=int, default=128, help="per batch size")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    policy = load_policy("builtin:tiny")
    plain = AutoModelForImageTextToText.from_pretrained(policy.folder).eval()
    engine = TransformersEngine(policy, load_weights=load, max_batch=max(BATCHES), linger_s=0.02)
    rows = []
    for number, batch in enumerate(BATCHES):
        batches = max(1, arguments.completions // batch)
        # Three kinds of measurement, each on screens that none has seen.
        works = [
            requests(policy, batch, batches, first_seed=(3 * number + kind) * 100_000)
            for kind in range(3)
        ]
        total = batch * batches
        row = {
            "batch": batch,
            "engine": total / cpu_seconds(lambda work=works[0]: serve(engine, work)),
            "generate": total / cpu_seconds(lambda work=works[1]: generate(policy, plain, work)),
            "prefill": total / cpu_seconds(lambda work=works[2]: prefill(policy, work)),
        }
        row |= {
            "over_generate": row["engine"] / row["generate"],
            "of_limit": row["engine"] / row["prefill"],
        }
        rows.append({name: round(value, 3) for name, value in row.items()})
        print(rows[-1], flush=True)
    asyncio.run(engine.close())
    result = {"benchmark": "engine", "unit": "completions per CPU second", "rows": rows}
    line = json.dumps(result)
    if arguments.out:
        arguments.out.write_text(line + "\n", encoding="utf-8")
    print(line)


def requests(policy: LoadedPolicy, batch: int, batches: int, first_seed: int) -> Work:
    """First screens of all kinds of task, as the rollout worker would ask about them."""
    renderer = PromptRenderer(policy)
    tasks, env = list(load_suite("mini").tasks.values()), make_env("mini")
    work: Work = []
    for index in range(batches):
        work.append([])
        for row in range(batch):
            seed = first_seed + index * batch + row
            screen, info = env.reset(seed=seed, options={"task": tasks[seed % len(tasks)]})
            prompt = renderer.render(info["instruction"], [], screen.screenshot)
            sampling = Sampling(temperature=1.0, max_tokens=TOKENS, seed=seed)
            work[-1].append(GenerateRequest(str(seed), prompt.token_ids, prompt.images, sampling))
    return work


def cpu_seconds(act: Callable[[], None]) -> float:
    """CPU seconds of this process."""
    began = time.process_time()
    act()
    return time.process_time() - began


def serve(engine: TransformersEngine, work: Work) -> None:
    """Through our engine, as many asking at once as a batch holds."""

    async def ask() -> None:
        for batch in work:
            await asyncio.gather(*(engine.generate(request) for request in batch))

    asyncio.run(asyncio.wait_for(ask(), 600))


def inputs_of(policy: LoadedPolicy, batch: list[GenerateRequest]) -> ModelInputs:
    """The same preparation for the other two."""
    return policy.inputs([r.prompt_token_ids for r in batch], [r.images for r in batch])


@torch.inference_mode()
def generate(policy: LoadedPolicy, model: torch.nn.Module, work: Work) -> None:
    """Through transformers' own loop, on the model as transformers loads it."""
    for batch in work:
        inputs = inputs_of(policy, batch)
        shown = [inputs.images[index] for index in inputs.shown]
        model.generate(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            mm_token_type_ids=(inputs.input_ids == policy.image_token_id).int(),
            pixel_values=torch.cat([image.patches for image in shown]),
            image_grid_thw=torch.tensor([image.grid for image in shown]),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=TOKENS,
        )


@torch.inference_mode()
def prefill(policy: LoadedPolicy, work: Work) -> None:
    """One forward pass and no decoding: what no engine can undercut."""
    for batch in work:
        logits(policy.model, inputs_of(policy, batch), last=1)


if __name__ == "__main__":
    main()
