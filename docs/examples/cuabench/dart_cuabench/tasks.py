"""Reads the TOML file that names a suite's tasks, since a worker has no route that lists them.

env_path = "tasks/slack_env"     # on the workers' machine
split = "train"                  # a split of cua-bench; tasks of any other split are held out
max_steps = 30

[[tasks]]                        # one task, or `count` tasks from `task_index` on
task_index = 0
count = 12
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from bus.errors import TaskError
from envs.contract.base import Task
from envs.tools.textfiles import read_toml

_Steps = Annotated[int, Field(ge=1, le=10_000)]
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
MOST_TASKS = 100_000


@dataclass(frozen=True)
class WorkerTask:
    """The fields of a task in a worker's /reset."""

    env_path: str
    task_index: int
    split: str


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid")

    task_index: int = Field(default=0, ge=0)
    count: int = Field(default=1, ge=1, le=MOST_TASKS)
    id: _Name | None = None  # None: the folder's name and the index
    env_path: str | None = None
    split: str | None = None
    max_steps: _Steps | None = None
    heldout: bool | None = None


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    env_path: str = ""
    split: str = "train"
    max_steps: _Steps = 30
    tasks: list[_Entry] = Field(min_length=1)


def read_tasks(path: Path, suite: str) -> dict[str, tuple[Task, WorkerTask]]:
    """Return task id -> (task, its fields for a worker).

    Raises TaskError that names the place in the file.
    """
    file = read_toml(path, _File)
    tasks: dict[str, tuple[Task, WorkerTask]] = {}
    for number, entry in enumerate(file.tasks):
        env_path = entry.env_path or file.env_path
        if not env_path:
            raise TaskError(f"{path}: tasks.{number} has no env_path, and the file none for all")
        for index in range(entry.task_index, entry.task_index + entry.count):
            worker_task = WorkerTask(env_path, index, entry.split or file.split)
            task = _task(suite, entry, worker_task, entry.max_steps or file.max_steps)
            if task.id in tasks:
                raise TaskError(
                    f"{path}: tasks.{number} makes {task.id} a second time; give it an id"
                )
            tasks[task.id] = (task, worker_task)
    return tasks


def _task(suite: str, entry: _Entry, worker_task: WorkerTask, max_steps: int) -> Task:
    env_path, index = worker_task.env_path, worker_task.task_index
    name = entry.id or (Path(env_path).name or "task")
    if entry.id is None or entry.count > 1:
        name = f"{name}-{index}"
    heldout = entry.heldout if entry.heldout is not None else worker_task.split != "train"
    params: Mapping[str, object] = {"env_path": env_path, "task_index": index}
    return Task(
        f"{suite}/{name}",
        suite,
        "",  # the worker gives the instruction at the reset
        max_steps=max_steps,
        split="heldout" if heldout else "train",
        params=params,
    )
