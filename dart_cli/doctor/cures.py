"""What makes a plan fit: the values to set, each tried by the plan's own formulas.

smallest_cure        the fewest changes with which a trainer rank fits its GPU
more_room_cure       for an engine without room for one prompt
smaller_engine_cure  for an engine that is larger than its GPU
apart_cure           for processes that share a GPU
host_cure            for main memory
disk_cure            for run.dir
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING

from dart_cli.config.devices import gpus_per_worker
from dart_cli.config.schema import Config, LoraConfig
from dart_cli.doctor.host_room import GUEST, HostPlan, host_plan
from dart_cli.doctor.plan import ENGINE_PASSING, MIB, Plan
from dart_cli.doctor.room import Room, gb
from dart_cli.doctor.trainer_memory import WIDTH, TrainerSetup, adapters_of, trainer_memory

if TYPE_CHECKING:
    from bus.messages import Role

MOST_GPUS = 8
"""GPUs that a cure reckons with where the host's are not known."""
LORA_RANK = LoraConfig().rank
MOST_UTILIZATION = 0.95
"""vLLM measures its free memory at the start: a driver and other processes take some."""
LORA = f"model.lora = {{ rank = {LORA_RANK} }}"


def smallest_cure(plan: Plan, config: Config, room: Room, role: Role | None = None) -> str:
    """The fewest changes with which a trainer rank fits; of as many, those that cost least first.

    In this order: smaller packs, recompute, more ranks, the optimizer in main memory, LoRA.
    """
    for count in range(1, 6):
        for names in combinations(("pack", "recompute", "ranks", "offload", "lora"), count):
            if (found := _cured(plan, config, room, names, role)) is not None:
                return "set " + ", ".join(found)
    return "a GPU with more memory, a smaller model, or policy.history_images lower"


def _cured(
    plan: Plan, config: Config, room: Room, names: Sequence[str], role: Role | None
) -> list[str] | None:
    """What to set so that it fits with the changes called `names`; None where it does not."""
    setup, found = plan.setup, []
    if "pack" in names:
        if setup.tokens <= plan.longest:
            return None
        predicted = max(1, round(setup.predicted * plan.longest / setup.tokens))
        setup = replace(setup, tokens=plan.longest, predicted=predicted)
        found.append(f"train.pack_tokens = {plan.longest}")
    if "recompute" in names:
        if setup.recompute:
            return None
        setup = replace(setup, recompute=True)
        found.append('train.recompute = "layer"')
    if "offload" in names:
        if setup.offload:
            return None
        setup = replace(setup, offload=True)
        found.append('train.offload = "optimizer"')
    if "lora" in names:
        if setup.adapters:
            return None
        setup = replace(setup, adapters=adapters_of(plan.shape, LORA_RANK))
        found.append(LORA)
    choices: dict[int, str] = {setup.ranks: ""}
    if "ranks" in names:
        choices = dict(_more_ranks(config, room, role))
    for ranks, told in choices.items():
        tried = replace(setup, ranks=ranks)
        if trainer_memory(plan.shape, tried).total > room.gpu.memory:
            continue
        host, now = _host_of(plan, config, tried).memory_of(role), plan.host.memory_of(role)
        if room.memory is None or host <= max(
            room.memory, now
        ):  # what is too much now stays a finding
            return [told, *found] if told else found
    return None


def _more_ranks(config: Config, room: Room, role: Role | None) -> Iterator[tuple[int, str]]:
    """(ranks, what sets them) that the GPUs beside the engines' are enough for, the fewest first."""
    there = room.gpus if room.found else max(room.gpus, MOST_GPUS)
    taken = list(config.up.rollout_gpus)
    if not taken and role is None and config.rollout.device != "cpu":
        taken = list(range(there - config.up.rollouts * gpus_per_worker(config), there))
    free = [each for each in range(there) if each not in taken and each not in config.up.train_gpus]
    own = [*config.up.train_gpus, *free]
    for ranks in range(config.train.ranks + 1, len(own) + 1):
        listed = f", up.train_gpus = {own[:ranks]}" if config.up.train_gpus else ""
        yield ranks, f"train.ranks = {ranks}{listed}"


def _host_of(plan: Plan, config: Config, setup: TrainerSetup) -> HostPlan:
    if setup.adapters and config.model.lora is None:
        lora = LoraConfig(rank=LORA_RANK)
        config = config.model_copy(update={"model": config.model.model_copy(update={"lora": lora})})
    return host_plan(config, plan.shape, setup, plan.form, plan.screen)


# --- engines -------------------------------------------------------------------------------


