"""Does the quickstart learn, and is learning the cause? It is run with several seeds and two controls.

    python benchmarks/learning/learning.py                     # 3 seeds and the other arms, one after another
    python benchmarks/learning/learning.py --seeds 0 --arms rl --out runs/one-seed

    rl          `dart up CONFIG`, one run for each seed; configs/quickstart.toml if none is named
    flat        the same with train.lr = 0: what evaluation noise and task sampling alone do
    by_hand     the rl arm without `dart up`: four shells' worth of processes, started in an order drawn
                from the seed, each stopped (Ctrl-C) and started again once along the way
    imitation   no RL: the base's own single-step training goes on for as much CPU time as the rl
                runs took, both cores counted, from the same checkpoint

Every arm is judged as `dart eval` does, on held-out seeds, and on compositions that no arm trains
on. The physical limit of a success rate is 1. The last line is JSON; OUT/learning.png shows the
curves by task. Two cores, no GPU; about 10 minutes an arm.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.learning.study import dart, overrides  # noqa: E402
from bus.errors import DartError  # noqa: E402 - after the path
from dart_cli.config.load import load_config  # noqa: E402
from dart_cli.data.store.open import open_reader  # noqa: E402 - after the path
from dart_cli.data.store.rows import CurvePoint  # noqa: E402 - after the path

CONFIG = ROOT / "configs" / "quickstart.toml"
ARMS = ("rl", "flat", "imitation", "by_hand")
ROLES = ("data", "env", "rollout", "train")
DEADLINE_S = 1200.0
"""Longest wait for a part of a run."""

BUCKET = 5
"""Policy versions that share a point of a curve."""


def main() -> None:
    """Run the arms, draw, and print one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--out", type=Path, default=Path("runs/learning"))
    parser.add_argument("--set", action="append", default=[], help="passed to dart up and eval")
    arguments = parser.parse_args()
    config = arguments.config.absolute()
    if "imitation" in arguments.arms and config != CONFIG:
        parser.error("arm imitation goes on with the quickstart's base: leave --config out")
    arguments.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, Any]] = {}
    if "rl" in arguments.arms:
        for seed in arguments.seeds:
            results[f"rl seed {seed}"] = up(
                config, arguments.out, f"rl-{seed}", seed, arguments.set
            )
    if "flat" in arguments.arms:
        sets = [*arguments.set, "train.lr=0"]
        results["flat"] = up(config, arguments.out, "flat", arguments.seeds[0], sets)
    if "imitation" in arguments.arms:
        spent = [result["cpu_seconds"] for name, result in results.items() if name.startswith("rl")]
        seconds = sum(spent) / len(spent) if spent else 600.0
        results["imitation"] = imitate(arguments.out, seconds, arguments.set)
    if "by_hand" in arguments.arms:
        results["by_hand"] = by_hand(config, arguments.out, arguments.seeds[0], arguments.set)
    picture = arguments.out / "learning.png"
    draw(picture, arguments.out, [name for name in results if name != "imitation"])
    print(json.dumps({"benchmark": "learning", "arms": results, "picture": str(picture)}))


def up(config: Path, out: Path, name: str, seed: int, sets: Sequence[str]) -> dict[str, Any]:
    """Run one whole `dart up`; return its last line, and the CPU seconds of the run and its evaluations."""
    line, seconds = call(
        [*dart("up", str(config)), *overrides([*sets, f"run.dir={out / name}", f"run.seed={seed}"])]
    )
    return dict(line, cpu_seconds=round(seconds, 1))


def imitate(out: Path, seconds: float, sets: Sequence[str]) -> dict[str, Any]:
    """Train the base further by its own script, then evaluate it in the same way."""
    folder = out / "imitation-model"
    script = str(ROOT / "scripts" / "shipped_models" / "build_tiny.py")
    call(
        [
            sys.executable,
            script,
            "--start",
            "builtin:tiny",
            "--seed",
            "100",
            "--seconds",
            str(round(seconds)),
            "--out",
            str(folder),
        ]
    )
    scores = {}
    for key, model in (("before", "builtin:tiny"), ("after", str(folder))):
        line, _ = call(
            [
                *dart("eval", str(CONFIG)),
                "--json",
                "--model",
                model,
                "--keep-as",
                f"imitation-{key}",
                *overrides([*sets, f"run.dir={out / 'imitation'}"]),
            ]
        )
        scores[key] = line
    return {"cpu_seconds": round(seconds, 1), **scores}


