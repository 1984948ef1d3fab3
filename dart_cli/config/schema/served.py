"""What samples, and how new weights reach it: [rollout], [vllm], [weights]."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from bus.temperatures import MAX_TEMPERATURE, MIN_TEMPERATURE
from dart_cli.config.schema.base import (
    MANY,
    MOST_SLOTS,
    MOST_TOKENS,
    Count,
    Device,
    Folder,
    Positive,
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


PERMIT_S = 120.0
"""After so long a worker's permit to take weights is given to the next one: it hangs, or its disk does."""
WHOLE_EVERY = 8
"""Of `nccl` and `gloo` one version in so many is written whole, and so is the last: no worker reads files while
there is a trainer, so writing more would only take from the disk."""


class WeightsConfig(Section):
    """How new weights reach the rollout workers, a few at a time while the others serve: docs/weights.md."""

    channel: Literal["file", "nccl", "gloo"] = "file"
    """`file`: each worker reads the files of a version. `nccl`, `gloo`: the trainer broadcasts what the
    workers lack to all of them at once, between GPUs or over TCP; on several hosts too."""

    directory: Folder | None = None
    """Where weight sets are written; unset for `weights/` of the run, with the tensors in shared
    memory, where it has room, until the trainer ends."""

    publish_every: Positive = 1
    """Updates between publications."""

    keep: int = Field(default=3, ge=2, le=MOST_SLOTS)
    """Newest weight sets kept."""

    concurrent: Count = 1
    """Workers that take weights at once; 0 for all."""
