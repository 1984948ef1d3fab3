"""Checks that the scripted solutions of suite `desktop` pass and that all its near misses fail.

    python benchmarks/suites/desktop_tasks.py [--times 3] [--tasks calc ...] [--slots 2]
        [--out benchmarks/results/desktop_tasks.json]
    python benchmarks/suites/desktop_tasks.py --kill-every 20 --most 100

Each repetition has another seed. Every wrong verdict is printed with the evaluator's reason, and every
minute the progress; the last line is one JSON object. `--kill-every N` kills an application or the X
server in the middle of every Nth episode, which must then be invalid, and counts leftovers at the end:
processes, folders, displays, open files.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bus.errors import EnvError
from bus.messages import Outcome
from envs.contract.base import Verdict
from envs.contract.registry import load_suite
from envs.suites.desktop.env import DesktopEnv
from envs.suites.desktop.keeper import descendants
from envs.suites.desktop.screen import children
from envs.suites.desktop.suite import DesktopSuite

PROGRESS_S = 60.0
SPARED = ("openbox", "dbus-daemon", "at-spi")  # by --kill-every: how their names begin


class Job(NamedTuple):
    """One episode."""

    task_id: str
    seed: int
    script: int  # -1 is the solution, others are near misses
    killed: bool

    @property
    def expected(self) -> Outcome:
        """The outcome that it must have."""
        return "invalid" if self.killed else "pass" if self.script < 0 else "fail"


@dataclass
class EpisodeCounts:
    """Outcomes of all episodes so far; `add` may be called by several threads."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    resets: list[float] = field(default_factory=list)  # seconds
    memory: list[float] = field(default_factory=list)  # MB of this process
    loads: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, job: Job, outcome: Outcome, told: str) -> None:
        """Count an episode, and print an unexpected outcome."""
        with self.lock:
            self.memory.append(own_mb())
            self.loads.append(os.getloadavg()[0])
            if outcome == job.expected:
                self.counts[outcome] += 1
            else:
                self.wrong.append(f"{told}: {outcome}, not {job.expected}")
                print(self.wrong[-1], flush=True)


class Slot:
    """One environment that plays what is in a queue, and remembers what its desktops left."""

    def __init__(self, suite: DesktopSuite, counts: EpisodeCounts) -> None:
        self._suite = suite
        self._counts = counts
        self._env = suite.make_env()
        self._rng = Random(0)
        self._made: dict[Path, int] = {}  # folders of desktops, sockets of displays: inodes

    def serve(self, jobs: queue.SimpleQueue[Job]) -> None:
        """Play until the queue is empty."""
        try:
            with suppress(queue.Empty):
                while True:
                    self._play(jobs.get_nowait())
        finally:
            self._env.close()

    def left(self) -> list[str]:
        """Return what its desktops left behind; a place may be another process' by now."""
        return [
            str(path)
            for path, inode in self._made.items()
            if path.exists() and path.stat().st_ino == inode
        ]

    def _play(self, job: Job) -> None:
        task = self._suite.files[job.task_id]
        what = "solution" if job.script < 0 else task.near_misses[job.script].why
        told = f"{job.task_id} seed {job.seed}, {what}"
        try:
            verdict = self._episode(job)
            outcome, reason = verdict.outcome, verdict.reason
        except EnvError as error:
            outcome, reason = "invalid", str(error)
        self._counts.add(job, outcome, f"{told} ({reason})")

    def _episode(self, job: Job) -> Verdict:
        env = self._env
        began = time.monotonic()
        env.reset(seed=job.seed, options={"task": job.task_id})
        self._counts.resets.append(time.monotonic() - began)
        for path in (env.desktop.folder, env.desktop.socket):
            self._made[path] = path.stat().st_ino
        task = env.task
        actions = task.solution if job.script < 0 else task.near_misses[job.script].actions
        victim = self._rng.randrange(len(actions)) if job.killed else -1
        for number, action in enumerate(actions):
            if number == victim:
                strike(env, self._rng)
            env.step(action)
        return env.evaluate()


