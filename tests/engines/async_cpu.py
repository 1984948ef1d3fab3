"""Asynchronous scheduling on the CPU build, which turns it off: vLLM's scheduler and runner as on a GPU.

The class Parts of this module is unpickled in each process of vLLM, which imports it and so has what is
installed here: streams and events of CUDA that do nothing, since a CPU's copies are over when they return.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from dart_cli.engines.vllm import plugin


class Parts(plugin.Parts):
    """Ours, from another module."""


class _Done:
    """An event or a stream of work that is over."""

    device = torch.device("cpu")

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def wait_stream(self, _: Any) -> None: ...


for name in ("Event", "Stream", "current_stream"):
    setattr(torch.cuda, name, _Done)
torch.cuda.stream = lambda _stream: contextlib.nullcontext()  # type: ignore[assignment,misc]


def install(set_attribute: Callable[[Any, str, Any], None]) -> None:
    """From now on engines of this process schedule asynchronously."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def checked(cls: type, config: Any) -> None:
        wanted = config.scheduler_config.async_scheduling
        check(cls, config)
        config.scheduler_config.async_scheduling = wanted

    set_attribute(CpuPlatform, "check_and_update_config", classmethod(checked))
    set_attribute(plugin, "Parts", Parts)
