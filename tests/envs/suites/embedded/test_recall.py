"""Suite `recall`: what it asks was on a past screen, and is on no later one."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from bus.messages import Turn
from dart_cli.config.load import load_config
from dart_cli.language.history import history_of
from envs.contract.actions import Click, Wait
from envs.suites.embedded.env import EmbeddedEnv
from envs.suites.embedded.suites import RecallSuite
from envs.suites.embedded.tasks.mini import MOST_BEFORE, RecallScene

LAGS = list(RecallSuite.lags)
ARMS: dict[str, list[str]] = {
    "slide": [],
    "evict": [
        "policy.history_images=3",
        "policy.history_images_most=7",
        "policy.history_turns=2",
    ],
    "single": ["policy.history_images=1", "policy.history_turns=0"],
}
"""Keys that make three kinds of history of configs/history.toml: a window that slides, evictions, one screen."""
CONFIG = Path(__file__).parents[4] / "configs" / "history.toml"


def started(lag: int, seed: int) -> tuple[EmbeddedEnv, RecallScene, list[bytes]]:
    env = RecallSuite().make_env()
    observation, _ = env.reset(seed=seed, options={"task": f"recall/{lag}"})
    scene = env._scene
    assert isinstance(scene, RecallScene)
    return env, scene, [observation.screenshot]


@pytest.mark.parametrize("lag", LAGS)
def test_any_click_turns_a_page_and_the_button_is_shown_so_many_pages_before_its_copies(
    lag: int,
) -> None:
    for seed in range(5):
        env, scene, _ = started(lag, seed)
        for page in range(scene.last):
            assert (page == scene.at) == (env._app.find(f"button.{scene.place}") is not None)
            env.step(Wait(seconds=1.0))
            assert scene.page == page
            _, _, over, _, _ = env.step(Click(x=(37 * seed + 50 * page) % 168, y=167 - page))
            assert (scene.page, over) == (page + 1, False)
            env._steps -= 2  # as if nothing had been spent
        assert scene.page - scene.at == lag
        _, reward, over, _, _ = env.step(env.oracle_action())
        assert (reward, over) == (1.0, True)


@pytest.mark.parametrize("lag", LAGS)
def test_only_the_page_of_the_button_tells_where_it_was(lag: int) -> None:
    shows = []
    for place in range(4):
        env, scene, screens = started(lag, 3)
        scene.place = place
        env._app.refresh()
        env._last = None
        screens = [env._observe().screenshot]
        screens += [env.step(Click(x=1, y=1))[0].screenshot for _ in range(scene.last)]
        shows.append(screens)
    for page in range(scene.last + 1):
        assert len({show[page] for show in shows}) == (4 if page == scene.at else 1)


def test_another_of_the_four_places_fails() -> None:
    env, scene, _ = started(1, 7)
    while scene.page < scene.last:
        env.step(env.oracle_action())
    x, y = scene.places[(scene.place + 1) % 4].centre
    _, reward, over, _, _ = env.step(Click(x=x, y=y))
    assert (reward, over) == (0.0, True)


@pytest.mark.parametrize(
    ("arm", "share"), [("slide", Fraction(2, 3)), ("evict", Fraction(2, 3)), ("single", 0)]
)
def test_the_arms_of_the_benchmark_show_the_button_in_so_many_last_prompts(
    arm: str, share: Fraction
) -> None:
    history = history_of(load_config(CONFIG, ARMS[arm]).policy)
    screens = []
    for lag in LAGS:
        for at in range(MOST_BEFORE + 1):
            past = [Turn(text="", screenshot=b"%d" % page) for page in range(at + lag)]
            screens.append(b"%d" % at in [turn.screenshot for turn in history.visible(past)])
    assert Fraction(sum(screens), len(screens)) == share
