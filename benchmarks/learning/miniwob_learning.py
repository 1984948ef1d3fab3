"""Which pages of MiniWoB++ does a small model learn from pass or fail alone?

    python benchmarks/learning/miniwob_learning.py                                  # all pages, seed 0, 4 hours
    python benchmarks/learning/miniwob_learning.py --pages twelve                   # 12 pages, 3 seeds, and at rate 0
    python benchmarks/learning/miniwob_learning.py --model runs/demonstrations --base demonstrations
    python benchmarks/learning/miniwob_learning.py --browsergym                     # BrowserGym's verdicts
    python benchmarks/learning/miniwob_learning.py --pages click-tab focus-text --hours 0.05 --episodes 10

Each run evaluates the base on held-out seeds, plays `dart up CONFIG` for `--hours`, and evaluates the end on
the same seeds; actions are sampled, as in training.

    rl      such a run
    flat    the same with train.lr = 0, for a tenth of the hours: what noise of evaluation and sampling give

Start it again after a stop, or a kill: it goes on where it was. Figures of all parts are gathered in one file
(`--results`):

    rl_only, demonstrations          a study of all pages from that base: `pages` (success before and after
                                     with 95 % intervals (Wilson), `n` held-out episodes on either side,
                                     `episodes` trajectories of training), counts of pages and means
    twelve.BASE.ARM                  the same of the twelve pages
    other.BASE.ARM                   the same of pages named on the command line
    browsergym                       verdicts on the same actions (miniwob_browsergym.py)

`cpu_seconds` are of training with its browsers, `cpu_seconds_evaluation` of both evaluations. The physical
limit of a success rate is 1; `flat` is the baseline. Pictures, and the figures of the
docs' page on these runs, are drawn from the results. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.learning.miniwob_browsergym import compare_verdicts
from benchmarks.learning.miniwob_pages import TWELVE, summary_of
from benchmarks.learning.miniwob_pictures import (
    NAMES,
    draw_curve,
    draw_films,
    draw_pages,
    figures_of,
    gained_most,
    write_block,
)
from benchmarks.learning.miniwob_study import Study, play_run
from benchmarks.learning.study import Cell, Result, ResultCache, play_missing, settings_of, tell
from bus.errors import DartError
from dart_cli.config.load import load_config

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "miniwob_small.json"
DOCS = ROOT / "docs"
ARMS = ("rl", "flat")
HOURS = {"all": 4.0, "twelve": 1.0, "other": 0.25}


def main() -> None:
    """Play the runs that are missing, gather and draw the results, and print one JSON line."""
    arguments = _parser().parse_args()
    part = arguments.pages[0] if arguments.pages[0] in ("all", "twelve") else "other"
    pages: tuple[str, ...] = {"all": (), "twelve": tuple(TWELVE)}.get(part, (*arguments.pages,))
    config = arguments.config.absolute()
    try:
        model = arguments.model or load_config(config, arguments.set).model.path
        base = arguments.base or ("demonstrations" if "demonstrations" in model else "rl_only")
        study = Study(
            root=ROOT,
            config=config,
            work=(arguments.work / base / part).absolute(),
            model=str(Path(model).absolute()) if Path(model).is_dir() else model,
            hours=arguments.hours or HOURS[part],
            pages=pages,
            episodes=arguments.episodes,
            workers=arguments.workers,
            sets=tuple(arguments.set),
        )
        if arguments.browsergym:
            result = compare_verdicts(study, arguments.weights, tell)
            gather(arguments.results, ("browsergym",), result)
        else:
            seeds = arguments.seeds or ([0, 1, 2] if part == "twelve" else [0])
            arms = arguments.arms or (["rl", "flat"] if part == "twelve" else ["rl"])
            result = measure(study, base, part, arms, seeds, arguments.results)
    except DartError as error:
        raise SystemExit(f"error: {error}") from None
    print(json.dumps({"benchmark": "miniwob", "base": base, "part": part, **result}))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="", help="the base; default model.path of the file")
    parser.add_argument("--base", choices=NAMES, help="which of the results; default by the model")
    parser.add_argument("--pages", nargs="+", default=["all"], metavar="all|twelve|PAGE")
    parser.add_argument("--seeds", type=int, nargs="+", help="default 0; of twelve pages 0 1 2")
    parser.add_argument("--arms", nargs="+", choices=ARMS, help="default rl; of twelve pages both")
    parser.add_argument("--hours", type=float, default=0.0, help="of training, each run")
    parser.add_argument("--episodes", type=int, default=50, help="of each page and evaluation")
    parser.add_argument("--workers", type=int, default=2, help="processes of an evaluation")
    parser.add_argument("--browsergym", action="store_true", help="compare verdicts instead")
    parser.add_argument("--weights", type=Path, help="with --browsergym: a weight set to play")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "miniwob.toml")
    parser.add_argument("--work", type=Path, default=Path("runs/bench-miniwob"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--set", action="append", default=[], help="passed to every run")
    return parser


def measure(
    study: Study, base: str, part: str, arms: Sequence[str], seeds: Sequence[int], results: Path
) -> dict[str, Any]:
    """Play all runs, seed by seed, and gather the results after each; return the figures by arm."""
    cells = ResultCache(study.work / "results", lambda cell: _settings(study, cell))
    cells_to_play = [Cell(arm, seed) for seed in seeds for arm in arms]
    runs: dict[str, list[Result]] = {}
    figures: dict[str, Any] = {}
    for cell in cells_to_play:
        results_of_cell = play_missing(
            [cell], cells, lambda each: play_run(study, each, tell), tell=tell
        )
        runs.setdefault(cell.arm, []).append(results_of_cell[cell])
        figures = {arm: summary_of(run) for arm, run in runs.items()}
        _keep(results, base, part, figures, runs)
    return figures


def _settings(study: Study, cell: Cell) -> object:
    """Return what a kept result depends on."""
    config = load_config(study.config, study.sets_of(cell))
    return {"config": settings_of(config), "episodes": study.episodes, "pages": list(study.pages)}


def _keep(
    results: Path,
    base: str,
    part: str,
    figures: Mapping[str, Any],
    runs: Mapping[str, Sequence[Result]],
) -> None:
    """Gather the figures, and draw them."""
    keys = (base,) if part == "all" else (part, base)
    curves = {
        arm: [{key: run[key] for key in ("seed", "curve")} for run in each]
        for arm, each in runs.items()
    }
    if part == "all" and "rl" in figures:
        value = {**figures["rl"], "curve": curves["rl"]}
        value |= {arm: summary for arm, summary in figures.items() if arm != "rl"}
    else:
        value = {arm: {**summary, "curve": curves[arm]} for arm, summary in figures.items()}
    everything = gather(results, keys, value)
    is_shipped = results.absolute() == RESULTS
    folder = DOCS / "images" if is_shipped else results.parent
    suffix = "" if (base, part) == ("rl_only", "all") else f"-{base}-{part}".replace("_", "-")
    first = figures.get("rl") or next(iter(figures.values()))
    title = f"MiniWoB++ from pixels, a base {NAMES[base]}: {first['pages_trained']} pages"
    draw_pages(folder / f"miniwob-pages{suffix}.png", first, title)
    if part == "all":  # of a few pages the mean of the newest episodes is mostly noise
        draw_curve(folder / f"miniwob-curve{suffix}.png", runs)
    if "rl" in runs:
        draw_films(folder / f"miniwob-films{suffix}.png", runs["rl"][0], gained_most(first))
    page = DOCS / "miniwob.md"
    if is_shipped and page.exists():
        write_block(page, figures_of(everything, _pictures(suffix)))


def _pictures(suffix: str) -> dict[str, str]:
    """Return the pictures of the docs' page: of all pages, else the ones that were just drawn."""
    pictures = {}
    for name in ("pages", "curve", "films"):
        paths = (f"images/miniwob-{name}.png", f"images/miniwob-{name}{suffix}.png")
        if there := next((path for path in paths if (DOCS / path).exists()), None):
            pictures[name] = there
    return pictures


def gather(results: Path, keys: Sequence[str], value: Mapping[str, Any]) -> dict[str, Any]:
    """Put figures at their place in the file, beside the figures of other parts; return all of them."""
    summary: dict[str, Any] = {"benchmark": "miniwob"}
    if results.exists():
        summary = json.loads(results.read_text(encoding="utf-8"))
    place = summary
    for key in keys[:-1]:
        place = place.setdefault(key, {})
    place[keys[-1]] = value
    results.parent.mkdir(parents=True, exist_ok=True)
    partial = results.with_suffix(".tmp")
    partial.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    partial.replace(results)
    return summary


if __name__ == "__main__":
    main()
