"""How old may a batch be? Forced delays of 0 to 16 versions, with each correction for it, and replays.

    python benchmarks/learning/offpolicy.py                  # 6 delays, 3 corrections, 3 seeds, two runs at once
    python benchmarks/learning/offpolicy.py --gaps 0 2       # the same, and each batch trained on once more
    python benchmarks/learning/offpolicy.py --gaps 0 2 --kinds groups single
    python benchmarks/learning/offpolicy.py --quick          # delays 0 and 8, none and truncated, one seed

The quickstart's tasks and recipe in one process (benchmarks/learning/lockstep.py): every batch is trained on
exactly so many versions after the weights that sampled it. `none` takes stale tokens as if they were
fresh, `truncated` weighs them by min(proximal / behaviour, C), `masked` leaves out those whose ratio
is out of range (docs/objective.md). Delay 0 is the limit: all corrections are the same there, so it is
played once. A run is repeatable: the same seed gives the same numbers on the same machine.

With a gap G above 0 each batch is trained on once more, at least G updates after its first use (arm
`4-truncated-again-2`), in the order of a run with `train.reuse = 1`. Such a run plays as many
trajectories and makes about twice as many updates; no batch is skipped for its effective sample size, so
that each correction stands alone (`--set train.reuse_min_ess=0.9` turns that rule on).

With `--kinds single` (arms that end in `-single`) the same number of trajectories of a batch are groups of one,
held against trackers of each task's steps, and tasks are drawn by their deviation (`data.advantage =
"step_tracker"`, `data.task_sampling = "deviation"`).

Results stand in WORK, a JSON file for each run, and are not measured again. The last line is JSON:
final held-out success by delay, correction and gap; WORK/offpolicy.png shows the curves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.learning.bands import ArmLine, ArmPanel, draw
from benchmarks.learning.lockstep_order import updates_for
from benchmarks.learning.study import (
    Cell,
    Result,
    ResultCache,
    call,
    overrides,
    play_missing,
    settings_of,
)
from bus.errors import ConfigError, DartError
from dart_cli.config.load import load_config
from dart_cli.config.schema import Config

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "quickstart.toml"
DELAYS = (0, 1, 2, 4, 8, 16)
CORRECTIONS = ("none", "truncated", "masked")
LEAST_GAP = 2
KINDS = ("groups", "single")
SINGLE = (
    "data.group_size=1",
    "data.advantage=step_tracker",
    "data.task_sampling=deviation",
    "data.early_stop=false",
)
COLOURS = ("#111827", "#1d4ed8", "#0891b2", "#059669", "#d97706", "#dc2626")

UPDATES = 60  # on fresh batches
BATCH = 112  # trajectories: groups of 8, each task twice
EVERY = 6  # updates between points of a curve
EPISODES = 210  # held out, of a point; the last has twice as many
TOLD = (
    "ess",
    "is_weight_mean",
    "is_truncated_fraction",
    "is_masked_fraction",
    "mismatch_kl",
    "entropy",
    "grad_norm",
)
"""Metrics of the learner whose means are reported, of fresh batches and of those trained on again."""


def main() -> None:
    """Play what is missing, draw, and print one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each arm: 0, 1, ...")
    parser.add_argument("--delays", type=int, nargs="+", default=list(DELAYS))
    parser.add_argument("--corrections", nargs="+", default=list(CORRECTIONS))
    parser.add_argument("--gaps", type=int, nargs="+", default=[0], help="0: no batch twice")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["groups"])
    parser.add_argument("--updates", type=int, default=UPDATES, help="on fresh batches")
    parser.add_argument("--quick", action="store_true", help="three arms, one seed, fewer updates")
    parser.add_argument("--work", type=Path, default=Path("runs/bench-offpolicy"))
    parser.add_argument("--at-once", type=int, default=2, help="runs at once, a core each")
    parser.add_argument("--set", action="append", default=[], help="passed to every run")
    parser.add_argument("--one", help="a run alone, in this process: e.g. 4-truncated-0")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.work /= "quick"
        arguments.seeds, arguments.updates = 1, 30
        arguments.delays, arguments.corrections = [0, 8], ["none", "truncated"]
    try:
        result = play_one(arguments) if arguments.one else measure(arguments)
    except DartError as error:
        raise SystemExit(f"error: {error}") from None
    print(json.dumps(result))


