"""The whole system on several ranks against one: the same run twice, both curves.

    python benchmarks/learning/rank_runs.py --updates 20 --ranks 1,4

Each run is `dart up` with the quickstart's environments and model, or `--model`, gloo on the CPU. The model
must solve some tasks already: a group without one success has no gradient. Rollouts sample from what the
trainer has just published, so two runs are equal within noise, not bit for bit;
tests/train/test_rank_updates.py proves the updates equal.

The last line is JSON: for each number of ranks curves by update, seconds of an update among them, the share of
trajectories that passed, in all and by the version that ended them, and the most memory of each rank.
`--collect` plays nothing and reads the runs that are there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from dart_cli.data.store.open import open_reader  # noqa: E402 - after the path

CURVES = ("loss", "entropy", "grad_norm", "reward", "samples", "staleness_mean", "step_s")


def main() -> int:
    """Run, print the curves; 1 where a run failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--ranks", default="1,4")
    parser.add_argument("--model", default="builtin:tiny")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/rank-runs")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--collect", action="store_true", help="of runs that are over")
    parser.add_argument("--out", type=Path, help="also write the result here")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "rank_runs", "set": arguments.set}
    for ranks in map(int, arguments.ranks.split(",")):
        run_dir = arguments.folder / f"ranks-{ranks}"
        settings = {
            "run.dir": run_dir,
            "model.path": arguments.model,
            "train.ranks": ranks,
            "train.updates": arguments.updates,
            "train.device": "cpu",
            "rollout.device": "cpu",
            "eval.around": "false",
        }
        chosen = [f"{name}={value}" for name, value in settings.items()] + arguments.set
        command = [sys.executable, "-m", "dart_cli", "up", "configs/quickstart.toml"]
        command += [part for each in chosen for part in ("--set", each)]
        is_played = (
            arguments.collect or not subprocess.run(command, cwd=ROOT, check=False).returncode
        )
        if not is_played:
            return 1
        result[f"ranks_{ranks}"] = found_in(run_dir)
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))
    return 0


def found_in(run_dir: Path) -> dict[str, Any]:
    """Curves, successes and memory of one run."""
    with open_reader(run_dir) as reader:
        curves = {
            name: [round(point.value, 5) for point in reader.metrics(name)] for name in CURVES
        }
        ended = [row for row in reader.trajectories() if row.outcome]
    played, passed = Counter[int](), Counter[int]()
    for row in ended:
        if row.newest_version is not None:  # else it ended before a token was sampled
            played[row.newest_version] += 1
            passed[row.newest_version] += row.outcome == "pass"
    memory = {
        path.stem: round(float(line.rsplit(" ", 2)[-2]))
        for path in sorted((run_dir / "logs").glob("train*.log"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if "most memory" in line
    }
    return {
        **curves,
        "passed": round(passed.total() / max(1, played.total()), 4),
        "trajectories": played.total(),
        "by_version": {
            str(version): {"passed": passed[version], "played": played[version]}
            for version in sorted(played)
        },
        "memory_mb": memory,
    }


if __name__ == "__main__":
    sys.exit(main())
