"""Compare a plan with the resources of a host, with a hint of what would make it fit.

HostCapacity   GPUs, main memory, shared memory and disk of the host; unknown parts are None
problems       yields what does not fit, for one role or a whole run: errors, or warnings if it can work
gpu_shares     lists which GPUs the trainer and each engine use
gb             formats bytes

Main memory and disk of this host count only if it has GPUs: a plan that is made on a laptop is for another
machine.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dart_cli.config.devices import VISIBLE, divide_gpus, gpus_per_worker
from dart_cli.config.rules import Finding
from dart_cli.config.schema import Config
from dart_cli.doctor.host_memory import PROCESSES
from dart_cli.doctor.plan import MIB, PAST_TURN, GpuKind, Plan
from dart_cli.doctor.trainer_memory import TrainerSetup, trainer_memory
from dart_cli.runtime.findings import error, warning

if TYPE_CHECKING:
    from bus.messages import Role

LEAST_PROMPTS = 1.0
"""How many prompts of the greatest length must fit into the cache of an engine."""

MOST_GPUS = 8
"""Number of GPUs that a hint assumes if the host's GPUs are not known."""


@dataclass(frozen=True)
class HostCapacity:
    """The resources of a host, in bytes.

    `gpus` is the number of GPUs that a run can use; 0 if none is known.
    """

    gpu: GpuKind
    gpus: int = 0
    is_gpu_here: bool = False  # False if `gpu` is only assumed
    on_cpu: bool = False  # no process has a GPU: all share main memory
    memory: int | None = None  # free main memory, including shared memory
    shared: int | None = None  # free in /dev/shm
    shared_taken: int = 0  # used in /dev/shm by other programs
    # For run.dir: free space, plus what its checkpoints and weight sets use already.
    disk: int | None = None


def gpu_name(room: HostCapacity) -> str:
    """Return the name of the GPU, with a note if it is only assumed."""
    return room.gpu.name if room.is_gpu_here else f"{room.gpu.name} (assumed, no GPU is here)"


def gb(count: float) -> str:
    """Return bytes in GB or TB: `1.5 GB`."""
    return f"{count / 1e9:.1f} GB" if count < 1e12 else f"{count / 1e12:.1f} TB"


def problems(
    plan: Plan, config: Config, room: HostCapacity, role: Role | None = None
) -> Iterator[Finding]:
    """Yield errors for what does not fit, then warnings for what the run can do without.

    `role` limits them to one role's processes; None means the whole run. The subject of a finding is a line
    of the plan, or `gpus`, which concerns several lines.
    """
    if role in (None, "rollout") and plan.engine is not None:
        yield from _sequence(plan, config)
    if role in (None, "train") and plan.trainer is not None:
        yield from _teacher(plan)
    if room.on_cpu:
        if role in (None, "rollout"):
            yield from _prompts(plan, config, room)
        yield from _on_cpu(plan, config, room, role)
    else:
        if role in (None, "train"):
            yield from _trainer(plan, config, room)
        if role in (None, "rollout"):
            yield from _engine(plan, config, room)
        if role is None:
            yield from _shared_gpus(plan, config, room)
        yield from _host(plan, room, role)
    if role in (None, "rollout") and plan.engine is not None:
        yield from _waiting(plan, plan.engine.prompts, config)
    if role in (None, "train"):
        yield from _shared_memory(plan, room, role)
        yield from _disk(plan, config, room)


def _waiting(plan: Plan, prompts: float, config: Config) -> Iterator[Finding]:
    """Yield a warning if not all requests fit into the engine at once."""
    together = together_at_most(config)
    if LEAST_PROMPTS <= prompts < together:
        yield warning(
            "engine",
            f"{together} requests of {plan.longest} tokens do not fit at once, only {int(prompts)} do; the "
            "others wait",
            f"set rollout.max_batch = {int(prompts)}, or show fewer screens",
        )


