"""Adapters beside the weights against adapters merged into them: tokens a second, and a new version.

    python benchmarks/lora.py [--engines transformers vllm] [--sizes tiny wide] [--rank 32]
        [--out benchmarks/results/lora.json]

Each engine decodes the same requests with adapters beside the weights and with merged ones, and takes
new versions after each round. The limit of `beside` is `merged`, which computes nothing but the model.

    tokens_per_cpu_s   by seconds of CPU of all the engine's processes: other work counts little
    tokens_per_s       by the clock
    load_s             a new version from its files until the engine samples with it
    halt_ms            of that, what the engine stands still
    version_mb         a version's files, as the trainer publishes it, the same for both

For transformers, `merged` is the plain model: its update adds the adapters to a second copy of the
weights that they adapt (`copy_mb`), which the engine would have to keep. The last line is JSON.
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
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.vllm_updates import prompts
from dart_cli.config.schema import LoraConfig, VllmConfig
from dart_cli.engines.base import Engine, UpdateTiming
from dart_cli.engines.transformers_engine import TransformersEngine
from dart_cli.engines.vllm.engine import VllmEngine
from dart_cli.policy.lora import adapters_by_layer, merged
from dart_cli.policy.model import load_policy, weight_tensors
from dart_cli.weights.file import load, publish
from envs.process_tree import descendants
from scripts import tiny_model as tiny

SIZES = {
    "tiny": tiny.TinySizes(),
    "wide": tiny.TinySizes(text_hidden=512, text_layers=8, text_heads=8, text_mlp=1536),
}
AT_ONCE = 16  # requests
ROUNDS = 3  # of each arm, in turns
UPDATES = 5  # in each round


def main() -> None:
    """Measure, and print one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--engines", nargs="+", default=["transformers", "vllm"])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lora = LoraConfig(rank=arguments.rank)
    result: dict[str, Any] = {"rank": lora.rank, "requests_at_once": AT_ONCE}
    for size in arguments.sizes:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "model"
            tiny.save(folder, *tiny.build_tiny(3, SIZES[size]), build={})
            for engine in arguments.engines:
                found = asyncio.run(measure(engine, folder, Path(name) / engine, lora))
                result[f"{engine}_{size}"] = found
                print(f"{engine}, {size}: {json.dumps(found)}", flush=True)
    line = json.dumps(result)
    if arguments.out:
        arguments.out.write_text(line + "\n", encoding="utf-8")
    print(line)


async def measure(engine: str, folder: Path, published: Path, lora: LoraConfig) -> dict[str, Any]:
    """Both arms of one engine on one model."""
    start = weight_tensors(load_policy(folder, lora=lora).model)
    versions = [changed(start, number) for number in range(1, 1 + UPDATES)]
    plain = sum(tensor.nbytes for tensor in weight_tensors(load_policy(folder).model).values())
    found: dict[str, Any] = {
        "weights_mb": round(plain / 1e6, 3),
        "adapters_mb": round(sum(tensor.nbytes for tensor in start.values()) / 1e6, 3),
    }
    makers = {
        "transformers": {"beside": beside_transformers, "merged": plain_transformers},
        "vllm": {"beside": beside_vllm, "merged": merged_vllm},
    }[engine]
    rounds = {name: Rounds() for name in makers}
    if engine == "vllm":  # two of them at once would not fit every machine
        for name, make in makers.items():
            served = await asyncio.to_thread(make, folder, lora)
            for _ in range(ROUNDS):
                await round_of(served, name, versions, published, rounds[name])
            await served.close()
    else:
        engines = {name: make(folder, lora) for name, make in makers.items()}
        for _ in range(ROUNDS):
            for name, served in engines.items():
                await round_of(served, name, versions, published, rounds[name])
        for served in engines.values():
            await served.close()
        # The plain engine's own updates are of all its weights.
        found["copy_mb"] = merging(folder, versions, published / "merged", lora, rounds["merged"])
    for name, each in rounds.items():
        found[f"{name}_tokens_per_cpu_s"] = round(statistics.median(each.tokens_per_cpu_s), 1)
        found[f"{name}_tokens_per_s"] = round(statistics.median(each.tokens_per_s), 1)
        found[f"{name}_load_s"] = round(statistics.median(each.load_s), 4)
        found[f"{name}_halt_ms"] = round(1e3 * statistics.median(each.halt_s), 2)
        found[f"{name}_version_mb"] = round(statistics.median(each.version_bytes) / 1e6, 3)
    for name in ("tokens_per_cpu_s", "tokens_per_s", "load_s"):
        found[f"{name}_ratio"] = round(found[f"beside_{name}"] / found[f"merged_{name}"], 3)
    return found


