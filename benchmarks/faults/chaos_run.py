"""Kill a random process of a run every few seconds, and measure what is lost.

    DowntimeTracker      which processes are down, and when they are back at work
    CheckpointProgress   whether the trainer lives long enough to write checkpoints
    ChaosRun             a run with kills, or without (the control)
    run_chaos            starts the run, kills for a given time (or never), ends it
    report               audits its database (benchmarks/faults/audit.py) and reports what the kills cost

A process is back when the data service has received a heartbeat of its successor, past its start; `dart status`,
which has no heartbeat, when it has written a line.

`effective_time_ratio` is the share of time that was not lost. It is a lower bound of the time that the
trainer could use, and needs no second run for comparison:

    lost = down        seconds in which at least one process was down, though the others go on
         + retrained   batches trained again because no checkpoint held them, at the median time of one
         + replayed    steps of episodes that were cut off, at the run's own steps per second

A killed `dart status` costs the run nothing and is not in `down`. `pace_ratio` (benchmarks/faults/pace.py) compares
the actual progress of both runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from random import Random
from statistics import median
from typing import Any

from benchmarks.faults.audit import CUT, FinishedTrajectories, audit
from benchmarks.faults.pace import LearningCurve, learning_curve
from benchmarks.faults.supervise import STATUS, ChaosSupervisor, role_of
from benchmarks.run_times import step_times
from bus.errors import BusError, DartError
from bus.snapshot import Snapshot
from dart_cli.config.schema import Config
from dart_cli.data.store.open import open_reader
from dart_cli.data.store.reader import Reader
from dart_cli.runtime.background import background
from dart_cli.runtime.logs import log_dir
from dart_cli.status.watch import Watcher

TRAIN = "train"
LOOK_S = 0.1
_START_S = 300.0
"""Longest wait for the first start of all processes, and for the last one to come back."""


@dataclass
class DowntimeTracker:
    """A record of which processes are down, and since when."""

    supervisor: ChaosSupervisor
    snapshot: Snapshot | None = None
    recoveries_s: dict[str, list[float]] = field(default_factory=dict)  # by role
    down_s: float = 0.0  # seconds in which any process but STATUS was down
    _down: dict[str, list[float]] = field(default_factory=dict)  # name -> monotonic seconds
    _since: float = 0.0

    def killed(self, name: str) -> None:
        """Note that a process is down from now on."""
        now = time.monotonic()
        if not self._matters() and name != STATUS:
            self._since = now
        self._down.setdefault(name, []).append(now)

    @property
    def down(self) -> list[str]:
        """The names of the processes that are not back yet."""
        return list(self._down)

    def see(self, snapshot: Snapshot) -> None:
        """Note which processes are back."""
        self.snapshot = snapshot
        working = self._working()
        for name in self.down:
            if self.supervisor.pid(name) in working:
                self._is_back(name)

    def all_work(self) -> bool:
        """Return True if the present process of every command has begun its work."""
        working = self._working()
        return all(self.supervisor.pid(name) in working for name in self.supervisor.commands)

    def _is_back(self, name: str) -> None:
        now, before = time.monotonic(), self._matters()
        recoveries = self.recoveries_s.setdefault(role_of(name), [])
        recoveries += [now - at for at in self._down.pop(name)]
        if before and not self._matters():
            self.down_s += now - self._since

    def _matters(self) -> bool:
        return bool(self._down.keys() - {STATUS})

    def _working(self) -> set[int]:
        """Return the process ids of processes that are past their start."""
        processes = self.snapshot.processes if self.snapshot else []
        pids = {p.pid for p in processes if p.state not in ("starting", "stopping")}
        return pids | self.supervisor.spoken


@dataclass
class CheckpointProgress:
    """A record of the trainer's progress: work since its newest checkpoint is repeated after a kill."""

    config: Config
    lost_lives: int = 0  # trainer processes that were killed before they wrote a checkpoint
    _in_a_row: int = 0
    _newest: str = ""

    def trainer_killed(self) -> str:
        """Return the warning to print at this kill; empty if the trainer makes progress."""
        folder = self.config.run.dir / "checkpoints"
        names = [path.name for path in folder.glob("c*[0-9]")] if folder.is_dir() else []
        newest = max(names, key=lambda name: (len(name), name), default="")
        is_lost, self._newest = newest == self._newest, newest
        self.lost_lives += is_lost
        self._in_a_row = self._in_a_row + 1 if is_lost else 0
        if self._in_a_row < 2:
            return ""
        return (
            f"the trainer makes no progress: killed {self._in_a_row} times since its newest checkpoint "
            f"({newest or 'none yet'}); kill less often (--every), or checkpoint more often "
            f"(train.checkpoint_every = {self.config.train.checkpoint_every})"
        )


@dataclass
class ChaosRun:
    """A record of what happened to a run."""

    config: Config
    watch: DowntimeTracker
    checkpoint_progress: CheckpointProgress
    finished: FinishedTrajectories = field(default_factory=FinishedTrajectories)
    kills: Counter[str] = field(default_factory=Counter)  # by role
    kills_at: list[float] = field(default_factory=list)  # seconds since `began`
    began: float = 0.0  # unix seconds: all processes worked
    seconds: float = 0.0

    def curve(self) -> LearningCurve:
        """Return the learning curve of the run."""
        with open_reader(self.config.run.dir) as reader:
            return learning_curve(reader, self.began)


