"""How fast do trajectories become durable, how little disk do they take, and how fast is a run resumed?

    python benchmarks/data_bus/store.py [--rounds 3] [--trajectories 96] [--out benchmarks/results/store.json]

submission   leases, steps with screenshots, and ends through the real Ledger and Store, TOGETHER
          messages to a transaction as `dart data` groups them, until the database is closed. The
          baseline is plain sqlite3 in the same run, interleaved: the rows that the ledger left
          behind, packed beforehand, with executemany into the same tables and indexes under the
          same settings, each row once, as many steps to a transaction. The physical limit is one
          sequential write and fsync of as many bytes as the database has.
disk      groups of one task instance each, played by the oracle with a wrong click now and then,
          in the database as it is; against one screenshot a step, and one a prompt's image.
resume    a ledger opened on a run of many trajectories, in a fresh process: seconds, memory.

Screenshots of the first part are random bytes of the usual size: as incompressible as encoded
images, each one different. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.data_bus.store_messages import (
    HISTORY_IMAGES,
    SCREENS,
    STEPS,
    ScreenSize,
    chunks,
    end_of,
    messages_of_play,
    step_of,
)
from bus.messages import Lease, LeaseRequest, StepRecord
from dart_cli.config.schema import Config
from dart_cli.config.task_split import training_tasks
from dart_cli.data.ledger import Ledger
from dart_cli.data.scheduler import make_scheduler
from dart_cli.data.store.open import DATABASE, open_store
from dart_cli.data.store.writer import Store
from envs.contract.actions import Action, Click
from envs.contract.base import Task
from envs.contract.blobs import content_hash
from envs.contract.registry import make_env

TOGETHER = 16
"""Messages to a transaction: about what `dart data` gets in the 5 ms that one stays open."""
GROUP = 8
MIB = 1 << 20
TABLES = ("groups", "trajectories", "steps", "screenshots", "screenshot_uses")


def main() -> None:
    """Measure, print what is measured, and end in one JSON line."""
    parser = argparse.ArgumentParser(description="Benchmark of the run's database.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trajectories", type=int, default=96, help="submitted a round")
    parser.add_argument("--resume", type=int, default=320_000, help="trajectories of the old run")
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="on the disk to be measured")
    parser.add_argument("--out", type=Path, help="also write the result here")
    parser.add_argument("--open", type=Path, dest="opened", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.opened is not None:
        print(json.dumps(open_ledger(arguments.opened)))
        return
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix=".store-") as scratch:
        folder = Path(scratch)
        result = {
            "benchmark": "store",
            "baseline": "plain sqlite3: the rows left behind, packed beforehand, executemany",
            "limit": "one sequential write and fsync of the database's bytes",
            "steps_a_trajectory": STEPS,
            "messages_a_transaction": TOGETHER,
            "submit": measure_hand_in(folder, arguments.rounds, arguments.trajectories),
            "disk": {suite: measure_disk(folder, suite) for suite in ("mini", "desk")},
            "resume": measure_resume(folder, arguments.resume),
        }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


# --- submission --------------------------------------------------------------------------------


def measure_hand_in(folder: Path, rounds: int, trajectories: int) -> dict[str, dict[str, float]]:
    """Return the medians over the rounds for each size of screenshots; each round runs all three in turn."""
    print(
        "submission      trajectories/s      MB/s: ledger  sqlite3  limit   ledger/sqlite3 time, CPU"
    )
    results = {}
    for screen in SCREENS:
        number = max(GROUP, int(trajectories * screen.share) // GROUP * GROUP)
        megabytes = number * (STEPS + 1) * screen.encoded / 1e6
        timings: dict[str, list[Timing]] = {"ledger": [], "sqlite3": [], "limit": []}
        for turn in range(rounds):
            ours, base = folder / f"{screen.name}-{turn}", folder / f"{screen.name}-{turn}.db"
            timings["ledger"].append(submit(ours, screen, number))
            timings["sqlite3"].append(write_plainly(ours / DATABASE, base))
            timings["limit"].append(write_once(base.with_suffix(".raw"), base.stat().st_size))
            for path in (*ours.iterdir(), base, base.with_suffix(".raw")):
                path.unlink()
        wall = {arm: statistics.median(timing.wall_s for timing in timings[arm]) for arm in timings}
        pairs = list(zip(timings["ledger"], timings["sqlite3"], strict=True))
        results[screen.name] = {
            "trajectories_per_s": round(number / wall["ledger"], 1),
            "sqlite3_trajectories_per_s": round(number / wall["sqlite3"], 1),
            **{f"{arm}_mb_per_s": round(megabytes / wall[arm], 1) for arm in timings},
            "time_over_sqlite3": _median(a.wall_s / b.wall_s for a, b in pairs),
            "cpu_over_sqlite3": _median(a.cpu_s / b.cpu_s for a, b in pairs),
            "us_a_step": round(1e6 * wall["ledger"] / (number * STEPS)),
        }
        row = results[screen.name]
        print(
            f"{screen.name:>10}  {row['trajectories_per_s']:8.1f} "
            f"{megabytes / wall['ledger']:24.1f} {megabytes / wall['sqlite3']:8.1f} "
            f"{megabytes / wall['limit']:6.1f}   {row['time_over_sqlite3']:8.2f} "
            f"{row['cpu_over_sqlite3']:9.2f}"
        )
    return results


@dataclass(frozen=True)
class Timing:
    """The wall-clock and CPU time of a piece of work."""

    wall_s: float
    cpu_s: float

    def __add__(self, other: Timing) -> Timing:
        return Timing(self.wall_s + other.wall_s, self.cpu_s + other.cpu_s)


def timed(work: Callable[[], object]) -> Timing:
    """Do the work and return the time it took."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Timing(time.perf_counter() - wall, time.process_time() - cpu)


