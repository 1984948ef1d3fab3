"""Ranks that torchrun starts meet, and meet again when it starts them anew."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bus.errors import ConfigError
from bus.messages import Batch, BatchTrained, TrainerHello
from dart_cli.config.load import default_config
from dart_cli.config.schema import Config
from dart_cli.config.values import to_toml
from dart_cli.train.ranks.processes import refuse_other_settings
from dart_cli.train.ranks.watch import Membership
from tests.train.parts import Data, final_weights
from tests.train.trainers import ROOT, run_trainer
from tests.waiting import PATIENCE_S, until

RANK = """
import os, sys
from pathlib import Path
import torch
from dart_cli.config.schema import Config
from dart_cli.train.ranks.watch import membership
from dart_cli.train.ranks.distributed import join, meet_torchrun

folder = Path(sys.argv[1])
member = membership(Config.model_validate({"run": {"dir": folder}}))
start = os.environ["TORCHELASTIC_RESTART_COUNT"]
member, store = meet_torchrun(member, 20.0)
with join(member, torch.device("cpu"), 20.0, store):
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
    assert len(list((tmp_path / "ranks").iterdir())) == 2  # a board of each start


class Store:
    """The part of torch's store that two ranks need to meet."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]


def test_a_rank_that_was_started_with_other_settings_than_rank_0_is_refused(tmp_path: Path) -> None:
    def rank(number: int) -> Membership:
        return Membership(number, 2, number, tmp_path, is_ours=False)

    store, same = Store(), default_config(["train.lr=1e-4"])
    refuse_other_settings(same, rank(0), store)
    refuse_other_settings(same, rank(1), store)
    own = default_config(["train.lr=1e-4", "train.threads=2", "env.slots=3"])
    refuse_other_settings(own, rank(1), store)
    with pytest.raises(
        ConfigError, match=r"^train\.lr is 0\.5 for rank 1 .* and 0\.0001 for rank 0"
    ):
        refuse_other_settings(default_config(["train.lr=0.5"]), rank(1), store)


def config_file(config: Config, path: Path) -> Path:
    sections = [
        [f"[{name}]", *(f"{key} = {to_toml(value)}" for key, value in section.items())]
        for name, section in config.model_dump(mode="json", exclude_unset=True).items()
    ]
    path.write_text("\n".join(line for lines in sections for line in lines), encoding="utf-8")
    return path


def free_port() -> int:
    with socket.socket() as result:
        result.bind(("127.0.0.1", 0))
        port: int = result.getsockname()[1]
        return port


@pytest.mark.slow
async def test_torchruns_next_start_under_the_same_id_and_port_trains_on(
    config: Config, batches: list[Batch], tmp_path: Path
) -> None:
    program = (
        *("-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-id", "a"),
        *("--master-addr", "127.0.0.1", "--master-port", str(free_port())),
        *("-m", "dart_cli", "train", str(config_file(config, tmp_path / "run.toml"))),
        *("--set", "train.device=cpu"),
    )
    # A rank is killed in the first start, which leaves the reason behind.
    before = Data(batches, crash=lambda message: isinstance(message, BatchTrained))
    ranks = config.run.dir / "ranks"

    async def kill() -> None:
        await before.crashed.wait()
        [state] = ranks.glob("*/rank-1")
        os.kill(json.loads(state.read_text())["pid"], signal.SIGKILL)

    killing = asyncio.create_task(kill())
    code, output = await run_trainer(config, before, program=program)
    await killing
    assert code == 1, output
    await until(lambda: list(ranks.glob("*/end-reason")))
    after = Data(batches)
    code, output = await run_trainer(config, after, program=program)
    assert code == 0, output
    [hello] = after.of(TrainerHello)
    assert isinstance(hello, TrainerHello)
    again = [m.batch_id for m in after.of(BatchTrained) if isinstance(m, BatchTrained)]
    assert again == list(range(hello.last_batch_id + 1, len(batches) + 1))
    assert final_weights(config)
    assert len(list(ranks.iterdir())) == 1  # what the first start left is removed
