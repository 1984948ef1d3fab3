"""Plays and compares the runs of the curation study.

    collect_pool   the oracle's trajectories, for the arms with a pool
    play_run       one run: `dart up`, its costs from the ledger, its weights on held-out episodes
    summarize      all runs -> trajectories to equal success, final success of every arm

The arms are in curation_arms.py. The cost of a version is what had been played when it was published:
every trajectory that had ended, trained on or not, and their actions. The oracle's episodes for the
pool are reported separately, as `demonstrations_per_task`. Arms are compared at the level of held-out
success that the baseline reaches at its end, and at LEVELS. What was not reached is None.
"""

from __future__ import annotations

import bisect
import resource
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import mean
from typing import Any, Literal, TypeVar

from benchmarks.learning.curation_arms import ARMS, BASELINE, OURS, Arm
from benchmarks.learning.curves import isotonic, reach
from benchmarks.learning.study import Cell, Result, call, call_within, dart, overrides
from benchmarks.run_times import episode_times
from dart_cli.data.store.open import open_reader
from dart_cli.data.store.reader import Reader

_T = TypeVar("_T")

CostAxis = Literal["trajectories", "actions", "minutes"]
COSTS: tuple[CostAxis, ...] = ("trajectories", "actions", "minutes")

PER_TASK = 32
"""Oracle trajectories of each task: as many as the pool keeps."""

DEADLINE_S = 1800.0
"""Longest training of one run."""

LEVELS = (0.6, 0.7, 0.8, 0.85)
"""Held-out success at which arms are compared, beside the baseline's success at its end."""

LEARNED = 0.8
"""Success of a task that is learned, if it began below."""

HOPELESS = 0.1

_COMMON = ("weights.keep=1000", "eval.around=false")
"""Of every run: it keeps all its weights, and they are evaluated when it is over."""

POINTS = 10
"""Versions of a run, beside its first, that are played on held-out episodes."""
FINAL = 4
"""Episodes of the last one, times those of the others."""


@dataclass(frozen=True)
class Study:
    """The folders and files of a study."""

    root: Path  # of the repository
    config: Path
    work: Path
    sets: tuple[str, ...] = ()  # passed to every run

    @property
    def pool(self) -> Path:
        """The folder of the oracle's trajectories."""
        return self.work.absolute() / "pool"

    def sets_of(self, arm: Arm) -> list[str]:
        """Return the `--set` of an arm, then the ones of every run."""
        return [*_COMMON, *arm.sets(self.pool), *self.sets]


def collect_pool(study: Study, tell: Callable[[str], None]) -> None:
    """Let the oracle play the tasks, unless it has: `dart data collect`."""
    if study.pool.exists():
        return
    tell("the oracle fills the pool")
    partial = study.pool.with_suffix(".partial")
    if partial.exists():
        shutil.rmtree(partial)
    options = [str(study.config), *overrides(study.sets), "--out", str(partial), "--json"]
    options += ["--per-task", str(PER_TASK)]
    call([*dart("data", "collect"), *options], study.work / "logs" / "pool.log", study.root)
    partial.rename(study.pool)


# --- one run --------------------------------------------------------------------------------


