"""What rows are worth as a warm start: reinforcement learning in the instance, with them and without.

Practice    trajectories and rate; PRACTICE, fixed on `centre`
practised   one run: success on the instance's tasks, along training

The tasks are those that `dart explore tasks` makes of an exploration of the instance by Q-ICRL, longer and with
other draws than the arm's. All runs train with plain GRPO and frontier sampling.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.learning.curation_arms import GRPO, Arm
from benchmarks.learning.curation_study import Study, play_run
from benchmarks.learning.study import Result, call, dart

QUICKSTART = Path("configs") / "quickstart.toml"


@dataclass(frozen=True)
class Practice:
    """What is the same for all runs."""

    trajectories: int = 3_008
    rate: str = "1e-4"
    episodes: int = 80  # sampled, of a point of the curve; four times as many of the last


PRACTICE = Practice()
"""At 2.5e-4 the model without rows lost what it had (0.113 -> 0.003 in `centre`), with them it ended at 0.194 in place of 0.147."""


def practised(
    root: Path, work: Path, name: str, seed: int, *, graph: Path, model: str, practice: Practice
) -> Result:
    """Train `model` on the tasks of `graph`; all files are under `work`. Raises ChildError."""
    tasks = work / "tasks" / graph.name
    if not (tasks / "tasks.json").exists():
        asked = [str(graph), str(tasks), "--seeds", "1"]
        call([*dart("explore", "tasks"), *asked], work / "logs" / f"{name}.log", root)
    sets = (
        f"model.path={model}",
        'policy.pointing="pointer"',
        f"env.suite=explored:{tasks}",
        "env.tasks=[]",
        "eval.compositions=[]",
    )
    study = Study(root, root / QUICKSTART, work / name, sets)
    arm = Arm(GRPO, ("frontier",), rate=practice.rate, budget=practice.trajectories)
    found = play_run(study, arm, seed, episodes=practice.episodes)
    before, after = found["points"][0], found["points"][-1]
    return {
        "before": round(before["success"], 4),
        "after": round(after["success"], 4),
        "episodes": after["episodes"],
        "points": [
            {key: round(point[key], 4) for key in ("trajectories", "success", "episodes")}
            for point in found["points"]
        ],
        "tasks": len(found["per_task"]["0"]),
        "groups": found["groups"],
        "cpu_s": found["cpu_s"],
    }
