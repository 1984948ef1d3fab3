"""The plan of how vLLM's memory is divided on a GPU. `dart doctor` uses it too, without torch and vLLM.

    VllmRoom        the bytes of weights, of a forward pass, of features of screens, and of keys and values
    divide          plans the memory of a GPU
    divide_on_cpu   plans main memory
    batch_tokens    returns the tokens of one forward pass
    feature_tokens  returns how many tokens of screens have room for their features

vLLM measures the memory of a forward pass in a dry run, which holds the features of one screen
(`profile_run`). Features that are kept longer are not measured, so the engine lowers `gpu_memory_utilization`
by their bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from dart_cli.config.architecture import Shape
from dart_cli.config.schema import VllmConfig

BATCH_TOKENS = 8192
"""Tokens of one forward pass, vLLM's default for a server on a GPU of 80 GB. An embedded engine would get
2,048, with which a prompt of five 1080p screens takes nine passes instead of three. More than 8,192 tokens
would gain little, because so many already fill a GPU."""
PASSING = 4_000_000_000
"""Bytes of the context, of CUDA graphs, and of the vision tower's activations over one screen. The number is
assumed, not measured."""
FEATURE_SHARE = 6
"""Features of screens take at most 1/FEATURE_SHARE of the room that the longest sequence leaves. They save
the vision tower's pass over a screen that is shown again, which is worth less than room for one more
prompt."""


CPU_KV_MB = 512
"""MiB of keys and values on a CPU. The room for features of screens beside them has the same size."""
LEAST_CPU_BATCH = 4096
"""Least tokens of one forward pass on a CPU, where prompts are not cut into chunks."""


@dataclass(frozen=True)
class VllmRoom:
    """The memory of each GPU of an engine, or its main memory, in bytes."""

    weights: int
    passing: int  # for a forward pass
    features: int  # of screens that are shown again
    cache: int  # for keys and values, and states of recurrent layers
    feature_tokens: int  # tokens of screens whose features are kept: a count, not bytes

    @property
    def total(self) -> int:
        """The bytes of all parts together."""
        return self.weights + self.passing + self.features + self.cache


def divide(
    config: VllmConfig, shape: Shape, *, wide: int, memory: int, length: int, screen_tokens: int
) -> VllmRoom:
    """Return the plan for a model on GPUs of `memory` bytes.

    A number takes `wide` bytes, the longest sequence has `length` tokens, and the screens in play have
    `screen_tokens` tokens. If several GPUs share a model, each of them holds all features.
    """
    share = config.tensor_parallel
    weights = wide * shape.parameters // share
    batch = batch_tokens(config, length)
    passing = PASSING + batch * wide * (4 * shape.width + 2 * shape.mlp // share)
    cache = _number(config, "kv_cache_memory_bytes")
    if cache:  # replaces gpu_memory_utilization
        room = memory - weights - passing - cache
        tokens = feature_tokens(shape, wide, room, screen_tokens)
        return VllmRoom(weights, passing, tokens * _feature(shape, wide), cache, tokens)
    room = max(0, int(config.gpu_memory_utilization * memory) - weights - passing)
    longest = length * wide * shape.cached + shape.state_bytes(wide)
    beside_longest = room - longest // share
    tokens = feature_tokens(shape, wide, beside_longest, screen_tokens)
    features = tokens * _feature(shape, wide)
    return VllmRoom(weights, passing, features, room - features, tokens)


def divide_on_cpu(
    config: VllmConfig, shape: Shape, *, wide: int, length: int, screen_tokens: int
) -> VllmRoom:
    """Return the plan for a model in main memory, where vLLM may take as much as it needs; see `divide`."""
    batch = _number(config, "max_num_batched_tokens") or max(length, LEAST_CPU_BATCH)
    cache = _number(config, "kv_cache_memory_bytes") or CPU_KV_MB << 20
    tokens = feature_tokens(shape, wide, CPU_KV_MB << 20, screen_tokens)
    passing = batch * wide * (4 * shape.width + 2 * shape.mlp)
    features = tokens * _feature(shape, wide)
    return VllmRoom(wide * shape.parameters, passing, features, cache, tokens)


def batch_tokens(config: VllmConfig, length: int, max_batch: int = 1) -> int:
    """Return the tokens of one forward pass.

    If vLLM may not cut prompts into chunks, a pass has room for a whole sequence of `length` tokens.
    """
    is_whole = config.options.get("enable_chunked_prefill") is False
    configured = _number(config, "max_num_batched_tokens")
    return configured or max(BATCH_TOKENS, max_batch, length if is_whole else 0)


def feature_tokens(shape: Shape, wide: int, room: int, screen_tokens: int) -> int:
    """Return how many of `screen_tokens` have room for their features if `room` bytes are left."""
    return min(screen_tokens, max(0, room) // FEATURE_SHARE // _feature(shape, wide))


def _feature(shape: Shape, wide: int) -> int:
    """Return the bytes of one token's features: its vector, and in Qwen3-VL one for each deeper layer."""
    return wide * shape.width * (1 + shape.deepstack)


def _number(config: VllmConfig, name: str) -> int:
    """Return the number `name` of `vllm.options`; 0 if it is not set or no integer, which vLLM refuses."""
    value = config.options.get(name)
    return value if isinstance(value, int) else 0
