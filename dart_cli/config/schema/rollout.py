"""The rollout workers: section [rollout]."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from bus.temperatures import MAX_TEMPERATURE, MIN_TEMPERATURE
from dart_cli.config.schema.base import (
    MOST_SLOTS,
    MOST_TOKENS,
    Device,
    PositiveSeconds,
    Section,
    Threads,
    one_of,
)

MODEL_ENGINES = ("transformers", "vllm")
"""Values of `rollout.engine` that run the policy's model; the others answer without one."""
KV_CACHE_MB = 4096
"""`transformers`: MiB for the keys and values of the requests decoded together, their longest counted for each; a
request that does not fit waits. A single one is served, however large."""
PREFIX_CACHE_MB = 1024
"""`transformers`: MiB beside them for those of earlier requests, with which a request that begins like one of them is
not computed from its start."""
ENGINES = (*MODEL_ENGINES, "scripted")


class RolloutConfig(Section):
    """One rollout worker: an engine and how it samples."""

    engine: Annotated[str, one_of(ENGINES, "my_package.my_module:MyEngine")] = "transformers"
    """What runs the model: `vllm` on GPUs, see section [vllm] and docs/engines.md; `transformers`
    anywhere. `scripted` answers at random without a model, to try the processes. Your own as `my_package.my_module:MyEngine`: called
    with the configuration, it returns a `Model` (dart_cli/engines/base.py)."""

    temperature: float = Field(default=1.0, ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE)
    """Sampling temperature; the trainer divides logits by the same."""

    max_tokens: int = Field(default=16, ge=1, le=MOST_TOKENS)
    """Longest completion, tokens."""

    max_batch: int = Field(default=32, ge=1, le=MOST_SLOTS)
    """Requests decoded together."""

    device: Device = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""

    threads: Threads = 1
    """CPU threads of torch; with more threads than free cores it stalls."""

    deadline_s: PositiveSeconds = 60.0
    """Seconds an environment waits for a completion, over all workers that it can ask."""
