"""Exploring applications: Q-ICRL against random, counting and recency, at the same budget.

    python benchmarks/learning/explore.py [--groups embedded miniwob desktop] [--apps settings files ...] [--seeds 3]
        [--out benchmarks/results/explore.json]

screens   distinct screens when the budget is used up, mean over seeds; `mean_screens` is the mean of the curve
          of distinct screens against steps, so that finding them earlier counts
depth     of the deepest screen, by the shortest path that is known
no_op     share of steps that changed no screen
share     screens of all that any arm and seed has found in the application: the limit

The baselines run in the same call: `random` takes anything that the screen offers, `count` what was tried least
there, `recency` what was not among the newest 20 steps. All leave alone what the deny list names, none asks a
model. Episodes go back to the start every 40 steps. `ahead` is the share of pairs (application, seed) in which
Q-ICRL found more screens than `random`, ties counted half. An application that is not installed here is left out.
What a model gains by it: explore_effect.py. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bus.errors import DartError
from dart_cli.config.schema import EnvConfig
from dart_cli.explore.choosing import deny_list
from dart_cli.explore.exploration import with_tree
from dart_cli.explore.explorer import Exploration, Plan, StartPoint
from dart_cli.explore.graph import open_graph
from dart_cli.explore.graph_statistics import curve, summary
from dart_cli.player.episodes import in_slots
from envs.contract.registry import check_parts, select_tasks

ROOT = Path(__file__).resolve().parents[2]
ARMS = ("q", "random", "count", "recency")
BACK_EVERY = 40


@dataclass(frozen=True)
class Application:
    """What is explored, with how many steps."""

    group: str
    suite: str
    tasks: str  # pattern
    steps: int


APPLICATIONS = {
    "mail": Application("embedded", "apps", "apps/mail-*", 200),
    "shop": Application("embedded", "apps", "apps/shop-*", 200),
    "centre": Application("embedded", "apps", "apps/centre-*", 200),
    "settings": Application("embedded", "desk", "desk/settings-*", 300),
    "files": Application("embedded", "desk", "desk/files-*", 300),
    "contacts": Application("embedded", "desk", "desk/contacts", 60),
    "wizard": Application("embedded", "desk", "desk/wizard", 30),
    "menu": Application("embedded", "desk", "desk/menu", 30),
    "pop-ups": Application("embedded", "composed", "composed/popup+popup+page+confirm", 20),
    "email": Application("miniwob", "miniwob", "miniwob/email-inbox", 60),
    "food": Application("miniwob", "miniwob", "miniwob/order-food", 80),
    "social": Application("miniwob", "miniwob", "miniwob/social-media", 60),
    "calculator": Application("desktop", "desktop", "desktop/galculator-*", 60),
    "editor": Application("desktop", "desktop", "desktop/mousepad-*", 60),
    "file manager": Application("desktop", "desktop", "desktop/pcmanfm-*", 60),
    "calc": Application("desktop", "desktop", "desktop/calc-*", 80),
}
"""Budgets are of the application's size: about as many steps as there are things to do, or fewer."""


def explored(app: Application, arm: str, seed: int) -> tuple[dict[str, Any], set[str]]:
    """Return what one exploration found, and the states of its screens."""
    tasks = select_tasks(app.suite, [app.tasks])
    plan = Plan(
        starts=[StartPoint(task, 0, app.tasks) for task in tasks],
        steps=app.steps,
        back_every=BACK_EVERY,
        ranking=arm,
        deny=deny_list(),
        seed=seed,
    )

    async def run() -> tuple[dict[str, Any], set[str]]:
        with tempfile.TemporaryDirectory() as folder, open_graph(Path(folder) / "out") as graph:
            began = time.process_time()
            exploration = Exploration(graph, plan)
            env = with_tree(EnvConfig(suite=app.suite))
            await in_slots(env, "explore", 1, lambda each: exploration.explore(0, each))
            found, screens = summary(graph), graph.screens()
            by_step = curve(screens, app.steps)
            told = {
                "screens": found["screens"],
                "mean_screens": fmean(by_step),
                "depth": found["depth"],
                "no_op": found["no_op_rate"],
                "errors": found["errors"],
                "steps": found["steps"],
                "curve": by_step[:: max(1, app.steps // 20)],
                "cpu_s": time.process_time() - began,
            }
            return told, {screen.state for screen in screens if not screen.has_ended}

    return asyncio.run(run())


def of_application(name: str, app: Application, seeds: int) -> dict[str, Any]:
    """All arms of an application, with means over seeds; prints a line for each."""
    runs: dict[str, list[dict[str, Any]]] = {}
    known: set[str] = set()
    for arm in ARMS:
        for seed in range(seeds):
            told, states = explored(app, arm, seed)
            runs.setdefault(arm, []).append(told)
            known |= states
    arms = {}
    for arm, each in runs.items():
        means = {
            key: round(fmean(told[key] for told in each), 3)
            for key in ("screens", "mean_screens", "depth", "no_op", "errors", "cpu_s")
        }
        curves = zip(*(told["curve"] for told in each), strict=True)
        arms[arm] = means | {
            "share": round(means["screens"] / len(known), 3),
            "by_seed": [told["screens"] for told in each],
            "curve": [round(fmean(at), 1) for at in curves],
        }
        print(
            f"{name:<13} {arm:<8} {means['screens']:6.1f} screens of {len(known):<4} "
            f"mean {means['mean_screens']:6.1f}  depth {means['depth']:4.1f}  "
            f"no-ops {means['no_op']:4.0%}",
            flush=True,
        )
    return {"steps": app.steps, "known": len(known), "arms": arms}


def means_of(applications: dict[str, Any]) -> dict[str, Any]:
    """Return the figures over all applications."""
    told: dict[str, Any] = {}
    for arm in ARMS:
        arms = [each["arms"][arm] for each in applications.values()]
        label = "qicrl" if arm == "q" else arm
        told[f"screens_{label}"] = round(fmean(each["screens"] for each in arms), 2)
        told[f"share_{label}"] = round(fmean(each["share"] for each in arms), 3)
        told[f"depth_{label}"] = round(fmean(each["depth"] for each in arms), 2)
        told[f"no_op_{label}"] = round(fmean(each["no_op"] for each in arms), 3)
    pairs = [
        (q > other) + (q == other) / 2
        for each in applications.values()
        for q, other in zip(
            each["arms"]["q"]["by_seed"], each["arms"]["random"]["by_seed"], strict=True
        )
    ]
    return told | {"ahead": round(fmean(pairs), 3)}


def screens(asked: argparse.Namespace) -> dict[str, Any]:
    """Return what each arm found in the applications that are installed."""
    applications: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name, app in APPLICATIONS.items():
        if (asked.apps and name not in asked.apps) or app.group not in asked.groups:
            continue
        try:
            ids = [task.id for task in select_tasks(app.suite, [app.tasks])]
            check_parts(app.suite, {}, ids)
        except DartError as error:
            left_out[name] = str(error)
            continue
        applications[name] = of_application(name, app, asked.seeds)
    means = means_of(applications) if applications else {}
    return {**means, "applications": applications, "left_out": left_out}


def main() -> None:
    """Explore; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    groups = sorted({app.group for app in APPLICATIONS.values()})
    parser.add_argument("--groups", nargs="+", choices=groups, default=groups)
    parser.add_argument("--apps", nargs="+", choices=list(APPLICATIONS), default=[])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    told = {"benchmark": "explore", "seeds": asked.seeds, "back_every": BACK_EVERY}
    result = told | screens(asked)
    if asked.out is not None:
        asked.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
