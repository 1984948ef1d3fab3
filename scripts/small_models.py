"""Small random model folders of every supported class, laid out as real checkpoints are.

    FAMILIES   the classes by `model_type`, at the smallest useful sizes
    build      one folder: config.json, weights, tokenizer, chat template, preprocessor

What differs between real checkpoints differs here too: flat and nested configurations, patches of 14 and 16
pixels, windowed vision attention, deepstack features, interleaved positions, layers that are recurrences,
mixtures of experts, bounds on a screen's pixels under two names, templates in three files, tensors that no
class loads. Embeddings have more rows than the vocabulary has tokens, as in the real ones, and the generation
config sets penalties that no engine may apply. Tests and benchmarks use such folders, and `dart doctor
--parity` can be tried on one where no real checkpoint is available:

    python scripts/small_models.py qwen3_vl runs/models/qwen3
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
    Qwen3_5Tokenizer,
)
from transformers.utils import logging as transformers_logging

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dart_cli.policy.model_files import published_state
from dart_cli.smoke_test.published_model_files import (
    CHAT_TEMPLATE,
    SPECIALS,
    TAGS,
    THINKING_TEMPLATE,
)

HIDDEN, LAYERS, HEADS, HEAD, MLP = 64, 2, 2, 32, 96  # of the language model
VISION, VISION_HEADS = 32, 2
HYBRID_HEAD = 64  # of full attention in qwen3_5; a quarter of it is rotated
DELTA_KEY_HEADS, DELTA_HEAD = 2, 16  # of a DeltaNet layer, which has twice as many value heads
EXPERTS, CHOSEN, EXPERT, SHARED = 8, 2, 24, 40  # of a mixture: experts, those of a token, neurons

EMBEDDING_ROWS = 320
"""Rows of the embedding; those beyond the vocabulary belong to no token, as in real checkpoints."""

_CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}

_TEXT: dict[str, Any] = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": MLP,
    "max_position_embeddings": 4096,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "use_cache": True,
    "vocab_size": EMBEDDING_ROWS,
}
_FLAT = {
    **_TEXT,
    "max_window_layers": LAYERS,
    "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
    "rope_theta": 1e6,
    "sliding_window": 4096,
    "use_sliding_window": False,
}
_PATCHES = {
    "spatial_merge_size": 2,
    "spatial_patch_size": 14,
    "patch_size": 14,
    "temporal_patch_size": 2,
}


_DEEP_TEXT: dict[str, Any] = {
    **_TEXT,
    "attention_bias": False,
    "head_dim": HEAD,
    "model_type": "qwen3_vl_text",
    "rope_scaling": {
        "mrope_interleaved": True,
        "mrope_section": [6, 5, 5],
        "rope_type": "default",
    },
    "rope_theta": 5e6,
}
_DEEP_VISION: dict[str, Any] = {
    "deepstack_visual_indexes": [0, 1],
    "depth": 3,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": VISION,
    "in_channels": 3,
    "initializer_range": 0.02,
    "intermediate_size": 64,
    "model_type": "qwen3_vl",
    "num_heads": VISION_HEADS,
    "num_position_embeddings": 16 * 16,
    "out_hidden_size": HIDDEN,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_HYBRID_TEXT: dict[str, Any] = {
    **_TEXT,
    "attention_bias": False,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "head_dim": HYBRID_HEAD,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": DELTA_HEAD,
    "linear_num_key_heads": DELTA_KEY_HEADS,
    "linear_num_value_heads": 2 * DELTA_KEY_HEADS,
    "linear_value_head_dim": DELTA_HEAD,
    "mamba_ssm_dtype": "float32",
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_hidden_layers": 4,
    "partial_rotary_factor": 0.25,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [3, 3, 2],
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e7,
        "rope_type": "default",
    },
    "tie_word_embeddings": False,
}
_HYBRID_VISION: dict[str, Any] = {
    "deepstack_visual_indexes": [],
    "depth": 2,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": VISION,
    "in_channels": 3,
    "initializer_range": 0.02,
    "intermediate_size": 64,
    "model_type": "qwen3_5",
    "num_heads": VISION_HEADS,
    "num_position_embeddings": 16 * 16,
    "out_hidden_size": HIDDEN,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_NEWER_PREPROCESSOR: dict[str, Any] = {
    **_HALF,
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
_MIXTURE: dict[str, Any] = {
    "moe_intermediate_size": EXPERT,
    "num_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}


@dataclass(frozen=True)
class Family:
    """One class of checkpoints."""

    architecture: str
    config: Mapping[str, Any]  # config.json but for token ids, dtype and tying
    preprocessor: Mapping[str, Any]
    tied: bool  # as in its smaller checkpoints
    system: str = ""  # its template's default system message
    template: str = CHAT_TEMPLATE
    template_file: str = "tokenizer_config.json"
    reply: str = ""  # what the template begins a reply with, behind the role
    tokens: tuple[str, ...] = ()  # added to Qwen's special tokens, and not special


_THINKS: dict[str, Any] = {
    "tied": False,
    "template": THINKING_TEMPLATE,
    "template_file": "chat_template.jinja",
    "reply": "<think>\n",
    "tokens": TAGS,
}

FAMILIES: Mapping[str, Family] = {
    "qwen2_vl": Family(
        "Qwen2VLForConditionalGeneration",
        {
            **_FLAT,
            "vision_config": {
                **_PATCHES,
                "depth": 2,
                "embed_dim": VISION,
                "hidden_size": HIDDEN,
                "in_chans": 3,
                "mlp_ratio": 2,
                "num_heads": VISION_HEADS,
            },
        },
        {
            **_CLIP,
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2VLProcessor",
            "min_pixels": 56 * 56,
            "max_pixels": 14 * 14 * 4 * 1280,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
        },
        tied=True,
        system="You are a helpful assistant.",
    ),
    "qwen2_5_vl": Family(
        "Qwen2_5_VLForConditionalGeneration",
        {
            **_FLAT,
            "vision_config": {
                **_PATCHES,
                "depth": 3,
                "fullatt_block_indexes": [1],
                "hidden_act": "silu",
                "hidden_size": VISION,
                "in_chans": 3,
                "intermediate_size": 64,
                "num_heads": VISION_HEADS,
                "out_hidden_size": HIDDEN,
                "tokens_per_second": 2,
                "window_size": 112,
            },
        },
        {
            **_CLIP,  # as in UI-TARS-1.5: the bounds are in `size` too
            "do_convert_rgb": True,
            "do_normalize": True,
            "do_rescale": True,
            "do_resize": True,
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2_5_VLProcessor",
            "max_pixels": 2116800,
            "merge_size": 2,
            "min_pixels": 3136,
            "patch_size": 14,
            "resample": 3,
            "rescale_factor": 1 / 255,
            "size": {"max_pixels": 2116800, "min_pixels": 3136},
            "temporal_patch_size": 2,
        },
        tied=False,
        system="You are a helpful assistant.",
    ),
    "qwen3_vl": Family(
        "Qwen3VLForConditionalGeneration",
        {"text_config": _DEEP_TEXT, "vision_config": _DEEP_VISION},
        _NEWER_PREPROCESSOR,
        tied=True,
        template_file="chat_template.json",
    ),
    "qwen3_vl_moe": Family(
        "Qwen3VLMoeForConditionalGeneration",
        {
            "text_config": {
                **_DEEP_TEXT,
                **_MIXTURE,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
                "model_type": "qwen3_vl_moe_text",
                "norm_topk_prob": True,
            },
            "vision_config": {**_DEEP_VISION, "model_type": "qwen3_vl_moe"},
        },
        _NEWER_PREPROCESSOR,
        tied=False,
        template_file="chat_template.json",
    ),
    "qwen3_5": Family(
        "Qwen3_5ForConditionalGeneration",
        {"text_config": _HYBRID_TEXT, "vision_config": _HYBRID_VISION},
        _NEWER_PREPROCESSOR,
        **_THINKS,
    ),
    "qwen3_5_moe": Family(
        "Qwen3_5MoeForConditionalGeneration",
        {
            "text_config": {
                **{key: value for key, value in _HYBRID_TEXT.items() if key != "intermediate_size"},
                **_MIXTURE,
                "model_type": "qwen3_5_moe_text",
                "shared_expert_intermediate_size": SHARED,
            },
            "vision_config": {**_HYBRID_VISION, "model_type": "qwen3_5_moe"},
        },
        _NEWER_PREPROCESSOR,
        **_THINKS,
    ),
}

WORDS = ("Thought", "Action", "click", "start", "box", "Ġthe", "Ġbutton", "assistant", "system")
"""Each is one token, and so are the pieces it is merged from; all other text is spelt in bytes."""


def build(
    model_type: str,
    folder: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tied: bool | None = None,
    max_shard_size: str = "5GB",
    sizes: Mapping[str, Any] | None = None,
) -> Path:
    """Write a folder of one class of FAMILIES and return it; the same seed gives the same weights.

    `tied` overrides whether input and output embeddings are shared; weights beyond `max_shard_size`
    are written in shards with an index. `sizes` stands in place of the class's own `config`.
    """
    family = FAMILIES[model_type]
    if sizes is not None:
        family = replace(family, config=sizes)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(family)
    token_ids = tokenizer.get_vocab()
    tied = family.tied if tied is None else tied
    config: dict[str, Any] = {
        **copy.deepcopy(dict(family.config)),
        "architectures": [family.architecture],
        "bos_token_id": token_ids["<|endoftext|>"],
        "eos_token_id": token_ids["<|im_end|>"],
        "image_token_id": token_ids["<|image_pad|>"],
        "model_type": model_type,
        "tie_word_embeddings": tied,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "video_token_id": token_ids["<|video_pad|>"],
        "vision_start_token_id": token_ids["<|vision_start|>"],
        "vision_end_token_id": token_ids["<|vision_end|>"],
    }
    if "tie_word_embeddings" in config.get("text_config", {}):
        config["text_config"]["tie_word_embeddings"] = tied  # vLLM reads this one
    _write(folder / "config.json", config)
    model = AutoModelForImageTextToText.from_config(
        AutoConfig.from_pretrained(folder, local_files_only=True)
    )
    _initialise(model, seed)
    transformers_logging.disable_progress_bar()
    model.to(dtype)
    unused = _prediction_head(model) if "mtp_num_hidden_layers" in _text(config) else {}
    published = published_state(model)
    state = {**(published or model.state_dict()), **unused} if unused else published
    model.save_pretrained(
        folder,
        state_dict=state or None,
        max_shard_size=max_shard_size,
        save_original_format=not published,
    )
    _write(folder / "config.json", config)  # in place of the one that transformers writes
    tokenizer.save_pretrained(folder)
    _write_template(folder, family)
    _write(folder / "preprocessor_config.json", family.preprocessor)
    _write(
        folder / "generation_config.json",
        {
            "do_sample": True,
            "eos_token_id": [token_ids["<|im_end|>"], token_ids["<|endoftext|>"]],
            "pad_token_id": token_ids["<|endoftext|>"],
            "repetition_penalty": 1.05,
            "temperature": 0.1,
            "top_k": 1,
        },
    )
    return folder


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config.json about the language model."""
    return config.get("text_config", config)


