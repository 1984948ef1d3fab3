"""Single stream with a value of the state in the place of running baselines, in lockstep: does it save episodes?

    python benchmarks/learning/critic.py [--arms baseline value placebo gae-0.9] [--seeds 0 1] [--trajectories 1504]
        [--config configs/curation.toml] [--work runs/bench-critic] [--out benchmarks/results/critic.json]

All arms are single stream with replay and margin as it is tuned (curation_arms.py), in turns of one process
(lockstep.py), and differ in the advantage of a step alone:

    baseline    R - b(task, step), data.advantage = "step_baseline"
    gae-L       train.critic = "gae" with train.gae_lambda = L
    value       the same with L = 1: R - V(s)
    placebo, placebo-gae-L   the same with the states of another episode of the same task and step
    instance    R - the success of --extra more episodes of the same start by the same weights, which are not counted:
                what a perfect value of the first screen would give

success     held-out, sampled, at points of the run; `end` is the last one, of four times as many episodes
explained   1 - Var(R - b) / Var(R) of batches, by thirds of the run: of the running baselines, and of what the arm uses

A cell is kept in --work and not played again. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.learning.curation_arms import RUNNING_BASELINE  # noqa: E402 - after the path
from benchmarks.learning.curation_study import thirds  # noqa: E402
from benchmarks.learning.lockstep import Loop  # noqa: E402
from benchmarks.learning.study import Cell, Result, ResultCache, play_missing  # noqa: E402
from benchmarks.speed.playing import GroupMember, Played  # noqa: E402
from bus.errors import DartError  # noqa: E402
from bus.messages import Batch  # noqa: E402
from dart_cli.config.load import load_config  # noqa: E402
from dart_cli.config.schema import Config  # noqa: E402
from dart_cli.train.critic import Critic, Judged, Steps, explained  # noqa: E402

BATCH = 32
"""Trajectories of a batch."""
DELAY = 1
"""Versions that a batch is late, as in a run."""


@dataclass(frozen=True)
class Advantages:
    """What an arm's name says."""

    share: float | None = None  # lambda of GAE; None without a critic
    placebo: bool = False
    instance: bool = False

    @classmethod
    def of(cls, arm: str) -> Advantages:
        """Raise ValueError for an arm that there is not."""
        if arm in ("baseline", "instance"):
            return cls(instance=arm == "instance")
        placebo = arm.startswith("placebo")
        rest = arm.removeprefix("placebo-") if arm != "placebo" else "value"
        share = 1.0 if rest == "value" else float(rest.removeprefix("gae-"))
        return cls(share, placebo)

    def sets(self) -> list[str]:
        """Return the `--set` of a run."""
        if self.share is None:
            return []
        return ["train.critic=gae", f"train.gae_lambda={self.share}"]


class Shuffled(Critic):
    """A critic that is shown other episodes' states: what it gains, it does not gain by the state."""

    def __init__(self, width: int, share: float, tasks: Mapping[str, str]) -> None:
        """`tasks` are those of trajectories."""
        super().__init__(width, share)
        self._tasks = tasks

    def judge(self, steps: Steps) -> Judged:
        """With the states of others."""
        return super().judge(self._shuffled(steps))

    def _shuffled(self, steps: Steps) -> Steps:
        """Each step with the state of another episode of the same task and step, else of the same task, else its own."""
        rng = Random(str(steps.keys))
        found = []
        for at, (_, trajectory, step) in enumerate(steps.keys):
            task = self._tasks[trajectory]
            other = [
                index
                for index, (_, name, _) in enumerate(steps.keys)
                if name != trajectory and self._tasks[name] == task
            ]
            same = [index for index in other if steps.keys[index][2] == step]
            found.append(rng.choice(same or other or [at]))
        return replace(steps, states=steps.states[found])


class CriticLoop(Loop):
    """Lockstep whose steps' advantages are by a value."""

    def __init__(self, config: Config, arm: Advantages, extra: int) -> None:
        super().__init__(config, DELAY, BATCH)
        self._arm, self._extra = arm, extra
        self._of_instances: dict[str, float] = {}
        self._tasks_of: dict[str, str] = {}
        self.told: list[tuple[float | None, float | None]] = []  # of each batch: explained
        if arm.placebo:
            assert self.learner.critic is not None
            assert arm.share is not None
            width = int(self.learner.model.policy.model.config.get_text_config().hidden_size)
            self.learner.critic = Shuffled(width, arm.share, self._tasks_of)

    async def update(self) -> dict[str, float]:
        """As Loop's."""
        metrics = await super().update()
        if "critic_explained" in metrics:
            self.told.append((metrics["baseline_explained"], metrics["critic_explained"]))
        return metrics

    async def _batch(self) -> Batch:
        batch = await super()._batch()
        return batch.model_copy(update={"trajectories": self.trajectories - BATCH})

    def _filed(self, groups: Sequence[Sequence[Played]]) -> Batch:
        batch = super()._filed(groups)
        if self._arm.share is not None:
            return batch
        samples = batch.samples
        values = {each.trajectory_id: each.expected or 0.0 for each in samples}
        if self._arm.instance:
            samples = [
                each.model_copy(
                    update={
                        "advantage": each.advantage
                        + (each.expected or 0.0)
                        - self._of_instances[each.trajectory_id]
                    }
                )
                for each in samples
            ]
            values = self._of_instances
        rewards, expected, used = (
            torch.tensor(column)
            for column in zip(
                *(
                    (each.reward or 0.0, each.expected or 0.0, values[each.trajectory_id])
                    for each in samples
                ),
                strict=True,
            )
        )
        by_baseline = explained(rewards, expected)
        self.told.append(
            (by_baseline, explained(rewards, used) if self._arm.instance else by_baseline)
        )
        return batch.model_copy(update={"samples": samples})

    async def _played(self, planned: Sequence[GroupMember]) -> list[Played]:
        played = await super()._played(planned)
        for each in played:
            self._tasks_of[each.end.trajectory_id] = each.planned.task.id
        if self._arm.instance:
            more = [
                replace(
                    each,
                    member=1 + at,
                    sampling_seed=(each.sampling_seed + 7919 * (1 + at)) % 2**31,
                )
                for each in planned
                for at in range(self._extra)
            ]
            others = await super()._played(more)
            for at, each in enumerate(played):
                of_start = others[self._extra * at : self._extra * (at + 1)]
                self._of_instances[each.end.trajectory_id] = fmean(
                    one.end.outcome == "pass" for one in of_start
                )
        return played


