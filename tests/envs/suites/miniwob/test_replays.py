"""Recorded episodes of MiniWoB++, replayed: verdicts agree with BrowserGym's, but where it is written down.

The real browser plays; where it or the package is not installed, these tests are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from bus.errors import MissingPartError
from envs.suites.miniwob.env import MiniwobEnv, MiniwobSuite
from envs.suites.miniwob.tasks import PARTIAL, TASKS
from envs.tools.browser.process import find_chromium
from envs.tools.miniwob_pages import find_pages
from tests.envs.suites.miniwob.replays import (
    FRAGMENTS,
    OURS_ALONE,
    RECORDING,
    disagreements,
    replay,
)

try:
    find_chromium()
    find_pages()
except MissingPartError as missing:
    pytest.skip(str(missing), allow_module_level=True)

RECORDED = json.loads(RECORDING.read_text(encoding="utf-8"))
EPISODES: list[dict[str, Any]] = RECORDED["episodes"]


@pytest.fixture(scope="module")
def env() -> Iterator[MiniwobEnv]:
    instance = MiniwobSuite().make_env(browsers=1)
    yield instance
    instance.close()


def rewarded(episode: dict[str, Any]) -> bool:
    return bool(episode["browsergym"][0] > 0)


def test_the_recording_has_every_page_of_both_and_verdicts_of_browsergym_itself() -> None:
    ours = {task.params["page"] for task in TASKS.values()}
    assert {episode["page"] for episode in EPISODES} == ours - OURS_ALONE
    assert RECORDED["judged_by"].startswith("browsergym-miniwob ")
    assert any(rewarded(each) for each in EPISODES)
    assert not all(rewarded(each) for each in EPISODES)


def test_a_recorded_outcome_differs_from_browsergyms_only_where_it_is_written_down() -> None:
    for episode in EPISODES:
        passed = episode["outcome"] == "pass"
        if passed and not rewarded(episode):
            assert episode["page"] in FRAGMENTS, episode
        if rewarded(episode) and not passed:
            assert episode["page"] in PARTIAL, episode
            assert 0 < episode["raw"] < TASKS[f"miniwob/{episode['page']}"].params["threshold"]
        published = passed if episode["page"] in FRAGMENTS else rewarded(episode)
        assert disagreements(episode, episode["outcome"], "pass" if published else "fail") == []


def test_replayed_episodes_end_as_recorded_and_as_browsergym_judges(env: MiniwobEnv) -> None:
    """One episode of 24, and those whose reward lies between."""
    between = [each for each in EPISODES if 0 < each["raw"] < 1]
    for episode in [*EPISODES[::24], *between]:
        assert replay(env, episode) == [], (episode["page"], episode["seed"])


@pytest.mark.parametrize("page", ["choose-date-medium", "use-colorwheel", "use-colorwheel-2"])
def test_an_episode_ends_alike_after_any_other_of_its_page(env: MiniwobEnv, page: str) -> None:
    episodes = [episode for episode in EPISODES if episode["page"] == page]
    for episode in [*reversed(episodes), *episodes]:
        assert replay(env, episode) == [], episode["seed"]


@pytest.mark.slow
def test_all_recorded_episodes_end_as_recorded_and_as_browsergym_judges(env: MiniwobEnv) -> None:
    for episode in EPISODES:
        assert replay(env, episode) == [], (episode["page"], episode["seed"])
