"""FOLDER/tasks.json: tasks that lead from the start of a task of the explored suite to one of its screens.

ExploredFile   the file: the explored suite with its options, and the tasks
ExploredTask   a start, the screen to reach, and a path that reaches it
PathStep       one step of a path: the screen before it, and the element that it acts on
read_file      reads and checks the file of a folder
write_file     writes it
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


class _FileModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PathStep(_FileModel):
    """One step of a path."""

    screen: str  # ScreenState.id before it
    place: str  # Element.place
    action: Operation
    text: str = ""  # the text that `type` types
    name: str = ""  # the name that the element must have, if the instruction names it
    words: str = ""  # the step in words, e.g. click the "Save" button


class ExploredTask(_FileModel):
    """A task that leads from the start of a task of the explored suite to a screen."""

    id: str = Field(pattern=r"^explored/[^\s]+$")
    application: str
    instruction: str = Field(min_length=1)
    base: str  # id of the explored suite's task at whose start it begins
    seeds: list[int] = Field(min_length=1)  # of `base`, on which the path was replayed
    path: list[PathStep] = Field(min_length=1)
    targets: list[str] = Field(min_length=1)  # ScreenState.id of the screens that are the goal
    shows: list[str] = []  # names of elements there, which the instruction tells
    split: Split = "train"
    max_steps: int = Field(ge=1)

    @property
    def digest(self) -> str:
        """A digest of the task as the file has it."""
        return content_hash(self.model_dump_json().encode())

    @property
    def start(self) -> str:
        """The ScreenState.id of the screen after a reset."""
        return self.path[0].screen


class LeftOut(_FileModel):
    """A screen to which no task leads, and why."""

    screen: str
    reason: str


class ExploredFile(_FileModel):
    """The tasks of a folder."""

    version: Literal[1] = 1
    suite: str  # the explored suite
    options: dict[str, Any] = {}  # of its environments
    tasks: list[ExploredTask]
    left_out: list[LeftOut] = []


def read_file(folder: Path) -> ExploredFile:
    """Return the checked file of a folder. Raises TaskError, which names the place and the fix."""
    path = folder / FILE
    try:
        file = ExploredFile.model_validate_json(path.read_bytes())
    except OSError as error:
        fix = cure_of(error, f"`dart explore tasks EXPLORATION {folder}` makes them")
        raise TaskError(f"no tasks at {path}: {error.strerror}; {fix}") from None
    except ValidationError as error:
        raise TaskError(f"{path}: {first_problem(error)}; make the tasks again") from None
    ids = [task.id for task in file.tasks]
    if duplicate := next((task_id for task_id in ids if ids.count(task_id) > 1), None):
        raise TaskError(f"{path}: {duplicate} is there twice; make the tasks again")
    return file


def write_file(folder: Path, file: ExploredFile) -> None:
    """Write the file of a folder. A draft is written first, so that no reader finds an incomplete file."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f"{FILE}.draft"
    draft.write_text(file.model_dump_json(indent=1) + "\n", encoding="utf-8")
    draft.replace(folder / FILE)
