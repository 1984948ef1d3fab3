"""What the arms of `benchmarks/interop/interop.py` share.

Asked      how much an arm plays
Played     one episode: its outcome, and how long its steps took
Side       who plays: our adapter, or the environment's own client
compared   both sides play the same episodes in turn; what they agree on, and how fast each is
NotInstalledError  a part that an arm needs is missing
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from bus.errors import EnvError
from envs.contract.actions import Action
from envs.contract.base import GuiEnv

Result = dict[str, Any]


class NotInstalledError(Exception):
    """A part that an arm needs is missing; the message says which, and how to get it."""


@dataclass(frozen=True)
class Asked:
    """How much an arm plays."""

    episodes: int  # on each side
    steps: int  # at most, in an episode


@dataclass
class Played:
    """One episode of one side."""

    outcome: str  # pass, fail or invalid
    step_s: list[float] = field(default_factory=list)  # of each step, screenshot included
    reset_s: float = 0.0
    reason: str = ""


class Side(Protocol):
    """Plays episode `index`: the same task, seed and actions on either side."""

    def play(self, index: int) -> Played:
        """Play it to its verdict. An error of the environment is the outcome `invalid`."""
        ...


@dataclass
class Adapter:
    """Our side of most arms: an environment, the task, seed and actions of each episode."""

    env: GuiEnv
    task: Callable[[int], Any]  # index -> `options["task"]` of reset
    seed: Callable[[int], int]
    actions: Callable[[int], Sequence[Action]]

    def play(self, index: int) -> Played:
        """See Side."""
        played = Played("invalid")
        try:
            began = time.perf_counter()
            self.env.reset(seed=self.seed(index), options={"task": self.task(index)})
            played.reset_s = time.perf_counter() - began
            for action in self.actions(index):
                began = time.perf_counter()
                _, _, terminated, truncated, _ = self.env.step(action)
                played.step_s.append(time.perf_counter() - began)
                if terminated or truncated:
                    break
            verdict = self.env.evaluate()
        except EnvError as error:
            played.reason = str(error)
            return played
        played.outcome, played.reason = verdict.outcome, verdict.reason
        return played


def compared(ours: Side, own: Side, asked: Asked) -> Result:
    """Both sides play the same episodes, in turn, so that other load on the machine hits both alike.

    `false_pass` are episodes that we call a pass and the environment does not, `false_fail` those that it
    calls a pass and we a failure; `invalid` are ours that broke, which are neither.
    """
    pairs: list[tuple[Played, Played]] = []
    for index in range(asked.episodes):
        if index % 2:  # neither side always plays first
            other = own.play(index)
            pairs.append((ours.play(index), other))
        else:
            pairs.append((ours.play(index), own.play(index)))
    mine = [ours for ours, _ in pairs]
    theirs = [own for _, own in pairs]
    reasons = {played.reason for played in mine if played.outcome == "invalid"}
    return {
        "episodes": len(pairs),
        "passes": sum(played.outcome == "pass" for played in mine),
        "own_passes": sum(played.outcome == "pass" for played in theirs),
        "false_pass": sum(a.outcome == "pass" and b.outcome != "pass" for a, b in pairs),
        "false_fail": sum(a.outcome == "fail" and b.outcome == "pass" for a, b in pairs),
        "invalid": sum(played.outcome == "invalid" for played in mine),
        "own_invalid": sum(played.outcome == "invalid" for played in theirs),
        **({"invalid_reasons": sorted(reasons)[:5]} if reasons else {}),
        "steps": sum(len(played.step_s) for played in mine),
        "steps_per_second": _rate(mine),
        "own_steps_per_second": _rate(theirs),
        "reset_ms": _reset_ms(mine),
        "own_reset_ms": _reset_ms(theirs),
    }


def _rate(played: Sequence[Played]) -> float | None:
    """Return the number of steps in a second of steps; the time of resets does not count."""
    seconds = sum(sum(each.step_s) for each in played)
    return round(sum(len(each.step_s) for each in played) / seconds, 1) if seconds else None


def _reset_ms(played: Sequence[Played]) -> float | None:
    times = [each.reset_s * 1000 for each in played if each.reset_s]
    return round(statistics.median(times), 1) if times else None
