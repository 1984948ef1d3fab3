"""How long new weights take from the trainer to the engine, over each channel.

    python benchmarks/weights.py [--sizes 10,100,1000,2000] [--updates 4] [--skip-updates]
                                 [--out benchmarks/results/weights.json]

For each size (MB) random bfloat16 tensors are published and taken by a receiver in another process,
which copies them into tensors of its own, as an engine does while it stands still:

    publish_s    the trainer: copy, digests, write
    receive_s    the worker: read or receive, check every digest, look for values that are not finite
    pause_s      the copy into the engine's tensors: all that keeps it from serving
    total_s      from the begin of publish to the end of the pause
    cpu_s        seconds of cores that both processes spent on it

`file`, `delta` (one value in 200 has moved, as an update at a learning rate of 1e-6 does in
bfloat16) and `gloo` (a broadcast over loopback). The limits in the same run: a plain copy in memory
and a plain copy of the file, in the same place. Each figure is the median of `--rounds` versions after
the first, in wall seconds: say what else ran.

Then consecutive updates of the shipped tiny model by the real learner on batches that it played, in
float32 and bfloat16: bytes of each delta over those of the set. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bus.endpoints import TRAIN, Endpoints
from bus.messages import ActRequest, Batch, Sampling
from bus.packed import float64s, int32s
from bus.replier import Replier
from bus.requester import Requester
from dart_cli.config.schema import Config, ModelConfig, TrainConfig
from dart_cli.data.chains import chained
from dart_cli.data.store.rows import BatchStep
from dart_cli.runtime.background import background
from dart_cli.weights import delta
from dart_cli.weights.base import Published, Receiver, WeightChannel
from dart_cli.weights.broadcast.channel import BroadcastChannel
from dart_cli.weights.broadcast.group import Transport
from dart_cli.weights.broadcast.receiver import BroadcastReceiver
from dart_cli.weights.file import FileChannel, load
from dart_cli.weights.flat_weights import FlatWeights, specs_of
from dart_cli.weights.mirror import DeltaReceiver
from dart_cli.weights.storage import free_shared_memory

TENSORS = 20
MOVED = 200
"""One value in so many changes between two versions."""
SETS_IN_MEMORY = 7
"""That the processes of one measurement take together at most, in files and otherwise."""
CHANNELS = ("file", "delta", "gloo")
LEARNING_RATES = (4e-4, 1e-6)
DEADLINE_S = 600.0

Tensors = dict[str, torch.Tensor]


def main() -> None:
    """Measure, print a line for each part, and one of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--sizes", default="10,100,1000,2000", help="MB, by commas")
    parser.add_argument("--rounds", type=int, default=3, help="versions measured for each")
    parser.add_argument("--updates", type=int, default=4, help="updates of the tiny model")
    parser.add_argument("--skip-updates", action="store_true")
    parser.add_argument("--beside", default="nothing", help="what else runs, for the record")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.worker:
        asyncio.run(work(*arguments.worker))
        return
    rows = []
    for size in map(float, arguments.sizes.split(",")):
        if free_shared_memory() < SETS_IN_MEMORY * size * 1e6:
            print(f"{size:g} MB left out: less than {SETS_IN_MEMORY} sets of memory are free")
            continue
        rows.append(limits(size, arguments.rounds))
        print(rows[-1], flush=True)
        for channel in CHANNELS:
            rows.append(asyncio.run(measure(channel, size, arguments.rounds)))
            print(rows[-1], flush=True)
    updates = [] if arguments.skip_updates else tiny_deltas(arguments.updates)
    for row in updates:
        print(row, flush=True)
    load_average = os.getloadavg()[0]
    result = {
        "benchmark": "weights",
        "unit": "seconds, MB/s",
        "cores": os.cpu_count(),
        "load_average": round(load_average, 1),
        "beside": arguments.beside,
        "rows": rows,
        "deltas": updates,
    }
    line = json.dumps(result)
    if arguments.out:
        arguments.out.write_text(line + "\n", encoding="utf-8")
    print(line)


# --- channels -------------------------------------------------------------------------------


def random_set(megabytes: float) -> Tensors:
    """Normal values of bfloat16 in tensors of one size, the same each time."""
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


