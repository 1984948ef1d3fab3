"""Promises of gymnasium's environments as suites: their hooks, their ends, their errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bus.errors import EnvError, NoOracleError, TaskError
from envs.contract.actions import Answer, Click, Done, Wait
from envs.contract.base import GuiEnv, Observation
from envs.contract.registry import load_suite, make_env
from envs.suites.gym.env import GymEnv

TILES = f"{Path(__file__).parents[4] / 'docs' / 'examples' / 'tiles_gym.py'}:TilesHooks"

COUNTER = '''
import gymnasium, numpy as np
from envs.contract.actions import Click
from envs.contract.base import Verdict
from envs.suites.gym.hooks import GymHooks

class Counter(gymnasium.Env):
    """Counts to what the reset asks for; -1 breaks it."""
    observation_space = gymnasium.spaces.Discrete(100)
    action_space = gymnasium.spaces.Discrete(3)
    closed = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count, self.goal = 0, (options or {}).get("goal", 2)
        return 0, {"seed": seed}

    def step(self, by):
        if by < 0:
            raise RuntimeError("it\\nbroke")
        self.count += by
        return self.count, 0.5, self.count == self.goal, False, {}

    def render(self):
        return np.full((20, 30, 3), self.count, np.uint8)

    def close(self):
        Counter.closed += 1

gymnasium.register("Counter-v0", entry_point=Counter, max_episode_steps=4)

class Hooks(GymHooks):
    env_id, env_options = "Counter-v0", {}
    tasks = {"play": {}, "far": {"goal": 9}}
    max_steps = 7

    def action(self, action, env):
        if not isinstance(action, Click):
            return None
        return action.x - 1

    def verdict(self, episode):
        if episode.last_action is not None and episode.last_action.kind == "answer":
            return "no verdict"
        done = episode.env.count == episode.env.goal
        return Verdict("pass" if done else "fail", f"{episode.total} {episode.truncated}")

class Flat(Hooks):
    def image(self, env, observation):
        return np.zeros((20, 30), np.uint8)

class Encoded(Hooks):
    def image(self, env, observation):
        return b"no image"

class NoVerdict(GymHooks):
    env_id = "Counter-v0"
    def action(self, action, env): return None

class Endless(Hooks):
    max_steps = 0

class Nameless(Hooks):
    env_id = ""

class Unknown(Hooks):
    env_id = "Nothing-v7"

class Other:
    pass
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gym") / "counter.py"
    path.write_text(COUNTER)
    return path


@pytest.fixture
def counter(file: Path) -> Iterator[GuiEnv]:
    env = make_env(f"gym:{file}:Hooks")
    yield env
    env.close()
    env.close()


def begin(env: GuiEnv, suite: str, name: str = "Counter-v0/play", seed: int = 0) -> Observation:
    observation, info = env.reset(seed=seed, options={"task": load_suite(suite).tasks[name]})
    assert info["instruction"]
    return observation


def test_the_example_s_solution_passes_and_partial_credit_is_its_hits() -> None:
    suite = f"gym:{TILES}"
    env = make_env(suite)
    assert isinstance(env, GymEnv)
    first = begin(env, suite, "Tiles-v0/play", seed=5)
    assert (first.width, first.height, first.media_type) == (168, 168, "image/png")
    assert begin(env, suite, "Tiles-v0/play", seed=5) == first
    rewards = [0.0]
    assert env.evaluate().reward == 0.0
    for _ in range(3):
        _, reward, terminated, _, _ = env.step(env.oracle_action())
        rewards.append(env.evaluate().reward or 0.0)
        assert reward == 1.0
    assert (terminated, rewards, env.evaluate().outcome) == (True, [0, 1 / 3, 2 / 3, 1], "pass")
    with pytest.raises(EnvError, match="the episode is over"):
        env.step(Done())


def test_a_suite_is_named_by_its_id_or_by_its_hooks(file: Path) -> None:
    by_hooks = load_suite(f"gym:{file}:Hooks")
    assert list(by_hooks.tasks) == ["Counter-v0/play", "Counter-v0/far"]
    by_id = load_suite("gym:Counter-v0")
    assert list(by_id.tasks) == ["Counter-v0/play"]
    env = make_env("gym:Counter-v0", hooks=f"{file}:Hooks")
    _, info = env.reset(seed=0, options={"task": by_id.tasks["Counter-v0/play"]})
    assert info["max_steps"] == 7
    assert list(load_suite("gym:ale_py:ALE/Pong-v5").tasks) == ["ALE-Pong-v5/play"]


def test_an_action_that_the_hook_gives_nothing_for_makes_no_step(
    counter: GuiEnv, file: Path
) -> None:
    begin(counter, f"gym:{file}:Hooks")
    _, reward, terminated, truncated, info = counter.step(Wait())
    assert (reward, terminated, truncated, info["did_nothing"]) == (0.0, False, False, True)
    _, reward, terminated, _, _ = counter.step(Click(x=3, y=0))
    assert (reward, terminated, counter.evaluate().reason) == (0.5, True, "0.5 False")
    assert counter.evaluate().outcome == "pass"


def test_a_task_s_options_reach_the_reset_and_gymnasium_s_limit_ends_it(
    counter: GuiEnv, file: Path
) -> None:
    begin(counter, f"gym:{file}:Hooks", "Counter-v0/far")
    ends = [counter.step(Click(x=2, y=0))[2:4] for _ in range(4)]
    assert ends == [(False, False)] * 3 + [(False, True)]
    assert counter.evaluate().reason == "2.0 True"


def test_the_hooks_limit_counts_actions_that_did_nothing_and_an_explorer_has_none(
    counter: GuiEnv, file: Path
) -> None:
    begin(counter, f"gym:{file}:Hooks", "Counter-v0/far")
    ends = [counter.step(Wait())[2:4] for _ in range(7)]
    assert ends == [(False, False)] * 6 + [(False, True)]
    task = load_suite(f"gym:{file}:Hooks").tasks["Counter-v0/far"]
    counter.reset(seed=0, options={"task": task, "free": True})
    assert [counter.step(Wait())[3] for _ in range(8)] == [False] * 8


def test_done_ends_an_episode_without_a_step(counter: GuiEnv, file: Path) -> None:
    begin(counter, f"gym:{file}:Hooks")
    assert counter.step(Done())[1:4] == (0.0, True, False)
    assert counter.evaluate().outcome == "fail"


def test_an_error_names_its_place_and_the_next_reset_has_a_new_environment(
    counter: GuiEnv, file: Path
) -> None:
    suite = f"gym:{file}:Hooks"
    begin(counter, suite)
    with pytest.raises(EnvError, match=r"counter\.py:Hooks: step: RuntimeError: it broke"):
        counter.step(Click(x=0, y=0))
    with pytest.raises(EnvError, match="no episode is being played"):
        counter.evaluate()
    begin(counter, suite)
    counter.step(Answer(text="a"))
    with pytest.raises(
        EnvError, match="hook verdict: TypeError: wants a Verdict, got 'no verdict'"
    ):
        counter.evaluate()
    begin(counter, suite)
    with pytest.raises(NoOracleError, match="Hooks has no oracle"):
        counter.oracle_action()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        ("Flat", r"hook image: TypeError: wants uint8 \[height, width, 3\], got uint8 \[20, 30\]"),
        ("Encoded", "hook image: TypeError: its bytes are no PNG, JPEG or WebP"),
    ],
)
def test_an_image_that_is_none_breaks_the_reset(file: Path, hooks: str, message: str) -> None:
    env = make_env(f"gym:{file}:{hooks}")
    with pytest.raises(EnvError, match=message):
        begin(env, f"gym:{file}:{hooks}")


@pytest.mark.parametrize(
    ("suite", "hooks", "message"),
    [
        ("gym:", "", "gym: name what it is made of, gym:ENV_ID"),
        ("gym:CartPole-v1", "", 'needs hooks: set env.options.hooks = "file.py:MyHooks"'),
        ("gym:Nothing-v0", "Hooks", "gymnasium has no environment 'Nothing-v0'"),
        (
            "gym:no_such_package:A-v0",
            "Hooks",
            "gymnasium has no environment 'no_such_package:A-v0'",
        ),
        ("gym:CartPole-v1", "None", "has no 'None'"),
        ("gym:CartPole-v1", "NoVerdict", "it needs a method verdict"),
        ("gym:CartPole-v1", "Other", "derive it from envs.suites.gym.hooks.GymHooks"),
        ("gym:CartPole-v1", "Endless", "max_steps must be 1 to 1000, got 0"),
        ("gym:{file}:Hooks", "Hooks", "names its hooks; leave env.options.hooks out"),
        ("gym:{file}:Nameless", "", "its env_id is empty"),
        ("gym:{file}:Unknown", "", "gymnasium has no environment 'Nothing-v7'"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    file: Path, suite: str, hooks: str, message: str
) -> None:
    options = {"hooks": f"{file}:{hooks}"} if hooks else {}
    with pytest.raises(TaskError) as refused:
        make_env(suite.format(file=file), **options)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
