"""New weights for the real vLLM while it serves: pauses, memory, and the log-prob of each token.

    python benchmarks/speed/vllm_updates.py [--updates 200] [--requests 8]
        [--out benchmarks/results/vllm_updates.json]

`--requests` requests are in progress at any time; each that ends is replaced by the next. Meanwhile
updates follow one another, each with its own weights, read from files. Then a sample of the completions
that more than one version sampled is scored again: by a forward pass of plain transformers with the
weights that each span names. The limit of a pause is `copy_ms`: the same tensors, copied in memory.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bus.errors import DartError
from bus.messages import Sampling
from dart_cli.config.schema import VllmConfig
from dart_cli.engines.base import GenerateRequest, Generation, UpdateTiming
from dart_cli.engines.vllm.engine import VllmEngine
from dart_cli.policy.loader import LoadedPolicy, load_policy, weight_tensors
from dart_cli.policy.prompt import PromptRenderer
from dart_cli.weights.file import FileChannel, load
from envs.contract.registry import load_suite, make_env
from envs.tools.process_tree import descendants
from scripts import tiny_model as tiny
from tests.engines.exact import Weights, largest_error

TOKENS = 60
SCORED = 40
"""Completions that are scored again."""
CACHE_MB = 64
"""For keys and values. It takes memory as it is first used, so a large one would look like a leak."""
WARM = 50
"""Updates before memory is first read: allocators and caches have their size by then."""


def main() -> None:
    """Serve, update, score, and print one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--requests", type=int, default=8, help="in work at any time")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        tiny.save(folder, *tiny.build_tiny(seed=3), build={})  # untrained: no token is certain
        published = Path(name) / "weights"
        try:
            result = asyncio.run(measure(folder, published, arguments.updates, arguments.requests))
        except DartError as error:
            parser.exit(error.exit_code, f"error: {error}\n")
    line = json.dumps(result)
    if arguments.out:
        arguments.out.write_text(line + "\n", encoding="utf-8")
    print(line)


async def measure(folder: Path, published: Path, updates: int, requests: int) -> dict[str, object]:
    """All of it, with one engine."""
    policy = load_policy(folder)
    engine = await asyncio.to_thread(
        VllmEngine,
        load_policy(folder, weights=False),
        VllmConfig(options={"kv_cache_memory_bytes": CACHE_MB << 20}),
        load_weights=load,
        max_batch=requests,
    )
    versions = WeightsByVersion(policy)
    channel = FileChannel(published)
    done: list[tuple[GenerateRequest, Generation]] = []
    failed: list[BaseException] = []
    stop = asyncio.Event()
    serving = [
        asyncio.create_task(serve(engine, prompts(policy, k, requests), stop, done, failed))
        for k in range(requests)
    ]
    try:
        timings: list[UpdateTiming] = []
        memory_mb: list[float] = []
        began = time.monotonic()
        for version in range(1, updates + 1):
            path = (await asyncio.to_thread(channel.publish, versions[version], version)).path
            timings.append(await engine.update_weights(path, version))
            if version >= min(WARM, updates):
                memory_mb.append(rss_mb())
        seconds = time.monotonic() - began
        stop.set()
        await asyncio.gather(*serving)
    finally:
        await engine.close()
    halts = sorted(1e3 * (t.pause_s) for t in timings)
    mixed = [pair for pair in done if len(pair[1].sampled.version_spans) > 1]
    scored = mixed[:: max(1, len(mixed) // SCORED)][:SCORED]
    worst = max((largest_error(policy, *pair, versions) for pair in scored), default=None)
    return {
        "updates": len(timings),
        "requests": len(done),
        "requests_at_once": requests,
        "aborted": len(failed) + sum(g.stop == "suspended" for _, g in done),
        "completions_of_several_versions": len(mixed),
        "span_max_abs_diff": worst,
        "scored": len(scored),
        "pause_p50_ms": round(statistics.median(halts), 1),
        "pause_p95_ms": round(halts[int(0.95 * (len(halts) - 1))], 1),
        "copy_ms": round(copy_ms(policy), 2),
        "rss_mb": [round(mb, 1) for mb in memory_mb[:: max(1, len(memory_mb) // 10)]],
        "seconds": round(seconds, 1),
    }


class WeightsByVersion(list[Weights]):
    """Weights by version, made when they are asked for: every one another step from the first."""

    def __init__(self, policy: LoadedPolicy) -> None:
        super().__init__()
        self._start = {name: t.clone() for name, t in weight_tensors(policy.model).items()}

    def __getitem__(self, version: int) -> Weights:  # type: ignore[override]
        generator = torch.Generator().manual_seed(version)
        return {
            name: tensor + 0.02 * torch.randn(tensor.shape, generator=generator) * (version > 0)
            for name, tensor in self._start.items()
        }


def prompts(policy: LoadedPolicy, first: int, step: int) -> list[GenerateRequest]:
    """Return the requests of one client, over screens of suite `mini`."""
    renderer = PromptRenderer(policy)
    tasks, env = list(load_suite("mini").tasks.values()), make_env("mini")
    found = []
    for seed in range(first, first + 8 * step, step):
        screen, info = env.reset(seed=seed, options={"task": tasks[seed % len(tasks)]})
        prompt = renderer.render(info["instruction"], [], screen.screenshot)
        sampling = Sampling(temperature=1.0, max_tokens=TOKENS, seed=seed)
        found.append(GenerateRequest(f"r{seed}", prompt.token_ids, prompt.images, sampling))
    return found


async def serve(
    engine: VllmEngine,
    requests: list[GenerateRequest],
    stop: asyncio.Event,
    done: list[tuple[GenerateRequest, Generation]],
    failed: list[BaseException],
) -> None:
    """One client: the next request as soon as the last has ended."""
    number = 0
    while not stop.is_set():
        request = requests[number % len(requests)]
        try:
            done.append((request, await engine.generate(request)))
        except Exception as error:  # counted and printed
            failed.append(error)
            print(f"failed: {error}", file=sys.stderr)
            if len(failed) > 100:
                raise
        number += 1


def rss_mb() -> float:
    """Memory of this process and vLLM's, MB."""
    here = os.getpid()
    pages = (
        int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in (here, *descendants(here))
    )
    return sum(pages) * os.sysconf("SC_PAGE_SIZE") / 1e6


def copy_ms(policy: LoadedPolicy) -> float:
    """Milliseconds to copy the weights within memory."""
    tensors = weight_tensors(policy.model)
    targets = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    began = time.perf_counter()
    for name, tensor in tensors.items():
        targets[name].copy_(tensor)
    return 1e3 * (time.perf_counter() - began)


if __name__ == "__main__":
    main()