def more_room_cure(plan: Plan, config: Config, room: Room) -> str:
    """What gives an engine the keys and values of one of the longest prompts."""
    wide = WIDTH[config.model.dtype]
    one = plan.longest * plan.shape.cached * wide
    if config.rollout.engine != "vllm":
        return f"set rollout.kv_cache_mb = {math.ceil(one / MIB)}, or policy.history_images lower"
    memory, share = room.gpu.memory, config.vllm.tensor_parallel
    weights = wide * plan.shape.parameters
    need = weights / share + ENGINE_PASSING + one / share
    if config.vllm.kv_cache_mb:
        if need <= memory:
            return f"set vllm.kv_cache_mb = {math.ceil(one / share / MIB)}"
    elif (enough := math.ceil(100 * need / memory) / 100) <= MOST_UTILIZATION:
        return f"set vllm.gpu_memory_utilization = {enough:g}"
    most = config.vllm.gpu_memory_utilization * memory
    heads = plan.shape.queries // plan.shape.head
    for more in (2, 4, 8, 16):
        if more > share and heads % more == 0 and (weights + one) / more + ENGINE_PASSING <= most:
            gpus = more * config.up.rollouts
            listed = f", and {gpus} GPUs in up.rollout_gpus" if config.up.rollout_gpus else ""
            return f"set vllm.tensor_parallel = {more}{listed}"
    return "GPUs with more memory, a smaller model, or policy.history_images lower"


def smaller_engine_cure(plan: Plan, config: Config, room: Room) -> str:
    """What makes an engine as small as its GPU, with room for a prompt all the same."""
    assert plan.engine is not None
    over = plan.engine.total - room.gpu.memory
    key = "vllm.kv_cache_mb" if config.rollout.engine == "vllm" else "rollout.kv_cache_mb"
    section = config.vllm if config.rollout.engine == "vllm" else config.rollout
    lower = section.kv_cache_mb - math.ceil(over / MIB)
    share = gpus_per_worker(config)
    one = plan.longest * plan.shape.cached * WIDTH[config.model.dtype] / share
    if lower * MIB >= one:
        return f"set {key} = {lower}"
    if config.rollout.engine == "vllm":
        return "raise vllm.tensor_parallel, or policy.history_images lower"
    return 'set rollout.engine = "vllm" with vllm.tensor_parallel, or a GPU with more memory'


def apart_cure(plan: Plan, config: Config, room: Room) -> str:
    """GPUs for each process, or else a smaller share of one."""
    ranks = config.train.ranks if plan.trainer is not None else 0
    engines = config.up.rollouts * gpus_per_worker(config)
    if ranks + engines <= room.gpus:
        train, rollout = list(range(ranks)), list(range(ranks, ranks + engines))
        return f"set up.train_gpus = {train}, up.rollout_gpus = {rollout}"
    if engines == 1 and plan.trainer is not None and config.rollout.engine == "vllm":
        memory, wide = room.gpu.memory, WIDTH[config.model.dtype]
        share = math.floor(100 * (memory - plan.trainer.total) / memory) / 100
        one = plan.longest * plan.shape.cached * wide
        if share * memory >= wide * plan.shape.parameters + ENGINE_PASSING + one:
            return f"set vllm.gpu_memory_utilization = {share:g}"
    fewer = [
        key
        for key, count in (("train.ranks", ranks), ("up.rollouts", config.up.rollouts))
        if count > 1
    ]
    adapters = [] if plan.setup.adapters else [f"set {LORA}"]
    ways = [*([f"lower {' or '.join(fewer)}"] if fewer else []), *adapters]
    wanted = f"{ranks + engines} GPUs ({ranks} for the trainer, {engines} for engines)"
    return ", or ".join([wanted, *ways])


# --- host ----------------------------------------------------------------------------------


def host_cure(plan: Plan, config: Config, room: Room, role: Role | None) -> str:
    """The first change that is enough: sets on disk, fewer machines, no offload, LoRA."""
    assert room.memory is not None
    memory, host = plan.host.memory_of(role), plan.host
    shared = 0 if role == "rollout" else host.shared
    over = memory + shared - room.memory
    if shared and memory <= room.memory:
        return f"set weights.directory = a folder on a local disk with {gb(host.sets)} free"
    guests = sum(part.size for part in host.parts if part.name == "virtual machines")
    if role is None and guests > over and config.up.envs:
        slots = config.env.slots - math.ceil(over / GUEST / config.up.envs)
        if slots > 0:
            return f"set env.slots = {slots}"
    if plan.setup.offload:
        return 'set train.offload = "none" with more train.ranks'
    if role != "rollout" and not plan.setup.adapters and plan.trainer is not None:
        adapters = replace(plan.setup, adapters=adapters_of(plan.shape, LORA_RANK))
        less = _host_of(plan, config, adapters)
        if less.memory_of(role) + less.shared <= room.memory:
            return f"more main memory, or set {LORA}"
    if role is None and host.memory_of("train") + shared > room.memory:
        return "more main memory, or a smaller model"
    return (
        "more main memory, or lower up.envs, up.rollouts, rollout.image_cache_mb or "
        "mm_processor_cache_gb of vllm.options"
    )


def disk_cure(plan: Plan, room: Room) -> str:
    """How much to free."""
    assert room.disk is not None
    return f"free {gb(plan.host.disk - room.disk)}, or choose another run.dir"