# --- one run --------------------------------------------------------------------------------


def play_one(arguments: argparse.Namespace) -> Result:
    """The run that `--one` names."""
    from benchmarks.speed.playing import limit_torch

    arm, _, seed = arguments.one.rpartition("-")
    limit_torch()
    config = config_of(arm, [*arguments.set, f"run.seed={seed}"], arguments.updates)
    return asyncio.run(learn(config, delay_of(arm), arguments.updates))


async def learn(config: Config, delay: int, batches: int) -> Result:
    """Train to the end; the curve of held-out success, and means of the learner's metrics."""
    from benchmarks.learning.lockstep import Loop

    loop = Loop(config, delay, BATCH // config.data.group_size)
    points: list[dict[str, float]] = []

    async def judge(episodes: int) -> None:
        success = await loop.success(episodes)
        points.append(
            {"updates": loop.fresh, "trajectories": loop.trajectories, "success": success}
        )
        print(f"batch {loop.fresh}: {success:.3f}", file=sys.stderr, flush=True)

    try:
        await judge(EPISODES)
        while loop.fresh < batches:
            before = loop.fresh
            await loop.update()
            is_last = loop.fresh == batches
            if loop.fresh > before and (is_last or loop.fresh % EVERY == 0):
                await judge(EPISODES * (2 if is_last else 1))
    finally:
        await loop.close()
    again = [update for update in loop.history if update["reuse"]]
    return {
        "points": points,
        "metrics": means_of([update for update in loop.history if not update["reuse"]]),
        "metrics_again": means_of(again) if again else None,
    }


def means_of(history: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics TOLD of some updates."""
    return {name: round(mean(update.get(name, 0.0) for update in history), 5) for name in TOLD}


# --- all runs -------------------------------------------------------------------------------


def arms_of(
    delays: Sequence[int],
    corrections: Sequence[str],
    gaps: Sequence[int] = (0,),
    kinds: Sequence[str] = KINDS[:1],
) -> list[str]:
    """`DELAY-CORRECTION[-again-GAP][-single]`; fresh batches once, whatever the correction. Raises ConfigError."""
    for correction in corrections:
        if correction not in CORRECTIONS:
            raise ConfigError(
                f"--corrections: no {correction!r}; there are {', '.join(CORRECTIONS)}"
            )
    if min(delays) < 0:
        raise ConfigError(f"--delays: must be >= 0, got {min(delays)}")
    if wrong := [gap for gap in gaps if gap and gap < LEAST_GAP]:
        raise ConfigError(f"--gaps: must be 0 or >= {LEAST_GAP}, got {wrong[0]}")
    arms = (
        f"{delay}-{correction}{f'-again-{gap}' if gap else ''}{'-single' * (kind == 'single')}"
        for kind in kinds
        for gap in gaps
        for delay in delays
        for correction in (corrections if delay or gap else ["truncated"])
    )
    return list(dict.fromkeys(arms))


def delay_of(arm: str) -> int:
    """Versions, from an arm's name."""
    return int(arm.split("-", maxsplit=1)[0])


def correction_of(arm: str) -> str:
    """From an arm's name."""
    return arm.split("-")[1]


def gap_of(arm: str) -> int:
    """Updates from a batch's first use to its second; 0 where there is none."""
    return int(arm.split("-")[3]) if "-again-" in arm else 0


def kind_of(arm: str) -> str:
    """One of KINDS."""
    return KINDS[arm.endswith("-single")]


def config_of(arm: str, sets: Sequence[str], batches: int) -> Config:
    """The quickstart with an arm's correction and replays; its rate falls over so many fresh batches."""
    gap = gap_of(arm)
    replays = [f"train.reuse_gap={gap}", "train.reuse_min_ess=0"] if gap else []
    updates = updates_for(batches, int(gap > 0), max(gap, LEAST_GAP))
    own = [*(SINGLE if kind_of(arm) == "single" else ()), f"train.correction={correction_of(arm)}"]
    own += [f"train.reuse={int(gap > 0)}", *replays]
    return load_config(CONFIG, [*own, f"train.updates={updates}", *sets])


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All runs, and what they say."""
    work = arguments.work.absolute()
    arms = arms_of(arguments.delays, arguments.corrections, arguments.gaps, arguments.kinds)

    def play(cell: Cell) -> Result:
        script = [sys.executable, str(Path(__file__).resolve()), "--one", cell.name]
        script += ["--updates", str(arguments.updates), *overrides(arguments.set)]
        return call(script, work / "logs" / f"{cell.name}.log", ROOT)

    cells = ResultCache(
        work / "results",
        lambda cell: settings_of(config_of(cell.arm, arguments.set, arguments.updates)),
    )
    wanted = [Cell(arm, seed) for seed in range(arguments.seeds) for arm in arms]
    results = play_missing(wanted, cells, play, at_once=arguments.at_once, tell=tell)
    picture = work / "offpolicy.png"
    draw_curves(picture, results)
    return {**summarize(results), "picture": str(picture)}


def summarize(results: Mapping[Cell, Result]) -> dict[str, Any]:
    """Final success, area under the curve and mean metrics, by delay and correction."""
    arms: dict[str, list[Result]] = {}
    for cell, result in results.items():
        arms.setdefault(cell.arm, []).append(result)
    return {
        "benchmark": "offpolicy",
        "seeds": len({cell.seed for cell in results}),
        "arms": {
            arm: {
                "delay": delay_of(arm),
                "correction": correction_of(arm) if delay_of(arm) or gap_of(arm) else "any",
                "kind": kind_of(arm),
                "gap": gap_of(arm) or None,
                "trajectories": round(mean(run["points"][-1]["trajectories"] for run in runs)),
                "final_success": round(mean(run["points"][-1]["success"] for run in runs), 4),
                "by_seed": [round(run["points"][-1]["success"], 4) for run in runs],
                "mean_success": round(
                    mean(point["success"] for run in runs for point in run["points"]), 4
                ),
                **{name: round(mean(run["metrics"][name] for run in runs), 5) for name in TOLD},
                "again": None
                if not gap_of(arm)
                else {
                    name: round(mean(run["metrics_again"][name] for run in runs), 5)
                    for name in TOLD
                },
            }
            for arm, runs in arms.items()
        },
    }


def draw_curves(path: Path, results: Mapping[Cell, Result]) -> None:
    """A column for each correction, a row for each kind and gap, a line for each delay."""
    arms = list(dict.fromkeys(cell.arm for cell in results))
    delays = sorted({delay_of(arm) for arm in arms})
    colours = dict(zip(delays, (COLOURS * len(delays)), strict=False))

    def line(arm: str) -> ArmLine:
        curves = [
            [(point["updates"], point["success"]) for point in result["points"]]
            for cell, result in results.items()
            if cell.arm == arm
        ]
        delay = delay_of(arm)
        return ArmLine(f"{delay} versions late", curves, colours[delay], is_bold=delay == 0)

    corrections = [each for each in CORRECTIONS if any(correction_of(arm) == each for arm in arms)]
    panels = [
        ArmPanel(
            f"{kind}, {correction}{f', again {gap} updates later' if gap else ''}",
            "fresh batches trained on",
            [line(arm) for arm in arms if _is_of(arm, correction, gap) and kind_of(arm) == kind],
        )
        for kind in KINDS
        if any(kind_of(arm) == kind for arm in arms)
        for gap in sorted({gap_of(arm) for arm in arms})
        for correction in corrections
    ]
    draw(path, panels, columns=len(corrections))


def _is_of(arm: str, correction: str, gap: int) -> bool:
    is_fresh = delay_of(arm) == 0 and gap == 0
    return gap_of(arm) == gap and (is_fresh or correction_of(arm) == correction)


def tell(text: str) -> None:
    """One line of progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
