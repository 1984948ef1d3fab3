"""How large a run's screens are, and how many of them its engines see again.

screen_of             the pixels of a screen, where the configuration names them
screen_of_suite       those of the suite's own default
run_screen            either, or an assumption
screens_in_play       screens that the prompts of one engine's episodes show
image_cache_bytes     room for them as decoded bytes
vllm_image_cache_gb   the same in vLLM's own process: its `mm_processor_cache_gb`
"""

from __future__ import annotations

import inspect
import math
import re

from bus.errors import ConfigError, DartError
from dart_cli.config.schema import Config
from envs.contract.registry import load_suite

SCREEN = (1920, 1080)
"""Pixels, where neither the options nor the suite name a size."""
MOST_SIDE = 16_384
"""Pixels of a screen's side; more is a typing mistake."""

LEAST_CACHE = 256 << 20
"""Bytes of a cache of screens at least: held-out episodes and those of another suite have some, too."""
UNEVEN = 2
"""How many times its even share of the episodes an engine may serve: they go to the least loaded one, and
stay with it while it is not much busier than another."""
CHANNELS = 3
"""Bytes of a pixel."""


def screen_of(config: Config) -> tuple[int, int] | None:
    """Width and height of the suite's screens, where its options name them in numbers.

    Raises ConfigError for numbers that no screen has.
    """
    size = config.env.options.get("size")
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(-?\d+)\s*[xX]\s*(-?\d+)\s*", size)
        size = [int(match[1]), int(match[2])] if match else None
    if not isinstance(size, list | tuple) or [type(each) for each in size] != [int, int]:
        return None  # a word of the suite's own, or none
    if not all(1 <= each <= MOST_SIDE for each in size):
        raise ConfigError(
            f"env.options.size must be WIDTHxHEIGHT of 1 to {MOST_SIDE} pixels, got "
            f"{size[0]}x{size[1]}; name the size of the suite's screens"
        )
    return size[0], size[1]


def screen_of_suite(config: Config) -> tuple[int, int] | None:
    """Return the pixels of the suite's screens where its options name none."""
    try:
        suite = load_suite(config.env.suite)
        given = inspect.signature(suite.make_env).parameters.get("size")
    except (DartError, ValueError):
        return None
    size = getattr(suite, "size", None) if given is None else given.default
    options = {"size": list(size) if isinstance(size, tuple) else size}
    env = config.env.model_copy(update={"options": options})
    try:
        return screen_of(config.model_copy(update={"env": env}))
    except ConfigError:
        return None


def run_screen(config: Config) -> tuple[int, int]:
    """Return the pixels of a run's screens; SCREEN where neither its options nor its suite name them."""
    return screen_of(config) or screen_of_suite(config) or SCREEN


def screens_in_play(config: Config) -> int:
    """Screens that the next prompts of one engine's episodes show: slots x history, and each one's newest."""
    slots, engines = max(1, config.up.envs) * config.env.slots, max(1, config.up.rollouts)
    served = min(slots, UNEVEN * math.ceil(slots / engines))
    shown = max(config.policy.history_images, config.policy.history_images_most)
    return served * (shown + 1)


def image_cache_bytes(config: Config) -> int:
    """Bytes of decoded screens that a rollout worker keeps: those in play."""
    width, height = run_screen(config)
    return max(LEAST_CACHE, screens_in_play(config) * width * height * CHANNELS)


def vllm_image_cache_gb(config: Config) -> float:
    """GiB of screens that vLLM's process keeps; as `vllm.options` say, or for those in play.

    A value that is no number is vLLM's to refuse; it counts as none.
    """
    given = config.vllm.options.get("mm_processor_cache_gb")
    if isinstance(given, int | float):
        return float(given)
    return math.ceil(100 * image_cache_bytes(config) / 2**30) / 100
