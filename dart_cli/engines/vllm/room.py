"""How the memory of a GPU is divided that vLLM serves on; without torch and vLLM, so that doctor plans with it too.

    VllmRoom      bytes of weights, of what passes, of features of screens, of keys and values
    divide        the room of a model on a GPU
    divide_on_cpu the same in main memory
    batch_tokens  tokens of one forward pass
    kept_tokens   tokens of screens whose features have room

vLLM measures what passes in a dry run, which holds the features of one screen (`profile_run`). Features that are
kept for longer are not measured, so the engine lowers `gpu_memory_utilization` by their bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from dart_cli.config.architecture import Shape
from dart_cli.config.schema import VllmConfig

BATCH_TOKENS = 8192
"""vLLM's default for a server on a GPU of 80 GB; an engine that is embedded gets 2,048, with which a prompt of five
1080p screens takes nine passes in place of three. More would gain little: 8,192 tokens fill a GPU."""
PASSING = 4_000_000_000
"""Bytes of the context, CUDA graphs and the vision tower's activations over one screen: an assumption."""
FEATURE_SHARE = 6
"""Features of screens take at most one part in so many of the room that the longest sequence leaves: what they save,
the vision tower's pass over a screen that is shown again, is worth less than a prompt that does not wait."""


CPU_KV_MB = 512
"""MiB of keys and values on a CPU, and room for features of screens beside them."""
LEAST_CPU_BATCH = 4096
"""Tokens of one forward pass on a CPU, where no sequence is longer: prompts are not cut into chunks there."""


@dataclass(frozen=True)
class VllmRoom:
    """Bytes of each GPU of an engine, or of main memory."""

    weights: int
    passing: int
    features: int  # of screens that are shown again
    cache: int  # for keys and values
    kept: int  # tokens of screens whose features are kept

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.passing + self.features + self.cache


def divide(
    config: VllmConfig, shape: Shape, *, wide: int, memory: int, length: int, shown: int
) -> VllmRoom:
    """Return the room of a model on GPUs of `memory` bytes.

    Its numbers take `wide` bytes, its longest sequence has `length` tokens, the screens in play have `shown`.
    Each GPU of a shared model has all features.
    """
    share = config.tensor_parallel
    weights = wide * shape.parameters // share
    batch = batch_tokens(config, length)
    passing = PASSING + batch * wide * (4 * shape.width + 2 * shape.mlp // share)
    cache = _number(config, "kv_cache_memory_bytes")
    if cache:  # in place of gpu_memory_utilization
        room = memory - weights - passing - cache
        kept = kept_tokens(shape, wide, room, shown)
        return VllmRoom(weights, passing, kept * _feature(shape, wide), cache, kept)
    room = max(0, int(config.gpu_memory_utilization * memory) - weights - passing)
    kept = kept_tokens(shape, wide, room - length * wide * shape.cached // share, shown)
    features = kept * _feature(shape, wide)
    return VllmRoom(weights, passing, features, room - features, kept)


def divide_on_cpu(
    config: VllmConfig, shape: Shape, *, wide: int, length: int, shown: int
) -> VllmRoom:
    """Return the room of a model in main memory, of which dart has vLLM take as much as it needs. See `divide`."""
    batch = _number(config, "max_num_batched_tokens") or max(length, LEAST_CPU_BATCH)
    cache = _number(config, "kv_cache_memory_bytes") or CPU_KV_MB << 20
    kept = kept_tokens(shape, wide, CPU_KV_MB << 20, shown)
    passing = batch * wide * (4 * shape.width + 2 * shape.mlp)
    return VllmRoom(wide * shape.parameters, passing, kept * _feature(shape, wide), cache, kept)


def batch_tokens(config: VllmConfig, length: int, max_batch: int = 1) -> int:
    """Return the tokens of one pass: a whole sequence of `length` where vLLM may not cut prompts into chunks."""
    whole = config.options.get("enable_chunked_prefill") is False
    given = _number(config, "max_num_batched_tokens")
    return given or max(BATCH_TOKENS, max_batch, length if whole else 0)


def kept_tokens(shape: Shape, wide: int, room: int, shown: int) -> int:
    """Return the tokens of the screens in play, `shown`, whose features are kept where `room` bytes are left."""
    return min(shown, max(0, room) // FEATURE_SHARE // _feature(shape, wide))


def _feature(shape: Shape, wide: int) -> int:
    """Return the bytes of one token of a screen: its vector, and those of deeper layers beside it (Qwen3-VL)."""
    return wide * shape.width * (1 + shape.deepstack)


def _number(config: VllmConfig, name: str) -> int:
    """Return a number of `vllm.options`; 0 for none. A value that is no number is vLLM's to refuse."""
    value = config.options.get(name)
    return value if isinstance(value, int) else 0
