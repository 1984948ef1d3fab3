"""Single stream with a value of the state in the place of trackers, in lockstep: does it save episodes?

    python benchmarks/learning/critic.py [--arms tracker value placebo gae-0.9] [--seeds 0 1] [--trajectories 1504]
        [--config configs/curation.toml] [--work runs/bench-critic] [--out benchmarks/results/critic.json]

All arms are single stream with replay and margin as it is tuned (curation_arms.py), in turns of one process
(lockstep.py), and differ in the advantage of a step alone:

    tracker     R - b(task, step): what the product has
    value       R - V(s): V is a head on the policy's hidden state at the last token of the step's prompt
    gae-L       sum over k of L^k (V(s_{t+k+1}) - V(s_{t+k})), the reward in the place of the value behind the last step
                (GAE, arXiv 1506.02438, with gamma 1); L = 1 is `value`
    placebo, placebo-gae-L   the same with hidden states of another episode of the same task and step
    instance    R - the success of 32 more episodes of the same start by the same weights, which are not counted:
                what a perfect value of the first screen would give

The head: LayerNorm, 64 units, its logit added to that of the tracker; cross entropy on R, two passes over the
newest 30 batches after each, detached from the policy. A state's value is always told before the head learns of it.

success     held-out, sampled, at points of the run; `end` is the last one, of four times as many episodes
explained   1 - Var(R - b) / Var(R) of tracker and of value, by thirds of the run, over all steps and over those
            behind the first

A cell is kept in --work and not played again. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import numpy as np
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.learning.curation_arms import OURS  # noqa: E402 - after the path
from benchmarks.learning.lockstep import Loop  # noqa: E402
from benchmarks.learning.study import Cell, Result, ResultCache, play_missing  # noqa: E402
from benchmarks.speed.playing import GroupMember, Played  # noqa: E402
from bus.errors import DartError  # noqa: E402
from bus.messages import Batch, StepRecord  # noqa: E402
from dart_cli.config.load import load_config  # noqa: E402
from dart_cli.config.schema import Config  # noqa: E402
from dart_cli.policy.forward import last_hidden  # noqa: E402
from envs.base import reward_of  # noqa: E402

BATCH = 32
"""Trajectories of a batch."""
DELAY = 1
"""Versions that a batch is late, as in a run."""
UNITS, KEPT, PASSES, HEAD_LR = 64, 30, 2, 1e-3
EXTRA = 32
"""Episodes that tell an instance's success in arm `instance`."""


@dataclass(frozen=True)
class Advantages:
    """What an arm's name says."""

    value: bool = False
    share: float = 1.0  # lambda of GAE
    placebo: bool = False
    instance: bool = False

    @classmethod
    def of(cls, arm: str) -> Advantages:
        """Raises ValueError for an arm that there is not."""
        if arm == "tracker":
            return cls()
        if arm == "instance":
            return cls(instance=True)
        placebo = arm.startswith("placebo")
        rest = arm.removeprefix("placebo-") if arm != "placebo" else "value"
        share = 1.0 if rest == "value" else float(rest.removeprefix("gae-"))
        return cls(True, share, placebo)


