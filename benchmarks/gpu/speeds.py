"""What a GPU can do, and the seconds of an update and of its rollouts: stated assumptions, pure formulas.

GpuSpeed, gpu_speed  memory, arithmetic and bandwidth of a kind of GPU, by its name
Seconds, seconds_of  of a plan of the doctor's: an update, its rollouts, and which side waits
screens_a_day        bytes of the screenshots that are stored then
Work                 the floating-point operations and tokens of one update
work_of              of a model's shape and an episode's tokens
update_seconds, rollout_seconds   each with the assumptions below

Of these, MFU alone was measured on a GPU: 0.43 of an H100 in the layers of a 7B (docs/hardware.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from dart_cli.config.architecture import Shape
from dart_cli.config.schema import Config
from dart_cli.config.screens import UNEVEN, screens_in_play
from dart_cli.doctor.plan import EpisodeTokens, Plan, passes
from dart_cli.doctor.trainer_memory import trained_parameters
from envs.suites.osworld.container import Machine
from envs.suites.osworld.provider import boots_at_once

STEP_S = 1.0
"""Seconds of an action and its screenshot, beside `env.options.pause_s`: an assumption."""
DAY_S, HOUR_S = 86_400, 3600
BOOT_S = 60.0
"""Seconds until a virtual machine of OSWorld shows its screen: an assumption, not measured."""
CORES = 100
"""Of a box with eight GPUs, at least: half of them boot machines where `env.options.boots` is unset."""
BALANCED = 0.05
"""Share of the time that a side may be idle before it is said."""
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
class GpuSpeed:
    """One GPU: its name, bytes, dense bfloat16 operations a second, bytes a second of its memory."""

    name: str
    memory: int
    flops: float
    bandwidth: float


H100 = GpuSpeed("H100 80 GB", 85_520_000_000, 989e12, 3.35e12)
H200 = GpuSpeed("H200 141 GB", 150_750_000_000, 989e12, 4.8e12)
_BY_NAME = {
    "B200": GpuSpeed("B200", 192_000_000_000, 2250e12, 8.0e12),
    "H200": H200,
    "GH200": H200,
    "H100": H100,
    "A100": GpuSpeed("A100", 85_900_000_000, 312e12, 2.0e12),
    "L40S": GpuSpeed("L40S", 48_300_000_000, 362e12, 0.864e12),
    "4090": GpuSpeed("RTX 4090", 25_700_000_000, 165e12, 1.008e12),
}
"""From the makers' data sheets; without sparsity."""


def gpu_speed(name: str, memory: int) -> GpuSpeed | None:
    """Return the kind of a GPU that nvidia-smi calls `name`, with its own bytes; None for an unknown one."""
    for part, kind in _BY_NAME.items():
        if part in name:
            return GpuSpeed(name, memory, kind.flops, kind.bandwidth)
    return None


@dataclass(frozen=True)
class Work:
    """The work of one update, over all GPUs."""

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
    keeps: bool = False,
) -> Work:
    """Return the work of `episodes` of `steps` steps, of which `share` is trained on.

    `passes` are forward passes that an update costs: 3 for forward and backward, and one each for
    recompute and for the reference. A chain is computed whole where one of its steps is trained on.
    Screens of a frozen tower are encoded once an update. An engine encodes each screen that it reads, or each one
    once where it `keeps` the features of the screens in play.
    """
    per_token, per_pair = shape.token_operations, shape.pair_operations
    vision = vision_flops(shape, screen)
    chained = sum(
        (per_token * tokens + per_pair * tokens**2 / 2) * (1 if count > 1 else share)
        for tokens, count in episode.chains
    )
    head = 2.0 * shape.embedding * completion * steps * share
    trained = passes * (chained + head) + steps * vision
    read, pairs, screens = episode.read, episode.pairs, episode.screens_read
    if not caches:
        read = episode.alone - steps * completion
        pairs = read**2 / steps / 2
        screens = read // max(1, screen)
    prefilled = per_token * read + per_pair * pairs + (steps if keeps else screens) * vision
    return Work(
        trained=episodes * trained,
        prefilled=episodes * prefilled,
        decoded=episodes * steps * completion,
        context=episode.alone // steps,
    )


def vision_flops(shape: Shape, screen: int) -> float:
    """Return the operations of the tower's forward pass over one screen of `screen` tokens.

    A matrix of the merger meets a token, those before it each patch; windows hold 8 x 8 patches.
    """
    patches = screen * shape.merge
    embed = shape.patch_values * shape.vision_width
    blocks = shape.vision_blocks * shape.vision_block
    merger = shape.vision - embed - blocks
    windowed = shape.vision_blocks - shape.vision_whole
    pairs = shape.vision_whole * patches**2 + windowed * patches * min(64, patches)
    return 2.0 * ((embed + blocks) * patches + merger * screen) + 4.0 * shape.vision_width * pairs


