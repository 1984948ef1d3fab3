"""Whether a plan fits: each need against what there is, with a hint of what would make it fit.

Room        what there is: GPUs, main memory, shared memory, disk; unknown parts are None
problems    needs above it, for one role or for all of a run: refused, or warned of where the run works all the same
lies_on     which GPUs the trainer and each engine take
gb          bytes as text

Memory and disks of this host are known only where its GPUs are: a plan on a laptop is of another machine.
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
from dart_cli.doctor.findings import error, warning
from dart_cli.doctor.host_room import PROCESSES
from dart_cli.doctor.plan import MIB, PAST_TURN, GpuKind, Plan
from dart_cli.doctor.trainer_memory import TrainerSetup, trainer_memory

if TYPE_CHECKING:
    from bus.messages import Role

LEAST_PROMPTS = 1.0

MOST_GPUS = 8
"""GPUs that a hint reckons with where the host's are not known."""


@dataclass(frozen=True)
class Room:
    """Bytes of this host; `gpus` are how many a run can be given, 0 for none that is known."""

    gpu: GpuKind
    gpus: int = 0
    found: bool = False  # whether `gpu` is here, or assumed
    on_cpu: bool = False  # all processes share main memory
    memory: int | None = None  # main memory that is free, shared memory included
    shared: int | None = None  # free in /dev/shm
    shared_taken: int = 0  # of /dev/shm, by others
    disk: int | None = None  # for run.dir: free, and what its checkpoints and sets take already


def gpu_name(room: Room) -> str:
    """Return the kind of GPU."""
    return room.gpu.name if room.found else f"{room.gpu.name} (assumed, no GPU is here)"


def gb(count: float) -> str:
    """Bytes as GB."""
    return f"{count / 1e9:.1f} GB" if count < 1e12 else f"{count / 1e12:.1f} TB"


def problems(plan: Plan, config: Config, room: Room, role: Role | None = None) -> Iterator[Finding]:
    """Yield what there is no room for, of one role's processes or (None) of all; then what the run should not do without.

    A finding's subject is a line of the plan, or `gpus`, which several lines share.
    """
    if role in (None, "rollout") and plan.engine is not None:
        yield from _sequence(plan, config)
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
    """Whether requests wait for one another."""
    together = together_at_most(config)
    if LEAST_PROMPTS <= prompts < together:
        yield warning(
            "engine",
            f"{together} requests of {plan.longest} tokens do not fit together, {int(prompts)} do: the "
            "others wait",
            f"set rollout.max_batch = {int(prompts)}, or show fewer screens",
        )


