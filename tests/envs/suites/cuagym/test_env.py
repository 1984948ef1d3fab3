"""Promises of suite `cuagym`: episodes in a stand-in of the mocks, and in the real ones where they are.

The real browser plays; where Chromium is not installed, these tests are skipped. DART_CUAGYM names a folder for
`cuagym:FOLDER` with real mocks and bundles that have an actions.json.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from bus.errors import EnvError, MissingPartError, NoOracleError
from envs.contract.actions import Click, Done, Fail, Goto
from envs.contract.registry import load_suite, longest_reset_s, make_env
from envs.suites.cuagym.env import CuagymEnv
from envs.tools.app_server import ask
from envs.tools.browser.process import find_chromium
from tests.envs.suites.cuagym.standin import ACTIONS, bundle, write_folder
from tests.waiting import lives, wait_until

try:
    find_chromium()
except MissingPartError as missing:
    pytest.skip(str(missing), allow_module_level=True)

FIRST, SECOND = Click(x=20, y=20), Click(x=20, y=60)
Open = Callable[..., CuagymEnv]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(
        tmp_path,
        {
            "both": bundle(actions_json=json.dumps(ACTIONS)),
            "plain": bundle(patch="state['notes'][0]['text'] = 'Wash car'"),
            "blank": bundle(patch="state['blank'] = True"),
            "setup-breaks": bundle(patch="raise SystemExit('no mail today')"),
            "reward-breaks": bundle(
                reward_py="# __CUA_GYM_NOTES_URL__\nif 0: print('REWARD: 1')\nraise ValueError('x')"
            ),
        },
    )


@pytest.fixture
def opened(folder: Path) -> Iterator[Open]:
    envs: list[CuagymEnv] = []

    def open_env(**options: Any) -> CuagymEnv:
        env = make_env(f"cuagym:{folder}", node=sys.executable, size="320x200", **options)
        assert isinstance(env, CuagymEnv)
        envs.append(env)
        return env

    yield open_env
    for env in envs:
        env.close()


def begin(env: CuagymEnv, task: str = "both") -> dict[str, Any]:
    observation, info = env.reset(seed=0, options={"task": f"cuagym/{task}"})
    assert (observation.width, observation.height) == (320, 200)
    return info


def states(env: CuagymEnv) -> list[Path]:
    """Return the files of sessions that the mock keeps."""
    assert env._session is not None
    return [path for folder in env._session.folders for path in folder.glob(".mock-states/*")]


def test_the_reward_program_gives_the_verdict(opened: Open) -> None:
    env = opened()
    info = begin(env)
    assert info["instruction"] == "Do both notes."
    assert env.evaluate().reward == 0.0
    env.step(FIRST)
    partial = env.evaluate()
    assert (partial.outcome, partial.reward) == ("fail", 0.5)
    assert "1 of 2 done" in partial.reason
    env.step(SECOND)
    _, reward, terminated, _, _ = env.step(Done())
    assert (reward, terminated) == (1.0, True)
    assert env.evaluate().outcome == "pass"


def test_a_setup_program_writes_the_first_state(opened: Open) -> None:
    env = opened()
    begin(env, "plain")
    assert [element.name for element in env.elements()] == ["Wash car", "Call Ann"]
    begin(env, "both")
    assert [element.name for element in env.elements()] == ["Buy milk", "Call Ann"]


def test_nothing_of_an_episode_is_left_for_the_next(opened: Open, folder: Path) -> None:
    env = opened()
    begin(env)
    env.step(FIRST)
    before = states(env)
    assert len(before) == 2  # the present state and the first one
    begin(env)
    assert not set(before) & set(states(env))
    assert env.gui.ask("localStorage.visits") == "1"
    assert env.evaluate().reward == 0.0
    assert not list((folder / "websites" / "notes_mock").glob(".mock-*"))


def test_two_at_once_share_a_mock_and_no_session(opened: Open) -> None:
    envs = [opened(), opened()]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(begin, envs))
        list(pool.map(lambda env: env.step(FIRST), envs[:1]))
    assert envs[0].evaluate().reward == 0.5
    assert envs[1].evaluate().reward == 0.0
    assert envs[0]._servers.pids() == envs[1]._servers.pids()
    assert len(envs[0]._servers.pids()) == 1


def test_a_solution_is_the_oracle(opened: Open) -> None:
    env = opened()
    begin(env)
    for _ in range(3):
        env.step(env.oracle_action())
    assert env.evaluate().outcome == "pass"
    begin(env)
    env.step(SECOND)
    with pytest.raises(EnvError, match="begins with other actions"):
        env.oracle_action()
    begin(env, "plain")
    with pytest.raises(NoOracleError):
        env.oracle_action()


def test_giving_up_fails(opened: Open) -> None:
    env = opened()
    begin(env)
    env.step(FIRST)
    _, reward, terminated, _, _ = env.step(Fail())
    assert (reward, terminated, env.evaluate().outcome) == (0.0, True, "fail")


def test_no_other_host_can_be_reached(opened: Open) -> None:
    env = opened()
    begin(env)
    env.step(Goto(url="http://127.0.0.1:1/"))
    assert [element.name for element in env.elements()] == ["Buy milk", "Call Ann"]


@pytest.mark.parametrize(
    ("task", "why"), [("blank", "is blank"), ("setup-breaks", "no mail today")]
)
def test_a_broken_task_breaks_at_reset_with_its_reason(opened: Open, task: str, why: str) -> None:
    env = opened()
    with pytest.raises(EnvError, match=why):
        begin(env, task)
    begin(env)


def test_a_reward_program_that_breaks_is_invalid(opened: Open) -> None:
    env = opened()
    begin(env, "reward-breaks")
    verdict = env.evaluate()
    assert verdict.outcome == "invalid"
    assert "ValueError: x" in verdict.reason


def test_a_mock_that_dies_costs_that_episode(opened: Open) -> None:
    env = opened()
    begin(env)
    assert env._session is not None
    [host] = env._session.hosts.values()
    with pytest.raises(EnvError):
        ask("GET", f"http://{host}/die")
    wait_until(lambda: not env._servers.pids(), "the end of the mock")
    assert env.evaluate().outcome == "invalid"
    begin(env)
    env.step(FIRST)
    assert env.evaluate().reward == 0.5


def test_a_browser_that_dies_costs_that_episode(opened: Open) -> None:
    env = opened()
    begin(env)
    os.kill(env.gui.visit.browser.pid, signal.SIGKILL)
    with pytest.raises(EnvError):
        env.step(FIRST)
    begin(env)
    env.step(FIRST)
    assert env.evaluate().reward == 0.5


def test_closing_leaves_no_process_and_no_folder(opened: Open) -> None:
    env = opened()
    begin(env)
    pids = [*env.pids, env.gui.visit.browser.pid]
    below = [child.pid for pid in pids for child in psutil.Process(pid).children(recursive=True)]
    place, kept = env._programs.folder, states(env)
    env.close()
    env.close()
    wait_until(lambda: not any(map(lives, [*pids, *below])), "the end of all processes")
    assert not place.exists()
    assert not any(path.exists() for path in kept)
    with pytest.raises(EnvError, match="closed"):
        begin(env)


def test_a_reset_may_take_as_long_as_its_parts(folder: Path) -> None:
    short = longest_reset_s(f"cuagym:{folder}", {"program_s": 10.0})
    assert longest_reset_s(f"cuagym:{folder}", {"program_s": 100.0}) == short + 90


@pytest.mark.skipif(
    "DART_CUAGYM" not in os.environ, reason="set DART_CUAGYM to a folder for cuagym:FOLDER"
)
def test_solutions_pass_in_the_real_mocks() -> None:
    name = f"cuagym:{os.environ['DART_CUAGYM']}"
    env = make_env(name)
    assert isinstance(env, CuagymEnv)
    played = 0
    try:
        for task_id in load_suite(name).tasks:
            env.reset(seed=0, options={"task": task_id})
            try:
                action = env.oracle_action()
            except NoOracleError:
                continue
            assert env.evaluate().outcome == "fail"
            while not isinstance(action, Done):
                env.step(action)
                action = env.oracle_action()
            assert env.evaluate().outcome == "pass", task_id
            played += 1
    finally:
        env.close()
    assert played
