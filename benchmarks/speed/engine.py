"""Tokens per second of the transformers engine, against plain batched `model.generate`.

    python benchmarks/speed/engine.py [--models tiny qwen2.5-vl] [--completions 96] [--out FILE]

Models: the shipped tiny one on screens of suite `mini`, and a random Qwen2.5-VL of 4 layers of 256
on screens of 448x336. At 1, 8 and 32 requests at once, three kinds of work:

    equal       a wave of requests, each of 16 tokens; the next wave once all are answered
    unequal     a wave of requests of 4 to 64 tokens
    staggered   as many clients, each with one request at a time of 4 to 64 tokens; it asks again
                after a pause

Plain `generate` takes all waiting requests as one batch and runs until its longest row is done. Both
serve the same requests with the same lengths. Time is CPU seconds of this process, one thread, so that
other load on the machine matters little; where all clients pause, the clock is put forward. The
engine also returns exact log-probabilities and entropies and masks forbidden tokens; `generate`
does not. The physical limit is the prefill alone: one forward pass over prompts and screens, in the
largest batches, without decoding a token. Each screen is new, so the engine's memory of screens
does not help. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import mean

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import (
    AutoModelForImageTextToText,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.utils import logging as transformers_logging

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bus.messages import Sampling
from dart_cli.engines.base import GenerateRequest
from dart_cli.engines.transformers_engine import TransformersEngine
from dart_cli.policy.forward import logits
from dart_cli.policy.loader import LoadedPolicy, load_policy
from dart_cli.policy.prompt import PromptRenderer

CONCURRENT = (1, 8, 32)
WORKS = ("equal", "unequal", "staggered")
EQUAL, SHORTEST, LONGEST = 16, 4, 64  # tokens
PAUSE = 4.0  # longest pause of a client, in completions drawn alone by `generate`

Screens = Callable[[int], tuple[str, bytes]]
"""A seed -> the instruction and the screenshot of a task."""


def main() -> None:
    """Measure each model and print one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--completions", type=int, default=96, help="of each measurement, at least")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    rows = []
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as scratch:
            folder, screens = MODELS[name](Path(scratch))
            rows += measure(name, Bench(folder, screens), arguments.completions)
    result = {"benchmark": "engine", "unit": "tokens per CPU second", "rows": rows}
    result["least_over_generate"] = min(row["over_generate"] for row in rows)
    line = json.dumps(result)
    if arguments.out:
        arguments.out.write_text(line + "\n", encoding="utf-8")
    print(line)


def measure(name: str, bench: Bench, completions: int) -> list[dict[str, object]]:
    """All rows of one model."""
    bench.generate(bench.asks(1, 4, "equal"))  # warm up
    asyncio.run(bench.serve(bench.asks(1, 4, "equal"), 1))
    alone_s = 0.0
    rows: list[dict[str, object]] = []
    for concurrent in CONCURRENT:
        rounds = max(3, completions // concurrent) if concurrent > 1 else 12
        for work in WORKS:
            asks = bench.asks(concurrent, rounds, work, pause_s=PAUSE * alone_s)
            engine = asyncio.run(bench.serve(asks, concurrent, waves=work != "staggered"))
            plain = bench.generate(asks, waves=work != "staggered")
            alone_s = alone_s or plain.seconds / plain.completions
            row: dict[str, object] = {
                "model": name,
                "concurrent": concurrent,
                "work": work,
                "engine": round(engine.tokens_per_s, 1),
                "generate": round(plain.tokens_per_s, 1),
                "over_generate": round(engine.tokens_per_s / plain.tokens_per_s, 3),
                "engine_latency_s": round(engine.latency_s, 4),
                "generate_latency_s": round(plain.latency_s, 4),
                "prefill_limit": round(engine.tokens / bench.prefill(asks), 1),
            }
            rows.append(row)
            print(row, flush=True)
    return rows


# --- the work ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ask:
    """One request of a client, made `pause_s` after its last answer."""

    request: GenerateRequest
    pause_s: float

    @property
    def tokens(self) -> int:
        """Completion tokens that will be sampled."""
        return self.request.sampling.max_tokens


Asks = list[list[Ask]]
"""For each client its requests, one after another."""


def tiny(_scratch: Path) -> tuple[Path, Screens]:
    """Return the shipped model and the tasks it was trained for."""
    from envs.contract.registry import load_suite, make_env

    tasks, env = list(load_suite("mini").tasks.values()), make_env("mini")

    def screen(seed: int) -> tuple[str, bytes]:
        seen, info = env.reset(seed=seed, options={"task": tasks[seed % len(tasks)]})
        return str(info["instruction"]), seen.screenshot

    return load_policy("builtin:tiny", weights=False).folder, screen


def qwen25(scratch: Path) -> tuple[Path, Screens]:
    """Return a random Qwen2.5-VL, larger in all respects; it reads and writes the tiny model's tokens."""
    import io

    from PIL import Image
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    from scripts.tiny_model import SPECIALS, build_image_processor, build_tokenizer

    tokenizer, processor = build_tokenizer(), build_image_processor()
    processor.temporal_patch_size = 2
    special = {token: index for index, token in enumerate(SPECIALS)}
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 256,
            "intermediate_size": 704,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6]},
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
        },
        vision_config={
            "depth": 4,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_heads": 4,
            "out_hidden_size": 256,
            "fullatt_block_indexes": [1, 3],
        },
        image_token_id=special["<|image_pad|>"],
        video_token_id=special["<|video_pad|>"],
        vision_start_token_id=special["<|vision_start|>"],
        vision_end_token_id=special["<|vision_end|>"],
    )
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    for part in (model, tokenizer, processor):
        part.save_pretrained(scratch)

    def screen(seed: int) -> tuple[str, bytes]:
        rng, buffer = Random(seed), io.BytesIO()
        blocks = Image.new("RGB", (16, 12))
        blocks.putdata([tuple(rng.randrange(256) for _ in range(3)) for _ in range(16 * 12)])
        blocks.resize((448, 336), Image.Resampling.NEAREST).save(buffer, "PNG")
        return "click the red button below the second field", buffer.getvalue()

    return scratch, screen


