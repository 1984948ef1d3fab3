"""The run and its processes: [run], [bus], [gpus], [up]."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from dart_cli.config.schema.base import Count, Folder, PositiveSeconds, Section


class RunConfig(Section):
    """Where the run lives and what makes it repeatable."""

    dir: Folder = Path("runs/default")
    """Run directory: database, weights, logs, sockets; made private (0700). Relative to the shell's."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seeds task order, environments and sampling."""


class BusConfig(Section):
    """How the processes reach each other."""

    transport: Literal["ipc", "tcp"] = "ipc"
    """`ipc`: sockets in the run directory, one host. `tcp`: across hosts, with CURVE keys."""

    host: str = "127.0.0.1"
    """With tcp, the address of `dart data`, which binds it at `port`; `dart rollout` binds its own
    address on the route to it, at a free port. Beyond loopback `keys` is required."""

    port: int = Field(default=7800, ge=1024, le=65000)
    """First of three tcp ports of `dart data`: requests, telemetry in, telemetry out."""

    keys: Folder | None = None
    """Folder of CURVE keys that `dart keys` made, the same on every host; required beyond loopback."""

    deadline_s: PositiveSeconds = 30.0
    """Seconds a request may take before it is an error that names both processes."""

    stall_s: PositiveSeconds = 20.0
    """Seconds without progress after which `dart status` and the log report a stall: which process
    waits for which."""


class GpusConfig(Section):
    """Which GPUs each process sees, by nvidia-smi's numbers, unless CUDA_VISIBLE_DEVICES is set."""

    train: list[Annotated[int, Field(ge=0, le=1023)]] = []
    """One for each of `train.ranks`; empty for all. Not with `torchrun`, which gives ranks their own."""

    rollout: list[Annotated[int, Field(ge=0, le=1023)]] = []
    """Shared out to the rollout workers by the number in their names, `vllm.tensor_parallel` for each, to
    `up.rollouts` of them; empty for all."""


class UpConfig(Section):
    """What `dart up` starts."""

    envs: int = Field(default=1, ge=0, le=256)
    """`dart env` processes."""

    rollouts: int = Field(default=1, ge=0, le=256)
    """`dart rollout` processes."""

    serve: bool = False
    """Whether a `dart serve` process is started, too: for agents that play through it, with `envs` = 0
    in place of our environments."""

    restart: Count = 3
    """Times a process that died is started again before the run is ended."""

    cluster_wait_s: PositiveSeconds = 600.0
    """With `--ray`, seconds that a process without which the run cannot go on waits for room in the
    cluster."""
