"""The checks of scripts/gpu-check that train.

    model         weights of 7B widths are drawn, for the checks after it
    update        updates with packs and recompute: tokens/s, MFU, peak memory against the plan
    one_by_one    the same samples one at a time, and whether their gradients are the packs'
    plain_loop    the same samples in a plain transformers training loop
    lora          an update of adapters on all layers

One GPU of 80 GB does not hold masters, gradients and moments of a 7B. So `update` runs at two depths, the
larger by the doctor's memory plan, and extrapolates the difference that a layer makes to all of them. The
arms that are compared (`update`, `one_by_one`, `plain_loop`) run at the lesser depth.
"""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from benchmarks.gpu.parts import folder_of, trajectories, write_shards
from benchmarks.gpu.settings import (
    COMPARED_LAYERS,
    BrokenError,
    Clock,
    Figures,
    MissedError,
    Settings,
    compared_layers,
    config_of,
    peak_memory,
    relative,
    tokens_alone,
    written_layers,
)
from bus.messages import Batch
from dart_cli.config.schema import Config
from dart_cli.hardware.accelerator import use_any_length

PLAIN = 6
"""Of so many samples the plain loop trains on one."""
BF16_GRADIENT = 0.1
"""Largest relative difference of a gradient, packs against samples alone, both in bfloat16."""


def model(settings: Settings) -> Figures:
    """Write as many layers as fit twice, as weights and as their publication."""
    size, folder = settings.size, settings.scratch / "shards"
    free = shutil.disk_usage(settings.scratch).free
    layers = size.layers if settings.tiny else min(size.layers, int((free / 2.2 - 4e9) / 0.47e9))
    if layers < 1:
        raise MissedError(
            f"{free / 1e9:.0f} GB are free in {settings.scratch.parent}, too few for a model"
        )
    clock = Clock(settings.device)
    write_shards(folder, size, layers, settings.device, torch.bfloat16)
    (folder / "complete").touch()
    bytes_on_disk = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return {"layers": layers, "gb": round(bytes_on_disk / 1e9, 2), "seconds_to_write": clock.lap()}


# --- updates --------------------------------------------------------------------------------------


def planned(settings: Settings, layers: int, tokens: int, predicted: int, adapters: int = 0) -> Any:
    """Return the doctor's plan of a rank's memory, with these tokens in a pack."""
    from dart_cli.config.architecture import shape_of
    from dart_cli.doctor.trainer_memory import TrainerSetup, trainer_memory

    tree = json.loads((settings.shards / "config.json").read_text(encoding="utf-8"))
    shape = shape_of(tree | {"num_hidden_layers": layers})
    setup = TrainerSetup(tokens=tokens, predicted=predicted, recompute=True, adapters=adapters)
    return trainer_memory(shape, setup)


def deepest(settings: Settings, tokens: int, predicted: int) -> int:
    """Return the most layers whose masters, gradients and moments one GPU holds, by the doctor's plan."""
    most = written_layers(settings)
    if not settings.device.startswith("cuda"):
        return most
    room = torch.cuda.get_device_properties(settings.device).total_memory
    return max(
        (n for n in range(1, most + 1) if planned(settings, n, tokens, predicted).total < room),
        default=1,
    )


def operations(settings: Settings, layers: int, batch: Batch, nodes: Any, passes: float) -> float:
    """Return the floating-point operations of an update on `nodes` (tokens, tokens before them).

    Those of one pass of the frozen tower over each screen are among them. See benchmarks/speed/packing.py.
    """
    from benchmarks.gpu.speeds import vision_flops
    from dart_cli.config.architecture import shape_of

    tree = json.loads((settings.shards / "config.json").read_text(encoding="utf-8"))
    shape = shape_of(tree | {"num_hidden_layers": layers})
    tokens = sum(own for own, _ in nodes)
    pairs = sum(own * before + own * (own + 1) / 2 for own, before in nodes)
    forward = shape.token_operations * tokens + shape.pair_operations * pairs
    head = 2.0 * shape.embedding * sum(map(len, batch.samples))
    first = next(iter(batch.images.values()))
    screen = tokens_alone(settings).images.token_count(first)
    return passes * forward + 3 * head + len(batch.images) * vision_flops(shape, screen)


