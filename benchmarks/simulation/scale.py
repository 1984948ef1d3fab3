"""Do the data service and the bus keep up with very many environment slots?

    python benchmarks/simulation/scale.py [--minutes 10] [--slots 256] [--workers 8] [--hosts 0] [--out FILE]

Timed environments and engines, in real time. The engines and the optimizer have the times of a small
model, so that the slots are the limit. Without `--hosts` two `dart env` processes of profile `browser`
on this host, over ipc. With `--hosts N` one `dart env` on each of N hosts, of profile `osworld`, over
tcp with CURVE keys: each host is a network namespace with a cable to a bridge; where the system permits
none, processes on loopback, which the result then says. Reported are actions per second and their share
of what the simulated times allow, how long a slot waits for a lease (p99 over the last thousand, the
worst heartbeat of the window), CPU and memory of `dart data` over time (memory is flat if the last
third of the run needs no more than the middle third), threads, open files and memory of a `dart env`
process, and how fast the database takes full-HD screens of 0.8 MB: with the ledger, alone on the disk.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil

from benchmarks.data_bus.store import submit
from benchmarks.data_bus.store_messages import STEPS, ScreenSize
from benchmarks.simulation.bound import bound_of
from benchmarks.simulation.hosts import Host, NotPermittedError, hosts
from benchmarks.simulation.measure import cores_by_role, measure
from benchmarks.simulation.recording import Plan, Recording, record
from bus.messages import Heartbeat
from dart_cli.config.load import load_config
from dart_cli.config.schema import Config
from dart_cli.data.store.open import open_reader
from dart_cli.runtime.commands import commands_of

CONFIG = Path(__file__).with_name("efficiency.toml")
RUN_DIR = Path("runs/scale")
SETTINGS = {
    "run.dir": str(RUN_DIR),
    "env.options.profile": "browser",
    "env.options.speedup": "1.0",
    "env.options.prefill_s": "0.03",
    "env.options.prefill_cached_s": "0.01",
    "env.options.decode_s": "0.0005",
    "env.options.decode_each_s": "0.00002",
    "env.options.transfer_s": "0.2",
    "env.options.pause_s": "0.05",
    "env.options.train_s": "1.0",
    "env.options.train_sample_s": "0.003",
    "data.groups_per_batch": "32",
    "data.max_staleness": "16",
    "train.checkpoint_every": "100000",
    "up.envs": "2",
}
OF_HOSTS = {
    "env.options.profile": "osworld",
    "rollout.max_batch": "64",
    "env.options.train_sample_s": "0.001",
    "up.envs": "0",  # they are started on their hosts
}
FULL_HD = ScreenSize("1920x1080", 800_000, 2_691, 1.0)


def main() -> None:
    """Play, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--warm", type=float, default=20.0, help="seconds before the window")
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--hosts", type=int, default=0)
    parser.add_argument("--size", default="448x336", help="of screenshots")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inside", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hosts and options.inside is None:
        with contextlib.ExitStack() as stack:
            try:
                host_list = stack.enter_context(hosts(options.hosts))
            except NotPermittedError as error:
                print(f"no network namespaces ({error}): all on loopback")
                host_list = [Host("127.0.0.1", (), ())] * (options.hosts + 1)
            inside = json.dumps([[host.address, host.from_first] for host in host_list])
            again = [sys.executable, __file__, *sys.argv[1:], "--inside", inside]
            sys.exit(subprocess.call([*host_list[0].enter, *again]))
    participants = [Host(address, (), tuple(enter)) for address, enter in options.inside or []]
    result = play(options, participants) | disk_rate()
    result["gb_a_day_full_hd"] = round(
        result["actions_per_second"] * FULL_HD.encoded * 86_400 / 1e9
    )
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


