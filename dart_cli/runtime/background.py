"""Coroutines that run while a block runs.

background  starts them, cancels them at the end of the block, and raises their errors in it
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any


@contextlib.asynccontextmanager
async def background(*parts: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `parts` while the block runs, and cancel them at its end.

    A part that fails cancels the block, and its error rises from the block as it is.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(part) for part in parts]
            yield
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None
