"""Does the quickstart learn on a Ray cluster of three nodes as on one host, also with a node killed?

    python benchmarks/faults/ray_cluster.py                                # all three arms, seed 0
    python benchmarks/faults/ray_cluster.py --arms ray --seeds 1 --updates 60 --out benchmarks/results/ray.json

Arms: `one-host` is `dart up CONFIG`; `ray` is the same with `--ray`, the data service and the trainer on the first node,
the rollout worker and the environments on the two others; `ray-killed` kills the node of the environments when half
of the updates are done: all its processes at once, as a host that is lost. Success is over held-out episodes,
before (in the first arm, the weights are the same) and after; of the killed run, an audit of what had
finished (benchmarks/faults/audit.py).

The limit is the run of one host: the nodes share this machine's cores, so a cluster of it cannot be faster,
and what it takes longer is what Ray and tcp cost. Results of arms that are not asked for stay in `--out`.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.faults.audit import FinishedTrajectories, audit
from benchmarks.faults.local_nodes import LocalCluster, local_cluster
from bus.errors import RunDirectoryError
from dart_cli.data.store.open import open_reader

ARMS = ("one-host", "ray", "ray-killed")
NODES = ({"num_cpus": 2}, {"num_cpus": 2}, {"num_cpus": 2})
_RUNS_ON = re.compile(r"(\S+) runs on .* node (\w+)\)")
_PROGRESS = re.compile(r"update (\d+)/\d+  success ([\d.]+)")
_EACH = 10
_POLL_S = 0.5


def play(arm: str, seed: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Play one run to its end and return its results."""
    with local_cluster(*NODES) if arm != "one-host" else nullcontext() as cluster:
        run_dir = folder / f"{arm}-{seed}"
        command = [sys.executable, "-m", "dart_cli", "up", options.config]
        if cluster is not None:
            command += ["--ray", cluster.address]
        for setting in (
            f"run.dir={run_dir}",
            f"run.seed={seed}",
            f"train.updates={options.updates}",
            f"eval.episodes={options.episodes}",
            *options.set,
        ):
            command += ["--set", setting]
        environment: Mapping[str, str] = os.environ if cluster is None else cluster.environment
        began = time.monotonic()
        child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            env=dict(environment),
        )
        watch = Watch(child, run_dir, cluster if arm == "ray-killed" else None, options.updates)
        watch.follow()
        assert child.stdout is not None
        printed = child.stdout.read()
        if child.wait() != 0:
            sys.exit("\n".join(watch.lines[-20:]))
    result = json.loads(printed.splitlines()[-1])
    row = {
        "arm": arm,
        "seed": seed,
        **{
            key: result[key]
            for key in (
                "success_before",
                "success_after",
                "success_after_interval",
                "greedy_after",
                "minutes",
                "trajectories",
                "updates",
                "policy_version",
            )
        },
        "heldout_after": result["heldout"]["after"],
        "minutes_with_evaluations": round((time.monotonic() - began) / 60, 2),
    }
    with open_reader(run_dir) as reader, (run_dir / "logs" / "train.log").open() as log:
        audited = audit(reader, watch.finished, log)
    row["audit"] = {
        "seen_finished": len(watch.finished.ids),
        **{
            key: getattr(audited, key)
            for key in ("finished_lost", "double_trained", "never_trained", "steps_lost_max", "cut")
        },
    }
    row["success_while_training"] = while_training(watch.lines)
    if watch.killed:
        row["killed"] = watch.killed
    return row


def while_training(lines: Sequence[str]) -> dict[int, float]:
    """Return the success that `dart up` printed at the update nearest to each tenth of the run."""
    matches = (_PROGRESS.search(line) for line in lines)
    seconds_by_update = {
        int(match[1]): float(match[2]) for match in matches if match and match[2] != "-"
    }
    last = max(seconds_by_update, default=0)
    return {
        tenth: seconds_by_update[min(seconds_by_update, key=lambda update: abs(update - tenth))]
        for tenth in range(_EACH, last + _EACH // 2, _EACH)
    }


class Watch:
    """A watcher of a run: it notes what is finished and where processes run, and kills a node at half time."""

    def __init__(
        self, child: subprocess.Popen[str], run_dir: Path, victim: LocalCluster | None, updates: int
    ) -> None:
        self.finished, self.lines = FinishedTrajectories(), list[str]()
        self.killed: dict[str, Any] = {}
        self._child, self._run_dir, self._victim, self._updates = child, run_dir, victim, updates
        self._nodes: dict[str, tuple[str, float]] = {}  # worker -> node, since when

    def follow(self) -> None:
        """Watch the run until it has ended."""
        listening = threading.Thread(target=self._listen)
        listening.start()
        killed_at = 0.0
        while self._child.poll() is None:
            time.sleep(_POLL_S)
            updates = self._look()
            if self._victim is not None and not killed_at and updates >= self._updates // 2:
                node = self._nodes["env-0"][0]
                lost = sorted(name for name, (where, _) in self._nodes.items() if where == node)
                self._victim.kill(node)
                killed_at = time.monotonic()
                self.killed = {"processes": lost, "after_updates": updates}
        listening.join()
        if killed_at:
            again = (self._nodes[name][1] for name in self.killed["processes"])
            self.killed["seconds_until_replaced"] = round(max(again) - killed_at, 1)

    def _look(self) -> int:
        """Note what is finished, and return how many updates are done."""
        try:
            with open_reader(self._run_dir) as reader:
                self.finished.update(reader)
                return sum(batch.state == "trained" for batch in reader.batches())
        except RunDirectoryError:  # not there yet
            return 0

    def _listen(self) -> None:
        assert self._child.stderr is not None
        for line in self._child.stderr:
            self.lines.append(line.rstrip())
            print(line, end="", file=sys.stderr, flush=True)
            if match := _RUNS_ON.search(line):
                self._nodes[match[1]] = (match[2], time.monotonic())


def main() -> None:
    """Play the chosen arms; write and print the results of all arms."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="configs/quickstart.toml")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--updates", type=int, default=250)
    parser.add_argument("--episodes", type=int, default=420)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    if options.out is not None and options.out.exists():
        rows = json.loads(options.out.read_text())["arms"]
    for seed in options.seeds:
        for arm in options.arms:
            with tempfile.TemporaryDirectory(prefix="dart-bench-") as folder:
                row = play(arm, seed, options, Path(folder))
            rows = [row for row in rows if (row["arm"], row["seed"]) != (arm, seed)] + [row]
            rows.sort(key=lambda row: (ARMS.index(row["arm"]), row["seed"]))
            result = {"benchmark": "ray", "nodes": len(NODES), "arms": rows}
            if options.out is not None:
                options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
