"""The engine vLLM: section [vllm]."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from dart_cli.config.schema.base import (
    MANY,
    Section,
)


class VllmConfig(Section):
    """The engine of `rollout.engine = "vllm"`; docs/engines.md explains its keys."""

    tensor_parallel: int = Field(default=1, ge=1, le=1024)
    """GPUs that share one model; `dart rollout` takes the first ones that it sees."""

    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of each GPU's memory for weights, activations, features of screens and keys and values together."""

    max_model_len: int = Field(default=0, ge=0, le=16 * MANY)
    """Most tokens of prompt and completion together; 0 for as many as the model has positions. A
    lower number leaves room for more requests."""

    lora: Literal["adapters", "merged"] = "adapters"
    """With `model.lora`: serve `adapters` beside the weights, so that a request ends under the version
    that it began with and nothing halts; or add each version to the weights (`merged`)."""

    options: dict[str, Any] = {}
    """Further engine arguments by vLLM's own names, e.g. { enforce_eager = true } to start faster and serve
    slower, { kv_cache_memory_bytes = 8589934592 } in place of `gpu_memory_utilization`."""