@dataclass(frozen=True)
class Plan:
    """What is the same for all arms."""

    config: Path
    trajectories: int
    points: int
    episodes: int
    extra: int = 32  # episodes that tell an instance's success
    overrides: tuple[str, ...] = ()  # `--set` of every run

    def settings(self, cell: Cell) -> object:
        """Return what a cell's result depends on."""
        extra = [self.extra] if cell.arm == "instance" else []
        played = [self.config.name, self.trajectories, self.points, self.episodes]
        return [*played, *extra, *self.overrides]

    def sets(self, cell: Cell, scratch: Path) -> list[str]:
        """Return the `--set` of a run."""
        arm = replace(RUNNING_BASELINE, budget=self.trajectories)
        return [
            *arm.sets(Path("none")),
            f"run.seed={cell.seed}",
            f"run.dir={scratch}",
            "rollout.max_batch=32",
            *self.overrides,
            *Advantages.of(cell.arm).sets(),
        ]


async def play(plan: Plan, cell: Cell, scratch: Path) -> Result:
    """One run and its evaluations."""
    began, spent = time.monotonic(), time.process_time()
    config = load_config(plan.config, plan.sets(cell, scratch))
    loop = CriticLoop(config, Advantages.of(cell.arm), plan.extra)
    points: list[dict[str, float]] = []
    try:
        for part in range(plan.points + 1):
            while loop.trajectories < plan.trajectories * part / plan.points:
                await loop.update()
            count = plan.episodes * (4 if part == plan.points else 1)
            points.append({"trajectories": loop.trajectories, "success": await loop.success(count)})
            print(f"  {cell.name}: {points[-1]}", file=sys.stderr, flush=True)
    finally:
        await loop.close()
    return {
        "points": points,
        "end": points[-1]["success"],
        "mean": fmean(each["success"] for each in points[1:]),
        "explained": [_explained(each) for each in thirds(loop.told)],
        "updates": loop.version,
        "cpu_s": round(time.process_time() - spent, 1),
        "wall_s": round(time.monotonic() - began, 1),
    }


def _explained(told: Sequence[tuple[float | None, float | None]]) -> list[float | None]:
    """Means over batches of what running baselines and the arm's values explain."""
    columns = ([value for each in told if (value := each[at]) is not None] for at in (0, 1))
    return [round(fmean(each), 4) if each else None for each in columns]


def main() -> None:
    """Play what is missing; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arms", nargs="+", default=["baseline", "value", "placebo", "gae-0.9"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--trajectories", type=int, default=1504)
    parser.add_argument("--points", type=int, default=4)
    parser.add_argument("--episodes", type=int, default=240)
    parser.add_argument("--extra", type=int, default=32, help="episodes of an instance")
    parser.add_argument("--set", action="append", default=[], help="passed to every run")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "curation.toml")
    parser.add_argument("--work", type=Path, default=Path("runs/bench-critic"))
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for arm in asked.arms:
        try:
            Advantages.of(arm)
        except ValueError:
            parser.error(f"--arms: there is no {arm!r}; baseline, value, gae-L, placebo, instance")
    plan = Plan(
        *(asked.config, asked.trajectories, asked.points, asked.episodes, asked.extra),
        tuple(asked.set),
    )
    cells = [Cell(arm, seed) for seed in asked.seeds for arm in asked.arms]
    cache = ResultCache(asked.work / f"cells-{plan.config.stem}-{plan.trajectories}", plan.settings)
    try:
        found = play_missing(
            cells,
            cache,
            lambda cell: asyncio.run(play(plan, cell, asked.work / "scratch" / cell.name)),
            tell=lambda text: print(text, file=sys.stderr, flush=True),
        )
    except DartError as error:
        raise SystemExit(f"error: {error}") from None
    result = {"benchmark": "critic", "config": plan.config.name, "trajectories": plan.trajectories}
    result["arms"] = {
        arm: summary({c.seed: r for c, r in found.items() if c.arm == arm}) for arm in asked.arms
    }
    line = json.dumps(result)
    if asked.out:
        asked.out.write_text(line + "\n", encoding="utf-8")
    print(line)


def summary(runs: dict[int, Result]) -> dict[str, Any]:
    """Figures of an arm."""
    return {
        "seeds": sorted(runs),
        "end": round(fmean(run["end"] for run in runs.values()), 4),
        "mean": round(fmean(run["mean"] for run in runs.values()), 4),
        "ends": [round(runs[seed]["end"], 4) for seed in sorted(runs)],
        "cpu_s": round(fmean(run["cpu_s"] for run in runs.values()), 1),
        "explained": [runs[seed]["explained"] for seed in sorted(runs)],
    }


if __name__ == "__main__":
    main()
