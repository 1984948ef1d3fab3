"""Start vLLM: make its arguments, set its environment variables, and check its build and the platform.

engine_args    makes vLLM's arguments from the configuration and the model
start          starts vLLM, or raises an error with the cause and the fix
_environment   sets the environment variables of vLLM's processes

This module turns off everything that vLLM would compile with nvcc, download or look up at its start, and
everything that the CPU build cannot do. docs/engines.md lists each default with its reason.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from bus.errors import EngineError, MissingPartError
from dart_cli.config.architecture import shape_of
from dart_cli.config.devices import VISIBLE, VLLM_VERSIONS, gpu_names, vllm_problem
from dart_cli.config.model_folder import read_json
from dart_cli.config.schema import VllmConfig
from dart_cli.engines.vllm import SECTION
from dart_cli.engines.vllm.room import (
    CPU_KV_MB,
    LEAST_CPU_BATCH,
    batch_tokens,
    divide,
    feature_tokens,
)
from dart_cli.policy.loader import LoadedPolicy

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

log = logging.getLogger(__name__)

IN_ENGINE = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""An executor that runs the only worker of a CPU in the engine's process. vLLM's CPU platform would start
another process in order to set its threads, but dart sets them before either process starts."""
SEE_LOG = "vLLM's own messages are above, in the log of this rollout worker"

MATCH_TOKENS = 16
"""Tokens at whose multiples the prefix of a prompt can be found in the cache of a model with recurrent layers:
as many as a block has in the transformers engine. vLLM's blocks on GPUs and CPUs are multiples of it."""

_WIDEST = 1 << 14  # pixels; larger than any screen, to find the largest size after resizing


