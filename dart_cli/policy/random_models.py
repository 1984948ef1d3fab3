"""Small random model folders of every supported class, laid out as real checkpoints are.

    build    one folder: config.json, weights, tokenizer, chat template, preprocessor

Embeddings have more rows than the vocabulary has tokens, as in the real ones, and the generation
config sets penalties that no engine may apply. Tests and benchmarks use such folders, and
`dart doctor --parity` can be tried on one where no real checkpoint is available:

    python -m dart_cli.policy.random_models qwen3_vl runs/models/qwen3
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen2Tokenizer
from transformers.utils import logging as transformers_logging

from dart_cli.policy.families import EMBEDDING_ROWS, FAMILIES, Family
from dart_cli.policy.vocabulary import CHAT_MESSAGE

SPECIALS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>"),
    *("<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
"""In Qwen's order, after the ordinary tokens."""

WORDS = ("Thought", "Action", "click", "start", "box", "Ġthe", "Ġbutton", "assistant", "system")
"""Each is one token, and so are the pieces it is merged from; all other text is spelt in bytes."""

_TEMPLATE = """\
{%- for message in messages -%}
{%- if loop.first and message.role != 'system' and DEFAULT -%}
<|im_start|>system
{{ DEFAULT }}<|im_end|>
{% endif -%}
CHAT_MESSAGE
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""


def build(
    model_type: str,
    folder: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tied: bool | None = None,
    max_shard_size: str = "5GB",
) -> Path:
    """Write a folder of one class of FAMILIES and return it; the same seed gives the same weights.

    `tied` overrides whether input and output embeddings are shared; weights beyond `max_shard_size`
    are written in shards with an index.
    """
    family = FAMILIES[model_type]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    known = tokenizer.get_vocab()
    config = {
        **family.config,
        "architectures": [family.architecture],
        "bos_token_id": known["<|endoftext|>"],
        "eos_token_id": known["<|im_end|>"],
        "image_token_id": known["<|image_pad|>"],
        "model_type": model_type,
        "tie_word_embeddings": family.tied if tied is None else tied,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "video_token_id": known["<|video_pad|>"],
        "vision_start_token_id": known["<|vision_start|>"],
        "vision_end_token_id": known["<|vision_end|>"],
    }
    _write(folder / "config.json", config)
    model = AutoModelForImageTextToText.from_config(
        AutoConfig.from_pretrained(folder, local_files_only=True)
    )
    _initialise(model, seed)
    transformers_logging.disable_progress_bar()
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    _write(folder / "config.json", config)  # in place of the one that transformers writes
    tokenizer.save_pretrained(folder)
    _write_template(folder, family)
    _write(folder / "preprocessor_config.json", family.preprocessor)
    _write(
        folder / "generation_config.json",
        {
            "do_sample": True,
            "eos_token_id": [known["<|im_end|>"], known["<|endoftext|>"]],
            "pad_token_id": known["<|endoftext|>"],
            "repetition_penalty": 1.05,
            "temperature": 0.1,
            "top_k": 1,
        },
    )
    return folder


def _tokenizer() -> Qwen2Tokenizer:
    """Bytes, the words above with their pieces, and Qwen's special tokens, in its order."""
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
    if len(vocabulary) >= EMBEDDING_ROWS:
        raise ValueError(f"{len(vocabulary)} tokens need more than {EMBEDDING_ROWS} rows")
    return Qwen2Tokenizer(
        vocab=vocabulary,
        merges=merges,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token=None,
        extra_special_tokens=[each for each in SPECIALS if each != "<|im_end|>"],
        model_max_length=32768,
    )


def _initialise(model: torch.nn.Module, seed: int) -> None:
    """Values under which every parameter matters and no token is certain."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                parameter.copy_(0.1 * noise)
            else:
                parameter.copy_(0.1 * noise + (0.0 if name.endswith("bias") else 1.0))


def _write_template(folder: Path, family: Family) -> None:
    """Write the chat template into the file where the class's checkpoints have it."""
    template = _TEMPLATE.replace("CHAT_MESSAGE", CHAT_MESSAGE)
    template = template.replace("DEFAULT", json.dumps(family.system))
    path = folder / family.template_file
    held = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    _write(path, {**held, "chat_template": template})


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
