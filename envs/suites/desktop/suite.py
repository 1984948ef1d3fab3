"""Suite `desktop`: its task files, its options, and what must be installed.

This module does not import the packages of the extra `desktop`, so that tasks can be listed without them.
Some tasks have further requirements: GIMP, or the accessibility tree (missing_packages).
"""

from __future__ import annotations

import importlib.util
import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from bus.errors import MissingPartError, TaskError
from envs.contract.base import GuiEnv, ObservedKind, Task
from envs.contract.options import ImageEncoding, Seconds, Size, checked
from envs.suites.desktop.accessibility import PACKAGES, has_accessibility
from envs.suites.desktop.host_resources import PATH
from envs.tools.taskfile import TaskFile, load_tasks

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent / "tasks"
PYTHON_PACKAGES = ("Xlib", "docx", "openpyxl", "pptx")


class DesktopSuite:
    """The tasks of a folder of task files. A malformed file is logged and left out.

    Tasks that need an optional part that is not installed are left out as well.
    """

    name = "desktop"
    observes: tuple[ObservedKind, ...] = ("accessibility",)

    def __init__(self, folder: Path = FOLDER) -> None:
        loaded = load_tasks(folder)
        self.errors = loaded.errors
        for error in loaded.errors:
            logger.error("left out: %s", error)
        missing = {file.id: missing_packages(file) for file in loaded.tasks.values()}
        packages = sorted({name for names in missing.values() for name in names})
        if packages:
            left_out = ", ".join(task_id for task_id, names in missing.items() if names)
            logger.info("left out: %s; to play them: apt install %s", left_out, " ".join(packages))
        self.files = {
            f"{self.name}/{file.id}": file for file in loaded.tasks.values() if not missing[file.id]
        }
        self.tasks: Mapping[str, Task] = {
            name: file.task(self.name, application=file.snapshot)
            for name, file in self.files.items()
        }

    @checked
    def make_env(
        self,
        *,
        size: Size = (1280, 720),
        encoding: ImageEncoding = "png",
        settle_ms: Annotated[float, Field(ge=0, le=2000)] = 120.0,
        deadline_s: Seconds = 20.0,
        user: str = "nobody",
        memory_mb: Annotated[int, Field(ge=512)] = 2048,
        observe: Sequence[ObservedKind] = (),
    ) -> GuiEnv:
        """Return an environment with its own display.

        After an action it waits until the screen has not changed for `settle_ms`; a call that hangs for
        `deadline_s` breaks the episode. If this process is root, applications run as `user`. `memory_mb` is
        the limit of all programs of a desktop together. Raises TaskError, and MissingPartError if a package
        is not installed; a missing program is an error of the first reset.
        """
        width, height = size
        if not (800 <= width <= 3840 and 600 <= height <= 2160):
            raise TaskError(f"size must be 800x600 to 3840x2160, got {width}x{height}")
        _check_packages()
        from envs.suites.desktop.desktop import Settings
        from envs.suites.desktop.env import DesktopEnv
        from envs.suites.desktop.host_resources import find_user

        find_user(user)
        settings = Settings(width, height, user, memory_mb, deadline_s=deadline_s)
        return DesktopEnv(
            self.files,
            settings,
            encoding=encoding,
            settle_s=settle_ms / 1000,
            observe=observe,
        )

    def check_parts(self, *, observe: Sequence[ObservedKind] = (), **_: object) -> None:
        """Raise MissingPartError if a program or a package is not installed."""
        _check_packages()
        from envs.suites.desktop.host_resources import find_programs
        from envs.suites.desktop.session import PROGRAMS

        find_programs(PROGRAMS)
        if observe and not has_accessibility():
            raise MissingPartError(
                f'env.observe = "accessibility" needs the packages: apt install {PACKAGES}'
            )


def _check_packages() -> None:
    """Raise MissingPartError if a Python package is not installed."""
    if any(importlib.util.find_spec(package) is None for package in PYTHON_PACKAGES):
        raise MissingPartError(
            "packages of suite desktop are not installed: pip install -e '.[desktop]' in dart's folder"
        )


APPLICATIONS = ("gimp",)
"""Optional applications: the name of the program, of its apt package, and the `snapshot` of its tasks."""


def missing_packages(task: TaskFile) -> list[str]:
    """Return the apt packages that a task needs and that are not installed."""
    missing = [
        name
        for name in APPLICATIONS
        if task.snapshot == name and shutil.which(name, path=PATH) is None
    ]
    if task.reads("accessibility_tree") and not has_accessibility():
        missing.append(PACKAGES)
    return missing
