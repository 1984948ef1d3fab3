"""What does the prefix cache of the transformers engine save for agents, where three of four layers are recurrent?

    python benchmarks/speed/prefix_cache.py [--models qwen3_5 qwen3_vl] [--members 8] [--steps 9]
        [--completion 24] [--prefix-mb 1024] [--out FILE]

A group of 8 plays one task: all have the same instruction and first screen, and each goes its own way. The
first screens are asked for one after another, since episodes do not begin at once; after that the steps of all
members are one batch. Prompts show 3 or 5 screens on average. With `evicts` old screens are dropped together
(2 -> 4 and 3 -> 7 screens), so that prompts in between extend one another; with `slides` the oldest screen is
dropped at each step, so that nothing but the instruction before it stays. Each call goes first to an engine with
the cache and then, with the same prompts and seeds, to one without (`prefix_mb` 0), in one process on one thread.

The model is random and as wide as makes computing dominate: 4 layers of 384, three of which are recurrent in
qwen3_5. Of each history:

- `hit_share`: the share of the prompts' tokens that the cache had; `first_screen_hit_share` of the first round;
- `prefill_ratio`: CPU seconds of all prefills without the cache, divided by those with it, snapshots included;
- `seconds_ratio`: the same of all CPU seconds, decoding included;
- `difference`: the largest difference of a log-probability between both, in nats.

The limit that the cache approaches: each token of a trajectory is computed once between two evictions, which is
`possible_hit_share`. Equal prompts of one call are computed once by both engines and count as hits of both. The
last line is JSON; `cache_hit_share` and `cache_prefill_ratio` are those of qwen3_5 with 5 screens and evictions.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bus.messages import Sampling, Turn
from dart_cli.doctor.logprob_check import draw
from dart_cli.engines.base import GenerateRequest, Generation
from dart_cli.engines.batch import Prefilled, RunningBatch
from dart_cli.engines.requests import ActiveRequest
from dart_cli.engines.transformers_engine import TransformersEngine
from dart_cli.language.history import History
from dart_cli.policy.loader import LoadedPolicy, load_policy
from dart_cli.policy.prompt import PromptRenderer
from scripts.small_models import FAMILIES, build

HISTORIES = {
    "3 screens, evicts": History(images=2, turns=35, images_most=4),
    "5 screens, evicts": History(images=3, turns=35, images_most=7),
    "3 screens, slides": History(images=3, turns=35),
    "5 screens, slides": History(images=5, turns=35),
}
NAMED = "5 screens, evicts"
HIDDEN, LAYERS = 384, 4
SCREEN = (448, 320)  # pixels: 140 tokens
INSTRUCTION = (
    "open the settings, choose the third page, and write the words below into its last field"
)


@dataclass
class Seconds:
    """CPU seconds of one engine."""

    prefill: float = 0.0
    all: float = 0.0


@dataclass
class Member:
    """One episode of the group."""

    number: int
    past: list[Turn] = field(default_factory=list)
    screen: bytes = b""
    before: list[int] = field(default_factory=list)  # prompt and completion of the step before


def folder_of(model_type: str, folder: Path) -> Path:
    """Write a random model of these sizes."""
    sizes = copy.deepcopy(dict(FAMILIES[model_type].config))
    text = sizes["text_config"]
    text |= {
        "hidden_size": HIDDEN,
        "intermediate_size": 3 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 6,
        "max_position_embeddings": 1 << 15,
    }
    if "layer_types" in text:
        text |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
        text |= {"linear_num_key_heads": 3, "linear_num_value_heads": 6}
    sizes["vision_config"] |= {"out_hidden_size": HIDDEN}
    return build(model_type, folder, sizes=sizes)


class Server:
    """One engine and its seconds."""

    def __init__(self, policy: LoadedPolicy, prefix_mb: int, rows: int) -> None:
        self.seconds = Seconds()
        self.engine = TransformersEngine(policy, prefix_bytes=prefix_mb << 20, max_batch=rows)
        batch: RunningBatch = self.engine._batch  # noqa: SLF001 (the seconds of prefills alone)
        prefill = batch.prefill

        def timed(jobs: Sequence[ActiveRequest], version: int) -> list[Prefilled]:
            began = time.thread_time()
            prefilled = prefill(jobs, version)
            self.seconds.prefill += time.thread_time() - began
            return prefilled

        batch.prefill = timed  # type: ignore[method-assign]

    async def answer(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Return the completions of one call."""
        began = time.process_time()
        generations = await self.engine.generate_together(requests)
        self.seconds.all += time.process_time() - began
        return generations

    @property
    def counts(self) -> tuple[int, int]:
        """The tokens of all prompts, and those that were not computed."""
        gauges = self.engine.gauges()
        return int(gauges["prompt_tokens"]), int(gauges["cached_tokens"])


