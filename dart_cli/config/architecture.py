"""The tensors that a model's config.json asks for: names and shapes, without torch.

expected_tensors   all of them, by canonical name
canonical          the name that `expected_tensors` has for a tensor of a file

Files name one tensor in several ways (`model.layers.0...`, `model.language_model.layers.0...`,
`language_model.model.layers.0...`); the canonical name is `language_model.layers.0...`,
`visual....`, `lm_head.weight` or `pointer_head....`. A test compares all of this with transformers' own models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from bus.errors import ModelError
from dart_cli.config.pointer_head import PREFIX, head_tensors, name_of, pointer_ids

Shape = tuple[int, ...]

MOST = 10_000  # layers of a model, blocks of its vision tower
_LARGEST = 10**9  # any other size

_OLDER_TEXT = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
_PATCHES = {"in_channels": 3, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
_DEFAULTS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "qwen2_vl": (
        _OLDER_TEXT,
        {**_PATCHES, "depth": 32, "embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4},
    ),
    "qwen2_5_vl": (
        _OLDER_TEXT,
        {
            **_PATCHES,
            "depth": 32,
            "hidden_size": 3584,
            "intermediate_size": 3420,
            "out_hidden_size": 3584,
        },
    ),
    "qwen3_vl": (
        {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 22016,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "attention_bias": False,
        },
        {
            **_PATCHES,
            "patch_size": 16,
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "out_hidden_size": 3584,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": (8, 16, 24),
        },
    ),
}
"""What a config.json means where it leaves a key out: language model, vision tower."""

_TEXT_NAME = re.compile(r"(?:(?:model|language_model)\.)*((?:embed_tokens|layers|norm)\..+)")
_VISION_NAME = re.compile(r"(?:.*\.)?visual\.(.+)")
_HEAD_NAME = re.compile(r"(?:(?:model|language_model)\.)*(lm_head\.weight)")


def canonical(name: str) -> str:
    """The name that `expected_tensors` has for a tensor that a file calls `name`."""
    if found := _VISION_NAME.fullmatch(name):
        return f"visual.{found[1]}"
    if found := _TEXT_NAME.fullmatch(name):
        return f"language_model.{found[1]}"
    found = _HEAD_NAME.fullmatch(name)
    return found[1] if found else name_of(name)


class Sizes:
    """The sizes of one part of a config.json, with the defaults of its model type."""

    def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._values = {key: given.get(key, value) for key, value in defaults.items()}

    def __getitem__(self, key: str) -> int:
        """A size. Raises ModelError where it is none."""
        value = self._values[key]
        most = MOST if key in ("depth", "num_hidden_layers") else _LARGEST
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise ModelError(f"{key} must be a whole number, 1 to {most}, got {str(value)[:40]!r}")
        return value

    def ratio(self, key: str) -> float:
        """A quotient of two sizes. Raises ModelError where it is none."""
        value = self._values[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MOST:
            raise ModelError(f"{key} must be a number up to {MOST}, got {str(value)[:40]!r}")
        return float(value)

    def raw(self, key: str) -> Any:
        """A value that is no size."""
        return self._values[key]


def text_sizes(config: Mapping[str, Any]) -> Sizes:
    """Sizes of the language model: of `text_config`, or of a config.json that has them flat."""
    nested = config.get("text_config")
    given = dict(nested if isinstance(nested, dict) else config)
    if given.get("num_key_value_heads", 1) is None:
        given["num_key_value_heads"] = given.get("num_attention_heads")
    return Sizes(given, _DEFAULTS[config["model_type"]][0])


def vision_sizes(config: Mapping[str, Any]) -> Sizes:
    """Sizes of the vision tower."""
    given = config.get("vision_config")
    return Sizes(given if isinstance(given, dict) else {}, _DEFAULTS[config["model_type"]][1])


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether the head is the input embeddings, so that a folder need not have it.

    transformers reads it of the whole model alone for qwen3_vl, and of either part for the older ones.
    """
    if config["model_type"] == "qwen3_vl":
        return bool(config.get("tie_word_embeddings"))
    nested = config.get("text_config")
    inner = nested.get("tie_word_embeddings") if isinstance(nested, dict) else False
    return bool(config.get("tie_word_embeddings") or inner)


