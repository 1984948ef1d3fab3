"""Ranks that torchrun starts meet, and meet again when it starts them anew."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
RANK = """
import os, sys
from pathlib import Path
import torch
from dart_cli.config.schema import Config
from dart_cli.train.ranks.board import membership
from dart_cli.train.ranks.distributed import join

folder = Path(sys.argv[1])
member = membership(Config.model_validate({"run": {"dir": folder}}))
start = os.environ["TORCHELASTIC_RESTART_COUNT"]
with join(member, torch.device("cpu"), 20.0):
    if (member.rank, start) == (1, "0"):
        os._exit(1)
    sums = torch.ones(1)
    torch.distributed.all_reduce(sums)
(folder / f"rank-{member.rank}-of-start-{start}-met-{int(sums)}").touch()
"""


@pytest.mark.slow
def test_ranks_that_torchrun_starts_anew_meet_again(tmp_path: Path) -> None:
    program = tmp_path / "rank.py"
    program.write_text(RANK)
    arguments = ("--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.1")
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0")
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *arguments, *rendezvous, program, tmp_path],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": loopback},
    )
    assert ended.returncode == 0, ended.stderr
    assert {path.name for path in tmp_path.glob("*-met-*")} == {
        "rank-0-of-start-1-met-2",
        "rank-1-of-start-1-met-2",
    }