def submit(run_dir: Path, screen: ScreenSize, trajectories: int) -> Timing:
    """Lease, play and end so many trajectories; the database is closed when the time is up."""
    config, tasks = configured(run_dir)
    store = open_store(run_dir)
    ledger = begin(config, store, tasks)
    leases: list[Lease] = []

    def lease_all() -> None:
        for slots in chunks(range(trajectories), TOGETHER):
            leases.extend(lease(ledger, slot) for slot in slots)
            store.commit()

    timing = timed(lease_all)
    messages = list(messages_of_play(leases, screen))

    def file_all() -> None:
        for together in chunks(messages, TOGETHER):
            for message in together:
                if isinstance(message, StepRecord):
                    ledger.step(message)
                else:
                    ledger.end(message)
            store.commit()
        store.close()

    return timing + timed(file_all)


def configured(run_dir: Path, suite: str = "mini") -> tuple[Config, list[Task]]:
    """Return a run that leases as many trajectories as are asked for."""
    config = Config.model_validate(
        {
            "run": {"dir": run_dir},
            "env": {"suite": suite},
            "data": {"group_size": GROUP, "max_open_groups": 1_000_000, "max_staleness": 1_000_000},
        }
    )
    return config, training_tasks(config)


def begin(config: Config, store: Store, tasks: list[Task]) -> Ledger:
    """Return the ledger as `dart data` makes it."""
    store.begin_run(config.run.seed, config.model_dump_json(), tasks)
    return Ledger(config, store, tasks, make_scheduler(config, tasks))


def lease(ledger: Ledger, slot: int, suite: str = "mini") -> Lease:
    """Return a lease, which must be there."""
    lease_of_slot = ledger.lease(LeaseRequest(worker="env-0", slot=slot, suites=[suite]))
    assert isinstance(lease_of_slot, Lease), lease_of_slot
    return lease_of_slot