async def play(
    policy: LoadedPolicy, history: History, *, options: argparse.Namespace
) -> dict[str, Any]:
    """Play a group with one history, and return its figures."""
    renderer = PromptRenderer(policy, part_order="instruction_first")
    first_screen = draw(Random(0), *SCREEN)
    members = [Member(number, screen=first_screen) for number in range(options.members)]
    possible, difference = 0, 0.0
    first: tuple[int, int] = (0, 0)
    cached, plain = (Server(policy, mb, options.members) for mb in (options.prefix_mb, 0))
    try:
        for step in range(options.steps):
            requests = []
            for member in members:
                prompt = renderer.render(INSTRUCTION, history.visible(member.past), member.screen)
                seed = 1000 * step + member.number
                sampling = Sampling(temperature=1.0, max_tokens=options.completion, seed=seed)
                requests.append(
                    GenerateRequest(f"{seed}", prompt.token_ids, prompt.images, sampling)
                )
                # The first prompts are equal, so that one of them could be computed once for all.
                before = member.before if step else (prompt.token_ids if member.number else [])
                possible += shared(before, prompt.token_ids)
            calls = [requests] if step else [[request] for request in requests]
            for call in calls:
                completions = await cached.answer(call)
                again = await plain.answer(call)
                for one, other in zip(completions, again, strict=True):
                    difference = max(difference, gap(one, other))
                for request, generation in zip(call, completions, strict=True):
                    go_on(policy, members[int(request.request_id) % 1000], request, generation)
            if step == 0:
                first = cached.counts
        total, had = cached.counts
    finally:
        await cached.engine.close()
        await plain.engine.close()
    return {
        "prompt_tokens": total,
        "computed_tokens": total - had,
        "hit_share": had / total,
        "possible_hit_share": possible / total,
        "first_screen_hit_share": first[1] / first[0],
        "prefill_s": cached.seconds.prefill,
        "prefill_without_s": plain.seconds.prefill,
        "prefill_ratio": plain.seconds.prefill / cached.seconds.prefill,
        "seconds_ratio": plain.seconds.all / cached.seconds.all,
        "difference": difference,
    }


def shared(before: Sequence[int], prompt: Sequence[int]) -> int:
    """Return how many first tokens two sequences share; the last token of a prompt is always computed."""
    count = 0
    for one, other in zip(before, prompt[:-1], strict=False):
        if one != other:
            break
        count += 1
    return count


def gap(one: Generation, other: Generation) -> float:
    """Return the largest difference of two completions' log-probabilities. Raises ValueError for other tokens."""
    if one.sampled.token_ids != other.sampled.token_ids:
        raise ValueError("the cache has changed a token")
    pairs = zip(one.sampled.behaviour_logprobs, other.sampled.behaviour_logprobs, strict=True)
    return max(abs(a - b) for a, b in pairs)


def go_on(
    policy: LoadedPolicy, member: Member, request: GenerateRequest, generation: Generation
) -> None:
    """Let an episode take its completion and see the next screen."""
    token_ids = generation.sampled.token_ids
    turn = Turn(text=policy.decode(token_ids), screenshot=member.screen, token_ids=token_ids)
    member.past.append(turn)
    member.before = [*request.prompt_token_ids, *token_ids[:-1]]
    member.screen = draw(Random(100 * member.number + len(member.past)), *SCREEN)


def rounded(figures: dict[str, Any]) -> dict[str, Any]:
    """Return the same figures with four digits."""
    return {
        name: float(f"{value:.4g}") if isinstance(value, float) else value
        for name, value in figures.items()
    }


def main() -> None:
    """Play each history with each model; print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=["qwen3_5"], choices=["qwen3_5", "qwen3_vl"])
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--completion", type=int, default=24)
    parser.add_argument("--prefix-mb", type=int, default=1024)
    parser.add_argument("--histories", nargs="+", default=list(HISTORIES), choices=list(HISTORIES))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for model_type in options.models:
            policy = load_policy(folder_of(model_type, Path(scratch) / model_type))
            policy.images.cache_bytes = 1 << 28
            for name in options.histories:
                figures = asyncio.run(play(policy, HISTORIES[name], options=options))
                print(model_type, name, rounded(figures), flush=True)
                results.setdefault(model_type, {})[name] = rounded(figures)
    if figures := results.get("qwen3_5", {}).get(NAMED):
        results["cache_hit_share"] = figures["hit_share"]
        results["cache_prefill_ratio"] = figures["prefill_ratio"]
    line = json.dumps(results)
    if options.out:
        options.out.write_text(line + "\n", encoding="utf-8")
    print(line)


if __name__ == "__main__":
    main()
