"""Promises of suite `desktop`: real applications, correct verdicts, and nothing left behind.

Real X servers and applications play; where one is not installed, these tests are skipped.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from bus.errors import EnvError, MissingPartError, TaskError
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
from envs.contract.base import GuiEnv, Solvable
from envs.contract.registry import check_parts, make_env
from envs.suites.desktop.accessibility import has_accessibility
from envs.suites.desktop.suite import DesktopSuite

try:
    check_parts("desktop", {})
except MissingPartError as missing:
    pytest.skip(str(missing), allow_module_level=True)

from envs.suites.desktop.env import DesktopEnv, filled
from envs.suites.desktop.getters import GETTERS, METRICS
from envs.suites.desktop.host_resources import FOLDER_PREFIX, find_programs
from envs.suites.desktop.keeper import descendants
from envs.suites.desktop.session import check_step
from envs.tools.draws import draw, fill
from tests.waiting import wait_until

SUITE = DesktopSuite()
SAVE = KeyPress(keys=["ctrl", "s"])
NOTE = "Documents/note.txt"


def task_file(folder: Path, name: str = "note", **changes: Any) -> Path:
    """A task of one text file in Mousepad, written to `folder`; it wants the text `changed`."""
    told: dict[str, Any] = {
        "id": name,
        "instruction": "Change the note.",
        "config": [
            {"type": "text", "parameters": {"path": NOTE, "lines": ["alpha beta gamma"]}},
            {"type": "open", "parameters": {"path": NOTE}},
        ],
        "evaluator": {
            "func": "same_text",
            "result": {"type": "text_file", "path": NOTE},
            "expected": {"type": "rule", "rules": {"expected": "changed"}},
        },
        **changes,
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(told))
    return path


def suite_of(folder: Path, **changes: Any) -> DesktopSuite:
    task_file(folder, **changes)
    return DesktopSuite(folder)


@pytest.fixture
def env() -> Iterator[DesktopEnv]:
    env = SUITE.make_env()
    yield env
    env.close()


def begin(env: DesktopEnv, task: str = "desktop/mousepad-append-line", seed: int = 7) -> int:
    """Start an episode; process id of its keeper."""
    env.reset(seed=seed, options={"task": task})
    return env.desktop.pid


def home(env: DesktopEnv) -> Path:
    assert env._session is not None
    return env._session.desktop.home


def perform(env: DesktopEnv, *actions: Action) -> None:
    for action in actions:
        env.step(action)


def step_until_it_breaks(env: DesktopEnv) -> None:
    """A kill is noticed at the next step or one of those after it."""
    for _ in range(8):
        env.step(Wait(seconds=0.1))


def pid_of(keeper: int, name: str) -> int:
    """The process below `keeper` whose program is called `name`."""
    for pid in descendants(keeper):
        with suppress(OSError):  # it ended meanwhile
            if Path(f"/proc/{pid}/comm").read_text().strip() == name:
                return pid
    raise AssertionError(f"{name} does not run")


def shorten_deadlines(env: DesktopEnv, seconds: float) -> None:
    """A short deadline from here on; the start of a desktop takes the time it needs."""
    assert env._session is not None
    shorter = replace(env.desktop.settings, deadline_s=seconds)
    env._session.settings = env.desktop.settings = shorter


def await_gone(*paths: Path) -> None:
    for path in paths:
        wait_until(lambda path=path: not path.exists(), f"the end of {path}", every_s=0.02)


def traces(env: DesktopEnv, keeper: int) -> list[Path]:
    """Everything that must be gone after the episode: processes, folder, the display's socket."""
    assert env._session is not None
    processes = [Path(f"/proc/{pid}") for pid in (keeper, *descendants(keeper))]
    found = [*processes, home(env).parent, env.desktop.socket]
    assert all(path.exists() for path in found[-2:])
    # The keeper, the server, the bus, the window manager, the application.
    assert sum(path.exists() for path in processes) >= 5
    return found


# --- the contract -----------------------------------------------------------------------------


def test_the_environment_keeps_the_contract(env: DesktopEnv) -> None:
    assert isinstance(env, GuiEnv)
    assert isinstance(env, Solvable)
    screen, info = env.reset(seed=1, options={"task": "desktop/mousepad-append-line"})
    image = Image.open(io.BytesIO(screen.screenshot))
    assert (image.width, image.height) == (screen.width, screen.height) == (1280, 720)
    assert len(image.convert("RGB").getcolors(1 << 20) or []) > 20
    assert "{" not in info["instruction"]


