"""AndroidSuite: a folder of task files, and the environments that play them. Experimental.

The folder that ships, tasks/, holds a few files that any recent Android can play.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path

from bus.errors import TaskError
from envs.android.adb import find_adb
from envs.android.env import AndroidEnv, check_file
from envs.base import Task
from envs.pool import ResourcePool
from envs.screenshots import ImageEncoding, as_encoding
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
        self._lock = threading.Lock()
        self._serials: dict[tuple[str, ...], ResourcePool[str]] = {}

    def make_env(
        self,
        *,
        serial: str | list[str] = "",
        adb: str = "",
        snapshot: str = "",
        pause_s: float = 1.0,
        encoding: ImageEncoding = "png",
        deadline_s: float = 30.0,
    ) -> AndroidEnv:
        """An environment with a device of its own, which the first reset asks for.

        `serial` names the device as `adb devices` does (a list: one for each slot; empty: the only
        one there is), `adb` the program, `snapshot` the emulator's snapshot that each reset restores.
        `pause_s` is the time a device gets to react to an action, `deadline_s` the longest time of
        one command. Raises TaskError.
        """
        for name, value, least in (("pause_s", pause_s, 0), ("deadline_s", deadline_s, 1)):
            if isinstance(value, bool) or not isinstance(value, int | float) or value < least:
                raise TaskError(f"{name} must be a number of at least {least}, got {value!r}")
        encoding = as_encoding(encoding)
        return AndroidEnv(
            self.name,
            self._files,
            adb,
            self._shared((serial,) if isinstance(serial, str) else tuple(serial)),
            snapshot=snapshot,
            pause_s=pause_s,
            encoding=encoding,
            deadline_s=deadline_s,
        )

    def check_parts(self, *, adb: str = "", **_: object) -> None:
        """Raise MissingPartError where adb is not installed."""
        find_adb(adb)

    def _shared(self, serials: tuple[str, ...]) -> ResourcePool[str]:
        """The same devices for all environments of the process that name the same list."""
        with self._lock:
            if serials not in self._serials:
                self._serials[serials] = ResourcePool(serials, "serial")
            return self._serials[serials]
