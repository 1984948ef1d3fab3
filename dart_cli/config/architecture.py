"""The sizes of a model, read from its config.json; no torch, no weights.

Shape            numbers of parameters, and the widths from which memory and work follow
DeltaNet         the layers of a Shape that have a recurrent state in place of keys and values
Experts          the MLPs of a mixture of experts
shape_of         the shape in a config.json of one of MODEL_TYPES
canonical        one name for a tensor that files name in several ways
TOKENS           the tokens of a pointer head, with ids in ID_KEYS; PREFIX begins the names of its tensors
pointer_ids      the ids of these tokens in a config.json
head_parameters  the number of parameters of a pointer head
name_of          our name of a tensor that GUI-Actor's release (arXiv 2506.03143) names differently

A test compares the numbers with transformers' models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bus.errors import ModelError

MOST = 10_000  # layers of a model, blocks of its vision tower
_LARGEST = 10**9  # any other size

MOST_EXPERTS = 2**16
"""Experts of a layer; their indices have two bytes."""
_BYTE = 2**8
_ALL_LAYERS: Mapping[str, Any] = {"mlp_only_layers": [], "decoder_sparse_step": 1}
"""Keys of a mixture, with the values that give experts to all layers."""

_OLDER_TEXT = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
_PATCHES = {"in_channels": 3, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
_NEWER_VISION = {
    **_PATCHES,
    "patch_size": 16,
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
}
_NORMED_TEXT = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "attention_bias": False,
}
_HYBRID_TEXT = {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "attention_bias": False,
    "layer_types": None,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}
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
            "fullatt_block_indexes": (7, 15, 23, 31),
        },
    ),
    "qwen3_vl": (
        {**_NORMED_TEXT, "intermediate_size": 22016, "head_dim": 128},
        {**_NEWER_VISION, "deepstack_visual_indexes": (8, 16, 24)},
    ),
    "qwen3_vl_moe": (
        {
            **_NORMED_TEXT,
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "head_dim": None,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
        },
        {**_NEWER_VISION, "deepstack_visual_indexes": (8, 16, 24)},
    ),
    "qwen3_5": ({**_HYBRID_TEXT, "intermediate_size": 12288}, _NEWER_VISION),
    "qwen3_5_moe": (
        {
            **_HYBRID_TEXT,
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "num_key_value_heads": 2,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
        _NEWER_VISION,
    ),
}
"""Values of the keys that a config.json leaves out: of the language model, and of the vision tower."""

MODEL_TYPES = tuple(_DEFAULTS)
"""`model_type` in the config.json of the folders that the policy can load."""

MIXTURES = ("qwen3_vl_moe", "qwen3_5_moe")
"""Classes whose MLPs are mixtures of experts."""

HYBRID = ("qwen3_5", "qwen3_5_moe")
"""Classes with layers that are recurrences, and with gates behind attention."""

NEWER = ("qwen3_vl", "qwen3_vl_moe", *HYBRID)
"""Classes with normalised heads whose size is a key, and with a language model that has no biases."""

LINEAR, FULL = "linear_attention", "full_attention"
"""The kinds of layers in the `layer_types` of a model of HYBRID: DeltaNet, and attention to all tokens."""

_TEXT_NAME = re.compile(r"(?:(?:model|language_model)\.)*((?:embed_tokens|layers|norm)\..+)")
_VISION_NAME = re.compile(r"(?:.*\.)?visual\.(.+)")
_HEAD_NAME = re.compile(r"(?:(?:model|language_model)\.)*(lm_head\.weight)")


def canonical(name: str) -> str:
    """Return our name of a tensor: `language_model...`, `visual...`, `lm_head.weight`, `pointer_head...`."""
    if match := _VISION_NAME.fullmatch(name):
        return f"visual.{match[1]}"
    if match := _TEXT_NAME.fullmatch(name):
        return f"language_model.{match[1]}"
    match = _HEAD_NAME.fullmatch(name)
    return match[1] if match else name_of(name)


class Sizes:
    """The sizes of one part of a config.json, with the defaults of its model type."""

    def __init__(self, part: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._values = {key: part.get(key, value) for key, value in defaults.items()}

    def __getitem__(self, key: str) -> int:
        """Return a size. Raises ModelError if it is not a whole number in range."""
        value = self._values[key]
        most = MOST if key in ("depth", "num_hidden_layers") else _LARGEST
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise ModelError(f"{key} must be a whole number, 1 to {most}, got {str(value)[:40]!r}")
        return value

    def ratio(self, key: str) -> float:
        """Return a ratio of two sizes, e.g. `mlp_ratio`. Raises ModelError unless it is in (0, MOST]."""
        value = self._values[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MOST:
            raise ModelError(f"{key} must be a number up to {MOST}, got {str(value)[:40]!r}")
        return float(value)

    def listed(self, key: str, otherwise: int) -> int:
        """Return the length of a list; `otherwise` where there is no such list."""
        value = self._values.get(key)
        return len(value) if isinstance(value, list | tuple) else otherwise

    def has(self, key: str) -> bool:
        """Return True if a key has a value."""
        return self._values.get(key) is not None

    def flag(self, key: str) -> bool:
        """Return True if a key is set and true."""
        return bool(self._values.get(key))

    def layer_kinds(self) -> list[str]:
        """Return the kind of each layer of a model of HYBRID, LINEAR or FULL, as transformers reads them.

        `layer_types` lists them; without it each `full_attention_interval`-th layer is FULL. Raises ModelError
        if the list has other names, or another length than the model.
        """
        layers, kinds = self["num_hidden_layers"], self._values["layer_types"]
        if kinds is None:
            interval = self["full_attention_interval"]
            return [LINEAR if (place + 1) % interval else FULL for place in range(layers)]
        if not isinstance(kinds, list) or any(kind not in (LINEAR, FULL) for kind in kinds):
            raise ModelError(
                f"layer_types must be a list of {LINEAR} and {FULL}, got {str(kinds)[:60]!r}"
            )
        if len(kinds) != layers:
            raise ModelError(f"layer_types has {len(kinds)} layers, num_hidden_layers is {layers}")
        return kinds


def text_sizes(config: Mapping[str, Any]) -> Sizes:
    """Return the sizes of the language model, from `text_config` or from the top level of a config.json."""
    nested = config.get("text_config")
    part = dict(nested if isinstance(nested, dict) else config)
    if "num_local_experts" in part:  # transformers' other name for this key
        part.setdefault("num_experts", part["num_local_experts"])
    if part.get("num_key_value_heads", 1) is None:
        part["num_key_value_heads"] = part.get("num_attention_heads")
    return Sizes(part, _DEFAULTS[config["model_type"]][0])


def vision_sizes(config: Mapping[str, Any]) -> Sizes:
    """Return the sizes of the vision tower."""
    part = config.get("vision_config")
    return Sizes(part if isinstance(part, dict) else {}, _DEFAULTS[config["model_type"]][1])


def is_tied(config: Mapping[str, Any]) -> bool:
    """Return True if the output head is the input embedding, so that a folder need not have both.

    transformers reads this from the top level for the newer classes, and from either level for the older ones.
    """
    if config["model_type"] in NEWER:
        return bool(config.get("tie_word_embeddings"))
    nested = config.get("text_config")
    inner = nested.get("tie_word_embeddings") if isinstance(nested, dict) else False
    return bool(config.get("tie_word_embeddings") or inner)


@dataclass(frozen=True)
class DeltaNet:
    """The layers of a model that are Gated DeltaNet (arXiv 2412.06464). All counts are of numbers, not of bytes."""

    places: tuple[int, ...]  # which layers of the model they are, from 0
    layer: int  # parameters of one
    heads: int  # of the values; each has a state
    keys: int  # all key heads of a token together; the queries are as many
    values: int  # all value heads of a token together
    key_head: int  # numbers of one head
    value_head: int
    kernel: int  # tokens that the convolution over queries, keys and values sees

    @property
    def layers(self) -> int:
        """Number of these layers."""
        return len(self.places)

    @property
    def mixed(self) -> int:
        """Numbers of one token that pass through the convolution."""
        return 2 * self.keys + self.values

    @property
    def state(self) -> int:
        """Numbers of the recurrent states of one sequence, in all layers. They are float32 in every model."""
        return self.layers * self.heads * self.key_head * self.value_head

    @property
    def columns(self) -> int:
        """Numbers that the convolutions keep of one sequence's last tokens, in all layers, in its dtype."""
        return self.layers * (self.kernel - 1) * self.mixed