@pytest.mark.skipif(not has_accessibility(), reason="apt install at-spi2-core gir1.2-atspi-2.0")
def test_the_accessibility_tree_is_beside_the_screenshot_where_it_is_asked_for(
    tmp_path: Path,
) -> None:
    env = suite_of(tmp_path).make_env(observe=("accessibility",))
    try:
        screen, _ = env.reset(seed=1, options={"task": "desktop/note"})
        text = screen.texts["accessibility"]
        assert "alpha beta gamma" in text
        found = re.search(r'^menu "File" @\((\d+),(\d+)\)$', text, re.MULTILINE)
        assert found is not None, text
        opened = env.step(Click(x=int(found[1]), y=int(found[2])))[0].texts["accessibility"]
        assert 'menu item "Save"' in opened
        assert 'menu item "Save"' not in text
        assert env.step(Done())[0].texts == {}, "no policy sees the last screen"
    finally:
        env.close()


def test_the_same_seed_gives_the_same_episode_pixel_by_pixel(env: DesktopEnv) -> None:
    def first(seed: int) -> tuple[bytes, str]:
        screen, info = env.reset(seed=seed, options={"task": "desktop/mousepad-append-line"})
        return screen.screenshot, info["instruction"]

    one = first(1)
    assert first(1) == one
    assert first(2) != one


def test_every_kind_of_action_reaches_the_application(tmp_path: Path) -> None:
    env = suite_of(tmp_path, max_steps=50).make_env(encoding="jpeg")
    try:
        begin(env, "desktop/note")
        note = home(env) / NOTE

        perform(env, DoubleClick(x=60, y=57), Type(text="Größe €∑"), SAVE)
        assert note.read_text() == "alpha Größe €∑ gamma\n"
        perform(env, Drag(path=[(2, 57), (400, 57)]), Type(text="one\ntwo\tthree"), SAVE)
        assert note.read_text() == "one\ntwo\tthree\n"
        perform(env, Click(x=20, y=57), KeyPress(keys=["shift", "end"]), KeyPress(keys=["delete"]))
        perform(env, Type(text="x" + "\n" * 60), SAVE)
        assert note.read_text().startswith("onx\n\n")
        low = env.step(Move(x=300, y=300))[0].screenshot
        high = env.step(Scroll(x=300, y=300, dy=-40))[0].screenshot
        assert env.step(Wait(seconds=0.2))[0].screenshot == high != low
        perform(env, Scroll(x=300, y=300, dy=-40), Click(x=20, y=57), Type(text="top "), SAVE)
        assert note.read_text().startswith("ontop x\n")
        shown = env.step(Click(x=300, y=300, button="right"))[0].screenshot
        assert shown != env.step(KeyPress(keys=["escape"]))[0].screenshot
    finally:
        env.close()


def test_more_strange_characters_than_spare_keys_all_arrive(tmp_path: Path) -> None:
    env = suite_of(tmp_path, max_steps=9).make_env()
    strange = "".join(map(chr, range(0x4E00, 0x4E50)))
    try:
        begin(env, "desktop/note")
        for text in (f"{strange} abc", f"{strange[::-1]} Größe €∑ {strange[:30]}"):
            perform(env, KeyPress(keys=["ctrl", "a"]), Type(text=text), SAVE)
            assert (home(env) / NOTE).read_text().rstrip("\n") == text
    finally:
        env.close()


def test_an_action_that_hits_nothing_is_harmless(env: DesktopEnv) -> None:
    begin(env)
    before = env.step(Move(x=1270, y=700))[0].screenshot
    for action in (
        *(Click(x=5000, y=5), Click(x=-1, y=0), Drag(path=[(5, 300), (5, 9000)])),
        *(KeyPress(keys=["no-such-key"]), KeyPress(keys=["ctrl", "ȣx"]), Type(text="")),
    ):
        assert env.step(action)[0].screenshot == before


# --- tasks ------------------------------------------------------------------------------------


def test_the_suite_holds_thirty_tasks_over_six_applications() -> None:
    assert SUITE.errors == ()
    assert len(SUITE.files) >= 30
    assert len({task.snapshot for task in SUITE.files.values()}) >= 6
    assert {task.split for task in SUITE.files.values()} == {"train", "heldout"}


