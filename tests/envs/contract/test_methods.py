"""One contract in every suite: `reset` takes a task's id or the Task, and refuses others in one wording.

No suite has its program here: a task that does not exist is told before one is looked for.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from bus.errors import DartError, EnvError, MissingPartError, TaskError
from dart_cli.config.schema import EnvConfig
from dart_cli.env.async_env import make_async_env
from envs.contract.base import GuiEnv, Task
from envs.contract.elements import as_explorable
from envs.contract.registry import MADE_OF, SHIPPED, load_suite, make_env
from envs.suites.explored.tasks import ExploredFile, ExploredTask, PathStep, write_file
from tests.envs.suites.cuagym import standin as cuagym_standin
from tests.envs.suites.mobilegym import standin as mobilegym_standin
from tests.examples.cuabench.worker_process import own_suite
from tests.simulated import SUITE

ROOT = Path(__file__).parents[3]
NOWHERE = "127.0.0.1:9"  # discard: nothing answers
SERVER = {"url": f"http://{NOWHERE}", "connect_s": 0}

_SERVED = '[[tasks]]\nid = "theirs"\n'
_CUABENCH = '[[tasks]]\nenv_path = "tasks/square"\nmax_steps = 6\n'


@dataclass(frozen=True)
class Played:
    """A suite, with options under which its program is not found."""

    suite: str  # {folder} is one of this test's
    options: dict[str, Any] = field(default_factory=dict)
    plays: bool = True  # else its program is missing here, and `reset` says so


PLAYED = [
    Played("apps"),
    Played("composed"),
    Played("desk"),
    Played("mini"),
    Played("recall"),
    Played(SUITE, {"speedup": 1e6}),
    Played("explored:{folder}"),
    Played(f"gym:{ROOT}/docs/examples/tiles_gym.py:TilesHooks"),
    Played(f"{ROOT}/docs/examples/guests_env.py:GuestsSuite"),
    Played(f"{ROOT}/docs/examples/login_env.py:LoginSuite"),
    Played("android", {"adb": "{folder}/adb"}, plays=False),
    Played("browsergym", {"chromium": "{folder}/chromium"}, plays=False),
    Played("{folder}/cuabench.py:suite", SERVER, plays=False),
    Played("desktop", plays=False),
    Played(
        f"web:{ROOT}/tests/envs/suites/web/board/board.toml",
        {"chromium": "{folder}/chromium"},
        plays=False,
    ),
    Played("cuagym:{folder}/hub", {"chromium": "{folder}/chromium"}, plays=False),
    Played("mobilegym:{folder}/phone", {"chromium": "{folder}/chromium"}, plays=False),
    Played("miniwob", {"chromium": "{folder}/chromium"}, plays=False),
    Played("openenv:openapp", SERVER, plays=False),
    Played("osworld", {"vm": "{folder}/none.qcow2"}, plays=False),
    Played(f"osworld:{ROOT}/envs/suites/osworld/tasks", {"vm": "{folder}/none.qcow2"}, plays=False),
]
NO_ENVIRONMENT = {"served"}
"""Suites whose tasks other programs play."""


def test_the_list_has_every_suite() -> None:
    listed = {each.suite.partition(":")[0] for each in PLAYED}
    assert {*SHIPPED, *MADE_OF} - NO_ENVIRONMENT <= listed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that suites are made of."""
    folder = tmp_path_factory.mktemp("contract")
    (folder / "cuabench.toml").write_text(_CUABENCH)
    own_suite(folder / "cuabench.toml")
    (folder / "served.toml").write_text(_SERVED)
    cuagym_standin.write_folder(folder / "hub", {"both": cuagym_standin.bundle()})
    mobilegym_standin.write_folder(folder / "phone")
    with closing(make_env("mini")) as env:
        env.reset(seed=0, options={"task": "mini/popup"})
        here = env.state().id  # type: ignore[attr-defined]
    task = ExploredTask(
        id="explored/one",
        application="mini",
        instruction="close the window",
        base="mini/popup",
        seeds=[0],
        path=[PathStep(screen=here, place="0", action="click")],
        targets=["elsewhere"],
        max_steps=3,
    )
    write_file(folder, ExploredFile(suite="mini", tasks=[task]))
    return folder


def name_of(case: Played) -> str:
    return case.suite.removeprefix("gym:").replace(f"{ROOT}/", "")


@pytest.fixture(params=PLAYED, ids=name_of)
def case(request: pytest.FixtureRequest, folder: Path) -> Played:
    found: Played = request.param
    options = {
        name: value.format(folder=folder) if isinstance(value, str) else value
        for name, value in found.options.items()
    }
    return replace(found, suite=found.suite.format(folder=folder), options=options)


