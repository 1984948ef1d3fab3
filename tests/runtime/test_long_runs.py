"""A supervised run of days in simulated time: the supervisor is the real one, its processes follow a script."""

from __future__ import annotations

import asyncio
import re
import selectors
import signal
from collections.abc import Callable, Coroutine, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest

from dart_cli.runtime.supervisor import (
    RESTARTS,
    ChildError,
    Progress,
    Restarts,
    Supervisor,
)

MINUTE_S, HOUR_S = 60.0, 3600.0
DAY_S = 24 * HOUR_S
WEEK_S = 7 * DAY_S
FOR_EVER = 10 * WEEK_S


class _Jumps(selectors.DefaultSelector):
    """Waits for no time: where nothing is ready, the clock jumps to when something is due."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0 if timeout is not None else 10.0)
        if not ready:
            assert timeout is not None, "everything waits, and nothing is due"
            self.now += timeout
        return ready


def in_simulated_time(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` in a loop whose waits take no time, and whose clock advances by them all the same."""
    jumps = _Jumps()

    class Loop(asyncio.SelectorEventLoop):
        def time(self) -> float:
            return jumps.now

    with asyncio.Runner(loop_factory=lambda: Loop(jumps)) as runner:
        runner.run(work)


class Scripted:
    """A process that ends with `code` after `life_s`, or with 0 when it is asked to. See supervisor.Process."""

    def __init__(self, life_s: float, code: int) -> None:
        self.output = asyncio.StreamReader()
        self.returncode: int | None = None
        self._code = code
        self._asked = asyncio.Event()
        self._living = asyncio.create_task(self._live(life_s))

    async def _live(self, life_s: float) -> int:
        try:
            async with asyncio.timeout(life_s):
                await self._asked.wait()
            self.returncode = 0
        except TimeoutError:
            self.returncode = self._code
        self.output.feed_eof()
        return self.returncode

    async def wait(self) -> int:
        return await asyncio.shield(self._living)

    def signal_group(self, number: signal.Signals) -> None:
        self._asked.set()

    def how_it_ended(self, code: int) -> str:
        return f"ended with {code}"


class Run:
    """A run of data, which lives for ever, and of one other process, whose lives a script gives."""

    def __init__(self, folder: Path, lives: Sequence[float] | Any, *, code: int = 1) -> None:
        self.told: list[str] = []
        self.starts: list[float] = []  # seconds since the run began
        self.checkpoints = 0
        self.ended_s = 0.0
        self._lives = iter(lives)
        self._log, self._code = folder / "up.log", code

    async def _start(self, name: str, _: Sequence[str], __: asyncio.Event) -> Scripted:
        if name == "data":
            return Scripted(FOR_EVER, 1)
        self.starts.append(asyncio.get_running_loop().time() - self._began)
        return Scripted(next(self._lives), self._code)

    async def go(self, seconds: float, progress: Callable[[], int] | None = None) -> None:
        """Let it run for so long; raises ChildError where it ends before."""
        loop = asyncio.get_running_loop()
        self._began = loop.time()
        supervisor = Supervisor(
            {"it": [], "data": []},
            leaders=["data"],
            restarts=RESTARTS,
            log_file=self._log,
            notice=self.told.append,
            start=self._start,
            progress={} if progress is None else {"it": Progress("checkpoint", progress)},
        )
        stop = asyncio.Event()
        loop.call_later(seconds, stop.set)
        try:
            await supervisor.run(stop)
        finally:
            self.ended_s = loop.time() - self._began


@pytest.mark.parametrize(
    ("life_s", "within_day"),
    [(2 * DAY_S, 1), (DAY_S / 2, 2), (HOUR_S + MINUTE_S, 24)],
)
def test_a_process_that_dies_now_and_then_ends_no_run_of_two_weeks_and_each_notice_says_how_often(
    tmp_path: Path, life_s: float, within_day: int
) -> None:
    run = Run(tmp_path, repeat(life_s))
    in_simulated_time(run.go(2 * WEEK_S))
    assert run.ended_s == pytest.approx(2 * WEEK_S, abs=MINUTE_S)
    deaths = 2 * WEEK_S // life_s
    assert len(run.told) in (deaths - 1, deaths)  # of which the last may coincide with the end
    assert all("starting it again (1/3" in line for line in run.told), "each is the first in a row"
    often = [int(result[1]) for line in run.told if (result := re.search(r"(\d+) times", line))]
    assert max(often, default=1) == within_day
    pauses = [
        start - before - life_s for before, start in zip(run.starts, run.starts[1:], strict=False)
    ]
    assert max(pauses) < 2.5, "the pause before a start is that of a first death"


