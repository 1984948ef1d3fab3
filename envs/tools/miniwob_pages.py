"""The pages of MiniWoB++'s tasks, which the suites `miniwob` and `browsergym` both show.

find_pages   the folder of the pages in the package miniwob
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from bus.errors import MissingPartError


def find_pages() -> Path:
    """Return the folder of the tasks' pages. Raises MissingPartError with the install step."""
    spec = importlib.util.find_spec("miniwob")
    if spec is not None and spec.origin is not None:
        folder = Path(spec.origin).parent / "html" / "miniwob"
        if folder.is_dir():
            return folder
    raise MissingPartError(
        "the package miniwob is not installed: pip install -e '.[miniwob]' in dart's folder"
    )
