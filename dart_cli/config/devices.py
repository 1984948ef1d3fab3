"""Which GPUs each process uses: what [gpus] and the devices ask for, without torch.

gpu_mistakes     combinations of [gpus], ranks and workers that cannot be
device_mistakes  devices that this host has not
gpus_of          the GPUs of one process, as CUDA_VISIBLE_DEVICES names them
visible_gpus     how many this process can use
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from bus.errors import ConfigError
from dart_cli.config.places import Mistake
from dart_cli.config.schema import MODEL_ENGINES, Config, TrainConfig

if TYPE_CHECKING:
    from bus.messages import Role  # a type alone: the messages take as long as all of this

MOST_CPU_RANKS = 8
"""Ranks that a trial on the CPU may have, on however few cores."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
"""What a process may use, by NVIDIA's own numbers; a user's own value stands above [gpus]."""


def gpus_of(config: Config, role: Role | str, worker: str) -> str:
    """The GPUs of a worker such as `train` or `rollout-1`; empty where [gpus] does not name any for it.

    Raises ConfigError for a rollout worker beyond those that [gpus] has GPUs for.
    """
    if role == "train":
        return ",".join(map(str, config.gpus.train))
    listed = config.gpus.rollout
    if role != "rollout" or not listed:
        return ""
    each = gpus_per_worker(config)
    number = re.search(r"(\d+)$", worker)
    index = int(number[1]) if number else 0
    mine = listed[index * each : (index + 1) * each]
    if len(mine) < each:
        raise ConfigError(
            f"gpus.rollout = {listed} has GPUs for {len(listed) // each} workers of {each}, and {worker} "
            f"is one more; add its GPUs, or start it with {VISIBLE}=N"
        )
    return ",".join(map(str, mine))


def gpus_per_worker(config: Config) -> int:
    """GPUs that one rollout worker takes."""
    return config.vllm.tensor_parallel if config.rollout.engine == "vllm" else 1


def gpu_mistakes(config: Config) -> Iterator[Mistake]:
    """Whether [gpus] names one GPU for each rank and each part of an engine, and each GPU once."""
    train, rollout = config.gpus.train, config.gpus.rollout
    for key, listed in (("gpus.train", train), ("gpus.rollout", rollout)):
        for gpu in sorted({each for each in listed if listed.count(each) > 1}):
            yield Mistake(key, f"lists GPU {gpu} twice; remove one")
    if shared := sorted({*train} & {*rollout}):
        yield Mistake(
            "gpus.rollout",
            f"lists GPU {shared[0]}, which gpus.train lists too; neither leaves room for the other, "
            "remove it from one of them",
        )
    if train and len(train) != config.train.ranks:
        yield Mistake(
            "gpus.train",
            f"lists {len(train)} GPU{'' if len(train) == 1 else 's'} for train.ranks = "
            f"{config.train.ranks}; list one for each rank, or set train.ranks = {len(train)}",
        )
    each, workers = gpus_per_worker(config), config.up.rollouts
    if rollout and len(rollout) != each * workers:
        by = f" x vllm.tensor_parallel = {each}" if each > 1 else ""
        cure = f"list {each * workers}"
        if len(rollout) % each == 0:
            cure += f", or set up.rollouts = {len(rollout) // each}"
        yield Mistake(
            "gpus.rollout",
            f"lists {len(rollout)} GPU{'' if len(rollout) == 1 else 's'} for up.rollouts = "
            f"{workers}{by}; {cure}",
        )
    for section, listed in (("train", train), ("rollout", rollout)):
        device = getattr(config, section).device
        if listed and device not in ("auto", "cuda"):
            yield Mistake(
                f"{section}.device",
                f'= "{device}" and gpus.{section} = {listed} both name a device; set "cuda"',
            )
    if config.train.ranks > 1 and config.train.learner == "timed":
        yield Mistake(
            "train.ranks",
            f'= {config.train.ranks} and train.learner = "timed", which has no model to share; set 1',
        )
    if config.train.ranks > 1 and ":" in config.train.device and not train:
        yield Mistake(
            "train.device",
            f'= "{config.train.device}" is one device, train.ranks = {config.train.ranks} needs as '
            'many; set "cuda", and the GPUs by gpus.train',
        )
    if config.weights.channel == "nccl":
        yield from _nccl_mistakes(config)
    if config.train.offload == "optimizer" and config.train.device == "cpu":
        yield Mistake(
            "train.offload",
            '= "optimizer" moves masters and moments to main memory, where train.device = "cpu" has '
            'them already; set "none"',
        )


