"""What the readers of foreign rows share.

Found        rows in our format, and what was left out
step_of      a step of an episode, as dart_cli/tune/episodes.py reads it
Grid         the numbers of a layout -> pixels of a screenshot
row_lines    the rows of a JSONL file, each with its place
picture_of   a screenshot that a row names
text_of, words_of, number_of   a value of a row, checked and not changed
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from PIL import Image, UnidentifiedImageError

from bus.errors import UserError
from envs.contract.actions import Action, action_to_dict
from envs.contract.screenshots import BROKEN, seen_size
from envs.tools.textfiles import lines_of, why


@dataclass
class ForeignRows:
    """The rows of some files, and those that cannot be read."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    malformed: list[str] = field(default_factory=list)  # FILE[INDEX]: what is wrong
    left_out: int = 0  # of failures or other kinds


def step_of(
    image: str, actions: Sequence[Action], thought: str = "", learned: bool = True
) -> dict[str, Any]:
    """Return a step with its actions [N], N >= 1; the picture is named from the set's folder on."""
    first, *more = map(action_to_dict, actions)
    step = {"image": image, "action": first, "thought": thought}
    if more:
        step["more_actions"] = more
    return step if learned else {**step, "learned": False}


@dataclass(frozen=True)
class Grid:
    """A grid of numbers from 0 to `most` across each side of a picture."""

    most: float
    size: tuple[int, int]  # pixels

    def pixel(self, x: Any, y: Any) -> tuple[int, int]:
        """Return the pixel of a place. Raises ValueError for a number outside the grid."""
        for value in (x, y):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 <= value <= self.most:
                raise ValueError(f"({x!r:.20}, {y!r:.20}) is not within 0 and {self.most:g}")
        wide, high = self.size
        return min(int(x / self.most * wide), wide - 1), min(int(y / self.most * high), high - 1)


def row_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (FILE[INDEX], value) of each line that is not blank; a ValueError as the value of one that is no JSON."""
    try:
        for index, line in enumerate(lines_of(path)):
            place = f"{path.name}[{index}]"
            if not line.strip():
                continue
            try:
                yield place, json.loads(line)
            except (ValueError, RecursionError):
                yield place, ValueError("is no JSON")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} {why(error, 'copy it again')}") from None


def picture_of(home: Path, folders: Sequence[str], name: Any) -> tuple[str, tuple[int, int]]:
    """Return the path from `home` of a picture in the first of `folders` that has it, and its size. Raises ValueError."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"{name!r:.40} names no picture")
    for folder in folders:
        path = PurePosixPath(folder) / name
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"{name!r:.60} leads out of the set's folder")
        if (home / path).is_file():
            try:
                with Image.open(home / path) as image:
                    return str(path), seen_size(image)
            except (UnidentifiedImageError, *BROKEN) as error:
                raise ValueError(f"{name} is no picture that can be read: {error}") from None
    raise ValueError(f"there is no picture {name} in {' or '.join(folders)}")


def text_of(row: Any, key: str) -> str:
    """Return a text of a row as it stands, blanks and line ends included. Raises ValueError for an empty one."""
    value = row.get(key) if isinstance(row, dict) else None
    if not isinstance(value, str) or not value:
        raise ValueError(f"{key} must be a text that is not empty, got {value!r:.40}")
    return value


def words_of(row: Any, key: str) -> str:
    """Return a text that tells something, as it stands. Raises ValueError for one of blanks alone."""
    value = text_of(row, key)
    if not value.strip():
        raise ValueError(f"{key} must have words, got {value!r:.40}")
    return value


def number_of(row: Any, key: str, default: float, *, least: float, most: float) -> float:
    """Return a number of a row, `default` where it has none. Raises ValueError for one beyond the bounds."""
    value = row.get(key)
    if value is None:
        return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:
        raise ValueError(f"{key} must be a number from {least:g} to {most:g}, got {value!r:.20}")
    return float(value)
