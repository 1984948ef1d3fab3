"""scripts/foreign_rows: what rows of other projects become, and what is refused with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from bus.errors import UserError
from dart_cli.grounding.reader import read_set
from dart_cli.tune.episodes import Demonstration, read_episodes
from envs.contract.actions import (
    Action,
    Answer,
    Click,
    Done,
    DoubleClick,
    Drag,
    Fail,
    Goto,
    KeyDown,
    KeyPress,
    KeyUp,
    MouseDown,
    MouseUp,
    Move,
    Scroll,
    TripleClick,
    Type,
    Wait,
)
from scripts.foreign_rows.__main__ import convert
from scripts.foreign_rows.opencua import action_of, actions_of

SIZE = (200, 100)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with two screenshots."""
    (tmp_path / "images").mkdir()
    for name in ("a.png", "b.png"):
        Image.new("RGB", (168, 168), (name[0] == "a" and "red") or "blue").save(
            tmp_path / "images" / name
        )
    return tmp_path


def agentnet(**changes: Any) -> dict[str, Any]:
    """An episode of two steps as OpenCUA has it."""
    steps = [
        ("a.png", "pyautogui.click(x=0.5, y=0.25)", "I open the menu."),
        ("b.png", "computer.terminate(status='success')", "It is open."),
    ]
    traj = [
        {"index": i, "image": image, "value": {"code": code, "thought": thought}}
        for i, (image, code, thought) in enumerate(steps)
    ]
    row = {"instruction": "open the menu", "task_completed": True, "traj": traj}
    return row | changes


def converted(layout: str, folder: Path) -> list[Demonstration]:
    convert(layout, folder, skip_malformed=True)
    return read_episodes(folder)


def write_lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path.parent


