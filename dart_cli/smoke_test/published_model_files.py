"""The small files of a model whose folder is not on this machine, from its family's published shape.

    write_published_files   writes config.json, tokenizer, chat template and preprocessor, but no weights

The shapes are in dart_cli/config/published.py. The tokenizer is trained here: it splits text by Qwen's rules,
has Qwen's special tokens, and merges pairs of bytes as they occur in the prompts that dart ships. It has some
thousands of tokens instead of 151,643, so texts have a fifth more tokens or more. A screen has as many tokens
as with the model's own tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dart_cli.config.architecture import HYBRID, ID_KEYS, TOKENS
from dart_cli.config.families import PROMPTS
from dart_cli.config.published import published_of
from dart_cli.config.schema import Config

VOCABULARY = 4096
"""Tokens of the tokenizer, without the special ones."""

CALL_PIECES = ("><", "></", "]</", ">[", "=a", "=com", "=status")
"""Tokens of Qwen's published vocabulary that can join the tags of an XML call.

They are chosen: dart's prompts make no tokens of them, and without them the tokenizer splits no call into
tokens that all differ (spellings.py). The tokens in qwen.tiktoken of dashscope 2.0.2 include them.
"""

_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The pieces into which Qwen2's tokenizer splits a text."""
SPECIALS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>"),
    *("<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
"""Qwen's special tokens in their order, which follow the ordinary tokens."""
CHAT_MESSAGE = """\
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}<|im_end|>"""
"""One message of our own chat templates."""
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
"""The chat template of the families; DEFAULT is their system message, in quotes."""
TAGS = (
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<think>", "</think>"),
)
"""Tokens of Qwen3.5 behind SPECIALS that are not special: texts contain them."""
THINKING_TEMPLATE = """\
{%- macro shown(content) -%}
{%- if content is string -%}{{ content }}{%- else -%}
{%- for part in content or [] -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- set question = namespace(index=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' and not shown(message.content).strip().startswith('<tool_response>') -%}
{%- set question.index = loop.index0 -%}
{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- set text = shown(message.content) | trim -%}
{%- if message.role == 'assistant' -%}
{%- set answer = text.split('</think>')[-1].lstrip('\\n') -%}
{%- set thought = text[:text.find('</think>')].split('<think>')[-1] if '</think>' in text else '' -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if loop.index0 > question.index -%}
{{- '<think>\\n' + thought | trim + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- answer + '<|im_end|>\\n' -}}
{%- elif message.role == 'tool' -%}
{%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' + text + '\\n</tool_response>' -}}
{%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' + text + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n<think>\\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}{{- '\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}
"""
"""What Qwen3.5's template does, in our words: texts are trimmed, a reply begins within a thought, and thoughts
before the last question are left out."""


def write_published_files(config: Config, folder: Path) -> str:
    """Write the files of `config`'s model to `folder`; return the checkpoint whose shape they have.

    Raises ModelError as `published_of` does.
    """
    kind, checkpoint, tree, preprocessor, system = published_of(config)
    thinks = kind in HYBRID
    tokenizer = _tokenizer(config)
    if thinks:
        tokenizer.add_tokens([AddedToken(token, normalized=False) for token in TAGS])
    token_ids = tokenizer.get_vocab()
    ids = {
        "bos_token_id": token_ids["<|endoftext|>"],
        "eos_token_id": token_ids["<|im_end|>"],
        "image_token_id": token_ids["<|image_pad|>"],
        "video_token_id": token_ids["<|video_pad|>"],
        "vision_start_token_id": token_ids["<|vision_start|>"],
        "vision_end_token_id": token_ids["<|vision_end|>"],
    }
    if config.policy.pointing == "pointer":
        ids |= {key: token_ids[token] for key, token in zip(ID_KEYS, TOKENS, strict=True)}
    text = dict(tree.get("text_config", {}))
    rows = -(-len(token_ids) // 64) * 64  # some rows belong to no token, as in the checkpoints
    config_json = {**tree, **ids, "model_type": kind, "_name_or_path": checkpoint}
    if text:
        config_json["text_config"] = {**text, "vocab_size": rows}
    else:
        config_json["vocab_size"] = rows
    folder.mkdir(parents=True)
    template = THINKING_TEMPLATE if thinks else CHAT_TEMPLATE
    tokenizer.chat_template = template.replace("DEFAULT", json.dumps(system))
    tokenizer.save_pretrained(folder)
    image_config = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, **preprocessor}
    image_config["image_processor_type"] = "Qwen2VLImageProcessor"
    for name, value in (("config.json", config_json), ("preprocessor_config.json", image_config)):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    return checkpoint


def _tokenizer(config: Config) -> PreTrainedTokenizerFast:
    """Train the tokenizer on the prompts that dart ships, on the configuration's, and on CALL_PIECES."""
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
    texts += CALL_PIECES
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
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
            token for token in (*SPECIALS, *pointer) if token not in ("<|im_end|>", "<|endoftext|>")
        ],
        clean_up_tokenization_spaces=False,
        model_max_length=32768,
    )
