"""What a step and an update of the small model cost on one core, and of which parts.

    python benchmarks/speed/small_model.py [--model builtin:small] [--rounds 5] [--out FILE]

Screens are of MiniWoB++'s size, 160x210, with an instruction whose words are spelt by characters: prompts of
some 207 tokens, of which the screen takes 165. All times are CPU milliseconds of this process, one thread,
medians over rounds; a step has one more round before, to warm up.

    step      batches of 1, 8 and 16 requests with new screens through the transformers engine, for
              completions of 6 tokens, as `click(123,456)`, and of 20, as a `type()`; split into
              `image` (decode, resize, cut into patches), `vision`, `prefill`, `decode` (both are the
              language model), `sampling` (output embedding and draw) and `around` (the rest: Python,
              caches, masks of the batch, threads). `shown_again` is the same batch asked a second time
    generate  the same requests through plain batched `generate` of transformers, of the same lengths; in
              turns with `step`. It samples as well, but keeps no log-probabilities
    update    one update of the trainer on 4 groups of 8 trajectories: groups begin at one screen, half
              of the trajectories go on to a second one of their own. Tokens a second are those of the
              samples, prompts included, however often they are computed
    bare      the same update in a loop: samples in padded batches of 16, the model's own forward pass,
              cross entropy times advantage, backward pass, AdamW; in turns with `update`

`over_generate` and `over_bare` say how many times as fast ours is: medians of the rounds' ratios. The limit
of a step is the arithmetic of vision and prefill: `gflops` is what they reach, `gflops_limit` what one
matrix product of 2048x2048x2048 reaches in the same process. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText, PreTrainedModel
from transformers.utils import logging as transformers_logging

from benchmarks.speed.engine import Asks, Bench
from benchmarks.speed.packing import KERNELS
from bus.messages import Batch, Sampling
from bus.packed import float64s, int32s
from dart_cli.config.schema import Config, ModelConfig, TrainConfig
from dart_cli.data.loading import chained
from dart_cli.data.store.steps import BatchStep
from dart_cli.engines import batch as engine_batch
from dart_cli.engines import caches as engine_caches
from dart_cli.engines.transformers_engine import TransformersEngine
from dart_cli.policy.forward import image_features, last_hidden
from dart_cli.policy.images import ImagePreparer
from dart_cli.policy.loader import load_policy
from dart_cli.policy.prompt import PromptRenderer
from dart_cli.train.learner import PolicyLearner
from dart_cli.train.trained_policy import TrainModel
from envs.contract.blobs import content_hash

BATCHES = (1, 8, 16)
TOKENS = {"click": 6, "type": 20}
GROUPS, MEMBERS = 4, 8
PADDED = 16  # samples of a batch of the bare loop
SIZE = 160, 210
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def main() -> None:
    """Measure everything and print one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="builtin:small")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    folder = load_policy(arguments.model, weights=False).folder
    result: dict[str, Any] = {
        "benchmark": "small_model",
        "unit": "CPU milliseconds",
        "torch": torch.__version__,
        "rounds": arguments.rounds,
        "steps": steps(folder, arguments.rounds),
        "limit": limit(folder),
        "update": updates(folder, arguments.rounds),
    }
    line = json.dumps(rounded(result))
    if arguments.out:
        arguments.out.write_text(line + "\n", encoding="utf-8")
    print(line)


