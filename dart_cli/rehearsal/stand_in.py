"""The small files of a model whose folder is not on this machine: its family's published shape.

    write_stand_in   config.json, tokenizer, chat template and preprocessor, without weights

The shapes are those of the checkpoints' own config.json. The tokenizer is ours: Qwen's rules of cutting text
and its special tokens, and pairs of bytes merged as they occur in the prompts that dart ships. It has some
thousands of tokens in place of 151,643, so that texts are a fifth longer in it or more; a screen has as many
tokens as with the model's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from bus.errors import ModelError
from dart_cli.config.architecture import ID_KEYS, TOKENS
from dart_cli.config.families import FAMILIES, PROMPTS
from dart_cli.config.schema import Config

MERGED = 4096
"""Tokens beside the special ones."""

_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""As Qwen2's tokenizer cuts a text."""
SPECIALS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>"),
    *("<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
"""In Qwen's order, after the ordinary tokens."""
CHAT_MESSAGE = """\
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}<|im_end|>"""
"""One message in the chat templates that we write ourselves."""
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if loop.first and message.role != 'system' and DEFAULT -%}
<|im_start|>system
{{ DEFAULT }}<|im_end|>
{% endif -%}
CHAT_MESSAGE
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
""".replace("CHAT_MESSAGE", CHAT_MESSAGE)
"""As the families' own; DEFAULT is their system message, in quotes."""
_CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_OLDER: dict[str, Any] = {
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "rope_theta": 1e6,
    "use_sliding_window": False,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
_PATCHES = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}

PUBLISHED: Mapping[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "qwen2_vl": (
        "Qwen2-VL-7B-Instruct",
        {
            **_OLDER,
            "architectures": ["Qwen2VLForConditionalGeneration"],
            "vision_config": {
                **_PATCHES,
                "depth": 32,
                "embed_dim": 1280,
                "hidden_size": 3584,
                "mlp_ratio": 4,
                "num_heads": 16,
                "in_chans": 3,
            },
        },
        {**_CLIP, "min_pixels": 3136, "max_pixels": 12845056},
        "You are a helpful assistant.",
    ),
    "qwen2_5_vl": (
        "UI-TARS-1.5-7B",
        {
            **_OLDER,
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "max_position_embeddings": 128000,
            "vision_config": {
                **_PATCHES,
                "depth": 32,
                "hidden_size": 1280,
                "intermediate_size": 3420,
                "out_hidden_size": 3584,
                "num_heads": 16,
                "window_size": 112,
                "in_chans": 3,
                "fullatt_block_indexes": [7, 15, 23, 31],
                "tokens_per_second": 2,
            },
        },
        {**_CLIP, "min_pixels": 3136, "max_pixels": 2116800},
        "You are a helpful assistant.",
    ),
    "qwen3_vl": (
        "Qwen3-VL-8B-Instruct",
        {
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "tie_word_embeddings": False,
            "text_config": {
                "model_type": "qwen3_vl_text",
                "attention_bias": False,
                "head_dim": 128,
                "hidden_act": "silu",
                "hidden_size": 4096,
                "intermediate_size": 12288,
                "num_hidden_layers": 36,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "vocab_size": 151936,
                "max_position_embeddings": 262144,
                "rms_norm_eps": 1e-6,
                "rope_theta": 5e6,
                "rope_scaling": {
                    "mrope_interleaved": True,
                    "mrope_section": [24, 20, 20],
                    "rope_type": "default",
                },
            },
            "vision_config": {
                **_PATCHES,
                "model_type": "qwen3_vl",
                "patch_size": 16,
                "depth": 27,
                "hidden_size": 1152,
                "intermediate_size": 4304,
                "out_hidden_size": 4096,
                "num_heads": 16,
                "num_position_embeddings": 2304,
                "deepstack_visual_indexes": [8, 16, 24],
                "hidden_act": "gelu_pytorch_tanh",
                "in_channels": 3,
            },
        },
        {
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
            "patch_size": 16,
            "size": {"longest_edge": 16777216, "shortest_edge": 65536},
        },
        "",
    ),
}
"""By `model_type`: the checkpoint, its config.json, its preprocessor, its template's own system message."""


def write_stand_in(config: Config, folder: Path) -> str:
    """Write the files for the model that `config` names to `folder`; returns the checkpoint they are of.

    Raises ModelError where neither the family nor the name of the model's folder tells its class.
    """
    kind = _kind(config)
    checkpoint, tree, preprocessor, system = PUBLISHED[kind]
    tokenizer = _tokenizer(config)
    known = tokenizer.get_vocab()
    ids = {
        "bos_token_id": known["<|endoftext|>"],
        "eos_token_id": known["<|im_end|>"],
        "image_token_id": known["<|image_pad|>"],
        "video_token_id": known["<|video_pad|>"],
        "vision_start_token_id": known["<|vision_start|>"],
        "vision_end_token_id": known["<|vision_end|>"],
    }
    if config.policy.pointing == "pointer":
        ids |= {key: known[token] for key, token in zip(ID_KEYS, TOKENS, strict=True)}
    text = dict(tree.get("text_config", {}))
    rows = -(-len(known) // 64) * 64  # some belong to no token, as in the checkpoints
    whole = {**tree, **ids, "model_type": kind, "_name_or_path": checkpoint}
    if text:
        whole["text_config"] = {**text, "vocab_size": rows}
    else:
        whole["vocab_size"] = rows
    folder.mkdir(parents=True)
    tokenizer.chat_template = CHAT_TEMPLATE.replace("DEFAULT", json.dumps(system))
    tokenizer.save_pretrained(folder)
    cut = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, **preprocessor}
    cut["image_processor_type"] = "Qwen2VLImageProcessor"
    for name, value in (("config.json", whole), ("preprocessor_config.json", cut)):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    return checkpoint


def _kind(config: Config) -> str:
    """The class of the model, by `policy.family` or by its folder's name."""
    family = FAMILIES.get(config.policy.family)
    named = Path(config.model.path).name
    listed = [family] if family else FAMILIES.values()
    for each in listed:
        if not family and not (each.named and re.search(each.named, named, re.IGNORECASE)):
            continue
        if found := [kind for kind in each.model_types if kind in PUBLISHED]:
            return found[0]
    raise ModelError(
        f"model.path = {config.model.path}: there is no such folder, and its name is of no family whose "
        "shape is known; fetch its small files: `hf download REPO config.json tokenizer.json "
        f"tokenizer_config.json chat_template.json preprocessor_config.json --local-dir {config.model.path}`"
    )


def _tokenizer(config: Config) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    texts = [path.read_text(encoding="utf-8") for path in sorted(PROMPTS.glob("*.txt"))]
    texts += [config.policy.template, config.policy.system_prompt]
    call = {"name": "x", "arguments": {"action": "x", "coordinate": [1, 2]}}
    texts.append(json.dumps(call, separators=(",", ":")))
    trainer = trainers.BpeTrainer(
        vocab_size=MERGED,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    pointer = TOKENS if config.policy.pointing == "pointer" else ()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[
            each for each in (*SPECIALS, *pointer) if each not in ("<|im_end|>", "<|endoftext|>")
        ],
        clean_up_tokenization_spaces=False,
        model_max_length=32768,
    )