MODELS = {"tiny": tiny, "qwen2.5-vl": qwen25}


# --- the engines ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """Tokens and completions of a measurement, in CPU seconds."""

    tokens: int
    completions: int
    seconds: float
    latency_s: float  # mean, from asking to the answer

    @property
    def tokens_per_s(self) -> float:
        """The throughput."""
        return self.tokens / self.seconds


class Clock:
    """CPU seconds of this process, put forward while all clients pause."""

    def __init__(self) -> None:
        self._put_forward_s = -time.process_time()

    def now(self) -> float:
        """Seconds since it was made."""
        return time.process_time() + self._put_forward_s

    def wait_until(self, moment: float) -> None:
        """Put the clock forward to `moment`."""
        self._put_forward_s += max(0.0, moment - self.now())


class Bench:
    """One model, loaded once for the engine and once the way transformers loads it."""

    def __init__(self, folder: Path, screens: Screens) -> None:
        self.policy = load_policy(folder)
        # No completion ends by itself, so that both draw the same lengths.
        self.policy.end_token_ids = (self.policy.forbidden_token_ids[0],)
        self._plain: PreTrainedModel = AutoModelForImageTextToText.from_pretrained(
            folder, local_files_only=True, use_safetensors=True
        ).eval()
        self._plain.generation_config.eos_token_id = None
        self._plain.generation_config.pad_token_id = self.policy.pad_token_id
        self._other = load_policy(folder)  # prepares the plain model's images
        self._screens = screens
        self._seed = 0

    def asks(self, clients: int, rounds: int, work: str, pause_s: float = 0.0) -> Asks:
        """Return requests with new screens; for work "staggered" with pauses of up to `pause_s` before them."""
        renderer = PromptRenderer(self._other)
        rng = Random(clients)
        asks: Asks = [[] for _ in range(clients)]
        for _ in range(rounds):
            for mine in asks:
                self._seed += 1
                instruction, screenshot = self._screens(self._seed)
                prompt = renderer.render(instruction, [], screenshot)
                tokens = EQUAL if work == "equal" else rng.randint(SHORTEST, LONGEST)
                request = GenerateRequest(
                    request_id=str(self._seed),
                    prompt_token_ids=prompt.token_ids,
                    images=prompt.images,
                    sampling=Sampling(temperature=1.0, max_tokens=tokens, seed=self._seed),
                )
                mine.append(Ask(request, rng.random() * pause_s if work == "staggered" else 0.0))
        return asks

    async def serve(self, asks: Asks, max_batch: int, *, waves: bool = True) -> Outcome:
        """Through our engine."""
        engine = TransformersEngine(self.policy, max_batch=max_batch)
        crowd, clock = _Crowd(asks, waves=waves), Clock()
        running: dict[asyncio.Task[object], tuple[int, float]] = {}
        while running or crowd.is_waiting:
            if not running:
                clock.wait_until(crowd.next_moment)
            for client, asked, ask in crowd.due(clock.now()):
                task: asyncio.Task[object] = asyncio.create_task(engine.generate(ask.request))
                running[task] = client, asked
            # CPU seconds do not pass faster than real ones while one thread computes.
            pause = max(0.001, crowd.next_moment - clock.now()) if crowd.is_waiting else None
            done, _ = await asyncio.wait(
                running, timeout=pause, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()
                crowd.answered(*running.pop(task), clock.now())
        outcome = crowd.outcome(clock.now())
        await engine.close()
        return outcome

    def generate(self, asks: Asks, *, waves: bool = True) -> Outcome:
        """Through transformers' own loop, on the model as transformers loads it."""
        crowd, clock = _Crowd(asks, waves=waves), Clock()
        while crowd.is_waiting:
            clock.wait_until(crowd.next_moment)
            due = crowd.due(clock.now())
            self._generate([ask for _, _, ask in due])
            for client, asked, _ in due:
                crowd.answered(client, asked, clock.now())
        return crowd.outcome(clock.now())

    @torch.inference_mode()
    def _generate(self, batch: Sequence[Ask]) -> None:
        inputs = self._other.inputs(
            [ask.request.prompt_token_ids for ask in batch], [ask.request.images for ask in batch]
        )
        shown = [inputs.images[index] for index in inputs.image_order]
        self._plain.generate(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            mm_token_type_ids=(inputs.input_ids == self._other.image_token_id).int(),
            pixel_values=torch.cat([image.patches for image in shown]),
            image_grid_thw=torch.tensor([image.grid for image in shown]),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=LONGEST,
            stopping_criteria=StoppingCriteriaList(
                [_Lengths(inputs.input_ids.shape[1], [ask.tokens for ask in batch])]
            ),
        )

    @torch.inference_mode()
    def prefill(self, asks: Asks) -> float:
        """CPU seconds of the prompts alone, a batch of all clients at a time."""
        policy: LoadedPolicy = load_policy(self.policy.folder)  # has seen none of the screens
        began = time.process_time()
        for wave in zip(*asks, strict=True):
            requests = [ask.request for ask in wave]
            inputs = policy.inputs(
                [r.prompt_token_ids for r in requests], [r.images for r in requests]
            )
            logits(policy.model, inputs, last=1)
        return time.process_time() - began


class _Crowd:
    """Clients that ask one thing after another, each for itself or in waves."""

    def __init__(self, asks: Asks, *, waves: bool) -> None:
        self._left = [list(reversed(mine)) for mine in asks]
        self._tokens = sum(ask.tokens for mine in asks for ask in mine)
        self._heap = [(mine[-1].pause_s, client) for client, mine in enumerate(self._left)]
        heapq.heapify(self._heap)
        self._waves = waves
        self._held: list[int] = []  # answered, until the wave is over
        self._latencies: list[float] = []

    @property
    def is_waiting(self) -> bool:
        """Whether a client will ask by itself, at a known moment."""
        return bool(self._heap)

    @property
    def next_moment(self) -> float:
        """When the next client will ask."""
        return self._heap[0][0]

    def due(self, now: float) -> list[tuple[int, float, Ask]]:
        """Take the requests that are due, and return of each: client, since when, what."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            asked, client = heapq.heappop(self._heap)
            due.append((client, asked, self._left[client].pop()))
        return due

    def answered(self, client: int, asked: float, now: float) -> None:
        """Record that a client has its answer, and set when it asks again: in waves, once all have theirs."""
        self._latencies.append(now - asked)
        self._held.append(client)
        if self._waves and len(self._held) < len(self._left):
            return
        for each in self._held:
            if self._left[each]:
                heapq.heappush(self._heap, (now + self._left[each][-1].pause_s, each))
        self._held = []

    def outcome(self, seconds: float) -> Outcome:
        """Return the result, once all requests are answered."""
        return Outcome(self._tokens, len(self._latencies), seconds, mean(self._latencies))


class _Lengths(StoppingCriteria):
    """Each row ends at its own length."""

    def __init__(self, prompt: int, lengths: Sequence[int]) -> None:
        self._ends = prompt + torch.tensor(lengths)

    def __call__(self, input_ids: torch.Tensor, _scores: torch.Tensor, **_: object) -> torch.Tensor:
        return input_ids.shape[1] >= self._ends


if __name__ == "__main__":
    main()