async def measure(name: str, megabytes: float, count: int) -> dict[str, object]:
    """Publish versions to a receiver in another process; medians of those after the first."""
    tensors = random_set(megabytes)
    with tempfile.TemporaryDirectory(prefix="dart-bench-") as folder:
        run_dir = Path(folder)
        channel = make_channel(name, run_dir)
        worker = await asyncio.create_subprocess_exec(
            *(sys.executable, __file__, "--worker", name, folder, str(megabytes), str(count + 1)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert worker.stdin is not None
        assert worker.stdout is not None
        rounds = []
        try:
            async with Replier(Endpoints(run_dir).address(TRAIN)) as replier:
                answers = (
                    [replier.serve(channel.answer)] if isinstance(channel, BroadcastChannel) else []
                )
                async with asyncio.timeout(DEADLINE_S), background(*answers):
                    await worker.stdout.readline()  # it has its tensors
                    for version in range(count + 1):
                        rounds.append(await one(channel, worker, tensors, version))
                        move(tensors, version)
        finally:
            worker.kill() if worker.returncode is None else None
            await worker.wait()
            channel.close()
    kept = rounds[1:]
    row = {key: statistics.median(each[key] for each in kept) for key in kept[0]}
    row["mb_per_s"] = megabytes / row["total_s"]
    return {"channel": name, "mb": megabytes} | {key: round(row[key], 4) for key in row}


async def one(
    channel: WeightChannel, worker: asyncio.subprocess.Process, tensors: Tensors, version: int
) -> dict[str, float]:
    """One version, from publish until the worker has it in place."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    began, cpu = time.monotonic(), time.process_time()
    act = channel.resume if version == 0 else channel.publish
    published = await asyncio.to_thread(act, tensors, version)
    publish_s = time.monotonic() - began
    told = [str(published.path), version, published.digest]
    worker.stdin.write((json.dumps(told) + "\n").encode())
    if not (line := await worker.stdout.readline()):
        sys.exit("the worker ended; why stands above")
    answer = json.loads(line)
    total_s = time.monotonic() - began
    answer["cpu_s"] += time.process_time() - cpu
    return {"publish_s": publish_s, "total_s": total_s} | answer


def make_channel(name: str, run_dir: Path) -> WeightChannel:
    """The trainer's end, with the defaults of the configuration."""
    files = FileChannel(
        run_dir / "weights",
        keep=2,
        shared=True,
        delta=name == "delta",
        copies=name == "gloo",
        whole_every=1 if name == "file" else 8,
    )
    if name != "gloo":
        return files
    return BroadcastChannel(files, Transport("gloo"))


async def work(name: str, folder: str, megabytes: str, rounds: str) -> None:
    """The worker's process: receive each version and copy it into tensors of its own."""
    run_dir = Path(folder)
    mine = random_set(float(megabytes))
    async with Requester(Endpoints(run_dir).address(TRAIN), peer="train") as train:
        receiver: Receiver | None = None
        if name == "delta":
            receiver = DeltaReceiver(run_dir / "copy")
        elif name == "gloo":
            receiver = BroadcastReceiver(
                "rollout-0", train, run_dir / "copy", Transport("gloo"), DEADLINE_S
            )
        print("ready", flush=True)
        for _ in range(int(rounds)):
            path, version, digest = json.loads(await asyncio.to_thread(sys.stdin.readline))
            began, cpu = time.monotonic(), time.process_time()
            published = Published(version, Path(path), digest, 0)
            before = getattr(receiver, "read_bytes", 0)
            taken = await received(receiver, published, mine)
            receive_s = time.monotonic() - began
            for key, tensor in taken.items():
                mine[key].copy_(tensor)
            pause_s = time.monotonic() - began - receive_s
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
    """Checked tensors of a version, as an engine gets them."""
    if receiver is None:
        return await asyncio.to_thread(load, published.path, mine)
    got = await receiver.receive(published.path, published.policy_version, published.digest)
    assert not isinstance(got.source, Path)
    return await asyncio.to_thread(got.source.load, mine)


def limits(megabytes: float, rounds: int) -> dict[str, object]:
    """Seconds of a plain copy in memory, and of a file in shared memory and beside it."""
    tensors = random_set(megabytes)
    source = FlatWeights.in_memory(specs_of(tensors)).fill(tensors).data
    target = torch.empty_like(source).fill_(1)
    row: dict[str, object] = {"channel": "limit", "mb": megabytes}
    row["memory_copy_s"] = timed(lambda: target.copy_(source), rounds)
    shared = Path("/dev/shm")
    for where, base in (("shared", shared if shared.is_dir() else None), ("disk", None)):
        with tempfile.TemporaryDirectory(prefix="dart-bench-", dir=base) as folder:
            file, copy = Path(folder) / "a", Path(folder) / "b"
            file.write_bytes(source.numpy().data)
            row[f"file_copy_{where}_s"] = timed(partial(shutil.copyfile, file, copy), rounds)
    return row


def timed(action: Callable[[], object], rounds: int) -> float:
    """Median wall seconds."""
    took = []
    for _ in range(rounds):
        began = time.monotonic()
        action()
        took.append(time.monotonic() - began)
    return round(statistics.median(took), 4)


# --- deltas of real updates -----------------------------------------------------------------


def tiny_deltas(updates: int) -> list[dict[str, object]]:
    """Bytes of the deltas between consecutive updates of the shipped tiny model."""
    from dart_cli.train.learner import PolicyLearner
    from dart_cli.train.model import TrainModel

    batches = [played(number) for number in range(1, updates + 1)]
    rows: list[dict[str, object]] = []
    for dtype in ("float32", "bfloat16"):
        for rate in LEARNING_RATES:
            config = Config(
                model=ModelConfig(path="builtin:tiny", dtype=dtype),
                train=TrainConfig(lr=rate, updates=updates, pack_tokens=1024),
            )
            learner = PolicyLearner(TrainModel.load(config), config.train)
            with tempfile.TemporaryDirectory() as folder:
                channel = FileChannel(Path(folder), keep=updates + 1, delta=True, whole_every=1000)
                made = [channel.resume(learner.model.weights(), 0)]
                for done, batch in enumerate(batches):
                    learner.update(batch, done)
                    made.append(channel.publish(learner.model.weights(), done + 1))
                told = [delta.read(each.path) for each in made[1:]]
            rows.append(
                {
                    "dtype": dtype,
                    "lr": rate,
                    "set_bytes": made[0].size_bytes,
                    "delta_bytes": [each.size_bytes for each in told],
                    "share": [round(each.size_bytes / made[0].size_bytes, 4) for each in told],
                    "changed": [round(each.changed / each.values, 4) for each in told],
                }
            )
    return rows


def played(number: int) -> Batch:
    """First steps that the shipped model plays in suite `mini`, with rewards by parity."""
    from dart_cli.engines.responder import PolicyResponder
    from dart_cli.engines.transformers_engine import TransformersEngine
    from dart_cli.policy.model import load_policy
    from envs.base import content_hash
    from envs.registry import load_suite, make_env

    engine = TransformersEngine(load_policy("builtin:tiny"), max_batch=32)
    responder = PolicyResponder(engine.policy, engine)
    tasks = list(load_suite("mini").tasks.values())
    images: dict[str, bytes] = {}

    async def one_step(index: int) -> BatchStep:
        env = make_env("mini")
        task = tasks[index % len(tasks)]
        seen, info = env.reset(seed=100 * number + index, options={"task": task})
        env.close()
        completion = await responder.answer(
            ActRequest(
                trajectory_id=f"t{index}",
                step=0,
                instruction=str(info.get("instruction", task.instruction)),
                turns=[],
                screenshot=seen.screenshot,
                width=seen.width,
                height=seen.height,
                sampling=Sampling(temperature=1.0, max_tokens=12, seed=100 * number + index),
            )
        )
        key = content_hash(seen.screenshot)
        images[key] = seen.screenshot
        return BatchStep(
            group_id=f"t{index}",
            trajectory_id=f"t{index}",
            step=0,
            prompt_token_ids=int32s(completion.prompt_token_ids),
            token_ids=int32s(completion.sampled.token_ids),
            behaviour_logprobs=float64s(completion.sampled.behaviour_logprobs),
            version_spans=completion.sampled.version_spans,
            image_hashes=[key],
            advantage=1.0 if index % 2 else -1.0,
            weight=1.0,
        )

    async def all_of_them() -> list[BatchStep]:
        steps = await asyncio.gather(*(one_step(index) for index in range(16)))
        await engine.close()
        return steps

    chains, samples = chained(asyncio.run(all_of_them()))
    return Batch(
        batch_id=number,
        group_ids=["g"],
        temperature=1.0,
        chains=chains,
        samples=samples,
        images=images,
    )


if __name__ == "__main__":
    main()
