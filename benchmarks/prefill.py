"""What a publication makes the engines compute again: tokens of prompts, screens, and the log-prob mismatch.

    python benchmarks/prefill.py [--episodes 12] [--running 4] [--publications 4]
        [--engines transformers vllm] [--out benchmarks/results/prefill.json]

Episodes of screens of suite `mini`; each turn extends the last prompt by its completion and a new screen, and
all screens stay. In each round new weights, a small step from the last, are taken while `--running` of the episodes
are in flight and the others are between two turns; then these take their next turn. A way's tokens computed
again are the prompt tokens that it prefills more than the way `none`, which publishes nothing, in the same
run, by publication. Ways:

    none        no publication: what new turns cost in any case, the limit
    flush       all caches are cleared at each publication, as before: prefixes, screens, features
    exact       the default
    stale k     rollout.max_prefix_staleness = k

`bytes_sent` are those of screens sent to vLLM's process; `screens_encoded` are those that the transformers
engine's vision tower computes, whose weights do not change. The mismatch is, over completions drawn wholly under
one version, the largest and mean difference of their log-probs from a forward pass of it. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bus.messages import Sampling
from dart_cli.config.schema import VllmConfig
from dart_cli.engines import features
from dart_cli.engines.base import GenerateRequest, Generation
from dart_cli.engines.transformers_engine import TransformersEngine
from dart_cli.engines.vllm.engine import VllmEngine
from dart_cli.policy.model import LoadedPolicy, load_policy, weight_tensors
from dart_cli.policy.prompt import PromptRenderer
from dart_cli.weights.file import load, publish
from envs.registry import load_suite, make_env
from scripts import tiny_model as tiny
from tests.engines.exact import Weights, fresh_numbers, put
from tests.waiting import until

TOKENS, LONG = 16, 64
"""Tokens of a completion: of a turn, and of one that is in flight at a publication."""
STEP = 0.002
"""Standard deviation of what a publication adds to each weight."""
WAYS: dict[str, int] = {"none": 0, "flush": 0, "exact": 0, "stale 1": 1, "stale 3": 3}


@dataclass
class Episode:
    """A prompt that grows by a completion and a screen with each turn."""

    seed: int
    task: Any
    prompt: list[int]
    images: list[bytes]
    turn: int = 0

    def request(self, tokens: int) -> GenerateRequest:
        """Its next turn, of so many tokens."""
        sampling = Sampling(temperature=1.0, max_tokens=tokens, seed=1000 * self.seed + self.turn)
        return GenerateRequest(
            f"e{self.seed}/{self.turn}", list(self.prompt), list(self.images), sampling
        )


@dataclass
class Way:
    """What one way cost."""

    prompt_tokens: int = 0
    prefilled_tokens: int = 0
    bytes_sent: int = 0
    screens_encoded: int = 0
    drawn: list[tuple[GenerateRequest, Generation]] = field(default_factory=list)


def main() -> None:
    """Play every way with every engine, and print one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--episodes", type=int, default=12)
    parser.add_argument("--running", type=int, default=4, help="in flight at a publication")
    parser.add_argument("--publications", type=int, default=4)
    parser.add_argument("--engines", nargs="+", default=["transformers", "vllm"])
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, object] = {
        "episodes": arguments.episodes,
        "running": arguments.running,
        "publications": arguments.publications,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        tiny.save(folder, *tiny.build_tiny(seed=3), build={})  # untrained: no token is certain
        versions = steps(load_policy(folder), arguments.publications + 1)
        paths = [publish(each, Path(name), number).path for number, each in enumerate(versions)]
        for engine in arguments.engines:
            result[engine] = measure(engine, folder, versions, paths, arguments)
    line = json.dumps(result)
    if arguments.out:
        arguments.out.write_text(line + "\n", encoding="utf-8")
    print(line)


def steps(policy: LoadedPolicy, count: int) -> list[Weights]:
    """Versions of the weights; the vision tower stays as it is."""
    generator = torch.Generator().manual_seed(0)
    versions = [{name: tensor.clone() for name, tensor in weight_tensors(policy.model).items()}]
    while len(versions) < count:
        versions.append(
            {
                name: tensor
                if "visual." in name
                else tensor + STEP * torch.randn(tensor.shape, generator=generator)
                for name, tensor in versions[-1].items()
            }
        )
    return versions


def measure(
    engine: str, folder: Path, versions: list[Weights], paths: list[Path], arguments: Any
) -> dict[str, object]:
    """Every way with one kind of engine."""
    scorer = load_policy(folder)
    found = {}
    for name, stale in WAYS.items():
        print(engine, name, file=sys.stderr)
        found[name] = asyncio.run(play(engine, name, stale, folder, paths, arguments))
    least = found["none"]
    return {
        name: {
            "prompt_tokens": way.prompt_tokens,
            "prefilled_tokens": way.prefilled_tokens,
            "again_per_publication": round(
                (way.prefilled_tokens - least.prefilled_tokens) / arguments.publications
            ),
            **(
                {"bytes_sent": way.bytes_sent}
                if engine == "vllm"
                else {"screens_encoded": way.screens_encoded}
            ),
            **mismatch(scorer, way, versions),
        }
        for name, way in found.items()
    }


async def play(
    kind: str, name: str, stale: int, folder: Path, paths: list[Path], arguments: Any
) -> Way:
    """One way: two turns of every episode, then rounds with a publication each."""
    policy = load_policy(folder, weights=kind == "transformers")
    policy.end_token_ids = ()  # every completion has its length
    engine: Any
    if kind == "vllm":
        config = VllmConfig(kv_cache_mb=256, max_model_len=4096, options={"block_size": 32})
        engine = await asyncio.to_thread(
            VllmEngine,
            policy,
            config,
            load_weights=load,
            max_batch=arguments.episodes,
            max_prefix_staleness=stale,
        )
    else:
        engine = TransformersEngine(policy, load_weights=load, max_prefix_staleness=stale)
    way, episodes = Way(), started(policy, arguments.episodes)
    try:
        with counting(way):
            await engine.update_weights(paths[0], 0)
            for _ in range(2):
                await turns(engine, way, episodes, TOKENS)
            for number, path in enumerate(paths[1:], start=1):
                first = number * arguments.running % arguments.episodes
                order = [*episodes[first:], *episodes[:first]]
                running, between = order[: arguments.running], order[arguments.running :]
                goal = engine.gauges()["tokens"] + LONG * len(running) // 4
                flying = asyncio.create_task(turns(engine, way, running, LONG))
                await until(lambda goal=goal: engine.gauges()["tokens"] >= goal)
                if name != "none":
                    await engine.update_weights(path, number)
                if name == "flush":
                    await flush(engine)
                await asyncio.gather(flying, turns(engine, way, between, TOKENS))
        gauges = engine.gauges()
    finally:
        await engine.close()
    way.prompt_tokens = int(gauges["prompt_tokens"])
    way.prefilled_tokens = int(gauges["prefilled_tokens"])
    return way


def started(policy: LoadedPolicy, count: int) -> list[Episode]:
    """Episodes before their first turn, each with a task and screens of its own."""
    renderer, env = PromptRenderer(policy), make_env("mini")
    tasks = list(load_suite("mini").tasks.values())
    episodes = []
    for seed in range(count):
        task = tasks[seed % len(tasks)]
        screen, info = env.reset(seed=seed, options={"task": task})
        prompt = renderer.render(info["instruction"], [], screen.screenshot)
        episodes.append(Episode(seed, task, prompt.token_ids, prompt.images))
    return episodes


async def turns(engine: Any, way: Way, episodes: list[Episode], tokens: int) -> None:
    """The next turn of each: a completion, then another screen."""
    requests = [episode.request(tokens) for episode in episodes]
    generations = await asyncio.gather(*(engine.generate(request) for request in requests))
    env, renderer = make_env("mini"), PromptRenderer(engine.policy)
    for episode, request, generation in zip(episodes, requests, generations, strict=True):
        way.drawn.append((request, generation))
        episode.turn += 1
        seed = 10_000 * episode.turn + episode.seed
        screen, _ = env.reset(seed=seed, options={"task": episode.task})
        shown = renderer.render("x", [], screen.screenshot)
        placeholder = engine.policy.image_token_id
        count = shown.token_ids.count(placeholder)
        episode.prompt += [*generation.sampled.token_ids, *[placeholder] * count, 9, 10]
        episode.images.append(screen.screenshot)


async def flush(engine: Any) -> None:
    """Clear what was cleared at each publication before."""
    if isinstance(engine, VllmEngine):
        llm = engine._llm  # noqa: SLF001 - what the engine itself no longer does
        await llm.renderer.clear_mm_cache_async()
        await llm.reset_mm_cache()
        await llm.reset_encoder_cache()
        return
    engine._features.clear()  # noqa: SLF001


@contextmanager
def counting(way: Way) -> Iterator[None]:
    """Count the screens that are sent and encoded."""
    from dart_cli.engines.vllm import prompts

    encode: Callable[..., Any] = features.image_features
    item = prompts.image_item

    def encoded(model: Any, images: Any) -> Any:
        way.screens_encoded += len(images)
        return encode(model, images)

    def sent(pixels: torch.Tensor, grid: tuple[int, int, int]) -> Any:
        way.bytes_sent += pixels.numel() * pixels.element_size()
        return item(pixels, grid)

    features.image_features, prompts.image_item = encoded, sent  # type: ignore[assignment]
    try:
        yield
    finally:
        features.image_features, prompts.image_item = encode, item


def mismatch(policy: LoadedPolicy, way: Way, versions: list[Weights]) -> dict[str, float]:
    """Of completions of one version: differences of their log-probs from a forward pass of it."""
    worst, total, count = 0.0, 0.0, 0
    for request, generation in way.drawn:
        spans = generation.sampled.version_spans
        if len(spans) != 1:
            continue
        put(policy, versions[spans[0].version])
        fresh, _ = fresh_numbers(policy, request, generation.sampled.token_ids, 1.0)
        found = (torch.tensor(generation.sampled.behaviour_logprobs) - fresh).abs()
        worst, total = max(worst, float(found.max())), total + float(found.sum())
        count += len(found)
    return {"mismatch_max": round(worst, 6), "mismatch_mean": round(total / count, 7)}


if __name__ == "__main__":
    main()