def _shared_memory(plan: Plan, room: HostCapacity, role: Role | None) -> Iterator[Finding]:
    """Yield a warning if /dev/shm is too small for the weight sets."""
    # Storage.make needs room for two sets before it writes one (dart_cli/weights/storage.py).
    need = plan.host.shared + plan.host.set_bytes
    fits = room.memory is None or plan.host.memory_of(role) + plan.host.shared <= room.memory
    if room.shared is not None and plan.host.shared and fits and need > room.shared:
        # The whole size of /dev/shm, not its free space.
        size = -(-(need + room.shared_taken) // 10**9)
        yield warning(
            "host",
            f"weight sets need {gb(need)} of /dev/shm, {gb(room.shared)} are free; they are written to run.dir "
            "and read from there",
            f"mount -o remount,size={size}G /dev/shm; for a container: --shm-size={size}g",
        )


def together_at_most(config: Config) -> int:
    """Return how many requests one engine may have at once: its share of slots, at most max_batch."""
    slots = max(1, config.up.envs) * config.env.slots
    return min(config.rollout.max_batch, -(-slots // max(1, config.up.rollouts)))


def _sequence(plan: Plan, config: Config) -> Iterator[Finding]:
    """Yield an error if the longest sequence exceeds what the engine or the model accepts."""
    if not 0 < plan.positions < plan.longest:
        return
    configured_limit = config.vllm.max_model_len if config.rollout.engine == "vllm" else 0
    lower = "set policy.history_images or history_turns lower"
    yield error(
        "engine",
        f"the longest prompt and its completion have {plan.longest} tokens (turns of {PAST_TURN}), "
        + (
            f"vllm.max_model_len = {configured_limit}"
            if configured_limit == plan.positions
            else f"the model has {plan.positions} positions"
        ),
        f"set vllm.max_model_len = {plan.longest}, or {lower.removeprefix('set ')}"
        if configured_limit == plan.positions
        else lower,
    )


def _teacher(plan: Plan) -> Iterator[Finding]:
    """Yield an error if the longest sequence has more tokens than the teacher that scores has positions."""
    if 0 < plan.teacher_positions < plan.longest:
        yield error(
            "teacher",
            f"the longest prompt and its completion have {plan.longest} tokens (turns of {PAST_TURN}), the teacher "
            f"has {plan.teacher_positions} positions",
            "set policy.history_images or history_turns lower, or choose another teacher.model",
        )


def _trainer(plan: Plan, config: Config, room: HostCapacity) -> Iterator[Finding]:
    """Yield an error if a trainer rank does not fit into a GPU."""
    if plan.trainer is not None and plan.trainer.total > room.gpu.memory:
        subject = "a trainer rank" if plan.setup.ranks > 1 else "the trainer"
        yield error(
            "trainer",
            f"{subject} needs {gb(plan.trainer.total)}, {gpu_name(room)} has {gb(room.gpu.memory)}",
            _trainer_hint(plan, config, room),
        )


def _trainer_hint(plan: Plan, config: Config, room: HostCapacity) -> str:
    """Return the first of the usual changes that is enough by itself, or a list of all if none is."""
    setup, train = plan.setup, config.train
    most = room.gpus if room.is_gpu_here else max(room.gpus, MOST_GPUS)
    predicted = max(1, round(setup.predicted * plan.longest / setup.tokens))
    smaller = replace(setup, tokens=plan.longest, predicted=predicted)
    changes: list[tuple[str, TrainerSetup]] = [
        (f"train.pack_tokens = {plan.longest}", smaller),
        ('train.recompute = "layer"', replace(setup, recompute=True)),
        *(
            (f"train.ranks = {ranks}", replace(setup, ranks=ranks))
            for ranks in range(train.ranks + 1, most + 1)
        ),
        ('train.offload = "optimizer"', replace(setup, offload=True)),
        ("model.lora = { rank = 32 }", replace(setup, adapters=plan.shape.adapters(32))),
    ]
    for key, changed in changes:
        if changed != setup and trainer_memory(plan.shape, changed).total <= room.gpu.memory:
            return f"set {key}"
    return (
        "several of: train.recompute, more train.ranks, train.offload, model.lora, a smaller "
        "train.pack_tokens (docs/hardware.md has tables), or GPUs with more memory"
    )


def _engine(plan: Plan, config: Config, room: HostCapacity) -> Iterator[Finding]:
    """Yield an error if an engine does not fit into its GPUs."""
    if plan.engine is None:
        return
    if plan.engine.prompts < LEAST_PROMPTS:
        yield from _prompts(plan, config, room)
    elif plan.engine.total > room.gpu.memory:
        is_vllm = config.rollout.engine == "vllm"
        yield error(
            "engine",
            f"an engine needs {gb(plan.engine.total)}, {gpu_name(room)} has {gb(room.gpu.memory)}",
            _VLLM_HINT
            if is_vllm
            else 'set rollout.engine = "vllm", or take a GPU with more memory',
        )


_VLLM_HINT = (
    "change vllm.gpu_memory_utilization, or kv_cache_memory_bytes of vllm.options, raise "
    "vllm.tensor_parallel, or set policy.history_images lower"
)


def _prompts(plan: Plan, config: Config, room: HostCapacity) -> Iterator[Finding]:
    """Yield an error if an engine has no room for the keys and values of the longest prompt."""
    engine = plan.engine
    if engine is None or engine.prompts >= LEAST_PROMPTS:
        return
    if config.rollout.engine != "vllm":  # this engine's cache has the same size on every GPU
        hint = 'set policy.history_images lower, or rollout.engine = "vllm"'
    elif room.on_cpu or config.rollout.device == "cpu":
        least = -(-int(engine.cache / engine.prompts) // MIB) * MIB
        hint = f"set vllm.options = {{ kv_cache_memory_bytes = {least} }}, or policy.history_images lower"
    else:
        hint = _VLLM_HINT
    yield error(
        "engine",
        f"an engine has room for {engine.prompts:.1f} prompts of {plan.longest} tokens",
        hint,
    )


def _apart_hint(plan: Plan, config: Config, room: HostCapacity) -> str:
    """Return the settings that give each process its own GPUs, or how many GPUs that would take."""
    ranks = config.train.ranks if plan.trainer is not None else 0
    engines = config.up.rollouts * gpus_per_worker(config)
    if ranks + engines <= room.gpus:
        train, rollout = list(range(ranks)), list(range(ranks, ranks + engines))
        devices = {"train": config.train.device, "rollout": config.rollout.device}
        numbered = [
            f'{name}.device = "cuda", ' for name, device in devices.items() if ":" in device
        ]
        return f"set {''.join(numbered)}up.train_gpus = {train}, up.rollout_gpus = {rollout}"
    return (
        f"{ranks + engines} GPUs ({ranks} for the trainer, {engines} for engines), or lower train.ranks, "
        "up.rollouts or vllm.gpu_memory_utilization"
    )


def gpu_shares(plan: Plan, config: Config, gpus: int) -> list[tuple[str, list[int], int]]:
    """Return (process, its GPUs as [up] numbers them, bytes on each) for a run on a host with `gpus` GPUs."""
    shares: list[tuple[str, list[int], int]] = []
    train, listed = divide_gpus(config, gpus)
    if plan.trainer is not None and config.train.device != "cpu":
        numbered = int(config.train.device.partition(":")[2] or 0)
        own = train or list(range(numbered, numbered + config.train.ranks))
        shares.append(("the trainer", own, plan.trainer.total))
    if plan.engine is not None and config.rollout.device != "cpu":
        count = gpus_per_worker(config)
        numbered = int(config.rollout.device.partition(":")[2] or 0)
        for index in range(config.up.rollouts):
            own = listed[index * count : (index + 1) * count] or list(
                range(numbered, numbered + count)
            )
            shares.append((f"rollout-{index}", own, plan.engine.total))
    return shares


def _shared_gpus(plan: Plan, config: Config, room: HostCapacity) -> Iterator[Finding]:
    """Yield an error if processes that fit one by one share a GPU that has no room for all of them."""
    placed = gpu_shares(plan, config, room.gpus)
    if not room.is_gpu_here or any(size > room.gpu.memory for _, _, size in placed):
        return
    needs: Counter[int] = Counter()
    for _, gpus, size in placed:
        needs.update(dict.fromkeys(gpus, size))
    for gpu, need in sorted(needs.items()):
        names = [name for name, gpus, _ in placed if gpu in gpus]
        if len(names) < 2 or need <= room.gpu.memory:
            continue
        listed = f"{', '.join(names[:-1])} and {names[-1]}"
        which = f"place {gpu} of {VISIBLE}" if VISIBLE in os.environ else f"GPU {gpu}"
        yield error(
            "gpus",
            f"{listed} share {which} and need {gb(need)} of it, it has {gb(room.gpu.memory)}",
            _apart_hint(plan, config, room),
        )
        return


def _host(plan: Plan, room: HostCapacity, role: Role | None) -> Iterator[Finding]:
    """Yield an error if main memory is too small."""
    need = plan.host.memory_of(role) + (plan.host.shared if role != "rollout" else 0)
    if room.memory is not None and need > room.memory:
        shared_note = " with /dev/shm" if role != "rollout" and plan.host.shared else ""
        yield error(
            "host",
            f"the host needs {gb(need)} of main memory{shared_note}, {gb(room.memory)} are free",
            "take a host with more main memory, set weights.directory to a disk, set model.lora, or lower env.slots, up.envs "
            "or up.rollouts",
        )


def _disk(plan: Plan, config: Config, room: HostCapacity) -> Iterator[Finding]:
    """Yield an error or a warning if the disk of run.dir is too small."""
    if room.disk is None:
        return
    if plan.host.disk > room.disk:
        sets = f" and {gb(plan.host.sets)} for weight sets" if plan.host.sets else ""
        yield error(
            "disk",
            f"run.dir needs {gb(plan.host.checkpoints)} for checkpoints{sets}, {gb(room.disk)} are free",
            f"free {gb(plan.host.disk - room.disk)}, or choose another run.dir",
        )
    elif room.disk < plan.host.disk + config.data.max_gb * 1e9:
        left = int((room.disk - plan.host.disk) / 1e9)
        yield warning(
            "disk",
            f"beside {gb(plan.host.disk)} for checkpoints and weight sets, {left} GB are left for the "
            f"database, which may take data.max_gb = {config.data.max_gb:g}",
            f"set data.max_gb = {left}, or free some" if left else "free some",
        )


def _on_cpu(plan: Plan, config: Config, room: HostCapacity, role: Role | None) -> Iterator[Finding]:
    """Yield an error if trainer and engines, which share main memory here, do not fit into it."""
    need = sum(part.size for part in plan.host.parts_of(role) if part.name != PROCESSES)
    if role in (None, "train") and plan.trainer is not None:
        need += plan.trainer.peak * plan.setup.ranks
    if role in (None, "rollout") and plan.engine is not None:
        need += plan.engine.total * (config.up.rollouts if role is None else 1)
    if room.memory is not None and need > room.memory:
        whose = {"train": "the trainer needs", "rollout": "an engine needs"}
        yield error(
            "trainer" if plan.trainer is not None and role != "rollout" else "engine",
            f"{whose.get(role or '', 'trainer and engines need')} {gb(need)} of main memory, "
            f"{gb(room.memory)} are free",
            "take a host with a GPU or a smaller model, or lower train.pack_tokens and policy.history_images",
        )
