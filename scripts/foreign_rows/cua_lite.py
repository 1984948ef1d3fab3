"""CUA-Lite's rows of episodes (github.com/cua-lite/cua-lite): JSONL or Parquet.

A row has `images` (paths), `messages` and `metadata`, in Parquet each as a text of JSON. The first message is the
user's, with an image and the instruction; each of the assistant's has `tool_calls` of the tool `computer`, whose
`arguments.actions` are actions on a grid of 0 to 1000; a message of role `tool` shows the next image. A last
message without calls ends the episode: as done, or by `metadata.others.terminate_status`.

`inline_reasoning` is the thought, or else `action_description`. One message is one of our actions, or up to
`max_actions` of them; a move before what acts where the pointer is makes one with it. Texts are taken as they stand: a newline at the end of
what is typed submits it. Keys get our names. `response`, `terminate`, `report_infeasible` and `goto` are tools of
their own. `hold_key`, `screenshot`, `cursor_position` and the other tools are none of our actions. Rows whose
`others.task_completed` is false are left out, and so are those of other kinds than `use` (grounding, questions).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bus.errors import ActionError, UserError, first_line
from dart_cli.data.exchange.parquet_schema import pyarrow_modules
from dart_cli.language.coordinates import pointer_after
from dart_cli.language.parsers.pyautogui_calls import MOST_NOTCHES, MOST_WAIT_S
from dart_cli.language.parsers.reading import one_of_keys, read_keys
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
from scripts.foreign_rows.parts import (
    ForeignRows,
    Grid,
    number_of,
    picture_of,
    row_lines,
    step_of,
    text_of,
    words_of,
)

IMAGES = (".", "images")
COLUMNS = ("images", "messages", "metadata")
MOST = 1000.0

Point = tuple[int, int]
"""Pixels of a screenshot."""

DIRECTIONS = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}
"""Notches right and down."""


def files_of(home: Path) -> list[Path]:
    """Return the files of a folder that have such rows, by the keys of their first row; or the file that is named."""
    listed = [home] if home.is_file() else sorted([*home.glob("*.jsonl"), *home.glob("*.parquet")])
    return [path for path in listed if {"images", "messages"} <= _keys_of(path)]


def read(home: Path, max_actions: int = 1) -> ForeignRows:
    """Return the episodes of a folder or file, whose steps have up to `max_actions` actions."""
    foreign = ForeignRows()
    root = home.parent if home.is_file() else home
    for path in files_of(home):
        for place, row in _rows(path):
            try:
                if isinstance(row, ValueError):
                    raise row
                episode = _row(root, row, max_actions)
            except ValueError as error:
                foreign.malformed.append(f"{place}: {error}")
                continue
            if episode is None:
                foreign.left_out += 1
            else:
                foreign.rows.append(episode)
    return foreign


def _keys_of(path: Path) -> set[str]:
    if path.suffix == ".parquet":
        with _parquet(path) as file:
            return set(file.schema_arrow.names)
    return next((set(row) for _, row in row_lines(path) if isinstance(row, dict)), set())


@contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    """Yield an open Parquet file. Raises UserError if it cannot be read."""
    pa, pq = pyarrow_modules()
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (OSError, pa.ArrowException) as error:
        raise UserError(
            f"{path} cannot be read as Parquet: {first_line(error)}; copy it again"
        ) from None


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    if path.suffix != ".parquet":
        yield from row_lines(path)
        return
    with _parquet(path) as file:
        columns = [name for name in COLUMNS if name in file.schema_arrow.names]
        batches = file.iter_batches(batch_size=64, columns=columns)
        rows = (row for batch in batches for row in batch.to_pylist())
        for index, row in enumerate(rows):
            yield f"{path.name}[{index}]", row


def _row(root: Path, row: Any, max_actions: int) -> dict[str, Any] | None:
    """Return the episode of a row; None for one that is left out."""
    if not isinstance(row, dict):
        raise ValueError("must be an object of keys and values")  # noqa: TRY004 - a row's mistake
    images, messages = _unpacked(row.get("images")), _unpacked(row.get("messages"))
    metadata = _unpacked(row.get("metadata")) or {}
    if not isinstance(images, list) or not isinstance(messages, list):
        raise ValueError("images and messages must be lists")  # noqa: TRY004
    others = metadata.get("others") or {} if isinstance(metadata, dict) else {}
    dims = metadata.get("dims") or [] if isinstance(metadata, dict) else []
    if not isinstance(others, dict) or not isinstance(dims, list):
        raise ValueError("metadata.others must be an object, and metadata.dims a list")  # noqa: TRY004
    if others.get("task_completed") is False or (dims and "use" not in dims):
        return None
    return _Episode(root, images, others, max_actions).read(messages)


class _Episode:
    """The messages of a row, read one after the other."""

    def __init__(
        self, root: Path, images: list[Any], others: Mapping[str, Any], max_actions: int
    ) -> None:
        self._root = root
        self._images = images
        self._others = others
        self._max_actions = max_actions
        self._instruction = ""
        self._image: Any = None  # the name of the image that the next action answers
        self._pointer: Point | None = None
        self._steps: list[dict[str, Any]] = []

    def read(self, messages: list[Any]) -> dict[str, Any]:
        """Return the episode. Raises ValueError with the place of the first message that is wrong."""
        for number, message in enumerate(messages):
            try:
                self._message(message)
            except ValueError as error:
                raise ValueError(f"messages[{number}]: {error}") from None
        if not self._instruction or not self._steps:
            raise ValueError("has no instruction, or no step")
        return {"instruction": self._instruction, "steps": self._steps}

    def _message(self, message: Any) -> None:
        role = text_of(message, "role")
        parts = message.get("content") or []
        parts = [parts] if isinstance(parts, dict) else parts
        if not isinstance(parts, list | str):
            raise ValueError("content must be a text or a list")  # noqa: TRY004
        if role in ("user", "tool"):
            self._instruction = self._instruction or _joined(parts, "text")
            indices = [p.get("index") for p in parts if _is(p, "image")]
            if indices:
                self._image = _image_at(self._images, indices[-1])
        elif role == "assistant":
            self._answer(message, parts)
        elif role != "system":
            raise ValueError(f"role {role!r:.20} is none of system, user, assistant, tool")

    def _answer(self, message: Mapping[str, Any], parts: list[Any] | str) -> None:
        if self._image is None:
            raise ValueError("answers to no image")
        screenshot, size = picture_of(self._root, IMAGES, self._image)
        thought = _joined(parts, "inline_reasoning") or _joined(parts, "action_description")
        screen = Screen(Grid(MOST, size), self._pointer)
        try:
            actions = _actions_of_message(message, screen, self._others, self._max_actions)
        except ValidationError as error:
            first = error.errors()[0]
            at = ".".join(str(part) for part in first["loc"])
            raise ValueError(f"{at}: {first['msg']}") from None
        except ActionError as error:
            raise ValueError(str(error)) from None
        for action in actions:
            self._pointer = pointer_after(action, self._pointer)
        self._steps.append(step_of(screenshot, actions, thought))


def _unpacked(value: Any) -> Any:
    """Return a value that may be a text of JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError("a column is no JSON") from None