def play_run(
    study: Study,
    arm: Arm,
    seed: int,
    *,
    episodes: int,
    greedy: int = 0,
    elsewhere: Sequence[str] = (),
    is_alone: bool = True,
) -> Result:
    """Train until the arm's trajectories are played, evaluate `episodes` for each point, measure.

    With `greedy` the last weights play so many episodes greedily, too: `greedy` of the result, as `dart eval`
    tells it. With `elsewhere`, settings of other tasks, they play `episodes` of these, sampled, likewise.

    The run directory of an earlier attempt is removed, and so is the run once it is measured. CPU
    seconds are of all this process's children, so known only of a run that `is_alone`. Raises
    ChildError where a part of it fails.
    """
    cell = Cell(arm.name, seed)
    run_dir, log = study.work / "runs" / cell.name, study.work / "logs" / f"{cell.name}.log"
    if run_dir.exists():
        shutil.rmtree(run_dir)
    options = overrides([*study.sets_of(arm), f"run.dir={run_dir}", f"run.seed={seed}"])
    command = [*dart("up", str(study.config)), *options]
    spent = _children_s()
    call_within(DEADLINE_S, command, log, study.root)
    cpu_s = round(_children_s() - spent, 1) if is_alone else None
    with open_reader(run_dir) as reader:
        paid, groups, explained_thirds = costs(reader), _groups(reader), explained(reader)
    versions = spread(sorted(paid))
    scores = _held_out(study, options, log, versions, episodes)
    judged: Result = {}
    if greedy:
        how = ["--mode", "greedy", "--episodes", str(greedy), "--json"]
        evaluation = [*dart("eval", str(study.config)), *options, *how]
        judged["greedy"] = call(evaluation, log, study.root)
    if elsewhere:
        how = ["--mode", "sampled", "--episodes", str(episodes), "--json"]
        evaluation = [*dart("eval", str(study.config)), *options, *overrides(elsewhere), *how]
        judged["elsewhere"] = call(evaluation, log, study.root)
    shutil.rmtree(run_dir)
    return {
        **judged,
        "points": [
            {"version": version, **paid[version], **_point(scores[version])} for version in versions
        ],
        "per_task": {
            str(version): {
                task: passed / judged for task, (passed, judged, _) in tasks.items() if judged
            }
            for version, tasks in sorted(scores.items())
        },
        "groups": groups,
        "explained": explained_thirds,
        "cpu_s": cpu_s,
    }


def _children_s() -> float:
    """Return the CPU seconds of the child processes that have ended, and of their children."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def spread(versions: Sequence[int], points: int = POINTS) -> list[int]:
    """Return the first version, the last, and versions evenly between them; `points` after the first."""
    last = len(versions) - 1
    return [
        versions[i] for i in sorted({round(last * part / points) for part in range(points + 1)})
    ]


Score = tuple[int, int, int]  # passed, judged, their steps
ScoresByVersion = dict[int, dict[str, Score]]
"""Version -> task -> its score."""


def _held_out(
    study: Study, options: Sequence[str], log: Path, versions: Sequence[int], episodes: int
) -> ScoresByVersion:
    """Evaluate the versions on held-out episodes, in two processes: after training both cores are free."""
    plans = [
        (version, episodes * (FINAL if version == versions[-1] else 1)) for version in versions
    ]
    script = str(study.root / "benchmarks" / "learning" / "heldout.py")

    def play(half: Sequence[tuple[int, int]]) -> Result:
        plan = [f"{version}:{count}" for version, count in half]
        python = dart()[0]
        return call([python, script, str(study.config), *options, *plan], log, study.root)

    first, rest = plans[-1:] + plans[: len(plans) // 4], plans[len(plans) // 4 : -1]
    with ThreadPoolExecutor(2) as pool:
        success = {
            key: value
            for part in pool.map(play, [half for half in (first, rest) if half])
            for key, value in part.items()
        }
    return {
        int(key): {task: (score[0], score[1], score[2]) for task, score in tasks.items()}
        for key, tasks in success.items()
    }


def costs(reader: Reader) -> dict[int, dict[CostAxis, float]]:
    """Return, by version, what had been played when it was published, from the first lease on."""
    episodes = episode_times(reader)
    began = min(episode.leased_at for episode in episodes)
    ends = sorted((e.ended_at, e.steps or 0) for e in episodes if e.ended_at is not None)
    times = [at for at, _ in ends]
    actions = [0, *accumulate(steps for _, steps in ends)]
    costs_by_update: dict[int, dict[CostAxis, float]] = {0: dict.fromkeys(COSTS, 0)}
    for batch in reader.batches():
        if batch.trained_at is None or batch.trained_version is None:
            continue
        count = bisect.bisect_right(times, batch.trained_at)
        costs_by_update.setdefault(  # a batch that was skipped has the version before it
            batch.trained_version,
            {
                "trajectories": count,
                "actions": actions[count],
                "minutes": round((batch.trained_at - began) / 60, 4),
            },
        )
    return costs_by_update


def _point(tasks: Mapping[str, Score]) -> dict[str, float]:
    """Return success and steps of an episode, means over tasks with equal weight, and the number of episodes."""
    judged = [score for score in tasks.values() if score[1]]
    return {
        "success": mean(passed / count for passed, count, _ in judged),
        "steps": mean(steps / count for _, count, steps in judged),
        "episodes": sum(count for _, count, _ in judged),
    }


def _groups(reader: Reader) -> dict[str, int]:
    """Return the number of groups by outcome, e.g. trained, all_fail."""
    counts: dict[str, int] = {}
    for (state, reason), number in reader.count("groups").items():
        counts[reason or state] = counts.get(reason or state, 0) + number
    return counts


def explained(reader: Reader) -> dict[str, list[float]]:
    """Return how much of the rewards baselines and a critic explained, by thirds of the run; empty without a critic."""
    thirds_by_name: dict[str, list[float]] = {}
    for name in ("baseline_explained", "critic_explained"):
        values = [metric.value for metric in reader.metrics(name)]
        if len(values) >= 3:
            thirds_by_name[name] = [round(mean(third), 3) for third in thirds(values)]
    return thirds_by_name


def thirds(values: Sequence[_T]) -> list[Sequence[_T]]:
    """Return the beginning, middle and end of a sequence."""
    cuts = [len(values) * part // 3 for part in range(4)]
    return [values[a:b] for a, b in pairwise(cuts)]


# --- all runs -------------------------------------------------------------------------------


def curve(
    result: Result, cost: CostAxis, tasks: Sequence[str] | None = None
) -> list[tuple[float, float]]:
    """Return one run's held-out success against a cost: the mean over all tasks, or over these."""

    def success(point: Mapping[str, Any]) -> float:
        if tasks is None:
            return float(point["success"])
        scores: Mapping[str, float] = result["per_task"][str(point["version"])]
        return mean(scores[task] for task in tasks)

    return [(point[cost], success(point)) for point in result["points"]]