def _shared_memory(plan: Plan, room: Room, role: Role | None) -> Iterator[Finding]:
    # Storage.make wants room for two sets before it writes one (dart_cli/weights/storage.py).
    wanted = plan.host.shared + plan.host.set_bytes
    fits = room.memory is None or plan.host.memory_of(role) + plan.host.shared <= room.memory
    if room.shared is not None and plan.host.shared and fits and wanted > room.shared:
        size = -(-(wanted + room.shared_taken) // 10**9)  # its whole size, not what is free
        yield warning(
            "host",
            f"weight sets stay in /dev/shm where {gb(wanted)} are free, {gb(room.shared)} are: they are "
            "written to run.dir, and read from there",
            f"mount -o remount,size={size}G /dev/shm; for a container: --shm-size={size}g",
        )


def together_at_most(config: Config) -> int:
    """Return how many requests of all environments one engine may have; at most rollout.max_batch."""
    slots = max(1, config.up.envs) * config.env.slots
    return min(config.rollout.max_batch, -(-slots // max(1, config.up.rollouts)))


def _sequence(plan: Plan, config: Config) -> Iterator[Finding]:
    """Whether the engine takes the longest sequence."""
    if not 0 < plan.positions < plan.longest:
        return
    asked = config.vllm.max_model_len if config.rollout.engine == "vllm" else 0
    lower = "set policy.history_images or history_turns lower"
    yield error(
        "engine",
        f"the longest prompt and its completion have {plan.longest} tokens (turns of {PAST_TURN}), "
        + (
            f"vllm.max_model_len = {asked}"
            if asked == plan.positions
            else f"the model has {plan.positions} positions"
        ),
        f"set vllm.max_model_len = {plan.longest}, or {lower.removeprefix('set ')}"
        if asked == plan.positions
        else lower,
    )


def _trainer(plan: Plan, config: Config, room: Room) -> Iterator[Finding]:
    if plan.trainer is not None and plan.trainer.total > room.gpu.memory:
        each = "a trainer rank" if plan.setup.ranks > 1 else "the trainer"
        yield error(
            "trainer",
            f"{each} needs {gb(plan.trainer.total)}, {gpu_name(room)} has {gb(room.gpu.memory)}",
            _trainer_hint(plan, config, room),
        )


def _trainer_hint(plan: Plan, config: Config, room: Room) -> str:
    """Return the first of the usual changes that is enough by itself; else all of them."""
    setup, train = plan.setup, config.train
    most = room.gpus if room.found else max(room.gpus, MOST_GPUS)
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


def _engine(plan: Plan, config: Config, room: Room) -> Iterator[Finding]:
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


def _prompts(plan: Plan, config: Config, room: Room) -> Iterator[Finding]:
    """Yield an error if an engine has no room for the keys and values of the longest prompt."""
    engine = plan.engine
    if engine is None or engine.prompts >= LEAST_PROMPTS:
        return
    if config.rollout.engine != "vllm":  # its cache is of one size on every GPU
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


def _apart_hint(plan: Plan, config: Config, room: Room) -> str:
    """Return the settings that give each process GPUs of its own, where there are enough."""
    ranks = config.train.ranks if plan.trainer is not None else 0
    engines = config.up.rollouts * gpus_per_worker(config)
    if ranks + engines <= room.gpus:
        train, rollout = list(range(ranks)), list(range(ranks, ranks + engines))
        devices = {"train": config.train.device, "rollout": config.rollout.device}
        numbered = [f'{name}.device = "cuda", ' for name, each in devices.items() if ":" in each]
        return f"set {''.join(numbered)}up.train_gpus = {train}, up.rollout_gpus = {rollout}"
    return (
        f"{ranks + engines} GPUs ({ranks} for the trainer, {engines} for engines), or lower train.ranks, "
        "up.rollouts or vllm.gpu_memory_utilization"
    )


def lies_on(plan: Plan, config: Config, gpus: int) -> list[tuple[str, list[int], int]]:
    """Return (process, its GPUs by the numbers of [up], bytes of each) of a whole run on a host with `gpus`."""
    found: list[tuple[str, list[int], int]] = []
    train, listed = divide_gpus(config, gpus)
    if plan.trainer is not None and config.train.device != "cpu":
        numbered = int(config.train.device.partition(":")[2] or 0)
        own = train or list(range(numbered, numbered + config.train.ranks))
        found.append(("the trainer", own, plan.trainer.total))
    if plan.engine is not None and config.rollout.device != "cpu":
        each = gpus_per_worker(config)
        numbered = int(config.rollout.device.partition(":")[2] or 0)
        for index in range(config.up.rollouts):
            own = listed[index * each : (index + 1) * each] or list(
                range(numbered, numbered + each)
            )
            found.append((f"rollout-{index}", own, plan.engine.total))
    return found


def _shared_gpus(plan: Plan, config: Config, room: Room) -> Iterator[Finding]:
    """Whether several processes, each of which fits, take one GPU that has no room for all of them."""
    placed = lies_on(plan, config, room.gpus)
    if not room.found or any(size > room.gpu.memory for _, _, size in placed):
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
            f"{listed} take {which} and need {gb(need)} of it, it has {gb(room.gpu.memory)}",
            _apart_hint(plan, config, room),
        )
        return


def _host(plan: Plan, room: Room, role: Role | None) -> Iterator[Finding]:
    need = plan.host.memory_of(role) + (plan.host.shared if role != "rollout" else 0)
    if room.memory is not None and need > room.memory:
        held = " with /dev/shm" if role != "rollout" and plan.host.shared else ""
        yield error(
            "host",
            f"the host needs {gb(need)} of main memory{held}, {gb(room.memory)} are there",
            "more main memory, weights.directory on a disk, model.lora, or fewer of env.slots, up.envs "
            "and up.rollouts",
        )


def _disk(plan: Plan, config: Config, room: Room) -> Iterator[Finding]:
    if room.disk is None:
        return
    if plan.host.disk > room.disk:
        sets = f" and {gb(plan.host.sets)} of weight sets" if plan.host.sets else ""
        yield error(
            "disk",
            f"run.dir takes {gb(plan.host.checkpoints)} of checkpoints{sets}, {gb(room.disk)} are free",
            f"free {gb(plan.host.disk - room.disk)}, or choose another run.dir",
        )
    elif room.disk < plan.host.disk + config.data.max_gb * 1e9:
        left = int((room.disk - plan.host.disk) / 1e9)
        yield warning(
            "disk",
            f"beside {gb(plan.host.disk)} of checkpoints and weight sets {left} GB are left for the "
            f"database, data.max_gb = {config.data.max_gb:g}",
            f"set data.max_gb = {left}, or free some" if left else "free some",
        )


def _on_cpu(plan: Plan, config: Config, room: Room, role: Role | None) -> Iterator[Finding]:
    """Trainer and engines share main memory."""
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
            f"{gb(room.memory)} are there",
            "a GPU, a smaller model, or train.pack_tokens and policy.history_images lower",
        )
