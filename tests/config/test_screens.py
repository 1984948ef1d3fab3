"""Caches of screens follow from the slots and the history, where no number is set."""

from __future__ import annotations

from typing import Any

import pytest

from dart_cli.config.schema import Config
from dart_cli.config.screens import (
    LEAST_CACHE,
    image_cache_bytes,
    screens_in_play,
    vllm_image_cache_gb,
)

FULL_HD = 1920 * 1080 * 3


def config(**sections: Any) -> Config:
    base = {"env": {"suite": "mini", "slots": 32, "options": {"size": "1920x1080"}}}
    return Config.model_validate(base | sections)


@pytest.mark.parametrize(
    ("sections", "screens"),
    [
        ({}, 32 * 2),
        ({"policy": {"history_images": 5}}, 32 * 6),
        ({"policy": {"history_images": 3, "history_images_most": 7}}, 32 * 8),
        ({"up": {"envs": 4, "rollouts": 2}}, 4 * 32 * 2),
        ({"up": {"envs": 4, "rollouts": 4}}, 2 * 32 * 2),
        ({"up": {"envs": 0, "rollouts": 0}}, 32 * 2),
    ],
)
def test_an_engine_has_room_for_the_screens_of_the_episodes_it_may_serve(
    sections: dict[str, Any], screens: int
) -> None:
    assert screens_in_play(config(**sections)) == screens
    assert image_cache_bytes(config(**sections)) == max(LEAST_CACHE, screens * FULL_HD)
    assert vllm_image_cache_gb(config(**sections)) * 2**30 >= screens * FULL_HD


def test_a_number_that_is_set_is_taken_and_each_cache_has_its_own() -> None:
    theirs = config(vllm={"options": {"mm_processor_cache_gb": 16}})
    assert vllm_image_cache_gb(theirs) == 16
    assert image_cache_bytes(theirs) == 64 * FULL_HD


def test_small_screens_and_those_of_unknown_size_have_room_too() -> None:
    small = config(env={"suite": "mini", "slots": 2})
    assert image_cache_bytes(small) == LEAST_CACHE
    unknown = config(env={"suite": "nowhere.module:Suite", "slots": 32})
    assert image_cache_bytes(unknown) == 64 * FULL_HD
