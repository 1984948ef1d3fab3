"""The embedded suites keep the GuiEnv contract, and every template has an exact evaluator and oracle."""

from __future__ import annotations

import io
from random import Random

import pytest
from PIL import Image

from bus.errors import EnvError, TaskError
from envs.contract.actions import (
    Action,
    Answer,
    Click,
    Done,
    DoubleClick,
    Drag,
    Fail,
    KeyPress,
    Move,
    Scroll,
    Type,
    Wait,
)
from envs.contract.base import Task, Verdict
from envs.contract.registry import load_suite, make_env
from envs.suites.embedded.env import EmbeddedEnv

SUITES = ("mini", "desk")
TASKS = [task for suite in SUITES for task in load_suite(suite).tasks.values()]
SEEDS = 32
SIZES = ("168x168", "336x252", "448x336", "896x672", "1280x720")


def embedded(suite: str, **options: object) -> EmbeddedEnv:
    env = make_env(suite, **options)
    assert isinstance(env, EmbeddedEnv)
    return env


def play_oracle(env: EmbeddedEnv, task: Task, seed: int) -> None:
    """Play one episode through `step` alone; it has to pass in exactly `need` steps."""
    _, info = env.reset(seed=seed, options={"task": task})
    assert env.evaluate().outcome == "fail", f"{task.id} seed {seed} is true at reset"
    for step in range(info["need"]):
        _, reward, terminated, truncated, last = env.step(env.oracle_action())
        assert terminated == (step == info["need"] - 1), f"{task.id} seed {seed} step {step}"
        assert not truncated
    assert reward == 1.0
    assert last["verdict"].outcome == "pass"


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.id)
def test_the_oracle_passes_every_seed_in_exactly_the_steps_it_needs(task: Task) -> None:
    env = embedded(task.suite, size="168x168")
    for seed in range(SEEDS):
        play_oracle(env, task, seed if seed < SEEDS // 2 else 1_000_000 + seed)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("suite", SUITES)
def test_every_template_can_be_played_at_every_size(suite: str, size: str) -> None:
    env = embedded(suite, size=size)
    width, height = (int(side) for side in size.split("x"))
    for task in load_suite(suite).tasks.values():
        play_oracle(env, task, 5)
        observation, _ = env.reset(seed=6, options={"task": task})
        assert (observation.width, observation.height) == (width, height)
        assert Image.open(io.BytesIO(observation.screenshot)).size == (width, height)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.id)
def test_the_same_seed_gives_the_same_episode_byte_for_byte(task: Task) -> None:
    one, other = embedded(task.suite), embedded(task.suite)
    other.reset(seed=99, options={"task": task})  # earlier episodes do not matter
    first, info = one.reset(seed=4, options={"task": task})
    again, info_again = other.reset(seed=4, options={"task": task.id})
    assert (first, info) == (again, info_again)
    for _ in range(info["need"]):
        action = one.oracle_action()
        assert action == other.oracle_action()
        assert one.step(action) == other.step(action)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.id)
def test_seeds_differ_in_their_screens(task: Task) -> None:
    env = embedded(task.suite, size="168x168")
    screens = {env.reset(seed=s, options={"task": task})[0].screenshot for s in range(20)}
    assert len(screens) >= 18


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.id)
def test_limits_are_per_instance_and_within_those_of_the_task(task: Task) -> None:
    env = embedded(task.suite, size="168x168")
    needs = []
    for seed in range(25):
        _, info = env.reset(seed=seed, options={"task": task})
        assert info["need"] < info["max_steps"] <= task.max_steps
        assert info["instruction"]
        assert "{" not in info["instruction"]
        needs.append(info["need"])
    assert max(needs) <= task.tier


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.id)
def test_doing_nothing_ends_at_the_limit_and_fails(task: Task) -> None:
    env = embedded(task.suite)
    for seed in range(5):
        first, info = env.reset(seed=seed, options={"task": task})
        for step in range(1, info["max_steps"] + 1):
            observation, reward, terminated, truncated, last = env.step(Wait())
            assert observation == first
            assert (reward, terminated) == (0.0, False)
            assert truncated == (step == info["max_steps"])
        assert last["verdict"].outcome == "fail"


@pytest.mark.parametrize("action", [Done(), Fail(), Answer(text="red")], ids=lambda a: a.kind)
@pytest.mark.parametrize("suite", SUITES)
def test_done_without_reaching_the_goal_fails(suite: str, action: Action) -> None:
    env = embedded(suite, size="168x168")
    for task in load_suite(suite).tasks.values():
        for seed in range(5):
            env.reset(seed=seed, options={"task": task})
            _, reward, terminated, truncated, info = env.step(action)
            assert (reward, terminated, truncated) == (0.0, True, False)
            assert info["verdict"].outcome == "fail"


@pytest.mark.parametrize(("suite", "bound"), [("mini", 0.12), ("desk", 0.02)])
def test_random_clicks_hardly_ever_pass(suite: str, bound: float) -> None:
    env, rng = embedded(suite, size="168x168"), Random(0)
    passed = steps_played = 0
    for task in load_suite(suite).tasks.values():
        for seed in range(10):
            env.reset(seed=seed, options={"task": task})
            is_over, reward = False, 0.0
            while not is_over:
                action = Click(x=rng.randrange(168), y=rng.randrange(168))
                _, reward, terminated, truncated, _ = env.step(action)
                is_over = terminated or truncated
            passed += reward == 1.0
            steps_played += 1
    assert passed / steps_played < bound


