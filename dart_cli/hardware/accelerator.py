"""The functions of torch that need a GPU. No other module of dart names a vendor of GPUs.

    KIND                               the name of a GPU in torch and configurations: CUDA, also for ROCm
    is_gpu                             tells whether a device is a GPU
    is_available, device_count, current_device_index, set_device_index, synchronize, current_stream,
    max_memory_allocated               the same as in `torch.accelerator`
    is_in_use                          tells whether this process has begun to use a GPU
    host_bytes, in_pinned              main memory that a GPU copies from and to by itself
    new_stream, in_stream, new_event   streams beside the current one, and points in a stream
    rng_state, set_rng_state           the state of a GPU's random generator
    backend, has_nccl, nccl_group      collectives between GPUs
    takes_packs, packed_attention      the GPU's attention kernel for packs
    use_any_length                     avoids the attention that makes a plan for each length of a sequence

docs/hardware.md lists the functions of this module. It does not use `torch.accelerator` throughout, because
that also accepts GPUs that dart was never tried on (Apple's).
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.cuda
import torch.distributed

from bus.errors import ModelError

KIND = "cuda"
_gpu: Any = torch.cuda  # its streams and events are untyped
_distributed: Any = torch.distributed  # its type stubs are incomplete
_NO_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
_NEVER = timedelta(days=365)


def is_gpu(device: torch.device) -> bool:
    """Return True if `device` is a GPU; works on a host without one."""
    return device.type == KIND


def is_available() -> bool:
    """Return True if torch sees a GPU."""
    return torch.cuda.is_available()


def device_count() -> int:
    """Return the number of GPUs that torch sees."""
    return torch.cuda.device_count()


def current_device_index() -> int:
    """Return the index of the GPU that this process computes on by default."""
    return torch.cuda.current_device()


def set_device_index(device: torch.device) -> None:
    """Make `device`, which must have an index, the default GPU of this process."""
    torch.cuda.set_device(device)


def is_in_use() -> bool:
    """Return True if this process has begun to use a GPU."""
    return torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def synchronize(device: torch.device | None = None) -> None:
    """Wait until `device`, by default the current one, has finished all work in its queue."""
    torch.cuda.synchronize(device)


def max_memory_allocated(device: torch.device) -> int:
    """Return the most bytes that the tensors of this process have taken on `device` at once."""
    return torch.cuda.max_memory_allocated(device)


# --- main memory, streams -----------------------------------------------------------------------


def host_bytes(*shape: int, pinned: bool) -> torch.Tensor:
    """Return an uninitialised tensor of bytes in main memory.

    A GPU copies from and to `pinned` memory while it computes. torch rounds the size of pinned memory up to a
    power of two.
    """
    return torch.empty(shape, dtype=torch.uint8, pin_memory=pinned)


def in_pinned(values: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor in pinned memory."""
    return values.pin_memory()


def new_stream(device: torch.device) -> Any:
    """Return a new stream of `device`, which runs beside the others."""
    return _gpu.Stream(device)


def in_stream(stream: Any) -> AbstractContextManager[Any]:
    """Return a context in which work is queued in `stream`."""
    context: AbstractContextManager[Any] = _gpu.stream(stream)
    return context


def current_stream(device: torch.device) -> Any:
    """Return the stream of `device` in which work is queued now."""
    return _gpu.current_stream(device)


def new_event(*, timed: bool = False) -> Any:
    """Return an event, which marks a point of the stream it is recorded in.

    Two `timed` events measure the milliseconds between them (`elapsed_time`).
    """
    return _gpu.Event(enable_timing=timed)


def rng_state(device: torch.device) -> torch.Tensor:
    """Return the state of the device's random generator, in main memory."""
    return torch.cuda.get_rng_state(device)


def set_rng_state(state: torch.Tensor, device: torch.device) -> None:
    """Set the state of the device's random generator."""
    torch.cuda.set_rng_state(state, device)


# --- collectives --------------------------------------------------------------------------------


def backend(device: torch.device) -> str:
    """Return the backend of collectives for a model on `device`: NCCL on GPUs, gloo in main memory."""
    return f"cpu:gloo,{KIND}:nccl" if is_gpu(device) else "gloo"


def has_nccl() -> bool:
    """Return True if this build of torch has NCCL."""
    return bool(_distributed.is_nccl_available())


def nccl_group(store: Any, rank: int, size: int) -> Any:
    """Return a process group without a timeout, for a caller that watches the group and aborts it.

    torch's own watchdog would end the whole process instead, so it is switched off for this group.
    """
    options = _distributed.ProcessGroupNCCL.Options()
    options._timeout = _NEVER  # noqa: SLF001 - it has no public name
    with _environment(_NO_WATCHDOG):
        return _distributed.ProcessGroupNCCL(store, rank, size, options)


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    """Set environment variables in the block, where a group is made, and then restore the user's values."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# --- attention ----------------------------------------------------------------------------------


def takes_packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if `packed_attention` works for tensors of `dtype` on `device`; works without a GPU."""
    return is_gpu(device) and dtype in (torch.bfloat16, torch.float16)


def packed_attention(
    query: torch.Tensor,  # [Q, heads, D], sequences one after another
    key: torch.Tensor,  # [K, kv_heads, D]
    value: torch.Tensor,
    query_ends: torch.Tensor,  # [M + 1], int32, cumulative
    key_ends: torch.Tensor,
    longest: tuple[int, int],  # most queries of a sequence, most keys of a sequence
    window: int,  # keys that a token sees at most, itself included; 0 for all
    scale: float | None,
) -> torch.Tensor:
    """Return the attention [Q, heads, D] of packed sequences, causal from the bottom right.

    Calls FlashAttention (arXiv 2307.08691) through `torch.nn.attention.varlen.varlen_attn`. Raises ModelError
    if this version of torch has no such function.
    """
    call, parameters = _varlen_call()
    groups = query.shape[1] // key.shape[1]
    extra: dict[str, Any] = {}
    if groups > 1 and "enable_gqa" in parameters:
        extra["enable_gqa"] = True
    elif groups > 1:
        key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    if "scale" in parameters:
        extra["scale"] = scale
    elif scale is not None:
        # Without the parameter, the call divides by the square root of D.
        query = query * (scale * math.sqrt(query.shape[2]))
    sides = (window - 1 if window else -1, 0)
    result: torch.Tensor = call(
        query, key, value, query_ends, key_ends, *longest, window_size=sides, **extra
    )
    return result


def use_any_length() -> None:
    """Keep `scaled_dot_product_attention` from using cuDNN in this process.

    cuDNN makes a plan for each new shape, and every sampled token has a new one (docs/log.md, 2026-11-27: the
    first GPU).
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


@cache
def _varlen_call() -> tuple[Callable[..., Any], frozenset[str]]:
    """Return torch's packed attention and the names of its parameters, which differ between versions."""
    call: Any = None
    with contextlib.suppress(ImportError):
        from torch.nn.attention.varlen import varlen_attn as call
    parameters = frozenset(inspect.signature(call).parameters if call else ())
    if "window_size" not in parameters:
        raise ModelError(
            f"torch {torch.__version__} has no packed attention on a GPU; install torch 2.11 or later, "
            'or set model.dtype = "float32"'
        )
    return call, parameters
