"""AndroidSuite: a folder of task files, and the environments that play them. Experimental.

The folder that ships, tasks/, holds a few files that any recent Android can play.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from bus.errors import TaskError
from envs.android.adb import find_adb
from envs.android.env import AndroidEnv, check_file
from envs.base import Task
from envs.options import ImageEncoding, Pause, Seconds, SharedPools, checked
from envs.taskfile import load_tasks

logger = logging.getLogger(__name__)


class AndroidSuite:
    """Task files of one folder, played on devices."""

    def __init__(self, folder: str | Path = "", *, name: str = "android") -> None:
        self.name = name
        loaded = load_tasks(Path(folder) if folder else Path(__file__).parent / "tasks")
        errors = list(loaded.errors)
        self._files = {}
        for file in loaded.tasks.values():
            try:
                check_file(file)
                self._files[f"{name}/{file.id}"] = file
            except TaskError as error:
                errors.append(error)
        for each in errors:
            logger.error("left out: %s", each)
        self.tasks: Mapping[str, Task] = {
            task_id: Task(
                task_id,
                name,
                file.instruction,
                max_steps=file.max_steps,
                split=file.split,
                feasible=not file.evaluator.infeasible,
                evaluated=not file.evaluator.missing,
            )
            for task_id, file in self._files.items()
        }
        self._serials = SharedPools[str]("serial", str)

    @checked
    def make_env(
        self,
        *,
        serial: str | list[str] = "",
        adb: str = "",
        snapshot: str = "",
        pause_s: Pause = 1.0,
        encoding: ImageEncoding = "png",
        deadline_s: Seconds = 30.0,
    ) -> AndroidEnv:
        """An environment with a device of its own, which the first reset asks for.

        `serial` names the device as `adb devices` does (a list: one for each slot; empty: the only
        one there is), `adb` the program, `snapshot` the emulator's snapshot that each reset restores.
        `pause_s` is the time a device gets to react to an action, `deadline_s` the longest time of
        one command. Raises TaskError.
        """
        return AndroidEnv(
            self.name,
            self._files,
            adb,
            self._serials.of(serial),
            snapshot=snapshot,
            pause_s=pause_s,
            encoding=encoding,
            deadline_s=deadline_s,
        )

    def check_parts(self, *, adb: str = "", **_: object) -> None:
        """Raise MissingPartError where adb is not installed."""
        find_adb(adb)