@pytest.mark.parametrize("task_id", SUITE.files)
def test_a_task_file_is_complete(task_id: str) -> None:
    task = SUITE.files[task_id]
    assert task.solution
    assert len(task.near_misses) >= 3
    scripts = [task.solution, *(near.actions for near in task.near_misses)]
    assert len({repr(script) for script in scripts}) == len(scripts)
    assert len(task.solution) <= task.max_steps
    for step in (*task.config, *task.evaluator.postconfig):
        check_step(step)
    for check in task.evaluator.checks:
        assert check.func in METRICS or task.evaluator.infeasible
        for getter in (check.result, check.expected):
            assert getter is None or getter.type in GETTERS
    for seed in range(50):
        instance = filled(task, seed)
        wrong = [near.actions for near in instance.near_misses]
        assert len({repr(actions) for actions in (instance.solution, *wrong)}) == len(wrong) + 1, (
            seed
        )
    told = {filled(task, seed).instruction for seed in range(8)}
    assert not any("{" in each for each in told)
    if task.draw and "{" in task.instruction:
        assert len(told) > 1


@pytest.mark.parametrize(
    "task_id",
    [
        *("mousepad-replace-word", "pcmanfm-move", "galculator-root", "calc-ods"),
        *("galculator-display", "gimp-flip"),
    ],
)
def test_a_solution_passes(env: DesktopEnv, task_id: str) -> None:
    if f"desktop/{task_id}" not in SUITE.tasks:
        pytest.skip(f"what {task_id} needs is not installed: docs/environments/desktop.md")
    begin(env, f"desktop/{task_id}", seed=11)
    while True:
        _, reward, over, _, _ = env.step(env.oracle_action())
        if over:
            break
    assert (env.evaluate().outcome, reward) == ("pass", 1.0), env.evaluate()


def test_near_misses_fail(env: DesktopEnv) -> None:
    for number in range(3):
        begin(env, seed=5)
        near = env.task.near_misses[number]
        for action in near.actions:
            _, reward, _, _, _ = env.step(action)
        assert (env.evaluate().outcome, reward) == ("fail", 0.0), near.why


def test_a_task_that_cannot_be_done_passes_only_by_giving_up(tmp_path: Path) -> None:
    env = suite_of(tmp_path, evaluator={"func": "infeasible"}, max_steps=2).make_env()
    try:
        outcomes = {}
        for last in (Answer(text="impossible"), Fail(), Wait(seconds=0)):
            begin(env, "desktop/note")
            env.step(Wait(seconds=0))
            _, _, over, truncated, _ = env.step(last)
            assert over != truncated
            outcomes[last.kind] = env.evaluate().outcome
        assert outcomes == {"answer": "fail", "fail": "pass", "wait": "fail"}
    finally:
        env.close()


def test_giving_up_a_task_that_can_be_done_fails(env: DesktopEnv) -> None:
    begin(env)
    env.step(Fail())
    assert env.evaluate().outcome == "fail"


def test_a_task_that_is_solved_before_it_begins_is_invalid(tmp_path: Path) -> None:
    config = [
        {"type": "text", "parameters": {"path": NOTE, "lines": ["changed"]}},
        {"type": "open", "parameters": {"path": NOTE}},
    ]
    env = suite_of(tmp_path, config=config).make_env()
    try:
        with pytest.raises(EnvError, match="note is solved before it begins"):
            begin(env, "desktop/note")
        assert env.evaluate().outcome == "invalid"
    finally:
        env.close()


def test_an_evaluator_that_breaks_makes_the_episode_invalid(tmp_path: Path) -> None:
    evaluator: Mapping[str, Any] = {
        "func": "near",
        "result": {"type": "text_file", "path": NOTE},
        "expected": {"type": "rule", "rules": {"expected": 1.0}},
        "options": {"tolerance": "wide"},
    }
    env = suite_of(tmp_path, evaluator=evaluator).make_env()
    try:
        begin(env, "desktop/note")
        perform(env, KeyPress(keys=["ctrl", "a"]), Type(text="1"), SAVE)
        env.step(Done())
        verdict = env.evaluate()
        assert verdict.outcome == "invalid"
        assert "the evaluator broke" in verdict.reason
    finally:
        env.close()


def test_a_malformed_task_costs_only_itself(tmp_path: Path) -> None:
    task_file(tmp_path, "bad", max_steps=0)
    suite = suite_of(tmp_path)
    assert list(suite.tasks) == ["desktop/note"]
    assert [str(error) for error in suite.errors] == [
        f"{tmp_path / 'bad.json'}: max_steps must be greater than or equal to 1, got 0"
    ]


