"""The time of a smoke test, and how much of a run fits into it.

    TimeBudget    the minutes of a smoke test, and how many of them are left
    RunSize       sizes of the run that are reduced so that it fits
    run_sizes     the sizes from the largest to the smallest; each reduces what the one before does, and more
    Costs         how many seconds a size takes on this machine, computed from what was measured
    choose_size   returns the largest size that fits

Three times are measured: how long this process took until it had made its plan and loaded the model, which
stands for the start of any process; a forward and a backward pass of the miniature over a prompt as long as
the history makes it (pass_timer.py); and an episode of the suite without a model. All are seconds of the
clock, with whatever else this machine does at the same time.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dart_cli.config.schema import Config
from dart_cli.config.screens import screen_of
from dart_cli.runtime.tables import minutes
from envs.contract.registry import load_suite

MINUTES = 5.0
"""Minutes of a smoke test if the user sets none."""
PLANNED = 0.75
"""Share of the remaining time that a size may take: the measurements are rough, and other work may begin."""
SMALLER = (2 / 3, 1 / 2, 1 / 3, 1 / 4)
"""Sides of the smaller screens, as shares of the configured ones."""
FEWEST_IMAGES = 2
"""Fewest screens of a prompt that still has a history."""
PASSES = 9
"""Passes over the longest prompt for each group of a batch, in two updates, the evaluation and the export's
comparison; measured by the smoke tests of benchmarks/results/smoke_test.json."""
EPISODES = 8
"""Episodes for each group of a batch, in two updates and the evaluation. Groups without a gradient are
included."""
VLLM_STARTS = 4
"""The start of a vLLM process takes as long as this many starts of another process."""


class TimeBudget:
    """The time of one smoke test, of which `spent_s` seconds are over when it is created."""

    def __init__(
        self, seconds: float, spent_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.seconds = seconds
        self._clock = clock
        self._began = clock() - spent_s

    @property
    def spent_s(self) -> float:
        """The seconds since the smoke test began."""
        return self._clock() - self._began

    @property
    def left_s(self) -> float:
        """The seconds until the time is over; 0 afterwards."""
        return max(0.0, self.seconds - self.spent_s)

    def __str__(self) -> str:
        """Return the remaining time in words: `3:05 left`."""
        return f"{minutes(self.left_s)} left"


@dataclass(frozen=True)
class RunSize:
    """Sizes of a run that a smoke test reduces if it must."""

    screen: tuple[int, int]  # width and height, pixels
    images: int  # screens in the longest prompt
    values: Mapping[str, Any] = field(default_factory=dict)  # changed keys


def run_sizes(config: Config, screen: tuple[int, int]) -> list[RunSize]:
    """Return the sizes in which a smoke test can be played, from the largest to the smallest.

    `screen` is the width and height of its screens, in pixels.
    """
    policy = config.policy
    sizes = [RunSize(screen, max(policy.history_images, policy.history_images_most))]

    def reduce(
        values: Mapping[str, Any],
        screen: tuple[int, int] | None = None,
        images: int | None = None,
    ) -> None:
        last = sizes[-1]
        sizes.append(
            RunSize(screen or last.screen, images or last.images, {**last.values, **values})
        )

    for size in _smaller(config, screen):
        options = {**config.env.options, "size": _as_option(config, size)}
        reduce({"env.options": options}, screen=size)
    if FEWEST_IMAGES < policy.history_images <= policy.history_turns:
        most = FEWEST_IMAGES + 1 if policy.history_images_most else 0
        fewer = {"policy.history_images": FEWEST_IMAGES}
        fewer |= {"policy.history_images_most": most} if most else {}
        reduce(fewer, images=most or FEWEST_IMAGES)
    if config.rollout.engine == "vllm":
        reduce({"rollout.engine": "transformers"})
    if config.data.groups_per_batch > 1:
        reduce({"data.groups_per_batch": 1})
    if max(config.up.envs, config.up.rollouts, config.train.ranks) > 1:
        reduce({"up.envs": min(1, config.up.envs), "up.rollouts": 1, "train.ranks": 1})
    return sizes


def _smaller(config: Config, screen: tuple[int, int]) -> list[tuple[int, int]]:
    """Return smaller screen sizes in which the miniature can click; none if the suite has no size option."""
    from dart_cli.smoke_test.miniature_model import CLICK_AREA  # late: it loads torch

    if not screen_of(config) and "size" not in _options(config):
        return []
    sizes = [(round(screen[0] * share), round(screen[1] * share)) for share in SMALLER]
    return [size for size in sizes if size[0] >= CLICK_AREA[0] and size[1] >= CLICK_AREA[1]]


def _options(config: Config) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of the suite's `make_env` by name."""
    return inspect.signature(load_suite(config.env.suite).make_env).parameters


def _as_option(config: Config, size: tuple[int, int]) -> str | list[int]:
    """Return a size in the form in which `env.options.size` is configured: a list, or `800x600`."""
    return [*size] if isinstance(config.env.options.get("size"), list) else f"{size[0]}x{size[1]}"


@dataclass(frozen=True)
class Costs:
    """Measured times in seconds of the clock; 0 where a smoke test has no such part."""

    start_s: float  # start of a process with torch
    episode_s: float  # an episode without a model
    pass_s: Callable[[RunSize], float]  # a pass over the longest prompt of a size
    cores: int

    def seconds_of(self, config: Config, size: RunSize) -> float:
        """Return the seconds that a smoke test of `config` takes in the given size."""

        def value(key: str) -> Any:
            section, name = key.split(".")
            return size.values.get(key, getattr(getattr(config, section), name))

        rollouts, ranks = int(value("up.rollouts")), int(value("train.ranks"))
        extra = VLLM_STARTS - 1 if value("rollout.engine") == "vllm" else 0
        first, resumed = rollouts * (1 + extra) + ranks, ranks
        starts = math.ceil(first / self.cores) + math.ceil(resumed / self.cores) + 2 + extra
        groups = int(value("data.groups_per_batch"))
        slots = max(1, int(value("up.envs"))) * config.env.slots
        return (
            starts * self.start_s
            + groups * EPISODES * self.episode_s / slots
            + groups * PASSES * self.pass_s(size)
        )


def choose_size(
    sizes: Sequence[RunSize], seconds_of: Callable[[RunSize], float], limit_s: float
) -> RunSize:
    """Return the first size that takes at most `limit_s` seconds; the last one if none does.

    The sizes are tried from the last to the first, up to one that does not fit, because each try may measure
    a pass.
    """
    best = sizes[-1]
    for size in reversed(sizes):
        if seconds_of(size) > limit_s:
            break
        best = size
    return best
