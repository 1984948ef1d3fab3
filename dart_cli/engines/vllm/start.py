"""How vLLM is started: its parts, platform and arguments.

engine_args    our configuration and the model, as vLLM's arguments
start          the engine, or an error with its cause and cure
_environment   the variables of its processes

What vLLM would compile with nvcc, download or look up at its start is turned off here, as is all that the CPU build
cannot do; docs/engines.md has each default and its reason.
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
    kept_tokens,
)
from dart_cli.policy.loader import LoadedPolicy

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

log = logging.getLogger(__name__)

IN_ENGINE = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""The only worker of a CPU is in the engine's process. vLLM's CPU platform takes a process more, to set
its threads; ours are set before either starts."""
SEE_LOG = "vLLM's own messages are above, in the log of this rollout worker"

_WIDEST = 1 << 14  # pixels; larger than any screen, to find the largest size that the model uses


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

    `features` is the share of a GPU's memory that features of screens take, beside what vLLM measures.
    """
    from dart_cli.engines.vllm.plugin import BACKEND, Parts
    from dart_cli.engines.vllm.set_files import adapter_args

    length = sequence_length(policy, config)
    arguments: dict[str, Any] = {
        "model": str(policy.folder),
        "dtype": dtype,
        "seed": 0,
        "skip_tokenizer_init": True,  # tokens in, tokens out
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
    return arguments | config.options


def _gpu_args(config: VllmConfig, dtype: str, max_batch: int, length: int) -> dict[str, Any]:
    """Return the arguments of a GPU: larger batches, and nothing that FlashInfer compiles or downloads."""
    options = config.options
    arguments: dict[str, Any] = {"max_num_batched_tokens": batch_tokens(config, length, max_batch)}
    if "kernel_config" not in options:  # vLLM takes either
        arguments["enable_flashinfer_autotune"] = False
    if dtype == "bfloat16" and "attention_config" not in options:
        # vLLM's own choice before Blackwell, where it would choose FlashInfer's. It has no float32.
        arguments["attention_backend"] = "FLASH_ATTN"
    if config.tensor_parallel > 1:
        # All GPUs are of this host, also where Ray has placed this process.
        arguments["distributed_executor_backend"] = "mp"
        arguments["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": False}}
    return arguments


def sequence_length(policy: LoadedPolicy, config: VllmConfig) -> int:
    """Return the most tokens of a prompt and its completion."""
    return min(config.max_model_len or policy.max_positions, policy.max_positions)


def largest_screen(policy: LoadedPolicy, max_model_len: int) -> Any:
    """Return the most image tokens that one screen can take, as models.Largest."""
    from dart_cli.engines.vllm.models import Largest

    images = policy.images
    side = images.patch * images.merge
    width, height = images.resized(_WIDEST, _WIDEST)
    rows, columns = (
        height // side + 1,
        width // side + 1,
    )  # of any shape: (r + 1)^2 > pixels / side^2
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
    shown: int = 0,
) -> AsyncLLM:
    """Start an AsyncLLM with its processes, serving the folder's own weights.

    It has room for `adapter_slots` versions of the policy's adapters beside them, and for features of screens of
    `shown` tokens, or of as many as leave room for keys and values.

    Raises MissingPartError for a part that is not installed, EngineError if it does not start.
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
        kept, features = _features(policy, config, dtype, memory, shown)
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
            made = AsyncEngineArgs(**arguments).create_engine_config(UsageContext.ENGINE_CONTEXT)
            # No argument sets it; the scheduler's EncoderCacheManager is made with it.
            scheduler = made.scheduler_config
            scheduler.encoder_cache_size = max(scheduler.encoder_cache_size, kept)
            return AsyncLLM.from_vllm_config(
                made,
                enable_log_requests=bool(arguments.get("enable_log_requests")),
                disable_log_stats=bool(arguments["disable_log_stats"]),
            )
        except TypeError as error:  # from AsyncEngineArgs: an unknown name
            raise EngineError(
                f"vllm.options: {error}; see the engine arguments of vLLM's documentation"
            ) from error
        except Exception as error:  # vLLM raises whatever ended its processes
            raise EngineError(f"vLLM did not start: {root_cause(error)}") from error


def _memory_of(platform: Any) -> int:
    """Return the bytes of the first GPU, without a CUDA context here. Raises EngineError."""
    try:
        return int(platform.get_device_total_memory())
    except Exception as error:  # NVML's own
        raise EngineError(
            f"vLLM cannot read the memory of the GPU: {root_cause(error)}; see `nvidia-smi`"
        ) from error


def _features(
    policy: LoadedPolicy, config: VllmConfig, dtype: str, memory: int, shown: int
) -> tuple[int, float]:
    """Return the tokens of screens whose features are kept, and their share of a GPU's `memory` (0 for a CPU)."""
    shape, wide = shape_of(read_json(policy.folder, "config.json")), getattr(torch, dtype).itemsize
    if not memory:
        return kept_tokens(shape, wide, CPU_KV_MB << 20, shown), 0.0
    length = sequence_length(policy, config)
    room = divide(config, shape, wide=wide, memory=memory, length=length, shown=shown)
    if config.options.get("kv_cache_memory_bytes"):  # vLLM sizes its cache by these alone
        return room.kept, 0.0
    return room.kept, room.features / memory


@contextlib.contextmanager
def _environment(device: str, threads: int) -> Iterator[None]:
    """Set the environment that vLLM's processes inherit; user settings are kept unless exactness forbids.

    CUDA_VISIBLE_DEVICES is restored afterwards: `dart doctor` loads a trainer on another GPU.
    """
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # its sampler cannot be replaced by ours
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # a process with threads must not fork
    chosen = os.environ.get(VISIBLE)
    if device.startswith("cuda:"):
        os.environ[VISIBLE] = gpu_names([int(device.partition(":")[2])], os.environ)[0]
    for name, value in {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # cores are shared with environments and trainer
        # oneDNN caches 1024 primitives by default, one for each batch shape and each set of weights:
        # 300 MB after as many updates.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # FlashInfer compiles its kernels with nvcc and ninja, which few machines have; dart samples with none.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    }.items():
        os.environ.setdefault(name, value)
    try:
        yield
    finally:
        if chosen is None:
            os.environ.pop(VISIBLE, None)
        else:
            os.environ[VISIBLE] = chosen


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
            "the CPU build into an environment of its own"
        )
    if not on_cpu and accelerator.device_count() < config.tensor_parallel:
        raise MissingPartError(
            f"vllm.tensor_parallel = {config.tensor_parallel}, torch sees "
            f"{accelerator.device_count()} GPUs; see `dart doctor`, and CUDA_VISIBLE_DEVICES"
        )


_MEMORY = ("out of memory", "available memory", "kv cache", "gpu memory utilization")


def root_cause(error: BaseException) -> str:
    """One line: the first error of the chain, and a cure if one is known."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    text = " ".join(f"{type(error).__name__}: {error}".split())[:600]
    if any(sign in text.lower() for sign in _MEMORY):
        text += (
            "; lower vllm.max_model_len or rollout.max_batch, set vllm.gpu_memory_utilization or "
            "kv_cache_memory_bytes of vllm.options to what is free, or spread the model by vllm.tensor_parallel"
        )
    elif "engine core" in text.lower():
        text += f"; {SEE_LOG}"
    return text
