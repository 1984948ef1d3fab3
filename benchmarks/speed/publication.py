"""How much of a publication the trainer waits for: before (all of it) and beside its updates.

    python benchmarks/speed/publication.py [--sizes 10,100,1000] [--updates 6] [--lengths 1,2]
                                     [--out benchmarks/results/publication.json]

For each size (MB of bfloat16 that are published) a model of float32 masters is trained for real: forward,
backward and AdamW on one thread, on as many rows that an update takes about as long as a publication
alone, or twice as long (`--lengths`). The trainer's own parts publish: Publications and FileChannel, in
shared memory, as the defaults are.

    update_s             of an update alone: the median of as many updates without a publication
    before_s             seconds per update where each one is followed by a whole publication, done as it was
                         before: cast copies, into a mapped file, digests, sync, one after the other
    before_publish_s     of these, the publication
    after_s              seconds per update where the publication is beside the next one
    publish_s, stall_s   in the latter, of a publication from begin to end; of the trainer's standstill
    hidden_share         share of publication seconds during which the trainer did not stand still
    stall_share          the rest; goal <= 0.10
    seconds_per_update_ratio   after_s / before_s; no less than update_s / before_s
    slowed               (after_s - stall_s) / update_s: what the hidden work costs updates, which share the cores
    memory_copy_s        limit of the copy: a plain copy of the set in memory, in the same run
    before_cpu_s, after_cpu_s   seconds of cores per update, of both

Then the same of `--ranks` processes over gloo, whose shards must be gathered while all of them stand still
(`stall_s`); before, each rank gathered all of it, and rank 0 had it in memory as tensors first.

Seconds per update are medians, publications and standstill sums over all measured updates; say what else ran. On GPUs the updates need few cores, here they
share two with digests and copies. The last line is JSON, with the figures of the largest set.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bus.weights import WeightsPublished
from dart_cli.train.publishing import Publications
from dart_cli.train.sharded import published_stream
from dart_cli.weights.file import FileChannel
from dart_cli.weights.flat_weights import FlatWeights, TensorStream, specs_of, stream_of
from dart_cli.weights.manifest import MANIFEST, WEIGHTS, TensorSpec
from dart_cli.weights.storage import Storage, atomic_directory, free_shared_memory

WIDTH = 1024
ROWS = 4
"""Of a forward and backward pass: little, so that an update can be made of any length."""
MASTER_BYTES = 16
"""A float32 master, its gradient and two moments, for each parameter."""


class Model:
    """Square layers in float32, trained for real; published in bfloat16."""

    def __init__(self, megabytes: float) -> None:
        torch.manual_seed(0)
        count = max(1, round(megabytes * 1e6 / 2 / WIDTH**2))
        self.layers = [
            torch.nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5) for _ in range(count)
        ]
        self.optimizer = torch.optim.AdamW(self.layers, lr=1e-6, fused=True)
        self.passes = 1
        self.before_change: Callable[[], None] = lambda: None

    def one_pass(self) -> None:
        """Run a forward and a backward pass."""
        hidden = torch.randn(ROWS, WIDTH)
        for layer in self.layers:
            hidden = torch.nn.functional.silu(hidden @ layer)
        hidden.square().mean().backward()

    def update(self) -> None:
        """Run the passes and an optimizer step."""
        for _ in range(self.passes):
            self.one_pass()
        self.before_change()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def stream(self) -> TensorStream:
        """Return what is published: as a rank alone publishes its masters."""
        named = {f"layer.{index}": each.detach() for index, each in enumerate(self.layers)}
        specs = {name: TensorSpec(list(each.shape), "bfloat16") for name, each in named.items()}
        return TensorStream(specs, list(named.items()))


def publish_before(stream: TensorStream, directory: Path, version: int, storage: Storage) -> None:
    """Publish as it was done before: one step after the other, in the trainer's thread."""
    with torch.no_grad():
        tensors = {name: each.to(torch.bfloat16) for name, each in stream.tensors}
    size = sum(each.nbytes for each in tensors.values())
    with atomic_directory(directory / f"v{version:06d}") as draft:
        file = storage.make(draft / WEIGHTS, size)
        flat = FlatWeights.in_file(specs_of(tensors), file).fill(tensors)
        (draft / MANIFEST).write_text(
            flat.manifest(version, flat.digests()).text(), encoding="utf-8"
        )
    for old in sorted(directory.glob("v*"))[:-3]:
        for each in old.iterdir():
            each.unlink()
        old.rmdir()
    storage.sweep()