def write_plainly(source: Path, target: Path) -> Timing:
    """Copy the tables of `source`, which are read beforehand, in transactions of TOGETHER steps."""
    with sqlite3.connect(source) as read:
        schema = [sql for (sql,) in read.execute("SELECT sql FROM sqlite_master WHERE sql NOTNULL")]
        rows = {name: read.execute(f"SELECT * FROM {name}").fetchall() for name in TABLES}
    read.close()
    write = sqlite3.connect(target, isolation_level=None)
    write.execute("PRAGMA page_size = 8192")
    for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "wal_autocheckpoint = 8000"):
        write.execute(f"PRAGMA {pragma}").fetchall()
    write.execute("PRAGMA cache_size = -32768")
    for statement in schema:
        write.execute(statement)
    statements = {
        name: f"INSERT INTO {name} VALUES ({','.join('?' * len(rows[name][0]))})" for name in TABLES
    }

    def copy() -> None:
        transactions = -(-len(rows["steps"]) // TOGETHER)
        for index in range(transactions):
            write.execute("BEGIN IMMEDIATE")
            for name, statement in statements.items():
                size = -(-len(rows[name]) // transactions)
                write.executemany(statement, rows[name][index * size : (index + 1) * size])
            write.execute("COMMIT")
        write.close()

    return timed(copy)


def write_once(target: Path, size: int) -> Timing:
    """Write so many bytes from front to back, and wait for the disk."""
    block = os.urandom(MIB)

    def write() -> None:
        with target.open("wb", buffering=0) as file:
            for start in range(0, size, MIB):
                file.write(block[: size - start])
            os.fsync(file.fileno())

    return timed(write)


def _median(values: Iterator[float]) -> float:
    return round(statistics.median(values), 2)


# --- disk -----------------------------------------------------------------------------------


def measure_disk(folder: Path, suite: str, groups: int = 12) -> dict[str, float]:
    """Return the bytes of a played run's database: as it is, a screenshot a step, and one a prompt's image."""
    run_dir = folder / f"disk-{suite}"
    config, tasks = configured(run_dir, suite)
    with open_store(run_dir) as store:
        ledger = begin(config, store, tasks)
        for slot in range(groups * GROUP):
            play_somehow(ledger, lease(ledger, slot, suite))
            store.commit()
        steps = store.total("steps")
        names_of_steps = [
            (row.screenshot, row.image_hashes)
            for trajectory in store.trajectories()
            for row in store.steps(trajectory.id)
        ]
        images = store.screenshots(name for name, _ in names_of_steps)
        distinct_bytes = sum(len(blob) for blob in store.screenshots(_all_shown(store)).values())
    as_it_is = (run_dir / DATABASE).stat().st_size
    rows_bytes = as_it_is - distinct_bytes
    sizes = {
        "deduplicated": as_it_is,
        "a_screenshot_a_step": rows_bytes
        + stored(folder, [images[name] for name, _ in names_of_steps]),
        "an_image_a_prompt": rows_bytes
        + stored(folder, [images[name] for _, hashes in names_of_steps for name in hashes]),
    }
    result = {
        "steps": steps,
        "screenshots": len(images),
        **{f"{name}_bytes": size for name, size in sizes.items()},
        "saved_of_a_screenshot_a_step": round(1 - as_it_is / sizes["a_screenshot_a_step"], 3),
        "saved_of_an_image_a_prompt": round(1 - as_it_is / sizes["an_image_a_prompt"], 3),
    }
    print(
        f"disk {suite}: {steps} steps, {len(images)} screens;  MB: {as_it_is / 1e6:.2f}, "
        f"a screenshot a step {sizes['a_screenshot_a_step'] / 1e6:.2f}, "
        f"an image a prompt {sizes['an_image_a_prompt'] / 1e6:.2f}"
    )
    return result


def _all_shown(store: Store) -> list[str]:
    """Return the keys of all screenshots, those of ends included."""
    names = [trajectory.final_screenshot for trajectory in store.trajectories()]
    steps = [
        row.screenshot for trajectory in store.trajectories() for row in store.steps(trajectory.id)
    ]
    return [*filter(None, names), *steps]


def stored(folder: Path, images: Sequence[bytes]) -> int:
    """Return the bytes of a database that holds each of these images separately."""
    path = folder / "images.db"
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA page_size = 8192")
        database.execute("CREATE TABLE images (id INTEGER PRIMARY KEY, bytes BLOB)")
        database.executemany(
            "INSERT INTO images (bytes) VALUES (?)", [(image,) for image in images]
        )
    database.close()
    size = path.stat().st_size
    path.unlink()
    return size


def play_somehow(ledger: Ledger, lease: Lease) -> None:
    """Play one trajectory: the oracle, with a click somewhere one time in four."""
    rng = Random(lease.sampling.seed)
    env = make_env(lease.suite)
    observation, _ = env.reset(seed=lease.task_seed, options={"task": lease.task_id})
    hashes: list[str] = []
    info: dict[str, object] = {}
    is_over = False
    while not is_over:
        hashes.append(content_hash(observation.screenshot))
        text = [rng.randrange(150_000) for _ in range(400)]
        ledger.step(
            step_of(lease, len(hashes) - 1, observation.screenshot, hashes[-HISTORY_IMAGES:], text)
        )
        action: Action = env.oracle_action()  # type: ignore[attr-defined]
        if rng.random() < 0.25:
            action = Click(x=rng.randrange(observation.width), y=rng.randrange(observation.height))
        observation, _, terminated, truncated, info = env.step(action)
        is_over = terminated or truncated
    verdict = info["verdict"]
    ledger.end(end_of(lease, len(hashes), verdict.outcome, observation.screenshot))  # type: ignore[attr-defined]
    env.close()


# --- resume ---------------------------------------------------------------------------------


def measure_resume(folder: Path, trajectories: int) -> dict[str, float]:
    """Return the seconds and the memory of a ledger that resumes a long run."""
    run_dir = folder / "old"
    config, tasks = configured(run_dir)
    with open_store(run_dir) as store:
        store.begin_run(config.run.seed, config.model_dump_json(), tasks)
    with sqlite3.connect(run_dir / DATABASE) as database:
        fill_old_run(database, [task.id for task in tasks], trajectories)
    database.close()
    command = [sys.executable, __file__, "--open", str(run_dir)]
    tries = [
        json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for _ in range(4)
    ]
    first, *later = tries  # the first counts every outcome, as for a run of an older dart
    result = {
        "trajectories": trajectories,
        "seconds": _median(run["seconds"] for run in later),
        "peak_mb": _median(run["peak_mb"] for run in later),
        "counting_seconds": round(first["seconds"], 2),
        "counting_peak_mb": round(first["peak_mb"], 1),
    }
    print(
        f"resume of {trajectories} trajectories: {result['seconds']} s, {result['peak_mb']} MB; "
        f"counting them {result['counting_seconds']} s, {result['counting_peak_mb']} MB"
    )
    return result


def fill_old_run(database: sqlite3.Connection, tasks: Sequence[str], trajectories: int) -> None:
    """Write groups and trajectories that were all trained or dropped, over a thousand versions."""
    rng = Random(1)
    groups = trajectories // GROUP
    database.executemany(
        "INSERT INTO groups (id, number, suite, task_id, task_seed, size, state, opened_at, "
        "closed_at, batch_id) VALUES (?, ?, 'mini', ?, ?, ?, 'trained', ?, ?, ?)",
        (
            (f"g{n:06d}", n, tasks[n % len(tasks)], n, GROUP, float(n), n + 60.0, 1 + n // 8)
            for n in range(1, groups + 1)
        ),
    )
    database.executemany(
        "INSERT INTO trajectories (id, group_id, attempt, state, worker, slot, sampling_seed, "
        "leased_at, ended_at, outcome, verdict_reason, stop_reason, steps, oldest_version, "
        "newest_version, reset_s, wall_s, batch_id, max_steps) "
        "VALUES (?, ?, ?, 'trained', ?, ?, 7, ?, ?, ?, 'found', 'done', 8, ?, ?, 1.0, 50.0, ?, 15)",
        (
            (
                f"g{n:06d}-{member:02d}",
                f"g{n:06d}",
                member,
                f"env-{n % 8}",
                member,
                float(n),
                n + 50.0 + rng.random(),
                "pass" if rng.random() < 0.5 else "fail",
                n * 1000 // groups,
                n * 1000 // groups,
                1 + n // 8,
            )
            for n in range(1, groups + 1)
            for member in range(GROUP)
        ),
    )
    database.executemany(
        "INSERT INTO batches VALUES (?, 'trained', ?, 0, 1.0, 0.5, ?, ?, ?, ?, NULL, 0)",
        ((n, float(n), n + 1.0, n, float(n), 8 * GROUP * n) for n in range(1, groups // 8 + 2)),
    )


def open_ledger(run_dir: Path) -> dict[str, float]:
    """Print what opening a ledger on the run takes beyond the imports; it runs in a separate process."""
    config, tasks = configured(run_dir)
    before = resident_kb("VmRSS")
    started = time.perf_counter()
    with open_store(run_dir) as store:
        Ledger(config, store, tasks, make_scheduler(config, tasks))
        seconds = time.perf_counter() - started
    return {"seconds": seconds, "peak_mb": (resident_kb("VmHWM") - before) / 1024}


def resident_kb(field: str) -> int:
    """Return the memory of this process in KiB: VmRSS is the present one, VmHWM the peak."""
    status = Path("/proc/self/status").read_text()  # getrusage would count the parent's, too
    [line] = [line for line in status.splitlines() if line.startswith(f"{field}:")]
    return int(line.split()[1])


if __name__ == "__main__":
    main()
