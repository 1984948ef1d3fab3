"""GUI-Actor's rows (github.com/microsoft/GUI-Actor): questions about a screenshot, with the box of each answer.

A file is a JSON list of `{"image", "conversations": [{"from": "human", "value"}, {"from": "gpt", "value",
"bbox_gt"}]}`; `bbox_gt` is left, top, right, bottom as shares of the sides. A folder may have a YAML list of such
files; only JSON is read here, so name the files. Each answer with a box is an item, asked by what the human said
before it. Answers without one name no place and are left out. The answer's own text is not learned: what is learned
is the place.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bus.errors import UserError
from envs.tools.textfiles import read_text, why
from scripts.foreign_rows.parts import ForeignRows, Grid, picture_of, text_of

IMAGES = ("images", ".")
IMAGE_WORD = "<image>"


def files_of(home: Path) -> list[Path]:
    """Return the files of a folder that have such rows, by the keys of the first; or the file that is named."""
    listed = [home] if home.is_file() else sorted(home.glob("*.json"))
    return [path for path in listed if path.suffix == ".json" and _has_conversations(path)]


def read(home: Path) -> ForeignRows:
    """Return the answers with a box, as rows of ScreenSpot's layout."""
    foreign = ForeignRows()
    root = home.parent if home.is_file() else home
    for path in files_of(home):
        for index, row in enumerate(_rows(path)):
            try:
                rows, others = _items(root, row)
            except ValueError as error:
                foreign.malformed.append(f"{path.name}[{index}]: {error}")
                continue
            foreign.rows += rows
            foreign.left_out += others
    return foreign


def _has_conversations(path: Path) -> bool:
    rows = _rows(path) if path.stat().st_size else []
    return bool(rows) and isinstance(rows[0], dict) and {"image", "conversations"} <= set(rows[0])


def _rows(path: Path) -> list[Any]:
    try:
        rows = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} {why(error, 'copy it again')}") from None
    return rows if isinstance(rows, list) else []


def _items(root: Path, row: Any) -> tuple[list[dict[str, Any]], int]:
    if not isinstance(row, dict):
        raise ValueError("must be an object of keys and values")  # noqa: TRY004 - a row's mistake
    name = row.get("image")
    if isinstance(name, list):
        if len(name) != 1:
            raise ValueError(f"has {len(name)} images; the layout has one")
        [name] = name
    path, size = picture_of(root, IMAGES, name)
    turns = row.get("conversations")
    if not isinstance(turns, list):
        raise ValueError("conversations must be a list")  # noqa: TRY004
    items: list[dict[str, Any]] = []
    instruction, without = "", 0
    for number, turn in enumerate(turns):
        try:
            who = text_of(turn, "from")
            if who == "human":
                text = text_of(turn, "value")
                instruction = text.replace(f"{IMAGE_WORD}\n", "").replace(IMAGE_WORD, "")
            elif who == "gpt" and turn.get("bbox_gt") is None:
                without += 1
            elif who == "gpt":
                if not instruction.strip():
                    raise ValueError("answers to no question")
                items.append(
                    {
                        "img_filename": path,
                        "instruction": instruction,
                        "bbox": _box(turn["bbox_gt"], size),
                        "data_type": "unknown",
                        "data_source": "gui-actor",
                    }
                )
            elif who != "system":
                raise ValueError(f"from {who!r:.20} is none of system, human, gpt")
        except ValueError as error:
            raise ValueError(f"conversations[{number}]: {error}") from None
    return items, without


def _box(value: Any, size: tuple[int, int]) -> list[float]:
    if not isinstance(value, list) or len(value) != 4:
        raise ValueError(f"bbox_gt must have four numbers, got {value!r:.40}")
    grid = Grid(1.0, size)
    for x, y in (value[:2], value[2:]):
        grid.pixel(x, y)  # within the picture
    left, top, right, bottom = (float(item) for item in value)
    if not (left < right and top < bottom):
        raise ValueError(f"bbox_gt {value!r:.40} is not left, top, right, bottom")
    wide, high = size
    return [left * wide, top * high, (right - left) * wide, (bottom - top) * high]