def _is(part: Any, kind: str) -> bool:
    return isinstance(part, dict) and part.get("type") == kind


def _joined(parts: list[Any] | str, kind: str) -> str:
    """Return the texts of one kind as they stand; an empty text where they are blanks alone."""
    if isinstance(parts, str):
        text = parts if kind == "text" else ""
    else:
        texts = [p.get("text") or "" for p in parts if _is(p, kind)]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"a part of type {kind} has a text that is none")
        text = "\n".join(text for text in texts if text)
    return text if text.strip() else ""


def _image_at(images: list[Any], index: Any) -> Any:
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(images):
        raise ValueError(f"there is no image {index!r:.20}")
    return images[index]


@dataclass(frozen=True)
class Screen:
    """The screen to which an action's places refer."""

    grid: Grid
    pointer: Point | None  # pixel where earlier actions left it; None: none has moved it

    def at(self, arguments: Mapping[str, Any], key: str = "coordinate") -> Point:
        """Return the pixel of a place that must be there."""
        value = arguments.get(key)
        if not isinstance(value, list) or len(value) != 2:
            raise ValueError(f"{arguments.get('action')} has no {key} [x, y]")
        return self.grid.pixel(*value)

    def at_or_pointer(self, arguments: Mapping[str, Any], key: str = "coordinate") -> Point:
        """Return the pixel of a place, or of the pointer where the action has none."""
        if arguments.get(key) is not None:
            return self.at(arguments, key)
        if self.pointer is None:
            raise ValueError(
                f"{arguments.get('action')} has no {key}, and no earlier action moved the pointer"
            )
        return self.pointer