def expected_tensors(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Shape of each tensor by canonical name, of a config.json of one of MODEL_TYPES.

    Raises ModelError where a size is none, or the parts do not fit together.
    """
    kind = config["model_type"]
    text, vision = text_sizes(config), vision_sizes(config)
    inner = {f"language_model.{name}": shape for name, shape in _text(text, kind).items()}
    seen = {f"visual.{name}": shape for name, shape in _VISION[kind](vision).items()}
    found = inner | seen
    if not is_tied(config):
        found["lm_head.weight"] = (text["vocab_size"], text["hidden_size"])
    out = vision["hidden_size" if kind == "qwen2_vl" else "out_hidden_size"]
    if out != text["hidden_size"]:
        raise ModelError(
            f"the vision tower gives vectors of {out} numbers, the language model takes "
            f"{text['hidden_size']}"
        )
    if pointer_ids(config) is not None:
        head = head_tensors(text["hidden_size"])
        found |= {f"{PREFIX}{name}": shape for name, shape in head.items()}
    return found


def _text(size: Sizes, kind: str) -> dict[str, Shape]:
    width, heads = size["hidden_size"], size["num_attention_heads"]
    newer = kind == "qwen3_vl"
    head = size["head_dim"] if newer else width // heads
    queries, keys = heads * head, size["num_key_value_heads"] * head
    layer = {
        **_linear("self_attn.q_proj", width, queries, bias=not newer),
        **_linear("self_attn.k_proj", width, keys, bias=not newer),
        **_linear("self_attn.v_proj", width, keys, bias=not newer),
        **_linear("self_attn.o_proj", queries, width, bias=False),
        **_gated_mlp(width, size["intermediate_size"], bias=False),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
    if newer:
        layer |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
        if size.raw("attention_bias"):
            biased = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": width}
            layer |= {f"self_attn.{name}.bias": (rows,) for name, rows in biased.items()}
    return {
        "embed_tokens.weight": (size["vocab_size"], width),
        **_repeated("layers", size["num_hidden_layers"], layer),
        "norm.weight": (width,),
    }


def _vision_2(size: Sizes) -> dict[str, Shape]:
    width, mlp = size["embed_dim"], int(size["embed_dim"] * size.ratio("mlp_ratio"))
    block = {
        **_norm("norm1", width),
        **_norm("norm2", width),
        **_attention(width),
        **_linear("mlp.fc1", width, mlp),
        **_linear("mlp.fc2", mlp, width),
    }
    merged = width * size["spatial_merge_size"] ** 2
    return {
        **_patch_embedding(size, width),
        **_repeated("blocks", size["depth"], block),
        **_norm("merger.ln_q", width),
        **_linear("merger.mlp.0", merged, merged),
        **_linear("merger.mlp.2", merged, size["hidden_size"]),
    }


def _vision_2_5(size: Sizes) -> dict[str, Shape]:
    width = size["hidden_size"]
    block = {
        "norm1.weight": (width,),
        "norm2.weight": (width,),
        **_attention(width),
        **_gated_mlp(width, size["intermediate_size"], bias=True),
    }
    merged = width * size["spatial_merge_size"] ** 2
    return {
        **_patch_embedding(size, width),
        **_repeated("blocks", size["depth"], block),
        "merger.ln_q.weight": (width,),
        **_linear("merger.mlp.0", merged, merged),
        **_linear("merger.mlp.2", merged, size["out_hidden_size"]),
    }


def _vision_3(size: Sizes) -> dict[str, Shape]:
    width, mlp = size["hidden_size"], size["intermediate_size"]
    block = {
        **_norm("norm1", width),
        **_norm("norm2", width),
        **_attention(width),
        **_linear("mlp.linear_fc1", width, mlp),
        **_linear("mlp.linear_fc2", mlp, width),
    }
    merged = width * size["spatial_merge_size"] ** 2
    projection = {
        **_linear("linear_fc1", merged, merged),
        **_linear("linear_fc2", merged, size["out_hidden_size"]),
    }
    deep = size.raw("deepstack_visual_indexes")
    depth = len(deep) if isinstance(deep, list | tuple) else 0
    return {
        **_patch_embedding(size, width),
        "patch_embed.proj.bias": (width,),
        "pos_embed.weight": (size["num_position_embeddings"], width),
        **_repeated("blocks", size["depth"], block),
        **_norm("merger.norm", width),
        **{f"merger.{name}": shape for name, shape in projection.items()},
        **_repeated("deepstack_merger_list", depth, {**_norm("norm", merged), **projection}),
    }


_VISION = {"qwen2_vl": _vision_2, "qwen2_5_vl": _vision_2_5, "qwen3_vl": _vision_3}


def _linear(name: str, inputs: int, outputs: int, *, bias: bool = True) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{name}.weight": (outputs, inputs)}
    return weight | {f"{name}.bias": (outputs,)} if bias else weight


def _norm(name: str, width: int) -> dict[str, Shape]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _attention(width: int) -> dict[str, Shape]:
    return {**_linear("attn.qkv", width, 3 * width), **_linear("attn.proj", width, width)}


def _gated_mlp(width: int, mlp: int, *, bias: bool) -> dict[str, Shape]:
    return {
        **_linear("mlp.gate_proj", width, mlp, bias=bias),
        **_linear("mlp.up_proj", width, mlp, bias=bias),
        **_linear("mlp.down_proj", mlp, width, bias=bias),
    }


def _patch_embedding(size: Sizes, width: int) -> dict[str, Shape]:
    side = size["patch_size"]
    shape = (width, size["in_channels"], size["temporal_patch_size"], side, side)
    return {"patch_embed.proj.weight": shape}


def _repeated(name: str, times: int, part: Mapping[str, Shape]) -> dict[str, Shape]:
    return {
        f"{name}.{index}.{inner}": shape for index in range(times) for inner, shape in part.items()
    }
