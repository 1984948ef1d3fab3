"""AgentNet, the data of OpenCUA (arXiv 2508.09123), as its authors publish it.

A line of agentnet*.jsonl is an episode: `instruction`, `task_completed` (true, false or null) and `traj`, whose
steps have `image` and `value`: `thought`, `code`, `last_step_correct`, `last_step_redundant`. `code` has calls of
pyautogui and of `computer`, with places as shares of the sides. It is parsed, never run.

Left out are rows that were not completed. A step that is told to be wrong or redundant is shown in the history of
later ones and is not learned. A row with a step that our actions have not is malformed as a whole: every later
step has it in its past.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from bus.errors import ActionError
from dart_cli.language.coordinates import make_coordinate_map, pointer_after
from dart_cli.language.parsers import make_action_parser
from dart_cli.language.parsers.pyautogui_calls import IGNORED, SIGNATURES, read_calls
from dart_cli.language.parsers.reading import calls_of
from dart_cli.language.parsers.several import read_actions
from envs.contract.actions import Action, Click, DoubleClick, TripleClick
from scripts.foreign_rows.parts import ForeignRows, picture_of, row_lines, step_of, words_of

FILES = "agentnet*.jsonl"
IMAGES = ("images", "ubuntu_images", "win_mac_images", ".")


def files_of(home: Path) -> list[Path]:
    """Return the files of a folder that have such rows, by their names; or the file that is named."""
    if home.is_file():
        return [home] if home.match(FILES) else []
    return sorted(home.glob(FILES))


def read(home: Path, max_actions: int = 1) -> ForeignRows:
    """Return the episodes of a folder or file, whose steps have up to `max_actions` actions."""
    foreign = ForeignRows()
    root = home.parent if home.is_file() else home
    for path in files_of(home):
        for place, row in row_lines(path):
            try:
                if isinstance(row, ValueError):
                    raise row
                if isinstance(row, dict) and row.get("task_completed") is False:
                    foreign.left_out += 1
                    continue
                foreign.rows.append(_row(root, row, max_actions))
            except ValueError as error:
                foreign.malformed.append(f"{place}: {error}")
    return foreign


def _row(root: Path, row: Any, max_actions: int) -> dict[str, Any]:
    instruction = words_of(row, "instruction")
    listed = row.get("traj")
    if not isinstance(listed, list) or not listed:
        raise ValueError("traj must be a list of steps")
    pointer: tuple[int, int] | None = None
    steps = []
    for number, step in enumerate(listed):
        try:
            value = step.get("value") if isinstance(step, dict) else None
            if not isinstance(value, dict):
                raise ValueError("has no value")  # noqa: TRY004 - a row's mistake
            screenshot, size = picture_of(root, IMAGES, step.get("image"))
            actions, pointer = actions_of(words_of(value, "code"), size, pointer, max_actions)
            thought = _thought(value)
        except ValueError as error:
            raise ValueError(f"step {number}: {error}") from None
        learned = (
            value.get("last_step_correct") is not False
            and value.get("last_step_redundant") is not True
        )
        steps.append(step_of(screenshot, actions, thought, learned))
    return {"instruction": instruction, "steps": steps}


def _thought(value: dict[str, Any]) -> str:
    """Return the thought of a step as it stands; an empty text where it is blanks alone."""
    thought = value.get("thought")
    if thought is not None and not isinstance(thought, str):
        raise ValueError(f"thought must be a text, got {thought!r:.40}")
    return thought if thought and thought.strip() else ""


def actions_of(
    code: str, size: tuple[int, int], pointer: tuple[int, int] | None, max_actions: int
) -> tuple[list[Action], tuple[int, int] | None]:
    """Return the actions that a step's code is, and the pixel where the pointer is then.

    Raises ValueError for code that is more than `max_actions` actions, or none of ours.
    """
    try:
        action, pointer_then = action_of(code, size, pointer)
    except ValueError:
        if max_actions == 1:
            raise
    else:
        return [action], pointer_then
    # A call without a place is refused if no action has moved the pointer.
    on = replace(make_coordinate_map("unit", *size), pointer=pointer, assumes_places=False)
    try:
        parser = make_action_parser("pyautogui", max_actions)
        actions = read_actions(parser, f"```python\n{code}\n```", on)
    except ActionError as error:
        raise ValueError(f"its code {code!r:.60}: {error}") from None
    for action in actions:
        pointer = pointer_after(action, pointer)
    return actions, pointer


def action_of(
    code: str, size: tuple[int, int], pointer: tuple[int, int] | None = None
) -> tuple[Action, tuple[int, int] | None]:
    """Return the action that a step's code is, and the pixel where the pointer is then.

    The code is that of action parser `pyautogui`, with places as shares of the sides. A call without a place is where the
    pointer was. Raises ValueError for code that is several actions, or none of ours.
    """
    on = replace(make_coordinate_map("unit", *size), pointer=pointer)
    try:
        calls = calls_of(code, SIGNATURES["pyautogui"], IGNORED)
        action, points = read_calls(calls, on, 0)
    except ActionError as error:
        raise ValueError(f"its code {code!r:.60}: {error}") from None
    if isinstance(action, Click | DoubleClick | TripleClick) and not points and pointer is None:
        raise ValueError(f"its code {code!r:.60} is at a place that is not known")
    return action, pointer_after(action, pointer)
