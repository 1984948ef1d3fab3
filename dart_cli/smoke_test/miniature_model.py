"""A miniature of the user's model: the same class with the same parts, and a thousandth of the parameters.

    cut_config              makes a config.json with fewer and narrower layers
    write_miniature         writes the folder, with weights that write actions (token_chain.py)
    write_clicking_model    writes such weights at full size into a folder that has all other files

The miniature keeps what decides which code runs: the class, the number of heads, patch and merge sizes, the
rope's sections in proportion, tied or untied embeddings, windowed and full-attention layers of the vision
tower, deepstack, the pointer head, and every byte of tokenizer, chat template and preprocessor. Each head has
`HEAD` numbers, which gives the width, or four times as many where positions rotate a quarter of it. There are
as many layers as deepstack needs, at least two; of a model with recurrent layers, the first ones up to the
second kind. A mixture has EXPERTS experts.
"""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from dart_cli.config.architecture import NEWER, PREFIX, Shape, shape_of, text_sizes, vision_sizes
from dart_cli.config.model_folder import SINGLE, model_config
from dart_cli.config.schema import Config, ModelConfig
from dart_cli.language.coordinates import make_coordinate_map, resize_of
from dart_cli.language.parsers import make_action_parser
from dart_cli.policy.loader import LoadedPolicy, load_policy
from dart_cli.policy.model_files import copy_rest, write_model
from dart_cli.policy.pointer_head import initial_head
from dart_cli.policy.prompt import make_renderer
from dart_cli.smoke_test.token_chain import TokenChain, make_token_chain, write_chain

HEAD = 8
"""Size of a head, in the language model and in the vision tower. A smaller rope cannot have three
sections."""
ROTATED_QUARTER = 4
"""A head of Qwen3.5 is so many times as wide as the part that positions rotate."""
LAYERS = 2
LEAST_WIDTH, LEAST_NEURONS = 64, 256
"""Least width of the language model and of its MLPs, because a chain of actions has 100 tokens or more."""
EXPERTS, CHOSEN, SHARED = 8, 2, 64
"""Experts of a mixture, those of one token, and neurons of the one that every token passes."""
CLICK_AREA = (320, 240)
"""Width and height in pixels of the top left area that clicks stay in: some suites tell their screen size
only in play."""
STRENGTH = 0.5
"""Standard deviation of a linear layer's outputs for inputs of 1: the context has an effect, but never breaks
the chain."""

REMEMBERS = -3.0
"""Logarithm of the speed at which a recurrent layer forgets: some tens of tokens."""

_DROPPED = ("layer_types", "quantization_config", "auto_map", "max_window_layers")
"""Keys of a config.json that follow from other keys, or that are not loaded."""


