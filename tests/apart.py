"""A pretended device: its tensors are in main memory, and only a copy may mix them with other tensors.

    KIND     torch's name of the device
    Apart    a tensor on the device
    pretend  makes the device the GPU of dart_cli/hardware/accelerator.py

Operations on it compute the CPU's numbers with the CPU's kernels, but under a GPU's rules: an operation on
tensors of two devices raises an error, and so does `numpy()`; an index or a number without dimensions may
be in main memory. So tests find code that names a wrong device, or none, with real numbers, on any machine.
Streams and events do nothing, since operations run in order. A GPU's speed, memory, kernels and NCCL are
not pretended.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.library import Library
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers import PreTrainedModel

from dart_cli.hardware import accelerator

KIND = "apart"
_ATEN = torch.ops.aten
_COPIES = {_ATEN._to_copy.default, _ATEN.copy_.default}
_TAKES_INDICES_OF_THE_CPU = {_ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default}


class Apart(torch.Tensor):
    """A tensor of the pretended device; `cpu_tensor` has its numbers."""

    cpu_tensor: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, cpu_tensor: torch.Tensor) -> Self:
        """Return a tensor on the device with the numbers of `cpu_tensor`."""
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls,
            cpu_tensor.size(),
            strides=cpu_tensor.stride(),
            storage_offset=cpu_tensor.storage_offset(),
            dtype=cpu_tensor.dtype,
            device=torch.device(KIND, 0),
        )

    def __init__(self, cpu_tensor: torch.Tensor) -> None:
        self.cpu_tensor = cpu_tensor

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Apart({self.cpu_tensor})"

    def tolist(self) -> Any:
        """Return the numbers."""
        return self.cpu_tensor.tolist()

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        _types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        parts = func.decompose(*args, **(kwargs or {}))  # as without inference mode
        if parts is not NotImplemented:
            return parts
        return _compute(func, args, kwargs or {})


def _compute(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Compute one operation of torch. Raises RuntimeError for tensors of two devices."""
    apart: dict[int, Apart] = {}  # by the id of what it holds
    here: list[torch.Tensor] = []
    cpu_args = tuple(_on_cpu(value, apart, here) for value in args)
    cpu_kwargs = {name: _on_cpu(value, apart, here) for name, value in kwargs.items()}
    device = cpu_kwargs.get("device")
    if device is not None:
        is_apart = torch.device(device).type == KIND
        cpu_kwargs["device"] = torch.device("cpu")
    elif func in _COPIES:
        is_apart = isinstance(args[0], Apart)
    else:
        is_apart = bool(apart)
        if is_apart and here and func not in _TAKES_INDICES_OF_THE_CPU:
            shapes = [tuple(tensor.shape) for tensor in here if tensor.dim()]
            if shapes:
                raise RuntimeError(
                    f"{func}: some tensors are on {KIND}:0, others, {shapes}, on the cpu"
                )
    cpu_kwargs.pop("pin_memory", None)
    result = func(*cpu_args, **cpu_kwargs)
    if not is_apart:
        return result
    result = _to_device(result, apart)
    if func in _COPIES or not apart or not _shares_memory(func):
        return result
    return return_and_correct_aliasing(func, args, dict(kwargs), result)


def _on_cpu(value: Any, apart: dict[int, Apart], here: list[torch.Tensor]) -> Any:
    """Return an argument with CPU tensors in place of Apart ones.

    Apart tensors are added to `apart`, tensors in main memory to `here`.
    """
    if isinstance(value, Apart):
        apart[id(value.cpu_tensor)] = value
        return value.cpu_tensor
    if isinstance(value, torch.Tensor):
        here.append(value)
    elif isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return type(value)([_on_cpu(item, apart, here) for item in value])
    return value


def _to_device(value: Any, apart: Mapping[int, Apart]) -> Any:
    """Return a result with its tensors on the device; an argument that is returned stays the same object."""
    if isinstance(value, torch.Tensor):
        argument = apart.get(id(value))
        return Apart(value) if argument is None else argument
    if isinstance(value, list | tuple):
        return type(value)([_to_device(item, apart) for item in value])
    return value


@functools.cache
def _shares_memory(func: Any) -> bool:
    """Return True if a result of the operation is an argument or a view of one."""
    return any(result.alias_info is not None for result in func._schema.returns)