def rounded(value: Any) -> Any:
    """Numbers to four digits."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def screen(seed: int) -> tuple[str, bytes]:
    """Return an instruction of invented words, and a page of buttons."""
    rng, buffer = Random(seed), io.BytesIO()
    words = ["".join(rng.choices(LETTERS, k=5)) for _ in range(12)]
    image = Image.new("RGB", SIZE, "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(11)
    for index, word in enumerate(words):
        left, top = 4 + 76 * (index % 2), 4 + 34 * (index // 2)
        draw.rectangle((left, top, left + 70, top + 22), "#e0e0e0", "#404040")
        draw.text((left + 6, top + 4), word, "black", font)
    image.save(buffer, "PNG")
    told = f'Enter "{words[0]} {words[1]}" into the field below {words[2]}, then press {words[3]}.'
    return told, buffer.getvalue()


# --- a step -----------------------------------------------------------------------------------


class Parts:
    """Seconds of each part of the engine's work, by wrapping its functions while it runs."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def timed(self, function: Callable[..., Any], name: Callable[..., str]) -> Callable[..., Any]:
        """Return `function` such that its time is added to the part that `name` tells of its arguments."""

        def call(*arguments: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*arguments, **named)
            finally:
                self.seconds[name(*arguments, **named)] += time.thread_time() - began

        return call

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count what the engine does meanwhile."""

        def pass_of(_model: object, inputs: Any, **_: object) -> str:
            return "prefill" if inputs.input_ids.shape[1] > 1 else "decode"

        wrapped = {
            "image_features": (engine_caches, lambda *_, **__: "vision"),
            "last_hidden": (engine_batch, pass_of),
            "vocabulary_logits": (engine_batch, lambda *_, **__: "sampling"),
            "sample": (engine_batch, lambda *_, **__: "sampling"),
            "_prepare": (ImagePreparer, lambda *_, **__: "image"),
        }
        patches = [
            patch.object(where, name, self.timed(getattr(where, name), of))
            for name, (where, of) in wrapped.items()
        ]
        for each in patches:
            each.start()
        try:
            yield
        finally:
            for each in patches:
                each.stop()


def steps(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each size of batch and kind of completion."""
    bench = Bench(folder, screen)
    rows: list[dict[str, Any]] = []
    for requests in BATCHES:
        for kind, tokens in TOKENS.items():
            found: dict[str, list[float]] = defaultdict(list)
            for number in range(rounds + 1):
                asks = of_length(bench.asks(requests, 1, "equal"), tokens)
                ours = asyncio.run(served(bench, asks))
                ours["generate"] = 1e3 * bench.generate(asks).seconds
                ours["over_generate"] = ours["generate"] / ours["step"]
                for name, value in ours.items() if number else ():  # the first warms up
                    found[name].append(value)
            row = {"requests": requests, "completion": kind, "tokens": tokens}
            row |= {name: median(values) for name, values in found.items()}
            rows.append(row)
            print(rounded(row), flush=True)
    return rows


def of_length(asks: Asks, tokens: int) -> Asks:
    """Return the same requests as `asks`, for completions of `tokens` tokens."""
    return [
        [
            replace(
                ask,
                request=replace(
                    ask.request,
                    sampling=Sampling(
                        temperature=1.0, max_tokens=tokens, seed=ask.request.sampling.seed
                    ),
                ),
            )
            for ask in mine
        ]
        for mine in asks
    ]


async def served(bench: Bench, asks: Asks) -> dict[str, float]:
    """Milliseconds of one batch through the engine, by part, and of the same batch once more."""
    requests = [ask.request for [ask] in asks]
    engine, parts = TransformersEngine(bench.policy, max_batch=len(requests)), Parts()
    with parts.watching():
        began = time.process_time()
        await engine.generate_together(requests)
        whole = time.process_time() - began
    began = time.process_time()
    await engine.generate_together(requests)
    again = time.process_time() - began
    await engine.close()
    names = ("image", "vision", "prefill", "decode", "sampling")
    found = {name: 1e3 * parts.seconds[name] for name in names}
    around = 1e3 * whole - sum(found.values())
    return {"step": 1e3 * whole, **found, "around": around, "shown_again": 1e3 * again}


@torch.inference_mode()
def limit(folder: Path) -> dict[str, float]:
    """Return what vision and prefill of 8 requests reach, in 10^9 operations a second, and a large product."""
    policy = load_policy(folder)
    renderer, asked = PromptRenderer(policy), [screen(seed) for seed in range(8)]
    prompts = [renderer.render(told, [], shown) for told, shown in asked]
    inputs = policy.inputs([p.token_ids for p in prompts], [p.images for p in prompts])

    def run() -> None:
        features = image_features(policy.model, inputs.images)
        last_hidden(policy.model, inputs, last=1, features=features)

    with FlopCounterMode(display=False, custom_mapping=KERNELS) as counter:
        run()
    one, other = torch.randn(2, 2048, 2048).unbind()
    return {
        "prompt_tokens": float(len(prompts[0].token_ids)),
        "patches": float(len(inputs.images[0].pixels)),
        "gflops": counter.get_total_flops() / seconds_of(run) / 1e9,
        "gflops_limit": 2 * 2048**3 / seconds_of(lambda: one @ other) / 1e9,
    }


def seconds_of(run: Callable[[], object], times: int = 5) -> float:
    """CPU seconds, the median."""
    found = []
    for _ in range(times):
        began = time.process_time()
        run()
        found.append(time.process_time() - began)
    return median(found)


# --- an update --------------------------------------------------------------------------------


