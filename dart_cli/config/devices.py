"""Which GPUs each process uses: what [up] asks for, without torch.

gpus_of       the GPUs of one process, as CUDA_VISIBLE_DEVICES names them
visible_gpus  how many this process can use
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from bus.errors import ConfigError
from dart_cli.config.schema import Config

if TYPE_CHECKING:
    from bus.messages import Role  # a type alone: the messages take as long as all of this

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""What a process may use, by NVIDIA's own numbers; a user's own value stands above [up]."""


def gpus_of(config: Config, role: Role | str, worker: str) -> str:
    """The GPUs of a worker such as `train` or `rollout-1`; empty where [up] does not name any for it.

    Raises ConfigError for a rollout worker beyond those that [up] has GPUs for.
    """
    if role == "train":
        return ",".join(map(str, config.up.train_gpus))
    listed = config.up.rollout_gpus
    if role != "rollout" or not listed:
        return ""
    each = gpus_per_worker(config)
    number = re.search(r"(\d+)$", worker)
    index = int(number[1]) if number else 0
    mine = listed[index * each : (index + 1) * each]
    if len(mine) < each:
        raise ConfigError(
            f"up.rollout_gpus = {listed} has GPUs for {len(listed) // each} workers of {each}, and {worker} "
            f"is one more; add its GPUs, or start it with {VISIBLE}=N"
        )
    return ",".join(map(str, mine))


def gpus_per_worker(config: Config) -> int:
    """GPUs that one rollout worker takes."""
    return config.vllm.tensor_parallel if config.rollout.engine == "vllm" else 1


def visible_gpus(environment: Mapping[str, str] = os.environ) -> int | None:
    """How many NVIDIA GPUs this process can use; None where only torch knows (WSL, ROCm)."""
    chosen = environment.get(VISIBLE)
    if chosen is not None:
        return len([each for each in chosen.split(",") if each.strip() not in ("", "-1")])
    if Path("/dev/dxg").exists() or Path("/dev/kfd").exists():
        return None
    return len(list(Path("/dev").glob("nvidia[0-9]*")))