def test_a_task_with_an_unknown_step_parameter_or_draw_is_refused_by_file(tmp_path: Path) -> None:
    task_file(tmp_path, "step", config=[{"type": "opne", "parameters": {}}])
    task_file(tmp_path, "parameter", config=[{"type": "text", "parameters": {"file": "x"}}])
    task_file(tmp_path, "draw", draw={"n": {"pick": [1]}})
    env = DesktopSuite(tmp_path).make_env()
    try:
        for name, told in (
            ("step", "no set-up step 'opne'; there are activate_window"),
            ("parameter", "set-up step text: .* unexpected keyword argument 'file'"),
            ("draw", "draw: draw.n must be one of choice"),
        ):
            with pytest.raises(TaskError, match=rf"{name}\.json: {told}"):
                begin(env, f"desktop/{name}")
    finally:
        env.close()


def test_draws_repeat_and_malformed_ones_are_refused() -> None:
    spec = {"n": {"integers": [1, 9, 3]}, "s": {"sum": "{n}"}, "text": {"value": "{n[0]}-{s}"}}
    values = draw(spec, "t", 1)
    assert values == draw(spec, "t", 1)
    assert values["s"] == sum(values["n"])
    assert fill(["{s}", "is {s}", "{other}"], values) == [
        values["s"],
        f"is {values['s']}",
        "{other}",
    ]
    for wrong, told in (
        ({"a": {"pick": [1]}}, "draw.a must be one of"),
        ({"a": {"choice": []}}, "draw.a: choice"),
        ({"a": {"value": "{b}"}, "b": {"value": 1}}, "draw.a names b, which must come before"),
    ):
        with pytest.raises(TaskError, match=told):
            draw(wrong, "t", 1)


# --- breaks and traces ------------------------------------------------------------------------


@pytest.mark.parametrize("victim", ["mousepad", "Xvfb"])
def test_a_killed_process_breaks_its_episode_and_leaves_nothing(
    env: DesktopEnv, victim: str
) -> None:
    keeper = begin(env)
    left = traces(env, keeper)
    os.kill(pid_of(keeper, victim), signal.SIGKILL)
    with pytest.raises(EnvError, match=rf"{victim} crashed: signal 9|the desktop ended"):
        step_until_it_breaks(env)
    assert env.evaluate().outcome == "invalid"
    await_gone(*left)
    begin(env)
    assert env.evaluate().outcome == "fail"


def test_an_application_that_hangs_breaks_its_episode(tmp_path: Path) -> None:
    env = suite_of(tmp_path).make_env()
    try:
        keeper = begin(env, "desktop/note")
        shorten_deadlines(env, 2.0)
        left = traces(env, keeper)
        os.kill(pid_of(keeper, "mousepad"), signal.SIGSTOP)
        with pytest.raises(EnvError, match="did not answer in 2 s"):
            env.step(Type(text="x"))
        await_gone(*left)
    finally:
        env.close()


def test_a_server_that_hangs_breaks_its_episode(tmp_path: Path) -> None:
    env = suite_of(tmp_path).make_env()
    try:
        keeper = begin(env, "desktop/note")
        shorten_deadlines(env, 1.0)
        left = traces(env, keeper)
        os.kill(pid_of(keeper, "Xvfb"), signal.SIGSTOP)
        with pytest.raises(EnvError, match="action click took 2 s"):
            env.step(Click(x=5, y=5))
        await_gone(*left)
    finally:
        env.close()


def test_an_application_over_the_memory_limit_is_ended(tmp_path: Path) -> None:
    eater = ["/usr/bin/python3", "-c", "x = b'x' * (900 << 20)\nwhile True: pass"]
    if not Path(eater[0]).exists():
        pytest.skip("no /usr/bin/python3 to allocate memory with")
    config = [{"type": "launch", "parameters": {"command": eater}}]
    env = suite_of(tmp_path, config=config).make_env(memory_mb=512)
    try:
        with pytest.raises(EnvError, match="MB of memory used, more than 512"):
            begin(env, "desktop/note")
    finally:
        env.close()


def test_a_missing_program_is_named(tmp_path: Path) -> None:
    config = [{"type": "launch", "parameters": {"command": ["no-such-program"]}}]
    env = suite_of(tmp_path, config=config).make_env()
    try:
        with pytest.raises(EnvError, match=r"no-such-program crashed: .*No such file"):
            begin(env, "desktop/note")
    finally:
        env.close()