def update_seconds(work: Work, gpu: GpuSpeed, ranks: int, *, offloaded: int = 0) -> float:
    """Return the seconds of one update on `ranks` GPUs; main memory holds `offloaded` trained parameters."""
    # Weights go to the GPU and gradients come back, in float32.
    moved = 8 * offloaded / ranks / HOST_BYTES_S
    return work.trained / (ranks * gpu.flops * MFU) + moved


def iteration_seconds(
    shape: Shape, gpu: GpuSpeed, *, together: int, context: int, share: int, wide: int = 2
) -> float:
    """Return a decode iteration of `together` requests on `share` GPUs that hold one model."""
    read = wide * (shape.text + together * context * shape.cached)
    read += 2 * together * shape.state_bytes(wide)  # states are written, too
    return read / share / (gpu.bandwidth * BANDWIDTH) + ITERATION_S


def rollout_seconds(
    work: Work, shape: Shape, gpu: GpuSpeed, *, engines: int, share: int, together: int
) -> float:
    """Return the seconds that `engines`, of `share` GPUs each, compute for one update's episodes."""
    prefill = work.prefilled / (engines * share * gpu.flops * MFU)
    each = iteration_seconds(shape, gpu, together=together, context=work.context, share=share)
    return prefill + work.decoded / together * each / engines


@dataclass(frozen=True)
class Seconds:
    """The seconds of one update and of the rollouts that a batch needs."""

    update: float
    engines: float  # that the engines compute
    environments: float  # that the environments take, their answers and boots included
    boots: float = 0.0  # until as many machines have booted; 0 without machines
    boots_at_once: int = 0
    uses: int = 1  # updates on each batch, those on which it is trained again included

    @property
    def training(self) -> float:
        """The seconds of all updates on a batch."""
        return self.update * self.uses

    @property
    def rollouts(self) -> float:
        """The seconds until the slowest of the rollouts is done."""
        return max(self.engines, self.environments, self.boots)

    @property
    def waits(self) -> str:
        """The side that is idle, and for which share of the time."""
        longer, shorter = max(self.training, self.rollouts), min(self.training, self.rollouts)
        idle = 1 - shorter / longer
        if idle < BALANCED:
            return "both sides are busy"
        if self.training > self.rollouts:
            return f"the rollout GPUs will wait {idle:.0%} of the time"
        sides = {
            "": self.engines,
            " for the environments": self.environments,
            " for boots": self.boots,
        }
        for_what = max(sides, key=lambda side: sides[side])
        return f"the trainer will wait {idle:.0%} of the time{for_what}"


def seconds_of(config: Config, plan: Plan, gpu: GpuSpeed) -> Seconds:
    """Return the seconds of a plan that trains and samples a model."""
    shape, setup, form = plan.shape, plan.setup, plan.form
    assert plan.engine is not None
    episodes = config.data.group_size * config.data.groups_per_batch
    work = work_of(
        shape,
        plan.episode,
        episodes=episodes,
        steps=form.steps,
        completion=form.completion,
        screen=form.screen,
        share=config.data.high_entropy,
        passes=passes(shape, setup),
        caches=config.rollout.engine != "vllm"
        or bool(config.vllm.options.get("enable_prefix_caching", True)),
        keeps=plan.engine.screens * UNEVEN >= screens_in_play(config),
    )
    share = config.vllm.tensor_parallel if config.rollout.engine == "vllm" else 1
    engines, slots = max(1, config.up.rollouts), max(1, config.up.envs) * config.env.slots
    together = max(1, min(config.rollout.max_batch, slots // engines, int(plan.engine.prompts)))
    moved = trained_parameters(shape, setup) if setup.offload else 0
    each = iteration_seconds(shape, gpu, together=together, context=work.context, share=share)
    pause = config.env.options.get("pause_s", 0.0)
    waited = (float(pause) if isinstance(pause, int | float) else 0.0) + STEP_S
    boots = _boots_at_once(config)
    boot = BOOT_S if boots else 0.0
    return Seconds(
        update=update_seconds(work, gpu, setup.ranks, offloaded=moved),
        engines=rollout_seconds(work, shape, gpu, engines=engines, share=share, together=together),
        environments=episodes * (boot + form.steps * (waited + form.completion * each)) / slots,
        boots=episodes * boot / max(1, boots),
        boots_at_once=boots,
        uses=1 + config.train.reuse,
    )


def _boots_at_once(config: Config) -> int:
    """Return how many machines boot at once where each episode boots one; 0 for other configurations."""
    options = config.env.options
    if "vm" not in options:
        return 0
    return int(options.get("boots") or boots_at_once(CORES, options.get("cpus", Machine.cpus)))


def screens_a_day(config: Config, plan: Plan, seconds: Seconds) -> int:
    """Return the bytes of the screenshots of a day."""
    episodes = config.data.group_size * config.data.groups_per_batch
    batches = DAY_S / max(seconds.training, seconds.rollouts)
    return int(batches * episodes * plan.form.steps * plan.host.screen_bytes)