def random_action(rng: Random, width: int, height: int) -> Action:
    x, y = rng.randrange(-5, width + 5), rng.randrange(-5, height + 5)
    return rng.choice(
        [
            Click(x=x, y=y),
            Click(x=x, y=y),
            Click(x=x, y=y, button="right"),
            DoubleClick(x=x, y=y),
            Drag(path=[(x, y), (rng.randrange(width), rng.randrange(height))]),
            Scroll(x=x, y=y, dy=rng.choice((-2, 1, 3))),
            Move(x=x, y=y),
            Type(text=rng.choice(("abc", "x\ty", "Q", " "))),
            KeyPress(keys=[rng.choice(("tab", "escape", "enter", "down", "backspace", "f5"))]),
            KeyPress(keys=["ctrl", rng.choice("acvxz")]),
        ]
    )


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.id)
def test_no_action_breaks_the_screen_and_the_oracle_still_solves_it(task: Task) -> None:
    """After any detour that ended nothing, the oracle still reaches the goal, if it can be reached."""
    env, rng = embedded(task.suite, slack=200), Random(task.id)
    wide = Task(**{**vars(task), "max_steps": 400})
    env._tasks = {**env._tasks, task.id: wide}
    width, height = env._size
    for seed in range(4):
        env.reset(seed=seed, options={"task": wide})
        is_over = False
        for _ in range(25):
            _, _, terminated, truncated, info = env.step(random_action(rng, width, height))
            is_over = terminated or truncated
            if is_over:
                assert info["verdict"].outcome in ("pass", "fail")
                break
        if is_over or task.id in NOT_UNDONE:
            continue
        for _ in range(100):
            _, _, is_over, _, info = env.step(env.oracle_action())
            if is_over:
                break
        assert is_over
        assert info["verdict"].outcome == "pass", info["verdict"].reason


NOT_UNDONE = {task.id for task in TASKS if task.id.startswith("desk/files")} | {"desk/chores"}
"""Tasks in which a wrong action may do what the oracle cannot undo: delete a file, add a line."""


@pytest.mark.parametrize("suite", SUITES)
def test_a_click_that_hits_nothing_changes_nothing(suite: str) -> None:
    env = embedded(suite)
    for task in load_suite(suite).tasks.values():
        first, _ = env.reset(seed=3, options={"task": task})
        for point in ((-1, -1), (10_000, 5), (5, 10_000)):
            observation, reward, terminated, _, _ = env.step(Click(x=point[0], y=point[1]))
            assert (observation, reward, terminated) == (first, 0.0, False)
            if env._has_ended:
                break


def test_a_judge_that_breaks_makes_the_episode_invalid_and_never_a_reward() -> None:
    env = embedded("mini")
    env.reset(seed=0, options={"task": "mini/click"})
    scene, _ = env._playing()

    def broken() -> Verdict:
        raise ZeroDivisionError("no such row")

    scene.evaluate = broken  # type: ignore[method-assign]
    verdict = env.evaluate()
    assert verdict.outcome == "invalid"
    assert verdict.reward is None
    assert "ZeroDivisionError" in verdict.reason
    _, reward, terminated, _, info = env.step(Wait())
    assert (reward, terminated, info["verdict"].outcome) == (0.0, True, "invalid")


def test_misuse_raises_a_named_error() -> None:
    env = embedded("mini")
    with pytest.raises(EnvError, match="call reset first"):
        env.step(Wait())
    with pytest.raises(TaskError, match="reset needs options"):
        env.reset(seed=1)
    with pytest.raises(TaskError, match="no task 'desk/press'"):
        env.reset(seed=1, options={"task": "desk/press"})
    env.reset(seed=1, options={"task": "mini/click"})
    env.step(Done())
    with pytest.raises(EnvError, match="the episode is over"):
        env.step(Wait())
    env.close()
    env.close()
    with pytest.raises(EnvError, match="call reset first"):
        env.evaluate()


def test_without_a_seed_episodes_differ() -> None:
    env = embedded("mini")
    seeds = {env.reset(options={"task": "mini/click"})[1]["seed"] for _ in range(10)}
    assert len(seeds) > 5


@pytest.mark.parametrize("suite", SUITES)
def test_jpeg_is_selectable_and_its_media_type_is_set(suite: str) -> None:
    env = embedded(suite, encoding="jpeg")
    task = next(iter(load_suite(suite).tasks))
    observation, _ = env.reset(seed=0, options={"task": task})
    assert observation.media_type == "image/jpeg"
    assert Image.open(io.BytesIO(observation.screenshot)).format == "JPEG"


def test_there_are_enough_templates_of_every_tier_and_both_splits() -> None:
    assert len(TASKS) >= 25
    assert sum(task.suite == "desk" for task in TASKS) >= 20
    assert min(task.tier for task in TASKS) == 1
    assert max(task.tier for task in TASKS) >= 12
    for suite in SUITES:
        assert {task.split for task in TASKS if task.suite == suite} == {"train", "heldout"}


def test_widgets_are_those_in_reach_and_a_click_on_one_reaches_it() -> None:
    env = embedded("mini")
    for task in load_suite("mini").tasks:
        for seed in range(10):
            env.reset(seed=seed, options={"task": task})
            names = [widget.name for widget in env.widgets()]
            assert len(names) == len(set(names))
            for widget in env.widgets():
                reached = env._playing()[1].path(*widget.centre)
                assert widget.name in [each.name for each in reached]
                if "popup" in task:
                    assert widget.name.startswith("popup.")
