"""The files of a weight set, held open while vLLM's processes read them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from bus.errors import WeightsError

WHOLE = "model.safetensors"
"""The file of a whole set in its directory (dart_cli/weights/manifest.py)."""


@contextlib.contextmanager
def open_files(directory: Path) -> Iterator[list[str]]:
    """Paths to a set's open files for other processes of this user, valid if the set is removed.

    The trainer removes old versions without knowing which one a worker reads. Raises WeightsError
    for a version that is there as a delta alone.
    """
    if directory.is_dir() and not os.path.lexists(directory / WHOLE):
        raise WeightsError(
            f"{directory} holds only what changed since the version before, and vLLM reads whole "
            "sets: take a version that has model.safetensors"
        )
    with contextlib.ExitStack() as stack:
        try:
            handles = [
                stack.enter_context(file.open("rb")) for file in directory.glob("*.safetensors")
            ]
        except OSError as error:
            raise WeightsError(f"{directory}: removed while it was read ({error})") from None
        if not handles:
            raise WeightsError(f"{directory}: removed while it was read")
        yield [f"/proc/{os.getpid()}/fd/{handle.fileno()}" for handle in handles]
