"""Does exploring pay: rows of each chooser, tuned on and tested in the instance that was explored.

    python benchmarks/learning/explore_effect.py [--apps mail shop wiki] [--instances 8] [--choosers q count recency random]
        [--practised 3] [--work runs/bench-explore-effect] [--out benchmarks/results/explore_effect.json]

An instance is one task's start at one seed (`dart explore --first-seed`). In each, all choosers explore for the same
number of steps, all their rows are learned (no caps) with equally many updates from the same model, and the tuned models
answer the same questions: from the union of explorations by all choosers, longer and with other draws, at most 8 a
screen, phrased otherwise than the rows. Settings (PROTOCOL) were fixed on a fourth, `centre`, before these were looked at.

hit_CHOOSER, hit_untuned   hit@1, mean over questions of a screen, then screens, then instances
interval                   95 %, by drawing instances with replacement; None for one instance
ONE_minus_OTHER            of the same instances, with such an interval
covered                    share of the elements of the union's screens that the arm's screens show
by_screen                  hit@1 apart: the arm has rows of this very picture (`covered`), of the same screen in another
                           state (`another_state`), or none of the screen (`never_seen`), with the number of screens
rl_success_with, _without  success on the instance's tasks (explore_practice.py) after reinforcement learning from the model
                           tuned on Q-ICRL's rows, and from the untuned one; `before` and their difference likewise

`cpu_s` of a cell is that of its processes without the browser. A cell is kept in --work and not measured again, a training
that was stopped goes on. The last line is one JSON object; None is not measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.learning.explore_cells import (
    APPLICATIONS,
    CHOOSERS,
    MEASURED,
    PRACTISED,
    PROTOCOL,
    Effect,
)
from benchmarks.learning.explore_practice import PRACTICE
from benchmarks.learning.explore_summary import summarize
from benchmarks.learning.study import Cell, Result, ResultCache, play_missing
from bus.errors import DartError

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Play what is missing; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--apps", nargs="+", choices=list(APPLICATIONS), default=list(MEASURED))
    parser.add_argument("--instances", type=int, default=8)
    parser.add_argument("--practised", type=int, default=3, help="instances with RL")
    parser.add_argument("--choosers", nargs="+", choices=CHOOSERS, default=list(CHOOSERS))
    parser.add_argument("--updates", type=int, default=PROTOCOL.updates, help="of a training")
    parser.add_argument("--steps", type=int, default=PROTOCOL.steps, help="of an exploration")
    parser.add_argument("--work", type=Path, default=Path("runs/bench-explore-effect"))
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    protocol = replace(PROTOCOL, updates=asked.updates, steps=asked.steps)
    found: dict[str, dict[Cell, Result]] = {}
    try:
        for name in asked.apps:
            study = Effect(ROOT, asked.work, name, protocol)
            cells = [
                Cell(arm, instance)
                for instance in range(asked.instances)
                for arm in ("untuned", *asked.choosers)
            ]
            cells += [Cell(arm, at) for at in range(asked.practised) for arm in PRACTISED]
            found[name] = play_missing(
                cells,
                ResultCache(study.folder("cells"), study.settings),
                study.play,
                tell=lambda text: print(text, flush=True),
            )
    except DartError as error:
        raise SystemExit(f"error: {error}") from None
    result = {
        "benchmark": "explore_effect",
        "protocol": asdict(protocol),
        "practice": asdict(PRACTICE),
        **summarize(found),
    }
    if asked.out is not None:
        asked.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
