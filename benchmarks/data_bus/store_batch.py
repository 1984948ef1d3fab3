"""What the numbers of a batch of real size cost, from the rows to the tensors of the trainer's packs.

    python benchmarks/data_bus/store_batch.py [--before CHECKOUT] [--out benchmarks/results/store_batch.json]

48 trajectories of 30 full-HD steps with `evict` history (7 screens, then 3): CPU seconds of each part,
and how much the process grows at its peak. The baseline is numbers as Python lists, the limit SQLite
alone, reading the same rows. With `--before` another checkout of this repository is measured, too, in
turn. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, os.environ.get("DART_TREE", sys.path[0]))

import msgpack
import numpy as np

from bus.codec import BATCH_LIMITS, decode, encode
from bus.messages import (
    Batch,
    BatchReply,
    Lease,
    LeaseRequest,
    SampledTokens,
    Sampling,
    StepRecord,
    TrajectoryEnd,
    VersionSpan,
)
from dart_cli.config.schema import Config
from dart_cli.config.task_split import training_tasks
from dart_cli.data.batches import BatchPlan
from dart_cli.data.checks import check_step
from dart_cli.data.ledger import Ledger
from dart_cli.data.loading import load
from dart_cli.data.scheduler import make_scheduler
from dart_cli.data.store.open import DATABASE, open_store
from dart_cli.data.store.reader import Reader
from dart_cli.data.store.steps import pack_prompt, prompt_ids, unpack_floats, unpack_ids
from envs.contract.blobs import content_hash

TRAJECTORIES, STEPS, GROUP = 48, 30, 8
PROMPT_TEXT, COMPLETION = 600, 100  # tokens
SCREEN_TOKENS, GRID, PIXELS = 2_691, (1, 78, 138), (1920, 1080)
IMAGE_TOKEN, VOCABULARY = 151_655, 152_064
MOST_SCREENS, KEPT_SCREENS = 7, 3
PACK_TOKENS = 32_768
OF_A_BATCH = ("load_s", "encode_s", "decode_s", "check_s", "plan_s", "packs_s")
T = TypeVar("T")


def main() -> None:
    """Measure, print what is measured, and end in one JSON line."""
    parser = argparse.ArgumentParser(description="Benchmark of a batch's numbers.")
    parser.add_argument("--before", type=Path, help="another checkout, measured in the same run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="on the disk to be measured")
    parser.add_argument("--out", type=Path, help="also write the result here")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        numbers(Path(asked.child[0]), asked.child[1])
        return
    with tempfile.TemporaryDirectory(dir=asked.dir, prefix=".batch-") as scratch:
        result = {
            "benchmark": "store_batch",
            "baseline": "numbers as Python lists, each step for itself",
            "limit": "SQLite alone, reading the same rows",
            "trajectories": TRAJECTORIES,
            "steps": STEPS,
            "rounds": asked.rounds,
            **measure_numbers(Path(scratch), trees(asked.before), asked.rounds),
        }
    if asked.out is not None:
        asked.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


def trees(before: Path | None) -> dict[str, Path]:
    """Return the checkouts that are measured."""
    here = Path(__file__).resolve().parents[2]
    return ({"before": before} if before else {}) | {"now": here}


def child(file: str, tree: Path, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Return a benchmark's part, run with the code of a checkout."""
    environment = os.environ | {"DART_TREE": str(tree.resolve()), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(tree.resolve())
    command = [sys.executable, file, "--child", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, **options)


def answer_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return the JSON that a child prints last."""
    out, _ = process.communicate(timeout=600)
    if process.returncode:
        raise SystemExit(f"{process.args!r} ended with {process.returncode}")
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


# --- the run ------------------------------------------------------------------------------------


def configured(run_dir: Path) -> Config:
    """Return a run that leases whatever is asked for; a batch is all that was played."""
    return Config.model_validate(
        {
            "run": {"dir": run_dir},
            "env": {"suite": "mini"},
            "data": {
                "group_size": GROUP,
                "groups_per_batch": TRAJECTORIES // GROUP,
                "max_open_groups": 1_000_000,
                "max_staleness": 1_000_000,
            },
        }
    )


def begin(config: Config, store: Any) -> Ledger:
    """Return the ledger as `dart data` makes it."""
    tasks = training_tasks(config)
    store.begin_run(config.run.seed, config.model_dump_json(), tasks)
    return Ledger(config, store, tasks, make_scheduler(config, tasks))


def fill(run_dir: Path, screen_bytes: int) -> None:
    """Play one batch's trajectories; every other one passes."""
    config, rng = configured(run_dir), Random(0)
    with open_store(run_dir) as store:
        ledger = begin(config, store)
        slots = [LeaseRequest(worker="e", slot=n, suites=["mini"]) for n in range(TRAJECTORIES)]
        leases = [found for each in slots if isinstance(found := ledger.lease(each), Lease)]
        for number, each in enumerate(leases):
            for record in episode(each, screen_bytes, rng):
                ledger.step(record)
                store.commit()
            ledger.end(end_of(each, STEPS, passes=number % 2 == 1))
            store.commit()


def episode(lease: Lease, screen_bytes: int, rng: Random) -> Iterator[StepRecord]:
    """Yield the steps of a policy whose history drops screens in chunks."""
    head = [rng.randrange(150_000) for _ in range(PROMPT_TEXT)]
    past: list[tuple[str, list[int]]] = []
    visible: list[int] = []  # steps whose screens are shown
    for step in range(STEPS):
        image = b"\x89PNG" + rng.randbytes(screen_bytes - 4)
        past.append((content_hash(image), []))
        visible.append(step)
        if len(visible) > MOST_SCREENS:
            visible = visible[-KEPT_SCREENS:]
        prompt = list(head)
        for index, (_, completion) in enumerate(past):
            shown = [IMAGE_TOKEN] * SCREEN_TOKENS if index in visible else []
            prompt += [151_644, *shown, 151_645, *completion]
        said = [rng.randrange(150_000) for _ in range(COMPLETION)]
        past[-1] = past[-1][0], said
        yield record(lease, step, image, [past[index][0] for index in visible], prompt, said, rng)


def record(
    lease: Lease,
    step: int,
    image: bytes,
    hashes: list[str],
    prompt: list[int],
    said: list[int],
    rng: Random,
) -> StepRecord:
    """One step as an environment hands it in."""
    return StepRecord(
        trajectory_id=lease.trajectory_id,
        step=step,
        screenshot=image,
        media_type="image/png",
        image_hashes=hashes,
        prompt_token_ids=prompt,  # type: ignore[arg-type]
        sampled=SampledTokens(
            token_ids=said,
            behaviour_logprobs=[-rng.random() for _ in said],
            entropies=[rng.random() for _ in said],
            version_spans=[VersionSpan(version=0, start=0, end=len(said))],
        ),
        worker="rollout-0",
        text="Action: click(start_box='(1,2)')",
        action={"kind": "click", "x": 1, "y": 2, "button": "left"},
        error="",
        model_s=1.0,
        env_s=1.0,
    )


def end_of(lease: Lease, steps: int, *, passes: bool) -> TrajectoryEnd:
    """Return the end of one trajectory."""
    return TrajectoryEnd(
        trajectory_id=lease.trajectory_id,
        steps=steps,
        outcome="pass" if passes else "fail",
        reason="as played",
        stop_reason="done",
        screenshot=None,
        reset_s=1.0,
        wall_s=1.0,
    )


def planned(run_dir: Path) -> BatchPlan:
    """Return the batch of the run."""
    with open_store(run_dir) as store:
        plan = begin(configured(run_dir), store).plan_batch(0)
    assert isinstance(plan, BatchPlan), plan
    return plan


# --- numbers ------------------------------------------------------------------------------------


def measure_numbers(scratch: Path, trees: dict[str, Path], rounds: int) -> dict[str, Any]:
    """For each arm the medians over rounds, the arms in turn."""
    run_dir = scratch / "numbers"
    fill(run_dir, 1_000)  # numbers alone: screens are bytes that no part but SQLite copies
    here = Path(__file__).resolve().parents[2]
    arms = {"lists": (here, "lists"), "limit": (here, "limit")}
    arms |= {name: (tree, "packed") for name, tree in trees.items()}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, (tree, kind) in arms.items():
            found[name].append(answer_of(child(__file__, tree, str(run_dir), kind)))
    results = {}
    for name, rows in found.items():
        results[name] = {key: round(float(np.median([r[key] for r in rows])), 3) for key in rows[0]}
        print(f"{name:8}", results[name])
    digests = {results[name]["digest"] for name in arms if name != "limit"}
    assert len(digests) == 1, results  # every arm ends in the same tensors
    return results


def numbers(run_dir: Path, kind: str) -> None:
    """Measure the batch from rows to tensors, in a child process, and print the numbers as JSON."""
    plan = planned(run_dir)
    parts: dict[str, float] = {}
    import torch  # these before memory is counted

    import dart_cli.train.packs.share  # noqa: F401

    start = resident_kb("VmRSS")

    def part(name: str, work: Callable[..., T], *arguments: Any) -> T:
        began = time.process_time()
        found = work(*arguments)
        parts[f"{name}_s"] = time.process_time() - began
        parts[f"{name}_peak_mb"] = (resident_kb("VmHWM") - start) / 1024  # the highest until then
        return found

    with Reader(run_dir / DATABASE) as reader:
        if kind == "limit":
            part("load", raw_rows, reader, plan)
        elif kind == "lists":
            digest = as_lists(reader, plan, part, torch)
        else:
            digest = as_packed(reader, plan, part)
    parts["all_s"] = sum(value for name, value in parts.items() if name in OF_A_BATCH)
    if kind != "limit":
        parts["digest"] = digest
    print(json.dumps(parts))


SELECT = (
    "SELECT image_hashes, prompt_token_ids, token_ids, behaviour_logprobs, version_spans "
    "FROM steps WHERE trajectory_id = ? AND step = ?"
)


def raw_rows(reader: Any, plan: BatchPlan) -> list[Any]:
    """Return the rows as SQLite has them."""
    read = reader._connection.execute  # noqa: SLF001 - SQLite alone is to be measured
    return [read(SELECT, (s.trajectory_id, s.step)).fetchone() for s in plan.samples]


def as_packed(reader: Reader, plan: BatchPlan, part: Callable[..., Any]) -> int:
    """As the processes do it; with a model's tables in place of a model."""
    from dart_cli.train.packs.pack import PackMaker
    from dart_cli.train.packs.share import check, packed_batches

    policy: Any = stand_in()
    batch: Batch = part("load", load, reader, plan)
    reply = BatchReply.model_construct(batch=batch, retry_after_s=0.0, reason="")
    frames = part("encode", encode, reply)
    del batch, reply
    received: Any = part("decode", decode, frames, BATCH_LIMITS)
    del frames
    part("check", check, received.batch, policy)
    [share] = part("plan", lambda: packed_batches(received.batch, policy, pack_tokens=PACK_TOKENS))

    def tensors() -> int:
        weights = [sample.weight for sample in share.batch.samples]
        maker = PackMaker(share, weights, policy)
        prepared = SimpleNamespace(grid=GRID)
        digest = 0
        for number in range(len(maker)):
            shown: Any = dict.fromkeys(maker.shown(number), prepared)
            pack = maker.make(number, shown)
            digest += int(pack.token_ids.sum()) + int(1e6 * pack.behaviour_logprobs.sum())
        return digest

    digest: int = part("packs", tensors)
    parts_of_hand_in(plan, part)
    return digest // 1_000_000  # packs add the log-probabilities in other orders


def parts_of_hand_in(plan: BatchPlan, part: Callable[..., Any]) -> None:
    """Measure the way of steps to their rows, without SQLite: sent, received, checked, packed."""
    lease = Lease(
        trajectory_id=plan.samples[0].trajectory_id,
        group_id="g",
        suite="mini",
        task_id="t",
        task_seed=1,
        max_steps=STEPS,
        sampling=Sampling(temperature=1.0, max_tokens=512, seed=1),
    )
    records = list(episode(lease, 1_000, Random(0)))
    frames = part("step_encode", lambda: [encode(record) for record in records])
    received: Any = part("step_decode", lambda: [decode(each) for each in frames])
    part("step_check", deque, (check_step(each, Config()) for each in received), 0)
    part("step_pack", lambda: [pack_prompt(each.prompt_token_ids) for each in received])


def as_lists(reader: Any, plan: BatchPlan, part: Callable[..., Any], torch: Any) -> int:
    """Do what `as_packed` does with numbers as Python lists from row to tensor, each step for itself."""

    def rows() -> list[Any]:
        return [
            [
                json.loads(row["image_hashes"]),
                unpack_ids(prompt_ids(row["prompt_token_ids"])),
                unpack_ids(row["token_ids"]),
                unpack_floats(row["behaviour_logprobs"]),
                unpack_ids(row["version_spans"]),
            ]
            for row in raw_rows(reader, plan)
        ]

    steps = part("load", rows)
    frame = part("encode", msgpack.packb, steps)
    del steps
    received = part("decode", msgpack.unpackb, frame)
    del frame

    def tensors() -> int:
        digest = 0
        for _, prompt, token_ids, logprobs, _ in received:
            torch.tensor(prompt + token_ids)
            digest += int(torch.tensor(token_ids).sum())
            digest += int(1e6 * torch.tensor(logprobs, dtype=torch.float64).sum())
        return digest

    digest: int = part("packs", tensors)
    return digest // 1_000_000


def stand_in() -> Any:
    """Return what packs read of a loaded policy: sizes and ids, no weights."""
    import torch

    layer = SimpleNamespace(parameters=lambda: [torch.empty(1)])
    text = SimpleNamespace(num_attention_heads=28, head_dim=128, num_hidden_layers=28)
    embedding = SimpleNamespace(weight=SimpleNamespace(shape=(VOCABULARY, 1)))
    inner = SimpleNamespace(
        language_model=SimpleNamespace(layers=layer), visual=SimpleNamespace(blocks=layer)
    )
    return SimpleNamespace(
        model=SimpleNamespace(
            model=inner,
            config=SimpleNamespace(get_text_config=lambda: text),
            get_input_embeddings=lambda: embedding,
        ),
        images=SimpleNamespace(merge=2, token_count=lambda *_: SCREEN_TOKENS),
        image_token_id=IMAGE_TOKEN,
        forbidden_token_ids=[IMAGE_TOKEN],
        max_positions=128_000,
    )


def resident_kb(field: str) -> int:
    """Memory of this process in KiB: VmRSS now, VmHWM at most."""
    status = Path("/proc/self/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith(f"{field}:")]
    return int(line.split()[1])


if __name__ == "__main__":
    main()
