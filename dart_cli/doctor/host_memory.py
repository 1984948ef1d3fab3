"""Estimate what a run takes of its host beside GPUs: main memory, shared memory and disk.

EpisodeForm   the sizes of an episode in tokens
HostPart      one part of main memory, and the role whose processes hold it
HostPlan      all parts, with shared memory and disk
host_plan     makes the plan from the configuration, the model's sizes and the trainer's setup

All functions are pure, and all sizes are in bytes. `dart doctor`, `--dry-run` and docs/hardware.md use these
formulas. Each part stands for this in the code:

    offload      float32 masters, gradients, AdamW's moments (train.offload;
                 dart_cli/train/sharded.py)
    checkpoint   a staged copy of masters and moments, whose buffers stay
                 (dart_cli/train/checkpoints/shards.py: Staging)
    parity       float32 weights of one version (dart_cli/train/logprob_check.py: LogprobCheck.keep)
    publication  a copy of the trained parameters in model.dtype, on rank 0; with deltas or a broadcast
                 the newest version and the next one, both whole (dart_cli/weights/file.py). With a GPU
                 they are pinned memory, which torch allocates in powers of two
    features     outputs of a frozen vision tower, kept from the first pack of a rank that shows a screen
                 to the last (dart_cli/train/packs/pack.py). Each screen of an update counts once; the
                 packs of 48 episodes hold less than a third of them at a time, on all ranks together
    screens      the screens of a batch as PNG, on rank 0 and once more on the ranks
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from dart_cli.config.architecture import Shape
from dart_cli.config.schema import KEEP_CHECKPOINTS, Config
from dart_cli.config.schema.weights import WHOLE_EVERY
from dart_cli.config.screens import image_cache_bytes, vllm_image_cache_gb
from dart_cli.doctor.trainer_memory import (
    GRADIENT,
    MASTER,
    MOMENTS,
    WIDTH,
    TrainerSetup,
    trained_parameters,
)

MIB, GIB = 2**20, 2**30
PROCESS = 1_500_000_000
"""Bytes of main memory of a process with torch (assumed)."""
GUEST = 6_000_000_000
"""Bytes of main memory of one virtual machine of OSWorld: 4 GB for the guest, 2 GB for its emulator."""
SCREEN_BYTES = 0.39
"""Bytes per pixel of a desktop's PNG: 0.8 MB for 1920x1080."""

PROCESSES = "processes"
"""The name of the parts that do not depend on the model."""

Holder = Literal["train", "rollout", "env", "data"]


@dataclass(frozen=True)
class EpisodeForm:
    """The sizes of an episode in tokens. `most` is 0 if the history slides."""

    steps: int
    screen: int
    completion: int  # of a typical step; later prompts show it as text
    header: int  # system prompt, template, instruction
    images: int  # policy.history_images
    most: int  # policy.history_images_most
    turns: int  # policy.history_turns

    @property
    def longest(self) -> int:
        """Tokens of the longest possible sequence, without its last completion."""
        images = max(self.images, self.most)
        return (
            self.header
            + min(images, self.steps) * self.screen
            + self.longest_turns * self.completion
        )

    @property
    def longest_turns(self) -> int:
        """Past turns in the longest sequence."""
        turns = self.turns + (self.most - self.images if self.most else 0)
        return min(turns, self.steps - 1)


@dataclass(frozen=True)
class HostPart:
    """One part of main memory, in bytes."""

    holder: Holder
    name: str
    size: int


