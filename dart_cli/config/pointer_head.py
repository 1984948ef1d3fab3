"""The pointer head of a model folder, without torch: its tokens, its keys in config.json, its names.

TOKENS, ID_KEYS   the three tokens, and where config.json has their ids
pointer_ids       the ids of a config.json; None for a folder without a head
head_parameters   how many numbers a head has
name_of           our name of a tensor that the release of GUI-Actor (arXiv 2506.03143) has otherwise

A folder has a head where its config.json has ID_KEYS, which are the release's own keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bus.errors import ModelError

TOKENS = ("<|pointer_start|>", "<|pointer_pad|>", "<|pointer_end|>")
"""Start is sampled; pad and end follow it. The state of pad is what points."""

ID_KEYS = ("pointer_start_token_id", "pointer_pad_token_id", "pointer_end_token_id")
"""Keys of config.json, in the order of TOKENS."""

PREFIX = "pointer_head."
"""What the names of the head's tensors begin with, in the model and in its files."""

HEADS = 8
"""Attention heads; the width of the model is a multiple of it."""

_RELEASED_PREFIX = "multi_patch_pointer_head."
PREFIXES = (PREFIX, _RELEASED_PREFIX)
"""Of a head's tensors in any file."""
_RELEASED = {
    "self_attention.in_proj_weight": "qkv.weight",
    "self_attention.in_proj_bias": "qkv.bias",
    "self_attention.out_proj.weight": "out.weight",
    "self_attention.out_proj.bias": "out.bias",
    "layer_norm.weight": "norm.weight",
    "layer_norm.bias": "norm.bias",
    "projection_enc.0.weight": "key_in.weight",
    "projection_enc.0.bias": "key_in.bias",
    "projection_enc.2.weight": "key_out.weight",
    "projection_enc.2.bias": "key_out.bias",
    "projection_dec.0.weight": "query_in.weight",
    "projection_dec.0.bias": "query_in.bias",
    "projection_dec.2.weight": "query_out.weight",
    "projection_dec.2.bias": "query_out.bias",
}
"""A head's tensors in the release's files, and here."""


def name_of(name: str) -> str:
    """Our name of the tensor that a file calls `name`; any other tensor's name as it is."""
    inner = _RELEASED.get(name.removeprefix(_RELEASED_PREFIX))
    return f"{PREFIX}{inner}" if inner and name.startswith(_RELEASED_PREFIX) else name


def head_parameters(width: int) -> int:
    """Numbers of a head for a model of `width`. Raises ModelError for a width that no head has."""
    if width % HEADS:
        raise ModelError(
            f"a pointer head needs a hidden_size that is a multiple of {HEADS}, not {width}"
        )
    return 8 * width**2 + 10 * width


def pointer_ids(config: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """The ids of TOKENS in a config.json; None where it has no head. Raises ModelError for a part of them."""
    given = [config.get(key) for key in ID_KEYS]
    if all(value is None for value in given):
        return None
    for key, value in zip(ID_KEYS, given, strict=True):
        if type(value) is not int or value < 0:
            raise ModelError(
                f"{key} must be a token id, got {str(value)[:40]}; a pointer head needs all of "
                f"{', '.join(ID_KEYS)}"
            )
    start, pad, end = given
    if len({start, pad, end}) < len(given):
        raise ModelError(f"{', '.join(ID_KEYS)} must be three tokens, got {start}, {pad}, {end}")
    return start, pad, end  # type: ignore[return-value]  # checked above
