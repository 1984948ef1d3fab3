"""The size of a run's screens, and the sizes of the caches in which engines keep them.

screen_of             the size of a screen, where the configuration names it
screen_of_suite       the size that the suite has by default
run_screen            the first of both that is known, or an assumption
screens_in_play       how many screens the prompts of one engine's episodes show
image_cache_bytes     the size of a cache for them, decoded
vllm_image_cache_gb   the size of the cache in vLLM's process: its `mm_processor_cache_gb`
"""

from __future__ import annotations

import inspect
import math
import re

from bus.errors import ConfigError, DartError
from dart_cli.config.schema import Config
from envs.contract.registry import load_suite

SCREEN = (1920, 1080)
"""Width and height in pixels, assumed where neither the options nor the suite name a size."""
MOST_SIDE = 16_384
"""Largest side of a screen, pixels. More is a typing mistake."""

LEAST_CACHE = 256 << 20
"""Least size of a cache of screens, bytes, since evaluations and other suites may show other screens."""
UNEVEN = 2
"""How many times its even share of the episodes one engine may have to serve. An episode goes to the least
loaded engine, and stays there while that engine is not much busier than another."""
CHANNELS = 3
"""Bytes of a decoded pixel."""


def screen_of(config: Config) -> tuple[int, int] | None:
    """Return the width and height of a screen that [env.options] names in numbers; None without them.

    Raises ConfigError for numbers that no screen has.
    """
    size = config.env.options.get("size")
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(-?\d+)\s*[xX]\s*(-?\d+)\s*", size)
        size = [int(match[1]), int(match[2])] if match else None
    if not isinstance(size, list | tuple) or [type(side) for side in size] != [int, int]:
        return None  # unset, or a word of the suite
    if not all(1 <= side <= MOST_SIDE for side in size):
        raise ConfigError(
            f"env.options.size must be WIDTHxHEIGHT of 1 to {MOST_SIDE} pixels, got "
            f"{size[0]}x{size[1]}; name the size of the suite's screens"
        )
    return size[0], size[1]


def screen_of_suite(config: Config) -> tuple[int, int] | None:
    """Return the width and height of the suite's screens by default; None if the suite does not tell."""
    try:
        suite = load_suite(config.env.suite)
        parameter = inspect.signature(suite.make_env).parameters.get("size")
    except (DartError, ValueError):
        return None
    size = parameter.default if parameter is not None else None
    if size is None:  # the suite's own
        size = getattr(suite, "size", None)
    options = {"size": list(size) if isinstance(size, tuple) else size}
    env = config.env.model_copy(update={"options": options})
    try:
        return screen_of(config.model_copy(update={"env": env}))
    except ConfigError:
        return None


def run_screen(config: Config) -> tuple[int, int]:
    """Return the width and height of a run's screens; SCREEN if neither options nor suite name them."""
    return screen_of(config) or screen_of_suite(config) or SCREEN


def screens_in_play(config: Config) -> int:
    """Return how many screens the next prompts of one engine show: each slot's history, and one more."""
    slots, engines = max(1, config.up.envs) * config.env.slots, max(1, config.up.rollouts)
    served = min(slots, UNEVEN * math.ceil(slots / engines))
    history = max(config.policy.history_images, config.policy.history_images_most)
    return served * (history + 1)


def image_cache_bytes(config: Config) -> int:
    """Return the size of a rollout worker's cache of decoded screens, bytes: it holds the screens in play."""
    width, height = run_screen(config)
    return max(LEAST_CACHE, screens_in_play(config) * width * height * CHANNELS)


def vllm_image_cache_gb(config: Config) -> float:
    """Return the size of vLLM's cache of screens, GiB: from `vllm.options`, or as the screens in play need.

    A value that is no number counts as unset here; vLLM refuses it.
    """
    size_gb = config.vllm.options.get("mm_processor_cache_gb")
    if isinstance(size_gb, int | float):
        return float(size_gb)
    return math.ceil(100 * image_cache_bytes(config) / 2**30) / 100
