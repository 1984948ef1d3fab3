"""How long a rank computes by itself, without its waits for the others.

OwnForward   the time that a model's layers take in forward passes

Ranks meet in each layer of FSDP2: before it runs, its weights are gathered. A rank that is slow makes all
others wait there, so the times of their forward passes are about the same. What lies between a layer's
gathering and its end is the rank's own.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

_cuda: Any = torch.cuda  # whose events have no types
Moment = Any  # seconds of the monotonic clock, or an event of a stream


class OwnForward:
    """Measures the innermost units of an FSDP2 model, from their gathered weights to their output.

    On a GPU by events of its stream, which wait for the gathering as the layer's work does.
    """

    def __init__(self, root: nn.Module, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._spans: list[tuple[Moment, Moment]] = []
        self._began: dict[nn.Module, Moment] = {}
        for module in root.modules():
            inner = [each for each in module.modules() if isinstance(each, FSDPModule)]
            if inner == [module]:
                # Behind FSDP2's own hook, which gathers; and before the one that frees.
                module.register_forward_pre_hook(self._begin)
                module.register_forward_hook(self._end, prepend=True)

    def taken(self) -> float:
        """Seconds since the last call; waits for the GPU to be done with them."""
        spans, self._spans = self._spans, []
        if self._is_cuda and spans:
            torch.cuda.current_stream().synchronize()
        taken: float = sum(
            begin.elapsed_time(end) / 1000 if self._is_cuda else end - begin for begin, end in spans
        )
        return taken

    def _begin(self, module: nn.Module, _inputs: Any) -> None:
        self._began[module] = self._now()

    def _end(self, module: nn.Module, _inputs: Any, _output: Any) -> None:
        self._spans.append((self._began.pop(module), self._now()))

    def _now(self) -> Moment:
        if not self._is_cuda:
            return time.monotonic()
        event = _cuda.Event(enable_timing=True)
        event.record()
        return event