@dataclass
class Runner:
    """Runs the model's updates in a thread, as the trainer does."""

    model: Model
    folder: Path
    thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "torch", torch.set_num_threads, (1,))
    )

    async def in_thread(self, work: Callable[[], object]) -> float:
        """Seconds of `work` in torch's thread."""
        began = time.monotonic()
        await asyncio.get_running_loop().run_in_executor(self.thread, work)
        return time.monotonic() - began

    async def alone(self, count: int) -> float:
        """Median seconds of an update."""
        return statistics.median([await self.in_thread(self.model.update) for _ in range(count)])

    async def before(self, count: int) -> dict[str, float]:
        """Measure `count` updates, each followed by a whole publication."""
        directory = Path(tempfile.mkdtemp(dir=self.folder))
        storage = Storage(directory)
        published: list[float] = []

        async def round_of(version: int) -> None:
            await self.in_thread(self.model.update)
            stream = self.model.stream()
            published.append(
                await self.in_thread(lambda: publish_before(stream, directory, version, storage))
            )

        seconds, cpu = await timed_rounds(round_of, count)
        storage.close()
        return {
            "before_s": seconds,
            "before_cpu_s": cpu,
            "before_publish_s": statistics.median(published[1:]),
        }

    async def after(self, count: int) -> dict[str, float]:
        """Measure `count` updates, each with the publication of the one before beside it."""
        channel = FileChannel(Path(tempfile.mkdtemp(dir=self.folder)), keep=3, shared=True)

        async def announce(_message: WeightsPublished) -> None:
            """Nothing waits for it."""

        publications = Publications(announce, lambda _phase: None)
        self.model.before_change = publications.before_change
        found: list[dict[str, float]] = []
        loop = asyncio.get_running_loop()

        async def round_of(version: int) -> None:
            await self.in_thread(self.model.update)
            await publications.begin(
                lambda: loop.run_in_executor(
                    self.thread, lambda: channel.begin(self.model.stream(), version)
                ),
                version,
            )
            found.append(publications.times())

        seconds, cpu = await timed_rounds(round_of, count)
        await publications.complete()
        self.model.before_change = lambda: None
        channel.close()
        measured = found[2:]  # in these, what is complete and what was waited for belong together
        return {
            "after_s": seconds,
            "after_cpu_s": cpu,
            "publish_s": statistics.mean(each["publish_s"] for each in measured),
            "stall_s": statistics.mean(each["publish_stall_s"] for each in measured),
        }


async def timed_rounds(
    round_of: Callable[[int], Awaitable[None]], count: int
) -> tuple[float, float]:
    """Median seconds of a round after two that warm up, and mean seconds of cores."""
    for version in range(2):
        await round_of(version)
    took = []
    cpu = time.process_time()
    for version in range(2, count + 2):
        began = time.monotonic()
        await round_of(version)
        took.append(time.monotonic() - began)
    return statistics.median(took), (time.process_time() - cpu) / count


async def measure(megabytes: float, lengths: list[float], updates: int) -> list[dict[str, float]]:
    """Return a row for each length of an update."""
    model = Model(megabytes)
    rows = []
    with tempfile.TemporaryDirectory(prefix="dart-bench-") as folder:
        runner = Runner(model, Path(folder))
        one = statistics.median([await runner.in_thread(model.one_pass) for _ in range(5)])
        step = await runner.alone(3) - one
        publication = (await runner.before(2))["before_publish_s"]
        for length in lengths:
            model.passes = max(1, round((length * publication - step) / one))
            row = {"mb": megabytes, "length": length, "memory_copy_s": memory_copy(model)}
            row["update_s"] = await runner.alone(updates)
            row |= await runner.before(updates)
            row |= await runner.after(updates)
            row["hidden_share"] = 1 - row["stall_s"] / row["publish_s"]
            row["stall_share"] = row["stall_s"] / row["publish_s"]
            row["seconds_per_update_ratio"] = row["after_s"] / row["before_s"]
            row["slowed"] = (row["after_s"] - row["stall_s"]) / row["update_s"]
            rows.append({name: round(value, 4) for name, value in row.items()})
            print(rows[-1], flush=True)
        runner.thread.shutdown()
    return rows


# --- ranks ----------------------------------------------------------------------------------