@pytest.fixture
def env(case: Played, monkeypatch: pytest.MonkeyPatch) -> GuiEnv:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("DART_MOBILEGYM_PYTHON", sys.executable)
    try:
        env = make_env(case.suite, **case.options)
    except MissingPartError as missing:  # of suite desktop, which needs its packages to be loaded
        pytest.skip(str(missing))
    if case.suite == "desktop":  # it looks for its programs in places of its own
        monkeypatch.setattr(
            "envs.suites.desktop.env.PROGRAMS", {"no-such-program": "no-such-package"}
        )
    return env


def test_a_reset_takes_the_id_of_a_task_or_the_task(case: Played, env: GuiEnv) -> None:
    [task_id, task] = next(iter(load_suite(case.suite).tasks.items()))
    with closing(env):
        if case.plays:
            shots = [env.reset(seed=3, options={"task": each}) for each in (task_id, task, task_id)]
            instructions = {info["instruction"] for _, info in shots}
            assert len(instructions) == 1
            if case.suite != SUITE:  # its screens never repeat
                assert len({observation.screenshot for observation, _ in shots}) == 1
            return
        errors = []
        for each in (task_id, task):
            with pytest.raises(DartError) as refused:
                env.reset(seed=3, options={"task": each})
            assert not isinstance(refused.value, TaskError)  # the program is what is missing
            errors.append(str(refused.value))
        assert errors[0] == errors[1]


ASKED_FOR_NONE: list[dict[str, Any] | None] = [None, {}, {"task": None}, {"task": 3}]


@pytest.mark.parametrize("options", ASKED_FOR_NONE, ids=str)
def test_a_reset_without_a_task_is_refused_in_one_wording(
    case: Played, env: GuiEnv, options: dict[str, Any] | None
) -> None:
    with closing(env), pytest.raises(TaskError, match=r"^reset needs options=\{'task': \.\.\.\}"):
        env.reset(seed=3, options=options)


@pytest.mark.parametrize(
    "asked_as",
    [str, lambda task_id: Task(task_id, "any", "go on", max_steps=1)],
    ids=["id", "Task"],
)
def test_a_task_that_does_not_exist_is_refused_in_one_wording(
    case: Played, env: GuiEnv, asked_as: Callable[[str], object]
) -> None:
    suite = load_suite(case.suite)
    wrong = next(iter(suite.tasks)) + "x"
    message = f"^suite {re.escape(suite.name)} has no task {re.escape(repr(wrong))}; did you mean "
    with closing(env), pytest.raises(TaskError, match=message):
        env.reset(seed=3, options={"task": asked_as(wrong)})


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_carrier_of_environments_hands_the_refusal_on(isolation: str) -> None:
    async def refused() -> str:
        env = make_async_env(EnvConfig(suite="mini", isolation=isolation), "env")  # type: ignore[arg-type]
        try:
            with pytest.raises(EnvError) as error:
                await env.reset(Task("mini/poppup", "mini", "go on", max_steps=1), 3)
            return str(error.value)
        finally:
            await env.close()

    assert "suite mini has no task 'mini/poppup'; did you mean 'mini/popup'?" in asyncio.run(
        refused()
    )


def test_an_explorer_s_grid_hands_task_and_refusal_on() -> None:
    env, _ = as_explorable(make_env(SUITE, speedup=1e6))
    with closing(env):
        env.reset(seed=3, options={"task": "timed/000"})
        with pytest.raises(TaskError, match="suite timed has no task 'timed/00'"):
            env.reset(seed=3, options={"task": "timed/00"})


def test_a_task_that_is_left_out_is_refused_with_its_reason() -> None:
    left_out, reason = next(iter(load_suite("miniwob").left_out.items()))  # type: ignore[attr-defined]
    message = f"leaves out {left_out!r}: {re.escape(reason)}"
    env = make_env("miniwob", chromium="/nowhere")
    with closing(env), pytest.raises(TaskError, match=message):
        env.reset(options={"task": left_out})


def test_tasks_of_another_program_have_no_environment_here(folder: Path) -> None:
    with pytest.raises(TaskError, match="dart serve"):
        make_env(f"served:{folder}/served.toml")


@pytest.mark.parametrize(
    ("suite", "options", "message"),
    [
        ("browsergym", {"pause_s": -1.0}, "pause_s must be"),
        ("miniwob", {"scale": 99.0}, "scale must be"),
        ("android", {"pause_s": -1.0}, "pause_s must be"),
        ("desktop", {"settle_ms": -1.0}, "settle_ms must be"),
        ("osworld", {"boot_s": 0}, "boot_s must be"),
    ],
)
def test_an_option_s_mistake_is_told_before_a_program_is_looked_for(
    suite: str, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    missing = {"browsergym": "chromium", "miniwob": "chromium", "android": "adb"}
    if suite in missing:
        options = {**options, missing[suite]: "/nowhere"}
    with pytest.raises(TaskError, match=message):
        make_env(suite, **options)
