"""A suite whose environments boot in turn, through OSWorld's own gate, before each episode.

Files of `folder` say what happens: `began` is there once a reset has begun, which does not reach the gate before
`arrive` is there; `boots` gets a line for each boot, which lasts until `go` is there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envs.contract.actions import Action
from envs.contract.base import Observation, Task, Verdict
from envs.contract.queueing import leave_if_given_up
from envs.suites.osworld.provider import BootGate
from tests.env.unruly_suite import SCREEN

SUITE = f"{__file__}:GatedSuite"
TASK = Task("gated/one", "gated", "click", 3)


class Gated:
    """Boots in its turn."""

    def __init__(self, folder: Path, turn_s: float) -> None:
        self.folder = folder
        self.turn_s = turn_s

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        (self.folder / "began").touch()
        while not (self.folder / "arrive").exists():
            time.sleep(0.002)
        with BootGate(1, self.folder / "turns").turn(self.turn_s):
            with (self.folder / "boots").open("a") as log:
                log.write(f"{os.getpid()}\n")
            while not (self.folder / "go").exists():
                leave_if_given_up()
                time.sleep(0.002)
        return SCREEN, {"instruction": "click"}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        return SCREEN, 0.0, False, False, {}

    def evaluate(self) -> Verdict:
        return Verdict("fail", "never passed")

    def close(self) -> None:
        """Nothing is open."""


class GatedSuite:
    """One task."""

    name = "gated"
    tasks: Mapping[str, Task] = {TASK.id: TASK}

    def make_env(self, *, folder: str, turn_s: float = 1800.0) -> Gated:
        return Gated(Path(folder), turn_s)
