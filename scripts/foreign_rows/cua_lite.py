"""CUA-Lite's rows of episodes (github.com/cua-lite/cua-lite): JSONL or Parquet.

A row has `images` (paths), `messages` and `metadata`, in Parquet each as a text of JSON. The first message is the
user's, with an image and the instruction; each of the assistant's has `tool_calls` of the tool `computer`, whose
`arguments.actions` are actions on a grid of 0 to 1000; a message of role `tool` shows the next image. A last
message without calls ends the episode: as done, or by `metadata.others.terminate_status`.

`inline_reasoning` is the thought, or else `action_description`. One message is one of our actions: several are
refused, but for a move before a drag. Rows whose `others.task_completed` is false are left out, and so are those of
other kinds than `use` (grounding, questions).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bus.errors import UserError
from dart_cli.data.exchange.parquet_schema import pyarrow_modules
from envs.actions import (
    Action,
    Click,
    Done,
    DoubleClick,
    Drag,
    Fail,
    KeyPress,
    Move,
    Scroll,
    TripleClick,
    Type,
    Wait,
)
from scripts.foreign_rows.parts import Found, Grid, picture_of, row_lines, step_of, text_of

IMAGES = (".", "images")
COLUMNS = ("images", "messages", "metadata")
MOST = 1000.0

DIRECTIONS = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}
"""Notches right and down."""


def files_of(home: Path) -> list[Path]:
    """The files of a folder that have such rows, by the keys of the first; or the file that is named."""
    listed = [home] if home.is_file() else sorted([*home.glob("*.jsonl"), *home.glob("*.parquet")])
    return [path for path in listed if {"images", "messages"} <= _keys_of(path)]


def read(home: Path) -> Found:
    """The episodes of a folder or file."""
    found = Found()
    root = home.parent if home.is_file() else home
    for path in files_of(home):
        for place, row in _rows(path):
            try:
                if isinstance(row, ValueError):
                    raise row
                made = _row(root, row)
            except ValueError as error:
                found.malformed.append(f"{place}: {error}")
                continue
            if made is None:
                found.left_out += 1
            else:
                found.rows.append(made)
    return found


def _keys_of(path: Path) -> set[str]:
    if path.suffix == ".parquet":
        pa, pq = pyarrow_modules()
        try:
            with pq.ParquetFile(path) as file:
                return set(file.schema_arrow.names)
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"{path} cannot be read as Parquet: {error}; copy it again") from None
    none: tuple[str, Any] = ("", {})
    first = next(row_lines(path), none)[1]
    return set(first) if isinstance(first, dict) else set()


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    if path.suffix != ".parquet":
        yield from row_lines(path)
        return
    _, pq = pyarrow_modules()
    with pq.ParquetFile(path) as file:
        columns = [name for name in COLUMNS if name in file.schema_arrow.names]
        index = 0
        for batch in file.iter_batches(batch_size=64, columns=columns):
            for row in batch.to_pylist():
                yield f"{path.name}[{index}]", row
                index += 1


def _row(root: Path, row: Any) -> dict[str, Any] | None:
    """The episode of a row; None for one that is left out."""
    if not isinstance(row, dict):
        raise ValueError("must be an object of keys and values")  # noqa: TRY004 - a row's mistake
    images, messages = _unpacked(row.get("images")), _unpacked(row.get("messages"))
    metadata = _unpacked(row.get("metadata")) or {}
    if not isinstance(images, list) or not isinstance(messages, list):
        raise ValueError("images and messages must be lists")  # noqa: TRY004
    others = metadata.get("others") or {} if isinstance(metadata, dict) else {}
    dims = metadata.get("dims") if isinstance(metadata, dict) else None
    if others.get("task_completed") is False or (dims and "use" not in dims):
        return None
    instruction, shown = "", None
    steps: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        try:
            role = text_of(message, "role")
            parts = message.get("content") or []
            parts = [parts] if isinstance(parts, dict) else parts
            if role in ("user", "tool"):
                if not instruction:
                    instruction = _joined(parts, "text")
                indices = [p.get("index") for p in parts if _is(p, "image")]
                if indices:
                    shown = _named(images, indices[-1])
            elif role == "assistant":
                if shown is None:
                    raise ValueError("answers to no image")
                screenshot, size = picture_of(root, IMAGES, shown)
                thought = _joined(parts, "inline_reasoning") or _joined(parts, "action_description")
                action = _said(message, Grid(MOST, size), others)
                steps.append(step_of(screenshot, action, thought))
            elif role != "system":
                raise ValueError(f"role {role!r:.20} is none of system, user, assistant, tool")
        except ValueError as error:
            raise ValueError(f"messages[{number}]: {error}") from None
    if not instruction or not steps:
        raise ValueError("has no instruction, or no step")
    return {"instruction": instruction, "steps": steps}


def _unpacked(value: Any) -> Any:
    """A value that may be a text of JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError("a column is no JSON") from None


