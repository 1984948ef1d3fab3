"""The study of adapting to an application: explore it, tune on its rows, measure what that gave.

    Adaptation   what is measured, and where its files are
    play         one cell: an arm of a seed
    equal_rows   the training rows of both explorations, as many of each
    together     rows of several explorations, each once
    summarize    all cells -> hit rates before and after, by kind of query; what was forgotten; RL

Arms: `none`, the base, which never saw the application; `q` and `random`, the base tuned on rows of the
application explored that way, both with equal steps, equal rows and equal CPU seconds; `all`, on all rows by `q`, for as
long. `rl-none` and `rl-q`: reinforcement learning on the application's own tasks from `none` and `q`. `rl-tasks`: from
`q`, on tasks that were made of the same exploration; its last weights play the application's own tasks, too. Where these
tasks are out of reach, all three first learn from a few demonstrations of each of them, for equal CPU seconds.

The test rows are of screens that are held out of all training, by their ids. They come from explorations
of their own, longer and by `count`, one from each of the application's tasks, so that no arm's discoveries decide
what is asked. A picture that the test shows is in no arm's training rows.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.learning.curation_arms import GRPO, Arm
from benchmarks.learning.curation_study import Study, play_run
from benchmarks.learning.study import Cell, Result, call, dart, overrides
from bus.errors import UserError
from envs.registry import select_tasks

EQUAL = ("q", "random")
TUNED = (*EQUAL, "all")
ARMS = ("none", *TUNED)
RL = ("rl-none", "rl-q", "rl-tasks")
TEST_SEED = 1_000
"""Of the draws of the explorations that the test rows come from, counted on; those of the arms are the cell's."""
KNOWN_ITEMS = 100
"""Of suite mini, which the tiny model was trained on."""

_RUN = (
    'policy.codec="compact"',
    'policy.coordinates="thousandths"',
    "eval.compositions=[]",
    "rollout.max_tokens=24",  # a name that is typed
)

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Place:
    """An application to explore."""

    name: str
    suite: str
    tasks: str  # pattern


@dataclass(frozen=True)
class Adaptation:
    """What is measured in one application, and where the study's files are."""

    root: Path  # of the repository
    work: Path
    place: Place
    other: Place  # what it costs there
    steps: int = 200  # of an arm's exploration
    test_steps: int = 400  # of each exploration that the test rows come from
    test_share: float = 0.3  # of the screens
    seconds: float = 60.0  # CPU, of tuning on the application
    base_seconds: float = 0.0  # CPU, of tuning on the other application's rows first
    demonstrations: int = 0  # of each of the application's tasks, before reinforcement learning
    demonstration_seconds: float = 60.0  # CPU, of learning from them
    model: str = "builtin:tiny"
    batch: int = 8
    lr: float = 1e-3
    trajectories: int = 3_008  # of an RL run
    episodes: int = 120  # of each of its points
    sets: tuple[str, ...] = ()  # passed to every training

    def settings(self, cell: Cell) -> object:
        """What a cell's result depends on."""
        found = {
            "application": [self.place.suite, self.place.tasks, self.other.suite, self.other.tasks],
            "steps": [self.steps, self.test_steps, self.test_share],
            "tuning": [self.seconds, self.base_seconds, self.model, self.batch, self.lr],
            "sets": list(self.sets),
        }
        if cell.arm in RL:
            found["rl"] = [self.trajectories, self.episodes]
            if self.demonstrations:
                found["demonstrations"] = [self.demonstrations, self.demonstration_seconds]
        return found

    def folder(self, *parts: str) -> Path:
        """A folder below the application's."""
        return (self.work.absolute() / self.place.name.replace(" ", "-")).joinpath(*parts)

    def log(self, cell: Cell) -> Path:
        """Of all that its processes print."""
        return self.folder("logs", f"{cell.name}.log")


def play(study: Adaptation, cell: Cell) -> Result:
    """Measure one cell; what it needs is made if it is not there. Raises ChildError."""
    if cell.arm in RL:
        return _learned(study, cell)
    model, told = _model(study, cell), {}
    if cell.arm in TUNED:
        record = json.loads((Path(model) / "tune.json").read_text(encoding="utf-8"))
        told = {name: record[name] for name in ("updates", "seconds", "examples")}
        chooser = "q" if cell.arm == "all" else cell.arm
        told["screens"] = _explored(study, study.place, chooser, cell.seed, study.steps, cell)
    return told | {"hits": _hits(study, cell, model)}


