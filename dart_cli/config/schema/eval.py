"""Held-out evaluation: section [eval]."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dart_cli.config.schema.base import (
    Count,
    Section,
)

MOST_ATTEMPTS = 1024

Protocol = Literal["none", "osworld-verified", "miniwob", "webarena", "androidworld"]
"""Published protocols of benchmarks; their values: dart_cli/evaluation/protocols.toml."""


class EvalConfig(Section):
    """Held-out evaluation, by `dart eval` and around `dart up`."""

    episodes: Count = 400
    """Instances (task and seed) per evaluation and mode, spread over the tasks; of random clicks 100 at most; 0 for
    none."""

    attempts: int = Field(default=1, ge=1, le=MOST_ATTEMPTS)
    """Episodes of each instance in the modes `sampled` and `random`, for pass@k; greedy plays one."""

    tasks: list[str] = []
    """Tasks to evaluate, as in env.tasks; empty for the training tasks (on held-out seeds)."""

    compositions: list[str] = []
    """Tasks never trained on, as in env.tasks, reported separately; empty for all that are held out."""

    protocol: Protocol = "none"
    """A benchmark's published protocol: its step limit and instances of each task hold, and the result tells where
    the evaluation deviates from it."""

    around: bool = False
    """`dart up` evaluates before and after the run and writes a report."""
