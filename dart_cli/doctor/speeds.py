"""What a GPU can do, and the seconds of an update and of its rollouts: stated assumptions, pure formulas.

GpuKind, gpu_kind    memory, arithmetic and bandwidth of a kind of GPU, by its name
Work                 the floating-point operations and tokens of one update
work_of              of a model's shape and an episode's tokens
update_seconds, rollout_seconds   each with the assumptions below

Nothing here was measured on a GPU (docs/hardware.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from dart_cli.doctor.episode_tokens import EpisodeTokens
from dart_cli.doctor.shape import Shape

MFU = 0.40
"""Share of a GPU's dense bfloat16 arithmetic that an update, and an engine's prefill, reach."""
BANDWIDTH = 0.60
"""Share of a GPU's memory bandwidth that decoding reaches."""
ITERATION_S = 0.005
"""Seconds of a decode iteration beside the reading of memory: scheduling, sampling, launches."""
HOST_BYTES_S = 20e9
"""Bytes a second between a GPU and main memory; an offloaded step moves weights and gradients so."""
ASSUMED = f"MFU {MFU:.0%}, decode at {BANDWIDTH:.0%} of bandwidth + {1000 * ITERATION_S:.0f} ms an iteration"


@dataclass(frozen=True)
class GpuKind:
    """One GPU: its name, bytes, dense bfloat16 operations a second, bytes a second of its memory."""

    name: str
    memory: int
    flops: float
    bandwidth: float


H100 = GpuKind("H100 80 GB", 85_520_000_000, 989e12, 3.35e12)
H200 = GpuKind("H200 141 GB", 150_750_000_000, 989e12, 4.8e12)
_KNOWN = {
    "B200": GpuKind("B200", 192_000_000_000, 2250e12, 8.0e12),
    "H200": H200,
    "GH200": H200,
    "H100": H100,
    "A100": GpuKind("A100", 85_900_000_000, 312e12, 2.0e12),
    "L40S": GpuKind("L40S", 48_300_000_000, 362e12, 0.864e12),
    "4090": GpuKind("RTX 4090", 25_700_000_000, 165e12, 1.008e12),
}
"""From the makers' data sheets; without sparsity."""


def gpu_kind(name: str, memory: int) -> GpuKind | None:
    """The kind of a GPU that nvidia-smi calls `name`, with its own bytes; None for an unknown one."""
    for part, kind in _KNOWN.items():
        if part in name:
            return GpuKind(name, memory, kind.flops, kind.bandwidth)
    return None


@dataclass(frozen=True)
class Work:
    """Of one update, over all GPUs."""

    trained: float  # operations of the trainer
    prefilled: float  # operations of the engines for prompts
    decoded: int  # completion tokens
    context: int  # tokens that a decoded one sees, on average


def work_of(
    shape: Shape,
    episode: EpisodeTokens,
    *,
    episodes: int,
    steps: int,
    completion: int,
    screen: int,
    share: float = 1.0,
    passes: float = 3.0,
    caches: bool = True,
) -> Work:
    """Of `episodes` of `steps` steps, of which `share` is trained on.

    `passes` are forward passes that an update costs: 3 for forward and backward, and one each for
    recompute and for the reference. A chain is computed whole where one of its steps is trained on.
    Screens of a frozen tower are encoded once an update; an engine encodes each screen that it reads.
    """
    per_token, per_pair = 2.0 * shape.layers * shape.layer, 4.0 * shape.queries * shape.layers
    seen = vision_flops(shape, screen)
    chained = sum(
        (per_token * tokens + per_pair * tokens**2 / 2) * (1 if count > 1 else share)
        for tokens, count in episode.chains
    )
    head = 2.0 * shape.embedding * completion * steps * share
    trained = passes * (chained + head) + steps * seen
    read, pairs, screens = episode.read, episode.pairs, episode.screens_read
    if not caches:
        read = episode.alone - steps * completion
        pairs = read**2 / steps / 2
        screens = read // max(1, screen)
    prefilled = per_token * read + per_pair * pairs + screens * seen
    return Work(
        trained=episodes * trained,
        prefilled=episodes * prefilled,
        decoded=episodes * steps * completion,
        context=episode.alone // steps,
    )


def vision_flops(shape: Shape, screen: int) -> float:
    """Operations of the tower's forward pass over one screen of `screen` tokens.

    A matrix of the merger meets a token, those before it each patch; windows hold 8 x 8 patches.
    """
    patches = screen * shape.merge
    embed = shape.patch_values * shape.vision_width
    blocks = shape.vision_blocks * shape.vision_block
    merger = shape.vision - embed - blocks
    windowed = shape.vision_blocks - shape.vision_whole
    pairs = shape.vision_whole * patches**2 + windowed * patches * min(64, patches)
    return 2.0 * ((embed + blocks) * patches + merger * screen) + 4.0 * shape.vision_width * pairs


def update_seconds(work: Work, gpu: GpuKind, ranks: int, *, offloaded: int = 0) -> float:
    """Of one update on `ranks` GPUs; `offloaded` are the trained parameters that main memory holds."""
    # Weights go to the GPU and gradients come back, in float32.
    moved = 8 * offloaded / ranks / HOST_BYTES_S
    return work.trained / (ranks * gpu.flops * MFU) + moved


def iteration_seconds(
    shape: Shape, gpu: GpuKind, *, together: int, context: int, share: int, wide: int = 2
) -> float:
    """A decode iteration of `together` requests on `share` GPUs that hold one model."""
    read = wide * (shape.text + together * context * shape.cached)
    return read / share / (gpu.bandwidth * BANDWIDTH) + ITERATION_S


def rollout_seconds(
    work: Work, shape: Shape, gpu: GpuKind, *, engines: int, share: int, together: int
) -> float:
    """Seconds that `engines`, of `share` GPUs each, compute for one update's episodes."""
    prefill = work.prefilled / (engines * share * gpu.flops * MFU)
    each = iteration_seconds(shape, gpu, together=together, context=work.context, share=share)
    return prefill + work.decoded / together * each / engines