@pytest.mark.parametrize(
    ("code", "action"),
    [
        ("pyautogui.click(x=0.5, y=0.25)", Click(x=100, y=25)),
        ("pyautogui.click(1.0, 1.0)", Click(x=199, y=99)),
        ("pyautogui.click(x=0, y=0, clicks=2)", DoubleClick(x=0, y=0)),
        ("pyautogui.rightClick(x=0.5, y=0.5)", Click(x=100, y=50, button="right")),
        ("pyautogui.doubleClick(x=0.5, y=0.5)", DoubleClick(x=100, y=50)),
        ("computer.tripleClick(x=0.5, y=0.5)", TripleClick(x=100, y=50)),
        ("pyautogui.moveTo(x=0.5, y=0.5)", Move(x=100, y=50)),
        (
            "pyautogui.moveTo(x=0.1, y=0.1)\npyautogui.dragTo(x=0.5, y=0.5, button='left')",
            Drag(path=[(20, 10), (100, 50)]),
        ),
        ("pyautogui.scroll(-3)", Scroll(x=100, y=50, dy=3)),
        ("pyautogui.moveTo(0.1, 0.1)\npyautogui.scroll(2)", Scroll(x=20, y=10, dy=-2)),
        ("pyautogui.hscroll(4)", Scroll(x=100, y=50, dx=4)),
        ("pyautogui.hotkey(['ctrl', 'c'])", KeyPress(keys=["ctrl", "c"])),
        ("pyautogui.hotkey('command', 'c')", KeyPress(keys=["meta", "c"])),
        ("pyautogui.press('enter')", KeyPress(keys=["enter"])),
        ("pyautogui.write(message='a b')", Type(text="a b")),
        ("computer.wait(2)", Wait(seconds=2)),
        ("computer.terminate(status='success')", Done()),
        ("computer.terminate(status='failure')", Fail()),
    ],
)
def test_code_of_pyautogui_is_an_action(code: str, action: Action) -> None:
    assert action_of(code, SIZE)[0] == action


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("pyautogui.click(x=1.5, y=0.5)", "beyond the screen"),
        ("pyautogui.click()", "a place that is not known"),
        ("pyautogui.press('a', presses=3)", "one press is one action"),
        ("pyautogui.press('a'); pyautogui.press('b')", "2 actions in one step"),
        ("pyautogui.alert('hi')", "there is no call 'pyautogui.alert'"),
        ("__import__('os').system('x')", "a call is NAME"),
        ("pyautogui.write(message=open('x').read())", "literal|plain|value|text"),
        ("pyautogui.click(x=0.5, y=0.5, colour='red')", "no argument"),
        ("x = 1", "is no call"),
        ("click(", "is no Python"),
    ],
)
def test_code_that_is_no_action_of_ours_is_refused(code: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        action_of(code, SIZE)


def test_the_pointer_stays_where_it_was() -> None:
    _, pointer = action_of("pyautogui.click(x=0.5, y=0.25)", SIZE)
    assert action_of("pyautogui.scroll(-1)", SIZE, pointer)[0] == Scroll(x=100, y=25, dy=1)


def test_episodes_of_opencua_are_demonstrations(home: Path) -> None:
    wrong = agentnet()
    wrong["traj"][0]["value"]["last_step_correct"] = False
    failed = agentnet(task_completed=False)
    bad = agentnet(instruction="")
    lost = agentnet()
    lost["traj"][1]["image"] = "../../etc/passwd"
    folder = write_lines(home / "agentnet_test.jsonl", agentnet(), wrong, failed, bad, lost)
    with pytest.raises(
        UserError, match=r"2 rows are malformed, the first is agentnet_test.jsonl\[3\].*--skip"
    ):
        convert("opencua", folder)
    told = convert("opencua", folder, skip_malformed=True)
    assert "2 rows, 1 of failures or other kinds left out, 2 malformed ones left out" in told
    first, other = read_episodes(folder)
    assert [action for step in first.steps for action in step.actions] == [
        Click(x=84, y=42),
        Done(),
    ]
    assert first.steps[0].thought == "I open the menu."
    assert [step.learned for step in other.steps] == [False, True]


def lite(*actions: dict[str, Any], **others: Any) -> dict[str, Any]:
    """An episode of one action as CUA-Lite has it."""
    arguments = {"actions": list(actions)}
    call = {"id": "call_0000", "type": "function"}
    return {
        "images": ["a.png", "images/b.png"],
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image", "index": 0}, {"type": "text", "text": "open it"}],
            },
            {
                "role": "assistant",
                "content": [{"type": "inline_reasoning", "text": "So."}],
                "tool_calls": [call | {"function": {"name": "computer", "arguments": arguments}}],
            },
            {
                "role": "tool",
                "tool_call_id": "call_0000",
                "content": [{"type": "image", "index": 1}],
            },
            {"role": "assistant", "content": [{"type": "text", "text": "Done."}]},
        ],
        "metadata": {"dims": ["desktop", "use"], "others": others},
    }


CLICK = {"action": "click", "coordinate": [500, 250]}


