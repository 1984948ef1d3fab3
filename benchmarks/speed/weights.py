"""How long new weights take from the trainer to all engines, over each channel.

    python benchmarks/speed/weights.py [--sizes 10,100,1000,2000] [--workers 1,2,4] [--channels file,gloo]
                                 [--out benchmarks/results/weights.json]

For each size (MB) random bfloat16 tensors are published and taken by workers in processes of their own.
Each copies them into tensors of its own, as an engine does while it stands still; as in a run, one worker
at a time holds a permit for that, and what is broadcast is received before it:

    still_s      the trainer stands still: until its weights may change again, with nothing to hide behind
    publish_s    the version is complete: copied, digested, written as far as the channel writes it
    receive_s    a worker: read or receive, check every digest, look for values that are not finite
    pause_s      the longest copy into an engine's tensors: all that keeps it from serving
    first_s      from the begin of the publication until the first worker serves it
    total_s      the same until all do
    cpu_s        seconds of cores that all processes spent on it
    still_share  still_s / total_s
    times_one    total_s / that of one worker

`file`, and `gloo` (a broadcast over loopback); one value in 200 has moved, as an update at a learning rate of
1e-6 does in bfloat16. The limits in the same run: a plain copy in memory, a plain copy of the
file in shared memory and beside it, and the same bytes through a plain socket over loopback to each of N
receivers at once (`loopback_N_s`). Each figure is the median of `--rounds` versions after the first, in wall
seconds: say what else ran. Sizes that the free memory has no room for are left out by name. With `--out` rows
of other settings that the file has are kept, so that one table can be measured in parts.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bus.endpoints import TRAIN, Endpoints
from bus.requests import Replier, Requester
from dart_cli.runtime.background import background
from dart_cli.weights.broadcast.channel import BroadcastChannel
from dart_cli.weights.broadcast.receiver import BroadcastReceiver
from dart_cli.weights.broadcast.transport import Transport
from dart_cli.weights.file import FileChannel, load
from dart_cli.weights.flat_weights import FlatWeights, specs_of
from dart_cli.weights.manifest import Published
from dart_cli.weights.receiver import Receiver
from dart_cli.weights.storage import free_shared_memory

TENSORS = 20
MOVED = 200
"""One value in so many changes between two versions."""
CHUNK_BYTES = 32 << 20
CHANNELS = {"file": (6, 1), "gloo": (5, 2)}
"""Channel -> sets that the trainer and its files take together, and each worker."""
DEADLINE_S = 600.0

Tensors = dict[str, torch.Tensor]


def main() -> None:
    """Measure, print a line for each part, and one of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--sizes", default="10,100,1000,2000", help="MB, by commas")
    parser.add_argument("--workers", default="1,2,4", help="how many, by commas")
    parser.add_argument("--channels", default=",".join(CHANNELS), help="by commas")
    parser.add_argument("--rounds", type=int, default=3, help="versions measured for each")
    parser.add_argument("--beside", default="nothing", help="what else runs, for the record")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--sink", nargs=2, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.worker:
        asyncio.run(work(*arguments.worker))
        return
    if arguments.sink:
        sink(*arguments.sink)
        return
    rows: list[dict[str, object]] = []
    workers = [int(each) for each in arguments.workers.split(",")]
    for size in map(float, arguments.sizes.split(",")):
        rows.append(limits(size, arguments.rounds, workers))
        print(rows[-1], flush=True)
        for channel in arguments.channels.split(","):
            ours, theirs = CHANNELS[channel]
            one = 0.0
            for count in workers:
                sets = ours + theirs * count
                if free_shared_memory() < sets * size * 1e6:
                    print(
                        f"{channel}, {size:g} MB, {count} workers left out: {sets} sets need more memory"
                    )
                    continue
                row = asyncio.run(measure(channel, size, count, arguments.rounds))
                if count == 1:
                    one = float(row["total_s"])
                if one:
                    row["times_one"] = round(float(row["total_s"]) / one, 2)
                rows.append(row)
                print(row, flush=True)
    load_average = os.getloadavg()[0]
    if arguments.out and arguments.out.exists():
        rows = merged(json.loads(arguments.out.read_text(encoding="utf-8")), rows)
    result = {
        "benchmark": "weights",
        "unit": "seconds, MB/s",
        "cores": os.cpu_count(),
        "load_average": round(load_average, 1),
        "beside": arguments.beside,
        "rows": rows,
    }
    line = json.dumps(result)
    if arguments.out:
        arguments.out.write_text(line + "\n", encoding="utf-8")
    print(line)


