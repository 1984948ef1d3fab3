"""What a run takes of its host beside GPUs: main memory, shared memory, disk. Pure; bytes.

EpisodeForm sizes of an episode in tokens
HostPart    one part of main memory, and the role whose processes hold it
HostPlan    all of it
host_plan   from the configuration, the model's sizes and its trainer

One truth for `dart doctor`, `--dry-run` and docs/hardware.md. What each part is in the code:

    offload      float32 masters, gradients, AdamW's moments (train.offload;
                 dart_cli/train/sharded.py)
    checkpoint   masters and moments, staged; the buffers stay (dart_cli/train/checkpoints/shards.py: Staging)
    parity       float32 weights of one version (dart_cli/train/parity.py: ParityGate.keep)
    publication  the copy of what is trained, in model.dtype, on rank 0; with deltas or a broadcast the
                 newest version and the next one, whole (dart_cli/weights/file.py). Beside a GPU they are
                 pinned, which torch takes in powers of two
    features     of a frozen tower, from the first pack of a rank that shows a screen to the last
                 (dart_cli/train/packs/pack.py): counted as each screen of an update once, of which
                 the packs of 48 episodes hold less than a third at a time, on all ranks together
    screens      of a batch, as PNG: on rank 0, and dealt to the ranks
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
"""Bytes of main memory of a process with torch: an assumption."""
GUEST = 6_000_000_000
"""Bytes of main memory of one of OSWorld's machines: 4 GB, and 2 beside."""
SCREEN_BYTES = 0.39
"""Bytes of a pixel of a desktop's PNG: 0.8 MB for 1920x1080."""

PROCESSES = "processes"
"""Name of the parts that do not depend on the model."""

Holder = Literal["train", "rollout", "env", "data"]


@dataclass(frozen=True)
class EpisodeForm:
    """Sizes in tokens; `most` 0 is `slide`."""

    steps: int
    screen: int
    completion: int  # of a typical step, and as its text in later prompts
    header: int  # system prompt, template, instruction
    images: int  # policy.history_images
    most: int  # policy.history_images_most with `evict`
    turns: int  # policy.history_turns

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that can be, without its last completion."""
        shown = max(self.images, self.most)
        return (
            self.header
            + min(shown, self.steps) * self.screen
            + self.longest_turns * self.completion
        )

    @property
    def longest_turns(self) -> int:
        """Past turns in it."""
        turns = self.turns + (self.most - self.images if self.most else 0)
        return min(turns, self.steps - 1)


@dataclass(frozen=True)
class HostPart:
    """Of main memory."""

    holder: Holder
    name: str
    size: int


@dataclass(frozen=True)
class HostPlan:
    """Bytes of the host."""

    parts: tuple[HostPart, ...]  # of main memory, without shared memory
    workers: int  # rollout workers
    set_bytes: int  # of the part of a weight set that each version writes
    shared: int  # of /dev/shm, for weight sets; 0 with weights.directory
    checkpoints: int
    sets: int  # of weight sets in run.dir, when the run ends; 0 with weights.directory
    screen_bytes: float  # of one screenshot

    @property
    def memory(self) -> int:
        """Main memory of all processes."""
        return self.memory_of(None)

    @property
    def disk(self) -> int:
        """Of run.dir, without the database."""
        return self.checkpoints + self.sets

    def memory_of(self, role: str | None) -> int:
        """Return the main memory of one role's processes, which are those of `parts_of`."""
        return sum(part.size for part in self.parts_of(role))

    def parts_of(self, role: str | None) -> tuple[HostPart, ...]:
        """Of the trainer, of one rollout worker, or (None) of all processes."""
        if role is None:
            return self.parts
        share = self.workers if role == "rollout" else 1
        mine = [part for part in self.parts if part.holder == role]
        return tuple(replace(part, size=part.size // share) for part in mine)


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
    # A version of whole weights has the frozen tensors too, one of adapters is adapters alone.
    whole = wide * (trained if setup.adapters else shape.parameters)
    copies = config.weights.channel != "file"
    sets, received = config.weights.keep + 1, 0
    if copies:  # between two whole sets there are manifests; each worker has a copy of its own
        sets = min(sets, 2 + (config.weights.keep - 1) // WHOLE_EVERY)
        received = rollouts * whole
    elsewhere = config.weights.directory is not None
    checkpoint = (MASTER + MOMENTS) * trained
    picture = SCREEN_BYTES * screen[0] * screen[1]
    parts = [
        *_of_trainer(config, shape, setup, form, picture),
        *_of_engines(config),
        *_of_environments(config),
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


def _of_trainer(
    config: Config,
    shape: Shape,
    setup: TrainerSetup,
    form: EpisodeForm,
    picture: float,
) -> list[HostPart]:
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
    """Bytes that torch takes for `size` bytes of pinned memory: the next power of two."""
    return 1 << (size - 1).bit_length()


def _of_engines(config: Config) -> list[HostPart]:
    rollouts, each, cache = max(1, config.up.rollouts), 1, screen_caches(config)
    if config.rollout.engine == "vllm":
        # Its core is a process of its own, and so is each part of a shared model.
        shared = config.vllm.tensor_parallel
        each = 2 + (shared if shared > 1 else 0)
    return [
        HostPart("rollout", "screens' caches", rollouts * cache),
        HostPart("rollout", PROCESSES, rollouts * each * PROCESS),
    ]


def screen_caches(config: Config) -> int:
    """Bytes of screens that one engine keeps: the worker's, and vLLM's."""
    cache = image_cache_bytes(config)
    if config.rollout.engine == "vllm":
        cache += int(vllm_image_cache_gb(config) * GIB)
    return cache


def _of_environments(config: Config) -> list[HostPart]:
    guests = 0
    if config.env.suite == "osworld" and "url" not in config.env.options:
        guests = config.up.envs * config.env.slots * GUEST
    return [
        HostPart("env", "virtual machines", guests),
        HostPart("env", PROCESSES, config.up.envs * PROCESS),
    ]
