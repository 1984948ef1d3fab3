"""The run and its processes: [run], [bus], [up]."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from dart_cli.config.schema.base import Folder, Section


class RunConfig(Section):
    """Where the run lives and what makes it repeatable."""

    dir: Folder = Path("runs/default")
    """Run directory: database, weights, logs, sockets; made private (0700). Relative to the shell's."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seeds task order, environments and sampling."""


class BusConfig(Section):
    """How the processes reach each other: sockets in the run directory, or over tcp."""

    host: str = ""
    """Address of `dart data` for tcp, across hosts: it binds it at `port`; `dart rollout` binds its own
    address on the route to it, at a free port. Empty: sockets in the run directory, one host."""

    port: int = Field(default=7800, ge=1024, le=65000)
    """First of four tcp ports: three of `dart data` (requests, telemetry in, telemetry out), and the trainer's
    for a broadcast of weights."""

    keys: Folder | None = None
    """Folder of CURVE keys that `dart keys` made, the same on every host; required beyond loopback."""

    @property
    def transport(self) -> Literal["ipc", "tcp"]:
        """What carries messages: tcp where a host is named."""
        return "tcp" if self.host else "ipc"


Gpus = list[Annotated[int, Field(ge=0, le=1023)]]


class UpConfig(Section):
    """What `dart up` starts, and which GPUs each process sees."""

    envs: int = Field(default=1, ge=0, le=256)
    """`dart env` processes."""

    rollouts: int = Field(default=1, ge=0, le=256)
    """`dart rollout` processes."""

    serve: bool = False
    """Whether a `dart serve` process is started, too: for agents that play through it, with `envs` = 0
    in place of our environments."""

    train_gpus: Gpus = []
    """GPUs of the trainer, one for each of `train.ranks`: nvidia-smi's numbers or, where CUDA_VISIBLE_DEVICES
    is set, places in its list, from 0 on. Empty: the first that `rollout_gpus` does not name, where there are
    enough for each process of this host, else all. Not with `torchrun`, which gives ranks their own."""

    rollout_gpus: Gpus = []
    """Likewise of the rollout workers, shared out by the number in their names, `vllm.tensor_parallel` for
    each, to `rollouts` of them. Empty: those that the trainer leaves, where there are enough, else all."""