async def run_chaos(
    config: Config,
    commands: Mapping[str, Sequence[str]],
    *,
    seconds: float,
    every_s: float,
    roles: Sequence[str],
    seed: int,
    say: Callable[[str], None],
) -> ChaosRun:
    """Run `commands` for `seconds`, killing one about every `every_s` seconds; 0 kills none.

    The `roles` are killed in turn, in random order, so that all are killed equally often. `commands` is
    worker name -> arguments of `dart`, the data process last. Raises DartError where the run does not
    start or come back.
    """
    config.run.dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    log_dir(config.run.dir).mkdir(exist_ok=True)
    choice = Random(seed)
    with (log_dir(config.run.dir) / "chaos.log").open("a", encoding="utf-8") as log:
        run = ChaosRun(
            config, DowntimeTracker(ChaosSupervisor(commands, log)), CheckpointProgress(config)
        )
        watch, supervisor = run.watch, run.watch.supervisor
        keeping = [asyncio.create_task(supervisor.keep(name)) for name in commands]
        try:
            async with background(_look(run)):
                await _until(watch.all_work, "the first start")
                run.began = time.time()
                if every_s:
                    await _kill(run, seconds, every_s, roles, choice, say)
                else:
                    await asyncio.sleep(seconds)
                await _until(lambda: not watch.down, "the last one to come back")
                await _until(watch.all_work, "all to work again")
                run.seconds = time.time() - run.began
        finally:
            await supervisor.end()
            await asyncio.gather(*keeping)
    return run


async def _kill(
    run: ChaosRun,
    seconds: float,
    every_s: float,
    roles: Sequence[str],
    choice: Random,
    say: Callable[[str], None],
) -> None:
    """Kill one process after another."""
    supervisor, began, turn = run.watch.supervisor, time.monotonic(), list[str]()
    while time.monotonic() - began < seconds:
        await asyncio.sleep(every_s * choice.uniform(0.5, 1.5))
        turn = turn or choice.sample(roles, len(roles))
        names = [n for n in supervisor.commands if role_of(n) == turn[-1] and supervisor.pid(n)]
        if not names:  # it is just being restarted: try again later
            continue
        name, role = choice.choice(names), turn.pop()
        if role == TRAIN and (progress_of_trainer := run.checkpoint_progress.trainer_killed()):
            say(progress_of_trainer)
        run.watch.killed(name)
        supervisor.kill(name)
        run.kills[role] += 1
        run.kills_at.append(time.monotonic() - began)
        say(f"{run.kills_at[-1]:.0f} s: killed {name}")


async def _look(run: ChaosRun) -> None:
    """Ask the data service for snapshots and note what is finished, until cancelled."""
    run_dir = run.config.run.dir
    async with Watcher(run.config) as watcher:
        while True:
            with contextlib.suppress(BusError):  # data is down, too
                run.watch.see(await watcher.snapshot())
            with contextlib.suppress(DartError), open_reader(run_dir) as reader:
                run.finished.update(reader)
            await asyncio.sleep(LOOK_S)


async def _until(condition: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(_START_S):
            while not condition():  # noqa: ASYNC110 - of other processes
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        raise DartError(f"waited {_START_S:.0f} s for {what}; see logs/chaos.log") from None


# --- what it cost ---------------------------------------------------------------------------


def report(run: ChaosRun) -> dict[str, Any]:
    """Return the last line of benchmarks/faults/chaos.py, without the values that need the control."""
    run_dir, watch = run.config.run.dir, run.watch
    with (
        open_reader(run_dir) as reader,
        (log_dir(run_dir) / "train.log").open(encoding="utf-8", errors="replace") as lines,
    ):
        audited = audit(reader, run.finished, lines)
        step_s = [point.value for point in reader.metrics("step_s")]
        trained = sum(batch.state == "trained" for batch in reader.batches())
        share_cut = _share_cut(reader)
    lost = {
        "down": watch.down_s,
        "retrained": audited.retrained * median(step_s or [0.0]),
        "replayed": share_cut * (run.seconds - watch.down_s),
    }
    recoveries = [seconds for times in watch.recoveries_s.values() for seconds in times]
    return {
        "seconds": round(run.seconds, 1),
        "kills": run.kills.total(),
        "kills_by_role": dict(sorted(run.kills.items())),
        **asdict(audited),
        "recovery_median_s": round(median(recoveries or [0.0]), 2),
        "recovery_max_s": round(max(recoveries, default=0.0), 2),
        "recovery_by_role_s": {
            role: round(median(times), 2) for role, times in sorted(watch.recoveries_s.items())
        },
        "effective_time_ratio": round(1 - sum(lost.values()) / run.seconds, 4),
        "lost_s": {name: round(seconds, 1) for name, seconds in lost.items()},
        "trainer_lives_lost": run.checkpoint_progress.lost_lives,
        "ended_alone": watch.supervisor.ended_alone,
        "batches": trained,
        "success": watch.snapshot.success if watch.snapshot else None,
    }


def _share_cut(reader: Reader) -> float:
    """Return the share of steps played that belong to episodes cut off by a kill."""
    cut = {row.id for row in reader.trajectories() if row.reason in CUT}
    steps_by_trajectory = Counter(step.trajectory_id in cut for step in step_times(reader))
    return steps_by_trajectory[True] / max(1, steps_by_trajectory.total())
