"""Published protocols of benchmarks, and how an evaluation deviates from one.

protocol_of  the table's entry of a name (protocols.toml)
overrides    what a protocol asks for, as `--set` of a configuration
check        the entry beside what was played
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
    """One benchmark's; None where it publishes nothing."""

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
    """Return the table, by name."""
    text = (resources.files("dart_cli.evaluation") / "protocols.toml").read_text(encoding="utf-8")
    return {name: Protocol.model_validate(value) for name, value in tomllib.loads(text).items()}


def protocol_of(config: Config) -> Protocol | None:
    """Return the one that `eval.protocol` names; None for "none"."""
    return protocols().get(config.eval.protocol)


def overrides(name: str, suite: str) -> list[str]:
    """Return what `--protocol NAME` sets, beside the step limit and instances that the plan has by it."""
    protocol = protocols()[name]
    found = [f"eval.protocol={name}", f"eval.attempts={protocol.attempts}"]
    if protocol.temperature != "model":
        found.append(f"rollout.temperature={protocol.temperature}")
    found += [
        f"env.options.{key}={to_toml(value)}"
        for key, value in protocol.options.get(suite, {}).items()
    ]
    return found


def check(
    config: Config, rows: Sequence[EpisodeRow], limits: Sequence[int]
) -> ProtocolCheck | None:
    """Return the protocol beside the episodes; `limits` are the steps that the tasks were given."""
    protocol = protocol_of(config)
    if protocol is None:
        return None
    left = []
    if protocol.temperature == "model" and any(row.mode == "sampled" for row in rows):
        left.append(f"temperature {config.rollout.temperature:g} of mode sampled")
    if protocol.max_steps == "task":
        left.append(f"max_steps {_some(sorted(set(limits)))}, each task's own")
    return ProtocolCheck(
        name=config.eval.protocol,
        title=protocol.title,
        sources=protocol.sources,
        deviations=list(_deviations(protocol, config, rows, limits)),
        left_to_model=left,
        uncertain=protocol.uncertain,
    )


def _deviations(
    protocol: Protocol, config: Config, rows: Sequence[EpisodeRow], limits: Sequence[int]
) -> Iterator[str]:
    suite = config.env.suite
    if not any(suite == each or suite.startswith(f"{each}:") for each in protocol.suites):
        yield f"suite {suite}, published {' or '.join(protocol.suites)}"
    used = sorted(set(limits))
    if protocol.max_steps != "task" and (len(used) != 1 or used[0] not in protocol.max_steps):
        yield f"max_steps {_some(used)}, published {_some(protocol.max_steps)}"
    screens = sorted({row.screen for row in rows if row.screen is not None})
    if other := [size for size in screens if size not in protocol.screen]:
        yield f"screen {_sizes(other)}, published {_sizes(protocol.screen)}"
    played = {"sampled": config.rollout.temperature, "greedy": 0.0}
    for mode, temperature in played.items():
        is_other = protocol.temperature not in ("model", temperature)
        if is_other and any(row.mode == mode for row in rows):
            yield f"temperature {temperature:g} in mode {mode}, published {protocol.temperature:g}"
    if config.eval.attempts != protocol.attempts:
        yield f"attempts {config.eval.attempts}, published {protocol.attempts}"
    tasks = {row.task_id for row in rows}
    if len(tasks) not in protocol.tasks:
        yield f"tasks {len(tasks)}, published {_some(protocol.tasks)}"
    instances = {(row.task_id, row.seed) for row in rows}
    each = sorted({sum(task == name for task, _ in instances) for name in tasks})
    if each != [protocol.per_task]:
        yield f"instances of a task {_some(each)}, published {protocol.per_task}"
    for key, value in protocol.options.get(suite, {}).items():
        if (given := config.env.options.get(key)) != value:
            yield f"env.options.{key} {'not set' if given is None else given}, published {value}"
    if invalid := sum(row.outcome == "invalid" for row in rows):
        yield f"{invalid} episodes are invalid and in no rate; the benchmark has a result for each"


def _some(values: Sequence[int], most: int = 6) -> str:
    more = f" and {len(values) - most} others" if len(values) > most else ""
    return ", ".join(map(str, values[:most])) + more


def _sizes(sizes: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"{width}x{height}" for width, height in sizes)