class ValueHead:
    """P(pass) of states, learned from outcomes."""

    def __init__(self, width: int, seed: int) -> None:
        torch.manual_seed(seed)
        last = torch.nn.Linear(UNITS, 1)
        self._net = torch.nn.Sequential(
            torch.nn.LayerNorm(width),
            torch.nn.Linear(width, UNITS),
            torch.nn.GELU(),
            last,
        )
        torch.nn.init.zeros_(last.weight)
        torch.nn.init.zeros_(last.bias)
        self._optimizer = torch.optim.AdamW(self._net.parameters(), lr=HEAD_LR, weight_decay=0.01)
        self._kept: deque[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = deque(maxlen=KEPT)
        self._rng = np.random.default_rng(seed)

    def values(self, hidden: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        """[S] of states [S, d], of which trackers expect [S]."""
        with torch.no_grad():
            return torch.sigmoid(self._net(hidden)[:, 0] + torch.logit(expected, 0.02))

    def learn(self, hidden: torch.Tensor, expected: torch.Tensor, rewards: torch.Tensor) -> None:
        """Take in a batch's states and their episodes' rewards, then pass over the newest batches."""
        self._kept.append((hidden, torch.logit(expected, 0.02), rewards))
        states, offsets, targets = (torch.cat(each) for each in zip(*self._kept, strict=True))
        for _ in range(PASSES):
            order = torch.from_numpy(self._rng.permutation(len(states)))
            for part in torch.split(order, 256):
                told = self._net(states[part])[:, 0] + offsets[part]
                loss = torch.nn.functional.binary_cross_entropy_with_logits(told, targets[part])
                self._optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                self._optimizer.step()


@dataclass(frozen=True)
class State:
    """A step that was played, before its outcome is known to anything."""

    task: str
    trajectory: str
    step: int
    reward: float
    expected: float  # by trackers
    record: StepRecord


class CriticLoop(Loop):
    """Lockstep whose steps' advantages are by a value."""

    def __init__(self, config: Config, arm: Advantages) -> None:
        super().__init__(config, DELAY, BATCH)
        self._arm = arm
        self._head: ValueHead | None = None
        self.told: list[dict[str, Any]] = []  # of each batch: rewards, baselines, values, steps
        self._of_instances: dict[str, float] = {}

    async def _batch(self) -> Batch:
        batch = await super()._batch()
        return batch.model_copy(update={"trajectories": self.trajectories - BATCH})

    def _filed(self, groups: Sequence[Sequence[Played]]) -> Batch:
        states = self._states(groups)
        batch = super()._filed(groups)
        if not states:
            return batch
        found = self._advantages(states)
        samples = [
            each.model_copy(update={"advantage": found[each.trajectory_id, each.step]})
            for each in batch.samples
        ]
        return batch.model_copy(update={"samples": samples})

    def _states(self, groups: Sequence[Sequence[Played]]) -> list[State]:
        found = []
        for each in (each for group in groups for each in group):
            reward = reward_of(each.end.outcome)
            if reward is None:
                continue
            task = each.planned.task.id
            expected = self._baselines.expected(task, len(each.records))
            found += [
                State(task, record.trajectory_id, record.step, reward, value, record)
                for record, value in zip(each.records, expected, strict=True)
            ]
        return found

    def _advantages(self, states: Sequence[State]) -> dict[tuple[str, int], float]:
        """Of each step by (trajectory, step); the head learns of them afterwards."""
        margin = self.config.data.tracker_margin
        rewards = torch.tensor([each.reward for each in states])
        expected = torch.tensor([each.expected for each in states])
        values = expected
        if self._arm.value:
            hidden = self._hidden([each.record for each in states])
            if self._arm.placebo:
                hidden = hidden[self._others(states)]
            self._head = self._head or ValueHead(hidden.shape[1], self.config.run.seed)
            values = self._head.values(hidden, expected)
            self._head.learn(hidden, expected, rewards)
        elif self._arm.instance:
            values = torch.tensor([self._of_instances[each.trajectory] for each in states])
        self.told.append(
            {
                "rewards": rewards.tolist(),
                "expected": expected.tolist(),
                "values": values.tolist(),
                "steps": [each.step for each in states],
            }
        )
        by_trajectory: dict[str, list[tuple[int, float, float]]] = defaultdict(list)
        for each, value in zip(states, values.tolist(), strict=True):
            by_trajectory[each.trajectory].append((each.step, value, each.reward))
        found = {}
        for name, of_steps in by_trajectory.items():
            told = [value for _, value, _ in of_steps]
            parts = generalized(told, of_steps[0][2], self._arm.share)
            for (step, _, _), advantage in zip(of_steps, parts, strict=True):
                found[name, step] = advantage + margin
        return found

    @torch.no_grad()
    def _hidden(self, records: Sequence[StepRecord]) -> torch.Tensor:
        """States [S, d] of the newest weights at the last token of prompts."""
        policy = self.learner.model.policy
        images = {
            record.image_hashes[-1]: policy.images.prepare(
                record.screenshot, record.image_hashes[-1]
            )
            for record in records
        }
        parts = []
        for at in range(0, len(records), 64):
            some = records[at : at + 64]
            inputs = policy.inputs_of(
                [record.prompt_token_ids for record in some],
                [[images[name] for name in record.image_hashes] for record in some],
            )
            parts.append(last_hidden(policy.model, inputs, last=1)[:, 0].float())
        return torch.cat(parts)

    def _others(self, states: Sequence[State]) -> list[int]:
        """For each state one of another episode of the same task and step, else of the same task, else itself."""
        rng = Random(f"{self.config.run.seed}/{self._batches}")
        found = []
        for at, each in enumerate(states):
            other = [
                i
                for i, b in enumerate(states)
                if b.task == each.task and b.trajectory != each.trajectory
            ]
            same = [i for i in other if states[i].step == each.step]
            found.append(rng.choice(same or other or [at]))
        return found

    async def _played(self, planned: Sequence[GroupMember]) -> list[Played]:
        played = await super()._played(planned)
        if self._arm.instance:
            more = [
                replace(
                    each,
                    member=1 + at,
                    sampling_seed=(each.sampling_seed + 7919 * (1 + at)) % 2**31,
                )
                for each in planned
                for at in range(EXTRA)
            ]
            extra = await super()._played(more)
            for at, each in enumerate(played):
                of_start = [
                    one.end.outcome == "pass" for one in extra[EXTRA * at : EXTRA * (at + 1)]
                ]
                self._of_instances[each.end.trajectory_id] = fmean(of_start)
        return played


def generalized(values: Sequence[float], reward: float, share: float) -> list[float]:
    """GAE [T] of one episode's values [T] with gamma 1 and lambda `share` (arXiv 1506.02438, eq. 16)."""
    following, advantage, found = reward, 0.0, []
    for value in reversed(values):
        advantage = following - value + share * advantage
        found.append(advantage)
        following = value
    return found[::-1]


def explained(rewards: Sequence[float], values: Sequence[float]) -> float | None:
    """1 - Var(R - V) / Var(R); None where all rewards are alike, or there is none."""
    spread = float(np.var(rewards)) if rewards else 0.0
    return (
        None if spread == 0 else round(1 - float(np.var(np.subtract(rewards, values))) / spread, 4)
    )


@dataclass(frozen=True)
class Plan:
    """What is the same for all arms."""

    config: Path
    trajectories: int
    points: int
    episodes: int

    def settings(self, cell: Cell) -> object:
        """What a cell's result depends on."""
        del cell
        return [self.config.name, self.trajectories, self.points, self.episodes]

    def sets(self, cell: Cell, scratch: Path) -> list[str]:
        """The `--set` of a run."""
        arm = replace(OURS, budget=self.trajectories)
        return [
            *arm.sets(Path("none")),
            f"run.seed={cell.seed}",
            f"run.dir={scratch}",
            "rollout.max_batch=32",
        ]


async def play(plan: Plan, cell: Cell, scratch: Path) -> Result:
    """One run and its evaluations."""
    began, spent = time.monotonic(), time.process_time()
    loop = CriticLoop(load_config(plan.config, plan.sets(cell, scratch)), Advantages.of(cell.arm))
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
        "explained": [_explained(each) for each in _thirds(loop.told)],
        "updates": loop.version,
        "cpu_s": round(time.process_time() - spent, 1),
        "wall_s": round(time.monotonic() - began, 1),
    }


def _thirds(told: Sequence[Any]) -> list[Sequence[Any]]:
    cuts = [len(told) * part // 3 for part in range(4)]
    return [told[a:b] for a, b in pairwise(cuts)]


def _explained(told: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    rows = [
        row
        for each in told
        for row in zip(
            each["rewards"], each["expected"], each["values"], each["steps"], strict=True
        )
    ]
    found: dict[str, float | None] = {}
    for name, some in (("all", rows), ("later", [row for row in rows if row[3] > 0])):
        rewards = [row[0] for row in some]
        found[f"tracker_{name}"] = explained(rewards, [row[1] for row in some])
        found[f"value_{name}"] = explained(rewards, [row[2] for row in some])
    return found


def main() -> None:
    """Play what is missing; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arms", nargs="+", default=["tracker", "value", "placebo", "gae-0.9"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--trajectories", type=int, default=1504)
    parser.add_argument("--points", type=int, default=4)
    parser.add_argument("--episodes", type=int, default=240)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "curation.toml")
    parser.add_argument("--work", type=Path, default=Path("runs/bench-critic"))
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for arm in asked.arms:
        try:
            Advantages.of(arm)
        except ValueError:
            parser.error(f"--arms: there is no {arm!r}; tracker, value, gae-L, placebo, instance")
    plan = Plan(asked.config, asked.trajectories, asked.points, asked.episodes)
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