def of_ranks(megabytes: float, size: int, count: int) -> dict[str, float]:
    """Publications of a sharded model, in processes of this program."""
    with tempfile.TemporaryDirectory(prefix="dart-bench-") as folder:
        processes = [
            subprocess.Popen(
                [
                    *(sys.executable, __file__, "--member"),
                    *map(str, (rank, size, folder, megabytes, count)),
                ],
                stdout=subprocess.PIPE,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            )
            for rank in range(size)
        ]
        outputs = [process.communicate(timeout=600)[0] for process in processes]
    found: dict[str, float] = json.loads(outputs[0])
    return {"mb": megabytes, "ranks": size} | {name: round(found[name], 4) for name in found}


def member(rank: int, size: int, folder: Path, megabytes: float, count: int) -> None:
    """One rank: the publications before and now, of the same shards."""
    distributed: Any = torch.distributed
    store = distributed.FileStore(str(folder / "store"), size)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(0)
    layers = max(1, round(megabytes * 1e6 / 2 / WIDTH**2))
    named: dict[str, torch.Tensor] = {
        f"layer.{index}": distribute_tensor(torch.randn(WIDTH, WIDTH), mesh, [Shard(0)])
        for index in range(layers)
    }
    channel = FileChannel(folder / "after", shared=True)
    (folder / "before").mkdir(exist_ok=True)
    storage = Storage(folder / "before") if rank == 0 else None
    sums = dict.fromkeys(("before_publish_s", "publish_s", "stall_s"), 0.0)
    for version in range(count + 1):
        distributed.barrier()
        began = time.monotonic()
        tensors = {
            name: DTensor.from_local(
                each.to_local().bfloat16(), mesh, each.placements
            ).full_tensor()
            for name, each in named.items()
            if isinstance(each, DTensor)
        }
        if storage is not None:
            publish_before(stream_of(tensors), folder / "before", version, storage)
        before_s = time.monotonic() - began
        del tensors
        distributed.barrier()
        began = time.monotonic()
        stream = published_stream(named, torch.bfloat16)
        if rank:
            for _ in stream.tensors:
                pass
        else:
            publication = channel.begin(stream, version)
            stall_s = time.monotonic() - began
            publication.result()
            if version:  # the first one warms up
                sums["before_publish_s"] += before_s / count
                sums["publish_s"] += publication.seconds / count
                sums["stall_s"] += stall_s / count
    distributed.barrier()
    if storage is not None:
        storage.close()
        channel.close()
        print(json.dumps(sums | {"stall_share": sums["stall_s"] / sums["publish_s"]}))
    distributed.destroy_process_group()


def memory_copy(model: Model) -> float:
    """Median seconds of a plain copy of the published set in memory."""
    source = FlatWeights.in_memory(model.stream().specs).data.fill_(1)
    target = torch.empty_like(source).fill_(2)
    took = []
    for _ in range(5):
        began = time.monotonic()
        target.copy_(source)
        took.append(time.monotonic() - began)
    return statistics.median(took)


def main() -> None:
    """Measure, print a line for each part, and one of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--sizes", default="10,100,1000", help="MB, by commas")
    parser.add_argument("--lengths", default="1,2", help="of an update, in publications, by commas")
    parser.add_argument("--updates", type=int, default=6, help="measured for each")
    parser.add_argument("--beside", default="nothing", help="what else runs, for the record")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument("--ranks", type=int, default=4, help="0: only a rank alone")
    parser.add_argument("--member", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.member:
        rank, size, folder, megabytes, count = arguments.member
        member(int(rank), int(size), Path(folder), float(megabytes), int(count))
        return
    rows: list[dict[str, float]] = []
    for size in map(float, arguments.sizes.split(",")):
        needed = size * 1e6 * (MASTER_BYTES / 2 + 8)
        if free_shared_memory() < needed:
            print(f"{size:g} MB left out: less than {needed / 1e9:.0f} GB of memory are free")
            continue
        lengths = list(map(float, arguments.lengths.split(",")))
        rows += asyncio.run(measure(size, lengths, arguments.updates))
    if not rows:
        sys.exit("no size fits")
    ranks = []
    for size in sorted({row["mb"] for row in rows}) if arguments.ranks else []:
        ranks.append(of_ranks(size, arguments.ranks, arguments.updates))
        print(ranks[-1], flush=True)
    largest = next(row for row in rows if row["mb"] == max(each["mb"] for each in rows))
    names = ("hidden_share", "stall_share", "seconds_per_update_ratio")
    result = {
        "benchmark": "publication",
        "unit": "seconds",
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "beside": arguments.beside,
        **{name: largest[name] for name in names},
        "rows": rows,
        "ranks": ranks,
    }
    line = json.dumps(result)
    if arguments.out:
        arguments.out.write_text(line + "\n", encoding="utf-8")
    print(line)


if __name__ == "__main__":
    main()
