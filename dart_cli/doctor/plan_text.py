"""The lines of a plan for a person.

plan_lines   (subject, text) lines, for one role or for all of a run
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dart_cli.config.schema import Config
from dart_cli.config.screens import screens_in_play
from dart_cli.doctor.fit import together_at_most
from dart_cli.doctor.host_room import HostPart, screen_caches
from dart_cli.doctor.plan import HEADER, Plan, Seconds
from dart_cli.doctor.room import Room, gb
from dart_cli.doctor.speeds import ASSUMED

if TYPE_CHECKING:
    from bus.messages import Role

LEAST_SHOWN = 50_000_000
"""Bytes of a part that is named; smaller ones are in the sum alone."""


def plan_lines(
    plan: Plan, config: Config, room: Room, role: Role | None = None, steps_from: str = ""
) -> Iterator[tuple[str, str]]:
    """What a run will take, a line for each subject; `steps_from` says where its steps come from."""
    yield "plan for", _assumed(plan, room, steps_from)
    if plan.trainer is not None and role in (None, "train"):
        yield "trainer", _trainer(plan, room)
        yield "pack", _pack(plan, config)
    if plan.engine is not None and role in (None, "rollout"):
        yield "engine", _engine(plan, config, room, role)
    yield "host", _host(plan, role)
    if role is None or role == "train":
        yield "disk", _disk(plan, config)
    if plan.seconds is not None and not room.on_cpu and role is None:
        seconds = plan.seconds
        text = (
            f"an update {_seconds(seconds.update)}{_uses(seconds)}, its rollouts "
            f"{_seconds(seconds.rollouts)} (engines "
            f"{_seconds(seconds.engines)}, environments {_seconds(seconds.environments)}): "
            f"{seconds.waits}; assumed: {ASSUMED}"
        )
        yield "seconds", text


def _uses(seconds: Seconds) -> str:
    return "" if seconds.uses == 1 else f" ({seconds.uses} of them on each batch)"


def _assumed(plan: Plan, room: Room, steps_from: str) -> str:
    if room.on_cpu:
        where = "the CPU"
    elif room.found:
        where = f"{room.gpus} x {room.gpu.name} of {gb(room.gpu.memory)}"
    else:
        where = (
            f"{room.gpu.name} of {gb(room.gpu.memory)}, assumed, no GPU is here: the plan is of another "
            "machine, whose main memory and disk are not known"
        )
    steps = f"{plan.form.steps} step{'' if plan.form.steps == 1 else 's'}"
    return (
        f"{where}; episodes of {steps}{f' ({steps_from})' if steps_from else ''}, completions of "
        f"{plan.form.completion} tokens"
    )


def _trainer(plan: Plan, room: Room) -> str:
    assert plan.trainer is not None
    ranks = plan.setup.ranks
    each = "" if ranks == 1 else f"{ranks} ranks, each "
    need = plan.trainer.peak if room.on_cpu else plan.trainer.total
    where = "" if room.on_cpu else f" of {gb(room.gpu.memory)}"
    return f"{each}{gb(need)}{where}: {_parts(plan, on_cpu=room.on_cpu)}"


def _parts(plan: Plan, *, on_cpu: bool) -> str:
    memory = plan.trainer
    assert memory is not None
    held, passing = memory.held, memory.passing
    kept = held["masters"] + held["gradients"] + held["moments"]
    listed = {
        "masters, gradients, moments": kept,
        "LoRA's base" if plan.setup.adapters else "frozen vision tower": held["frozen"],
        "the KL's reference": held["reference"],
        "activations with recompute" if plan.setup.recompute else "activations": passing.get(
            "activations", 0
        ),
        "activations of the vision tower": passing.get("tower", 0),
        "features of screens": passing["features"],
        "gathered layers and head": passing.get("gathered", 0),
        "head, and gradients being summed": passing.get("head", 0) + passing.get("reduced", 0),
        "context and fragments": 0 if on_cpu else memory.total - memory.peak,
    }
    return _listed(listed)


def _pack(plan: Plan, config: Config) -> str:
    form, width = plan.form, plan.screen
    how = (
        _count(form.images, "screen") if not form.most else f"{form.images} to {form.most} screens"
    )
    text = (
        f"forward passes of up to {plan.setup.tokens} tokens; the longest sequence has {plan.longest}: "
        f"{how} of {width[0]}x{width[1]} ({form.screen} tokens each), {HEADER} of text, "
        f"{plan.past} turns of {form.completion}, a completion of {config.rollout.max_tokens}; {_count(len(plan.episode.chains), 'chain')} an episode"
    )
    if config.train.pack_tokens < plan.longest:
        text += f"; longer than train.pack_tokens = {config.train.pack_tokens}, so it goes alone"
    return text


def _engine(plan: Plan, config: Config, room: Room, role: Role | None) -> str:
    assert plan.engine is not None
    engine = plan.engine
    share = config.vllm.tensor_parallel if config.rollout.engine == "vllm" else 1
    count = 1 if role == "rollout" else config.up.rollouts
    each = "" if count == 1 else f"{count} engines, each "
    each += "" if share == 1 else f"on {share} GPUs, each of these "
    where = "" if room.on_cpu else f" of {gb(room.gpu.memory)}"
    text = (
        f"{each}{gb(engine.total)}{where}: weights {gb(engine.weights)}, keys and values "
        f"{gb(engine.cache)}, room for {engine.prompts:.1f} prompts of {plan.longest} tokens, "
        f"at most {together_at_most(config)} are there at once"
    )
    text += f"; {gb(screen_caches(config))} of main memory for the {screens_in_play(config)} screens in play"
    if plan.positions >= plan.longest:
        past = plan.past
        left = plan.positions - plan.longest + past * plan.form.completion
        turns = f": {past} past turns of up to {left // past} tokens on average" if past else ""
        text += f"; it takes {plan.positions} tokens{turns}"
    return text


def _host(plan: Plan, role: Role | None) -> str:
    parts = plan.host.parts_of(role)
    is_shared = role != "rollout" and plan.host.shared >= LEAST_SHOWN
    shared = gb(plan.host.shared) if is_shared else ""
    text = f"main memory {gb(plan.host.memory_of(role))}: {_by_holder(parts)}"
    return text + (f"; and {shared} of /dev/shm for weight sets" if shared else "")


def _by_holder(parts: Sequence[HostPart]) -> str:
    names = {"train": "trainer", "rollout": "engines", "env": "environments", "data": "data"}
    told = []
    for holder, name in names.items():
        own = {part.name: part.size for part in parts if part.holder == holder}
        if own:
            listed = _listed(own)
            inner = f" ({listed})" if ", " in listed else ""
            told.append(f"{name} {gb(sum(own.values()))}{inner}")
    return ", ".join(told)


def _disk(plan: Plan, config: Config) -> str:
    text = f"checkpoints {gb(plan.host.checkpoints)}"
    if plan.host.sets:
        text += f", weight sets {gb(plan.host.sets)}"
    if plan.screens_a_day:
        days = config.data.max_gb * 1e9 / plan.screens_a_day
        text += (
            f", screens {gb(plan.screens_a_day)} a day, of which data.max_gb = {config.data.max_gb:g} "
            f"keeps {days:.1f} days"
        )
    return text


def _listed(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} {gb(size)}" for name, size in sizes.items() if size >= LEAST_SHOWN)


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s"
