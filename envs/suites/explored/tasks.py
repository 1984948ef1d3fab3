"""FOLDER/tasks.json: tasks that lead from the start of an explored task to one of its screens.

ExploredFile   a file: which suite is played with which options, and its tasks
ExploredTask   a start, the screen to reach, and a path that reaches it
PathStep       one step of a path: where it acts, and on which screen
read_file      a folder -> its file, checked
write_file     the other way
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bus.errors import TaskError, cure_of
from envs.contract.base import Split
from envs.contract.blobs import content_hash
from envs.contract.elements import Operation
from envs.contract.options import first_problem

FILE = "tasks.json"


class _Stored(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PathStep(_Stored):
    """One step of a path."""

    screen: str  # ScreenState.id before it
    place: str  # Element.place
    action: Operation
    text: str = ""  # of `type`
    name: str = ""  # that the element must have, where the instruction tells it
    told: str = ""  # in words, e.g. click the "Save" button


class ExploredTask(_Stored):
    """From the start of a task of the explored suite to a screen."""

    id: str = Field(pattern=r"^explored/[^\s]+$")
    application: str
    instruction: str = Field(min_length=1)
    base: str  # id of the suite's task whose start is the start
    seeds: list[int] = Field(min_length=1)  # of it, on which the path was replayed
    path: list[PathStep] = Field(min_length=1)
    targets: list[str] = Field(min_length=1)  # ScreenState.id of the screens that are the goal
    shows: list[str] = []  # names of elements there that the instruction tells
    split: Split = "train"
    max_steps: int = Field(ge=1)

    @property
    def digest(self) -> str:
        """Return a digest of all that the file says of the task."""
        return content_hash(self.model_dump_json().encode())

    @property
    def start(self) -> str:
        """ScreenState.id that a reset shows."""
        return self.path[0].screen


class LeftOut(_Stored):
    """A screen that no task leads to."""

    screen: str
    reason: str


class ExploredFile(_Stored):
    """All tasks of a folder."""

    version: Literal[1] = 1
    suite: str  # that was explored
    options: dict[str, Any] = {}  # of its environments
    tasks: list[ExploredTask]
    left_out: list[LeftOut] = []


def read_file(folder: Path) -> ExploredFile:
    """Return the tasks of a folder. Raises TaskError naming the place and the cure."""
    path = folder / FILE
    try:
        file = ExploredFile.model_validate_json(path.read_bytes())
    except OSError as error:
        cure = cure_of(error, f"`dart explore tasks EXPLORATION {folder}` makes them")
        raise TaskError(f"no tasks at {path}: {error.strerror}; {cure}") from None
    except ValidationError as error:
        raise TaskError(f"{path}: {first_problem(error)}; make the tasks again") from None
    ids = [task.id for task in file.tasks]
    if twice := next((task_id for task_id in ids if ids.count(task_id) > 1), None):
        raise TaskError(f"{path}: {twice} is there twice; make the tasks again")
    return file


def write_file(folder: Path, file: ExploredFile) -> None:
    """Put the file in place whole."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f"{FILE}.draft"
    draft.write_text(file.model_dump_json(indent=1) + "\n", encoding="utf-8")
    draft.replace(folder / FILE)