@pytest.mark.parametrize(
    ("actions", "action"),
    [
        ([CLICK], Click(x=84, y=42)),
        ([CLICK | {"button": "right"}], Click(x=84, y=42, button="right")),
        ([CLICK | {"clicks": 2}], DoubleClick(x=84, y=42)),
        ([CLICK | {"action": "mouse_move"}], Move(x=84, y=42)),
        (
            [CLICK | {"action": "mouse_move"}, {"action": "drag", "coordinate": [1000, 1000]}],
            Drag(path=[(84, 42), (167, 167)]),
        ),
        ([{"action": "scroll", "direction": "down", "amount": 3}], Scroll(x=84, y=84, dy=3)),
        ([{"action": "key", "keys": ["ctrl", "o"]}], KeyPress(keys=["ctrl", "o"])),
        ([{"action": "type", "text": "hello"}], Type(text="hello")),
        ([{"action": "type", "text": "cats\n"}], Type(text="cats\n")),  # submits
        ([{"action": "type", "text": " and dogs"}], Type(text=" and dogs")),
        ([{"action": "type", "text": "\n"}], Type(text="\n")),
        ([{"action": "type", "text": " "}], Type(text=" ")),
        ([{"action": "key", "keys": ["esc"]}], KeyPress(keys=["escape"])),
        ([{"action": "key", "keys": ["return"]}], KeyPress(keys=["enter"])),
        ([{"action": "key", "keys": ["cmd", "a"]}], KeyPress(keys=["meta", "a"])),
        ([{"action": "key", "keys": ["ctrl+c"]}], KeyPress(keys=["ctrl", "c"])),
        ([{"action": "key", "keys": ["ctrl", "+"]}], KeyPress(keys=["ctrl", "+"])),
        ([{"action": "key_down", "keys": ["Shift"]}], KeyDown(key="shift")),
        ([{"action": "key_up", "keys": ["shift"]}], KeyUp(key="shift")),
        ([{"action": "wait", "duration": 2}], Wait(seconds=2)),
        ([{"action": "wait", "duration": 0}], Wait(seconds=0)),
        ([CLICK | {"action": "mouse_move"}, {"action": "click"}], Click(x=84, y=42)),
        (
            [CLICK | {"action": "mouse_move"}, {"action": "mouse_down", "button": "right"}],
            MouseDown(x=84, y=42, button="right"),
        ),
        ([{"action": "mouse_up"}], MouseUp()),
        (
            [CLICK | {"action": "scroll", "direction": "up", "amount": 2.0}],
            Scroll(x=84, y=42, dy=-2),
        ),
        (
            [CLICK | {"action": "drag", "start_coordinate": [0, 0], "button": None}],
            Drag(path=[(0, 0), (84, 42)]),
        ),
    ],
)
def test_tool_calls_of_cua_lite_are_actions(
    home: Path, actions: list[dict[str, Any]], action: Action
) -> None:
    [row] = converted("cua-lite", write_lines(home / "rows.jsonl", lite(*actions)))
    assert (row.instruction, row.steps[0].thought) == ("open it", "So.")
    assert [action for step in row.steps for action in step.actions] == [action, Done()]
    assert [step.screenshot.name for step in row.steps] == ["a.png", "b.png"]


@pytest.mark.parametrize(
    ("tool", "arguments", "action"),
    [
        ("response", {"text": " 42\n"}, Answer(text=" 42\n")),
        ("terminate", {"status": "success", "reason": None}, Done()),
        ("terminate", {"status": "failure"}, Fail()),
        ("report_infeasible", {"reason": "no such app"}, Fail()),
        ("goto", {"url": "https://a.org/"}, Goto(url="https://a.org/")),
    ],
)
def test_tools_of_their_own_of_cua_lite_are_actions(
    home: Path, tool: str, arguments: dict[str, Any], action: Action
) -> None:
    row = lite()
    [call] = row["messages"][1]["tool_calls"]
    call["function"] = {"name": tool, "arguments": json.dumps(arguments)}
    [episode] = converted("cua-lite", write_lines(home / "rows.jsonl", row))
    assert episode.steps[0].actions == (action,)


def test_instructions_and_thoughts_are_learned_as_they_stand(home: Path) -> None:
    row = lite(CLICK)
    row["messages"][0]["content"][1]["text"] = " open it\n"
    row["messages"][1]["content"][0]["text"] = "So.\n\nThere"
    [episode] = converted("cua-lite", write_lines(home / "rows.jsonl", row))
    assert (episode.instruction, episode.steps[0].thought) == (" open it\n", "So.\n\nThere")


def test_a_click_without_a_place_is_where_the_last_one_was(home: Path) -> None:
    row = lite(CLICK)
    again = json.loads(json.dumps(row["messages"][1:3]))
    [call] = again[0]["tool_calls"]
    call["function"]["arguments"]["actions"] = [{"action": "click", "clicks": 2}]
    row["messages"][3:3] = again
    [episode] = converted("cua-lite", write_lines(home / "rows.jsonl", row))
    assert [action for step in episode.steps for action in step.actions] == [
        Click(x=84, y=42),
        DoubleClick(x=84, y=42),
        Done(),
    ]