def merged(before: dict[str, Any], rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return the rows of an earlier result that are not measured again, and the new ones, by size."""

    def key(row: dict[str, object]) -> tuple[object, ...]:
        return row["mb"], row["channel"] != "limit", row["channel"], row.get("workers", 0)

    found = {key(row): row for row in before["rows"]}
    for row in rows:
        known = found.get(key(row), {}) if row["channel"] == "limit" else {}
        found[key(row)] = {**known, **row}  # loopback to other numbers of receivers stays
    return [found[each] for each in sorted(found)]


# --- channels -------------------------------------------------------------------------------


def random_set(megabytes: float) -> Tensors:
    """Return normal values of bfloat16 in tensors of one size, the same each time."""
    each = max(1, round(megabytes * 1e6 / 2 / TENSORS))
    first = torch.randn(each, generator=torch.Generator().manual_seed(0)).bfloat16()
    first[first == 0] = 1  # a step down from zero is a NaN
    return {f"t{index}": first / (1 + index) for index in range(TENSORS)}


def move(tensors: Tensors, version: int) -> None:
    """One value in `MOVED`, at random, by one unit in the last place up or down."""
    generator = torch.Generator().manual_seed(version)
    for tensor in tensors.values():
        count = len(tensor) // MOVED
        places = torch.randint(len(tensor), (count,), generator=generator)
        steps = torch.randint(2, (count,), generator=generator).mul_(2).sub_(1)
        tensor.view(torch.int16)[places] += steps.to(torch.int16)


async def measure(name: str, megabytes: float, workers: int, count: int) -> dict[str, Any]:
    """Publish versions to receivers in other processes; medians of those after the first."""
    tensors = random_set(megabytes)
    async with contextlib.AsyncExitStack() as stack:
        run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dart-bench-")))
        channel = make_channel(name, run_dir)
        stack.callback(channel.close)
        started = [
            await stack.enter_async_context(
                worker_process(name, run_dir, number, megabytes, count + 1)
            )
            for number in range(workers)
        ]
        answers = []
        if isinstance(channel, BroadcastChannel):
            replier = await stack.enter_async_context(Replier(Endpoints(run_dir).address(TRAIN)))
            answers.append(replier.serve(channel.answer))
        rounds = []
        async with asyncio.timeout(DEADLINE_S), background(*answers):
            for worker in started:
                await line_of(worker)  # it has its tensors
            for version in range(count + 1):
                rounds.append(await one(channel, started, tensors, version))
                move(tensors, version)
    kept = rounds[1:]
    row = {key: statistics.median(each[key] for each in kept) for key in kept[0]}
    row["still_share"] = row["still_s"] / row["total_s"]
    row["mb_per_s"] = megabytes / row["total_s"]
    values = {key: round(row[key], 4) for key in row}
    return {"channel": name, "mb": megabytes, "workers": workers} | values


@contextlib.asynccontextmanager
async def worker_process(
    name: str, run_dir: Path, number: int, megabytes: float, rounds: int
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Yield a worker, ended at the end."""
    arguments = ("--worker", name, str(run_dir), str(number), str(megabytes), str(rounds))
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, *arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        yield worker
    finally:
        if worker.returncode is None:
            worker.kill()
        await worker.wait()


async def one(
    channel: FileChannel,
    workers: list[asyncio.subprocess.Process],
    tensors: Tensors,
    version: int,
) -> dict[str, float]:
    """One version, from the begin of its publication until all workers have it in place."""
    began, cpu = time.monotonic(), time.process_time()
    if version:
        publication = channel.begin(tensors, version)
        await asyncio.to_thread(publication.copied)
        still_s = time.monotonic() - began
        published = await asyncio.to_thread(publication.result)
    else:
        published = await asyncio.to_thread(channel.resume, tensors, version)
        still_s = time.monotonic() - began
    publish_s = time.monotonic() - began
    permit = asyncio.Lock()
    served: list[float] = []

    async def serve(worker: asyncio.subprocess.Process) -> dict[str, float]:
        tell(worker, [str(published.path), version, published.digest])
        await line_of(worker)  # prepared
        async with permit:
            tell(worker, "permit")
            answer = await line_of(worker)
            served.append(time.monotonic() - began)
        return dict(answer)

    answers = await asyncio.gather(*(serve(worker) for worker in workers))
    return {
        "still_s": still_s,
        "publish_s": publish_s,
        "first_s": served[0],
        "total_s": served[-1],
        "receive_s": statistics.median(each["receive_s"] for each in answers),
        "pause_s": max(each["pause_s"] for each in answers),
        "sent_mb": statistics.median(each["sent_mb"] for each in answers),
        "cpu_s": time.process_time() - cpu + sum(each["cpu_s"] for each in answers),
    }


def tell(worker: asyncio.subprocess.Process, what: object) -> None:
    """Write a line to a worker."""
    assert worker.stdin is not None
    worker.stdin.write((json.dumps(what) + "\n").encode())


async def line_of(worker: asyncio.subprocess.Process) -> Any:
    """Return a worker's next line."""
    assert worker.stdout is not None
    if not (line := await worker.stdout.readline()):
        sys.exit("a worker ended; why stands above")
    return json.loads(line)


def make_channel(name: str, run_dir: Path) -> FileChannel:
    """Return the trainer's end, with the defaults of the configuration."""
    if name == "gloo":
        return BroadcastChannel(run_dir / "weights", Transport("gloo"), 2, shared=True)
    return FileChannel(run_dir / "weights", 2, shared=True)


async def work(name: str, folder: str, number: str, megabytes: str, rounds: str) -> None:
    """Run a worker's process: receive each version and, with the permit, copy it into tensors of its own."""
    run_dir, worker = Path(folder), f"rollout-{number}"
    mine = random_set(float(megabytes))
    async with Requester(Endpoints(run_dir).address(TRAIN), peer="train") as train:
        receiver: Receiver | None = None
        if name == "gloo":
            receiver = BroadcastReceiver(
                worker, train, run_dir / worker, Transport("gloo"), DEADLINE_S
            )
        print('"ready"', flush=True)
        for _ in range(int(rounds)):
            path, version, digest = json.loads(await asyncio.to_thread(sys.stdin.readline))
            began, cpu = time.monotonic(), time.process_time()
            published = Published(version, Path(path), digest, 0)
            before = getattr(receiver, "read_bytes", 0)
            if receiver is not None:
                await receiver.prepare(version)
            receive_s = time.monotonic() - began
            print('"prepared"', flush=True)
            await asyncio.to_thread(sys.stdin.readline)  # the permit
            began = time.monotonic()
            taken = await received(receiver, published, mine)
            receive_s += time.monotonic() - began
            began = time.monotonic()
            for key, tensor in taken.items():
                mine[key].copy_(tensor)
            pause_s = time.monotonic() - began
            sent = getattr(receiver, "read_bytes", 0) - before
            if receiver is None:
                sent = sum(tensor.numel() * tensor.element_size() for tensor in mine.values())
            told = {
                "receive_s": receive_s,
                "pause_s": pause_s,
                "cpu_s": time.process_time() - cpu,
                "sent_mb": sent / 1e6,
            }
            print(json.dumps(told), flush=True)
        if receiver is not None:
            receiver.close()


async def received(receiver: Receiver | None, published: Published, mine: Tensors) -> Tensors:
    """Return the checked tensors of a version, as an engine gets them."""
    if receiver is None:
        return await asyncio.to_thread(load, published.path, mine)
    got = await receiver.receive(published.path, published.policy_version, published.digest)
    assert not isinstance(got.source, Path)
    return await asyncio.to_thread(got.source.load, mine)


def limits(megabytes: float, rounds: int, workers: list[int]) -> dict[str, object]:
    """Seconds of plain copies: in memory, of a file in shared memory and beside it, over loopback."""
    tensors = random_set(megabytes)
    source = FlatWeights.in_memory(specs_of(tensors)).fill(tensors).data
    row: dict[str, object] = {"channel": "limit", "mb": megabytes}
    row["memory_copy_s"] = timed(partial(torch.empty_like(source).fill_(1).copy_, source), rounds)
    shared = Path("/dev/shm")
    for where, base in (("shared", shared if shared.is_dir() else None), ("disk", None)):
        with tempfile.TemporaryDirectory(prefix="dart-bench-", dir=base) as folder:
            file, copy = Path(folder) / "a", Path(folder) / "b"
            file.write_bytes(source.numpy().data)
            row[f"file_copy_{where}_s"] = timed(partial(shutil.copyfile, file, copy), rounds)
    for count in workers:
        row[f"loopback_{count}_s"] = over_loopback(source.numpy().data, count, rounds)
    return row


def over_loopback(data: memoryview, receivers: int, rounds: int) -> float:
    """Median seconds until `receivers` processes have all of `data`, each through a socket of its own."""
    size = len(data)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        ends = []
        for _ in range(receivers):
            port = str(listener.getsockname()[1])
            process = subprocess.Popen([sys.executable, __file__, "--sink", port, str(size)])
            stack.callback(process.wait, 60)
            stack.callback(process.terminate)
            ends.append(stack.enter_context(listener.accept()[0]))
        for end in ends:
            end.recv(1)  # it has its memory

        def send(end: socket.socket) -> None:
            end.sendall(data)
            end.recv(1)  # all has come

        threads = stack.enter_context(ThreadPoolExecutor(receivers))
        return timed(lambda: list(threads.map(send, ends)), rounds)


def sink(port: int, size: int) -> None:
    """Run a receiver's process: fill its memory again and again, and send a byte back for each time."""
    memory = memoryview(bytearray(size))
    with socket.create_connection(("127.0.0.1", port)) as end:
        while True:
            end.sendall(b".")
            at = 0
            while at < size:
                count = end.recv_into(memory[at : at + CHUNK_BYTES])
                if not count:
                    return
                at += count


def timed(action: Callable[[], object], rounds: int) -> float:
    """Median wall seconds."""
    took = []
    for _ in range(rounds):
        began = time.monotonic()
        action()
        took.append(time.monotonic() - began)
    return round(statistics.median(took), 4)


if __name__ == "__main__":
    main()
