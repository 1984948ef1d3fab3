"""Does a mixture of experts learn with the rollout's routing replayed, without it, and from stale batches?

    python scripts/shipped_models/build_tiny.py --class qwen3_vl_moe --seconds 400 --out runs/mixture
    python benchmarks/learning/mixture.py --model runs/mixture [--seeds 0 1 2] [--out benchmarks/results/moe.json]

The model has eight experts in each of two layers, two of which each token passes, and computes in bfloat16: in
float32 engine and trainer choose alike. The tasks are those of configs/quickstart.toml.

    replay         the routers of the trainer take the rollout's choice (train.replay_routing, the default)
    own            they choose themselves
    replay_stale   as `replay`; four times as many groups play at once, so that tokens are many versions behind
    own_stale      the same, and routers choose themselves
    still          learning rate 0: what evaluation alone makes of it

Success is that of sampled actions on held-out seeds, and on tasks never trained on (`heldout_`); the limit is 1.
`routing_differs` is the share of choices that the trainer's routers would make otherwise, `parity` the mean gap of
engine and trainer for tokens of the newest weights, in nats, and `staleness` the mean number of versions behind,
all over the run. A study that was stopped goes on where it was. --out replaces the arms that were named in the
key `learning`, and `success_` keys, of a file that has other keys, too. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.learning.study import (  # noqa: E402 - after the path
    Cell,
    Result,
    ResultCache,
    call,
    children_s,
    dart,
    overrides,
    play_missing,
    settings_of,
    tell,
)
from bus.errors import DartError  # noqa: E402 - likewise
from dart_cli.config.load import load_config  # noqa: E402 - likewise
from dart_cli.data.store.open import open_reader  # noqa: E402 - likewise

CONFIG = ROOT / "configs" / "quickstart.toml"
COMMON = (
    "model.dtype=bfloat16",
    "train.stop_at=0",
    "train.updates=1000000",
    "train.max_minutes=0",
    "train.max_trajectories=3008",
    "eval.episodes=210",
)
OWN = ("train.replay_routing=false",)
STALE = ("data.max_open_groups=96", "data.max_staleness=16")
ARMS: dict[str, tuple[str, ...]] = {
    "replay": (),
    "own": OWN,
    "replay_stale": STALE,
    "own_stale": (*STALE, *OWN),
    "still": ("train.lr=0",),
}
MEANS = {
    "routing_differs": "routing_differs",
    "parity": "parity_mean",
    "staleness": "staleness_mean",
}
"""Key of the result -> the trainer's metric whose mean over the run it is."""


def main() -> None:
    """Play the runs that are missing, write the results and print them as one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of a small mixture")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--work", type=Path, default=Path("runs/bench-mixture"))
    parser.add_argument("--set", action="append", default=[], help="passed to every run")
    parser.add_argument("--out", type=Path, help="also write the result here")
    arguments = parser.parse_args()
    work, model = arguments.work.absolute(), arguments.model.absolute()

    def sets(cell: Cell) -> list[str]:
        run = [f"run.dir={work / 'runs' / cell.name}", f"run.seed={cell.seed}"]
        return [*COMMON, f"model.path={model}", *ARMS[cell.arm], *arguments.set, *run]

    def play(cell: Cell) -> Result:
        spent = children_s()
        log = work / "logs" / f"{cell.name}.log"
        line = call([*dart("up", str(CONFIG)), *overrides(sets(cell))], log, ROOT)
        return {
            "before": line["success_before"],
            "after": line["success_after"],
            "heldout_before": line["heldout"]["before"],
            "heldout_after": line["heldout"]["after"],
            **{name: line[name] for name in ("episodes", "trajectories", "updates", "minutes")},
            **means_of(work / "runs" / cell.name),
            "cpu_seconds": round(children_s() - spent, 1),
        }

    def settings(cell: Cell) -> object:
        return settings_of(load_config(CONFIG, sets(cell)))

    cells = ResultCache(work / "results", settings)
    # Seed by seed, so that a study that is stopped has compared its arms.
    to_play = [Cell(arm, seed) for seed in arguments.seeds for arm in arguments.arms]
    try:
        results = play_missing(to_play, cells, play, tell=tell)
    except DartError as error:
        raise SystemExit(f"error: {error}") from None
    build = json.loads((model / "build.json").read_text(encoding="utf-8"))
    learning: dict[str, Any] = {
        "base": {
            **{name: build[name] for name in ("seed", "cpu_seconds")},
            "hit_rate": build["heldout_hit_rate"]["all"],
        },
        **{arm: of_arm(arm, results) for arm in arguments.arms},
    }
    summary: dict[str, Any] = {"learning": learning}
    for arm, key in (("replay", "success_replay"), ("own", "success_without")):
        if arm in learning:
            summary[key] = learning[arm]["after"]
    if arguments.out:
        whole = json.loads(arguments.out.read_text(encoding="utf-8"))
        summary["learning"] = {**whole.get("learning", {}), **learning}
        arguments.out.write_text(
            json.dumps({**whole, **summary}, indent=1) + "\n", encoding="utf-8"
        )
    print(json.dumps({"benchmark": "mixture", **summary}))


def means_of(run: Path) -> dict[str, float]:
    """Return the means of MEANS over the updates of a run; those that it does not have are left out."""
    means = {}
    with open_reader(run) as reader:
        for name, metric in MEANS.items():
            if values := [point.value for point in reader.metrics(metric)]:
                means[name] = round(fmean(values), 6)
    return means


def of_arm(arm: str, results: dict[Cell, Result]) -> dict[str, Any]:
    """Return all seeds of one arm: a list for each figure; None where a run does not have it."""
    own = {cell.seed: result for cell, result in results.items() if cell.arm == arm}
    names = {name: None for result in own.values() for name in result}
    return {
        "seeds": list(own),
        **{name: [each.get(name) for each in own.values()] for name in names},
    }


if __name__ == "__main__":
    main()
