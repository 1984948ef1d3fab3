"""How much work do packs of chains save against one sample at a time, with equal gradients?

    python benchmarks/speed/packing.py [--trajectories 1] [--steps 30] [--rounds 1] [--engines transformers vllm]
        [--out benchmarks/results/packing.json]

Real engines play episodes of 30 steps in the embedded environment (suite `desk`, 448x336, 192 tokens a
screen), twice: with a window that slides, 5 screens, and with one that evicts, 7 -> 3, which shows 5 on
average. The model is a random Qwen2.5-VL of 2 layers of 256; whatever it writes, the environment goes one
step on towards the end of its task, and then to the next one (packing_parts.py), so that screens change
as in a real episode. Each engine's own counts say how much of the prompts its prefix cache had: the
transformers engine's, and vLLM's counters of its prefix cache. Then, for
what `transformers` played, the gradient of the same loss over all samples is computed

- `alone`: each sample by itself, whole logits of its completion, as `train.micro_batch = 1` did;
- `packed`: as the trainer does it now (dart_cli/train/packs/rank_shares.py, packs/pack.py, model.py);

with a frozen vision tower, for `evict` with a trained one, too. A loss whose coefficient of each log-probability is its
advantage over all tokens has the gradient of an update on fresh samples (docs/objective.md).

Operations are counted by torch.utils.flop_counter, forward and backward, with the CPU's
attention kernel added, which the counter does not know. Beside them stands the closed formula: 2 per
weight and token, 4 per width of a head and visible pair of tokens, times three for a trained part. It
counts a causal pair once, the counter both halves of the square that a kernel is given.

The limit that packs approach: each distinct token once. Seconds are the median of `--rounds`, both ways in
turn, and ratios of seconds have their range beside them. The last line is JSON; `flops_ratio` and the
other numbers without a name are of `evict` with a frozen tower.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.parts import KIND, TINY, write_shards
from benchmarks.gpu.speeds import vision_flops
from benchmarks.speed.packing_parts import LongDesk
from benchmarks.speed.playing import GroupMember, Player, limit_torch, step_of
from bus.messages import Batch
from dart_cli.config.architecture import Shape, shape_of
from dart_cli.config.schema import (
    Config,
    EnvConfig,
    ModelConfig,
    PolicyConfig,
    RolloutConfig,
    VllmConfig,
)
from dart_cli.config.task_split import trained_tasks
from dart_cli.data.loading import chained
from dart_cli.data.store.steps import BatchStep
from dart_cli.engines.base import Engine
from dart_cli.engines.transformers_engine import TransformersEngine
from dart_cli.policy.forward import logits, masked_logprobs
from dart_cli.policy.loader import load_policy
from dart_cli.train.packs.pack import PackFeed, PackMaker
from dart_cli.train.packs.rank_shares import packed_batches
from dart_cli.train.trained_policy import TrainModel

ROOT = Path(__file__).resolve().parents[2]
SMALL = replace(
    TINY,
    text={
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16384,
    },
    vision={
        "depth": 2,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_heads": 4,
        "out_hidden_size": 256,
        "fullatt_block_indexes": [1],
    },
    layers=2,
)
HISTORIES: dict[str, dict[str, Any]] = {
    "slide": {"history_images": 5},
    "evict": {"history_images": 3, "history_images_most": 7},
}
SCREEN = "448x336"
BLOCK = 32
"""Tokens of a block of vLLM's prefix cache: the least of its CPU build. It has 128 by default, GPUs 16."""
Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True)
class PlayedSamples:
    """The samples of one history, and how much of their prompts the prefix cache had."""

    batch: Batch
    prompt_tokens: int
    prefilled_tokens: int


@dataclass(frozen=True)
class Cost:
    """One way to compute the gradients."""

    flops: float
    tokens: int  # that pass through the language model
    gradients: Gradients


