"""Whether a plan fits, the smallest change that makes it fit, and its lines for a person.

Room          what there is: GPUs, main memory, shared memory; unknown parts are None
plan_lines    (subject, text) lines of a plan
misfits       what cannot fit, each with its cure
smallest_cure the fewest changes with which a trainer rank fits its GPU
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from dart_cli.config.schema import Config
from dart_cli.doctor.plan import HEADER, PAST_TURN, Plan
from dart_cli.doctor.speeds import ASSUMED, GpuKind
from dart_cli.doctor.trainer_memory import TrainerSetup, adapters_of, trainer_memory

MOST_RANKS = 8
"""Ranks that a cure names where the host's GPUs are not known."""
LORA_RANK = 32
LEAST_PROMPTS = 1.0


@dataclass(frozen=True)
class Room:
    """Bytes of this host; `gpus` are how many there are, 0 for none that is known."""

    gpu: GpuKind
    gpus: int = 0
    found: bool = False  # whether `gpu` is here, or assumed
    on_cpu: bool = False  # all processes share main memory
    memory: int | None = None
    shared: int | None = None


@dataclass(frozen=True)
class Misfit:
    """What cannot fit, and what makes it fit."""

    text: str
    cure: str


def plan_lines(plan: Plan, config: Config, room: Room) -> Iterator[tuple[str, str]]:
    """What a run will take, a line for each subject."""
    where = "" if room.on_cpu else f" of {gb(room.gpu.memory)}, {_gpu(room)}"
    if plan.trainer is not None:
        ranks = plan.setup.ranks
        each = "trainer" if ranks == 1 else f"each of {ranks} trainer ranks"
        need = plan.trainer.peak if room.on_cpu else plan.trainer.total
        yield "trainer", f"{each}: {gb(need)}{where}: {_parts(plan, on_cpu=room.on_cpu)}"
        yield "pack", _pack(plan, config)
    if plan.engine is not None:
        engine = plan.engine
        share = config.vllm.tensor_parallel if config.rollout.engine == "vllm" else 1
        each = "each engine" if share == 1 else f"each of {share} GPUs of an engine"
        text = (
            f"{each}: {gb(engine.total)}{where}: weights {gb(engine.weights)}, keys and values "
            f"{gb(engine.cache)}, room for {engine.prompts:.1f} prompts of {plan.longest} tokens"
        )
        yield "engine", text
    host = plan.host
    kept = ""
    if host.screens_a_day:
        days = config.data.max_gb * 1e9 / host.screens_a_day
        kept = f", of which data.max_gb = {config.data.max_gb:g} keeps {days:.1f} days"
    text = (
        f"main memory {gb(host.memory)}, and {gb(host.shared)} of /dev/shm for weight sets; disk "
        f"{gb(host.checkpoints)} of checkpoints, {gb(host.screens_a_day)} of screens a day{kept}"
    )
    yield "host", text
    if plan.seconds is not None and not room.on_cpu:
        seconds = plan.seconds
        text = (
            f"an update {seconds.update:.0f} s, its rollouts {seconds.rollouts:.0f} s (engines "
            f"{seconds.engines:.0f}, environments {seconds.environments:.0f}): {seconds.waits}; "
            f"assumed: {room.gpu.name}, {ASSUMED}, {plan.form.steps} steps an episode, "
            f"{PAST_TURN} tokens a completion"
        )
        yield "seconds", text


def misfits(plan: Plan, config: Config, room: Room) -> Iterator[Misfit]:
    """Everything that there is no room for."""
    if room.on_cpu:
        yield from _on_cpu(plan, config, room)
        return
    if plan.trainer is not None and plan.trainer.total > room.gpu.memory:
        each = "a trainer rank" if plan.setup.ranks > 1 else "the trainer"
        yield Misfit(
            f"{each} needs {gb(plan.trainer.total)}, {_gpu(room)} has {gb(room.gpu.memory)}",
            smallest_cure(plan, room),
        )
    if plan.engine is not None and plan.engine.prompts < LEAST_PROMPTS:
        yield Misfit(
            f"an engine has room for {plan.engine.prompts:.1f} prompts of {plan.longest} tokens",
            "raise vllm.tensor_parallel, or lower policy.history_images"
            if config.rollout.engine == "vllm"
            else "raise rollout.kv_cache_mb, or lower policy.history_images",
        )
    elif plan.engine is not None and plan.engine.total > room.gpu.memory:
        yield Misfit(
            f"an engine needs {gb(plan.engine.total)}, {_gpu(room)} has {gb(room.gpu.memory)}",
            "raise vllm.tensor_parallel, or lower vllm.kv_cache_mb"
            if config.rollout.engine == "vllm"
            else 'lower rollout.kv_cache_mb, or set rollout.engine = "vllm" with tensor_parallel',
        )
    if room.memory is not None and plan.host.memory + plan.host.shared > room.memory:
        cure = "lower up.envs, up.rollouts or rollout.image_cache_mb"
        if plan.setup.offload:
            cure = 'set train.offload = "none" with more train.ranks'
        yield Misfit(
            f"the host needs {gb(plan.host.memory + plan.host.shared)} of main memory, "
            f"{gb(room.memory)} are there",
            cure,
        )