class _Stream:
    """A stream or an event. Its work is always finished."""

    def __init__(self, *_: object, **__: object) -> None:
        """Accept any priority, timed or not."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*_: object) -> Any:
            return {"query": True, "elapsed_time": 0.0, "record_event": self}.get(name)

        return call


_setup_privateuseone_for_python_backend(
    KIND,
    types.SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda _seed: None,
        get_amp_supported_dtype=lambda: [torch.bfloat16],
        Stream=_Stream,
        Event=_Stream,
        stream=lambda _stream: contextlib.nullcontext(),
        current_stream=lambda _device=None: _Stream(),
        synchronize=lambda _device=None: None,
    ),
)
_device_constructors()  # the functions that `with torch.device(...)` is for, before any is replaced
_FACTORIES, _COPY = Library("_", "IMPL"), Library("aten", "IMPL")
_FACTORIES.fallback(lambda func, *args, **kwargs: _compute(func, args, kwargs), "PrivateUse1")
_COPY.impl("copy_", lambda *args: _compute(_ATEN.copy_.default, args, {}), "PrivateUse1")


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_ends: torch.Tensor,
    key_ends: torch.Tensor,
    longest: tuple[int, int],
    window: int,
    scale: float | None,
) -> torch.Tensor:
    """Compute `accelerator.packed_attention`, sequence by sequence and in float32."""
    scale = 1 / math.sqrt(query.shape[2]) if scale is None else scale
    groups = query.shape[1] // key.shape[1]
    key, value = (heads.repeat_interleave(groups, dim=1).float() for heads in (key, value))
    parts = []
    queries, keys = query_ends.tolist(), key_ends.tolist()
    assert longest[0] >= max(b - a for a, b in itertools.pairwise(queries))
    for sequence in range(len(queries) - 1):
        q = query[queries[sequence] : queries[sequence + 1]].float()
        k, v = (heads[keys[sequence] : keys[sequence + 1]] for heads in (key, value))
        behind = torch.arange(len(q), device=q.device)[:, None] + len(k) - len(q)
        behind = behind - torch.arange(len(k), device=q.device)
        is_hidden = (behind < 0) | (behind >= window if window else behind < 0)
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        weights = scores.masked_fill(is_hidden, float("-inf")).softmax(-1)
        parts.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(parts).to(query.dtype)


def pretend(patch: pytest.MonkeyPatch) -> None:
    """Make the pretended device the GPU of this process until the test ends."""
    stands_for: dict[str, Any] = {
        "KIND": KIND,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device_index": lambda: 0,
        "set_device_index": lambda _device: None,
        "is_in_use": lambda: True,
        "synchronize": lambda _device=None: None,
        "max_memory_allocated": lambda _device: 0,
        "host_bytes": lambda *shape, pinned: torch.empty(shape, dtype=torch.uint8),
        "in_pinned": lambda values: values,
        "new_stream": lambda _device: _Stream(),
        "in_stream": lambda _stream: contextlib.nullcontext(),
        "current_stream": lambda _device: _Stream(),
        "new_event": lambda **_: _Stream(),
        "backend": lambda _device: f"cpu:gloo,{KIND}:gloo",
        "rng_state": lambda _device: torch.get_rng_state(),
        "set_rng_state": lambda state, _device: torch.set_rng_state(state),
        "packed_attention": packed_attention,
    }
    for name, value in stands_for.items():
        patch.setattr(accelerator, name, value)
    patch.setattr(torch.accelerator, "current_stream", lambda _device=None: _Stream())  # FSDP2 asks
    patch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    patch.setattr(torch.Tensor, "is_pinned", lambda _self: True)
    patch.setattr(PreTrainedModel, "to", _with_ties(PreTrainedModel.to))
    # Gathered weights have no storage that FSDP2 could allocate or free.
    for name in ("alloc_storage", "free_storage"):
        patch.setattr(_fsdp_param, name, lambda _tensor: None)
    for name in ("arange", "linspace", "eye", "randperm"):  # torch makes these by resizing
        patch.setattr(torch, name, _making_on_device(getattr(torch, name)))


def _with_ties(move: Callable[..., Any]) -> Callable[..., Any]:
    """Return `move` with tied weights tied again: torch makes new parameters for a tensor subclass."""

    def move_and_tie(model: Any, *args: Any, **kwargs: Any) -> Any:
        result = move(model, *args, **kwargs)
        result.tie_weights()
        return result

    return move_and_tie


def _making_on_device(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a function that makes a tensor in main memory, then copies it to the device."""

    def make_and_copy(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        here = make(*args, **kwargs)
        return here if device is None else here.to(device)

    return make_and_copy
