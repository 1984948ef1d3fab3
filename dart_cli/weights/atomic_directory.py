"""Directories that exist whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

_DRAFT = ".draft"


@contextlib.contextmanager
def whole_directory(target: Path) -> Iterator[Path]:
    """A draft to fill, which becomes `target` at the end of the block, synced to disk.

    If the block raises, or the process dies, there is no `target`. Drafts that dead processes left
    beside it are cleared: a directory of targets has one writer. Raises OSError; FileExistsError
    if `target` exists.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(f".*{_DRAFT}"):
        shutil.rmtree(left, ignore_errors=True)
    if target.exists():
        raise FileExistsError(f"{target} exists")
    draft = target.parent / f".{target.name}{_DRAFT}"
    draft.mkdir()
    try:
        yield draft
        for path in (*draft.iterdir(), draft):
            _sync(path)
        draft.rename(target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    _sync(target.parent)


def _sync(path: Path) -> None:
    """Force a file or directory to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
