"""How many trajectories does each way to train need: plain GRPO, each part alone, each left out of ours?

    python benchmarks/learning/curation.py                        # plain GRPO and ours, 3 seeds
    python benchmarks/learning/curation.py --arms main,alone      # groups of arms, or arms by name
    python benchmarks/learning/curation.py --arms grpo+frontier,grpo~4e-4~linear@3008 --seeds 5
    python benchmarks/learning/curation.py --tune --arms grpo --first-seed 0 --seeds 2
    python benchmarks/learning/curation.py --quick                # plain GRPO and ours, one seed, short
    python benchmarks/learning/curation.py --config configs/quickstart.toml --levels 0.9 0.95

Each run is `dart up configs/curation.toml` with an arm's settings (benchmarks/learning/curation_arms.py),
on tasks of which two fifths begin at about 0 % success. Its weights are then evaluated on held-out
episodes. An arm plays as many trajectories as its budget says, and its learning rate falls with
them. Baseline and ours run the same code, and their rates and schedules are chosen from one grid, on
seeds 0 and 1 (`--tune`). The limit of a success rate is 1, the limit of the ratio is the share of
trajectories that plain GRPO spends on groups with a gradient.

Results are kept in WORK, a JSON file for each run, and are not measured again: start the benchmark
again after a stop, or with more arms or seeds. With `--at-once 2` minutes and CPU seconds mean
nothing; costs in trajectories and actions do. The last line is JSON; WORK/*.png show the curves.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.learning.curation_arms import Arm, pick_arms
from benchmarks.learning.curation_study import (
    HOPELESS,
    LEVELS,
    Study,
    collect_pool,
    curve,
    out_of_reach,
    play_run,
    summarize,
)
from benchmarks.learning.curves import PALETTE, ArmLine, ArmPanel, draw
from benchmarks.learning.study import Cell, Result, ResultCache, play_missing, settings_of, tell
from bus.errors import DartError
from dart_cli.config.load import load_config

ROOT = Path(__file__).resolve().parents[2]
QUICK_BUDGET = 1_504
PANEL = 6
"""Most arms of a panel, beside baseline and ours."""


def main() -> None:
    """Play the runs that are missing, draw, and print one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each arm")
    parser.add_argument("--first-seed", type=int, default=4, help="0 to 3 chose the set-up")
    parser.add_argument(
        "--arms",
        default="main",
        help="comma-separated arms and groups of arms; baseline first, ours last",
    )
    parser.add_argument("--tune", action="store_true", help="each at every rate and schedule")
    parser.add_argument("--quick", action="store_true", help="two arms, one seed, short")
    parser.add_argument(
        "--budget", type=int, default=0, help="of every arm, in place of the arm's budget"
    )
    parser.add_argument("--at-once", type=int, default=1, help="runs at once")
    parser.add_argument("--levels", type=float, nargs="+", default=list(LEVELS))
    parser.add_argument("--work", type=Path, default=Path("runs/bench-curation"))
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "curation.toml")
    parser.add_argument("--set", action="append", default=[], help="passed to every run")
    parser.add_argument("--out", type=Path, help="also write the result here")
    arguments = parser.parse_args()
    work, names, seeds, budget = (
        arguments.work,
        arguments.arms,
        arguments.seeds,
        arguments.budget,
    )
    if arguments.quick:
        work, names, seeds, budget = work / "quick", "main", 1, budget or QUICK_BUDGET
    study = Study(ROOT, arguments.config.absolute(), work.absolute(), tuple(arguments.set))
    try:
        arms = pick_arms(names, tune=arguments.tune)
        if budget:
            arms = [replace(arm, budget=budget) for arm in arms]
        seeds_to_play = range(arguments.first_seed, arguments.first_seed + seeds)
        result = measure(study, arms, seeds_to_play, arguments.levels, arguments.at_once)
    except DartError as error:
        raise SystemExit(f"error: {error}") from None
    if arguments.out:
        printed = {name: value for name, value in result.items() if name != "pictures"}
        arguments.out.write_text(json.dumps(printed, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


def measure(
    study: Study, arms: Sequence[Arm], seeds: Sequence[int], levels: Sequence[float], at_once: int
) -> dict[str, object]:
    """Play all runs and return their summary."""
    config = load_config(study.config, list(study.sets))
    if any(arm.needs_pool for arm in arms):
        collect_pool(study, tell)
    arms_by_name = {arm.name: arm for arm in arms}

    def settings(cell: Cell) -> object:
        return settings_of(load_config(study.config, study.sets_of(arms_by_name[cell.arm])))

    def play(cell: Cell) -> Result:
        episodes, is_alone = config.eval.episodes, at_once == 1
        return play_run(
            study, arms_by_name[cell.arm], cell.seed, episodes=episodes, is_alone=is_alone
        )

    cells_to_play = [Cell(name, seed) for seed in seeds for name in arms_by_name]
    cells = ResultCache(study.work / "results", settings)
    results = play_missing(cells_to_play, cells, play, at_once=at_once, tell=tell)
    summary = summarize(results, arms_by_name, levels)
    pictures = [study.work / "curation.png"]
    draw_curves(pictures[0], results, summary)
    if tasks := out_of_reach(results):
        pictures.append(study.work / "out-of-reach.png")
        draw_out_of_reach(pictures[1], results, summary, tasks)
    return {**summary, "pictures": [str(path) for path in pictures]}


def draw_curves(path: Path, results: Mapping[Cell, Result], summary: Mapping[str, Any]) -> None:
    """Draw arms in panels of at most PANEL beside baseline and ours, against trajectories played."""
    arms, whole = _whole(results, summary)
    others = [arm for arm in arms if arm not in whole]
    groups = [others[at : at + PANEL] for at in range(0, len(others), PANEL)] or [[]]
    ends = sorted(
        {each for arm in summary["arms"].values() for each in arm["episodes_of_a_point"] if each}
    )
    label = f"trajectories played, {summary['seeds']} seeds"
    if ends:
        label += f", {' or '.join(map(str, ends))} episodes a point"
    panels = [
        ArmPanel(
            "held-out success, mean and range over seeds",
            label,
            [line_of(arm, group, results, summary) for arm in (*whole, *group)],
            summary["level"],
        )
        for group in groups
    ]
    draw(path, panels, columns=min(2, len(panels)))


def draw_out_of_reach(
    path: Path,
    results: Mapping[Cell, Result],
    summary: Mapping[str, Any],
    tasks: Sequence[str],
) -> None:
    """Draw the curves of `tasks`, which the model hardly ever solves at first."""
    arms, whole = _whole(results, summary)
    panels = [*whole, *(arm for arm in arms if "pool" in arm)] or arms[:PANEL]
    lines = [line_of(arm, panels, results, summary, tasks) for arm in panels]
    title = f"the {len(tasks)} tasks that begin at {HOPELESS:.0%} or less"
    draw(path, [ArmPanel(title, "trajectories played", lines)], columns=1)


def _whole(
    results: Mapping[Cell, Result], summary: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Return all arms, and of them the baseline and ours."""
    arms = list(dict.fromkeys(cell.arm for cell in results))
    return arms, [arm for arm in (summary["baseline"], summary["ours"]) if arm in arms]


def line_of(
    arm: str,
    group: Sequence[str],
    results: Mapping[Cell, Result],
    summary: Mapping[str, Any],
    tasks: Sequence[str] | None = None,
) -> ArmLine:
    """Return an arm's line; baseline and ours are bold."""
    runs = [run for cell, run in results.items() if cell.arm == arm]
    curves = [curve(run, "trajectories", tasks) for run in runs]
    if arm in (summary["baseline"], summary["ours"]):
        colour = "#6b7280" if arm == summary["baseline"] else "#111827"
        return ArmLine(arm, curves, colour, is_bold=True)
    return ArmLine(arm, curves, PALETTE[list(group).index(arm) % len(PALETTE)])


if __name__ == "__main__":
    main()
