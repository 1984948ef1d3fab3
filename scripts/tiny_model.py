"""The tiny policy: a 0.6 M parameter model that learns GUI tasks by RL on one CPU core.

    words         the closed vocabulary: numbers, action heads, instruction words, ASCII characters
    tokenizer     a word-level fast tokenizer whose decode(encode(text)) is text, for any ASCII text
    config        sizes of the same classes that load real checkpoints: Qwen3-VL, its mixture of experts, Qwen3.5
    initialise    random initial values with the geometry of the screen that a pre-trained model knows
    save          a standard Hugging Face folder, so that one loader serves tiny and real models

Two trained checkpoints ship with dart: `dart_cli/policy/tiny/` (shipped_models/build_tiny.py) and
`dart_cli/policy/small/` (shipped_models/build_small.py, which spells what it does not know).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
    Qwen3_5Config,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

from dart_cli.language.vocabulary import END
from dart_cli.policy.model_files import published_state
from dart_cli.smoke_test.published_model_files import CHAT_MESSAGE

SCREEN = 168
"""Side in pixels of the screen the model is trained on; other multiples of 28 work, untrained."""

NUMBERS = 1000
"""Numbers 0-999 are one token each: coordinates in thousandths of the screen."""

IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
SPECIALS = (
    "<|pad|>",
    "<unk>",
    "<|im_start|>",
    END,
    "<|vision_start|>",
    "<|vision_end|>",
    IMAGE,
    VIDEO,
)

ACTION_HEADS = (
    "click",
    "right_click",
    "double_click",
    "move",
    "drag",
    "scroll",
    "type",
    "key",
    "wait",
    "done",
    "fail",
    "answer",
)
"""`name(` is one token for each of these."""

WORDS = tuple(
    """
    a above add after all alt an and are arrow at back backspace bar before below big blue bottom
    box brown button cancel center check checkbox checked choose circle click close colour confirm
    cross ctrl cyan dark delete dialog diamond disable done double down drag drop dropdown edit
    eighth email empty enable enter escape every field fifth file files find first folder form
    fourth from go green grey has heart hidden home icon if image in into is item it its last left
    light link list lower magenta make mark menu middle minus mode modal move name navy new next
    nothing number of off ok old olive on one only open option or orange out over page panel pink
    plus popup press previous purple put radio rectangle red remove rename right ring row same
    save screen scroll second select set settings seventh shape shift show sixth slider small
    square star submit swatch switch tab tap task teal text than that the then there third this
    three tick tile time title to toggle top triangle turn two type uncheck unlabelled until up
    upper user using value visible volume wait what white window with word yellow yes no black
    pointing matching marked coloured large short long wide tall near far under beside between
    pick trash buttons menus pages tabs rows folders boxes choices info chevron here wrong not
    """.split()
)
"""Words of instructions; each is a token with and without a leading space. Other words are spelt."""

ROLES = ("system\n", "user\n", "assistant\n")

CHAT_TEMPLATE = f"""\
{{%- for message in messages -%}}
{CHAT_MESSAGE}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}<|im_start|>assistant
{{% endif -%}}
"""

_PIECES = r"(?:system|user|assistant)\n|[a-z_]+\(| ?[A-Za-z]+|[0-9]{1,3}|[\s\S]"


@dataclass(frozen=True)
class TinySizes:
    """A class of models and the sizes of its two towers; the defaults are those of `builtin:tiny`."""

    model_type: str = (
        "qwen3_vl"  # "qwen3_vl_moe", or "qwen3_5": every fourth layer has full attention
    )
    text_hidden: int = 96
    text_layers: int = 2
    text_heads: int = 4
    text_mlp: int = 192  # of a mixture: the neurons of an expert, two of which each token passes
    experts: int = 0  # of a mixture
    vision_hidden: int = 64
    vision_layers: int = 2
    vision_heads: int = 4
    vision_mlp: int = 128
    patch: int = 14  # pixels
    merge: int = 2  # patches per image token, each way
    screen: int = SCREEN  # pixels; one learned vision position per patch of this screen


TINY = {
    "qwen3_vl": TinySizes(),
    "qwen3_vl_moe": TinySizes("qwen3_vl_moe", text_mlp=80, experts=8),
    "qwen3_5": TinySizes("qwen3_5", text_layers=4, text_mlp=96),
}
"""The tiny model of each class by `model_type`.

