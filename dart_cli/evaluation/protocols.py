"""Published protocols of benchmarks, and how an evaluation deviates from one.

protocols    the table of protocols, protocols.toml
protocol_of  the protocol of a configuration
overrides    the settings of a protocol, as `--set` options of a configuration
check        a protocol compared with the episodes that were played
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import resources
from typing import Any, Literal

from dart_cli.config.schema import Config
from dart_cli.config.values import to_toml
from dart_cli.evaluation.results import EpisodeRow, ProtocolCheck
from dart_cli.runtime.work_folder import StoredModel


class Protocol(StoredModel):
    """The published protocol of one benchmark. The head of protocols.toml explains the fields."""

    title: str
    suites: list[str]
    max_steps: list[int] | Literal["task"]
    screen: list[tuple[int, int]]
    temperature: float | Literal["model"]
    attempts: int
    per_task: int
    tasks: list[int]
    options: dict[str, dict[str, Any]] = {}  # noqa: RUF012 - pydantic copies it
    sources: list[str]
    uncertain: list[str]


@cache
def protocols() -> dict[str, Protocol]:
    """Return name -> protocol."""
    text = (resources.files("dart_cli.evaluation") / "protocols.toml").read_text(encoding="utf-8")
    return {name: Protocol.model_validate(value) for name, value in tomllib.loads(text).items()}


def protocol_of(config: Config) -> Protocol | None:
    """Return the protocol that `eval.protocol` names; None for "none"."""
    return protocols().get(config.eval.protocol)


def overrides(name: str, suite: str) -> list[str]:
    """Return the settings of `--protocol NAME`. The plan itself applies its step limit and instances."""
    protocol = protocols()[name]
    settings = [f"eval.protocol={name}", f"eval.attempts={protocol.attempts}"]
    if protocol.temperature != "model":
        settings.append(f"rollout.temperature={protocol.temperature}")
    settings += [
        f"env.options.{key}={to_toml(value)}"
        for key, value in protocol.options.get(suite, {}).items()
    ]
    return settings


def check(
    config: Config, rows: Sequence[EpisodeRow], limits: Sequence[int]
) -> ProtocolCheck | None:
    """Return the protocol, and how the episodes deviate from it. `limits` are the step limits of the tasks.

    Returns None if no protocol is set.
    """
    protocol = protocol_of(config)
    if protocol is None:
        return None
    left_to_model = []
    if protocol.temperature == "model" and any(row.mode == "sampled" for row in rows):
        left_to_model.append(f"temperature {config.rollout.temperature:g} of mode sampled")
    if protocol.max_steps == "task":
        left_to_model.append(f"max_steps {_some(sorted(set(limits)))}, each task's own")
    return ProtocolCheck(
        name=config.eval.protocol,
        title=protocol.title,
        sources=protocol.sources,
        deviations=list(_deviations(protocol, config, rows, limits)),
        left_to_model=left_to_model,
        uncertain=protocol.uncertain,
    )


def _deviations(
    protocol: Protocol, config: Config, rows: Sequence[EpisodeRow], limits: Sequence[int]
) -> Iterator[str]:
    """Yield a line for each way in which the episodes deviate from the protocol."""
    suite = config.env.suite
    if not any(suite == name or suite.startswith(f"{name}:") for name in protocol.suites):
        yield f"suite {suite}, published {' or '.join(protocol.suites)}"
    used = sorted(set(limits))
    if protocol.max_steps != "task" and (len(used) != 1 or used[0] not in protocol.max_steps):
        yield f"max_steps {_some(used)}, published {_some(protocol.max_steps)}"
    screens = sorted({row.screen for row in rows if row.screen is not None})
    if other := [size for size in screens if size not in protocol.screen]:
        yield f"screen {_sizes(other)}, published {_sizes(protocol.screen)}"
    temperatures = {"sampled": config.rollout.temperature, "greedy": 0.0}
    for mode, temperature in temperatures.items():
        is_other = protocol.temperature not in ("model", temperature)
        if is_other and any(row.mode == mode for row in rows):
            yield f"temperature {temperature:g} in mode {mode}, published {protocol.temperature:g}"
    if config.eval.attempts != protocol.attempts:
        yield f"attempts {config.eval.attempts}, published {protocol.attempts}"
    tasks = {row.task_id for row in rows}
    if len(tasks) not in protocol.tasks:
        yield f"tasks {len(tasks)}, published {_some(protocol.tasks)}"
    instances = {(row.task_id, row.seed) for row in rows}
    per_task = sorted({sum(task == name for task, _ in instances) for name in tasks})
    if per_task != [protocol.per_task]:
        yield f"instances of a task {_some(per_task)}, published {protocol.per_task}"
    for key, value in protocol.options.get(suite, {}).items():
        if (option := config.env.options.get(key)) != value:
            yield f"env.options.{key} {'not set' if option is None else option}, published {value}"
    if invalid := sum(row.outcome == "invalid" for row in rows):
        yield f"{invalid} episodes are invalid and not in the rates; the benchmark has a result for each"


def _some(values: Sequence[int], most: int = 6) -> str:
    """Return at most `most` values as text, and how many others there are."""
    more = f" and {len(values) - most} others" if len(values) > most else ""
    return ", ".join(map(str, values[:most])) + more


def _sizes(sizes: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"{width}x{height}" for width, height in sizes)