@dataclass(frozen=True)
class Experts:
    """The MLPs of a mixture of experts; all layers of a model have equal ones. All counts are of numbers."""

    count: int  # experts of a layer
    per_token: int  # experts that the router of a layer chooses for each token
    neurons: int  # of one expert
    shared: int  # neurons of the expert that every token passes; 0 without one
    width: int  # hidden_size

    @property
    def active_neurons(self) -> int:
        """Neurons of a layer that one token passes."""
        return self.per_token * self.neurons + self.shared

    @property
    def stacked(self) -> int:
        """Parameters of the experts of one layer, without the shared one: two tensors."""
        return 3 * self.width * self.count * self.neurons

    @property
    def idle(self) -> int:
        """Parameters of one layer that one token does not pass."""
        return self.stacked - 3 * self.width * self.per_token * self.neurons

    @property
    def layer(self) -> int:
        """Parameters of one layer: the experts, the router, and the shared expert with its gate."""
        shared = 3 * self.width * self.shared + self.width if self.shared else 0
        return self.stacked + self.width * self.count + shared

    @property
    def index_bytes(self) -> int:
        """Bytes of one expert's index: one or two."""
        return 1 if self.count <= _BYTE else 2


@dataclass(frozen=True)
class Shape:
    """The shape of a vision-language model. All counts are of numbers, not of bytes."""

    kind: str  # model_type
    layers: int  # of the language model
    width: int  # hidden_size
    queries: int  # all heads of a token together
    keys: int  # all key heads of a token together; the values are as many
    head: int  # numbers of one head
    mlp: int  # neurons of a layer that one token passes; intermediate_size without experts
    vocabulary: int
    tied: bool  # the head is the embedding
    normed_heads: bool  # queries and keys are normalised (Qwen3)
    gated: bool  # each number that a query's head read is multiplied by a gate (Qwen3.5)
    layer: int  # parameters of one layer with attention to all tokens
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
    deepstack: (
        int  # vision blocks whose features are also added to later layers of the language model
    )
    delta: DeltaNet | None = None  # the layers without attention; None if all have it
    experts: Experts | None = None  # None for a class without them

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model."""
        return self.text + self.vision + self.pointer

    @property
    def embedding(self) -> int:
        """Number of parameters of the embedding. The head has as many; where they are tied, the same ones."""
        return self.vocabulary * self.width

    @property
    def attending(self) -> int:
        """Number of layers of the language model with attention to all tokens."""
        return self.layers - (self.delta.layers if self.delta else 0)

    @property
    def layer_parameters(self) -> int:
        """Number of parameters of all layers of the language model."""
        return sum(self.parameters_of(place) for place in range(self.layers))

    @property
    def token_operations(self) -> float:
        """Operations of a forward pass over one token in all layers, without attention to other tokens.

        A recurrence reads its state for the key and for the query, and adds to it.
        """
        idle = self.layers * self.experts.idle if self.experts else 0
        operations = 2.0 * (self.layer_parameters - idle)
        return operations + (6.0 * self.delta.state if self.delta else 0.0)

    @property
    def pair_operations(self) -> float:
        """Operations of one token's attention to another one, in all layers."""
        return 4.0 * self.queries * self.attending

    def parameters_of(self, place: int) -> int:
        """Return the number of parameters of the layer `place` of the language model, counted from 0."""
        return self.delta.layer if self.delta and place in self.delta.places else self.layer

    @property
    def routed(self) -> int:
        """Numbers of a token before and after its experts in one layer, once for each; 0 without experts."""
        return 2 * self.experts.per_token * self.width if self.experts else 0

    @property
    def routing_bytes(self) -> int:
        """Bytes that say which experts all layers chose for one token; 0 without experts."""
        experts = self.experts
        return self.layers * experts.per_token * experts.index_bytes if experts else 0

    @property
    def cached(self) -> int:
        """Numbers that the cache holds for one token: its keys and values in all layers that attend."""
        return 2 * self.attending * self.keys

    def state_bytes(self, size: int) -> int:
        """Return the bytes that one sequence keeps in recurrent layers; a number of the model has `size` bytes."""
        return 4 * self.delta.state + size * self.delta.columns if self.delta else 0

    def adapters(self, rank: int) -> int:
        """Return the number of parameters of adapters: rank x (inputs + outputs) of each linear layer.

        The layers with adapters are TARGETS of dart_cli/config/adapters.py. Experts have none, but for the one
        that every token passes.
        """
        gate = self.queries if self.gated else 0
        attention = 2 * (self.width + self.queries) + gate + 2 * (self.width + self.keys)
        mlp = self.experts.shared if self.experts else self.mlp
        total = self.attending * attention
        if mlp:
            total += self.layers * 3 * (self.width + mlp)
        if self.delta:
            outward = self.width + self.delta.mixed + 2 * (self.width + self.delta.values)
            total += self.delta.layers * outward
        return rank * total