def _nccl_mistakes(config: Config) -> Iterator[Mistake]:
    """Whether trainer and workers are of a kind that uses GPUs."""
    key, cure = "weights.channel", 'set "gloo" or "file"'
    for name, value in (
        ("train.learner", config.train.learner),
        ("rollout.engine", config.rollout.engine),
    ):
        if value not in ("torch", *MODEL_ENGINES):
            yield Mistake(
                key, f'= "nccl" goes from GPU to GPU, and {name} = "{value}" has none; {cure}'
            )
            return
    train, rollout = config.train.device, config.rollout.device
    for name, device in (("train", train), ("rollout", rollout)):
        if device == "cpu":
            yield Mistake(key, f'= "nccl" goes from GPU to GPU, and {name}.device = "cpu"; {cure}')
            return


def _index(device: str) -> int:
    """The GPU that a process takes of those it sees."""
    return int(device.partition(":")[2] or 0)


def device_mistakes(config: Config, role: Role | None) -> Iterator[Mistake]:
    """Whether the GPUs that the devices name are visible here."""
    count = visible_gpus()
    asked = {"rollout": config.rollout.device, "train": config.train.device}
    for section, device in asked.items():
        if count is None or not device.startswith("cuda") or role not in (None, "eval", section):
            continue
        if count == 0:
            text = f'= "{device}" but no GPU is visible; set "auto" or "cpu"'
        elif _index(device) >= count:
            text = f'= "{device}" but there are only cuda:0 to cuda:{count - 1}'
        else:
            continue
        yield Mistake(f"{section}.device", text)
    if config.weights.channel == "nccl" and role != "eval":
        yield from _shared_by_nccl(config, count)
    others = os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ
    if config.gpus.train and role == "train" and others and VISIBLE not in os.environ:
        yield Mistake(
            "gpus.train",
            f"= {config.gpus.train} and torchrun, which gives each rank a GPU of its own: leave it empty, "
            f"and choose GPUs by {VISIBLE} on each host",
        )
    if count is not None and role in (None, "train"):
        yield from _trainer_mistakes(config.train, count)


def _shared_by_nccl(config: Config, count: int | None) -> Iterator[Mistake]:
    """Whether a GPU is visible, and trainer and workers that all start here would have one each."""
    key = "weights.channel"
    if count == 0:
        yield Mistake(key, '= "nccl" but no GPU is visible; set "gloo", the same over TCP')
        return
    is_alone = (
        config.bus.transport == "ipc" and VISIBLE not in os.environ
    )  # one host, its first GPU
    placed = bool(config.gpus.train and config.gpus.rollout)
    are_same = _index(config.train.device) == _index(config.rollout.device)
    if is_alone and not placed and (are_same or config.up.rollouts > 1):
        yield Mistake(
            key,
            '= "nccl" needs a GPU for each process, and trainer and rollout workers would share one; name '
            'theirs by gpus.train and gpus.rollout, or set "gloo" or "file"',
        )


def _trainer_mistakes(train: TrainConfig, count: int) -> Iterator[Mistake]:
    """Whether the `count` visible GPUs, or with none the cores, are enough for the ranks; what offload needs."""
    ranks, on_gpus = train.ranks, train.device != "cpu" and count > 0
    starts_all = "WORLD_SIZE" not in os.environ  # torchrun's ranks may be on several hosts
    if starts_all and on_gpus and ":" not in train.device and ranks > count:
        yield Mistake(
            "train.ranks",
            f"= {ranks} but {count} GPU{' is' if count == 1 else 's are'} visible; set train.ranks = "
            f"{count}, or start the others by torchrun",
        )
    most = max(MOST_CPU_RANKS, os.cpu_count() or 1)
    if starts_all and not on_gpus and not train.device.startswith("cuda") and ranks > most:
        yield Mistake(
            "train.ranks",
            f"= {ranks} but no GPU is {'visible' if train.device == 'auto' else 'used'}, and on the CPU "
            f"there are at most {most} here; lower train.ranks",
        )
    if train.offload == "optimizer" and train.device == "auto" and not on_gpus:
        yield Mistake(
            "train.offload",
            '= "optimizer" but no GPU is visible, so masters and moments are in main memory already; '
            'set "none"',
        )


def visible_gpus(environment: Mapping[str, str] = os.environ) -> int | None:
    """How many NVIDIA GPUs this process can use; None where only torch knows (WSL, ROCm)."""
    chosen = environment.get(VISIBLE)
    if chosen is not None:
        return len([each for each in chosen.split(",") if each.strip() not in ("", "-1")])
    if Path("/dev/dxg").exists() or Path("/dev/kfd").exists():
        return None
    return len(list(Path("/dev").glob("nvidia[0-9]*")))