def _is(part: Any, kind: str) -> bool:
    return isinstance(part, dict) and part.get("type") == kind


def _joined(parts: Any, kind: str) -> str:
    if isinstance(parts, str):
        return parts.strip() if kind == "text" else ""
    return "\n".join(str(p.get("text") or "") for p in parts if _is(p, kind)).strip()


def _named(images: list[Any], index: Any) -> Any:
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(images):
        raise ValueError(f"there is no image {index!r:.20}")
    return images[index]


def _said(message: Mapping[str, Any], grid: Grid, others: Mapping[str, Any]) -> Action:
    """The action of a message of the assistant's."""
    calls = message.get("tool_calls") or []
    if not calls:
        return Done() if others.get("terminate_status", "success") == "success" else Fail()
    actions: list[Any] = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        arguments = _unpacked(function.get("arguments")) if isinstance(function, dict) else None
        if not isinstance(arguments, dict):
            raise ValueError("a tool call has no function with arguments")  # noqa: TRY004
        if function is not None and function.get("name") != "computer":
            raise ValueError(f"the tool {function.get('name')!r:.30} is not `computer`")
        listed = arguments.get("actions")
        if not isinstance(listed, list):
            raise ValueError("a tool call has no list of actions")  # noqa: TRY004
        actions += listed
    names = [each.get("action") if isinstance(each, dict) else None for each in actions]
    if names == ["mouse_move", "drag"]:
        path = [_place(grid, each, "coordinate") for each in actions]
        return Drag(path=path, button=actions[1].get("button") or "left")
    if len(actions) != 1:
        raise ValueError(f"does {len(actions)} things ({names!r:.60}); an action of ours is one")
    make = _ACTIONS.get(names[0])
    if make is None:
        raise ValueError(f"the action {names[0]!r:.30} is none of {', '.join(_ACTIONS)}")
    return make(grid, actions[0])


def _place(grid: Grid, given: Mapping[str, Any], key: str) -> tuple[int, int]:
    value = given.get(key)
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"{given.get('action')} has no {key} [x, y]")
    return grid.pixel(*value)


def _click(grid: Grid, given: Mapping[str, Any]) -> Action:
    x, y = _place(grid, given, "coordinate")
    clicks, button = given.get("clicks") or 1, given.get("button") or "left"
    if clicks == 1:
        return Click(x=x, y=y, button=button)
    if clicks in (2, 3) and button == "left":
        return DoubleClick(x=x, y=y) if clicks == 2 else TripleClick(x=x, y=y)
    raise ValueError(f"{clicks!r:.20} clicks of {button!r:.20} are none of our actions")


def _drag(grid: Grid, given: Mapping[str, Any]) -> Action:
    path = [_place(grid, given, "start_coordinate"), _place(grid, given, "coordinate")]
    return Drag(path=path, button=given.get("button") or "left")


def _scroll(grid: Grid, given: Mapping[str, Any]) -> Action:
    wide, high = grid.size
    x, y = wide // 2, high // 2
    if given.get("coordinate"):
        x, y = _place(grid, given, "coordinate")
    amount = given.get("amount") or 1
    if given.get("direction") not in DIRECTIONS or not isinstance(amount, int | float):
        raise ValueError(f"scrolls {given.get('direction')!r:.20} by {amount!r:.20}")
    right, down = DIRECTIONS[given["direction"]]
    notches = max(1, round(amount))
    return Scroll(x=x, y=y, dx=right * notches, dy=down * notches)


def _key(_grid: Grid, given: Mapping[str, Any]) -> Action:
    keys = given.get("keys")
    if not isinstance(keys, list) or not keys or not all(isinstance(key, str) for key in keys):
        raise ValueError(f"{keys!r:.40} are no keys")
    return KeyPress(keys=[key.lower() for key in keys])


def _move(grid: Grid, given: Mapping[str, Any]) -> Action:
    x, y = _place(grid, given, "coordinate")
    return Move(x=x, y=y)


_ACTIONS: Mapping[Any, Callable[[Grid, Mapping[str, Any]], Action]] = {
    "click": _click,
    "mouse_move": _move,
    "drag": _drag,
    "scroll": _scroll,
    "key": _key,
    "type": lambda _, given: Type(text=text_of(given, "text")),
    "wait": lambda _, given: Wait(seconds=min(60.0, float(given.get("duration") or 1))),
}
"""Each action, by its name."""