def shape_of(config: Mapping[str, Any]) -> Shape:
    """Return the shape in a config.json of one of MODEL_TYPES. Raises ModelError for unfit sizes."""
    kind, text, vision = config["model_type"], text_sizes(config), vision_sizes(config)
    newer, gated = kind in NEWER, kind in HYBRID
    width, heads = text["hidden_size"], text["num_attention_heads"]
    is_headless = kind == "qwen3_vl_moe" and not text.has("head_dim")
    experts = _experts(config, text) if kind in MIXTURES else None
    mlp = experts.active_neurons if experts else text["intermediate_size"]
    of_mlp = experts.layer if experts else 3 * width * mlp
    head = text["head_dim"] if newer and not is_headless else width // heads
    queries, keys = heads * head, text["num_key_value_heads"] * head
    query_outputs = queries * (2 if gated else 1)  # what q_proj gives
    biases = queries + 2 * keys if not newer else 0
    if newer and text.flag("attention_bias"):
        biases = query_outputs + 2 * keys + width
    norms = 2 * width + (2 * head if newer else 0)
    layer = width * (query_outputs + queries + 2 * keys) + biases + of_mlp + norms
    delta = _delta_net(text, of_mlp) if gated else None
    embeddings = text["vocab_size"] * width * (1 if is_tied(config) else 2)
    layers = text["num_hidden_layers"]
    recurrent, recurrences = (delta.layers, delta.layers * delta.layer) if delta else (0, 0)
    return Shape(
        kind=kind,
        layers=layers,
        width=width,
        queries=queries,
        keys=keys,
        head=head,
        mlp=mlp,
        vocabulary=text["vocab_size"],
        tied=is_tied(config),
        normed_heads=newer,
        gated=gated,
        layer=layer,
        text=embeddings + (layers - recurrent) * layer + recurrences + width,
        pointer=0 if pointer_ids(config) is None else head_parameters(width),
        delta=delta,
        experts=experts,
        **_vision(kind, vision, out=width),
    )


