"""A file of tasks is read whole, or refused with the place; our actions become the worker's."""

import re
from pathlib import Path

import pytest

from bus.errors import TaskError
from dart_cuabench.actions import DONE, MOST_NOTCHES, payloads_of
from dart_cuabench.suite import CuabenchSuite
from envs.contract.actions import (
    Answer,
    Click,
    Done,
    DoubleClick,
    Drag,
    Fail,
    KeyDown,
    KeyPress,
    MouseDown,
    Move,
    Scroll,
    TripleClick,
    Type,
    Wait,
)  # fmt: skip
from envs.contract.registry import load_suite

SIZE = (100, 80)


def test_the_tasks_of_a_file(suite):
    suite = load_suite(suite)
    first = suite.tasks["cuabench/square-0"]
    assert (first.max_steps, first.split) == (6, "train")
    assert [task.split for task in suite.tasks.values()][:4] == ["train"] * 3 + ["heldout"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "tasks is missing"),
        ("tasks = []", "tasks: List should have at least 1"),
        ("[[tasks]]\n", r"tasks\.0 has no env_path"),
        ('env_path = "a"\n[[tasks]]\n[[tasks]]\n', "a second time"),
        ('env_path = "a"\n[[tasks]]\nstep = 3\n', r"tasks\.0\.step: Extra inputs"),
        ("env_path = ", "no TOML"),
    ],
)
def test_a_file_that_cannot_be_used_says_where(text, why, tmp_path):
    file = tmp_path / "tasks.toml"
    file.write_text(text)
    with pytest.raises(TaskError, match=why):
        CuabenchSuite(file)


def test_the_file_that_the_page_shows_can_be_used(tmp_path):
    page = Path(__file__).parents[3] / "docs" / "environments" / "cua-bench.md"
    blocks = re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    (text,) = (block for block in blocks if block.startswith("# slack.toml"))
    file = tmp_path / "slack.toml"
    file.write_text(text)
    tasks = list(CuabenchSuite(file).tasks)
    assert (tasks[0], tasks[-1], len(tasks)) == ("cuabench/slack_env-0", "cuabench/invite", 13)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(TaskError, match=r"missing\.toml"):
        CuabenchSuite(tmp_path / "missing.toml")


@pytest.mark.parametrize(
    ("action", "payloads"),
    [
        (Click(x=3, y=4), [{"type": "ClickAction", "x": 3, "y": 4}]),
        (Click(x=-3, y=400), [{"type": "ClickAction", "x": 0, "y": 79}]),
        (Click(x=3, y=4, button="right"), [{"type": "RightClickAction", "x": 3, "y": 4}]),
        (Click(x=3, y=4, button="middle"), [{"type": "MiddleClickAction", "x": 3, "y": 4}]),
        (DoubleClick(x=3, y=4), [{"type": "DoubleClickAction", "x": 3, "y": 4}]),
        (Move(x=3, y=4), [{"type": "MoveToAction", "x": 3, "y": 4, "duration": 0.0}]),
        (
            Drag(path=[(1, 2), (50, 50), (3, 4)]),
            [
                {
                    "type": "DragAction", "from_x": 1, "from_y": 2, "to_x": 3, "to_y": 4,
                    "duration": 1.0,
                }
            ],
        ),
        (
            Scroll(x=3, y=4, dy=-2),
            [
                {"type": "MoveToAction", "x": 3, "y": 4, "duration": 0.0},
                {"type": "ScrollAction", "direction": "up", "amount": 200},
            ],
        ),
        (Type(text="a\n"), [{"type": "TypeAction", "text": "a\n"}]),
        (KeyPress(keys=["enter"]), [{"type": "KeyAction", "key": "enter"}]),
        (KeyPress(keys=["ctrl", "a"]), [{"type": "HotkeyAction", "keys": ["ctrl", "a"]}]),
        (Wait(seconds=2), [{"type": "WaitAction", "seconds": 2}]),
        (Done(), [DONE]), (Fail(), [DONE]), (Answer(text="x"), [DONE]),
    ],
)  # fmt: skip
def test_actions_of_a_worker(action, payloads):
    assert payloads_of(action, SIZE) == payloads


@pytest.mark.parametrize(
    "action",
    [
        Click(x=1, y=1, modifiers=("ctrl",)), TripleClick(x=1, y=1), MouseDown(x=1, y=1),
        KeyDown(key="ctrl"), Scroll(x=1, y=1, dx=3), Drag(path=[(1, 1), (2, 2)], button="right"),
    ],
)  # fmt: skip
def test_what_a_worker_has_not_it_does_not_get(action):
    assert payloads_of(action, SIZE) == []


def test_a_wheel_turns_only_so_far():
    assert payloads_of(Scroll(x=1, y=1, dy=10**6), SIZE)[1]["amount"] == 100 * MOST_NOTCHES