def _tokenizer(family: Family) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes, the words above with their pieces, and Qwen's special tokens, in its order."""
    vocabulary = {letter: index for index, letter in enumerate(sorted(ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        left = word[0]
        for letter in word[1:]:
            if left + letter not in vocabulary:
                vocabulary[left + letter] = len(vocabulary)
                merges.append((left, letter))
            left += letter
    for special in SPECIALS:
        vocabulary[special] = len(vocabulary)
    if (count := len(vocabulary) + len(family.tokens)) >= EMBEDDING_ROWS:
        raise ValueError(f"{count} tokens need more than {EMBEDDING_ROWS} rows")
    kind = Qwen3_5Tokenizer if family.architecture.startswith("Qwen3_5") else Qwen2Tokenizer
    tokenizer = kind(
        vocab=vocabulary,
        merges=merges,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token=None,
        extra_special_tokens=[token for token in SPECIALS if token != "<|im_end|>"],
        model_max_length=32768,
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in family.tokens])
    return tokenizer


def _initialise(model: torch.nn.Module, seed: int) -> None:
    """Set values under which every parameter matters and no token is certain.

    A norm's weights lie about the value that its class begins with: 1, or 0 where the class adds 1 to them. The
    heads of a DeltaNet layer forget at different rates: the slowest remembers hundreds of tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("A_log"):
                parameter.copy_(0.1 * noise + torch.linspace(-6.0, 0.0, len(parameter)))
            elif name.endswith("conv1d.weight"):
                parameter.copy_(0.5 * noise)
            elif parameter.ndim >= 2:
                parameter.copy_(0.1 * noise)
            else:
                parameter.copy_(0.1 * noise + parameter.mean().round())


def _prediction_head(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return a layer that predicts a further token, which the files have and transformers does not load.

    It has the names of the published files (`mtp.*`): a layer with full attention, what joins a hidden state
    to the next token's embedding, and norms.
    """
    last = model.model.language_model.layers[-1]
    tensors = {f"mtp.layers.0.{name}": value.clone() for name, value in last.state_dict().items()}
    norm = last.input_layernorm.weight
    joined = torch.cat([model.get_input_embeddings().weight[: len(norm)]] * 2, 1)
    tensors["mtp.fc.weight"] = joined.clone()
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors[f"mtp.{name}.weight"] = norm.clone()
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _write_template(folder: Path, family: Family) -> None:
    """Write the chat template into the file where the class's checkpoints have it."""
    template = family.template.replace("DEFAULT", json.dumps(family.system))
    path = folder / family.template_file
    if path.suffix == ".jinja":
        path.write_text(template, encoding="utf-8")
        return
    settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    _write(path, {**settings, "chat_template": template})


def _write(path: Path, tree: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(tree, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def main() -> None:
    """Build one folder from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model_type", choices=list(FAMILIES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    build(options.model_type, options.folder, seed=options.seed)


if __name__ == "__main__":
    main()