def engine_args(
    policy: LoadedPolicy,
    config: VllmConfig,
    *,
    dtype: str,
    max_batch: int,
    on_cpu: bool,
    adapter_slots: int = 0,
    features: float = 0.0,
) -> dict[str, Any]:
    """Return the arguments for vLLM's AsyncEngineArgs.

    `features` is the share of a GPU's memory that features of screens take; vLLM does not measure it.
    """
    from dart_cli.engines.vllm.plugin import BACKEND, Parts
    from dart_cli.engines.vllm.set_files import adapter_args

    length = sequence_length(policy, config)
    arguments: dict[str, Any] = {
        "model": str(policy.folder),
        "dtype": dtype,
        "seed": 0,
        "skip_tokenizer_init": True,  # requests and outputs are tokens
        "tensor_parallel_size": config.tensor_parallel,
        "max_model_len": length,
        "max_num_seqs": max_batch,
        "gpu_memory_utilization": config.gpu_memory_utilization - features,
        "enforce_eager": on_cpu,
        "enable_prefix_caching": True,
        "async_scheduling": True,  # the CPU's platform turns it off
        "limit_mm_per_prompt": {"image": max(1, length // 4)},  # as many as fit
        "mm_processor_kwargs": {SECTION: asdict(largest_screen(policy, length))},
        "mm_device_do_normalize": True,  # screens come as bytes (models.PixelScaling)
        "logits_processors": [Parts],
        "additional_config": {
            SECTION: {
                "forbidden": list(policy.forbidden_token_ids),
                "pixels": policy.images.table.values.tolist(),
                "frames": policy.images.table.frames,
            }
        },
        "max_logprobs": 1,
        "weight_transfer_config": {"backend": BACKEND},
        "disable_log_stats": True,
    }
    if adapter_slots and policy.lora is not None:
        arguments |= adapter_args(policy.lora, adapter_slots)
    if on_cpu:
        arguments["kv_cache_memory_bytes"] = CPU_KV_MB << 20
        # Chunked prefill uses other kernels, which are slower at small sizes.
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(length, LEAST_CPU_BATCH)
        if config.tensor_parallel == 1:
            arguments["distributed_executor_backend"] = IN_ENGINE
    else:
        arguments |= _gpu_args(config, dtype, max_batch, length)
    if shape_of(read_json(policy.folder, "config.json")).delta is not None:
        arguments |= _recurrent_args(config)
    return arguments | config.options


def _recurrent_args(config: VllmConfig) -> dict[str, Any]:
    """Return the arguments for a model with recurrent layers: exact states, and a cache of them."""
    # vLLM's cache has states at the ends of chunks alone, so prompts that are read whole have no cache.
    is_cut = config.options.get("enable_chunked_prefill") is not False
    return {
        # The trainer's states are float32. vLLM would take what config.json names, or the model's dtype.
        "mamba_ssm_cache_dtype": "float32",
        # vLLM's own choice from Hopper on is FlashInfer's kernel, which is compiled with nvcc.
        "gdn_prefill_backend": "triton",
        "enable_chunked_prefill": is_cut,
        "enable_prefix_caching": is_cut,
        # A block is as many tokens as have keys and values of a state's size, 528 in Qwen3.5-9B. Without
        # this a prompt would be found at multiples of blocks only.
        "prefix_match_unit": MATCH_TOKENS if is_cut else None,
    }


def _gpu_args(config: VllmConfig, dtype: str, max_batch: int, length: int) -> dict[str, Any]:
    """Return the arguments for a GPU: larger batches, and no FlashInfer that is compiled or downloaded."""
    options = config.options
    arguments: dict[str, Any] = {"max_num_batched_tokens": batch_tokens(config, length, max_batch)}
    if "kernel_config" not in options:  # vLLM accepts only one of the two
        arguments["enable_flashinfer_autotune"] = False
    if dtype == "bfloat16" and "attention_config" not in options:
        # vLLM's own choice before Blackwell, where it would choose FlashInfer. It does not take float32.
        arguments["attention_backend"] = "FLASH_ATTN"
    if config.tensor_parallel > 1:
        # All GPUs are on this host, even if Ray has placed this process.
        arguments["distributed_executor_backend"] = "mp"
        arguments["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": False}}
    return arguments


def sequence_length(policy: LoadedPolicy, config: VllmConfig) -> int:
    """Return the most tokens that a prompt and its completion have together."""
    return min(config.max_model_len or policy.max_positions, policy.max_positions)


def largest_screen(policy: LoadedPolicy, max_model_len: int) -> Any:
    """Return a screen of the most image tokens that one screen can take, as models.Largest."""
    from dart_cli.engines.vllm.models import Largest

    images = policy.images
    side = images.patch * images.merge
    width, height = images.resized(_WIDEST, _WIDEST)
    # One row and one column more make room for screens of any shape: (r + 1)^2 > pixels / side^2.
    rows, columns = height // side + 1, width // side + 1
    if rows * columns > max_model_len:
        rows = math.isqrt(max_model_len)
        columns = max_model_len // rows
    values = len(images.table.values) * images.patch**2
    return Largest(rows=rows, columns=columns, merge=images.merge, values=values)


def start(
    policy: LoadedPolicy,
    config: VllmConfig,
    *,
    dtype: str,
    max_batch: int,
    device: str = "auto",
    threads: int = 1,
    adapter_slots: int = 0,
    screen_tokens: int = 0,
) -> AsyncLLM:
    """Start an AsyncLLM with its processes, which serves the weights of the policy's folder.

    It has room for `adapter_slots` versions of the policy's adapters, and for the features of `screen_tokens`
    tokens of screens, or of fewer if keys and values need the room.

    Raises MissingPartError if a part is not installed, and EngineError if vLLM does not start.
    """
    if problem := vllm_problem():
        raise MissingPartError(f'rollout.engine = "vllm": {problem}')
    with _environment(device, threads):
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        on_cpu = bool(current_platform.is_cpu())
        _check_platform(config, device, on_cpu)
        memory = 0 if on_cpu else _memory_of(current_platform)
        tokens, features = _features(policy, config, dtype, memory, screen_tokens)
        arguments = engine_args(
            policy,
            config,
            dtype=dtype,
            max_batch=max_batch,
            on_cpu=on_cpu,
            adapter_slots=adapter_slots,
            features=features,
        )
        log.info(
            "starting vLLM %s, which takes up to some minutes",
            "on the CPU" if on_cpu else f"on {device}",
        )
        try:
            engine_config = AsyncEngineArgs(**arguments).create_engine_config(
                UsageContext.ENGINE_CONTEXT
            )
            # No argument sets this size, with which the scheduler makes its EncoderCacheManager.
            scheduler = engine_config.scheduler_config
            scheduler.encoder_cache_size = max(scheduler.encoder_cache_size, tokens)
            return AsyncLLM.from_vllm_config(
                engine_config,
                enable_log_requests=bool(arguments.get("enable_log_requests")),
                disable_log_stats=bool(arguments["disable_log_stats"]),
            )
        except TypeError as error:  # AsyncEngineArgs does not have a name of vllm.options
            raise EngineError(
                f"vllm.options: {error}; see the engine arguments of vLLM's documentation"
            ) from error
        except Exception as error:  # vLLM raises any error that ended its processes
            raise EngineError(f"vLLM did not start: {root_cause(error)}") from error


def _memory_of(platform: Any) -> int:
    """Return the bytes of the first GPU, without making a CUDA context in this process.

    Raises EngineError.
    """
    try:
        return int(platform.get_device_total_memory())
    except Exception as error:  # NVML has its own error classes
        raise EngineError(
            f"vLLM cannot read the memory of the GPU: {root_cause(error)}; see `nvidia-smi`"
        ) from error


def _features(
    policy: LoadedPolicy, config: VllmConfig, dtype: str, memory: int, screen_tokens: int
) -> tuple[int, float]:
    """Return the tokens of screens whose features are kept, and the features' share of a GPU's `memory`.

    On a CPU `memory` is 0, and so is the share.
    """
    shape = shape_of(read_json(policy.folder, "config.json"))
    wide = getattr(torch, dtype).itemsize
    if not memory:
        return feature_tokens(shape, wide, CPU_KV_MB << 20, screen_tokens), 0.0
    room = divide(
        config,
        shape,
        wide=wide,
        memory=memory,
        length=sequence_length(policy, config),
        screen_tokens=screen_tokens,
    )
    # With this option vLLM sizes its cache by the number alone.
    if config.options.get("kv_cache_memory_bytes"):
        return room.feature_tokens, 0.0
    return room.feature_tokens, room.features / memory


@contextlib.contextmanager
def _environment(device: str, threads: int) -> Iterator[None]:
    """Set the environment variables that vLLM's processes inherit, while they start.

    Variables that the user has set are kept, except for those on which exact samples depend.
    CUDA_VISIBLE_DEVICES is restored afterwards, because `dart doctor` then loads a trainer on another GPU.
    """
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # its sampler cannot be replaced by ours
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # a process with threads must not fork
    visible = os.environ.get(VISIBLE)
    if device.startswith("cuda:"):
        os.environ[VISIBLE] = gpu_names([int(device.partition(":")[2])], os.environ)[0]
    for name, value in {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # cores are shared with environments and trainer
        # By default oneDNN caches 1024 primitives, one for each batch shape and each set of weights, which
        # take 300 MB after as many updates.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # FlashInfer compiles its kernels with nvcc and ninja, which few machines have.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    }.items():
        os.environ.setdefault(name, value)
    try:
        yield
    finally:
        if visible is None:
            os.environ.pop(VISIBLE, None)
        else:
            os.environ[VISIBLE] = visible


def _check_platform(config: VllmConfig, device: str, on_cpu: bool) -> None:
    """Raise MissingPartError if vLLM's build, the configured device and the GPUs do not match."""
    from dart_cli.hardware import accelerator

    if on_cpu and device.startswith(accelerator.KIND):
        raise MissingPartError(
            f"rollout.device = {device!r}, but this vLLM is built for CPUs; "
            f"pip install 'vllm{VLLM_VERSIONS}', or set the device to auto or cpu"
        )
    if not on_cpu and device == "cpu":
        raise MissingPartError(
            'rollout.device = "cpu", but this vLLM is built for GPUs; scripts/setup-vllm installs '
            "the CPU build into a separate environment"
        )
    if not on_cpu and accelerator.device_count() < config.tensor_parallel:
        raise MissingPartError(
            f"vllm.tensor_parallel = {config.tensor_parallel}, torch sees "
            f"{accelerator.device_count()} GPUs; see `dart doctor`, and CUDA_VISIBLE_DEVICES"
        )


_MEMORY = ("out of memory", "available memory", "kv cache", "gpu memory utilization")


def root_cause(error: BaseException) -> str:
    """Return one line with the first error of the chain, and with the fix if the error is a known one."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    text = " ".join(f"{type(error).__name__}: {error}".split())[:600]
    if any(sign in text.lower() for sign in _MEMORY):
        text += (
            "; lower vllm.max_model_len or rollout.max_batch, set vllm.gpu_memory_utilization or "
            "kv_cache_memory_bytes of vllm.options to what is free, or spread the model by "
            "vllm.tensor_parallel"
        )
    elif "engine core" in text.lower():
        text += f"; {SEE_LOG}"
    return text