def played(folder: Path) -> Batch:
    """Return samples as a run has them: with tokens of the model's vocabulary, drawn at random."""
    policy, rng = load_policy(folder, weights=False), Random(0)
    renderer = PromptRenderer(policy)
    absent = policy.absent_token_ids | set(policy.end_token_ids)
    known = [token for token in range(len(policy.tokenizer)) if token not in absent]
    images: dict[str, bytes] = {}
    rows: list[BatchStep] = []
    for group in range(GROUPS):
        for member in range(MEMBERS):
            for step in range(1 + member % 2):
                told = screen(group)[0]
                shown = screen(group if step == 0 else 100 + MEMBERS * group + member)[1]
                images[content_hash(shown)] = shown
                drawn = rng.choices(known, k=rng.choice([*TOKENS.values()]) - 1)
                rows.append(
                    BatchStep(
                        group_id=f"g{group}",
                        trajectory_id=f"g{group}-{member}",
                        step=step,
                        prompt_token_ids=int32s(renderer.render(told, [], shown).token_ids),
                        token_ids=int32s([*drawn, policy.end_token_ids[0]]),
                        image_hashes=[content_hash(shown)],
                        behaviour_logprobs=float64s([-7.5] * (len(drawn) + 1)),
                        version_spans=[],
                        advantage=1.0 - 2.0 * (member // 2 % 2),
                        weight=1.0,
                    )
                )
    chains, samples = chained(rows)
    return Batch(
        batch_id=1,
        group_ids=[f"g{group}" for group in range(GROUPS)],
        temperature=1.0,
        chains=chains,
        samples=samples,
        images=images,
    )


def updates(folder: Path, rounds: int) -> dict[str, Any]:
    """Return the trainer's update against the bare loop's."""
    batch = played(folder)
    config = Config(
        model=ModelConfig(path=str(folder)), train=TrainConfig(pack_tokens=4096, lr=1e-5)
    )
    learner, bare = PolicyLearner(TrainModel.load(config), config.train), BareLoop(folder)
    found: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds):
        began = time.process_time()
        update = learner.update(batch, number)
        middle = time.process_time()
        bare.update(batch)
        ours, theirs = middle - began, time.process_time() - middle
        if not update.applied:
            raise RuntimeError(f"the update was not applied: {update.note or update.alarm}")
        values = {"update": ours, "bare": theirs, "over_bare": theirs / ours}
        for name, value in values.items():
            found[name].append(value)
    figures = {name: median(values) for name, values in found.items()}
    tokens = sum(sample.end for sample in batch.samples)
    row = {
        "samples": len(batch.samples),
        "tokens": tokens,
        "screens": len(batch.images),
        **{name: 1e3 * figures[name] for name in ("update", "bare")},
        "over_bare": figures["over_bare"],
        "tokens_per_s": tokens / figures["update"],
        "bare_tokens_per_s": tokens / figures["bare"],
    }
    print(rounded(row), flush=True)
    return row


class BareLoop:
    """The update that a person would write: no packs, no shared screens, transformers alone."""

    def __init__(self, folder: Path) -> None:
        self._policy = load_policy(folder, weights=False)  # token ids and images
        self._model: PreTrainedModel = AutoModelForImageTextToText.from_pretrained(
            folder, local_files_only=True, use_safetensors=True
        ).eval()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-5, fused=True)

    def update(self, batch: Batch) -> None:
        """One step on all samples."""
        total = sum(map(len, batch.samples))
        order = sorted(batch.samples, key=lambda sample: sample.end)  # little padding
        for first in range(0, len(order), PADDED):
            self._backward(batch, order[first : first + PADDED], total)
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _backward(self, batch: Batch, samples: list[Any], total: int) -> None:
        policy = self._policy
        inputs = policy.inputs(
            [[*batch.prompt(sample), *batch.completion(sample)] for sample in samples],
            [[batch.images[name] for name in batch.image_hashes(sample)] for sample in samples],
        )
        shown = [inputs.images[index] for index in inputs.shown]
        most = max(map(len, samples))
        scores = self._model(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            mm_token_type_ids=(inputs.input_ids == policy.image_token_id).int(),
            pixel_values=torch.cat([image.patches for image in shown]),
            image_grid_thw=torch.tensor([image.grid for image in shown]),
            logits_to_keep=most + 1,
        ).logits[:, :-1]
        lengths = torch.tensor([len(sample) for sample in samples])
        drawn = torch.arange(most) >= most - lengths[:, None]
        losses = F.cross_entropy(
            scores.transpose(1, 2), inputs.input_ids[:, -most:], reduction="none"
        )
        advantages = torch.tensor([sample.advantage for sample in samples])
        (losses * drawn * advantages[:, None]).sum().div(total).backward()


if __name__ == "__main__":
    main()
