"""The GPU: all that torch cannot carry without one. No other module of dart names a vendor.

    KIND                     what torch and a configuration call it: CUDA, and ROCm under the same name
    is_gpu                   whether a device is one
    is_available, device_count, current_device_index, set_device_index, synchronize, current_stream,
    max_memory_allocated     as in `torch.accelerator`
    is_in_use                whether this process computes on one
    host_bytes, in_pinned    main memory that it copies from and to by itself
    new_stream, in_stream, new_event   what runs beside the current stream, and a moment in a stream
    rng_state, set_rng_state its generator
    backend, nccl_group      collectives between GPUs
    takes_packs, packed_attention   its kernel for packs
    use_any_length           no plan is made for each length of a sequence

The functions of this module are the lines of dart that need a GPU: docs/hardware.md lists them.
`torch.accelerator` would also take GPUs that dart has never met (Apple's).
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
_gpu: Any = torch.cuda  # whose streams and events have no types
_distributed: Any = torch.distributed  # whose type stubs lack what is used here
_NO_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
_NEVER = timedelta(days=365)


def is_gpu(device: torch.device) -> bool:
    """Whether `device` is a GPU; needs none."""
    return device.type == KIND


def is_available() -> bool:
    """Whether torch sees a GPU."""
    return torch.cuda.is_available()


def device_count() -> int:
    """How many GPUs torch sees."""
    return torch.cuda.device_count()


def current_device_index() -> int:
    """Of the GPU that this process computes on by default."""
    return torch.cuda.current_device()


def set_device_index(device: torch.device) -> None:
    """Compute on `device`, which has its number, by default."""
    torch.cuda.set_device(device)


def is_in_use() -> bool:
    """Whether this process has begun to use a GPU."""
    return torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def synchronize(device: torch.device | None = None) -> None:
    """Wait until `device`, by default the current one, has done all that it was given."""
    torch.cuda.synchronize(device)


def max_memory_allocated(device: torch.device) -> int:
    """Return the most bytes that this process's tensors have taken on `device`."""
    return torch.cuda.max_memory_allocated(device)


# --- main memory, streams -----------------------------------------------------------------------


def host_bytes(*shape: int, pinned: bool) -> torch.Tensor:
    """Bytes of main memory; a GPU copies from and to `pinned` ones beside what it computes.

    Torch takes a power of two of these.
    """
    return torch.empty(shape, dtype=torch.uint8, pin_memory=pinned)


def in_pinned(values: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor in pinned memory."""
    return values.pin_memory()


def new_stream(device: torch.device) -> Any:
    """Return a stream of `device`, beside the others."""
    return _gpu.Stream(device)


def in_stream(stream: Any) -> AbstractContextManager[Any]:
    """Inside, what is called is in `stream`."""
    found: AbstractContextManager[Any] = _gpu.stream(stream)
    return found


def current_stream(device: torch.device) -> Any:
    """Return the stream of `device` that calls are in now."""
    return _gpu.current_stream(device)


def new_event(*, timed: bool = False) -> Any:
    """Return a moment of a stream, once it is recorded; between two that are `timed` is `elapsed_time`, ms."""
    return _gpu.Event(enable_timing=timed)


def rng_state(device: torch.device) -> torch.Tensor:
    """Return the state of its generator, in main memory."""
    return torch.cuda.get_rng_state(device)


def set_rng_state(state: torch.Tensor, device: torch.device) -> None:
    """Draw on from `state`."""
    torch.cuda.set_rng_state(state, device)


# --- collectives --------------------------------------------------------------------------------


def backend(device: torch.device) -> str:
    """Of the ranks' collectives, for a model on `device`: NCCL between GPUs, gloo in main memory."""
    return f"cpu:gloo,{KIND}:nccl" if is_gpu(device) else "gloo"


def has_nccl() -> bool:
    """Whether this torch was built with it."""
    return bool(_distributed.is_nccl_available())


def nccl_group(store: Any, rank: int, size: int) -> Any:
    """Return a process group whose calls may block for ever, for a caller that watches and aborts it.

    torch's own watchdog would end the whole process instead, so it is switched off for this group.
    """
    options = _distributed.ProcessGroupNCCL.Options()
    options._timeout = _NEVER  # noqa: SLF001 - its only name
    with _environment(_NO_WATCHDOG):
        return _distributed.ProcessGroupNCCL(store, rank, size, options)


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    """Set variables while a group is made, which reads them then; other groups keep the user's."""
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
    """Whether `packed_attention` is for tensors of `dtype` on `device`; needs no GPU."""
    return is_gpu(device) and dtype in (torch.bfloat16, torch.float16)


def packed_attention(
    query: torch.Tensor,  # [Q, heads, D], sequences one after another
    key: torch.Tensor,  # [K, kv_heads, D]
    value: torch.Tensor,
    query_ends: torch.Tensor,  # [M + 1], int32, cumulative
    key_ends: torch.Tensor,
    longest: tuple[int, int],  # queries and keys of the longest sequence
    window: int,  # keys that a token sees at most, itself included; 0 for all
    scale: float | None,
) -> torch.Tensor:
    """Attention [Q, heads, D], causal from the bottom right: FlashAttention's packed call (arXiv 2307.08691).

    `torch.nn.attention.varlen.varlen_attn`. Raises ModelError where this torch has none.
    """
    call, known = _varlen_call()
    groups = query.shape[1] // key.shape[1]
    extra: dict[str, Any] = {}
    if groups > 1 and "enable_gqa" in known:
        extra["enable_gqa"] = True
    elif groups > 1:
        key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    if "scale" in known:
        extra["scale"] = scale
    elif scale is not None:
        query = query * (scale * math.sqrt(query.shape[2]))  # it divides by this root
    sides = (window - 1 if window else -1, 0)
    result: torch.Tensor = call(
        query, key, value, query_ends, key_ends, *longest, window_size=sides, **extra
    )
    return result


def use_any_length() -> None:
    """Let `scaled_dot_product_attention` do without cuDNN, in this process.

    It makes a plan for each shape that it has not seen, so for each token that is sampled (docs/log.md,
    2026-11-27: the first GPU).
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


@cache
def _varlen_call() -> tuple[Callable[..., Any], frozenset[str]]:
    """Return the packed attention of torch, and the names of its parameters, which differ by version."""
    call: Any = None
    with contextlib.suppress(ImportError):
        from torch.nn.attention.varlen import varlen_attn as call
    known = frozenset(inspect.signature(call).parameters if call else ())
    if "window_size" not in known:
        raise ModelError(
            f"torch {torch.__version__} has no packed attention on a GPU; install torch 2.11 or later, "
            'or set model.dtype = "float32"'
        )
    return call, known