def cut_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a small version of a config.json of one of MODEL_TYPES.

    Raises ModelError if its sizes are invalid.
    """
    shape = shape_of(config)
    small = copy.deepcopy(dict(config))
    for key in _DROPPED:
        small.pop(key, None)
    nested = small.get("text_config")
    text = nested if isinstance(nested, dict) else small
    layers = max(LAYERS, shape.deepstack)
    if shape.delta is not None:
        kinds = text_sizes(config).layer_kinds()
        layers = max([layers, *(1 + kinds.index(kind) for kind in {*kinds})])
        text["layer_types"] = kinds[:layers]
    width = _cut_text(text, config, shape, layers)
    vision = small.setdefault("vision_config", {})
    _cut_vision(vision, config, shape, width)
    small["torch_dtype"] = "float32"
    small.pop("dtype", None)
    return small


def _cut_text(text: dict[str, Any], config: Mapping[str, Any], shape: Shape, layers: int) -> int:
    """Cut the language model in place, and return its width."""
    sizes = text_sizes(config)
    heads = sizes["num_attention_heads"]
    head = min(shape.head, HEAD)
    if shape.kind not in NEWER:  # in these classes a head is width / heads
        head = min(shape.head, max(HEAD, -(-LEAST_WIDTH // heads) // HEAD * HEAD))
        width = heads * head
    else:
        width = min(shape.width, max(LEAST_WIDTH, heads * head // 2))
        head = min(shape.head, ROTATED_QUARTER * HEAD) if shape.gated else head
        text["head_dim"] = head
    neurons = shape.experts.neurons if shape.experts else shape.mlp
    mlp = max(LEAST_NEURONS, round(neurons / shape.width * width / 8) * 8)
    kinds = text.get("layer_types")
    for key in _DROPPED:
        text.pop(key, None)
    if shape.delta is not None:
        text |= {
            "layer_types": kinds,
            "linear_key_head_dim": min(shape.delta.key_head, HEAD),
            "linear_value_head_dim": min(shape.delta.value_head, HEAD),
        }
    if shape.experts is not None:
        text |= {
            "num_experts": min(shape.experts.count, EXPERTS),
            "num_experts_per_tok": min(shape.experts.per_token, CHOSEN),
            "moe_intermediate_size": mlp,
        }
        if shape.experts.shared:
            text["shared_expert_intermediate_size"] = SHARED
    text |= {
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": min(shape.layers, layers),
        "num_attention_heads": heads,
        "num_key_value_heads": sizes["num_key_value_heads"],
        "vocab_size": sizes["vocab_size"],
    }
    for key in ("rope_scaling", "rope_parameters"):
        rope = text.get(key)
        if isinstance(rope, dict) and isinstance(rope.get("mrope_section"), list):
            rotated = head // ROTATED_QUARTER if shape.gated else head
            rope["mrope_section"] = _sections(rope["mrope_section"], rotated // 2)
    return width


def _sections(original: list[int], pairs: int) -> list[int]:
    """Return rope sections in the proportions of `original`, each at least 1, with the sum `pairs`."""
    whole = sum(original)
    exact = [section * pairs / whole for section in original]
    cut = [max(1, int(section)) for section in exact]
    while sum(cut) != pairs:
        step = 1 if sum(cut) < pairs else -1
        gaps = [
            (want - have) * step if have + step >= 1 else float("-inf")
            for want, have in zip(exact, cut, strict=True)
        ]
        cut[gaps.index(max(gaps))] += step
    return cut


def _cut_vision(
    vision: dict[str, Any], config: Mapping[str, Any], shape: Shape, text_width: int
) -> None:
    """Cut the vision tower in place."""
    sizes = vision_sizes(config)
    heads = vision.setdefault("num_heads", 16)
    width = min(shape.vision_width, heads * HEAD)
    if shape.kind == "qwen2_vl":
        vision |= {
            "embed_dim": width,
            "hidden_size": text_width,
            "depth": min(sizes["depth"], LAYERS),
        }
        return
    ratio = shape.vision_mlp / shape.vision_width
    vision |= {
        "hidden_size": width,
        "intermediate_size": max(8, round(ratio * width / 8) * 8),
        "out_hidden_size": text_width,
        "num_heads": heads,
    }
    if shape.kind == "qwen2_5_vl":
        depth = min(sizes["depth"], LAYERS)
        windows = shape.vision_whole < shape.vision_blocks
        vision |= {
            "depth": depth,
            "fullatt_block_indexes": [depth - 1] if windows else [*range(depth)],
        }
    else:
        depth = min(sizes["depth"], max(LAYERS, shape.deepstack + 1))
        vision |= {"depth": depth, "deepstack_visual_indexes": [*range(shape.deepstack)]}


def write_miniature(
    source: Path, folder: Path, config: Config, screen: tuple[int, int]
) -> TokenChain | None:
    """Write the miniature of the model in `source` to `folder`, and return the chain that it follows.

    Return None if no chain is possible: the miniature then writes noise. `config` is the configuration of the
    smoke test, `screen` the width and height of its screens in pixels. The weights in `source` are not read.
    Raises ModelError if its small files cannot be read, or dart does not load its class.
    """
    # 1. Write the folder with random weights.
    small = cut_config(model_config(source))
    folder.mkdir(parents=True)
    copy_rest(source, folder)
    (folder / "config.json").write_text(json.dumps(small, indent=2) + "\n", encoding="utf-8")
    model = AutoModelForImageTextToText.from_config(
        AutoConfig.from_pretrained(folder, local_files_only=True)
    )
    generator = torch.Generator().manual_seed(config.run.seed)
    _initialise(model, generator)
    write_model(model, folder, folder, "float32")
    if shape_of(small).pointer:
        head = initial_head(text_sizes(small)["hidden_size"], config.run.seed)
        tensors = {f"{PREFIX}{name}": value for name, value in head.items()}
        save_file(load_file(folder / SINGLE) | tensors, folder / SINGLE, metadata={"format": "pt"})
    # 2. Find a chain of tokens that the action parser reads as actions, and make the weights follow it.
    policy = load_policy(folder, pointing=config.policy.pointing)
    size_of = resize_of(config.model_copy(update={"model": ModelConfig(path=str(folder))}))
    width, height = (min(sides) for sides in zip(screen, CLICK_AREA, strict=True))
    coordinates = make_coordinate_map(config.policy.coordinates, width, height, size_of)
    action_parser = make_action_parser(config.policy.action_parser)
    chain = make_token_chain(
        policy, action_parser, coordinates, _prompt_end(policy, config, screen)
    )
    if chain is not None:
        write_chain(policy.model, chain, generator)
        write_model(policy.model, folder, folder, "float32")
    return chain


def write_clicking_model(folder: Path, chain: TokenChain, dtype: str, device: str) -> None:
    """Write weights that follow `chain` into `folder`, of the sizes in its config.json.

    They are computed on `device`. Raises ValueError as `write_chain` does.
    """
    with torch.device(device):
        model = AutoModelForImageTextToText.from_config(
            AutoConfig.from_pretrained(folder, local_files_only=True), dtype=getattr(torch, dtype)
        )
    _initialise(model, torch.Generator(device).manual_seed(0))
    write_chain(model, chain, torch.Generator().manual_seed(0))
    write_model(model, folder, folder, dtype)


def _prompt_end(policy: LoadedPolicy, config: Config, screen: tuple[int, int]) -> int:
    """Return the token with which every prompt ends."""
    blank = io.BytesIO()
    Image.new("RGB", screen).save(blank, "PNG")
    return make_renderer(policy, config.policy).render("x", [], blank.getvalue()).token_ids[-1]


@torch.no_grad()
def _initialise(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Set the weights so that each part influences the next one: linear layers by `STRENGTH`, norms to 1.

    Classes that add 1 to the weights of a norm begin with 0, as biases do. Recurrent layers forget slowly.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.fill_(REMEMBERS)
        elif parameter.ndim < 2:
            parameter.fill_(float(parameter.float().mean().round()))
        else:
            noise = torch.randn(
                parameter.shape, generator=generator, device=parameter.device, dtype=parameter.dtype
            )
            inputs = parameter.shape[2] if ".experts." in name else parameter[0].numel()
            parameter.copy_(noise * (STRENGTH / inputs**0.5))
    model.tie_weights()
