"""What a run would do, without starting it: `--dry-run`.

describe       returns what follows from a configuration, and the keys that differ from their defaults
teacher_line   returns who the teacher is and how it is asked
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import TYPE_CHECKING

from bus.endpoints import DATA
from bus.errors import ModelError
from dart_cli.config.architecture import shape_of
from dart_cli.config.devices import gpus_of
from dart_cli.config.endpoints import run_endpoints
from dart_cli.config.families import FAMILIES, origin_line, origins
from dart_cli.config.learning_rate import rate_origin
from dart_cli.config.model_folder import BUILTIN, model_folder, read_json
from dart_cli.config.rules import value_of
from dart_cli.config.rules.check import unread
from dart_cli.config.schema import OVER_PROVISION, Config, inner_section, section_types
from dart_cli.config.task_split import training_tasks, untrained_tasks
from dart_cli.config.teacher import teacher_config
from dart_cli.config.values import short_value

if TYPE_CHECKING:
    from bus.messages import Role


def describe(config: Config, role: Role | None = None) -> list[tuple[str, str]]:
    """Return (subject, text) lines for one role, or, for None, for all processes of `dart up`."""
    lines = [*_places(config)]
    if role in (None, "env", "serve", "data", "eval"):
        lines += _tasks(config)
    if role in (None, "rollout", "train", "eval"):
        lines.append(("model", _model(config)))
    if role in (None, "env", "rollout", "train", "eval") and config.policy.family in FAMILIES:
        lines.append(("family", f"{config.policy.family}: {FAMILIES[config.policy.family].title}"))
        lines += [(f"policy.{entry.key}", origin_line(entry)) for entry in origins(config)]
    if role in (None, "eval") and (config.teacher.is_set or config.train.teacher_weight):
        lines.append(("teacher", teacher_line(config)))
    if role in (None, "data"):
        lines.append(("batch", _batch(config)))
    if role in (None, "train"):
        lines.append(("train", _train(config)))
    if role is None and (gpus := _gpus(config)):
        lines.append(("gpus", gpus))
    lines += [(f"[{name}]", text) for name, text in _changed(config)]
    without = ", ".join(f"{key} (only with {reader})" for key, reader in unread(config))
    if without:
        lines.append(("warning", f"no effect: {without}"))
    return lines


def _places(config: Config) -> Iterator[tuple[str, str]]:
    """Yield lines about the run directory and about how the processes reach each other."""
    state = "continues the run in it" if config.run.dir.exists() else "new"
    yield "run", f"{config.run.dir} ({state}), seed {config.run.seed}"
    if config.bus.transport == "tcp":
        endpoints = run_endpoints(config)
        keys = f"keys of {config.bus.keys}" if config.bus.keys else "loopback, no keys"
        third = "" if config.weights.channel == "file" else ", the trainer at the third"
        yield (
            "bus",
            f"data service at {endpoints.address(DATA)} and the two ports above{third} ({keys})",
        )
    else:
        yield "bus", f"ipc sockets in {config.run.dir / 'sock'}"


def _tasks(config: Config) -> Iterator[tuple[str, str]]:
    """Yield lines about the tasks that are trained on and held out."""
    trained = [task.id for task in training_tasks(config)]
    heldout = [task.id for task in untrained_tasks(config)]
    yield "tasks", f"{len(trained)} of {config.env.suite}: {_some(trained)}"
    yield "held out", f"{len(heldout)}, never trained on: {_some(heldout)}"


def _some(names: list[str], limit: int = 6) -> str:
    """Return the first `limit` names, and how many others there are."""
    more = f", and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more if names else "none"


def _model(config: Config) -> str:
    """Return the model's path, its dtype and, if known, its number of parameters."""
    if config.model.path in BUILTIN:
        return f"{config.model.path}, {config.model.dtype}"
    try:
        count = shape_of(read_json(model_folder(config.model.path), "config.json")).parameters
    except (ModelError, KeyError):  # reported by the roles that load the model
        count = 0
    size = f", {count / 1e9:.2f} billion parameters" if count else ""
    return f"{config.model.path}, {config.model.dtype}{size}"


