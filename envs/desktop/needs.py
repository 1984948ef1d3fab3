"""Optional requirements of a task: GIMP, or the accessibility tree.

needs_widgets      whether its evaluator reads widgets
missing_packages   apt packages that it needs and this host does not have
"""

from __future__ import annotations

import shutil

from envs.desktop.accessibility import PACKAGES, has_accessibility
from envs.desktop.host_resources import PATH
from envs.taskfile import TaskFile

APPLICATIONS = ("gimp",)
"""Optional ones: `snapshot` of their tasks, program and apt package alike."""


def needs_widgets(task: TaskFile) -> bool:
    """Whether an evaluator reads the accessibility tree."""
    return any(
        check.result is not None and check.result.type == "accessibility_tree"
        for check in task.evaluator.checks
    )


def missing_packages(task: TaskFile) -> list[str]:
    """The packages to install, [] if none."""
    missing = [
        name
        for name in APPLICATIONS
        if task.snapshot == name and shutil.which(name, path=PATH) is None
    ]
    if needs_widgets(task) and not has_accessibility():
        missing.append(PACKAGES)
    return missing