def strike(env: DesktopEnv, rng: Random) -> None:
    """Kill the X server or an application with SIGKILL."""
    names = {pid: Path(f"/proc/{pid}/comm").read_text() for pid in children(env.desktop.pid)}
    victims = [pid for pid, name in names.items() if not name.startswith(SPARED)]
    os.kill(rng.choice(victims), signal.SIGKILL)


def plan(suite: DesktopSuite, arguments: argparse.Namespace) -> list[Job]:
    """All episodes, in order."""

    def scripts() -> Iterator[tuple[str, int, int]]:
        for seed in range(arguments.times):
            for task_id, task in suite.files.items():
                if any(each in task_id for each in arguments.tasks or [""]):
                    for script in range(-1, len(task.near_misses)):
                        yield task_id, seed, script

    every = arguments.kill_every
    most = arguments.most or None
    return [
        Job(*each, killed=bool(every) and number % every == 0)
        for number, each in enumerate(islice(scripts(), most))
    ]


def play_all(jobs: Sequence[Job], slots: Sequence[Slot], counts: EpisodeCounts) -> None:
    """Play the jobs, a thread for each slot; print progress."""
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    threads = [threading.Thread(target=slot.serve, args=(waiting,)) for slot in slots]
    for thread in threads:
        thread.start()
    began = told = time.monotonic()
    for thread in threads:
        while thread.is_alive():
            thread.join(1.0)
            if time.monotonic() - told > PROGRESS_S and counts.memory:
                told, done = time.monotonic(), len(counts.memory)
                left_min = (told - began) * (len(jobs) / done - 1) / 60
                wrong = f"{len(counts.wrong)} wrong"
                print(f"{done} of {len(jobs)}, {wrong}, {left_min:.0f} min left", flush=True)


def open_files() -> int:
    """Descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def own_mb() -> float:
    """Resident memory of this process, MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


def main() -> None:
    """Play, say what is wrong, and end in one JSON line."""
    parser = argparse.ArgumentParser(description="Solutions and near misses of suite desktop.")
    parser.add_argument("--suite", default="desktop")
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--tasks", nargs="*", default=[], help="parts of task ids; default: all")
    parser.add_argument("--slots", type=int, default=1)
    parser.add_argument("--kill-every", type=int, default=0)
    parser.add_argument("--most", type=int, default=0, help="episodes, at most")
    parser.add_argument("--out", type=Path, help="also write the result here")
    arguments = parser.parse_args()
    suite = load_suite(arguments.suite)
    assert isinstance(suite, DesktopSuite)
    jobs, counts = plan(suite, arguments), EpisodeCounts()
    if not jobs:
        parser.error(f"no task of suite {arguments.suite} is named like {arguments.tasks}")
    before, began = open_files(), time.monotonic()
    slots = [Slot(suite, counts) for _ in range(arguments.slots)]
    play_all(jobs, slots, counts)
    memory, loads = counts.memory, sorted(counts.loads)
    result: dict[str, Any] = {
        "benchmark": "desktop_tasks",
        "tasks": len({job.task_id for job in jobs}),
        "times": arguments.times,
        "episodes": len(jobs),
        "slots": arguments.slots,
        "kill_every": arguments.kill_every,
        "as_expected": dict(counts.counts),
        "wrong": counts.wrong,
        "not_played": len(jobs) - len(memory),  # because a slot broke
        "reset_p50_s": round(sorted(counts.resets)[len(counts.resets) // 2], 2),
        "own_memory_mb": [round(memory[at * (len(memory) - 1) // 4], 1) for at in range(5)],
        "left": {
            "processes": len(descendants(os.getpid())),
            "folders_and_displays": [each for slot in slots for each in slot.left()],
            "open_files": open_files() - before,
        },
        "minutes": round((time.monotonic() - began) / 60, 1),
        "load_average_p50_max": [round(loads[len(loads) // 2], 1), round(loads[-1], 1)],
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    sys.exit(1 if counts.wrong or result["not_played"] else 0)


if __name__ == "__main__":
    main()
