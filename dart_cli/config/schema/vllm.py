"""The engine vLLM: section [vllm]."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from dart_cli.config.schema.base import MANY, Section


class VllmConfig(Section):
    """The engine of `rollout.engine` = "vllm" (docs/engines.md)."""

    tensor_parallel: int = Field(default=1, ge=1, le=1024)
    """Number of GPUs that share one model. `dart rollout` takes the first ones that it sees."""

    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of each GPU's memory for weights, activations, features of screens, and keys and values
    together."""

    max_model_len: int = Field(default=0, ge=0, le=16 * MANY)
    """Largest length of prompt and completion together, tokens. 0 allows as many as the model has positions.
    A lower number leaves room for more requests."""

    lora: Literal["adapters", "merged"] = "adapters"
    """With `model.lora`: how a new version is served. `adapters`: beside the weights; a request ends under
    the version with which it began, and no request has to wait. `merged`: added to the weights."""

    options: dict[str, Any] = {}
    """Further arguments of the engine, by vLLM's names, e.g. { enforce_eager = true } to start faster and
    serve slower, or { kv_cache_memory_bytes = 8589934592 } in place of `gpu_memory_utilization`."""