Each computes with 0.6 M parameters, 2.5 MB in float32; the mixture has 0.9 M.
"""


_CONFIGS: dict[str, type[PreTrainedConfig]] = {
    "qwen3_vl": Qwen3VLConfig,
    "qwen3_vl_moe": Qwen3VLMoeConfig,
    "qwen3_5": Qwen3_5Config,
}


def vocabulary(words: Sequence[str] = WORDS) -> list[str]:
    """Return every ordinary token in id order, after the specials: numbers first, then the rest."""
    tokens = [str(number) for number in range(NUMBERS)]
    tokens += [f"{name}(" for name in ACTION_HEADS]
    tokens += list(ROLES)
    for word in dict.fromkeys(words):
        tokens += [word, f" {word}"]
    tokens += ["\n", "\t", *(chr(code) for code in range(32, 127))]
    return list(dict.fromkeys(tokens))


def spelling(words: Sequence[str]) -> str:
    """Return the pattern of a tokenizer that spells whatever is not one of `words`, also words within words.

    Numbers are whole only as coordinates: before or behind a comma within brackets.
    """
    heads, whole = "|".join(ACTION_HEADS), "|".join(sorted(words, key=len, reverse=True))
    return (
        rf"(?:system|user|assistant)\n|(?<![A-Za-z_])(?:{heads})\("
        rf"| ?(?<![A-Za-z])(?:{whole})(?![A-Za-z])"
        r"|(?<=\()[0-9]{1,3}(?=,)|(?<=,)[0-9]{1,3}(?=[,)])|[\s\S]"
    )


def build_tokenizer(words: Sequence[str] = WORDS, pieces: str = _PIECES) -> PreTrainedTokenizerFast:
    """Return the tokenizer: known `words` stay whole, other ASCII is spelt, decoding inserts no spaces.

    It is a Unigram model with equal scores, so the split into the fewest tokens wins, within each of the
    pieces into which the pattern `pieces` cuts the text.
    """
    scored = [(token, -1.0) for token in (*SPECIALS, *vocabulary(words))]
    core = Tokenizer(models.Unigram(scored, unk_id=SPECIALS.index("<unk>")))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(pieces), behavior="isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|pad|>",
        unk_token="<unk>",
        eos_token=END,
        additional_special_tokens=[s for s in SPECIALS if s not in ("<|pad|>", "<unk>", END)],
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=4096,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_config(vocab_size: int, sizes: TinySizes = TinySizes()) -> PreTrainedConfig:
    """Return the model's configuration for a vocabulary of `vocab_size` rows."""
    hybrid = sizes.model_type == "qwen3_5"
    special = {token: index for index, token in enumerate(SPECIALS)}
    head = sizes.text_hidden // sizes.text_heads
    rotated = 0.5 if hybrid else 1.0
    pairs = int(head * rotated) // 2
    section = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]  # time, height, width
    text: dict[str, Any] = {
        "model_type": f"{sizes.model_type}_text",
        "vocab_size": vocab_size,
        "hidden_size": sizes.text_hidden,
        "intermediate_size": sizes.text_mlp,
        "num_hidden_layers": sizes.text_layers,
        "num_attention_heads": sizes.text_heads,
        "num_key_value_heads": sizes.text_heads,
        "head_dim": head,
        "max_position_embeddings": 4096,
        "initializer_range": 0.08,
        "pad_token_id": special["<|pad|>"],
        "eos_token_id": special[END],
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": section,
            "mrope_interleaved": True,
        },
    }
    vision: dict[str, Any] = {
        "depth": sizes.vision_layers,
        "hidden_size": sizes.vision_hidden,
        "intermediate_size": sizes.vision_mlp,
        "num_heads": sizes.vision_heads,
        "patch_size": sizes.patch,
        "spatial_merge_size": sizes.merge,
        "temporal_patch_size": 1,
        "out_hidden_size": sizes.text_hidden,
        "num_position_embeddings": (sizes.screen // sizes.patch) ** 2,
        "initializer_range": 0.08,
    }
    if hybrid:
        text["rope_parameters"]["partial_rotary_factor"] = rotated
        text |= {
            "linear_key_head_dim": head,
            "linear_value_head_dim": head,
            "linear_num_key_heads": sizes.text_heads // 2,
            "linear_num_value_heads": sizes.text_heads,
        }
    else:
        vision["deepstack_visual_indexes"] = [sizes.vision_layers // 2 - 1]
    if sizes.experts:
        text |= {
            "moe_intermediate_size": sizes.text_mlp,
            "num_experts": sizes.experts,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        }
    return _CONFIGS[sizes.model_type](
        text_config=text,
        vision_config=vision,
        image_token_id=special[IMAGE],
        video_token_id=special[VIDEO],
        vision_start_token_id=special["<|vision_start|>"],
        vision_end_token_id=special["<|vision_end|>"],
        tie_word_embeddings=True,
        pad_token_id=special["<|pad|>"],
        eos_token_id=special[END],
    )


def build_image_processor(sizes: TinySizes = TinySizes()) -> Qwen2VLImageProcessorPil:
    """Return a processor of screens of 28 x 28 up to 1280 x 720 pixels, values scaled to [-1, 1]."""
    return Qwen2VLImageProcessorPil(
        patch_size=sizes.patch,
        merge_size=sizes.merge,
        temporal_patch_size=1,
        size={"shortest_edge": 28 * 28, "longest_edge": 1280 * 728},
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )


def fourier_features(positions: torch.Tensor, width: int) -> torch.Tensor:
    """Return sines and cosines [N, width] of positions [N] in [0, 1], half a turn and octaves above it."""
    octaves = torch.arange(width // 2, dtype=torch.float32) * (6.0 / max(1, width // 2 - 1))
    angles = positions[:, None] * math.pi * torch.exp2(octaves)[None, :]
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def initialise(model: PreTrainedModel, seed: int) -> None:
    """Initialise `model` at random, in place; the same seed gives the same values.

    Grounding needs a metric of the screen: vision positions start as randomly mixed 2-D Fourier
    features (standard deviation 0.5) and number tokens as Fourier features (0.08). The heads of a recurrent
    layer start with half-lives between 1 and 400 tokens.
    """
    generator = torch.Generator().manual_seed(seed)

    def mixed(features: torch.Tensor, width: int, std: float) -> torch.Tensor:
        projection = torch.randn(features.shape[1], width, generator=generator)
        rows = features @ projection
        return rows * (std / rows.std())

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("conv1d.weight"):
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
            elif parameter.ndim >= 2:
                parameter.normal_(0.0, 0.08, generator=generator)
            elif name.endswith("A_log"):
                parameter.copy_(torch.linspace(-6.0, 0.0, len(parameter)))
            elif name.endswith("bias"):
                parameter.zero_()
            else:  # of norms: 1, or 0 where the class adds 1 to it
                parameter.fill_(parameter.mean().round())
        visual = model.model.visual
        patch = visual.patch_embed.proj.weight
        patch.normal_(0.0, 1.0 / math.sqrt(patch[0].numel()), generator=generator)

        side = visual.num_grid_per_side
        line = (torch.arange(side) + 0.5) / side
        width = visual.pos_embed.weight.shape[1]
        axis = fourier_features(line, 16)
        grid = torch.cat(
            [axis[:, None, :].expand(-1, side, -1), axis[None, :, :].expand(side, -1, -1)], dim=2
        )
        visual.pos_embed.weight.copy_(mixed(grid.reshape(side * side, -1), width, 0.5))

        rows = model.get_input_embeddings().weight
        numbers = fourier_features((torch.arange(NUMBERS) + 0.5) / NUMBERS, 24)
        first = len(SPECIALS)
        rows[first : first + NUMBERS] = mixed(numbers, rows.shape[1], 0.08)
    model.tie_weights()


def build_tiny(
    seed: int,
    sizes: TinySizes = TinySizes(),
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast, Qwen2VLImageProcessorPil]:
    """Return an untrained tiny model with its tokenizer and image processor."""
    tokenizer = tokenizer or build_tokenizer()
    model = AutoModelForImageTextToText.from_config(build_config(len(tokenizer), sizes))
    initialise(model, seed)
    return model.eval(), tokenizer, build_image_processor(sizes)


def save(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    image_processor: Qwen2VLImageProcessorPil,
    build: dict[str, Any],
) -> None:
    """Write a standard Hugging Face folder and `build.json`, the record of how it was made."""
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    published = published_state(model)  # {} where transformers' own layout is the published one
    model.save_pretrained(folder, state_dict=published or None, save_original_format=not published)
    tokenizer.save_pretrained(folder)
    image_processor.save_pretrained(folder)
    (folder / "build.json").write_text(json.dumps(build, indent=2, sort_keys=True) + "\n")