def out_of_reach(results: Mapping[Cell, Result]) -> list[str]:
    """Return the tasks that the model solves in at most one of ten episodes before it is trained."""
    first = next(iter(results.values()))["per_task"]["0"]
    begins = {task: mean(run["per_task"]["0"][task] for run in results.values()) for task in first}
    return [task for task, success in begins.items() if success <= HOPELESS]


def summarize(
    results: Mapping[Cell, Result], arms: Mapping[str, Arm], levels: Sequence[float] = LEVELS
) -> dict[str, Any]:
    """Return final success and costs by arm, and the share of the baseline's trajectories that arms need.

    An arm's curve is the isotonic fit to the points of all its seeds. A cost to the level is None
    where an arm never reaches it; a ratio is None where one of its two values is. `limit` is the ratio
    of a curation that plays no group without a gradient and leaves those with a gradient as they are.
    Which two are compared: `_compared`.
    """
    runs_of: dict[str, list[Result]] = {}
    for cell, result in results.items():
        runs_of.setdefault(cell.arm, []).append(result)
    baseline, ours = _compared(arms)
    ends = {arm: [_end(run, "success") for run in runs] for arm, runs in runs_of.items()}
    level = mean(ends[baseline]) if baseline in ends else None
    summaries: dict[str, dict[str, Any]] = {}
    for arm, runs in runs_of.items():
        is_baseline = arm == baseline
        per_task = _per_task(runs)
        summaries[arm] = {
            "budget": arms[arm].trajectories,
            "final_success": round(mean(ends[arm]), 4),
            "by_seed": [round(value, 4) for value in ends[arm]],
            "seeds": [cell.seed for cell in results if cell.arm == arm],
            "episodes_at_the_end": [_end(run, "episodes") for run in runs],
            "episodes_of_a_point": [run["points"][0].get("episodes") for run in runs],
            "at_the_end": {cost: round(mean(_end(run, cost) for run in runs), 2) for cost in COSTS},
            "steps_at_the_end": _mean_of([_end(run, "steps") for run in runs]),
            "cpu_s": _mean_of([run.get("cpu_s") for run in runs]),
            "explained": [run["explained"] for run in runs if run.get("explained")],
            "to_level": {cost: cost_to(runs, cost, level, is_baseline) for cost in COSTS},
            "to_level_by_seed": [
                cost_to([run], "trajectories", level, is_baseline) for run in runs
            ],
            **{
                f"{cost}_to": {level: cost_to(runs, cost, level, False) for level in levels}
                for cost in COSTS
            },
            "per_task": per_task,
            "tasks_learned": [task for task, (a, b) in per_task.items() if a < LEARNED <= b],
        }
    for arm, figures in summaries.items():
        figures["ratios"] = {
            "end": _ratio(summaries, arm, baseline, "to_level", "trajectories"),
            **{str(at): _ratio(summaries, arm, baseline, "trajectories_to", at) for at in levels},
        }
    summary: dict[str, Any] = {"benchmark": "curation", "baseline": baseline, "ours": ours}
    for cost in COSTS:
        summary[f"{cost}_ratio"] = _ratio(summaries, ours, baseline, "to_level", cost)
    summary["trajectories_ratio_of_budget"] = _of_budget(summaries, ours, baseline)
    for at in levels:
        summary[f"ratio_{at * 100:.0f}"] = _ratio(summaries, ours, baseline, "trajectories_to", at)
    summary |= {
        "end_success": summaries.get(ours, {}).get("final_success"),
        "end_success_baseline": summaries.get(baseline, {}).get("final_success"),
        "level": level and round(level, 4),
        "seeds": len({cell.seed for cell in results}),
    }
    if baseline in runs_of:
        shares = [_share_trained(run["groups"]) for run in runs_of[baseline]]
        summary["limit"] = round(mean(shares), 4)
    return {**summary, "demonstrations_per_task": PER_TASK, "arms": summaries}


