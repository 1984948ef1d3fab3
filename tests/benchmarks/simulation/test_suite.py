"""Promises of suite `timed`: its times are as documented, its screens real, its draws repeatable."""

from __future__ import annotations

import io
import statistics
from random import Random

import pytest
from PIL import Image

from benchmarks.simulation.profiles import PROFILES, expected
from benchmarks.simulation.screens import screenshot
from benchmarks.simulation.suite import TimedSuite
from bus.errors import EnvError, TaskError
from envs.contract.actions import Click, Done
from envs.contract.base import GuiEnv, Observation
from envs.contract.blobs import content_hash
from envs.contract.registry import make_env, tasks_of
from tests.simulated import SUITE

CLICK = Click(x=1, y=1)


class Episode:
    """One whole episode of an environment."""

    def __init__(self, env: GuiEnv, task: str = "timed/015", seed: int = 7) -> None:
        self.screens: list[Observation] = []
        observation, _ = env.reset(seed=seed, options={"task": task})
        self.screens.append(observation)
        over = False
        self.rewards: list[float] = []
        while not over:
            observation, reward, over, _, _ = env.step(CLICK)
            self.screens.append(observation)
            self.rewards.append(reward)
        self.verdict = env.evaluate()

    @property
    def steps(self) -> int:
        return len(self.rewards)

    @property
    def hashes(self) -> list[str]:
        return [content_hash(screen.screenshot) for screen in self.screens]


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that environments sleep, which here take no time."""
    seconds: list[float] = []
    monkeypatch.setattr("benchmarks.simulation.suite.time.sleep", seconds.append)
    return seconds


@pytest.mark.parametrize("name", PROFILES)
def test_the_expected_times_are_the_means_of_what_is_drawn(name: str) -> None:
    profile, rng, draws = PROFILES[name], Random(3), 40_000
    mean = expected(name)
    for told, draw in (
        (mean.reset_s, profile.draw_reset_s),
        (mean.step_s, profile.draw_step_s),
        (mean.steps, profile.draw_steps),
    ):
        drawn = [float(draw(rng)) for _ in range(draws)]
        error = 4 * statistics.stdev(drawn) / draws**0.5  # four standard errors
        assert statistics.mean(drawn) == pytest.approx(told, abs=max(error, 1e-12))
    assert mean.episode_s == mean.reset_s + mean.steps * mean.step_s


def test_osworld_is_as_slow_and_heavy_tailed_as_documented() -> None:
    profile, rng = PROFILES["osworld"], Random(1)
    steps_s = sorted(profile.draw_step_s(rng) for _ in range(20_000))
    lengths = [profile.draw_steps(rng) for _ in range(20_000)]
    assert steps_s[10_000] == pytest.approx(4.0, rel=0.05)
    assert steps_s[-100] > 20, "one step in a hundred stalls"
    assert statistics.median(lengths) == 10
    assert (min(lengths), max(lengths)) == (1, 30)
    assert profile.reset.median == 20


def test_an_environment_sleeps_its_profiles_times_divided_by_the_speedup(
    slept: list[float],
) -> None:
    episodes, total_s = 300, []
    for speedup in (1.0, 10.0):
        env = TimedSuite().make_env(profile="osworld", speedup=speedup, seed=5)
        steps = sum(Episode(env).steps for _ in range(episodes))
        assert len(slept) == episodes + steps
        total_s.append(sum(slept))
        slept.clear()
    assert total_s[1] == pytest.approx(expected("osworld").episode_s * episodes / 10, rel=0.1)


def test_every_screen_is_a_png_of_the_given_size_with_its_own_pixels() -> None:
    env = TimedSuite().make_env(profile="instant", seed=0)
    episodes = [Episode(env) for _ in range(4)]
    screens = [screen for episode in episodes for screen in episode.screens]
    pixels = set()
    for screen in screens:
        image = Image.open(io.BytesIO(screen.screenshot))
        image.load()  # checks every checksum
        assert (image.format, image.size) == ("PNG", (448, 336))
        assert (screen.media_type, screen.width, screen.height) == ("image/png", 448, 336)
        assert 10_000 < len(screen.screenshot) < 40_000
        pixels.add(image.convert("RGB").tobytes())
    assert len(pixels) == len(screens)


def test_a_screen_may_be_as_large_as_a_desktop() -> None:
    blob = screenshot(0, 2**64 - 1, 1920, 1080)
    image = Image.open(io.BytesIO(blob))
    assert image.convert("RGB").size == (1920, 1080)
    assert 100_000 < len(blob) < 400_000


def test_members_of_a_group_differ_and_a_seed_repeats_them() -> None:
    def group(seed: int) -> list[Episode]:
        suite = TimedSuite()  # a new process has made no environment yet
        envs = [suite.make_env(profile="instant", seed=seed) for _ in range(4)]
        return [Episode(env, seed=7) for env in envs]

    first, again, other = group(1), group(1), group(2)
    assert [episode.hashes for episode in first] == [episode.hashes for episode in again]
    assert len({tuple(episode.hashes) for episode in [*first, *other]}) == 8


def test_without_a_seed_no_two_environments_draw_alike() -> None:
    seen = {Episode(make_env(SUITE, profile="instant")).hashes[0] for _ in range(8)}
    assert len(seen) == 8


def test_tasks_pass_as_often_as_their_parameters_say() -> None:
    tasks = tasks_of(SUITE)
    shares = [task.params["pass"] for task in tasks]
    assert (len(tasks), tasks[0].id, tasks[-1].id) == (32, "timed/000", "timed/031")
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.2, pytest.approx(0.8))
    env = TimedSuite().make_env(profile="instant", seed=9)
    for task in (tasks[0], tasks[31]):
        episodes = [Episode(env, task.id) for _ in range(400)]
        passed = [episode.verdict.outcome == "pass" for episode in episodes]
        assert statistics.mean(passed) == pytest.approx(task.params["pass"], abs=0.08)
        for episode in episodes:
            assert episode.rewards[:-1] == [0.0] * (episode.steps - 1)
            assert episode.rewards[-1] == episode.verdict.reward


def test_done_before_the_end_does_not_pass(slept: list[float]) -> None:
    env = TimedSuite().make_env(profile="osworld", seed=2)
    for _ in range(50):
        env.reset(seed=1, options={"task": "timed/031"})
        assert env.evaluate().outcome == "fail", "no task is true at reset"
        _, reward, over, _, _ = env.step(Done())
        assert (over, reward, env.evaluate().outcome) == (True, 0.0, "fail")


def test_half_of_the_faults_are_crashes_and_half_are_slow_resets(slept: list[float]) -> None:
    env = TimedSuite().make_env(profile="osworld", fault_rate=0.5, seed=4)
    crashes = slow = 0
    episodes = 2_000
    for _ in range(episodes):
        slept.clear()
        try:
            Episode(env)
        except EnvError:
            crashes += 1
        slow += slept[0] > 75  # log-normal of median 20, sigma 0.35: four sigma above
    assert crashes / episodes == pytest.approx(0.25, abs=0.04)
    assert slow / episodes == pytest.approx(0.25, abs=0.04)


def test_a_crash_ends_the_episode_with_an_error(slept: list[float]) -> None:
    env = TimedSuite().make_env(fault_rate=1.0, seed=1)
    with pytest.raises(EnvError, match="the GUI crashed at step"):
        [Episode(env) for _ in range(50)]
    with pytest.raises(EnvError, match="call reset first"):
        env.step(CLICK)


def test_without_faults_nothing_breaks(slept: list[float]) -> None:
    env = TimedSuite().make_env(profile="osworld", seed=4)
    steps = [Episode(env).steps for _ in range(200)]
    assert max(steps) == 30


def test_after_its_end_an_episode_must_be_reset() -> None:
    env = TimedSuite().make_env(profile="instant", seed=0)
    Episode(env)
    with pytest.raises(EnvError, match="call reset"):
        env.step(CLICK)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"profile": "osword"}, "profile must be one of osworld, browser, instant"),
        ({"speedup": 0}, "speedup: Input should be greater than 0"),
        ({"fault_rate": 2}, "fault_rate must be 0 to 1"),
        ({"size": "64x64"}, "size must be 128 to 4096"),
    ],
)
def test_an_invalid_option_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        make_env(SUITE, **options)
    with pytest.raises(TaskError, match="no task 'timed/999'"):
        make_env(SUITE).reset(seed=0, options={"task": "timed/999"})