def test_a_program_that_is_run_gives_its_output_or_its_failure(env: DesktopEnv) -> None:
    begin(env)
    for word in ("one", "two"):
        assert env.desktop.run("echo", ["echo", word]) == f"{word}\n"
    with pytest.raises(EnvError, match="false crashed: status 1"):
        env.desktop.run("false", ["false"])


def test_nothing_outlives_a_killed_owner(env: DesktopEnv) -> None:
    script = (
        "import time\n"
        "from envs.contract.registry import make_env\n"
        "env = make_env('desktop')\n"
        "env.reset(seed=1, options={'task': 'desktop/mousepad-append-line'})\n"
        "print(env._session.desktop.pid, env._session.desktop.home.parent, flush=True)\n"
        "time.sleep(60)\n"
    )
    paths = os.pathsep.join(each for each in sys.path if each)
    owner = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    try:
        assert owner.stdout is not None
        keeper, folder = owner.stdout.readline().split()
        left = [Path(f"/proc/{pid}") for pid in (keeper, *descendants(int(keeper)))]
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    await_gone(*left, Path(folder))


def test_a_killed_keeper_leaves_nothing(env: DesktopEnv) -> None:
    keeper = begin(env)
    left = traces(env, keeper)
    os.kill(keeper, signal.SIGKILL)
    with pytest.raises(EnvError, match="keeper of the desktop"):
        step_until_it_breaks(env)
    await_gone(*left)


def test_desktops_run_side_by_side(env: DesktopEnv) -> None:
    other = SUITE.make_env()
    try:
        begin(env, seed=1)
        begin(other, seed=1)
        assert home(env) != home(other)
        perform(env, Type(text="mine "), SAVE)
        mine, others = (next((home(each) / "Documents").iterdir()) for each in (env, other))
        assert mine.read_text().startswith("mine ")
        assert "mine" not in others.read_text()
    finally:
        other.close()


def test_applications_are_not_root(env: DesktopEnv) -> None:
    keeper = begin(env)
    count = 0
    for pid in (keeper, *descendants(keeper)):
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            status = Path(f"/proc/{pid}/status").read_text()
            uids = next(line for line in status.splitlines() if line.startswith("Uid:")).split()[1:]
            assert "0" not in uids, status
            count += 1
    assert count >= 5


def test_a_closed_environment_leaves_no_open_files() -> None:
    def files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = files()
    env = SUITE.make_env()
    left = traces(env, begin(env))
    env.close()
    env.close()
    await_gone(*left)
    assert files() == before
    with pytest.raises(EnvError, match="closed"):
        begin(env)


# --- options and parts ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"size": "640x480"}, "size must be 800x600 to 3840x2160, got 640x480"),
        ({"encoding": "gif"}, "encoding must be .png. or .jpeg."),
        ({"settle_ms": -1}, "settle_ms must be greater than or equal to 0"),
        ({"deadline_s": 0}, "deadline_s must be greater than 0"),
        ({"memory_mb": 10}, "memory_mb must be greater than or equal to 512"),
        ({"settle": 3}, "no option 'settle'; did you mean 'settle_ms'"),
    ],
)
def test_a_wrong_option_is_refused_with_the_valid_range(options: dict[str, Any], told: str) -> None:
    with pytest.raises(TaskError, match=told):
        make_env("desktop", **options)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs applications as another user")
def test_applications_need_a_user_that_is_not_root() -> None:
    for user, told in (("root", "do not run as root"), ("no-such-user", "no user 'no-such-user'")):
        with pytest.raises(TaskError, match=told):
            make_env("desktop", user=user)


def test_a_missing_program_names_the_install_step() -> None:
    with pytest.raises(MissingPartError, match="apt install nothing-such xvfb"):
        find_programs({"no-such-a": "xvfb", "no-such-b": "nothing-such", "sh": "dash"})


def test_folders_of_killed_desktops_are_removed_at_the_next_start(env: DesktopEnv) -> None:
    stale = Path(tempfile.gettempdir()) / f"{FOLDER_PREFIX}stale"
    stale.mkdir()
    (stale / "dart.lock").touch()
    half_removed = stale.with_name(f"{FOLDER_PREFIX}half")
    half_removed.mkdir()
    os.utime(half_removed, (0, 0))
    begin(env)
    assert not stale.exists()
    assert not half_removed.exists()
