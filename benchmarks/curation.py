"""What each part of curation contributes: plain GRPO, each part alone, all parts, each left out.

    python benchmarks/curation.py                        # 12 arms, 3 seeds, one run after another
    python benchmarks/curation.py --quick                # plain GRPO and all parts, one seed, < 10 min
    python benchmarks/curation.py --arms uniform,pool,online --seeds 5

Each run is `dart up configs/curation.toml` with parts of curation turned on (dart_cli/bench/curation.py),
on tasks of which two fifths begin at about 0 % success. Its weights are then evaluated on held-out
episodes. All runs play the same number of trajectories. Baseline and ours run the same code; the limit
of a success rate is 1, that of the ratio is the share of trajectories that plain GRPO spends on groups
with a gradient.

Results are kept in WORK, a JSON file for each run, and are not measured again: start the benchmark
again after a stop, or with more arms or seeds. The last line is JSON; WORK/*.png show the curves.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bus.errors import DartError
from dart_cli.bench.bands import PALETTE, ArmLine, ArmPanel, draw
from dart_cli.bench.curation import (
    ALL,
    BUDGET,
    HOPELESS,
    OTHERS,
    PARTS,
    UNIFORM,
    CostAxis,
    Study,
    collect_pool,
    curve,
    needs_pool,
    out_of_reach,
    pick_arms,
    play_run,
    summarize,
)
from dart_cli.bench.study import Cell, Result, ResultCache, play_missing, settings_of
from dart_cli.config.load import load_config

ROOT = Path(__file__).resolve().parents[1]
QUICK_BUDGET = 3_000


def main() -> None:
    """Play what is missing, draw, and print one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each arm")
    parser.add_argument("--first-seed", type=int, default=2, help="0 and 1 chose the set-up")
    parser.add_argument("--arms", default="all-arms", help="comma-separated; all-arms for all")
    parser.add_argument("--quick", action="store_true", help="two arms, one seed, half as long")
    parser.add_argument("--budget", type=int, default=BUDGET, help="trajectories of a run")
    parser.add_argument("--work", type=Path, default=Path("runs/bench-curation"))
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "curation.toml")
    parser.add_argument("--set", action="append", default=[], help="passed to every run")
    arguments = parser.parse_args()
    work, arms, seeds, budget = (
        arguments.work,
        arguments.arms,
        arguments.seeds,
        arguments.budget,
    )
    if arguments.quick:
        work, arms, seeds = work / "quick", f"{UNIFORM},{ALL}", 1
        budget = min(budget, QUICK_BUDGET)
    study = Study(ROOT, arguments.config.absolute(), work.absolute(), tuple(arguments.set))
    try:
        chosen = range(arguments.first_seed, arguments.first_seed + seeds)
        print(json.dumps(measure(study, pick_arms(arms), chosen, budget)))
    except DartError as error:
        raise SystemExit(f"error: {error}") from None


def measure(study: Study, arms: list[str], seeds: Sequence[int], budget: int) -> dict[str, object]:
    """Play all runs; returns their summary."""
    config = load_config(study.config, list(study.sets))
    if any(map(needs_pool, arms)):
        collect_pool(study, tell)
    cells = ResultCache(
        study.work / "results",
        lambda cell: [settings_of(load_config(study.config, study.sets_of(cell.arm))), budget],
    )
    wanted = [Cell(arm, seed) for seed in seeds for arm in arms]
    play = partial(play_run, study, budget=budget, episodes=config.eval.episodes)
    results = play_missing(wanted, cells, play, tell=tell)
    summary = summarize(results)
    pictures = [study.work / "curation.png", study.work / "out-of-reach.png"]
    draw_curves(pictures[0], results, summary["level"])
    draw_out_of_reach(pictures[1], results)
    return {**summary, "pictures": [str(path) for path in pictures]}


def draw_curves(path: Path, results: Mapping[Cell, Result], level: float | None) -> None:
    """Parts alone on the left, parts left out on the right; by trajectories above, minutes below."""
    arms = list(dict.fromkeys(cell.arm for cell in results))

    def line(arm: str, cost: CostAxis) -> ArmLine:
        return line_of(arm, [curve(run, cost) for cell, run in results.items() if cell.arm == arm])

    whole = [arm for arm in arms if arm in (UNIFORM, ALL)]
    alone = [arm for arm in arms if arm in (*PARTS, *OTHERS)]
    left_out = [arm for arm in arms if arm.startswith("no-")]
    labels: dict[CostAxis, str] = {"trajectories": "trajectories played", "minutes": "minutes"}
    panels = [
        ArmPanel(title, label, [line(arm, cost) for arm in (*whole, *group)], level)
        for cost, label in labels.items()
        for title, group in (("each part alone", alone), ("each part left out", left_out))
    ]
    draw(path, panels, columns=2)


def draw_out_of_reach(path: Path, results: Mapping[Cell, Result]) -> None:
    """The effect of a pool on the tasks that the model hardly ever solves at first."""
    tasks = out_of_reach(results)
    lines = []
    for arm in (UNIFORM, "pool", "no-pool", ALL):
        runs = [result for cell, result in results.items() if cell.arm == arm]
        if runs:
            lines.append(line_of(arm, [curve(run, "trajectories", tasks) for run in runs]))
    title = f"the {len(tasks)} tasks that begin at {HOPELESS:.0%} or less"
    draw(path, [ArmPanel(title, "trajectories played", lines)], columns=1)


def line_of(arm: str, curves: list[list[tuple[float, float]]]) -> ArmLine:
    """An arm's line: a part alone and the same part left out have one colour."""
    if arm in (UNIFORM, ALL):
        return ArmLine(arm, curves, "#6b7280" if arm == UNIFORM else "#111827", is_bold=True)
    colours = dict(zip([*PARTS, *OTHERS], PALETTE, strict=True))
    return ArmLine(arm, curves, colours[arm.removeprefix("no-")], is_dashed=arm.startswith("no-"))


def tell(text: str) -> None:
    """One line of progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