# --- exploring and rows ------------------------------------------------------------------------


def _explored(
    study: Adaptation, place: Place, chooser: str, seed: int, steps: int, cell: Cell
) -> int:
    """Screens of an exploration, which goes on where it was stopped."""
    out = _graph(study, place, chooser, seed)
    asked = ["--task", place.tasks, "--app", place.name, "--chooser", chooser]
    asked += ["--steps", str(steps), "--seed", str(seed), "--out", str(out)]
    told = call([*dart("explore", place.suite), *asked], study.log(cell), study.root)
    return int(told["screens"])


def _graph(study: Adaptation, place: Place, chooser: str, seed: int) -> Path:
    return study.folder("explored", f"{place.name}-{chooser}-{seed}")


def _rows(study: Adaptation, place: Place, chooser: str, seed: int, steps: int, cell: Cell) -> Path:
    """The rows of an exploration, `train` and `test`."""
    out = study.folder("rows", f"{place.name}-{chooser}-{seed}")
    if not out.exists():
        _explored(study, place, chooser, seed, steps, cell)
        draft = out.with_name(f"{out.name}.draft")
        shutil.rmtree(draft, ignore_errors=True)
        asked = [str(_graph(study, place, chooser, seed)), str(draft), "--no-parquet"]
        asked += ["--test-share", str(study.test_share)]
        call([*dart("explore", "rows"), *asked], study.log(cell), study.root)
        draft.rename(out)
    return out


def _test(study: Adaptation, place: Place, cell: Cell) -> Path:
    """The test rows of an application, the same for all arms and seeds."""
    out = study.folder("rows", f"{place.name}-test")
    if not out.exists():
        draft = out.with_name(f"{out.name}.draft")
        shutil.rmtree(draft, ignore_errors=True)
        parts = []
        for at, task in enumerate(select_tasks(place.suite, [place.tasks])):
            start = replace(place, tasks=task.id)
            rows = _rows(study, start, "count", TEST_SEED + at, study.test_steps, cell) / "test"
            shutil.copytree(rows, draft, dirs_exist_ok=True)
            parts.append(_read(rows))
        _file(draft).write_text(json.dumps(together(parts)), encoding="utf-8")
        draft.rename(out)
    return out


def together(parts: Sequence[Sequence[Row]]) -> list[Row]:
    """Rows of several explorations; a query about a picture is there once."""
    return list(
        {(row["img_filename"], row["instruction"]): row for part in parts for row in part}.values()
    )


def _training(study: Adaptation, cell: Cell) -> Path:
    """The training rows of an arm; those of `q` and `random` are as many."""
    out = study.folder("rows", f"equal-{cell.seed}")
    if not out.exists():
        test = _read(_test(study, study.place, cell))
        found = {
            arm: _rows(study, study.place, arm, cell.seed, study.steps, cell) / "train"
            for arm in EQUAL
        }
        left = {arm: unseen(_read(folder), test) for arm, folder in found.items()}
        chosen = {**equal_rows(left), "all": left["q"]}
        found["all"] = found["q"]
        draft = out.with_name(f"{out.name}.draft")
        shutil.rmtree(draft, ignore_errors=True)
        for arm, folder in found.items():
            shutil.copytree(folder, draft / arm)
            _file(draft / arm).write_text(json.dumps(chosen[arm]), encoding="utf-8")
        draft.rename(out)
    return out / cell.arm


def _read(folder: Path) -> list[Row]:
    rows: list[Row] = json.loads(_file(folder).read_text(encoding="utf-8"))
    return rows


def _file(folder: Path) -> Path:
    """The rows of a set, whose name tells the kind of device."""
    return next(folder.glob("screenspot_*.json"))


def unseen(rows: Sequence[Row], test: Sequence[Row]) -> list[Row]:
    """The rows without those of the test's pictures."""
    shown = {row["img_filename"] for row in test}
    return [row for row in rows if row["img_filename"] not in shown]


