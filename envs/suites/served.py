"""Tasks of other programs' environments, which their agents play through `dart serve`.

    ServedSuite   `served:tasks.toml`, the suite of a file that lists such tasks

The file is in TOML; only the id of a task is required:

    max_steps = 30                  # for tasks without their own

    [[tasks]]
    id = "chrome/bb5e4c0d"
    instruction = "Clear my browsing history"
    max_steps = 15
    split = "heldout"               # never trained on; default train
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from bus.errors import MissingPartError, TaskError
from envs.contract.base import GuiEnv, Split, Task
from envs.tools.textfiles import read_toml

_Steps = Annotated[int, Field(ge=1, le=10_000, strict=True)]
MOST_TASKS = 100_000


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid")

    id: str = Field(min_length=1, max_length=200)
    instruction: str = ""
    max_steps: _Steps | None = None
    split: Split = "train"


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    max_steps: _Steps = 30
    tasks: list[_Entry] = Field(min_length=1, max_length=MOST_TASKS)


class ServedSuite:
    """The tasks of a file, without an environment. Raises TaskError for a mistake in the file."""

    name = "served"

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        file = read_toml(self._path, _File)
        self.tasks: dict[str, Task] = {}
        for number, entry in enumerate(file.tasks):
            if not entry.id.isprintable() or not entry.id.strip():
                raise TaskError(f"{path}: tasks.{number}.id must be printable, got {entry.id!r}")
            if entry.id in self.tasks:
                raise TaskError(f"{path}: tasks.{number}: {entry.id!r} is listed twice")
            steps = entry.max_steps or file.max_steps
            self.tasks[entry.id] = Task(
                entry.id, self.name, entry.instruction, max_steps=steps, split=entry.split
            )

    def make_env(self) -> GuiEnv:
        """Raise TaskError, since dart has no environment for these tasks."""
        raise TaskError(self._message())

    def check_parts(self) -> None:
        """Raise MissingPartError, since dart has no environment for these tasks."""
        raise MissingPartError(self._message())

    def _message(self) -> str:
        """Return the message that tells how such tasks are played."""
        return (
            f"the tasks of {self._path} are played by an agent of yours through `dart serve`, "
            "not by `dart env`; set up.serve = true and up.envs = 0 (docs/serve.md)"
        )
