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
"""Values of `rollout.engine` that run the policy's model."""

KV_CACHE_MB = 4096
"""Engine `transformers`: MiB for the keys, values and recurrent states of the requests decoded together. Each request
counts with its greatest length, and waits while it does not fit. A request that is alone is served, however
large it is."""

PREFIX_CACHE_MB = 1024
"""Engine `transformers`: MiB for the keys, values and recurrent states of earlier requests. One that begins like one of
them is not computed from its start."""

ENGINES = (*MODEL_ENGINES, "scripted")


class RolloutConfig(Section):
    """One rollout worker: its engine, and how it samples."""

    engine: Annotated[str, one_of(ENGINES, "my_package.my_module:MyEngine")] = "transformers"
    """What runs the model: `vllm` on GPUs (section [vllm], docs/engines.md), or `transformers` anywhere.
    `scripted` answers at random without a model, to try the processes. Your own is
    `my_package.my_module:MyEngine`: it is called with the configuration and returns a `Model`
    (dart_cli/engines/base.py)."""

    temperature: float = Field(default=1.0, ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE)
    """Sampling temperature. The trainer divides logits by the same number."""

    max_tokens: int = Field(default=16, ge=1, le=MOST_TOKENS)
    """Largest length of a completion, tokens."""

    max_batch: int = Field(default=32, ge=1, le=MOST_SLOTS)
    """Largest number of requests that are decoded together."""

    device: Device = "auto"
    """Device of the engine: `auto`, `cpu`, `cuda` or `cuda:N`."""

    threads: Threads = 1
    """Number of CPU threads of torch. More threads than free cores make it much slower."""

    deadline_s: PositiveSeconds = 60.0
    """Seconds that an environment waits for a completion, over all workers that it can ask."""