def equal_rows(training: Mapping[str, Sequence[Row]]) -> dict[str, list[Row]]:
    """As many training rows of each arm.

    The first ones are kept: rows are in an order that follows from screen and query alone, so that the
    arms keep the same rows of the screens that both know. Raises UserError where an arm has none.
    """
    count = min(map(len, training.values()))
    if not count:
        raise UserError("an arm has no rows to train on; let all explore further")
    return {arm: list(rows[:count]) for arm, rows in training.items()}


# --- tuning and hit rates ----------------------------------------------------------------------


def _model(study: Adaptation, cell: Cell) -> str:
    """The model of an arm; a training that was stopped goes on."""
    base = study.model
    if study.base_seconds:
        base = str(study.folder("models", f"base-{cell.seed}"))
        rows = _rows(study, study.other, "q", cell.seed, study.steps, cell) / "train"
        _tune(study, cell, study.model, rows, base, study.base_seconds)
    if cell.arm not in TUNED:
        return base
    out = str(study.folder("models", cell.name))
    _tune(study, cell, base, _training(study, cell), out, study.seconds)
    return out


def _tune(study: Adaptation, cell: Cell, model: str, rows: Path, out: str, seconds: float) -> None:
    if Path(out).exists():
        return
    sets = [f"tune.seconds={seconds}", f"tune.batch={study.batch}", f"tune.lr={study.lr}"]
    sets += [f"run.seed={cell.seed}", "tune.held_out=0", *study.sets]
    places = ["--data", str(rows), "--model", model, "--out", out, "--json"]
    call([*dart("tune"), *places, *overrides(sets)], study.log(cell), study.root)


def _hits(study: Adaptation, cell: Cell, model: str) -> Result:
    """Scores on the application, on the other one, and on what the tiny model was trained on."""
    sets = {
        "application": _test(study, study.place, cell),
        "other": _test(study, study.other, cell),
        "known": _known(study, cell),
    }
    found: Result = {}
    for name, folder in sets.items():
        out = study.folder("evaluations", f"{cell.name}-{name}")
        asked = ["--model", model, "--out", str(out), "--misses", "0", "--json"]
        command = [*dart("eval", "grounding", str(folder)), *asked, *overrides(_asking(study.sets))]
        told = call(command, study.log(cell), study.root)
        found[name] = {key: told[key] for key in ("hit_1", "interval", "n", "chance", "no_point")}
        found[name]["by_query"] = {
            query: {key: each[key] for key in ("hit_1", "n")}
            for query, each in told["by"].get("query", {}).items()
        }
    return found


def _asking(sets: Sequence[str]) -> list[str]:
    """Of the settings of a training those that hold where a model is asked, too."""
    return [each for each in sets if each.startswith("policy.")]


def _known(study: Adaptation, cell: Cell) -> Path:
    """A set drawn from suite mini."""
    out = study.folder("rows", "known")
    if not out.exists():
        draft = out.with_name("known.draft")
        shutil.rmtree(draft, ignore_errors=True)
        script = [sys.executable, str(study.root / "scripts" / "make_grounding_set.py")]
        asked = ["--envs", "mini", "--items", str(KNOWN_ITEMS), "--out", str(draft)]
        call([*script, *asked], study.log(cell), study.root)
        draft.rename(out)
    return out / "test"


# --- reinforcement learning --------------------------------------------------------------------


def _learned(study: Adaptation, cell: Cell) -> Result:
    """A run from an arm's model: on the application's own tasks, or on those of its exploration."""
    base = Cell("none" if cell.arm == "rl-none" else "q", cell.seed)
    model, place = _model(study, base), study.place
    own = _own_tasks(place)
    if study.demonstrations:
        model = _demonstrated(study, cell, model, own)
    path = model if model.startswith("builtin:") else str(Path(model).absolute())
    played = own
    if cell.arm == "rl-tasks":
        explored = f"env.suite=explored:{_tasks(study, cell)}"
        played = [explored, "env.tasks=[]", "eval.compositions=[]"]
    others = [each for each in study.sets if not each.startswith("tune.")]
    run = Study(
        study.root,
        study.root / "configs" / "quickstart.toml",
        study.folder("rl", cell.name),
        (*_RUN, *played, *others, f"model.path={path}"),
    )
    return play_run(
        run,
        Arm(GRPO, budget=study.trajectories),
        cell.seed,
        episodes=study.episodes,
        elsewhere=own if played != own else (),
    )


