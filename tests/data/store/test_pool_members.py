"""Successes from outside the run join the pool; their screenshots stay as long as they are needed."""

from __future__ import annotations

from pathlib import Path

from dart_cli.data.store.open import open_store
from tests.data.parts import (
    picture,
    pool_member,
)
from tests.data.store.parts import fill


def test_a_success_from_outside_joins_the_pool_once_and_keeps_what_is_trained_on(
    run_dir: Path,
) -> None:
    row, steps, images = pool_member("xa", has_logprobs=True)
    with open_store(run_dir) as store:
        store.begin_run(1, "{}", [])
        assert store.add_pool_member(row, steps, images)
        assert not store.add_pool_member(row, steps, images)
        assert store.pool() == [row]
        assert store.pool("mini/click") == [row]
        assert store.pool("mini/other") == []
        filed = store.steps("xa")
        assert [step.sampled.behaviour_logprobs for step in filed] == [
            s.sampled.behaviour_logprobs for s in steps
        ]
        assert [step.sampled.version_spans for step in filed] == [[], []]
        assert store.screenshots(step.screenshot for step in filed) == images
        assert store.longest_successes() == {"mini/click": 2}


def test_unknown_log_probabilities_are_not_kept(run_dir: Path) -> None:
    row, steps, images = pool_member("xa", has_logprobs=False)
    with open_store(run_dir) as store:
        store.add_pool_member(row, steps, images)
        assert [step.sampled.behaviour_logprobs for step in store.steps("xa")] == [[], []]


def test_screenshots_of_the_pool_stay_until_the_last_member_that_shows_them_is_evicted(
    run_dir: Path,
) -> None:
    common = picture("common")
    with open_store(run_dir) as store:
        name = fill(store)
        for member in ("xa", "xb"):
            row, steps, images = pool_member(member, has_logprobs=True, first=common)
            store.add_pool_member(row, steps, images)
        kept = [step.screenshot for step in store.steps("xa")]

        def held() -> list[bool]:
            store.remove_screenshots(2, 1000)
            return [bool(store.screenshots([key])) for key in kept]

        assert held() == [True, True]
        assert store.screenshots(step.screenshot for step in store.steps(name)) == {}
        store.evict_from_pool("xa", 9.0)
        assert held() == [True, False]
        store.evict_from_pool("xb", 9.0)
        assert held() == [False, False]
        assert store.pool() == []
        assert [row.evicted_at for row in store.pool(evicted=True)] == [9.0, 9.0]


def test_a_screenshot_of_an_evicted_member_stays_for_the_groups_that_are_open(
    run_dir: Path,
) -> None:
    with open_store(run_dir) as store:
        fill(store)
        row, steps, images = pool_member("xa", has_logprobs=True)
        store.add_pool_member(row, steps, images)
        store.evict_from_pool("xa", 9.0)
        store.remove_screenshots(1, 1000)  # group 1 is still needed
        assert store.screenshots(images) == images
