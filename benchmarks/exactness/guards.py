"""What share of the trainer's time do the guards of a live run take, and which injected faults do they find?

    python benchmarks/exactness/guards.py [--config configs/quickstart.toml] [--updates 110] [--set KEY=VALUE ...]

Three guards are always on: the log-probability check (parity), grey screens (sight), and the account of what was played
and not trained on. The guards in the trainer are timed there, in a run of `dart up` whose learner is this file's:

    update_s         of all updates, guards included
    parity_s         of comparing tokens, keeping the last weights, and scoring some of the older version's steps again
    sight_s          of one look through grey screens, and every `sight_every` updates one is taken
    canary_overhead  both, as a share of update_s without them; the goal is 0.01, the limit 0

The account is one query of `dart data stats`. Faults are those of the suite's tests, played by it: `faults_injected`,
and `faults_caught` of them. Written to `guards` of benchmarks/results/smoke_test.json; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.learning.study import call, dart, overrides  # noqa: E402 - after the path
from dart_cli.config.schema import Config  # noqa: E402
from dart_cli.train import learner as module  # noqa: E402
from dart_cli.train.base import Update  # noqa: E402
from dart_cli.train.blindness import EVERY  # noqa: E402
from dart_cli.train.trained_policy import TrainModel  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "smoke_test.json"
LOG = ROOT / "runs" / "bench-guards.log"
TIMES = "guards.json"
"""In the run's directory: seconds by guard, and of all updates."""
FAULTS = {
    "tests/train/test_guards.py": "test_the_check_finds",
    "tests/train/test_blindness.py": "test_pixels_that_are_scaled_away_are_found",
    "tests/inspection/test_stats.py": "test_what_a_run_lost_without_a_reason_is_told",
}
"""File -> its test, each case of which injects a fault."""
FAULTS_S = 1200.0
"""The deadline of them all."""


class TimedLearner(module.PolicyLearner):
    """The trainer's learner, which counts what its guards take."""

    def __init__(self, config: Config) -> None:
        super().__init__(TrainModel.load(config), config.train)
        self._spent: dict[str, float] = defaultdict(float)
        self._calls: dict[str, int] = defaultdict(int)
        self._file = config.run.dir / TIMES
        for name in ("earlier_samples", "rescore_earlier", "report", "keep"):
            setattr(
                self._logprob_check, name, self._timed("parity", getattr(self._logprob_check, name))
            )
        for name, guard in {
            "compare": "parity",
            "concatenate": "parity",
            "step_mismatches": "parity",
            "grey_screen_change": "sight",
        }.items():
            setattr(module, name, self._timed(guard, getattr(module, name)))

    def _timed(self, guard: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **keywords: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **keywords)
            finally:
                self._spent[guard] += time.perf_counter() - began
                self._calls[guard] += 1

        return timed

    def update(self, batch: Any, updates_done: int, policy_version: int | None = None) -> Update:
        """Do what PolicyLearner does, and write the times after each update."""
        began = time.perf_counter()
        result = super().update(batch, updates_done, policy_version)
        self._spent["update"] += time.perf_counter() - began
        self._calls["update"] += 1
        times = {"seconds": self._spent, "calls": self._calls}
        self._file.write_text(json.dumps(times), encoding="utf-8")
        return result


def measured(config: str, updates: int, sets: list[str]) -> dict[str, Any]:
    """Return the trainer's seconds in a run of so many updates."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        settings = [f"run.dir={run}", f"train.updates={updates}", "eval.around=false"]
        settings += ["train.learner=benchmarks.exactness.guards:TimedLearner", *sets]
        call([*dart("up", config), *overrides(settings)], LOG, ROOT)
        times = json.loads((run / TIMES).read_text(encoding="utf-8"))
    seconds, calls = times["seconds"], times["calls"]
    look = seconds["sight"] / calls["sight"]
    bare = seconds["update"] - seconds["parity"] - seconds["sight"]
    guards = seconds["parity"] + look * calls["update"] / EVERY
    return {
        "config": config,
        "updates": calls["update"],
        "update_s": round(seconds["update"], 3),
        "parity_s": round(seconds["parity"], 3),
        "sight_s": round(look, 3),
        "sight_every": EVERY,
        "canary_overhead": round(guards / bare, 5),
    }


def faults() -> dict[str, int]:
    """Return how many faults the test suite injects, and how many of these are found."""
    tests = [f"{file}::{test}" for file, test in FAULTS.items()]
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=FAULTS_S,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    counts = {
        kind: int(n) for n, kind in re.findall(r"(\d+) (passed|failed|error)", process.stdout)
    }
    if not counts:
        raise SystemExit(f"the tests did not run: {process.stdout[-2000:]}")
    return {"faults_injected": sum(counts.values()), "faults_caught": counts.get("passed", 0)}


def main() -> int:
    """Measure, count and write; return 1 if a fault was not found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", default="configs/quickstart.toml")
    parser.add_argument("--updates", type=int, default=110)
    parser.add_argument("--set", action="append", default=[], help="passed to the run")
    options = parser.parse_args()
    figures = measured(options.config, options.updates, options.set) | faults()
    results: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    RESULT.write_text(json.dumps(results | {"guards": figures}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({"benchmark": "guards"} | figures))
    return int(figures["faults_caught"] < figures["faults_injected"])


if __name__ == "__main__":
    sys.exit(main())
