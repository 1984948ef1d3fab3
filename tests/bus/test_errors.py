"""A failure of the file system is told with its own cure."""

from __future__ import annotations

import errno

import pytest
from safetensors import SafetensorError

from bus.errors import cure_of


@pytest.mark.parametrize(
    ("error", "cure"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "free space on its disk"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "free space on its disk"),
        (PermissionError(errno.EACCES, "Permission denied"), "give this user the right to it"),
        (OSError(errno.EROFS, "Read-only file system"), "its file system can only be read"),
        (OSError(errno.EMFILE, "Too many open files"), "raise `ulimit -n`"),
        (OSError(errno.EIO, "Input/output error"), "its disk fails"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "free space on its"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), "copy it again"),
        (ValueError("half of it is missing"), "copy it again"),
    ],
)
def test_the_cure_is_that_of_the_failure(error: Exception, cure: str) -> None:
    assert cure_of(error, "copy it again").startswith(cure)