def _experts(config: Mapping[str, Any], text: Sizes) -> Experts:
    """Return the mixture of a config.json. Raises ModelError for unfit sizes, and for layers without experts."""
    nested = config.get("text_config")
    part = nested if isinstance(nested, dict) else config
    for key, usual in _ALL_LAYERS.items():
        if part.get(key, usual) not in (usual, None):
            raise ModelError(
                f"{key} is {str(part[key])[:40]}, so that some layers have no experts, which dart does not load; "
                "take a checkpoint whose layers all have experts"
            )
    count, per_token = text["num_experts"], text["num_experts_per_tok"]
    if not 1 < per_token <= count <= MOST_EXPERTS:
        raise ModelError(
            f"num_experts_per_tok = {per_token} of num_experts = {count}: a token needs two experts or more, and there "
            f"must be as many, and at most {MOST_EXPERTS}"
        )
    neurons, width = text["moe_intermediate_size"], text["hidden_size"]
    if config["model_type"] == "qwen3_vl_moe" and width in (neurons, 2 * neurons):
        raise ModelError(
            f"moe_intermediate_size = {neurons} beside hidden_size = {width}: the stacked tensors of the experts would "
            "be square, so that their axes cannot be told apart; dart does not load such a model"
        )
    shared = "shared_expert_intermediate_size"
    return Experts(
        count=count,
        per_token=per_token,
        neurons=neurons,
        shared=text[shared] if text.has(shared) else 0,
        width=width,
    )


def _delta_net(text: Sizes, of_mlp: int) -> DeltaNet | None:
    """Return the layers that are recurrences; None if `layer_types` has none. Raises ModelError for unfit sizes.

    `of_mlp` are the parameters of a layer's MLP.
    """
    places = tuple(place for place, kind in enumerate(text.layer_kinds()) if kind == LINEAR)
    if not places:
        return None
    width, heads = text["hidden_size"], text["linear_num_value_heads"]
    key_heads, kernel = text["linear_num_key_heads"], text["linear_conv_kernel_dim"]
    if heads % key_heads:
        raise ModelError(
            f"linear_num_value_heads must be a multiple of linear_num_key_heads, got {heads} and {key_heads}"
        )
    key_head, value_head = text["linear_key_head_dim"], text["linear_value_head_dim"]
    keys, values = key_heads * key_head, heads * value_head
    mixed = 2 * keys + values
    projections = width * (mixed + 2 * values + 2 * heads)  # qkv; z and out; a and b
    own = projections + kernel * mixed + 2 * heads + value_head  # convolution; A_log, dt_bias; norm
    return DeltaNet(
        places=places,
        layer=own + of_mlp + 2 * width,
        heads=heads,
        keys=keys,
        values=values,
        key_head=key_head,
        value_head=value_head,
        kernel=kernel,
    )