def config_of(folder: Path, history: str, *, slots: int, freeze: bool, completion: int) -> Config:
    """Return the configuration of one history; steps show as many turns as screens."""
    return Config(
        model=ModelConfig(path=str(folder), freeze_vision=freeze),
        policy=PolicyConfig(
            **HISTORIES[history],
            history_turns=35,
            part_order="instruction_first",
            action_parser=f"{ROOT / 'benchmarks/speed/packing_parts.py'}:AnyClick",
        ),
        env=EnvConfig(suite="desk", options={"size": SCREEN}),
        rollout=RolloutConfig(max_tokens=completion, max_batch=slots),
    )


# --- play -----------------------------------------------------------------------------------------


async def play(config: Config, engine: Engine, trajectories: int, steps: int) -> PlayedSamples:
    """Play groups of two, a task for each group; `trajectories` in all, of `steps` steps."""
    tasks = trained_tasks(config)
    planned = [
        GroupMember(
            f"g{number // 2}",
            number % 2,
            replace(tasks[number // 2], max_steps=steps),
            number // 2,
            Random(number).getrandbits(31),
        )
        for number in range(trajectories)
    ]
    try:
        player = Player(config, engine.policy, engine)  # type: ignore[attr-defined]
        player.take([LongDesk(config) for _ in range(config.rollout.max_batch)])
        episodes = await player.play(planned)
        counts = engine.gauges()
    finally:
        await engine.close()
    images: dict[str, bytes] = {}
    rows: list[BatchStep] = []
    for episode in episodes:
        for record in episode.records:
            images[record.image_hashes[-1]] = record.screenshot
            rows.append(step_of(record, 1.0 - 2.0 * episode.planned.member, episode.planned.group))
    chains, samples = chained(rows)
    batch = Batch(
        batch_id=1,
        group_ids=sorted({episode.planned.group for episode in episodes}),
        temperature=config.rollout.temperature,
        chains=chains,
        samples=samples,
        images=images,
    )
    return PlayedSamples(batch, int(counts["prompt_tokens"]), int(counts["prefilled_tokens"]))


def served(samples: PlayedSamples) -> dict[str, Any]:
    """Return the tokens that an engine was asked for, and the ones that it computed."""
    return {
        "prompt_tokens": samples.prompt_tokens,
        "prefilled_tokens": samples.prefilled_tokens,
        "prefix_hit_rate": 1 - samples.prefilled_tokens / samples.prompt_tokens,
    }


def by_transformers(config: Config) -> Engine:
    """Return our engine."""
    return TransformersEngine(load_policy(config.model.path), max_batch=config.rollout.max_batch)


def by_vllm(config: Config) -> Engine:
    """Return the real vLLM, which counts its prefix cache's tokens."""
    from dart_cli.engines.vllm.engine import VllmEngine

    return VllmEngine(
        load_policy(config.model.path, weights=False),
        VllmConfig(options={"disable_log_stats": False, "block_size": BLOCK}),
        max_batch=config.rollout.max_batch,
    )


def vllm_counters() -> dict[str, int]:
    """Return the tokens that the last vLLM's prefix cache was asked for (queries) and had (hits)."""
    from prometheus_client import REGISTRY

    return {
        sample.name.removeprefix("vllm:prefix_cache_").removesuffix("_total"): int(sample.value)
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name in ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")
    }


# --- gradients ------------------------------------------------------------------------------------


def alone(model: TrainModel, batch: Batch) -> int:
    """Compute gradients of the loss one sample at a time; return the number of tokens computed."""
    policy, total = model.policy, sum(map(len, batch.samples))
    computed = 0
    for sample in batch.samples:
        token_ids = list(batch.chains[sample.chain].token_ids[: sample.end])
        images = [batch.images[name] for name in batch.image_hashes(sample)]
        inputs = policy.inputs([token_ids], [images])
        count = len(sample)
        values = logits(policy.model, inputs, last=count + 1)[0, :-1]
        logprobs = masked_logprobs(values, policy.forbidden(values.device), batch.temperature)
        tokens = torch.tensor(token_ids[-count:], device=values.device)
        loss = logprobs.gather(1, tokens[:, None]).sum() * (-sample.advantage / total)
        loss.backward()
        computed += len(token_ids)
    return computed


def packed(model: TrainModel, batch: Batch, pack_tokens: int) -> int:
    """Compute the same gradients as `alone`, in packs; return the number of tokens computed."""
    [part] = packed_batches(batch, model.policy, pack_tokens=pack_tokens)
    total = sum(map(len, batch.samples))
    computed = 0
    with PackFeed(part, [1.0 / total] * len(part.batch.samples), model.policy) as feed:
        for pack in feed:
            scores = model.score(pack, batch.temperature)
            factors = (pack.advantages * pack.weights).to(scores.logprobs)
            (-(scores.logprobs * factors).sum()).backward()
            computed += pack.inputs.layout.length
    return computed


def _attention_forward(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(q, k, v))


def _attention_backward(g: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(g, q, k, v))


_KERNEL = "_scaled_dot_product_flash_attention_for_cpu"
KERNELS = {
    getattr(torch.ops.aten, _KERNEL): _attention_forward,
    getattr(torch.ops.aten, f"{_KERNEL}_backward"): _attention_backward,
}
"""The counter gives the shapes of tensors."""


def counted(model: TrainModel, batch: Batch, run: Callable[[], int]) -> Cost:
    """Return the cost of `run` without its seconds; screens are prepared before."""
    for name, encoded in batch.images.items():
        model.policy.images.prepare(encoded, name)
    with FlopCounterMode(display=False, custom_mapping=KERNELS) as counter:
        tokens = run()
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in model.trainable().items()
        if parameter.grad is not None
    }
    model.policy.model.zero_grad(set_to_none=True)
    return Cost(float(counter.get_total_flops()), tokens, gradients)


def timed(model: TrainModel, run: Callable[[], int]) -> float:
    """Return the CPU seconds of this process for `run`, whose gradients are dropped."""
    began = time.process_time()
    run()
    seconds = time.process_time() - began
    model.policy.model.zero_grad(set_to_none=True)
    return seconds


def difference(one: Gradients, other: Gradients) -> float:
    """Return the largest over parameters, of the difference's norm divided by the norm of `other`."""
    if one.keys() != other.keys():
        raise ValueError("they are of different parameters")
    return max(
        float((value - other[name]).norm() / other[name].norm().clamp(min=1e-30))
        for name, value in one.items()
    )


# --- the closed formula ---------------------------------------------------------------------------


def formula(
    shape: Shape, lengths: Sequence[tuple[int, int]], heads: int, share_seen: float, *, freeze: bool
) -> float:
    """Return the operations of gradients on nodes (tokens, tokens before them) with `heads` tokens predicted.

    `seen` are those of the tower's forward passes.
    """
    pairs = sum(own * before + own * (own + 1) / 2 for own, before in lengths)
    tokens = sum(own for own, _ in lengths)
    forward = shape.token_operations * tokens + shape.pair_operations * pairs
    forward += 2.0 * shape.embedding * heads
    return 3 * forward + (1 if freeze else 3) * share_seen


def formulas(
    samples: PlayedSamples, shape: Shape, config: Config, pack_tokens: int
) -> tuple[float, float]:
    """Return the operations of `alone` and of `packed`."""
    policy = load_policy(config.model.path, weights=False)
    batch, freeze = samples.batch, config.model.freeze_vision
    one = vision_flops(shape, policy.images.token_count(next(iter(batch.images.values()))))
    heads = sum(map(len, batch.samples))
    screens_alone = sum(len(set(batch.image_hashes(sample))) for sample in batch.samples)
    by_itself = [(sample.end, 0) for sample in batch.samples]
    [part] = packed_batches(batch, policy, pack_tokens=pack_tokens)
    nodes, screens = [], 0
    maker = PackMaker(part, [1.0] * len(part.batch.samples), policy)
    for number, pack in enumerate(part.packs):
        begins, ends = pack.nodes[2::4], pack.nodes[3::4]
        nodes += [(end - begin, begin) for begin, end in zip(begins, ends, strict=True)]
        screens += len(maker.image_names(number))
    screens = len(batch.images) if freeze else screens
    return (
        formula(shape, by_itself, heads + len(batch.samples), screens_alone * one, freeze=freeze),
        formula(shape, nodes, heads, screens * one, freeze=freeze),
    )


# --- all of it ------------------------------------------------------------------------------------


def compared(
    samples: PlayedSamples, config: Config, pack_tokens: int, rounds: int
) -> dict[str, Any]:
    """Return the figures of one history and one kind of tower."""
    model, batch = TrainModel.load(config), samples.batch
    model.policy.images.cache_bytes = 1 << 30
    ways = {
        "alone": lambda: alone(model, batch),
        "packed": lambda: packed(model, batch, pack_tokens),
    }
    apart, together = (counted(model, batch, run) for run in ways.values())
    seconds = [[timed(model, run) for run in ways.values()] for _ in range(rounds)]
    ratios = [one / other for one, other in seconds]
    tree = json.loads((Path(config.model.path) / "config.json").read_text(encoding="utf-8"))
    by_formula = formulas(samples, shape_of(tree), config, pack_tokens)
    return {
        "samples": len(batch.samples),
        "chains": len(batch.chains),
        **{
            name: {"flops": cost.flops, "seconds": statistics.median(spent), "tokens": cost.tokens}
            for name, cost, spent in zip(
                ways, (apart, together), zip(*seconds, strict=True), strict=True
            )
        },
        "formula": {"alone": by_formula[0], "packed": by_formula[1]},
        "flops_ratio": apart.flops / together.flops,
        "formula_ratio": by_formula[0] / by_formula[1],
        "seconds_ratio": statistics.median(ratios),
        "seconds_ratio_range": [min(ratios), max(ratios)],
        "tokens_ratio": apart.tokens / together.tokens,
        "max_rel_gradient_difference": difference(together.gradients, apart.gradients),
    }


def rounded(value: Any) -> Any:
    """Return the same figures with numbers of four digits."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if isinstance(value, float) and value:
        return round(value, 3 - math.floor(math.log10(abs(value))))
    return value


def main() -> None:
    """Play, compute, compare; print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trajectories", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--completion", type=int, default=24)
    parser.add_argument("--pack-tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=1, help="of the seconds")
    parser.add_argument(
        "--engines", nargs="+", choices=("transformers", "vllm"), default=["transformers"]
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    limit_torch()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_shards(Path(scratch) / KIND, SMALL, SMALL.layers, "cpu", torch.float32)
        for history in HISTORIES:
            freely, frozen = (
                config_of(
                    folder,
                    history,
                    slots=options.trajectories,
                    freeze=freeze,
                    completion=options.completion,
                )
                for freeze in (False, True)
            )
            size = (options.trajectories, options.steps)
            samples = asyncio.run(play(freely, by_transformers(freely), *size))
            results[history] = {"engines": {"transformers": served(samples)}}
            if "vllm" in options.engines:
                by_other = served(asyncio.run(play(freely, by_vllm(freely), *size)))
                results[history]["engines"]["vllm"] = by_other | {
                    "block_size": BLOCK,
                    "its_counters": vllm_counters(),
                }
            rest = (options.pack_tokens, options.rounds)
            results[history]["frozen"] = compared(samples, frozen, *rest)
            if history == "evict":
                results[history]["trained"] = compared(samples, freely, *rest)
            print(json.dumps({history: rounded(results[history])}, indent=1), flush=True)
    main_part = results["evict"]["frozen"]
    names = ("flops_ratio", "seconds_ratio", "seconds_ratio_range", "tokens_ratio")
    result = {name: main_part[name] for name in (*names, "max_rel_gradient_difference")}
    result |= {"trajectories": options.trajectories, "rounds": options.rounds}
    result["slide_alone_over_evict_packed"] = (
        results["slide"]["frozen"]["alone"]["flops"] / main_part["packed"]["flops"]
    )
    for engine in results["evict"]["engines"]:
        for history, each in results.items():
            for name in ("prefix_hit_rate", "prefilled_tokens"):
                result[f"{engine}_{history}_{name}"] = each["engines"][engine][name]
    result = rounded(result | {"histories": results})
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
