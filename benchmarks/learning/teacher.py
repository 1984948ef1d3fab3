"""How much does a small model gain from a teacher, and from itself with hints as its teacher?

    python benchmarks/learning/teacher.py --teacher runs/teacher          # quickstart and login, 3 seeds, all arms
    python benchmarks/learning/teacher.py --parts quickstart --arms rl_alone self_distilled --seeds 0

    rl_alone               the reward alone
    distilled              the teacher alone (train.teacher_weight = 1, `--teacher`)
    distilled_then_rl      the teacher alone for a part of the trajectories, then the reward alone
    self_distilled         the same with hints for the model that the run began with (teacher.hints)
    self_distilled_alone   hints to the end
    tuned                  `dart tune` on as many successes of the oracle as `self_distilled` has hinted
                           trajectories; the control
    tuned_then_rl          the same, then the reward alone, as many trajectories as `self_distilled`

Parts are `quickstart` (configs/quickstart.toml in small batches, which is the better GRPO of docs/results.md)
and `login` (docs/examples/login.toml). Weights of many versions play held-out seeds afterwards; a curve is the
isotonic fit to them, and the cost of a level counts every trajectory that had ended, or that the oracle
recorded, until then. `cpu_seconds` are of all processes of training, without evaluations, since the cores
may be shared; the teacher's own training is not counted. The limit of a success rate is 1. A study that was
stopped goes on where it was, and the results in `--out` grow with each run. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.learning.curation_study import costs, spread  # noqa: E402 - after the path
from benchmarks.learning.curves import isotonic, reach  # noqa: E402 - likewise
from benchmarks.learning.study import (  # noqa: E402 - likewise
    Cell,
    Result,
    ResultCache,
    call,
    call_within,
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

RESULTS = ROOT / "benchmarks" / "results" / "teacher.json"
DEADLINE_S = 3600.0
"""Longest part of one run."""
LEVELS = (0.9, 0.95)
POINTS, FINAL = 8, 2
"""Points of a curve after its first, and the episodes of the last one, times those of the others."""
COMMON = (
    "weights.keep=1000",
    "eval.around=false",
    "train.stop_at=0",
    "train.updates=1000000",
    "train.max_minutes=0",
)
TAUGHT, HINTED = ("train.teacher_weight=1",), ("train.teacher_weight=1", "teacher.hints=true")


@dataclass(frozen=True)
class Part:
    """A configuration, its tasks, and how many trajectories each arm plays."""

    config: Path
    sets: tuple[str, ...]
    reward: int  # trajectories of the reward alone
    taught: int  # trajectories of a teacher alone
    hinted: int  # trajectories with hints before the reward takes over
    total: int  # trajectories of the arms with two stages
    tasks: int  # tasks of which the oracle records successes


PARTS: Mapping[str, Part] = {
    "quickstart": Part(
        ROOT / "configs" / "quickstart.toml",
        ("data.groups_per_batch=2", "train.lr=2.5e-4", "train.lr_end=0.01"),
        reward=11_008,
        taught=3_008,
        hinted=1_024,
        total=6_016,
        tasks=7,
    ),
    "login": Part(
        ROOT / "docs" / "examples" / "login.toml",
        ("data.groups_per_batch=2", "train.lr=1e-4"),
        reward=3_008,
        taught=3_008,
        hinted=2_048,
        total=3_008,
        tasks=1,
    ),
}
ARMS = (
    "rl_alone",
    "self_distilled",
    "distilled",
    "distilled_then_rl",
    "self_distilled_alone",
    "tuned",
    "tuned_then_rl",
)


@dataclass(frozen=True)
class Study:
    """The folders of a study of one part."""

    name: str
    part: Part
    work: Path
    teacher: str
    episodes: int
    sets: tuple[str, ...]

    def stages(self, arm: str) -> list[list[str]]:
        """Return the settings of each `dart up` of an arm, which all continue one run."""
        part, teacher = self.part, f"teacher.model={self.teacher}"

        def until(count: int, *sets: str) -> list[str]:
            common = [*COMMON, *part.sets, *self.sets, *sets]
            return [*common, f"train.max_trajectories={count}"]

        stages: dict[str, list[list[str]]] = {
            "rl_alone": [until(part.reward)],
            "distilled": [until(part.taught, *TAUGHT, teacher)],
            "distilled_then_rl": [
                until(part.taught // 2, *TAUGHT, teacher),
                until(part.total),
            ],
            "self_distilled": [until(part.hinted, *HINTED), until(part.total)],
            "self_distilled_alone": [until(part.taught, *HINTED)],
            "tuned": [],
            "tuned_then_rl": [until(part.total - part.hinted, f"model.path={self.tuned}")],
        }
        return stages[arm]

    @property
    def tuned(self) -> Path:
        """Return the model that imitates the oracle. It is made once and is the same for all seeds."""
        return self.work / "tuned"


def main() -> None:
    """Play the runs that are missing, write the results after each and print them as one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--teacher", default="", help="folder of the quickstart's teacher")
    parser.add_argument(
        "--episodes", type=int, default=210, help="of each point; twice as many at the end"
    )
    parser.add_argument("--work", type=Path, default=Path("runs/bench-teacher"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--set", action="append", default=[], help="passed to every run")
    arguments = parser.parse_args()
    summary: dict[str, Any] = {"benchmark": "teacher"}
    try:
        for name in arguments.parts:
            study = Study(
                name,
                PARTS[name],
                (arguments.work / name).absolute(),
                str(Path(arguments.teacher).absolute()),
                arguments.episodes,
                tuple(arguments.set),
            )
            arms = [arm for arm in arguments.arms if is_playable(study, arm, arguments.teacher)]
            summary = measure(study, arms, arguments.seeds, arguments.out)
    except DartError as error:
        raise SystemExit(f"error: {error}") from None
    print(json.dumps(summary))


def is_playable(study: Study, arm: str, teacher: str) -> bool:
    """Return False for an arm that needs a teacher which this part has not."""
    return not arm.startswith("distilled") or (bool(teacher) and study.name == "quickstart")


def measure(study: Study, arms: Sequence[str], seeds: Sequence[int], out: Path) -> dict[str, Any]:
    """Play all runs, seed by seed, and write the figures of all parts after each; return them."""

    def settings(cell: Cell) -> object:
        sets = [study.stages(cell.arm), study.episodes]
        return [sets, settings_of(load_config(study.part.config, []))]

    cells = ResultCache(study.work / "results", settings)
    runs: dict[str, dict[int, Result]] = {}
    summary: dict[str, Any] = {}
    for seed in seeds:
        for arm in arms:
            cell = Cell(arm, seed)
            results = play_missing([cell], cells, lambda each: play_run(study, each), tell=tell)
            runs.setdefault(arm, {})[seed] = results[cell]
            summary = {"benchmark": "teacher"}
            if out.exists():
                summary = json.loads(out.read_text(encoding="utf-8"))
            before = summary.get(study.name, {})
            own = {name: summarized(by_seed) for name, by_seed in runs.items()}
            summary[study.name] = {**before, **own}
            partial = out.with_suffix(".tmp")
            partial.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
            partial.replace(out)
    return summary


def play_run(study: Study, cell: Cell) -> Result:
    """Train one run from its beginning, and evaluate its versions."""
    run_dir = study.work / "runs" / cell.name
    log = study.work / "logs" / f"{cell.name}.log"
    if run_dir.exists():
        shutil.rmtree(run_dir)
    own = [f"run.dir={run_dir}", f"run.seed={cell.seed}"]
    recorded, cpu_s = 0, 0.0
    if cell.arm.startswith("tuned"):
        recorded, cpu_s = tune(study)
    if cell.arm == "tuned":
        score = held_out(study, log, own, str(study.tuned))
        return {"points": [{"trajectories": recorded, **score}], "cpu_seconds": cpu_s}
    for sets in study.stages(cell.arm):
        spent = children_s()
        command = [*dart("up", str(study.part.config)), *overrides([*sets, *own])]
        call_within(DEADLINE_S, command, log, ROOT)
        cpu_s += children_s() - spent
    with open_reader(run_dir) as reader:
        paid = costs(reader)
    last = study.stages(cell.arm)[-1]
    versions = spread(sorted(paid), POINTS)
    plans = [f"{v}:{study.episodes * (FINAL if v == versions[-1] else 1)}" for v in versions]
    script = str(ROOT / "benchmarks" / "learning" / "heldout.py")
    options = overrides([*last, *own])
    scores = call([sys.executable, script, str(study.part.config), *options, *plans], log, ROOT)
    points = []
    for version in versions:
        tasks = scores[str(version)]
        at = recorded + paid[version]["trajectories"]
        points.append({"trajectories": at, **point(tasks)})
    shutil.rmtree(run_dir)
    return {"points": points, "cpu_seconds": round(cpu_s, 1)}


def point(tasks: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Return success, the mean over tasks of (passed, judged, ...), and the success of each."""
    by_task = {task: score[0] / score[1] for task, score in tasks.items() if score[1]}
    return {"success": round(fmean(by_task.values()), 4), "per_task": by_task}


def tune(study: Study) -> tuple[int, float]:
    """Record the oracle's successes and learn them, unless that is done; return their number and CPU seconds."""
    costs_file = study.work / "tuned.json"
    if not costs_file.exists():
        log, successes = study.work / "logs" / "tuned.log", study.work / "successes"
        for folder in (successes, study.tuned):
            if folder.exists():
                shutil.rmtree(folder)
        spent, each = children_s(), -(-study.part.hinted // study.part.tasks)
        options = ["--per-task", str(each), "--out", str(successes), "--json"]
        call([*dart("data", "collect", str(study.part.config)), *options], log, ROOT)
        model = load_config(study.part.config, []).model.path
        command = dart("tune", "--data", str(successes), "--model", model)
        call([*command, "--out", str(study.tuned), "--fresh", "--json"], log, ROOT)
        cost = {"recorded": each * study.part.tasks, "cpu_s": round(children_s() - spent, 1)}
        costs_file.write_text(json.dumps(cost), encoding="utf-8")
    cost = json.loads(costs_file.read_text(encoding="utf-8"))
    return cost["recorded"], cost["cpu_s"]


def held_out(study: Study, log: Path, own: Sequence[str], model: str) -> dict[str, Any]:
    """Return the success of a model folder, sampled on held-out seeds."""
    how = [
        "--model",
        model,
        "--mode",
        "sampled",
        "--episodes",
        str(FINAL * study.episodes),
        "--json",
    ]
    options = [*overrides([*own, *study.sets]), *how]
    line = call([*dart("eval", str(study.part.config)), *options], log, ROOT)
    return {"success": round(line["sampled"]["success"], 4)}


def summarized(by_seed: Mapping[int, Result]) -> dict[str, Any]:
    """Return the figures of one arm: a list by seed for each, and all points of the curves."""
    curves = [
        [(each["trajectories"], each["success"]) for each in run["points"]]
        for run in by_seed.values()
    ]
    rising = [isotonic(curve) for curve in curves]
    return {
        "seeds": list(by_seed),
        "success": [curve[-1][1] for curve in curves],
        **{
            f"trajectories_to_{round(100 * level):03}": [reach(curve, level) for curve in rising]
            for level in LEVELS
        },
        "trajectories": [curve[-1][0] for curve in curves],
        "cpu_seconds": [run["cpu_seconds"] for run in by_seed.values()],
        "curves": curves,
        "per_task": [run["points"][-1].get("per_task") for run in by_seed.values()],
    }


if __name__ == "__main__":
    main()
