"""The plan of one configuration against this host, for the doctor and for `--dry-run`.

plan            its findings
absent_gpus     GPUs that [gpus] names and this host has not
refuse_misfit   its lines; raises what cannot fit
planned         the plan and the room for it
"""

from __future__ import annotations

from collections.abc import Iterator

from bus.errors import ConfigError, DartError, ModelError
from dart_cli.config.model_files import read_json, screens
from dart_cli.config.models import BUILTIN, MODEL_TYPES, model_folder
from dart_cli.config.schema import MODEL_ENGINES, Config, GpusConfig
from dart_cli.config.task_split import training_tasks
from dart_cli.doctor.findings import Finding, error, ok
from dart_cli.doctor.fit import Room, misfits, plan_lines
from dart_cli.doctor.machine import gpu_kinds, main_memory
from dart_cli.doctor.plan import STEPS, Plan, make_plan
from dart_cli.doctor.speeds import H100


def plan(config: Config) -> Iterator[Finding]:
    """What the run will take, against what is here; nothing for a shipped model, or none.

    config.json and the preprocessor are enough: weights may come later.
    """
    yield from absent_gpus(config.gpus, len(gpu_kinds()))
    if (made := planned(config)) is None:
        return
    found, room = made
    for subject, text in plan_lines(found, config, room):
        yield ok("plan", f"{subject}: {text}")
    for each in misfits(found, config, room):
        yield error("plan", f"does not fit: {each.text}", each.cure)


def absent_gpus(gpus: GpusConfig, there: int) -> Iterator[Finding]:
    """An error for each list of [gpus] that names more than the `there` GPUs of this host."""
    for key, listed in (("gpus.train", gpus.train), ("gpus.rollout", gpus.rollout)):
        if beyond := [each for each in listed if each >= there]:
            known = f"nvidia-smi lists 0 to {there - 1}" if there else "nvidia-smi lists none"
            yield error(
                "gpus",
                f"{key} names GPU {', '.join(map(str, beyond))}, {known}",
                f"name those that there are, or leave {key} empty",
            )


def refuse_misfit(config: Config) -> Iterator[tuple[str, str]]:
    """The plan's lines for `--dry-run`. Raises ConfigError for what cannot fit, with the cure."""
    if (made := planned(config)) is None:
        return
    found, room = made
    yield from plan_lines(found, config, room)
    for each in misfits(found, config, room):
        raise ConfigError(f"the run does not fit: {each.text}; {each.cure}")


def planned(config: Config) -> tuple[Plan, Room] | None:
    """The plan and this host's room; None where the run loads no model, or it cannot be read."""
    loaded = config.rollout.engine in MODEL_ENGINES or config.train.learner == "torch"
    if not loaded or config.model.path in BUILTIN:
        return None
    folder = model_folder(config.model.path)
    try:
        tree = read_json(folder, "config.json")
        if tree.get("model_type") not in MODEL_TYPES:
            return None
        room = _room(config)
        steps, most = _steps(config)
        found = make_plan(config, tree, screens(folder), room.gpu, steps=steps, most_steps=most)
    except ModelError:  # `configuration` reports it
        return None
    return found, room


def _steps(config: Config) -> tuple[float, int]:
    """Steps of an average episode and of the longest, if each takes all that its task allows."""
    try:
        limits = [task.max_steps for task in training_tasks(config)]
    except DartError:
        limits = []
    limits = limits or [STEPS]
    return sum(limits) / len(limits), max(limits)


def _room(config: Config) -> Room:
    listed, host = gpu_kinds(), main_memory()
    devices = {config.rollout.device, config.train.device}
    asked = bool(config.gpus.train or config.gpus.rollout)
    on_cpu = devices == {"cpu"} or (not listed and devices <= {"cpu", "auto"} and not asked)
    return Room(
        gpu=min(listed, key=lambda each: each.memory) if listed else H100,
        gpus=len(listed),
        found=bool(listed),
        on_cpu=on_cpu,
        memory=host[0] if host and (listed or on_cpu) else None,
    )
