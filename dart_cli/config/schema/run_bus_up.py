"""The run and its processes: sections [run], [bus], [up]."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from dart_cli.config.schema.base import Folder, Section


class RunConfig(Section):
    """Where the run is stored, and its seed."""

    dir: Folder = Path("runs/default")
    """Run directory, with database, weights, logs and sockets. It is made private (0700). A relative path
    begins at the current directory."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the order of tasks, of the environments and of sampling."""


class BusConfig(Section):
    """How the processes reach each other: by sockets in the run directory, or over tcp."""

    host: str = ""
    """Address of `dart data`, for a run over tcp on several hosts. `dart data` listens there at `port`; `dart
    rollout` listens at a free port of its host's address on the route to it. If empty, the run is on one host
    and uses sockets in the run directory."""

    port: int = Field(default=7800, ge=1024, le=65000)
    """First of four tcp ports: three of `dart data` (requests, telemetry in, telemetry out), and one of the
    trainer, for broadcasts of weights."""

    keys: Folder | None = None
    """Folder of CURVE keys, made by `dart keys` and the same on every host. It is required beyond
    loopback."""

    @property
    def transport(self) -> Literal["ipc", "tcp"]:
        """What carries messages: tcp where `host` is set, else sockets (ipc)."""
        return "tcp" if self.host else "ipc"


Gpus = list[Annotated[int, Field(ge=0, le=1023)]]


class UpConfig(Section):
    """Which processes `dart up` starts, and which GPUs each of them sees."""

    envs: int = Field(default=1, ge=0, le=256)
    """Number of `dart env` processes."""

    rollouts: int = Field(default=1, ge=0, le=256)
    """Number of `dart rollout` processes."""

    serve: bool = False
    """Whether a `dart serve` process is started as well, for agents that play through it. With `envs` = 0
    they take the place of dart's environments."""

    train_gpus: Gpus = []
    """GPUs of the trainer, one for each of `train.ranks`: nvidia-smi's numbers or, where CUDA_VISIBLE_DEVICES
    is set, places in its list, from 0 on. If empty, the trainer takes the first GPUs that `rollout_gpus` does
    not name, where there are enough for every process of this host, and else sees all. Leave it empty with
    `torchrun`, which gives each rank its GPU."""

    rollout_gpus: Gpus = []
    """GPUs of the rollout workers, written likewise: `vllm.tensor_parallel` for each of `rollouts` workers,
    in the order of the numbers in their names. If empty, the workers take the GPUs that the trainer leaves,
    where there are enough, and else see all."""
