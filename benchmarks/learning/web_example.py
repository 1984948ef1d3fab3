"""Does `builtin:small` learn the web application of docs/examples/web, and is learning the cause?

    python benchmarks/learning/web_example.py [--seeds 0 1 2] [--arms learn still]
        [--picture docs/images/web-curve.png] [--out benchmarks/results/web.json]

    learn    `dart up docs/examples/web.toml`
    still    20 updates of learning rate 0: what evaluation alone makes of it

Success is that of sampled actions on held-out seeds before and after; the limit is 1. The curve is the success
of the trajectories of the run, 64 at a time. A run that is done is kept in --work and not played again; one that was
stopped goes on where it was. --out replaces the key `example_success` of a file that has other keys, too. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.learning.curves import PALETTE, ArmLine, ArmPanel, draw  # noqa: E402 - after the path
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
from bus.errors import DartError  # noqa: E402 - likewise
from dart_cli.config.load import load_config  # noqa: E402 - likewise
from dart_cli.data.store.open import open_reader  # noqa: E402 - likewise

CONFIG = ROOT / "docs" / "examples" / "web.toml"
ARMS: dict[str, list[str]] = {"learn": [], "still": ["train.lr=0", "train.updates=20"]}
POINT = 64
"""Trajectories of one point of a curve."""


def main() -> None:
    """Play the runs that are missing, write the results and print them as one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--at-once", type=int, default=1, help="runs that are played together")
    parser.add_argument("--work", type=Path, default=Path("runs/bench-web"))
    parser.add_argument("--set", action="append", default=[], help="passed to every run")
    parser.add_argument("--picture", type=Path, help="where to draw the curves")
    parser.add_argument("--out", type=Path, help="also write the result here")
    arguments = parser.parse_args()
    work = arguments.work.absolute()

    def sets(cell: Cell) -> list[str]:
        run = [f"run.dir={work / 'runs' / cell.name}", f"run.seed={cell.seed}"]
        return [*ARMS[cell.arm], *arguments.set, *run]

    def play(cell: Cell) -> Result:
        load = os.getloadavg()
        log = work / "logs" / f"{cell.name}.log"
        line = call([*dart("up", str(CONFIG)), *overrides(sets(cell))], log, ROOT)
        return {
            **stored_part(line),
            "curve": curve_of(work / "runs" / cell.name),
            "load": [round(load[0], 1), round(os.getloadavg()[0], 1)],
        }

    cells = ResultCache(work / "results", lambda cell: settings_of(load_config(CONFIG, sets(cell))))
    # Every seed learns before the control is played.
    to_play = [Cell(arm, seed) for arm in arguments.arms for seed in arguments.seeds]
    try:
        results = play_missing(to_play, cells, play, at_once=arguments.at_once, tell=tell)
    except DartError as error:
        raise SystemExit(f"error: {error}") from None
    arms = {arm: summarized(arm, results) for arm in arguments.arms}
    first = arms[arguments.arms[0]]
    summary = {**{name: first[name] for name in ("before", "after", "seeds")}, "arms": arms}
    if arguments.picture:
        draw(arguments.picture, [panel(arms)], columns=1)
    if arguments.out:
        write_key(arguments.out, "example_success", summary)
    print(json.dumps({"benchmark": "web_example", **summary}))


def stored_part(line: Result) -> Result:
    """Return the stored part of the JSON line of `dart up`."""
    names = (
        "success_before",
        "success_after",
        "success_after_interval",
        "greedy_after",
        "episodes",
    )
    return {
        **{name: line[name] for name in (*names, "trajectories", "updates", "note")},
        "heldout": line["heldout"],
        "per_task": {
            name: [task["before"], task["after"]] for name, task in line["per_task"].items()
        },
        "minutes": line["minutes"],
        "minutes_total": line["minutes_total"],
    }


def curve_of(run: Path) -> list[list[float]]:
    """Return (trajectories so far, success of the last `POINT` of them) for each `POINT` that were judged."""
    with open_reader(run) as reader:
        rows = sorted(
            (row for row in reader.trajectories() if row.outcome in ("pass", "fail")),
            key=lambda row: row.ended_at or 0.0,
        )
    passed = [row.outcome == "pass" for row in rows]
    return [
        [end, round(fmean(passed[end - POINT : end]), 4)]
        for end in range(POINT, len(passed) + 1, POINT)
    ]


def summarized(arm: str, results: dict[Cell, Result]) -> dict[str, Any]:
    """Return all seeds of one arm: a list for each figure, and the means before and after."""
    own = {cell.seed: result for cell, result in results.items() if cell.arm == arm}
    lists = {name: [result[name] for result in own.values()] for name in next(iter(own.values()))}
    return {
        "before": round(fmean(lists["success_before"]), 4),
        "after": round(fmean(lists["success_after"]), 4),
        "seeds": list(own),
        **lists,
    }


def panel(arms: dict[str, dict[str, Any]]) -> ArmPanel:
    """Return the curves of all arms on one pair of axes."""
    labels = {"learn": "learning", "still": "learning rate 0"}
    lines = [
        ArmLine(
            labels[arm],
            [[(x, y) for x, y in curve] for curve in result["curve"]],
            colour,
            is_bold=arm == "learn",
            is_dashed=arm == "still",
        )
        for (arm, result), colour in zip(arms.items(), PALETTE, strict=False)
    ]
    return ArmPanel(
        "docs/examples/web", "trajectories", lines, y_label="success of what it plays, 64 at a time"
    )


def write_key(path: Path, key: str, value: object) -> None:
    """Set one key of a JSON file, which may have others."""
    whole = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"benchmark": "web"}
    whole[key] = value
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
