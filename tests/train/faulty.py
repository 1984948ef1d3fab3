"""`dart train` whose rank dies or hangs in the middle of a command, for tests: python -m tests.train.faulty

    FAULT=rank:command:number:how   how: kill (SIGKILL), stop (SIGSTOP); at the command's number-th time

Without FAULT it is `dart train` of the configuration in CONFIG, as JSON.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections import Counter
from pathlib import Path

from dart_cli.config.schema import Config
from dart_cli.runtime.role import run_role
from dart_cli.train.ranks import processes
from dart_cli.train.ranks.follower import serve
from dart_cli.train.ranks.watch import CONFIG, FOLDER_VARIABLE, RankWatch, rank_of

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def break_at(rank: int, doing: str, number: int, how: str) -> None:
    """Make this rank break when it begins work whose name starts with `doing` for the `number`-th time."""
    calls: Counter[str] = Counter()
    begin = RankWatch.doing

    def broken(self: RankWatch, what: str, **others: object) -> None:
        begin(self, what, **others)  # type: ignore[arg-type]
        if rank_of() == rank and what.startswith(doing):
            calls[doing] += 1
            if calls[doing] == number:
                os.kill(os.getpid(), SIGNALS[how])

    RankWatch.doing = broken  # type: ignore[method-assign]


def main() -> int:
    """Run the rank that the environment names."""
    gc.set_threshold(20_000)  # as `dart` does
    if fault := os.environ.get("FAULT"):
        rank, doing, number, how = fault.split(":")
        break_at(int(rank), doing, int(number), how)
    if rank_of():
        file = Path(os.environ[FOLDER_VARIABLE]) / CONFIG
        return serve(Config.model_validate_json(file.read_text(encoding="utf-8")))
    processes.PROGRAM = ("-m", "tests.train.faulty")
    config = Config.model_validate_json(os.environ["CONFIG"])

    async def learn(_name: str, stop: asyncio.Event) -> None:
        from dart_cli.train.process import run

        await run(config, stop)

    return run_role("train", config, learn)


if __name__ == "__main__":
    sys.exit(main())
