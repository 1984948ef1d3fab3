"""Held-out evaluation: section [eval]."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dart_cli.config.schema.base import Count, Section

MOST_ATTEMPTS = 1024

Protocol = Literal["none", "osworld-verified", "miniwob", "webarena", "androidworld"]
"""Published protocols of benchmarks. Their values are in dart_cli/evaluation/protocols.toml."""


class EvalConfig(Section):
    """Held-out evaluation, by `dart eval` and before and after `dart up`."""

    episodes: Count = 400
    """Number of instances (task and seed) in each mode of an evaluation, spread over the trained tasks, and as
    many over tasks never trained on. Random clicks play at most 100. 0 plays none."""

    attempts: int = Field(default=1, ge=1, le=MOST_ATTEMPTS)
    """Episodes of each instance in the modes `sampled` and `random`, for pass@k. The mode `greedy` plays
    one."""

    tasks: list[str] = []
    """Tasks to evaluate, written as in env.tasks. If empty, the training tasks, on held-out seeds, and all
    held-out tasks. Tasks that are never trained on are reported apart."""

    protocol: Protocol = "none"
    """A benchmark's published protocol. Its step limit and its number of instances apply, and the result
    lists where the evaluation deviates from it."""

    around: bool = False
    """Whether `dart up` evaluates before and after the run and writes a report."""