def test_steps_of_several_actions_are_read_up_to_a_bound(home: Path) -> None:
    typed = {"action": "type", "text": "a"}
    folder = write_lines(
        home / "rows.jsonl", lite(CLICK, typed, {"action": "drag", "coordinate": [0, 0]})
    )
    with pytest.raises(UserError, match=r"does 3 things .*; a step of ours has one action"):
        convert("cua-lite", folder)
    with pytest.raises(UserError, match="a step of ours has at most 2"):
        convert("cua-lite", folder, max_actions=2)
    convert("cua-lite", folder, max_actions=3)
    [episode] = read_episodes(folder)
    assert [step.actions for step in episode.steps] == [
        (Click(x=84, y=42), Type(text="a"), Drag(path=[(84, 42), (0, 0)])),
        (Done(),),
    ]


def test_code_of_several_actions_is_read_up_to_a_bound() -> None:
    code = "pyautogui.click(x=0.5, y=0.25)\npyautogui.write(message='a')\npyautogui.hotkey('ctrl', 's')"
    actions, pointer = actions_of(code, SIZE, None, 3)
    assert actions == [Click(x=100, y=25), Type(text="a"), KeyPress(keys=["ctrl", "s"])]
    assert pointer == (100, 25)
    for most in (1, 2):
        with pytest.raises(ValueError, match=r"3 actions"):
            actions_of(code, SIZE, None, most)
    with pytest.raises(ValueError, match="no place"):
        actions_of("pyautogui.write(message='a')\npyautogui.click()", SIZE, None, 3)


@pytest.mark.parametrize("change", [{"others": "x"}, {"dims": 5}])
def test_metadata_of_another_form_is_told(home: Path, change: dict[str, Any]) -> None:
    row = lite(CLICK)
    row["metadata"] |= change
    with pytest.raises(UserError, match=r"rows.jsonl\[0\]: metadata.others must be an object"):
        convert("cua-lite", write_lines(home / "rows.jsonl", row))


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_rows_that_another_program_wrote_are_read(home: Path, encoding: str) -> None:
    text = f"{json.dumps(lite(CLICK))}\r\n\r\n{json.dumps(lite(CLICK))}\r\n\r\n"
    (home / "rows.jsonl").write_bytes(text.encode(encoding))
    assert len(converted("cua-lite", home)) == 2
    whole = (home / "episodes.jsonl").read_text().replace("\n", "\r\n\r\n")
    (home / "episodes.jsonl").write_bytes(whole.encode(encoding))
    assert len(read_episodes(home)) == 2


def test_rows_of_cua_lite_in_parquet_are_those_in_json(home: Path) -> None:
    rows = [lite(CLICK, terminate_status="failure"), lite(CLICK, task_completed=False)]
    packed = [{key: json.dumps(value) for key, value in row.items()} for row in rows]
    pq.write_table(pa.Table.from_pylist(packed), home / "rows.parquet")
    [row] = converted("cua-lite", home)
    assert [action for step in row.steps for action in step.actions] == [Click(x=84, y=42), Fail()]


def test_a_file_whose_first_row_is_broken_is_not_left_out(home: Path) -> None:
    (home / "a.jsonl").write_text(f"{{broken\n{json.dumps(lite(CLICK))}\n")
    (home / "b.jsonl").write_text(json.dumps(lite(CLICK)))
    with pytest.raises(UserError, match=r"1 rows are malformed, the first is a.jsonl\[0\]"):
        convert("cua-lite", home)