def teacher_line(config: Config) -> str:
    """Return who the teacher is, how it is asked, and its budget; of one that scores, its share.

    Raises ConfigError for an unknown family of a teacher that plays.
    """
    teacher, share = config.teacher, config.train.teacher_weight
    if share:
        name = teacher.model or "the policy"
        hints = ", with hints" if teacher.hints else ""
        return f"{name} scores the policy's tokens{hints}: {share:g} of the objective"
    own = teacher_config(config)
    family = own.policy.family if own.policy.family in FAMILIES else own.policy.action_parser
    if not teacher.url:
        return f"{teacher.model}, {family}, by {teacher.engine}"
    limits = (("budget_requests", "requests"), ("budget_tokens", "tokens"))
    budget = [f"{getattr(teacher, key):,} {unit}" for key, unit in limits if getattr(teacher, key)]
    return (
        f"{teacher.name} at {teacher.url}, {family}, at most {teacher.concurrent} requests at a time, "
        f"{' and '.join(budget) or 'no budget'}"
    )


def _batch(config: Config) -> str:
    """Return the size of a batch, and how much may play at once."""
    data = config.data
    trajectories = data.groups_per_batch * data.group_size
    if data.group_size == 1:
        whole, unit = f"{trajectories} trajectories, no groups", "trajectories"
    else:
        whole = f"{data.groups_per_batch} groups of {data.group_size} ({trajectories} trajectories)"
        unit = "groups"
    return f"{whole}, at most {_groups_in_flight(config)} {unit} in flight"


def _train(config: Config) -> str:
    """Return what ends the run, and the learning rate."""
    train, origin = config.train, rate_origin(config)
    ends = {
        "updates": f"{train.updates}",
        "minutes": f"{train.max_minutes:g}" if train.max_minutes else "",
        "trajectories": f"{train.max_trajectories}" if train.max_trajectories else "",
        "of success": f"{train.stop_at:g}" if train.stop_at else "",
        "minutes of needed attention": f"{train.attention_minutes:g}"
        if train.attention_minutes
        else "",
    }
    text = " or ".join(f"{value} {unit}" for unit, value in ends.items() if value)
    text += f", lr {train.rate:g}" + (f" ({origin})" if origin else "")
    return text if train.lr_end == 1 else f"{text} falling to {train.rate * train.lr_end:g}"


def _gpus(config: Config) -> str:
    """Return the CUDA_VISIBLE_DEVICES of each process; empty where all of them see the same GPUs."""
    names = ["train", *(f"rollout-{index}" for index in range(config.up.rollouts))]
    visible = {name: gpus_of(config, name.partition("-")[0], name) for name in names}
    return "; ".join(f"{name} sees {gpus}" for name, gpus in visible.items() if gpus)


def _groups_in_flight(config: Config) -> int:
    """Return how many groups may play or wait for a batch while all workers serve the newest weights."""
    data = config.data
    updates = (data.max_staleness + 1) * config.weights.publish_every
    in_time = data.groups_per_batch * ceil(updates / (1 + config.train.reuse))
    bounds = [in_time, data.max_open_groups or in_time]
    if data.scheduling == "batch":
        bounds.append(data.groups_per_batch)
    if data.scheduling in ("april", "oversample"):
        bounds.append(OVER_PROVISION * data.groups_per_batch)
    return min(bounds)


def _changed(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each section with the keys that differ from their defaults."""
    for section, kind in section_types().items():
        part, default = value_of(config, section), kind()
        if part is None:
            continue
        changed = [
            f"{key} = {short_value(getattr(part, key))}"
            for key, field in kind.model_fields.items()
            if not inner_section(field.annotation)
            and key in part.model_fields_set
            and getattr(part, key) != getattr(default, key)
        ]
        if changed or "." in section:
            yield section, ", ".join(changed) or "as by default"
