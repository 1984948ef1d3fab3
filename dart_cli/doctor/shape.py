"""The sizes of a model that its memory and its work follow from: of a config.json, without torch.

Shape      counts of parameters and the widths of its layers
shape_of   of a config.json of one of MODEL_TYPES
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from dart_cli.config.architecture import expected_tensors, is_tied, text_sizes, vision_sizes
from dart_cli.config.pointer_head import PREFIX


@dataclass(frozen=True)
class Shape:
    """A vision-language model; counts are of numbers, not of bytes."""

    kind: str  # model_type
    layers: int  # of the language model
    width: int  # hidden_size
    queries: int  # all heads of a token together
    keys: int  # all key heads of a token together; the values are as many
    head: int  # numbers of one head
    mlp: int  # intermediate_size
    vocabulary: int
    tied: bool  # the head is the embedding
    normed_heads: bool  # queries and keys are normalised (Qwen3)
    layer: int  # parameters of one layer
    text: int  # parameters of the language model and its output embeddings
    vision: int  # parameters of the vision tower
    pointer: int  # parameters of the pointer head; 0 without one
    vision_blocks: int
    vision_block: int  # parameters of one block
    vision_width: int
    vision_mlp: int
    vision_whole: int  # blocks whose attention sees the whole screen, not a window of it
    merge: int  # patches that become one token
    patch_values: int  # numbers of a patch
    deepstack: int  # layers that get features of their own beside the first

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.text + self.vision + self.pointer

    @property
    def embedding(self) -> int:
        """Parameters of the embedding; of the head as many, the same ones where they are tied."""
        return self.vocabulary * self.width

    @property
    def cached(self) -> int:
        """Numbers of keys and values of a token."""
        return 2 * self.layers * self.keys


def shape_of(tree: Mapping[str, Any]) -> Shape:
    """Of a config.json. Raises ModelError where a size is none."""
    kind = tree["model_type"]
    shapes = {name: prod(shape) for name, shape in expected_tensors(tree).items()}
    text, vision = text_sizes(tree), vision_sizes(tree)
    newer = kind == "qwen3_vl"
    width, heads = text["hidden_size"], text["num_attention_heads"]
    head = text["head_dim"] if newer else width // heads
    sight = sum(count for name, count in shapes.items() if name.startswith("visual."))
    pointer = _starting(shapes, PREFIX)
    blocks = vision["depth"]
    given = tree.get("vision_config")
    given = given if isinstance(given, dict) else {}
    if kind == "qwen2_vl":
        seen_width = vision["embed_dim"]
        seen_mlp = int(seen_width * vision.ratio("mlp_ratio"))
    else:
        seen_width, seen_mlp = vision["hidden_size"], vision["intermediate_size"]
    whole = blocks
    if kind == "qwen2_5_vl":  # the others have no windows
        listed = given.get("fullatt_block_indexes", (7, 15, 23, 31))
        whole = len(listed) if isinstance(listed, list | tuple) else blocks
    deep = vision.raw("deepstack_visual_indexes") if newer else ()
    return Shape(
        kind=kind,
        layers=text["num_hidden_layers"],
        width=width,
        queries=heads * head,
        keys=text["num_key_value_heads"] * head,
        head=head,
        mlp=text["intermediate_size"],
        vocabulary=text["vocab_size"],
        tied=is_tied(tree),
        normed_heads=newer,
        layer=_starting(shapes, "language_model.layers.0."),
        text=sum(shapes.values()) - sight - pointer,
        vision=sight,
        pointer=pointer,
        vision_blocks=blocks,
        vision_block=_starting(shapes, "visual.blocks.0."),
        vision_width=seen_width,
        vision_mlp=seen_mlp,
        vision_whole=whole,
        merge=vision["spatial_merge_size"] ** 2,
        patch_values=vision["in_channels"]
        * vision["temporal_patch_size"]
        * vision["patch_size"] ** 2,
        deepstack=len(deep) if isinstance(deep, list | tuple) else 0,
    )


def _starting(shapes: Mapping[str, int], prefix: str) -> int:
    return sum(count for name, count in shapes.items() if name.startswith(prefix))
