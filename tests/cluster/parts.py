"""Runs of `dart up --ray` on a cluster of this host."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.faults.local_nodes import LocalCluster
from tests.simulated import QUICK

SUITE = Path(__file__).parents[1] / "own_suites" / "coin_suite.py"
CONFIG = """
[run]
dir = "{folder}/run"
[env]
suite = "{suite}:CoinSuite"
slots = 8
[rollout]
engine = "scripted"
max_tokens = 20
[data]
group_size = 4
groups_per_batch = 2
max_open_groups = 8
[train]
learner = "{learner}"
checkpoint_every = 1
updates = {updates}
[eval]
around = false
"""
"""A run without a model."""


def write_config(folder: Path, updates: int) -> Path:
    path = folder / "c.toml"
    path.write_text(CONFIG.format(folder=folder, suite=SUITE, updates=updates, learner=QUICK))
    return path


@dataclass
class Runs:
    """Runs of `dart up` on a cluster."""

    cluster: LocalCluster
    children: list[subprocess.Popen[str]] = field(default_factory=list)

    def up(self, path: Path, *more: object) -> subprocess.Popen[str]:
        """Start `dart up PATH --ray ADDRESS` in a separate process."""
        command = (sys.executable, "-m", "dart_cli", "up", path, "--ray", self.cluster.address)
        child = subprocess.Popen(
            [*map(str, (*command, *more))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=dict(self.cluster.environment),
        )
        self.children.append(child)
        return child

    def end(self) -> None:
        """Kill the runs that have not ended."""
        for child in self.children:
            child.kill()
            child.communicate()
