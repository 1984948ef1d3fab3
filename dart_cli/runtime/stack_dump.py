"""What a process is doing, on request: SIGUSR1 dumps all stacks to its log.

    ignored    called first of all: SIGUSR1 would otherwise end the process
    dumped_to  while inside, a dump goes to the given file: threads first, then asyncio's tasks
    END        marks the end of a dump

faulthandler writes the threads' part from C, so it appears also while Python is stuck in a call that
does not return, such as a GPU kernel. The tasks' part needs Python, and appears when that call has
returned.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import signal
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TextIO

SIGNAL = signal.SIGUSR1
END = "end of stacks"
_MOST_TASKS = 200
_MOST_FRAMES = 30


def ignored() -> None:
    """Ignore SIGUSR1 until `dumped_to` knows where to write."""
    signal.signal(SIGNAL, signal.SIG_IGN)


@contextlib.contextmanager
def dumped_to(log_file: Path) -> Iterator[None]:
    """On SIGUSR1 append a dump to `log_file`; for the main thread."""
    with log_file.open("a", encoding="utf-8") as file:

        def on_signal(_number: int, _frame: FrameType | None) -> None:
            _write_tasks(file)

        before = signal.signal(SIGNAL, on_signal)
        faulthandler.register(SIGNAL, file, all_threads=True, chain=True)
        try:
            yield
        finally:
            faulthandler.unregister(SIGNAL)
            signal.signal(SIGNAL, signal.SIG_IGN if before is None else before)


def _write_tasks(file: TextIO) -> None:
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:  # no event loop runs
        tasks = set()
    lines = [f"{len(tasks)} asyncio tasks"]
    for task in sorted(tasks, key=asyncio.Task.get_name)[:_MOST_TASKS]:
        lines.append(f"Task {task.get_name()}:")
        lines += [f"  {place}" for place in _awaited(task.get_coro())]
    # Its own handle, which only this handler uses: no other write can be interrupted by it.
    file.write("\n".join([*lines, END, ""]))
    file.flush()


def _awaited(waiting: Any) -> Iterator[str]:
    """The line that a coroutine is at, and what it awaits, outermost first."""
    for _ in range(_MOST_FRAMES):
        kind = next((kind for kind in ("cr", "gi", "ag") if hasattr(waiting, f"{kind}_code")), "")
        if not kind:
            if waiting is not None:
                yield f"awaits {type(waiting).__name__}"
            return
        code: CodeType = getattr(waiting, f"{kind}_code")
        frame: FrameType | None = getattr(waiting, f"{kind}_frame")
        line = frame.f_lineno if frame else code.co_firstlineno
        yield f'File "{code.co_filename}", line {line} in {code.co_qualname}'
        waiting = getattr(waiting, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