def _actions_of_message(
    message: Mapping[str, Any], screen: Screen, others: Mapping[str, Any], max_actions: int
) -> list[Action]:
    """Return the actions of a message of the assistant's [N], N >= 1."""
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise ValueError("tool_calls must be a list")  # noqa: TRY004 - a row's mistake
    if not calls:
        return [Done() if others.get("terminate_status", "success") == "success" else Fail()]
    actions = [action for call in calls for action in _actions_of(call)]
    if len(actions) == 2 and actions[0].get("action") == "mouse_move":
        place = screen.at(actions[0])
        if actions[1].get("action") in _AT_POINTER and not {"coordinate"} & _places(actions[1]):
            return [_AT_POINTER[actions[1]["action"]](replace(screen, pointer=place), actions[1])]
        if actions[1].get("action") == "drag" and "start_coordinate" not in _places(actions[1]):
            return [_drag(replace(screen, pointer=place), actions[1])]
    if not 1 <= len(actions) <= max_actions:
        names = [action.get("action") for action in actions]
        raise ValueError(
            f"does {len(actions)} things ({names!r:.60}); a step of ours has {_most(max_actions)}"
        )
    ours: list[Action] = []
    for arguments in actions:
        name = arguments.get("action")
        make = _ACTIONS.get(name) if isinstance(name, str) else None
        if make is None:
            raise ValueError(f"the action {name!r:.30} is none of {', '.join(_ACTIONS)}")
        ours.append(make(screen, arguments))
        screen = replace(screen, pointer=pointer_after(ours[-1], screen.pointer))
    return ours


def _most(max_actions: int) -> str:
    return "one action" if max_actions == 1 else f"at most {max_actions} actions"


