"""A suite whose verdicts have rewards; task `scored/WHAT` does what its name says.

A number is the reward that its evaluator gives, and nothing else. `judged-NUMBER` gives the outcome,
too: a pass. `milestones` gives 0.25 for its first step. `breaks` and `judge-breaks` are broken by the
policy's action, `gives-way` breaks by itself, `odd-step` gives no number for its step. `reports` hands in
what its application reported, `odd-log` something else.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from PIL import Image

from bus.errors import ActionCausedError, EnvError
from envs.contract.actions import Action
from envs.contract.base import GuiEnv, Observation, Task, Verdict

SUITE = f"{__file__}:ScoredSuite"
"""What `env.suite` calls it."""


def _screen() -> bytes:
    encoded = io.BytesIO()
    Image.new("RGB", (32, 32), "white").save(encoded, "PNG")
    return encoded.getvalue()


SCREEN = Observation(_screen(), "image/png", 32, 32)


class ScoredEnv:
    """Ends with its second step."""

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        self.what = (options or {})["task"].id.removeprefix("scored/")
        self.steps = 0
        app_log = ["GET /icon.png: 404"] if self.what == "reports" else None
        return SCREEN, {"instruction": "do some of it", "app_log": app_log}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        if self.what == "breaks":
            raise ActionCausedError("the action closed the only window")
        if self.what == "gives-way":
            raise EnvError("the display is gone")
        reward = 0.25 if self.what == "milestones" and self.steps == 1 else 0.0
        if self.what == "odd-step":
            reward = float("nan")
        app_log: object = []
        if self.what == "reports" and self.steps == 2:
            app_log = ["TypeError:\n x is \x1b[2Jundefined"] * 3 + ["y" * 1000]
        if self.what == "odd-log":
            app_log = "one text"
        return SCREEN, reward, self.steps >= 2, False, {"app_log": app_log}

    def evaluate(self) -> Verdict:
        if not self.steps:
            return Verdict.scored(0.0, "nothing is done")
        if self.what == "judge-breaks":
            raise ActionCausedError("the action deleted what is judged")
        kind, _, number = self.what.rpartition("-")
        if kind == "judged":
            return Verdict("pass", "by its own rule", float(number))
        return Verdict.scored(float(number) if self.what[-1].isdigit() else 0.0, "how much is done")

    def close(self) -> None:
        return None


class ScoredSuite:
    """Suite of the tasks above."""

    name = "scored"
    tasks: Mapping[str, Task] = {
        f"scored/{what}": Task(f"scored/{what}", "scored", "do some of it", 4)
        for what in (
            *("0.0", "0.4", "0.5", "1.0", "7.0", "judged-0.3"),
            *("breaks", "judge-breaks", "gives-way", "odd-step", "milestones"),
            *("reports", "odd-log"),
        )
    }

    def make_env(self) -> GuiEnv:
        return ScoredEnv()
