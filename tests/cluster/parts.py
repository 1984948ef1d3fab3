"""A Ray cluster of three nodes on this host, and runs of `dart up --ray` on it."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SUITE = Path(__file__).parents[1] / "suites" / "coin_suite.py"
CONFIG = """
[run]
dir = "{folder}/run"
[env]
suite = "{suite}:CoinSuite"
slots = 8
malformed = "noop"
[rollout]
engine = "scripted"
max_tokens = 3
[data]
group_size = 4
groups_per_batch = 2
max_open_groups = 8
[train]
learner = "timed"
checkpoint_every = 1
updates = {updates}
[timing]
train_s = 0.2
transfer_s = 0.0
pause_s = 0.0
[eval]
around = false
[up]
envs = 2
rollouts = 2
"""
"""A run without a model: two of each kind of worker."""


def write_config(folder: Path, updates: int) -> Path:
    path = folder / "c.toml"
    path.write_text(CONFIG.format(folder=folder, suite=SUITE, updates=updates))
    return path


@dataclass
class LocalCluster:
    """Nodes that can be killed."""

    process: subprocess.Popen[str]
    address: str
    nodes: list[str]  # ids
    environment: dict[str, str]
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def kill(self, number: int) -> None:
        """All processes of a node at once."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"kill {number}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == f"killed {number}\n"

    def up(self, path: Path, *more: object) -> subprocess.Popen[str]:
        """`dart up PATH --ray ADDRESS` in a process of its own."""
        child = subprocess.Popen(
            [
                *(sys.executable, "-m", "dart_cli", "up", path, "--ray", self.address),
                *map(str, more),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
        )
        self.started.append(child)
        return child


@contextmanager
def local_cluster(*resources: dict[str, Any]) -> Iterator[LocalCluster]:
    """A node for each of `resources`; the first is the head, which a driver here is part of."""
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # 127.0.0.1 as this host's address
    }
    command = [sys.executable, "-m", "dart_cli.cluster.local_nodes", json.dumps(resources)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    assert process.stdin is not None
    cluster = None
    try:
        cluster = LocalCluster(
            process, environment=environment, **json.loads(process.stdout.readline())
        )
        yield cluster
    finally:
        for child in cluster.started if cluster else []:
            child.kill()
            child.communicate()
        process.stdin.close()
        process.wait(60)
        process.stdout.close()