def _actions_of(call: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the actions of a tool call; a separate tool is one action, by its name."""
    function = call.get("function") if isinstance(call, dict) else None
    arguments = _unpacked(function.get("arguments")) if isinstance(function, dict) else None
    if not isinstance(arguments, dict):
        raise ValueError("a tool call has no function with arguments")  # noqa: TRY004
    name = function.get("name") if isinstance(function, dict) else None
    if isinstance(name, str) and name in _TOOLS:
        yield {"action": name, **arguments}
        return
    if name != "computer":
        raise ValueError(f"the tool {name!r:.30} is none of computer, {', '.join(_TOOLS)}")
    listed = arguments.get("actions")
    if not isinstance(listed, list) or not all(isinstance(action, dict) for action in listed):
        raise ValueError("a tool call has no list of actions")
    for action in listed:
        if isinstance(action.get("action"), str) and action["action"] in _TOOLS:
            raise ValueError(f"the action {action['action']!r:.30} is a tool of its own")
        yield action


def _places(arguments: Mapping[str, Any]) -> set[str]:
    return {key for key in ("coordinate", "start_coordinate") if arguments.get(key) is not None}


def _button(arguments: Mapping[str, Any]) -> Any:
    """Return the button of an action, which the action itself checks; left where it names none."""
    return "left" if arguments.get("button") is None else arguments["button"]


def _click(screen: Screen, arguments: Mapping[str, Any]) -> Action:
    x, y = screen.at_or_pointer(arguments)
    clicks = number_of(arguments, "clicks", 1, least=1, most=3)
    if clicks == 1:
        return Click(x=x, y=y, button=_button(arguments))
    if clicks in (2, 3) and _button(arguments) == "left":
        return DoubleClick(x=x, y=y) if clicks == 2 else TripleClick(x=x, y=y)
    raise ValueError(f"{clicks:g} clicks of {_button(arguments)!r:.20} are none of our actions")


def _drag(screen: Screen, arguments: Mapping[str, Any]) -> Action:
    path = [screen.at_or_pointer(arguments, "start_coordinate"), screen.at(arguments)]
    return Drag(path=path, button=_button(arguments))


def _scroll(screen: Screen, arguments: Mapping[str, Any]) -> Action:
    wide, high = screen.grid.size
    placed = screen if screen.pointer else replace(screen, pointer=(wide // 2, high // 2))
    x, y = placed.at_or_pointer(arguments)
    direction = arguments.get("direction")
    if not isinstance(direction, str) or direction not in DIRECTIONS:
        raise ValueError(f"direction {direction!r:.20} is none of {', '.join(DIRECTIONS)}")
    notches = number_of(arguments, "amount", 1, least=1, most=MOST_NOTCHES)
    if notches != int(notches):
        raise ValueError(f"amount must be a whole number of notches, got {notches:g}")
    right, down = DIRECTIONS[direction]
    return Scroll(x=x, y=y, dx=right * int(notches), dy=down * int(notches))


def _keys(arguments: Mapping[str, Any]) -> list[str]:
    """Return the keys of an action by our names."""
    keys = arguments.get("keys")
    if not isinstance(keys, list) or not keys or not all(isinstance(key, str) for key in keys):
        raise ValueError(f"{keys!r:.40} are no keys")
    for key in keys:
        if len(key) == 1 and key != key.lower():
            raise ValueError(
                f"the key {key!r} is a capital letter. CUA-Lite writes keys in lower case, so it is not known "
                f"whether shift is held; write {key.lower()!r}, or shift and {key.lower()!r}"
            )
    return read_keys(keys)


def _one_key(arguments: Mapping[str, Any]) -> str:
    return one_of_keys(_keys(arguments))


def _terminate(_screen: Screen, arguments: Mapping[str, Any]) -> Action:
    status = arguments.get("status")
    if status not in ("success", "failure"):
        raise ValueError(f"status {status!r:.20} is none of success, failure")
    return Done() if status == "success" else Fail()


def _move(screen: Screen, arguments: Mapping[str, Any]) -> Action:
    x, y = screen.at(arguments)
    return Move(x=x, y=y)


def _mouse(kind: type[MouseDown | MouseUp]) -> _Make:
    def make(screen: Screen, arguments: Mapping[str, Any]) -> Action:
        x, y = screen.pointer or (None, None)
        return kind(x=x, y=y, button=_button(arguments))

    return make


_Make = Callable[[Screen, Mapping[str, Any]], Action]

_AT_POINTER: Mapping[Any, _Make] = {
    "click": _click,
    "scroll": _scroll,
    "mouse_down": _mouse(MouseDown),
    "mouse_up": _mouse(MouseUp),
}
"""What acts where the pointer is, and so after a move in one message."""

_TOOLS: Mapping[str, _Make] = {
    "response": lambda _, arguments: Answer(text=text_of(arguments, "text")),
    "terminate": _terminate,
    "report_infeasible": lambda *_: Fail(),
    "goto": lambda _, arguments: Goto(url=words_of(arguments, "url")),
}
"""The tools beside `computer` that are an action of ours."""

_ACTIONS: Mapping[str, _Make] = {
    **_AT_POINTER,
    "mouse_move": _move,
    "drag": _drag,
    "key": lambda _, arguments: KeyPress(keys=_keys(arguments)),
    "key_down": lambda _, arguments: KeyDown(key=_one_key(arguments)),
    "key_up": lambda _, arguments: KeyUp(key=_one_key(arguments)),
    "type": lambda _, arguments: Type(text=text_of(arguments, "text")),
    "wait": lambda _, arguments: Wait(
        seconds=number_of(arguments, "duration", 1, least=0, most=MOST_WAIT_S)
    ),
    **_TOOLS,
}
"""Each action, by its name."""