def play(options: argparse.Namespace, participants: Sequence[Host]) -> dict[str, Any]:
    """Play the timed system and return its figures; `participants` are the hosts, this one first."""
    envs = len(participants) - 1 if participants else 2
    settings = SETTINGS | {
        "env.slots": str(options.slots // envs),
        "up.rollouts": str(options.workers),
        "env.options.size": options.size,
    }
    if participants:
        keys = Path(f"{RUN_DIR}-keys").resolve()
        shutil.rmtree(keys, ignore_errors=True)
        dart = [sys.executable, "-m", "dart_cli"]
        subprocess.run([*dart, "keys", str(keys)], check=True, stdout=subprocess.DEVNULL)
        settings |= OF_HOSTS | {"bus.host": participants[0].address, "bus.keys": str(keys)}
    overrides = [f"{key}={value}" for key, value in settings.items()]
    config = load_config(CONFIG, overrides)
    shutil.rmtree(RUN_DIR, ignore_errors=True)
    RUN_DIR.mkdir(mode=0o700, parents=True)
    arguments = [str(CONFIG), *(part for override in overrides for part in ("--set", override))]
    plan = Plan(warm_s=options.warm, seconds=60 * options.minutes)
    with remote_envs(participants[1:], arguments) as processes:
        recording = asyncio.run(record(config, commands_of(config, arguments), plan))
        usages = [usage(process.pid) for process in processes]
    return figures(options, config, recording) | {
        "hosts": len(participants) - 1 if participants else 0,
        "network": network(participants),
        "env_threads": max((each[0] for each in usages), default=0),
        "env_open_files": max((each[1] for each in usages), default=0),
        "env_rss_mb": max((each[2] for each in usages), default=0.0),
    }


@contextlib.contextmanager
def remote_envs(others: Sequence[Host], arguments: Sequence[str]) -> Iterator[list[Any]]:
    """Yield a `dart env` on each of the hosts, ended with the block."""
    processes = []
    logs = RUN_DIR.with_name(f"{RUN_DIR.name}-hosts")
    logs.mkdir(parents=True, exist_ok=True)
    try:
        for number, host in enumerate(others):
            name = f"env-{number}"
            command = [sys.executable, "-m", "dart_cli", "env", *arguments, "--worker", name]
            with (logs / f"{name}.log").open("w") as log:
                processes.append(
                    subprocess.Popen([*host.from_first, *command], stdout=log, stderr=log)
                )
        yield processes
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(30)


def usage(pid: int) -> tuple[int, int, float]:
    """Return (threads, open files, MB of memory) of a process or of the one that it runs."""
    process = psutil.Process(pid)
    inner = [process, *process.children(recursive=True)]
    most = max(inner, key=lambda process: process.num_threads())
    return most.num_threads(), most.num_fds(), round(most.memory_info().rss / 1e6, 1)


def network(participants: Sequence[Host]) -> str:
    """Return how the processes are connected."""
    if not participants:
        return "ipc"
    return "namespaces, tcp, CURVE" if participants[1].from_first else "loopback, tcp, CURVE"


def figures(options: argparse.Namespace, config: Config, recording: Recording) -> dict[str, Any]:
    """Return the reported figures of the run."""
    bound = bound_of(config, slots=options.slots, workers=options.workers)
    with open_reader(config.run.dir) as reader:
        measured = measure(recording, reader, bound, slots=options.slots, speedup=1.0)
        screens = reader.total("screenshots")
    return {
        "benchmark": "scale",
        "slots": options.slots,
        "workers": options.workers,
        "minutes": options.minutes,
        "actions_per_second": round(measured.actions_per_minute / 60, 1),
        "bound_ratio": round(measured.achieved_over_bound, 3),
        "bound_by": measured.bound_by,
        "lease_p99_ms": in_ms(lease_p99_s(recording)),
        "data_cores": round(measured.data_cores, 3),
        "all_cores": round(measured.cores, 3),
        "cores_by_role": {
            role: round(cores, 3)
            for role, cores in cores_by_role(
                recording.costs, recording.began, recording.end
            ).items()
        },
        "cores_of_this_host": os.cpu_count(),
        "load_of_this_host": round(os.getloadavg()[1], 1),
        "data_rss_mb": [round(size / 1e6, 1) for size in memory(recording)],
        "env_utilisation": round(measured.env_utilisation, 4),
        "rollout_utilisation": round(measured.rollout_utilisation, 4),
        "finished_lost": measured.finished_lost,
        "aborted": measured.aborted,
        "screenshots": screens,
        "updates": measured.updates,
    }


def disk_rate() -> dict[str, Any]:
    """Write full-HD screens into the database, through the ledger, until it is closed; return the rates."""
    trajectories = 64
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".scale-") as folder:
        timing = submit(Path(folder), FULL_HD, trajectories)
    megabytes = trajectories * (STEPS + 1) * FULL_HD.encoded / 1e6
    return {
        "full_hd_mb": FULL_HD.encoded / 1e6,
        "full_hd_steps_per_s": round(trajectories * STEPS / timing.wall_s),
        "full_hd_mb_per_s": round(megabytes / timing.wall_s),
        "full_hd_cpu_s_a_gb": round(1000 * timing.cpu_s / megabytes, 2),
    }


def in_ms(seconds: float) -> float | None:
    """Return milliseconds; None where nothing was measured, since JSON has no NaN."""
    return None if math.isnan(seconds) else round(1000 * seconds, 1)


def lease_p99_s(recording: Recording) -> float:
    """Return the worst p99 that an environment process reported within the window, seconds."""
    return max(
        (beat.gauges["lease_p99_s"] for beat in env_beats(recording)),
        default=float("nan"),
    )


def env_beats(recording: Recording) -> Iterator[Heartbeat]:
    """Return the heartbeats of environment processes within the window, without its first 20 s."""
    for beat in recording.beats:
        is_within = recording.began + 20 <= beat.sent_at <= recording.end
        if beat.role == "env" and is_within:
            yield beat


def memory(recording: Recording) -> list[float]:
    """Return the mean bytes that the data service held in each sixth of the window."""
    data = [c for c in recording.costs if c.worker == "data" and c.at >= recording.began]
    size = max(1, len(data) // 6)
    return [mean(c.rss for c in data[i * size : (i + 1) * size]) for i in range(6)]


if __name__ == "__main__":
    main()
