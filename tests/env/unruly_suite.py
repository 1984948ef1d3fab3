"""A suite whose environments misbehave: task `unruly/WHERE-HOW` does HOW in WHERE, else it is well.

WHERE: reset, step, evaluate, close, solve, make. HOW: see `HOW`.
Well means: at most three steps, passed by a click near the corner.
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from envs.contract.actions import Action, Click
from envs.contract.base import GuiEnv, Observation, Task, Verdict

SUITE = f"{__file__}:UnrulySuite"
"""What `env.suite` calls it."""

WHERE = ("reset", "step", "evaluate", "close", "solve")
HOW = ("raise", "exit", "stop", "none", "hang", "spin", "eat", "die", "daemon", "fork")


def _screen() -> bytes:
    encoded = io.BytesIO()
    Image.new("RGB", (32, 32), "white").save(encoded, "PNG")
    return encoded.getvalue()


SCREEN = Observation(_screen(), "image/png", 32, 32)


class Unruly:
    """Does what its task says."""

    def __init__(self) -> None:
        self.task = ""
        self.passed = False
        self.steps = 0
        self.eaten: list[bytearray] = []

    def misbehave(self, where: str) -> bool:
        """Whether the caller shall return None."""
        at, _, how = self.task.partition("-")
        if at != where:
            return False
        if how == "raise":
            raise ZeroDivisionError("a bug of the environment")
        if how == "exit":
            sys.exit(3)
        if how == "stop":
            raise StopIteration
        if how == "hang":
            time.sleep(3600)
        if how == "daemon":  # what it starts leaves session and parent behind
            keep = f"echo $! > {os.environ['UNRULY_PID']}"
            command = f"setsid sh -c 'sleep 3600 & {keep}'"
            subprocess.run(["sh", "-c", command], check=False)
            time.sleep(3600 if where == "step" else 0)
            return False
        if how == "fork":
            first = subprocess.Popen(["sleep", "3600"])
            Path(os.environ["UNRULY_PID"]).write_text(str(first.pid))
            while True:
                subprocess.Popen(["sleep", "3600"])
                time.sleep(0.02)  # or the machine has thousands before the next check
        if how == "spin":
            while True:
                pass
        if how == "eat":
            while True:
                self.eaten.append(bytearray(2**24))
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return True

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        self.task = (options or {})["task"].id.removeprefix("unruly/")
        self.passed, self.steps = self.task == "true", 0
        if self.misbehave("reset"):
            return None  # type: ignore[return-value]
        return SCREEN, {"instruction": f"click, {self.task}, {seed}"}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        self.passed |= isinstance(action, Click) and action.x + action.y < 10
        if self.misbehave("step"):
            return None  # type: ignore[return-value]
        return SCREEN, float(self.passed), self.passed, self.steps >= 3, {}

    def evaluate(self) -> Verdict:
        if self.steps and self.misbehave("evaluate"):
            return None  # type: ignore[return-value]
        if self.task == "infeasible":
            return Verdict("pass", "nothing has been changed")
        return Verdict("pass" if self.passed else "fail", "clicked or not")

    def oracle_action(self) -> Action:
        if self.misbehave("solve"):
            return None  # type: ignore[return-value]
        return Click(x=1, y=1)

    def close(self) -> None:
        self.misbehave("close")


class UnrulySuite:
    """One task for each place and manner."""

    name = "unruly"
    tasks: Mapping[str, Task] = {
        f"unruly/{kind}": Task(
            f"unruly/{kind}", "unruly", "click", 3, feasible=kind != "infeasible"
        )
        for kind in (
            *("well", "true", "infeasible"),
            *(f"{where}-{how}" for where in WHERE for how in HOW),
        )
    }

    def make_env(self) -> GuiEnv:
        return Unruly()