def _own_tasks(place: Place) -> list[str]:
    """Settings of a run on an application's own tasks."""
    tasks = select_tasks(place.suite, [place.tasks])
    trained, held_out = (
        json.dumps([task.id for task in tasks if task.split == split])
        for split in ("train", "heldout")
    )
    return [f"env.suite={place.suite}", f"env.tasks={trained}", f"eval.compositions={held_out}"]


def _demonstrated(study: Adaptation, cell: Cell, model: str, own: Sequence[str]) -> str:
    """The model after the oracle's trajectories of the application's tasks, the same for all arms and seeds."""
    shown = study.folder("demonstrations")
    config = str(study.root / "configs" / "quickstart.toml")
    if not shown.exists():
        draft = shown.with_name("demonstrations.draft")
        shutil.rmtree(draft, ignore_errors=True)
        asked = ["--per-task", str(study.demonstrations), "--out", str(draft), "--json"]
        sets = overrides([*_RUN, *own, f"run.dir={study.folder('collecting')}"])
        call([*dart("data", "collect", config), *asked, *sets], study.log(cell), study.root)
        draft.rename(shown)
    start = "none" if cell.arm == "rl-none" else "q"
    out = str(study.folder("models", f"demonstrated-{start}-{cell.seed}"))
    _tune(study, cell, model, shown, out, study.demonstration_seconds)
    return out


def _tasks(study: Adaptation, cell: Cell) -> Path:
    """Tasks of the exploration by Q-ICRL, those that replay."""
    out = study.folder("tasks", f"q-{cell.seed}")
    if not out.exists():
        _explored(study, study.place, "q", cell.seed, study.steps, cell)
        draft = out.with_name(f"{out.name}.draft")
        shutil.rmtree(draft, ignore_errors=True)
        asked = [str(_graph(study, study.place, "q", cell.seed)), str(draft)]
        call([*dart("explore", "tasks"), *asked], study.log(cell), study.root)
        draft.rename(out)
    return out


# --- all cells ---------------------------------------------------------------------------------


def summarize(found: Mapping[str, Mapping[Cell, Result]]) -> dict[str, Any]:
    """The figures over applications and seeds, each a mean over cells; None where nothing was measured.

    found: application -> its cells' results.
    """
    cells = {
        (application, cell): result
        for application, results in found.items()
        for cell, result in results.items()
    }

    def of(arm: str) -> list[Result]:
        return [result for (_, cell), result in cells.items() if cell.arm == arm]

    def success(arm: str, point: int) -> float | None:
        return _mean([each["points"][point]["success"] for each in of(arm)])

    def hit(arm: str, where: str = "application") -> float | None:
        return _mean([each["hits"][where]["hit_1"] for each in of(arm)])

    return {
        "hit_before": hit("none"),
        "hit_after": hit("q"),
        "hit_after_random_data": hit("random"),
        "hit_after_all": hit("all"),
        "rl_success_after": success("rl-q", -1),
        "rl_success_after_untuned": success("rl-none", -1),
        "rl_success_before": success("rl-q", 0),
        "rl_tasks_success_before": success("rl-tasks", 0),
        "rl_tasks_success_after": success("rl-tasks", -1),
        "rl_tasks_own_success_after": _mean(
            [each["elsewhere"]["sampled_tasks"]["success"] for each in of("rl-tasks")]
        ),
        "adaptation": {
            arm: {where: hit(arm, where) for where in ("application", "other", "known")}
            | {"by_query": _by_query([each["hits"]["application"] for each in of(arm)])}
            for arm in ARMS
        },
        "adaptation_cells": {
            application: {cell.name: result for cell, result in results.items()}
            for application, results in found.items()
        },
    }


def _by_query(scores: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    kinds = dict.fromkeys(kind for each in scores for kind in each["by_query"])
    return {
        kind: _mean(
            [each["by_query"][kind]["hit_1"] for each in scores if kind in each["by_query"]]
        )
        for kind in kinds
    }


def _mean(values: Sequence[float]) -> float | None:
    return round(fmean(values), 4) if values else None