@dataclass(frozen=True)
class HostPlan:
    """What a run takes of its host, in bytes."""

    parts: tuple[HostPart, ...]  # of main memory, without shared memory
    workers: int  # rollout workers
    set_bytes: int  # what each version of the weights writes
    shared: int  # /dev/shm for weight sets; 0 with weights.directory
    checkpoints: int
    sets: int  # weight sets in run.dir when the run ends; 0 with weights.directory
    screen_bytes: float  # one screenshot

    @property
    def memory(self) -> int:
        """The main memory of all processes."""
        return self.memory_of(None)

    @property
    def disk(self) -> int:
        """The disk space of run.dir without the database."""
        return self.checkpoints + self.sets

    def memory_of(self, role: str | None) -> int:
        """Return the sum of `parts_of` the role."""
        return sum(part.size for part in self.parts_of(role))

    def parts_of(self, role: str | None) -> tuple[HostPart, ...]:
        """Return the parts of one role's process; of all processes if `role` is None."""
        if role is None:
            return self.parts
        share = self.workers if role == "rollout" else 1
        own_parts = [part for part in self.parts if part.holder == role]
        return tuple(replace(part, size=part.size // share) for part in own_parts)


def host_plan(
    config: Config,
    shape: Shape,
    setup: TrainerSetup,
    form: EpisodeForm,
    screen: tuple[int, int],
) -> HostPlan:
    """Return what all processes of a run take on one host."""
    wide, trained = WIDTH[config.model.dtype], trained_parameters(shape, setup)
    rollouts = max(1, config.up.rollouts)
    # Without LoRA a version includes the frozen tensors; with LoRA it is the adapters alone.
    whole = wide * (trained if setup.adapters else shape.parameters)
    copies = config.weights.channel != "file"
    sets, received = config.weights.keep + 1, 0
    if copies:
        # Between two whole sets there are only manifests. Each worker has its own copy.
        sets = min(sets, 2 + (config.weights.keep - 1) // WHOLE_EVERY)
        received = rollouts * whole
    elsewhere = config.weights.directory is not None
    checkpoint = (MASTER + MOMENTS) * trained
    picture = SCREEN_BYTES * screen[0] * screen[1]
    parts = [
        *_trainer_parts(config, shape, setup, form, picture),
        *_engine_parts(config),
        *_environment_parts(config),
        HostPart("data", PROCESSES, PROCESS),
    ]
    return HostPlan(
        parts=tuple(part for part in parts if part.size),
        workers=rollouts,
        set_bytes=whole,
        shared=received + (0 if elsewhere else sets * whole),
        checkpoints=(KEEP_CHECKPOINTS + 1) * checkpoint,
        sets=0 if elsewhere else config.weights.keep * whole,
        screen_bytes=picture,
    )


def _trainer_parts(
    config: Config,
    shape: Shape,
    setup: TrainerSetup,
    form: EpisodeForm,
    picture: float,
) -> list[HostPart]:
    """Return the parts of the trainer and its ranks; `picture` is the bytes of a screenshot."""
    if config.train.learner != "torch":
        return [HostPart("train", PROCESSES, PROCESS)]
    wide, trained = WIDTH[config.model.dtype], trained_parameters(shape, setup)
    published = wide * (trained if setup.adapters else shape.parameters)
    episodes = config.data.group_size * config.data.groups_per_batch
    copies = config.weights.channel != "file"
    on_cpu = config.train.device == "cpu"
    publication = (1 + copies) * (published if on_cpu else pinned(published))
    features = 0
    if setup.freeze_vision or config.model.lora is not None:
        features = episodes * form.steps * form.screen * shape.width * wide * (1 + shape.deepstack)
    sizes = {
        "offloaded masters, gradients, moments": (MASTER + GRADIENT + MOMENTS) * trained
        if setup.offload
        else 0,
        "staged checkpoint": (MASTER + MOMENTS) * trained,
        "parity's copy": MASTER * trained if config.train.parity_every else 0,
        "publication": publication,
        "screens' features": features,
        "screens of a batch": 2 * int(episodes * form.steps * picture),
        PROCESSES: setup.ranks * PROCESS,
    }
    return [HostPart("train", name, size) for name, size in sizes.items()]


def pinned(size: int) -> int:
    """Return the bytes that torch allocates for `size` bytes of pinned memory: the next power of two."""
    return 1 << (size - 1).bit_length()


def _engine_parts(config: Config) -> list[HostPart]:
    """Return the parts of the rollout workers."""
    rollouts, processes, cache = max(1, config.up.rollouts), 1, screen_caches(config)
    if config.rollout.engine == "vllm":
        # vLLM's core is another process, and so is each part of a model that several GPUs share.
        shared = config.vllm.tensor_parallel
        processes = 2 + (shared if shared > 1 else 0)
    return [
        HostPart("rollout", "screens' caches", rollouts * cache),
        HostPart("rollout", PROCESSES, rollouts * processes * PROCESS),
    ]


def screen_caches(config: Config) -> int:
    """Return the bytes of the screens that one engine caches: in the worker, and in vLLM."""
    cache = image_cache_bytes(config)
    if config.rollout.engine == "vllm":
        cache += int(vllm_image_cache_gb(config) * GIB)
    return cache


def _environment_parts(config: Config) -> list[HostPart]:
    """Return the parts of the environment processes and their virtual machines."""
    guests = 0
    if config.env.suite == "osworld" and "url" not in config.env.options:
        guests = config.up.envs * config.env.slots * GUEST
    return [
        HostPart("env", "virtual machines", guests),
        HostPart("env", PROCESSES, config.up.envs * PROCESS),
    ]
