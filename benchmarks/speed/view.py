"""How long the viewer's pages take on a large run.

    python benchmarks/speed/view.py [--trajectories 10000] [--loads 15] [--out benchmarks/results/view.json]

A run is made through the real Ledger and Store: groups played, batches trained with metrics, about
a third dropped. `dart view` serves it from a process of its own. Each page is loaded by a plain
HTTP client on a new connection, all pages in turn; told are the median and the worst load, and what
the server computed for one, which other work on the machine hardly changes. The promise is 1 s.
Baseline in the same run: the style sheet, an answer that asks no database, which is what a connection
and the server cost. Where there is a Chromium it opens the pages too, without a cache, one after
another in one tab: from the command to go there until the page with its style and images is loaded and
laid out. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import io
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.speed.browsing import browsing
from bus.errors import MissingPartError
from bus.messages import (
    Batch,
    BatchTrained,
    Lease,
    LeaseRequest,
    SampledTokens,
    StepRecord,
    TrajectoryEnd,
    VersionSpan,
)
from bus.weights import WeightsPublished
from dart_cli.config.schema import Config
from dart_cli.config.task_split import training_tasks
from dart_cli.data.ledger import Ledger
from dart_cli.data.scheduler import make_scheduler
from dart_cli.data.store.open import open_store
from dart_cli.data.store.writer import Store
from envs.contract.blobs import content_hash
from tests.data.parts import next_batch

STEPS = 6
TOKENS = 70  # of a completion
PROMPT = 400
IMAGES = 400
"""Different screenshots; the database holds each once, however many steps show it."""
SIZE = (1280, 720)
METRICS = 37
PROMISE_S = 1.0
PARTS = ("style sheet (baseline)", "screenshot")
"""Of pages, and none themselves."""


def main() -> None:
    """Make the run, load its pages, end in one JSON line."""
    parser = argparse.ArgumentParser(description="Benchmark of the viewer.")
    parser.add_argument("--trajectories", type=int, default=10_000)
    parser.add_argument("--loads", type=int, default=15, help="of each page")
    parser.add_argument("--out", type=Path, help="also write the result here")
    parser.add_argument("--keep", type=Path, help="make the run here, and use it if it is there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="view-") as scratch:
        run_dir = arguments.keep or Path(scratch) / "run"
        if not (run_dir / "run.db").exists():
            began = time.monotonic()
            make_run(run_dir, arguments.trajectories)
            print(f"made {run_dir} in {time.monotonic() - began:.0f} s")
        with viewer(run_dir) as (port, pid):
            pages = pages_of(port)
            taken: dict[str, list[float]] = {name: [] for name in pages}
            worked: dict[str, list[float]] = {name: [] for name in pages}
            sizes = {}
            for _ in range(arguments.loads):
                for name, path in pages.items():
                    before = cpu_s(pid)
                    seconds, sizes[name] = load(port, path)
                    taken[name].append(seconds)
                    worked[name].append(cpu_s(pid) - before)
            shown = {name: path for name, path in pages.items() if name not in PARTS}
            browser = browse(port, shown, arguments.loads)
        disk = sum(file.stat().st_size for file in run_dir.glob("run.db*"))
    result = {
        "benchmark": "view",
        "baseline": "the style sheet: a connection and the server, no database",
        "promise_s": PROMISE_S,
        "trajectories": arguments.trajectories,
        "steps": arguments.trajectories * STEPS,
        "database_mib": round(disk / 2**20, 1),
        "pages": {
            name: {
                "median_s": round(statistics.median(times), 4),
                "worst_s": round(max(times), 4),
                "server_cpu_s": round(statistics.median(worked[name]), 4),
                "kib": round(sizes[name] / 1024, 1),
            }
            for name, times in taken.items()
        },
        "chromium": browser,
        "worst_s": round(max(max(times) for times in taken.values()), 4),
    }
    for name, row in result["pages"].items():
        print(
            f"{name:<34} {row['median_s'] * 1e3:8.1f} ms  worst {row['worst_s'] * 1e3:8.1f} ms  "
            f"server's CPU {row['server_cpu_s'] * 1e3:8.1f} ms"
        )
    for name, row in (browser or {}).items():
        print(
            f"Chromium, {name:<24} {row['median_s'] * 1e3:8.1f} ms  worst {row['worst_s'] * 1e3:8.1f} ms"
        )
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


# --- the run --------------------------------------------------------------------------------


def make_run(run_dir: Path, trajectories: int) -> None:
    """Make a run of so many trajectories, played and trained on through the real ledger."""
    random = Random(5)
    config = Config.model_validate(
        {"run": {"dir": run_dir}, "data": {"group_size": 8, "groups_per_batch": 4}}
    )
    images = [_image(random) for _ in range(IMAGES)]
    with open_store(run_dir) as store:
        tasks = training_tasks(config)
        store.begin_run(1, config.model_dump_json(), tasks)
        ledger = Ledger(config, store, tasks, make_scheduler(config, tasks))
        played = version = 0
        while played < trajectories:
            found = ledger.lease(LeaseRequest(worker="env-0", slot=played % 8, suites=["mini"]))
            if not isinstance(found, Lease):
                version = _train(ledger, store, version, random)
                continue
            _play(ledger, found, version, images, random)
            played += 1
        store.commit()


def _play(
    ledger: Ledger, lease: Lease, version: int, images: Sequence[bytes], random: Random
) -> None:
    for step in range(STEPS):
        image = random.choice(images)
        x, y = random.randrange(SIZE[0]), random.randrange(SIZE[1])
        ledger.step(
            StepRecord(
                trajectory_id=lease.trajectory_id,
                step=step,
                screenshot=image,
                media_type="image/png",
                image_hashes=[content_hash(image)],
                prompt_token_ids=[random.randrange(150_000) for _ in range(PROMPT)],
                sampled=SampledTokens(
                    token_ids=[random.randrange(150_000) for _ in range(TOKENS)],
                    behaviour_logprobs=[-random.expovariate(2) for _ in range(TOKENS)],
                    entropies=[random.expovariate(2) for _ in range(TOKENS)],
                    version_spans=[VersionSpan(version=version, start=0, end=TOKENS)],
                ),
                worker="rollout-0",
                text=f"Thought: the button is at the {'left' if x < 640 else 'right'}, I click it. "
                f"{'Then I look whether the dialog is gone. ' * 4}\n"
                f"Action: click(start_box='({x},{y})')",
                action={"kind": "click", "x": x, "y": y, "button": "left"},
                error="",
                model_s=random.uniform(0.5, 3),
                env_s=random.uniform(0.5, 2),
            )
        )
    ledger.end(
        TrajectoryEnd(
            trajectory_id=lease.trajectory_id,
            steps=STEPS,
            outcome="pass" if random.random() < 0.55 else "fail",
            reason="the goal is reached, or it is not",
            stop_reason="done",
            screenshot=random.choice(images),
            reset_s=0.5,
            wall_s=random.uniform(5, 40),
        )
    )


def _train(ledger: Ledger, store: Store, version: int, random: Random) -> int:
    """Take a batch and acknowledge it; returns the version after it."""
    batch = next_batch(ledger, version)
    if not isinstance(batch, Batch):
        raise SystemExit(f"neither a lease nor a batch: {batch}")
    version += 1
    metrics = {f"metric_{i}": random.random() for i in range(METRICS - 3)}
    metrics |= {"loss": random.gauss(0, 1), "reward": random.random(), "entropy": random.random()}
    ledger.batch_trained(
        BatchTrained(batch_id=batch.batch_id, policy_version=version, metrics=metrics)
    )
    ledger.weights_published(
        WeightsPublished(policy_version=version, path=f"w/{version}", digest="d", updates=version)
    )
    store.commit()
    return version


def _image(random: Random) -> bytes:
    """Return a screenshot of the size of a desktop's, different from all others, about 30 KB."""
    image = Image.new("RGB", SIZE, (random.randrange(256), 200, 220))
    for _ in range(6):
        noise = Image.frombytes("RGB", (40, 40), random.randbytes(4800))
        image.paste(noise, (random.randrange(SIZE[0] - 40), random.randrange(SIZE[1] - 40)))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


