"""Whole trainers as processes, with all ranks, and a data service that records what it receives."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from dart_cli.config.schema import Config
from tests.train.parts import Data, serving
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
FAULTY = ("-m", "tests.train.faulty")


async def run_trainer(
    config: Config,
    data: Data,
    fault: str = "",
    *,
    program: tuple[str, ...] = FAULTY,
    stop: asyncio.Event | None = None,
) -> tuple[int, str]:
    """A trainer's process and its ranks, against `data`; its exit code and what it said.

    `fault` is faulty.py's. Once `stop` is set, the process is asked to end.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "CONFIG": config.model_dump_json(),
        "FAULT": fault,
    }
    async with serving(config.run.dir, data), asyncio.timeout(2 * PATIENCE_S):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *program),
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            cwd=ROOT,
        )
        ending = asyncio.create_task(process.communicate())
        if stop is not None:
            ranks = asyncio.create_task(stop.wait())
            await asyncio.wait([ending, ranks], return_when=asyncio.FIRST_COMPLETED)
            ranks.cancel()
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
        _, output = await ending
    assert process.returncode is not None
    return process.returncode, output.decode(errors="replace")