def _vision(kind: str, size: Sizes, out: int) -> dict[str, int]:
    """Return the fields of Shape about the vision tower.

    Raises ModelError unless its vectors have `out` numbers.
    """
    if kind == "qwen2_vl":
        width, vector = size["embed_dim"], size["hidden_size"]
        mlp = int(width * size.ratio("mlp_ratio"))
    else:
        width, mlp, vector = size["hidden_size"], size["intermediate_size"], size["out_hidden_size"]
    if vector != out:
        raise ModelError(
            f"the vision tower gives vectors of {vector} numbers, the language model takes {out}"
        )
    gated = kind == "qwen2_5_vl"
    norm = width if gated else 2 * width
    block = 4 * width * (width + 1) + 2 * norm
    block += 3 * width * mlp + 2 * mlp + width if gated else 2 * width * mlp + mlp + width
    merged = width * size["spatial_merge_size"] ** 2
    merger = merged * (merged + 1) + merged * out + out
    patch = size["in_channels"] * size["temporal_patch_size"] * size["patch_size"] ** 2
    deep = size.listed("deepstack_visual_indexes", 0)
    whole = patch * width + size["depth"] * block + norm + merger
    if kind in NEWER:
        whole += width + size["num_position_embeddings"] * width + deep * (2 * merged + merger)
    return {
        "vision": whole,
        "vision_blocks": size["depth"],
        "vision_block": block,
        "vision_width": width,
        "vision_mlp": mlp,
        "vision_whole": size.listed("fullatt_block_indexes", size["depth"]),
        "merge": size["spatial_merge_size"] ** 2,
        "patch_values": patch,
        "deepstack": deep,
    }


# --- the pointer head: a folder has one where its config.json has ID_KEYS, the keys of GUI-Actor's release

TOKENS = ("<|pointer_start|>", "<|pointer_pad|>", "<|pointer_end|>")
"""The model samples the start token, and the other two follow it. The hidden state of the pad token is what
the head points with."""

ID_KEYS = ("pointer_start_token_id", "pointer_pad_token_id", "pointer_end_token_id")
"""Keys of config.json, in the order of TOKENS."""

PREFIX = "pointer_head."
"""Prefix of the names of the head's tensors, in the model and in its files."""

HEADS = 8
"""Number of attention heads of a pointer head. The width of the model must be a multiple of it."""

_RELEASED_PREFIX = "multi_patch_pointer_head."
PREFIXES = (PREFIX, _RELEASED_PREFIX)
"""Prefixes of the names of a head's tensors in any file."""
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
"""Names of a head's tensors in the release's files, and their names here."""


def name_of(name: str) -> str:
    """Return our name of a pointer head's tensor that a file calls `name`; any other name unchanged."""
    inner = _RELEASED.get(name.removeprefix(_RELEASED_PREFIX))
    return f"{PREFIX}{inner}" if inner and name.startswith(_RELEASED_PREFIX) else name


def head_parameters(width: int) -> int:
    """Return the number of parameters of a head for a model of `width`.

    Raises ModelError for an unfit width.
    """
    if width % HEADS:
        raise ModelError(
            f"a pointer head needs a hidden_size that is a multiple of {HEADS}, not {width}"
        )
    return 8 * width**2 + 10 * width


def pointer_ids(config: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """Return the ids of TOKENS in a config.json; None where it has no head.

    Raises ModelError for unusable ids.
    """
    ids = [config.get(key) for key in ID_KEYS]
    if all(value is None for value in ids):
        return None
    for key, value in zip(ID_KEYS, ids, strict=True):
        if type(value) is not int or value < 0:
            raise ModelError(
                f"{key} must be a token id, got {str(value)[:40]}; a pointer head needs all of "
                f"{', '.join(ID_KEYS)}"
            )
    start, pad, end = ids
    if len({start, pad, end}) < len(ids):
        raise ModelError(f"{', '.join(ID_KEYS)} must be three tokens, got {start}, {pad}, {end}")
    return start, pad, end  # type: ignore[return-value]  # checked above