@dataclass
class Rounds:
    """What one arm reached, a value for each round or version."""

    tokens_per_cpu_s: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    halt_s: list[float] = field(default_factory=list)
    version_bytes: list[int] = field(default_factory=list)


async def round_of(
    engine: Engine,
    name: str,
    versions: list[dict[str, torch.Tensor]],
    published: Path,
    found: Rounds,
) -> None:
    """Decode all requests once, then take the versions."""
    policy = engine.policy  # type: ignore[attr-defined]
    requests = [each for k in range(AT_ONCE) for each in prompts(policy, k, AT_ONCE)[:2]]
    began, began_cpu = time.perf_counter(), cpu_seconds()
    done = await asyncio.gather(*(engine.generate(request) for request in requests))
    tokens = sum(len(each.sampled.token_ids) for each in done)
    found.tokens_per_s.append(tokens / (time.perf_counter() - began))
    found.tokens_per_cpu_s.append(tokens / (cpu_seconds() - began_cpu))
    if name == "merged" and isinstance(engine, TransformersEngine):
        return
    for tensors in versions:
        version = engine.policy_version + 1
        path = publish(tensors, published / name, version).path
        began = time.perf_counter()
        timing: UpdateTiming = await engine.update_weights(path, version)
        found.load_s.append(time.perf_counter() - began)
        found.halt_s.append(timing.pause_s + timing.finish_s + timing.resume_s)
        found.version_bytes.append(bytes_in(path))


def merging(
    folder: Path,
    versions: list[dict[str, torch.Tensor]],
    published: Path,
    lora: LoraConfig,
    found: Rounds,
) -> float:
    """Read versions and add them to copies of the weights that they adapt; MB of the copies."""
    weights = weight_tensors(load_policy(folder).model)
    layers = adapters_by_layer(versions[0])
    copies = {layer: weights[f"{layer}.weight"].clone() for layer in layers}
    for number in range(ROUNDS * UPDATES):
        expected = versions[number % UPDATES]
        path = publish(expected, published, number + 1).path
        began = time.perf_counter()
        adapters = adapters_by_layer(load(path, expected))
        read = time.perf_counter()
        for layer, (a, b) in adapters.items():
            weights[f"{layer}.weight"].copy_(merged(copies[layer], a, b, lora.alpha / lora.rank))
        found.load_s.append(time.perf_counter() - began)
        found.halt_s.append(time.perf_counter() - read)
        found.version_bytes.append(bytes_in(path))
    return round(sum(copy.nbytes for copy in copies.values()) / 1e6, 3)


def bytes_in(version: Path) -> int:
    """Of the tensors' files of a published version."""
    return sum(path.stat().st_size for path in version.glob("*.safetensors"))


def beside_transformers(folder: Path, lora: LoraConfig) -> Engine:
    """Our engine with adapters."""
    return TransformersEngine(load_policy(folder, lora=lora), load_weights=load)


def plain_transformers(folder: Path, lora: LoraConfig) -> Engine:  # noqa: ARG001 - as the others
    """Our engine with the model alone: what it computes once adapters are merged."""
    return TransformersEngine(load_policy(folder))


def beside_vllm(folder: Path, lora: LoraConfig) -> Engine:
    """The real vLLM with adapters beside the weights."""
    policy = load_policy(folder, weights=False, lora=lora)
    return VllmEngine(policy, VllmConfig(), load_weights=load, max_batch=AT_ONCE, versions=5)


def merged_vllm(folder: Path, lora: LoraConfig) -> Engine:
    """The real vLLM, which adds each version to the weights."""
    policy = load_policy(folder, weights=False, lora=lora)
    return VllmEngine(policy, VllmConfig(lora="merged"), load_weights=load, max_batch=AT_ONCE)


def changed(start: Mapping[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Other adapters."""
    generator = torch.Generator().manual_seed(seed)
    return {n: t + 0.02 * torch.randn(t.shape, generator=generator) for n, t in start.items()}


def cpu_seconds() -> float:
    """Seconds of CPU of this process and those that it started."""
    here = os.getpid()
    total = 0.0
    for pid in (here, *descendants(here)):
        times = psutil.Process(pid).cpu_times()
        total += times.user + times.system
    return total


if __name__ == "__main__":
    main()
