"""The time of a rehearsal, and how much of a run is played in it.

    Budget    its minutes, and what is left of them
    Level     what is played less of, so that it fits
    levels    from nothing to all that can be left out: each level leaves out what the one before does, and more
    Costs     what a level takes here, reckoned from what was measured
    choose    the level that leaves out least, of those that fit

Measured are the time until this process had made its plan and loaded the model, for the start of a process; a forward and a backward pass
over a prompt as long as the history makes it, on the miniature (passes.py); and an episode of the suite without a model. All are
seconds of the clock, beside whatever else this machine does.
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
"""Minutes of a rehearsal where none are asked for."""
PLANNED = 0.75
"""Share of the time left that a level may take: what was measured is rough, and other work may begin."""
SMALLER = (2 / 3, 1 / 2, 1 / 3, 1 / 4)
"""Sides of a smaller screen, of those as written."""
FEWEST_IMAGES = 2
"""Screens of a prompt that still has a history."""
PASSES = 9
"""Passes over a longest prompt that one group takes, in two updates, the evaluation and the export's comparison: what
the rehearsals of benchmarks/results/smoke_test.json spent."""
EPISODES = 8
"""Episodes that one group takes in two updates, those among them that teach nothing, and the evaluation."""
VLLM_STARTS = 4
"""Starts of another process that one of vLLM takes as long as."""


class Budget:
    """The time of one rehearsal, of which `spent_s` seconds are over already."""

    def __init__(
        self, seconds: float, spent_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.seconds = seconds
        self._clock = clock
        self._began = clock() - spent_s

    @property
    def spent_s(self) -> float:
        """Return the seconds since it began."""
        return self._clock() - self._began

    @property
    def left_s(self) -> float:
        """Return the seconds until it is over; 0 afterwards."""
        return max(0.0, self.seconds - self.spent_s)

    def __str__(self) -> str:
        """Return the time left, as a person reads it."""
        return f"{minutes(self.left_s)} left"


@dataclass(frozen=True)
class Level:
    """What is played less of."""

    screen: tuple[int, int]  # width and height, pixels
    images: int  # screens of the longest prompt
    values: Mapping[str, Any] = field(default_factory=dict)  # by key of the configuration


def levels(config: Config, screen: tuple[int, int]) -> list[Level]:
    """Return what may be left out of a rehearsal's configuration, whose screens have this size."""
    policy = config.policy
    steps = [Level(screen, max(policy.history_images, policy.history_images_most))]

    def leave_out(
        values: Mapping[str, Any],
        screen: tuple[int, int] | None = None,
        images: int | None = None,
    ) -> None:
        last = steps[-1]
        steps.append(Level(screen or last.screen, images or last.images, {**last.values, **values}))

    for size in _smaller(config, screen):
        options = {**config.env.options, "size": _as_written(config, size)}
        leave_out({"env.options": options}, screen=size)
    if FEWEST_IMAGES < policy.history_images <= policy.history_turns:
        most = FEWEST_IMAGES + 1 if policy.history_images_most else 0
        fewer = {"policy.history_images": FEWEST_IMAGES}
        fewer |= {"policy.history_images_most": most} if most else {}
        leave_out(fewer, images=most or FEWEST_IMAGES)
    if config.rollout.engine == "vllm":
        leave_out({"rollout.engine": "transformers"})
    if config.data.groups_per_batch > 1:
        leave_out({"data.groups_per_batch": 1})
    if max(config.up.envs, config.up.rollouts, config.train.ranks) > 1:
        leave_out({"up.envs": min(1, config.up.envs), "up.rollouts": 1, "train.ranks": 1})
    return steps


def _smaller(config: Config, screen: tuple[int, int]) -> list[tuple[int, int]]:
    """Return smaller sizes of a screen, which the miniature's clicks stay within; none where the suite takes no size."""
    from dart_cli.smoke_test.miniature_model import CLICKED  # late: it loads torch

    if not screen_of(config) and "size" not in _options(config):
        return []
    sizes = [(round(screen[0] * share), round(screen[1] * share)) for share in SMALLER]
    return [each for each in sizes if each[0] >= CLICKED[0] and each[1] >= CLICKED[1]]


def _options(config: Config) -> Mapping[str, inspect.Parameter]:
    """Return the options of the suite."""
    return inspect.signature(load_suite(config.env.suite).make_env).parameters


def _as_written(config: Config, size: tuple[int, int]) -> str | list[int]:
    """Return a size in the form that the suite's option has."""
    return [*size] if isinstance(config.env.options.get("size"), list) else f"{size[0]}x{size[1]}"


@dataclass(frozen=True)
class Costs:
    """What was measured, seconds of the clock; 0 where a rehearsal has no such part."""

    start_s: float  # of a process with torch
    episode_s: float  # of an episode without a model
    pass_s: Callable[[Level], float]  # of a pass over a level's longest prompt
    cores: int

    def of(self, config: Config, level: Level) -> float:
        """Return the seconds that a rehearsal of `config` takes with what `level` leaves out."""

        def value(key: str) -> Any:
            section, name = key.split(".")
            return level.values.get(key, getattr(getattr(config, section), name))

        rollouts, ranks = int(value("up.rollouts")), int(value("train.ranks"))
        extra = VLLM_STARTS - 1 if value("rollout.engine") == "vllm" else 0
        first, resumed = rollouts * (1 + extra) + ranks, ranks
        starts = math.ceil(first / self.cores) + math.ceil(resumed / self.cores) + 2 + extra
        groups = int(value("data.groups_per_batch"))
        slots = max(1, int(value("up.envs"))) * config.env.slots
        return (
            starts * self.start_s
            + groups * EPISODES * self.episode_s / slots
            + groups * PASSES * self.pass_s(level)
        )


def choose(steps: Sequence[Level], seconds_of: Callable[[Level], float], most_s: float) -> Level:
    """Return the first level that takes at most `most_s` seconds; the last where none does.

    The last is reckoned first, and none before one that does not fit: each reckoning may measure a pass.
    """
    chosen = steps[-1]
    for level in reversed(steps):
        if seconds_of(level) > most_s:
            break
        chosen = level
    return chosen