@pytest.mark.parametrize("after_s", [0.0, WEEK_S])
def test_a_crash_loop_ends_the_run_at_its_fourth_death_whenever_it_begins(
    tmp_path: Path, after_s: float
) -> None:
    healthy = repeat(2 * DAY_S, int(after_s // (2 * DAY_S)))
    run = Run(tmp_path, chain(healthy, repeat(1.0)))
    with pytest.raises(
        ChildError, match=r"it ended with 1 .*restarted 3 times, and it never lived"
    ):
        in_simulated_time(run.go(FOR_EVER))
    assert run.ended_s < after_s + 5 * MINUTE_S
    assert len(run.starts) == after_s // (2 * DAY_S) + 1 + RESTARTS - (after_s > 0)


@pytest.mark.parametrize(("life_s", "lasts"), [(HOUR_S - 1, False), (HOUR_S, True)])
def test_a_process_recovers_by_an_hour_of_life_and_not_by_less(
    tmp_path: Path, life_s: float, lasts: bool
) -> None:
    run = Run(tmp_path, repeat(life_s))
    if lasts:
        in_simulated_time(run.go(WEEK_S))
        return
    with pytest.raises(ChildError, match="restarted 3 times"):
        in_simulated_time(run.go(WEEK_S))
    assert len(run.starts) == 1 + RESTARTS


def test_time_in_which_a_process_waits_for_its_place_is_none_of_its_life(tmp_path: Path) -> None:
    class Late(Run):
        async def _start(self, name: str, *rest: Any) -> Scripted:
            await asyncio.sleep(2 * HOUR_S)
            return await super()._start(name, *rest)

    run = Late(tmp_path, repeat(1.0))
    with pytest.raises(ChildError, match="restarted 3 times"):
        in_simulated_time(run.go(WEEK_S))


def test_a_trainer_that_dies_after_each_checkpoint_ends_no_run(tmp_path: Path) -> None:
    run = Run(tmp_path, repeat(20 * MINUTE_S))
    in_simulated_time(run.go(WEEK_S, lambda: 10 * len(run.starts)))
    assert run.ended_s == pytest.approx(WEEK_S, abs=MINUTE_S)
    assert "(1/3, 72 times within a day)" in run.told[-1]


def test_a_trainer_that_completes_no_checkpoint_ends_the_run_however_long_it_lives(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, repeat(DAY_S))
    with pytest.raises(ChildError, match="restarted 3 times without a new checkpoint"):
        in_simulated_time(run.go(WEEK_S, lambda: 40))
    assert len(run.starts) == 1 + RESTARTS


def test_a_checkpoint_that_is_made_again_after_one_was_lost_counts_once(tmp_path: Path) -> None:
    """One that proves damaged is set aside; the run must not go round in that circle for ever."""
    run = Run(tmp_path, repeat(HOUR_S))
    with pytest.raises(ChildError, match="restarted 3 times without a new checkpoint"):
        in_simulated_time(run.go(WEEK_S, lambda: 10 * (1 + len(run.starts) % 2)))
    assert len(run.starts) <= 2 + 2 * RESTARTS


def test_a_users_mistake_ends_the_run_after_a_week_too(tmp_path: Path) -> None:
    run = Run(tmp_path, repeat(WEEK_S), code=2)
    with pytest.raises(ChildError, match="it ended with 2"):
        in_simulated_time(run.go(FOR_EVER))
    assert len(run.starts) == 1


def test_restarts_are_counted_for_a_day_and_in_bounded_memory() -> None:
    counted = Restarts()
    for second in range(20_000):
        counted.add(float(second))
    assert counted.within_day(20_000.0) == 10_000
    assert counted.within_day(15_000.0 + DAY_S) == 4_999
    assert counted.within_day(20_000.0 + DAY_S) == 0
