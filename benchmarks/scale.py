"""Checks that `dart data` and the bus keep up with 256 environment slots and 8 rollout workers.

    python benchmarks/scale.py [--minutes 10] [--slots 256] [--workers 8] [--out FILE]

Environments of profile `browser` and timed engines, in real time. The engines and the optimizer have
the times of a small model, so that the slots are the limit; screenshots are 448x336. Reported are
actions per second, how long a slot waits for a lease (p99 over the last thousand, the worst
heartbeat of the window), CPU and memory of `dart data` over time: memory is flat if the last third of
the run needs no more than the middle third. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dart_cli.bench.bound import bound_of
from dart_cli.bench.measure import measure
from dart_cli.bench.recording import Plan, Recording, record
from dart_cli.config.load import load_config
from dart_cli.data.store.open import open_reader
from dart_cli.runtime.commands import commands_of

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "efficiency.toml"
RUN_DIR = Path("runs/scale")
SETTINGS = {
    "run.dir": str(RUN_DIR),
    "env.options.profile": "browser",
    "env.options.speedup": "1.0",
    "timing.speedup": "1.0",
    "timing.prefill_s": "0.03",
    "timing.prefill_cached_s": "0.01",
    "timing.decode_s": "0.0005",
    "timing.decode_each_s": "0.00002",
    "timing.transfer_s": "0.2",
    "timing.pause_s": "0.05",
    "timing.train_s": "1.0",
    "timing.train_sample_s": "0.003",
    "data.groups_per_batch": "32",
    "data.max_staleness": "16",
    "train.checkpoint_every": "100000",
    "up.envs": "2",
}


def main() -> None:
    """Play, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    settings = SETTINGS | {"env.slots": str(asked.slots // 2), "up.rollouts": str(asked.workers)}
    overrides = [f"{key}={value}" for key, value in settings.items()]
    config = load_config(CONFIG, overrides)
    if (RUN_DIR / "run.db").exists():
        shutil.rmtree(RUN_DIR)
    arguments = [str(CONFIG), *(part for each in overrides for part in ("--set", each))]
    plan = Plan(warm_s=20.0, seconds=60 * asked.minutes)
    recording = asyncio.run(record(config, commands_of(config, arguments), plan))
    bound = bound_of(config, slots=asked.slots, workers=asked.workers)
    with open_reader(config.run.dir) as reader:
        measured = measure(recording, reader, bound, slots=asked.slots, speedup=1.0)
        screens = reader.total("screenshots")
    result = {
        "benchmark": "scale",
        "slots": asked.slots,
        "workers": asked.workers,
        "minutes": asked.minutes,
        "actions_per_second": round(measured.actions_per_minute / 60, 1),
        "achieved_over_bound": round(measured.achieved_over_bound, 3),
        "bound_by": measured.bound_by,
        "lease_p99_ms": round(1000 * lease_p99_s(recording), 1),
        "data_cores": round(measured.data_cores, 3),
        "all_cores": round(measured.cores, 3),
        "data_rss_mb": [round(each / 1e6, 1) for each in memory(recording)],
        "env_utilisation": round(measured.env_utilisation, 4),
        "rollout_utilisation": round(measured.rollout_utilisation, 4),
        "finished_lost": measured.finished_lost,
        "aborted": measured.aborted,
        "screenshots": screens,
        "updates": measured.updates,
    }
    if asked.out is not None:
        asked.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


def lease_p99_s(recording: Recording) -> float:
    """The worst p99 that an environment process reported within the window, seconds."""
    return max(
        (
            beat.gauges["lease_p99_s"]
            for beat in recording.beats
            if beat.role == "env" and recording.began + 20 <= beat.sent_at <= recording.ended
        ),
        default=float("nan"),
    )


def memory(recording: Recording) -> list[float]:
    """Mean bytes that `dart data` held in each sixth of the window."""
    data = [c for c in recording.costs if c.worker == "data" and c.at >= recording.began]
    size = max(1, len(data) // 6)
    return [mean(c.rss for c in data[i * size : (i + 1) * size]) for i in range(6)]


if __name__ == "__main__":
    main()