def test_damaged_parquet_is_told_by_its_file(home: Path) -> None:
    packed = [{key: json.dumps(value) for key, value in lite(CLICK).items()}] * 100
    path = home / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(packed), path)
    content = bytearray(path.read_bytes())
    content[30:120] = b"\xff" * 90
    path.write_bytes(content)
    with pytest.raises(
        UserError, match=r"rows.parquet cannot be read as Parquet: .*; copy it again"
    ):
        convert("cua-lite", home)


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([CLICK, CLICK], r"rows.jsonl\[0\]: messages\[1\]: does 2 things"),
        ([{"action": "tap"}], "'tap' is none of"),
        ([CLICK | {"coordinate": [1200, 3]}], "not within 0 and 1000"),
        ([{"action": "key", "keys": "ctrl"}], "are no keys"),
        ([{"action": "key", "keys": ["ctrl", "C"]}], "'C' is a capital letter"),
        ([{"action": "key_down", "keys": ["ctrl", "c"]}], "one key"),
        ([{"action": "hold_key", "keys": ["a"], "duration": 1}], "'hold_key' is none of"),
        ([{"action": "click"}], "no earlier action moved the pointer"),
        ([CLICK | {"clicks": 0}], "clicks must be a number from 1 to 3"),
        ([CLICK | {"clicks": 2.5}], "none of our actions"),
        ([CLICK | {"button": "back"}], "button: Input should be 'left', 'right' or 'middle'"),
        (
            [{"action": "scroll", "direction": "down", "amount": 0}],
            "amount must be a number from 1",
        ),
        ([{"action": "scroll", "direction": "down", "amount": -3}], "amount must be a number from"),
        ([{"action": "scroll", "direction": "down", "amount": 1.5}], "whole number of notches"),
        ([{"action": "scroll", "direction": ["down"]}], "none of up, down, left, right"),
        ([{"action": "wait", "duration": 90}], "duration must be a number from 0 to 60"),
        ([{"action": "wait", "duration": "2"}], "duration must be a number"),
        ([{"action": "type", "text": ""}], "text must be a text"),
        ([{"action": ["click"]}], "is none of click"),
        ([{"action": "response", "text": "4"}], "is a tool of its own"),
    ],
)
def test_malformed_rows_of_cua_lite_are_told_by_their_place(
    home: Path, actions: list[dict[str, Any]], message: str
) -> None:
    folder = write_lines(home / "rows.jsonl", lite(*actions))
    with pytest.raises(UserError, match=message):
        convert("cua-lite", folder)


def test_a_line_that_is_no_json_is_told_by_its_place(home: Path) -> None:
    folder = write_lines(home / "agentnet_test.jsonl", agentnet())
    with (home / "agentnet_test.jsonl").open("a") as file:
        file.write("{oh\n")
    with pytest.raises(UserError, match=r"agentnet_test.jsonl\[1\]: is no JSON"):
        convert("opencua", folder)


def test_answers_of_gui_actor_are_items_with_their_boxes(home: Path) -> None:
    box = [0.25, 0.25, 0.5, 0.5]
    turns = [
        {"from": "human", "value": "<image>\nthe red square"},
        {"from": "gpt", "value": "pyautogui.click(0.3,0.3)", "bbox_gt": box},
        {"from": "human", "value": "what is it?"},
        {"from": "gpt", "value": "a square"},
    ]
    good, bad = (
        {"image": "a.png", "conversations": turns},
        {"image": "a.png", "conversations": [turns[0], turns[1] | {"bbox_gt": [30, 30, 60, 60]}]},
    )
    (home / "rows.json").write_text(json.dumps([good, bad]))
    with pytest.raises(
        UserError, match=r"rows.json\[1\]: conversations\[1\]: .*not within 0 and 1"
    ):
        convert("gui-actor", home)
    convert("gui-actor", home, skip_malformed=True)
    [item] = read_set(home).items
    assert item.instruction == "the red square"
    assert item.region is not None
    assert item.region.corners[::2] == [(42.0, 42.0), (84.0, 84.0)]