def by_hand(config: Path, out: Path, seed: int, sets: Sequence[str]) -> dict[str, Any]:
    """Run the four roles as a person starts them; each is stopped and started again at its fifth."""
    run_dir = out / "by_hand"
    options = overrides([*sets, f"run.dir={run_dir}", f"run.seed={seed}"])
    goal = load_config(config, [*sets]).train.updates
    order = Random(seed).sample(ROLES, k=len(ROLES))
    children: dict[str, subprocess.Popen[str]] = {}

    def start(role: str) -> None:
        print(f"+ dart {role} at update {updates(run_dir)}", flush=True)
        children[role] = subprocess.Popen(dart(role, str(config), *options), cwd=ROOT, text=True)
        time.sleep(3)

    began = time.monotonic()
    try:
        for role in order:
            start(role)
        for number, role in enumerate(reversed(order), start=1):
            wait_for(run_dir, goal * number // (len(order) + 1), children)
            children[role].send_signal(signal.SIGINT)
            if code := children[role].wait(30):
                raise SystemExit(f"dart {role} ended with {code}; see {run_dir / 'logs'}")
            start(role)
        for role, child in children.items():
            if code := child.wait(DEADLINE_S):
                raise SystemExit(f"dart {role} ended with {code}; see {run_dir / 'logs'}")
    finally:
        for child in children.values():
            child.kill()
    minutes = (time.monotonic() - began) / 60
    scores, _ = call([*dart("eval", str(config)), "--json", *options])
    return {"order": order, "updates": updates(run_dir), "minutes": round(minutes, 2), **scores}


def updates(run_dir: Path) -> int:
    """Return the number of batches trained so far, from the ledger."""
    try:
        with open_reader(run_dir) as reader:
            return sum(batch.state == "trained" for batch in reader.batches())
    except DartError:  # not there yet
        return 0


def wait_for(run_dir: Path, goal: int, children: dict[str, subprocess.Popen[str]]) -> None:
    """Wait until `goal` batches are trained; end the benchmark if a process dies or no batch comes."""
    deadline = time.monotonic() + DEADLINE_S
    while updates(run_dir) < goal:
        dead = [role for role, child in children.items() if child.poll() is not None]
        if dead or time.monotonic() > deadline:
            raise SystemExit(
                f"{dead or 'no process'} ended at update {updates(run_dir)}, want {goal}"
            )
        time.sleep(0.5)


def call(command: Sequence[str]) -> tuple[dict[str, Any], float]:
    """Run a command, pass its progress on, and return the JSON of its last line and its CPU seconds."""
    print("+", " ".join(command), flush=True)
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    last = ""
    assert child.stdout is not None
    for line in child.stdout:
        print(line, end="", flush=True)
        last = line.strip() or last
    if code := child.wait():
        raise SystemExit(f"{command[2:4]} ended with {code}; its output is above")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"  {spent:.0f} CPU s in {time.monotonic() - began:.0f} s", flush=True)
    return json.loads(last), spent


def draw(path: Path, out: Path, names: Sequence[str]) -> None:
    """Draw success while training, one panel for each task, a line for every run of the ledger."""
    runs = {name: curves(out / name.replace("rl seed ", "rl-")) for name in names}
    tasks = sorted({task for run in runs.values() for task in run})
    if not tasks:
        return
    columns = 4
    rows = -(-len(tasks) // columns)
    figure = Figure(figsize=(3.2 * columns, 2.4 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for panel, task in zip(panels, tasks, strict=False):
        for name, tasks_of_run in runs.items():
            points = tasks_of_run.get(task, [])
            style = {"color": "grey", "linestyle": "--"} if name == "flat" else {}
            panel.plot([x for x, _ in points], [y for _, y in points], label=name, **style)
        panel.set_title(task, fontsize=9)
        panel.set_ylim(0, 1.02)
        panel.grid(alpha=0.3)
    for panel in panels[len(tasks) :]:
        panel.set_visible(False)
    panels[0].legend(fontsize=7)
    figure.supxlabel("minutes of training")
    figure.supylabel("success while training (sampled, fresh seeds)")
    figure.savefig(path, dpi=110)


def curves(run_dir: Path) -> dict[str, list[tuple[float, float]]]:
    """Return (minutes, success) of a run by task, from its ledger."""
    curves_by_arm: dict[str, list[tuple[float, float]]] = {}
    with open_reader(run_dir) as reader:
        began = reader.run().created_at
        points: Sequence[CurvePoint] = reader.success_curve(bucket=BUCKET)
    for point in points:
        minutes = (point.ended_at - began) / 60
        curves_by_arm.setdefault(point.task_id, []).append((minutes, point.success))
    return curves_by_arm


if __name__ == "__main__":
    main()