def nodes_of(part: Any) -> list[tuple[int, int]]:
    """Return (tokens, tokens before them) of the nodes of all packs of a PackedBatch."""
    nodes = []
    for pack in part.packs:
        begins, ends = pack.nodes[2::4], pack.nodes[3::4]
        nodes += [(end - begin, begin) for begin, end in zip(begins, ends, strict=True)]
    return nodes


def update(settings: Settings) -> Figures:
    """Measure updates at two depths, and extrapolate the seconds and the memory of all layers."""
    from dart_cli.train.packs.rank_shares import packed_batches

    policy = tokens_alone(settings)
    sample = trajectories(policy, settings.size)
    [part] = packed_batches(sample, policy, pack_tokens=settings.size.pack_tokens)
    nodes = nodes_of(part)
    longest = max(
        sum(end - begin for begin, end in zip(p.nodes[2::4], p.nodes[3::4], strict=True))
        for p in part.packs
    )
    predicted = sum(map(len, sample.samples)) // len(part.packs)
    most = deepest(settings, longest, predicted)
    depths = sorted({min(COMPARED_LAYERS, most) if not settings.tiny else 1, most})
    figures: Figures = {
        "samples": len(sample.samples),
        "chains": len(sample.chains),
        "packs": len(part.packs),
        "tokens": sum(own for own, _ in nodes),
        "tokens_one_by_one": sum(each.end for each in sample.samples),
    }
    peak = _matmul_tflops(settings)
    rows = []
    for layers in depths:
        row = _updated_if_it_fits(settings, layers, sample)
        layers = row["layers"]
        counted = operations(settings, layers, sample, nodes, passes=4.0)
        useful = operations(settings, layers, sample, nodes, passes=3.0)
        row |= {
            "tokens_s": round(figures["tokens"] / row["seconds"], 1),
            "samples_s": round(len(sample.samples) / row["seconds"], 3),
            "tflops_s": round(counted / row["seconds"] / 1e12, 3),
            "mfu_of_matmul": round(useful / row["seconds"] / 1e12 / peak, 3),
        }
        if kind := _kind(settings):
            row["mfu"] = round(useful / row["seconds"] / kind.flops, 3)
        plan = planned(settings, layers, longest, predicted)
        row["planned_gb"] = round(plan.peak / 1e9, 2)
        row["planned_with_context_gb"] = round(plan.total / 1e9, 2)
        rows.append(row)
    figures["depths"] = rows
    for one, other in pairwise(rows):
        if other["layers"] <= one["layers"]:
            continue
        span = other["layers"] - one["layers"]
        rest = settings.size.layers - other["layers"]
        figures["extrapolated"] = {
            "layers": settings.size.layers,
            "from": [r["layers"] for r in rows],
        }
        for name in ("seconds", "peak_gb"):
            value = other[name] + rest * (other[name] - one[name]) / span
            figures["extrapolated"][name] = round(value, 2)
    (settings.scratch / "update.json").write_text(json.dumps(rows[0]), encoding="utf-8")
    return figures


