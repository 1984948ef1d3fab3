"""How much memory a run's model takes, and whether this host has it: an estimate.

needs        weights, optimizer and activations of the trainer, weights and cache of a rollout worker
judge_needs  each process against its GPU, or all of them against the host's memory

From config.json, the preprocessor and the configuration alone. Weights, gradients and optimizer are
exact (docs/objective.md); activations are those that the backward pass keeps without checkpointing, by
a formula that was fitted to small language models on a CPU and is used for vision towers, too; what a
GPU's kernels and allocator take is not in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from dart_cli.config.architecture import Sizes, expected_tensors, text_sizes, vision_sizes
from dart_cli.config.model_files import read_json, screens
from dart_cli.config.models import model_folder
from dart_cli.config.schema import MODEL_ENGINES, Config
from dart_cli.doctor.findings import Finding, error, ok, warning
from dart_cli.policy.history import history_of

GIB = 2**30
MIB = 2**20

WIDTH = {"float32": 4, "bfloat16": 2}
"""Bytes of a number of `model.dtype`."""

_OPTIMIZER = {"float32": 12, "bfloat16": 16}
"""Bytes of gradient, moments and master weight of a trained parameter."""
_KEPT = {"float32": (45, 16), "bfloat16": (29, 8)}
"""Bytes that a layer keeps of a token for the backward pass: of each number of its width, and of its MLP."""
_LOGITS = 24  # bytes of each number of a distribution: logits, masked, scaled, log, and gradients
_TEXT = 512  # tokens of instruction, template and structure
_PAST_TURN = 100  # tokens of a past completion, as most are shorter than the longest
_SCREEN = (1920, 1080)  # pixels, where the suite's options name no size


@dataclass(frozen=True)
class Need:
    """Bytes that one process takes."""

    process: str
    fixed: int  # known: weights, gradients, optimizer, configured cache
    estimated: int
    parts: str  # what it is made of

    @property
    def total(self) -> int:
        """All of it."""
        return self.fixed + self.estimated


def needs(config: Config) -> list[Need]:
    """Of the trainer and of one rollout worker, where they load the model.

    `model.path` must be a folder without a problem (config/models.py).
    """
    folder = model_folder(config.model.path)
    tree = read_json(folder, "config.json")
    shapes = expected_tensors(tree)
    sight = sum(prod(shape) for name, shape in shapes.items() if name.startswith("visual."))
    count = sum(prod(shape) for shape in shapes.values())
    width, height = _screen(config)
    resize = screens(folder)
    shown = min(max(width * height, resize.min_pixels), resize.max_pixels)
    image = max(1, round(shown / resize.factor**2))
    found = []
    if config.train.learner == "torch":
        prompt = f"{history_of(config.policy).longest_images} screens of {width}x{height}"
        found.append(_trainer(config, tree, count, sight, image, prompt))
    if config.rollout.engine in MODEL_ENGINES:
        found.append(_rollout(config, tree, count, image))
    return found


def judge_needs(
    found: Sequence[Need], rollouts: int, gpus: Sequence[int], host: int | None, *, on_cpu: bool
) -> Iterator[Finding]:
    """`gpus` are bytes of each GPU, `host` free bytes of main memory (None: unknown).

    A GPU holds one process; on a CPU the trainer and all `rollouts` share the host.
    """
    for need in found:
        yield ok(
            "memory need", f"{need.process}: about {_gib(need.total)} ({need.parts}), an estimate"
        )
    if gpus and not on_cpu:
        for need in found:
            yield _judge(need.process, need, min(gpus), "its GPU")
    elif on_cpu and host is not None and found:
        many = [need for need in found for _ in range(rollouts if need.process != "train" else 1)]
        together = Need(
            "all on this host",
            sum(need.fixed for need in many),
            sum(need.estimated for need in many),
            "",
        )
        yield _judge(together.process, together, host, "free memory")


def _judge(process: str, need: Need, room: int, where: str) -> Finding:
    text = f"{process} needs about {_gib(need.total)}, {where} has {_gib(room)}"
    cure = (
        "train.micro_batch, policy.history_images, rollout.max_tokens, rollout.kv_cache_mb or "
        "rollout.prefix_cache_mb lower, "
        "model.freeze_vision, or a smaller model"
    )
    if need.fixed > room:
        return error("memory need", f"no-go: {text}", cure)
    if need.total > room:
        return warning("memory need", f"likely no-go: {text}", cure)
    return ok("memory need", f"go: {text}")


def _trainer(
    config: Config, tree: Mapping[str, Any], count: int, sight: int, image: int, prompt: str
) -> Need:
    dtype = config.model.dtype
    trained = count - sight if config.model.freeze_vision else count
    copies = 2 if config.train.kl_beta else 1  # the reference of the KL
    weights, optimizer = copies * count * WIDTH[dtype], trained * _OPTIMIZER[dtype]
    samples = config.train.micro_batch
    images = history_of(config.policy).longest_images * image
    tokens = images + _words(config)
    text, vision = text_sizes(tree), vision_sizes(tree)
    kept = samples * tokens * _layer(text, dtype) * text["num_hidden_layers"]
    if not config.model.freeze_vision:
        patches = samples * images * vision["spatial_merge_size"] ** 2
        kept += patches * _vision_layer(tree, vision, dtype) * vision["depth"]
    kept += samples * config.rollout.max_tokens * text["vocab_size"] * _LOGITS
    parts = (
        f"weights {_gib(weights)}{', the KL reference included' if copies > 1 else ''}, gradients and "
        f"optimizer {_gib(optimizer)}, activations {_gib(kept)} of train.micro_batch = {samples} x "
        f"{tokens} tokens with {prompt}"
    )
    return Need("train", weights + optimizer, kept, parts)


def _rollout(config: Config, tree: Mapping[str, Any], count: int, image: int) -> Need:
    dtype, text = config.model.dtype, text_sizes(tree)
    weights = count * WIDTH[dtype]
    tokens = history_of(config.policy).longest_images * image + _words(config)
    passing = tokens * _layer(text, dtype)  # one layer of one prompt at a time
    if config.rollout.engine == "vllm":
        cache = config.vllm.kv_cache_mb * MIB or tokens * _cached(tree, text, dtype)
        what = "keys and values of one prompt" if not config.vllm.kv_cache_mb else "cache"
    else:
        cache = (config.rollout.kv_cache_mb + config.rollout.prefix_cache_mb) * MIB
        what = "rollout.kv_cache_mb and prefix_cache_mb"
    share = config.vllm.tensor_parallel if config.rollout.engine == "vllm" else 1
    parts = f"weights {_gib(weights)}, {what} {_gib(cache)}, a forward pass {_gib(passing)}"
    if share > 1:
        parts += f"; on each of {share} GPUs that share"
    return Need("rollout", (weights + cache) // share, passing, parts)


def _words(config: Config) -> int:
    """Tokens of text in a prompt with its completion, the longest."""
    longest = config.rollout.max_tokens
    return _TEXT + history_of(config.policy).longest_turns * min(longest, _PAST_TURN) + longest


def _layer(text: Sizes, dtype: str) -> int:
    """Bytes that a layer of the language model keeps of a token."""
    of_width, of_mlp = _KEPT[dtype]
    return text["hidden_size"] * of_width + text["intermediate_size"] * of_mlp


def _vision_layer(tree: Mapping[str, Any], vision: Sizes, dtype: str) -> int:
    of_width, of_mlp = _KEPT[dtype]
    if tree["model_type"] == "qwen2_vl":
        width = vision["embed_dim"]
        return int(width * (of_width + of_mlp * vision.ratio("mlp_ratio")))
    return vision["hidden_size"] * of_width + vision["intermediate_size"] * of_mlp


def _cached(tree: Mapping[str, Any], text: Sizes, dtype: str) -> int:
    """Bytes of keys and values of a token."""
    newer = tree["model_type"] == "qwen3_vl"
    head = text["head_dim"] if newer else text["hidden_size"] // text["num_attention_heads"]
    heads = text["num_key_value_heads"]
    return 2 * text["num_hidden_layers"] * heads * head * WIDTH[dtype]


def _screen(config: Config) -> tuple[int, int]:
    """Width and height of the suite's screens, where its options name them."""
    width, _, height = str(config.env.options.get("size", "")).partition("x")
    if width.isdecimal() and height.isdecimal():
        return int(width), int(height)
    return _SCREEN


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"