def _on_cpu(plan: Plan, config: Config, room: Room) -> Iterator[Misfit]:
    """Trainer and engines share main memory."""
    need = plan.trainer.peak * plan.setup.ranks if plan.trainer else 0
    need += plan.engine.total * config.up.rollouts if plan.engine else 0
    if room.memory is not None and need > room.memory:
        yield Misfit(
            f"trainer and engines need {gb(need)} of main memory, {gb(room.memory)} are there",
            "a GPU, a smaller model, or rollout.kv_cache_mb, train.pack_tokens and "
            "policy.history_images lower",
        )


Change = tuple[str, TrainerSetup]


def smallest_cure(plan: Plan, room: Room) -> str:
    """The fewest changes with which a trainer rank fits; of as many, those that cost least first.

    In this order: smaller packs, recompute, more ranks, the optimizer in main memory, LoRA.
    """
    most = max(room.gpus, MOST_RANKS) if not room.found else room.gpus
    for count in range(1, 6):
        for names in combinations(("pack", "recompute", "ranks", "offload", "lora"), count):
            if (found := _cured(plan, room, names, most)) is not None:
                return "set " + ", ".join(found)
    return "a GPU with more memory, a smaller model, or policy.history_images lower"


def _cured(plan: Plan, room: Room, names: tuple[str, ...], most: int) -> list[str] | None:
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
        found.append(f"model.lora = {{ rank = {LORA_RANK} }}")
    choices = range(setup.ranks + 1, most + 1) if "ranks" in names else (setup.ranks,)
    for ranks in choices:
        memory = trainer_memory(plan.shape, replace(setup, ranks=ranks))
        host = ranks * memory.host
        if memory.total <= room.gpu.memory and (room.memory is None or host <= room.memory):
            if ranks != plan.setup.ranks:
                found.insert(0, f"train.ranks = {ranks}")
            return found
    return None


def _parts(plan: Plan, *, on_cpu: bool) -> str:
    memory = plan.trainer
    assert memory is not None
    held, passing = memory.held, memory.passing
    kept = held["masters"] + held["gradients"] + held["moments"]
    listed = {
        "masters, gradients and moments": kept,
        "LoRA's base" if plan.setup.adapters else "frozen vision tower": held["frozen"],
        "reference of the KL": held["reference"],
        "activations with recompute" if plan.setup.recompute else "activations": passing.get(
            "activations", 0
        ),
        "activations of the vision tower": passing.get("tower", 0),
        "features of screens": passing["features"],
        "gathered layers and head": passing.get("gathered", 0),
        "head, and gradients being summed": passing.get("head", 0) + passing.get("reduced", 0),
        "context and fragments": 0 if on_cpu else memory.total - memory.peak,
    }
    text = ", ".join(f"{name} {gb(count)}" for name, count in listed.items() if count)
    return text + (f"; {gb(memory.host)} in main memory" if memory.host else "")


def _pack(plan: Plan, config: Config) -> str:
    form, width = plan.form, plan.screen
    how = f"{form.images} screens" if not form.most else f"{form.images} to {form.most} screens"
    text = (
        f"forward passes of up to {plan.setup.tokens} tokens; the longest sequence has {plan.longest}: "
        f"{how} of {width[0]}x{width[1]} ({form.screen} tokens each), {HEADER} of text, "
        f"{form.turns} turns; {len(plan.episode.chains)} chains an episode"
    )
    if config.train.pack_tokens < plan.longest:
        text += f"; longer than train.pack_tokens = {config.train.pack_tokens}, so it goes alone"
    return text


def _gpu(room: Room) -> str:
    return room.gpu.name if room.found else f"{room.gpu.name} (assumed, no GPU is here)"


def gb(count: float) -> str:
    """Bytes as GB."""
    return f"{count / 1e9:.1f} GB" if count < 1e12 else f"{count / 1e12:.1f} TB"