def _compared(arms: Mapping[str, Arm]) -> tuple[str, str]:
    """Return the names of the baseline and of the arm that is compared with it.

    Plain GRPO and ours, at any rate and budget; else those of the first study; else the first arm
    and the last.
    """
    for pair in ((BASELINE, OURS), (ARMS["uniform"], ARMS["all"])):
        baseline, ours = (_of_kind(arms, arm) for arm in pair)
        if (baseline in arms and ours in arms) or len(arms) == 1:
            return baseline, ours
    return next(iter(arms)), list(arms)[-1]


def _of_kind(arms: Mapping[str, Arm], like: Arm) -> str:
    """Return the name of an arm with those parts; its own where there is none, or it is one of them."""
    alike = [name for name, arm in arms.items() if arm.kind == like.kind]
    return like.name if like.name in alike or not alike else alike[0]


def _per_task(runs: Sequence[Result]) -> dict[str, list[float]]:
    """Return each task's success at the beginning and at the end, means over runs."""
    values_by_task: dict[str, list[float]] = {}
    for point in (0, -1):
        scores = [run["per_task"][str(run["points"][point]["version"])] for run in runs]
        for task in scores[0]:
            values = [score[task] for score in scores if task in score]
            values_by_task.setdefault(task, []).append(round(mean(values), 4))
    return values_by_task


def _end(run: Result, what: str) -> Any:
    """Return a figure of a run's last point; None if it was not measured."""
    return run["points"][-1].get(what)


def _mean_of(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return round(mean(numbers), 3) if numbers and len(numbers) == len(values) else None


def _share_trained(groups: Mapping[str, int]) -> float:
    """Return the share of closed groups that have a gradient: only the others could be saved."""
    over = {name: number for name, number in groups.items() if name not in ("open", "ready")}
    return over.get("trained", 0) / sum(over.values())


def _ratio(
    arms: Mapping[str, Any], arm: str, baseline: str, table: str, key: object
) -> float | None:
    """Return the cost of an arm divided by the cost of the baseline."""
    ours, theirs = (arms.get(each, {}).get(table, {}).get(key) for each in (arm, baseline))
    return round(ours / theirs, 4) if ours and theirs else None


def _of_budget(arms: Mapping[str, Any], arm: str, baseline: str) -> float | None:
    """Return an arm's trajectories to the baseline's end over all that the baseline played.

    The baseline's curve may be flat before its end: then its own cost to that level is less than that.
    """
    ours = arms.get(arm, {}).get("to_level", {}).get("trajectories")
    theirs = arms.get(baseline, {}).get("at_the_end", {}).get("trajectories")
    return round(ours / theirs, 4) if ours and theirs else None


def cost_to(
    runs: Sequence[Result], cost: CostAxis, level: float | None, defines_level: bool
) -> float | None:
    """Return the cost at which these runs of one arm reach `level`; None if they do not.

    The arm that defines the level reaches it at its end at the latest: its fitted end may lie a
    little below the mean of its last points.
    """
    if level is None:
        return None
    rising = isotonic([point for run in runs for point in curve(run, cost)])
    if defines_level:
        level = min(level, rising[-1][1])
    at = reach(rising, level)
    return None if at is None else round(at, 3)