def _updated_if_it_fits(settings: Settings, layers: int, batch: Batch) -> Figures:
    """Return the figures of `_updated`, with fewer layers where memory is short; the result then notes it."""
    failed: list[int] = []
    while True:
        try:
            row = _updated(settings, layers, batch)
        except torch.OutOfMemoryError:
            failed.append(layers)
            if layers == 1:
                raise
        else:
            return row | ({"out_of_memory_at": failed} if failed else {})
        layers = max(1, layers * 4 // 5)
        gc.collect()
        torch.cuda.empty_cache()


def _updated(settings: Settings, layers: int, batch: Batch, **sections: Any) -> Figures:
    """Make three updates on one batch: the first warms up, the others are timed."""
    config = config_of(settings, layers)
    config = config.model_copy(
        update={"model": config.model.model_copy(update=sections)} if sections else {}
    )
    with _learner(config) as learner, peak_memory(settings.device) as memory:
        losses, seconds = [], []
        for number in range(3):
            clock = Clock(settings.device)
            result = learner.update(batch, number)
            seconds.append(clock.lap())
            if not result.applied:
                raise BrokenError(
                    f"update {number} was not applied: {result.note or result.alarm}", {}
                )
            losses.append(result.metrics["loss"])
    return {
        "layers": layers,
        "seconds": min(seconds[1:]),
        "peak_gb": round(memory["gb"], 2),
        "reserved_gb": round(memory["reserved_gb"], 2),
        "loss": [round(loss, 5) for loss in losses],
    } | {name: round(result.metrics[name], 3) for name in result.metrics if name.endswith("_s")}


@contextmanager
def _learner(config: Config) -> Iterator[Any]:
    """Yield the trainer of one process."""
    from dart_cli.train.learner import PolicyLearner
    from dart_cli.train.trained_policy import TrainModel

    yield PolicyLearner(TrainModel.load(config), config.train)


def _matmul_tflops(settings: Settings) -> float:
    """Return the TFLOP/s that one large matrix product reaches here."""
    side = 256 if settings.tiny else 8192
    one = torch.randn(side, side, device=settings.device, dtype=torch.bfloat16)
    one @ one
    clock = Clock(settings.device)
    for _ in range(10):
        one @ one
    return 20 * side**3 / clock.lap() / 1e12


def _kind(settings: Settings) -> Any:
    """Return the GPU's data sheet, where it is known."""
    from benchmarks.gpu.speeds import gpu_speed

    if not settings.device.startswith("cuda"):
        return None
    about = torch.cuda.get_device_properties(settings.device)
    return gpu_speed(about.name, about.total_memory)


class _Sums:
    """The gradients of the trained parameters, summed in float32 as the learner does."""

    def __init__(self, model: Any) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._adder(name))
            for name, parameter in model.trainable().items()
        ]

    def _adder(self, name: str) -> Any:
        def add(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            if name in self.sums:
                self.sums[name].add_(parameter.grad)
            else:
                self.sums[name] = parameter.grad.float()
            parameter.grad = None

        return add

    def take(self) -> dict[str, torch.Tensor]:
        """Return the sums; no further gradient is added."""
        for handle in self._handles:
            handle.remove()
        return self.sums


def one_by_one(settings: Settings) -> Figures:
    """Compute gradients of the same samples in packs and one at a time; return the seconds of both."""
    from benchmarks.speed.packing import alone, packed
    from dart_cli.policy.loader import load_policy
    from dart_cli.policy.packed import use_recompute
    from dart_cli.train.trained_policy import TrainModel

    layers = compared_layers(settings)
    folder = folder_of(settings.shards, settings.scratch / f"layers-{layers}", layers)
    # Plain tensors: a sample alone goes through the model in a way that shards do not know.
    model = TrainModel.of(load_policy(folder, "bfloat16", settings.device))
    network: Any = model.policy.model
    network.model.visual.requires_grad_(False)
    use_recompute(network)
    batch = trajectories(model.policy, settings.size)
    for name, encoded in batch.images.items():
        model.policy.images.prepare(encoded, name)
    size = settings.size.pack_tokens
    packed(model, batch, size)  # warms up
    model.policy.model.zero_grad(set_to_none=True)
    figures: Figures = {"layers": layers, "samples": len(batch.samples)}
    sums = {}
    for name, run in (
        ("packed", lambda: packed(model, batch, size)),
        ("alone", lambda: alone(model, batch)),
    ):
        adder, clock = _Sums(model), Clock(settings.device)
        with peak_memory(settings.device) as memory:
            tokens = run()
        figures[name] = {
            "seconds": round(clock.lap(), 3),
            "tokens": tokens,
            "peak_gb": round(memory["gb"], 2),
        }
        sums[name] = adder.take()
    figures["seconds_ratio"] = round(figures["alone"]["seconds"] / figures["packed"]["seconds"], 2)
    figures["tokens_ratio"] = round(figures["alone"]["tokens"] / figures["packed"]["tokens"], 2)
    names = sorted(sums["alone"])
    worst = {name: relative(sums["packed"][name], sums["alone"][name]) for name in names}
    apart = sum(
        float(torch.linalg.vector_norm((sums["packed"][n] - sums["alone"][n]).double())) ** 2
        for n in names
    )
    whole = sum(float(torch.linalg.vector_norm(sums["alone"][n].double())) ** 2 for n in names)
    figures["relative_difference"] = (apart / whole) ** 0.5
    figures["largest_of_a_parameter"] = max(worst.values())
    if not figures["relative_difference"] <= BF16_GRADIENT:
        raise BrokenError("packs and samples alone have other gradients", figures)
    return figures


def plain_loop(settings: Settings) -> Figures:
    """Run a plain transformers loop: one sample at a time, its loss, AdamW in bfloat16.

    Without cuDNN's attention, which would make a plan for each of their lengths.
    """
    from transformers import AutoModelForImageTextToText

    layers = compared_layers(settings)
    policy = tokens_alone(settings)
    batch = trajectories(policy, settings.size)
    folder = folder_of(settings.shards, settings.scratch / f"layers-{layers}", layers)
    network: Any = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.bfloat16, local_files_only=True
    ).to(settings.device)
    network.model.visual.requires_grad_(False)
    network.gradient_checkpointing_enable({"use_reentrant": False})
    network.train()
    use_any_length()
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=True)
    samples = batch.samples[:: 1 if settings.tiny else PLAIN]
    prepared = {n: policy.images.prepare(encoded, n) for n, encoded in batch.images.items()}

    def step() -> int:
        tokens = 0
        for sample in samples:
            ids = torch.tensor(list(batch.chains[sample.chain].token_ids[: sample.end]))[None]
            images = [prepared[name] for name in batch.image_hashes(sample)]
            labels = torch.full_like(ids, -100)
            labels[:, sample.start :] = ids[:, sample.start :]
            output = network(
                input_ids=ids.to(settings.device),
                attention_mask=torch.ones_like(ids).to(settings.device),
                mm_token_type_ids=(ids == policy.image_token_id).int().to(settings.device),
                pixel_values=torch.cat([image.patches for image in images]).to(settings.device),
                image_grid_thw=torch.tensor([image.grid for image in images]).to(settings.device),
                labels=labels.to(settings.device),
            )
            (output.loss * sample.advantage / len(samples)).backward()
            tokens += ids.shape[1]
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return tokens

    step()  # warms up
    clock = Clock(settings.device)
    with peak_memory(settings.device) as memory:
        tokens = step()
    seconds = clock.lap()
    figures = {
        "layers": layers,
        "seconds": round(seconds, 3),
        "tokens_s": round(tokens / seconds, 1),
        "samples_s": round(len(samples) / seconds, 3),
        "peak_gb": round(memory["gb"], 2),
    }
    if (path := settings.scratch / "update.json").exists():
        ours = json.loads(path.read_text(encoding="utf-8"))
        figures["seconds_ratio_of_a_sample"] = round(ours["samples_s"] / figures["samples_s"], 2)
    return figures


def lora(settings: Settings) -> Figures:
    """Measure updates of adapters of rank 32 on all layers."""
    from dart_cli.config.schema import LoraConfig
    from dart_cli.train.packs.rank_shares import packed_batches

    policy = tokens_alone(settings)
    batch = trajectories(policy, settings.size)
    layers = written_layers(settings)
    [part] = packed_batches(batch, policy, pack_tokens=settings.size.pack_tokens)
    nodes = nodes_of(part)
    figures = _updated(settings, layers, batch, lora=LoraConfig(rank=4 if settings.tiny else 32))
    figures["tokens_s"] = round(sum(own for own, _ in nodes) / figures["seconds"], 1)
    # The base's weights have no gradient: forward, forward again, and back.
    work = operations(settings, layers, batch, nodes, passes=3.0)
    figures["tflops_s"] = round(work / figures["seconds"] / 1e12, 3)
    return figures
