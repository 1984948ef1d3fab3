"""How long `dart data` is silent while it serves a batch of real size.

    python benchmarks/data_bus/store_silence.py [--before CHECKOUT] [--out benchmarks/results/store_silence.json]

`dart data`, a process of its own, serves a batch of 1.5 GB to a client as the trainer is one, while
another asks for leases and submits steps, 100 requests a second. Measured is the longest time between
two answers that it gets, from a second before the batch is asked for until a second after it is there.
The limit is the same without a batch. With `--before` another checkout of this repository is measured,
too, in turn. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, os.environ.get("DART_TREE", sys.path[0]))

import numpy as np

from benchmarks.data_bus.store_batch import (
    STEPS,
    TRAJECTORIES,
    answer_of,
    child,
    configured,
    end_of,
    fill,
    record,
    trees,
)
from bus.endpoints import DATA
from bus.messages import BatchRequest, LeaseReply, LeaseRequest, Request
from bus.requests import Requester
from dart_cli.config.endpoints import run_endpoints
from dart_cli.data.service import run as serve_run
from envs.contract.blobs import content_hash

RATE_HZ = 100
SLOTS = 64  # that the probing client plays


def main() -> None:
    """Measure, print what is measured, and end in one JSON line."""
    parser = argparse.ArgumentParser(description="Benchmark of the silence of `dart data`.")
    parser.add_argument("--before", type=Path, help="another checkout, measured in the same run")
    parser.add_argument("--batch-gb", type=float, default=1.5, help="of the batch that is served")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="on the disk to be measured")
    parser.add_argument("--out", type=Path, help="also write the result here")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        CHILDREN[asked.child[0]](Path(asked.child[1]))
        return
    with tempfile.TemporaryDirectory(dir=asked.dir, prefix=".batch-") as scratch:
        found = measure_silence(Path(scratch), trees(asked.before), asked.batch_gb, asked.rounds)
    result = {
        "benchmark": "store_silence",
        "limit": "idle_silence_s: the same client while no batch is asked for",
        "batch_gb": asked.batch_gb,
        "requests_per_s": RATE_HZ,
        "rounds": asked.rounds,
        "longest_silence_s": found["now"]["longest_silence_s"],
        **found,
    }
    if asked.out is not None:
        asked.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


def measure_silence(
    scratch: Path, trees: dict[str, Path], batch_gb: float, rounds: int
) -> dict[str, Any]:
    """For each checkout the median over rounds, the checkouts in turn."""
    made = scratch / "made"
    fill(made, int(batch_gb * 1e9 / TRAJECTORIES / STEPS))
    found: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for turn in range(rounds):
        for name, tree in trees.items():
            run_dir = scratch / f"{name}-{turn}"
            shutil.copytree(made, run_dir)
            os.sync()  # the disk is as idle as it is between two writes of a run
            found[name].append(one_silence(run_dir, tree))
            shutil.rmtree(run_dir)
            print(f"silence {name:8}", found[name][-1])
    return {
        name: {key: round(float(np.median([r[key] for r in rows])), 4) for key in rows[0]}
        for name, rows in found.items()
    }


def one_silence(run_dir: Path, tree: Path) -> dict[str, float]:
    """Serve the batch once, with a probing client."""
    server = child(__file__, tree, "serve", str(run_dir))
    try:
        probe = child(__file__, tree, "probe", str(run_dir), stdin=subprocess.PIPE)
        assert probe.stdout is not None
        assert probe.stdin is not None
        probe.stdout.readline()  # it plays
        time.sleep(2.0)  # the part without a batch
        asked = time.monotonic()
        took = answer_of(child(__file__, tree, "train", str(run_dir)))
        time.sleep(1.0)
        probe.stdin.close()
        probe.stdin = None
        seen = answer_of(probe)["answers"]
    finally:
        server.terminate()
        server.wait(30)
    began, ended = took["asked"] - 1.0, took["received"] + 1.0
    idle = [each for each in seen if each[0] < asked]
    busy = [each for each in seen if began <= each[0] <= ended]
    return {
        "longest_silence_s": longest_gap(busy),
        "idle_silence_s": longest_gap(idle[RATE_HZ // 2 :]),
        "latency_p99_s": float(np.percentile([took_s for _, took_s in busy], 99)),
        "idle_latency_p99_s": float(np.percentile([took_s for _, took_s in idle], 99)),
        "answers_per_s": len(busy) / (ended - began),
        "batch_s": took["received"] - took["asked"],
        "batch_gb": took["bytes"] / 1e9,
    }


def longest_gap(answers: list[list[float]]) -> float:
    """Return the longest time between two answers, seconds."""
    moments = sorted(at for at, _ in answers)
    return max(b - a for a, b in pairwise(moments))


def serve(run_dir: Path) -> None:
    """Run `dart data`, in a child process."""
    asyncio.run(serve_run(configured(run_dir), asyncio.Event()))


def connected(run_dir: Path, name: str) -> Requester:
    """Return a client of `dart data`."""
    address = run_endpoints(configured(run_dir)).address(DATA)
    return Requester(address, name=name, peer="dart data")


def train(run_dir: Path) -> None:
    """Ask for the batch, as the trainer does, in a child process."""

    async def ask() -> dict[str, float]:
        async with connected(run_dir, "train") as requester:
            asked = time.monotonic()
            reply: Any = await requester.request(BatchRequest(policy_version=0), 300.0, 60.0)
            assert reply.batch is not None, reply
            size = sum(map(len, reply.batch.images.values()))
            return {"asked": asked, "received": time.monotonic(), "bytes": size}

    print(json.dumps(asyncio.run(ask())))


def probe(run_dir: Path) -> None:
    """Send lease requests and hand-ins at RATE_HZ until the child's input ends; print when each was answered."""
    answers: list[tuple[float, float]] = []

    async def play() -> None:
        rng = Random(1)
        loop = asyncio.get_running_loop()
        ended = loop.run_in_executor(None, sys.stdin.read)
        async with connected(run_dir, "env") as requester:

            async def ask(message: Request) -> Any:
                began = time.monotonic()
                reply = await requester.request(message, 60.0)
                answers.append((time.monotonic(), time.monotonic() - began))
                return reply

            steps = [slot_requests(slot, rng) for slot in range(SLOTS)]
            waiting: list[Any] = [None] * SLOTS
            at, slot, told = loop.time(), 0, False
            while not ended.done():
                slot = (slot + 1) % SLOTS
                if waiting[slot] is None or waiting[slot].done():
                    reply = None if waiting[slot] is None else waiting[slot].result()
                    waiting[slot] = loop.create_task(ask(steps[slot].send(reply)))
                if answers and not told:
                    told = True
                    print("playing", flush=True)
                at += 1 / RATE_HZ
                await asyncio.sleep(max(0.0, at - loop.time()))
            await asyncio.gather(*(task for task in waiting if task is not None))

    asyncio.run(play())
    print(json.dumps({"answers": answers}))


def slot_requests(slot: int, rng: Random) -> Any:
    """Return a generator: what a slot asks next, given the reply to what it asked before."""

    def requests() -> Any:
        reply = yield None
        while True:
            reply = yield LeaseRequest(worker="probe", slot=slot, suites=["mini"])
            if not isinstance(reply, LeaseReply) or reply.lease is None:
                continue
            lease = reply.lease
            for step in range(4):
                image = b"\x89PNG" + struct.pack("<d", rng.random()) * 2_500
                said = [5] * 40
                yield record(lease, step, image, [content_hash(image)], [7] * 700, said, rng)
            yield end_of(lease, 4, passes=slot % 2 == 1)

    made = requests()
    next(made)
    return made


CHILDREN: dict[str, Callable[[Path], None]] = {"serve": serve, "train": train, "probe": probe}


if __name__ == "__main__":
    main()
