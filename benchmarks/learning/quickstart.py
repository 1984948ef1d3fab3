"""How long does the quickstart take, and what has it learned when it ends by itself?

    python benchmarks/learning/quickstart.py [--seeds 0 1 2 3 4] [--arms stop whole]
        [--out benchmarks/results/quickstart.json]

    stop     `dart up configs/quickstart.toml`: the run ends at train.stop_at
    whole    the same file without it: all of train.updates

The claim is a held-out success of at least 0.95 for each seed; the limit is 1. A run that is done is kept in
--work and not played again; one that was stopped goes on where it was. Minutes mean little where other work
shares the cores, so each run has the machine's load before and after. The last line is JSON; about 6 minutes a run on two idle cores.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.learning.study import (  # noqa: E402 - likewise
    Cell,
    Result,
    ResultCache,
    call,
    dart,
    overrides,
    play_missing,
    settings_of,
    tell,
)
from bus.errors import DartError  # noqa: E402 - after the path
from dart_cli.config.load import load_config  # noqa: E402 - likewise

CONFIG = ROOT / "configs" / "quickstart.toml"
ARMS: dict[str, list[str]] = {
    "stop": [],
    "whole": ["train.stop_at=0"],
}
GOAL = 0.95
"""Held-out success, sampled, that each seed must reach."""


def main() -> None:
    """Play the runs that are missing, write the results and print them as one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=["stop"])
    parser.add_argument("--work", type=Path, default=Path("runs/bench-quickstart"))
    parser.add_argument("--set", action="append", default=[], help="passed to every run")
    parser.add_argument("--out", type=Path, help="also write the result here")
    arguments = parser.parse_args()
    work = arguments.work.absolute()

    def sets(cell: Cell) -> list[str]:
        run = [f"run.dir={work / 'runs' / cell.name}", f"run.seed={cell.seed}"]
        return [*ARMS[cell.arm], *arguments.set, *run]

    def play(cell: Cell) -> Result:
        began, load = time.time(), os.getloadavg()
        log = work / "logs" / f"{cell.name}.log"
        line = call([*dart("up", str(CONFIG)), *overrides(sets(cell))], log, ROOT)
        return {
            **printable(line),
            "began": began,
            "load_before": load,
            "load_after": os.getloadavg(),
        }

    cells = ResultCache(work / "results", lambda cell: settings_of(load_config(CONFIG, sets(cell))))
    cells_to_play = [Cell(arm, seed) for seed in arguments.seeds for arm in arguments.arms]
    try:
        results = play_missing(cells_to_play, cells, play, tell=tell)
    except DartError as error:
        raise SystemExit(f"error: {error}") from None
    first, *others = arguments.arms
    summary = {"benchmark": "quickstart", "goal": GOAL, "arm": first, **summarized(first, results)}
    summary |= {arm: summarized(arm, results) for arm in others}
    text = json.dumps(summary)
    if arguments.out:
        arguments.out.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    print(text)


def printable(line: Result) -> Result:
    """Return the stored part of the JSON line of `dart up`."""
    keys = ("success_before", "success_after", "success_after_interval", "greedy_after", "episodes")
    of_run = ("trajectories", "updates", "updates_planned", "stopped_at", "note")
    return {
        **{name: line[name] for name in (*keys, *of_run)},
        "heldout_after": line["heldout"]["after"],
        "per_task_after": {name: task["after"] for name, task in line["per_task"].items()},
        "training_minutes": line["minutes"],
        "total_minutes": line["minutes_total"],
    }


def summarized(arm: str, results: dict[Cell, Result]) -> dict[str, Any]:
    """Return all seeds of one arm, a list for each figure, and the means of the figures that are compared."""
    own = {cell.seed: result for cell, result in results.items() if cell.arm == arm}
    names: Sequence[str] = list(next(iter(own.values())))
    lists = {name: [result[name] for result in own.values()] for name in names}
    compared = ("success_after", "training_minutes", "total_minutes", "updates", "trajectories")
    return {
        "seeds": list(own),
        "reached": sum(result["success_after"] >= GOAL for result in own.values()),
        "mean": {name: round(fmean(lists[name]), 4) for name in compared},
        **lists,
    }


if __name__ == "__main__":
    main()
