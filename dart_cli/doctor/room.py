"""What there is for a run.

Room       GPUs, main memory, shared memory, disk
gb         bytes as text
gpu_name   the kind of GPU, and whether it is assumed
"""

from __future__ import annotations

from dataclasses import dataclass

from dart_cli.doctor.speeds import GpuKind


@dataclass(frozen=True)
class Room:
    """Bytes of this host; `gpus` are how many there are, 0 for none that is known."""

    gpu: GpuKind
    gpus: int = 0
    found: bool = False  # whether `gpu` is here, or assumed
    on_cpu: bool = False  # all processes share main memory
    memory: int | None = None  # main memory that is free, shared memory included
    shared: int | None = None  # free in /dev/shm
    disk: int | None = None  # for run.dir: free, and what its checkpoints and sets take already


def gpu_name(room: Room) -> str:
    """The kind of GPU."""
    return room.gpu.name if room.found else f"{room.gpu.name} (assumed, no GPU is here)"


def gb(count: float) -> str:
    """Bytes as GB."""
    return f"{count / 1e9:.1f} GB" if count < 1e12 else f"{count / 1e12:.1f} TB"
