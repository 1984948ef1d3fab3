"""Workers in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "cuabench"
SERVER = Path(__file__).with_name("worker_server.py")


def own_suite(tasks: Path) -> str:
    """The name of the suite of a file of tasks: that of a module beside it."""
    module = tasks.with_suffix(".py")
    module.write_text(
        f"from dart_cuabench import CuabenchSuite\n\nsuite = CuabenchSuite({str(tasks)!r})\n"
    )
    return f"{module}:suite"


@contextmanager
def worker(port: int = 0) -> Iterator[str]:
    """The address of a worker that runs until the end of the block."""
    arguments = [sys.executable, str(SERVER), *([str(port)] if port else [])]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()