# --- loading --------------------------------------------------------------------------------


@contextlib.contextmanager
def viewer(run_dir: Path) -> Iterator[tuple[int, int]]:
    """`dart view` in a process of its own; gives its port and process id."""
    process = subprocess.Popen(
        [sys.executable, "-m", "dart_cli", "view", str(run_dir), "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.search(r":(\d+)/", line)
        if found is None:
            raise SystemExit(f"the viewer does not serve: {line}{process.stderr.read()}")
        yield int(found[1]), process.pid
    finally:
        process.terminate()
        process.wait(20)


def cpu_s(pid: int) -> float:
    """Return what all threads of a process have computed for so far, in seconds."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def pages_of(port: int) -> dict[str, str]:
    """Name -> path of the pages that are loaded."""
    listed = fetch(port, "/trajectories").decode()
    trajectory = re.findall(r"/trajectories/(g[\d-]+)", listed)[20]
    image = re.findall(r"/screenshots/\w+", fetch(port, f"/trajectories/{trajectory}").decode())[0]
    return {
        PARTS[0]: "/view.css",
        "run": "/",
        "tasks": "/tasks",
        "task": "/tasks/mini/popup",
        "groups": "/groups",
        "group": f"/groups/{trajectory.partition('-')[0]}",
        "trajectories": "/trajectories",
        "trajectories, filtered": "/trajectories?task=mini/popup&outcome=fail&state=trained&version=9",
        "trajectories, last page": f"/trajectories?page={last_page(listed)}",
        "trajectory": f"/trajectories/{trajectory}",
        PARTS[1]: image,
    }


def last_page(listed: str) -> int:
    """Return the number of the oldest page, by the total that the first page tells."""
    found = re.search(r"of (\d+)", listed)
    return -(-int(found[1]) // 50) if found else 1


def load(port: int, path: str) -> tuple[float, int]:
    """Seconds and bytes of one answer."""
    began = time.perf_counter()
    size = len(fetch(port, path))
    return time.perf_counter() - began, size


def fetch(port: int, path: str) -> bytes:
    """Return the body of an answer that must be good."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise SystemExit(f"{path}: {answer.status} {body[:300]!r}")
        return body


def browse(port: int, pages: dict[str, str], loads: int) -> dict[str, dict[str, float]] | None:
    """Seconds that a browser takes for each page; None where there is none."""
    taken: dict[str, list[float]] = {}
    try:
        with browsing() as browser:
            browser.open("data:text/html,<p>warm")
            for _ in range(loads):
                for name, path in pages.items():
                    seconds = browser.open(f"http://127.0.0.1:{port}{path}").seconds
                    taken.setdefault(name, []).append(seconds)
    except MissingPartError as error:
        print(f"no browser: {error}")
        return None
    return {
        name: {"median_s": round(statistics.median(times), 4), "worst_s": round(max(times), 4)}
        for name, times in taken.items()
    }


if __name__ == "__main__":
    main()
