"""Promises of suite `mobilegym`: tasks on a stand-in of the phone, and on the real one where it is.

The real browser plays; where Chromium is not installed, these tests are skipped. DART_MOBILEGYM names a built
checkout of MobileGym, DART_MOBILEGYM_PYTHON the interpreter with the packages of its bench_env.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from bus.errors import EnvError, MissingPartError, TaskError
from envs.contract.actions import Answer, Click, Done, Drag, Fail, KeyPress, Type
from envs.contract.registry import check_parts, load_suite, make_env
from envs.suites.mobilegym.env import MobilegymEnv, verdict_of
from envs.suites.mobilegym.tasks import read_list
from envs.tools.browser.process import find_chromium
from tests.envs.suites.mobilegym.standin import write_folder
from tests.waiting import lives, wait_until

try:
    find_chromium()
except MissingPartError as missing:
    pytest.skip(str(missing), allow_module_level=True)

WIFI, SOUND = Click(x=100, y=60), Click(x=100, y=180)
SWITCH = {"wifi": WIFI, "sound": SOUND}
Open = Callable[..., MobilegymEnv]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("DART_MOBILEGYM_PYTHON", sys.executable)
    return write_folder(tmp_path / "mobilegym")


@pytest.fixture
def opened(folder: Path) -> Iterator[Open]:
    envs: list[MobilegymEnv] = []

    def open_env(**options: Any) -> MobilegymEnv:
        env = make_env(f"mobilegym:{folder}", node=sys.executable, **options)
        assert isinstance(env, MobilegymEnv)
        envs.append(env)
        return env

    yield open_env
    for env in envs:
        env.close()


def begin(env: MobilegymEnv, task: str = "SwitchOn", seed: int = 0) -> str:
    """Begin a task and return the name of its switch."""
    observation, info = env.reset(seed=seed, options={"task": f"mobilegym/clock.{task}"})
    assert (observation.width, observation.height) == (360, 640)
    return str(info["instruction"]).split()[1]


def test_the_tasks_are_those_of_its_own_list(folder: Path) -> None:
    tasks = load_suite(f"mobilegym:{folder}").tasks
    switch, read = tasks["mobilegym/clock.SwitchOn"], tasks["mobilegym/clock.ReadText"]
    assert (switch.split, switch.tier, switch.max_steps) == ("train", 1, 15)
    assert (read.split, read.tier, read.params["answer_sheet"]) == ("heldout", 3, True)


def test_the_list_is_read_from_a_cache_until_a_task_changes(folder: Path, tmp_path: Path) -> None:
    first = read_list(folder, sys.executable, tmp_path)
    [kept] = tmp_path.glob("mobilegym-*.json")
    kept.write_text('{"tasks": []}', encoding="utf-8")
    assert read_list(folder, sys.executable, tmp_path) == {"tasks": []}
    os.utime(folder / "bench_env" / "task" / "registry.py", (1, 1))
    assert read_list(folder, sys.executable, tmp_path) == first


def test_the_goal_without_side_effects_passes(opened: Open) -> None:
    env = opened()
    name = begin(env)
    half = env.evaluate()
    assert (half.outcome, half.reward) == ("fail", 0.5)  # the application is open
    env.step(SWITCH[name])
    _, reward, terminated, _, _ = env.step(Done())
    assert (reward, terminated, env.evaluate().outcome) == (1.0, True, "pass")


def test_the_seed_chooses_the_parameters_as_in_mobilegym(opened: Open) -> None:
    env = opened()
    names = [begin(env, seed=seed) for seed in range(6)]
    assert set(names) == {"wifi", "sound"}
    assert [begin(env, seed=seed) for seed in range(6)] == names


def test_side_effects_cost_a_share(opened: Open) -> None:
    env = opened()
    begin(env)
    env.step(WIFI)
    env.step(SOUND)
    verdict = env.evaluate()
    assert (verdict.outcome, verdict.reward) == ("fail", 0.8)
    assert "side effects" in verdict.reason


def test_gestures_take_the_time_of_the_page(opened: Open) -> None:
    env = opened()
    begin(env)
    for action in (
        Drag(path=[(100, 400), (100, 200)]),
        Click(x=20, y=600, button="right"),
        Type(text="ab"),
    ):
        env.step(action)
    env.step(KeyPress(keys=["home"]))
    calls = env.gui.ask("window.calls")
    assert isinstance(calls, list)
    assert [call[0] for call in calls] == ["swipe", "longPress", "type", "home"]
    assert calls[0][1:] == [{"x": 50, "y": 200}, {"x": 50, "y": 100}]


def test_an_answer_is_judged_and_a_judge_that_fails_is_invalid(opened: Open) -> None:
    env = opened()
    for answer, outcome in (("word", "pass"), ("other", "fail"), ("boom", "invalid")):
        begin(env, "ReadText")
        _, _, terminated, _, _ = env.step(Answer(text=answer))
        assert terminated
        assert env.evaluate().outcome == outcome
    assert "no such word" in env.evaluate().reason


def test_giving_up_fails(opened: Open) -> None:
    env = opened()
    env.step(SWITCH[begin(env)])
    env.step(Fail())
    assert env.evaluate().outcome == "fail"


def test_nothing_of_an_episode_is_left_for_the_next(opened: Open) -> None:
    env = opened()
    env.step(SWITCH[begin(env)])
    assert env.gui.ask("localStorage.state")
    begin(env)
    assert [element.name for element in env.elements()] == ["wifi off", "sound off"]


def test_the_page_is_a_phones(opened: Open) -> None:
    env = opened()
    begin(env)
    assert env.gui.ask("navigator.userAgent") == "Phone/1.0"
    assert env.gui.ask("navigator.maxTouchPoints") == 5
    assert env.gui.ask("[innerWidth, devicePixelRatio]") == [180, 2]


def test_two_at_once_share_the_server_alone(opened: Open) -> None:
    envs = [opened(), opened()]
    with ThreadPoolExecutor(2) as pool:
        names = list(pool.map(begin, envs))
    envs[0].step(SWITCH[names[0]])
    assert [env.evaluate().reward for env in envs] == [1.0, 0.5]
    assert len(set(envs[0].pids) & set(envs[1].pids)) == 1


def test_code_that_dies_costs_that_episode(opened: Open) -> None:
    env = opened()
    begin(env)
    assert env._program is not None
    assert env._program.pid is not None
    os.kill(env._program.pid, signal.SIGKILL)
    with pytest.raises(EnvError, match="its process ended"):
        env.evaluate()
    env.step(SWITCH[begin(env)])
    assert env.evaluate().outcome == "pass"


def test_closing_leaves_no_process(opened: Open) -> None:
    env = opened()
    begin(env)
    pids = [*env.pids, env.gui.visit.browser.pid]
    below = [child.pid for pid in pids for child in psutil.Process(pid).children(recursive=True)]
    env.close()
    env.close()
    wait_until(lambda: not any(map(lives, [*pids, *below])), "the end of all processes")
    with pytest.raises(EnvError, match="closed"):
        begin(env)


@pytest.mark.parametrize(
    ("judgement", "outcome", "reward"),
    [
        ({"passed": True}, "pass", 1.0),
        ({"success": True, "clean": False, "progress": 1.0, "warnings": ["x"]}, "fail", 0.8),
        ({"progress": 0.25, "issues": ["a"]}, "fail", 0.25),
        ({"progress": 1.0}, "fail", 0.8),
        ({"judge_error": "boom", "passed": True}, "invalid", None),
    ],
)
def test_a_judgement_is_a_verdict(
    judgement: dict[str, Any], outcome: str, reward: float | None
) -> None:
    nothing = {
        "passed": False,
        "success": False,
        "clean": True,
        "progress": 0.0,
        "issues": [],
        "warnings": [],
        "judge_error": "",
    }
    verdict = verdict_of({**nothing, **judgement})
    assert (verdict.outcome, verdict.reward) == (outcome, reward)


def test_what_is_missing_is_named_with_the_step(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"mobilegym:{folder}"
    with pytest.raises(TaskError, match="no checkout of MobileGym"):
        load_suite(f"mobilegym:{tmp_path}")
    check_parts(name, {"node": sys.executable})
    with pytest.raises(MissingPartError, match="Node 22"):
        check_parts(name, {"node": "no-such-node"})
    (folder / "dist" / "index.html").unlink()
    (folder / "dist").rmdir()
    with pytest.raises(MissingPartError, match="npm run build"):
        check_parts(name, {"node": sys.executable})
    monkeypatch.delenv("DART_MOBILEGYM_PYTHON")
    with pytest.raises(MissingPartError, match="an interpreter of its own"):
        check_parts(name, {"node": sys.executable})


@pytest.mark.skipif(
    "DART_MOBILEGYM" not in os.environ, reason="set DART_MOBILEGYM to a built checkout of MobileGym"
)
def test_a_task_passes_on_the_real_phone() -> None:
    env = make_env(f"mobilegym:{os.environ['DART_MOBILEGYM']}", scale=1.0)
    assert isinstance(env, MobilegymEnv)
    try:
        env.reset(seed=0, options={"task": "mobilegym/sms.MarkAllConversationsRead"})
        assert env.evaluate().outcome == "fail"
        env.step(Click(x=287, y=77))
        env.step(Done())
        assert env.evaluate().outcome == "pass"
    finally:
        env.close()
